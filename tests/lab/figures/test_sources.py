"""Contents of paths: runs, folders of runs, surveys, tables, details."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests import small
from tests.command import run
from tests.lab.figures.making import make_run, row, table

import wqk
from wqk._files import append_lines
from wqk.errors import OutputError, RunError, TableError
from wqk.reporting.demo import demo_table
from wqk.tables.run import METRICS
from wqk_lab.figures import Sources, draw, numbers, read_sources, table_text
from wqk_lab.figures.results import training_results
from wqk_lab.runs.seeds import paired as paired_over_seeds
from wqk_lab.runs.speedup import speedups


def test_each_kind_of_path_is_known(tmp_path: Path) -> None:
    for name in ("b", "a"):
        make_run(tmp_path / "runs" / name)
    (tmp_path / "survey").mkdir()
    table(row(0)).write(tmp_path / "survey" / "scores.parquet")
    table(row(1), row(2)).write(tmp_path / "scores.csv")
    demo_table().details.write(tmp_path / "forms.npz")
    of_one_run = read_sources(tmp_path / "runs" / "a")
    assert [run.name for run in of_one_run.runs] == ["a"]
    paths = [tmp_path / name for name in ("runs", "survey", "scores.csv", "forms.npz")]
    sources = read_sources(*paths)
    assert read_sources() == Sources()
    assert Sources().scores is None
    assert [run.name for run in sources.runs] == ["a", "b"]
    assert sources.table.frame["layer"].to_list() == [0, 1, 2]
    assert len(sources.blocks) == 8
    assert sources.scores is not None
    assert len(sources.scores) == 3 + 2 * 9


def test_a_checkpoint_is_scanned_for_figures_of_models(tmp_path: Path) -> None:
    fresh = small.llama(layers=2)
    small.save_model(tmp_path / "tiny", fresh)
    scanned = read_sources(tmp_path / "tiny", models=True).table
    assert scanned is not None
    expected = wqk.scan(tmp_path / "tiny", heads=False).frame
    assert scanned.frame["symmetry"].equals(expected["symmetry"])
    file = read_sources(tmp_path / "tiny" / "model.safetensors", models=True).table
    assert file is not None
    with pytest.raises(TableError, match="contains no training run and no survey"):
        read_sources(tmp_path / "tiny")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TableError, match="contains no training run and no survey"):
        read_sources(tmp_path / "empty", models=True)
    with pytest.raises(TableError, match="no such file or folder"):
        read_sources(tmp_path / "absent.parquet", models=True)
    out = tmp_path / "fig2.csv"
    sized = ("--parameters", "encoder=1M")
    run("lab", "figure", "fig2", "--from", "demo:encoder", *sized, "--out", out)
    assert "own," in out.read_text(encoding="utf-8")


def test_the_folder_of_a_monitor_is_a_run_of_which_only_scores_are_known(tmp_path: Path) -> None:
    for name, model in (("one", small.bert()), ("other", small.bert(is_decoder=True))):
        monitor = wqk.Monitor(model, tmp_path / name / "scores.jsonl", every=1)
        for step in (0, 1):
            monitor(step)
    curves = numbers("fig3", read_sources(tmp_path))
    assert set(curves["mode"]) == {"encoder", "decoder"}
    assert set(curves["step"]) == {0, 1}
    assert set(numbers("fig3", read_sources(tmp_path / "other"))["mode"]) == {"decoder"}
    draw("fig3", read_sources(tmp_path / "one"))
    with pytest.raises(RunError, match="one encoder, one decoder, or one of each"):
        numbers("fig3", read_sources(tmp_path, tmp_path / "one"))


def stepped(folder: Path, name: str, stack: str) -> Path:
    """A run's folder with two checkpoints, an encoder's or a decoder's."""
    model = small.bert(is_decoder=stack == "decoder")
    for step in (10, 20):
        model.save_pretrained(folder / name / f"checkpoint-{step}")
    return folder / name


@pytest.mark.parametrize("name", ["fig3", "s5"])
def test_figures_of_training_take_all_that_has_steps(name: str, tmp_path: Path) -> None:
    runs = [stepped(tmp_path, stack, stack) for stack in ("encoder", "decoder")]
    checkpoints = [run / name for run, name in product(runs, ("checkpoint-10", "checkpoint-20"))]
    tables = [wqk.scan(checkpoint) for checkpoint in checkpoints]
    wqk.join(tables).write(tmp_path / "scores.csv")
    wqk.survey(runs, out=tmp_path / "survey", jobs=1)
    expected = numbers(name, read_sources(*runs))
    assert set(expected["step"]) == {10, 20}
    for source in ("scores.csv", "survey"):
        rows = numbers(name, read_sources(tmp_path / source))
        assert rows.drop("runs").equals(expected.drop("runs")), source
    draw(name, read_sources(*runs)).draw_without_rendering()
    # What wqk watch has written next to the checkpoints is used, also for deleted ones.
    list(wqk.watch(runs[0], out=runs[0] / "wqk-scores", until=20, every=0.01))
    shutil.rmtree(runs[0] / "checkpoint-10")
    assert numbers(name, read_sources(*runs)).drop("runs").equals(expected.drop("runs"))


def test_several_models_of_a_stack_are_rows_of_s3_and_s4(tmp_path: Path) -> None:
    runs = [stepped(tmp_path, name, "encoder") for name in ("one", "two")]
    sources = read_sources(*runs)
    assert set(numbers("s4", sources)["comparison"]) == {"one", "two"}
    assert len(draw("s4", sources).axes) == 4
    with pytest.raises(RunError, match="draw s3 or s4, which show all"):
        numbers("fig3", sources)
    with pytest.raises(RunError, match="are not drawn together"):
        numbers("s3", Sources((*sources.runs_with_steps, make_run(tmp_path / "trained"))))


def test_no_stack_and_no_namesake_is_dropped(tmp_path: Path) -> None:
    scores = {"kind": "self", "symmetry": 0.1, "directionality": 0.1, "directionality_excess": 0.1}
    parts = []
    for name in ("one", "two"):
        for stack in ("encoder", "decoder"):
            for step in (1, 2):
                place = {"checkpoint": f"{name}/checkpoint-{step}", "step": step, "stack": stack}
                parts.append(row(0, **scores, **place))
    sources = Sources(table=table(*parts))
    stacks = set(product(("one", "two"), ("encoder", "decoder")))
    for figure in ("s3", "s4"):
        assert {*numbers(figure, sources).select("comparison", "mode").iter_rows()} == stacks
    assert set(numbers("s5", sources)["start"]) == {f"{name}, {stack}" for name, stack in stacks}
    namesakes = Sources((*sources.runs_with_steps, *sources.runs_with_steps))
    for figure in ("s3", "s4", "s5"):
        with pytest.raises(RunError, match="two models have the name one and the stack encoder"):
            numbers(figure, namesakes)


@pytest.mark.parametrize("name", ["fig3", "s3", "s4", "s5"])
def test_a_table_is_not_dropped_for_published_curves(name: str, tmp_path: Path) -> None:
    table(row(0)).write(tmp_path / "scores.parquet")
    with pytest.raises(
        TableError, match=f"{name} draws scores over training; no model of the table has several"
    ):
        numbers(name, read_sources(tmp_path / "scores.parquet"))


def test_what_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="contains no training run and no survey; expected"):
        read_sources(tmp_path)
    for absent in ("absent.parquet", "runs"):
        with pytest.raises(TableError, match=f"{absent}: no such file or folder"):
            read_sources(tmp_path / absent)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(RunError, match="expected one JSON object"):
        read_sources(tmp_path)


def test_own_models_are_next_to_the_rows_of_table_s2_or_below() -> None:
    named = [row(0), row(0, checkpoint="google-bert/bert-base-uncased", symmetry=0.123)]
    without_bert = table_text("tableS2", Sources(table=table(named[0])))
    with_bert = table_text("tableS2", Sources(table=table(*named)))
    assert "| model (encoder) | 0.10 | ± [0.00, 0.00] |" in without_bert
    assert "Own median" not in without_bert
    assert "with own results next to them; below them, own models" in with_bert
    assert "0.12" in with_bert
    assert "| model (encoder) |  |  | 0.10 | ± [0.00, 0.00] |" in with_bert


def test_losses_at_the_end_stand_below_table_1(tmp_path: Path) -> None:
    runs = (
        *(make_run(tmp_path / f"{s}", seed=s) for s in (1, 2)),
        make_run(tmp_path / "decoder", mode="decoder"),
        make_run(tmp_path / "paired", init="paired"),
    )
    first, second = (run.metrics["held_out_loss"][-1] for run in runs[:2])
    random, paired = training_results(runs)
    size = "3 layers of width 8, 40 steps of 4 × 16 tokens"
    assert (random.size, random.dataset, random.initialization) == (size, "wikipedia", "random")
    assert random.loss == pytest.approx((first + second) / 2)
    assert random.loss_interval is not None
    assert random.seeds == 2
    assert (paired.initialization, paired.loss_interval, paired.seeds) == ("paired", None, 1)
    text = table_text("table1", Sources(runs))
    # No printed line has changed but for the number of its seeds, and own lines come below.
    printed = table_text("table1", Sources()).splitlines()
    lines = [line.removesuffix(" 1 |") for line in text.splitlines()]
    for old in printed[4:18]:
        assert any(line.startswith(old) for line in lines), old
    assert text.index(size) > text.index("Red Pajama (+ symmetric)")
    assert table_text("table1", Sources(runs), ".tex").startswith("% ")


def test_cells_of_one_name_and_runs_that_end_apart_are_errors(tmp_path: Path) -> None:
    reference = make_run(tmp_path / "one")
    for conflicting, message in (
        (
            make_run(tmp_path / "two", learning_rate=0.5),
            "are two cells, .*two and .*one, which differ in learning_rate; give",
        ),
        (make_run(tmp_path / "short", (0, 20), seed=2), "end at the steps 20, 40"),
    ):
        with pytest.raises(RunError, match=message):
            training_results((reference, conflicting))


def test_tables_with_the_wrong_sources(tmp_path: Path) -> None:
    short = make_run(tmp_path / "short", (0,))
    for arguments, message in (
        (("table1", Sources(table=table(row(0)))), "table1 takes training runs"),
        (("table1", Sources((short,))), "got 1 other runs"),
        (("tableS2", Sources(blocks=demo_table().details.blocks)), "tableS2 takes scores"),
        (("table1", Sources(), ".pdf"), r"written as .md or .tex; got the ending '.pdf'"),
    ):
        with pytest.raises((OutputError, RunError, TableError), match=message):
            table_text(*arguments)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"directionality_excess": 0.0}, "rows without a stack"),
        ({"stack": "encoder", "directionality": 0.0}, "has no directionality_excess"),
    ],
)
def test_a_bare_table_without_a_column_of_the_figure_is_refused(
    columns: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A missing directionality left two panels empty, without a word."""
    rows = [
        {"step": step, "layer": 0, "symmetry": 0.1, "symmetry_null": 0.0, **columns}
        for step in (0, 10)
    ]
    pl.DataFrame(rows).write_csv(tmp_path / "bare.csv")
    with pytest.raises(RunError, match=message):
        numbers("fig3", read_sources(tmp_path / "bare.csv"))


def test_table_1_has_the_speed_up_over_the_random_start_of_the_same_recipe(tmp_path: Path) -> None:
    """Other recipes, modes and seeds are no baseline."""
    runs = []
    for init, shift in (("random", 0.0), ("paired", -0.2)):
        for seed in (1, 2, 3):
            run = make_run(tmp_path / f"{init}-{seed}", (), init=init, seed=seed, accumulation=3)
            for step in range(0, 41, 2):
                loss = 3 - step / 20 + (shift * (1 + seed / 4) + seed / 50) * (step > 0)
                append_lines(run.folder / METRICS, {"step": step, "held_out_loss": loss})
            runs.append(run)
    elsewhere = make_run(tmp_path / "elsewhere", (0, 20), init="skew", corpus="reviews")
    random, paired, skew = training_results((*runs, elsewhere))
    assert (random.speed_up, random.speed_up_interval) == (None, None)
    assert random.size == "3 layers of width 8, 40 steps of 12 × 16 tokens"
    assert (skew.speed_up, skew.dataset) == (None, "reviews")
    assert skew.size == "3 layers of width 8, 20 of 40 steps of 4 × 16 tokens"
    (comparison,) = speedups(runs)
    saved = comparison.over_seeds("saved")
    assert 0 < saved.mean < 1
    assert (paired.speed_up, paired.speed_up_interval) == (saved.mean, (saved.low, saved.high))
    ends = [run.metrics["held_out_loss"][-1] for run in runs[3:]]
    loss = paired_over_seeds(ends)
    assert (paired.loss, paired.loss_interval) == (loss.mean, (loss.low, loss.high))
    text = table_text("table1", Sources(tuple(runs)))
    low, high = (f"{100 * end:.0f}".replace("-", "−") for end in (saved.low, saved.high))
    assert f"{100 * saved.mean:.0f} [{low}, {high}] %" in text


def test_a_configuration_of_ones_own_has_no_sizes_in_table_1(tmp_path: Path) -> None:
    run = make_run(tmp_path / "own", config={"model_type": "bert"})
    (result,) = training_results((run,))
    assert result.size == "own model, 40 steps of 4 × 16 tokens"
