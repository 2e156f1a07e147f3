"""Make the pictures of the documentation: python docs/generate_images.py.

Pictures of experiments are drawn from the records in ``results``; ``results/figures.toml`` lists
the records of each. The report is photographed by Chromium, driven by playwright.
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl
from playwright.sync_api import sync_playwright

from wqk import demo_model, show, write_report
from wqk._files import append_lines
from wqk._style import save_figure
from wqk.reporting.demo import demo_figure, demo_table
from wqk.tables.run import METRICS, SCORES, create_run
from wqk.tables.schema import SCHEMA
from wqk_lab.figures import Sources, convert, draw, read_sources
from wqk_lab.figures.dose import loss_by_scale

IMAGES = Path(__file__).parent / "images"
CONVERSIONS = Path(__file__).parent / "results" / "conversion" / "scores.csv"
TRAINING = Path(__file__).parent / "results" / "make-train" / "training.csv"
CHROMIUM = "/usr/bin/chromium"


STARTS = ("random", "published", "published-independent", "published-values", "symmetric")
RECORDS = Path(__file__).parent / "results" / "table1-cpu"
RECIPE = Path(__file__).parents[1] / "examples" / "table1-starts.toml"


def recorded(folder: Path) -> Sources:
    """The runs of some starts, five seeds each, as folders that their records are written to."""
    options = tomllib.loads(RECIPE.read_text(encoding="utf-8"))["recipe"]
    recipe = {key.replace("-", "_"): value for key, value in options.items() if key != "seeds"}
    losses, scores = (pl.read_csv(RECORDS / f"{name}.csv") for name in ("losses", "scores"))
    for start in STARTS:
        for seed in range(1, 6):
            name = f"{start}-{seed}"
            recipe_of_run = recipe | {"mode": "encoder", "init": start, "seed": seed}
            run = create_run(
                folder / name, {"recipe": recipe_of_run, "corpus": {"folder": "wikipedia"}}
            )
            losses_of_run = losses.filter(start=start, seed=seed).drop("start", "seed")
            append_lines(run.folder / METRICS, *losses_of_run.sort("step").to_dicts())
            shared = dict.fromkeys(SCHEMA) | {
                "checkpoint": name,
                "stack": "encoder",
                "kind": "self",
                "circuit": "qk",
                "distance": 0,
                "status": "ok",
            }
            rows = scores.filter(start=start, seed=seed).drop("start", "seed").sort("step", "layer")
            append_lines(run.folder / SCORES, *(shared | row for row in rows.to_dicts()))
    return read_sources(folder)


def doses() -> pl.DataFrame:
    """What `wqk_lab.figures.dose.dose_rows` gives for the recorded runs, three seeds each.

    Where a start's norm was not set, its factor is that of the recorded norms at step 0.
    """
    first = pl.read_csv(RECORDS / "scores.csv").filter(step=0)
    norms = {start: first.filter(start=start)["norm"].mean() for start in STARTS}
    runs = pl.read_csv(RECORDS / "runs.csv").filter(
        pl.col("init").is_in(["random", "symmetric"]),
        pl.col("init_head_norm").is_null(),
        ~pl.col("run").str.starts_with("symmetric-norm-1.4"),  # the drawn norm is 1.42
        pl.col("seed") <= 3,
        mode="encoder",
        corpus="wikipedia",
        learning_rate=5e-4,
        step=1000,
    )
    drawn = pl.col("init").replace_strict({s: n / norms["random"] for s, n in norms.items()})
    norm, value = pl.col("init_norm"), pl.col("init_values")
    scales = {
        "norm_ratio": (norm.fill_null(drawn), value),
        "value_ratio": (value.fill_null(1), norm),
    }
    return pl.concat(
        runs.filter(other_factor.is_null()).select(
            pl.lit(scale).alias("scale"),
            pl.col("init").alias("start"),
            factor.cast(pl.Float64).alias("factor"),
            "seed",
            "step",
            "held_out_loss",
            pl.lit(3.0).alias("level"),
            pl.col("first_below_3").cast(pl.Float64).alias("first_below"),
        )
        for scale, (factor, other_factor) in scales.items()
    )


def photograph(page: Path, picture: Path, width: int = 1200, height: int = 1150) -> None:
    """The top of an HTML page, as a browser shows it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": height})
        tab.goto(page.resolve().as_uri(), timeout=0)
        tab.wait_for_timeout(1000)  # charts are drawn when they come into view
        tab.screenshot(path=picture, timeout=0)
        browser.close()


def mistaken() -> None:
    """Where a conversion differs: one layer in its rotary order, two heads left as initialized."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.sameness.conversions import edit, initialized, pairs, right

    from wqk import same
    from wqk.checkpoints.modules import StateDict

    tensors, config = right("llama")
    edit("qk", pairs, layer="1")(tensors, config)
    edit("q", initialized, layer="2")(tensors, config)
    originals = StateDict(*right("llama"), "original")
    comparison = same(originals, StateDict(tensors, config, "my-conversion"))
    save_figure(comparison.plot(), IMAGES / "where.png")


def main() -> None:
    """Make every picture."""
    table = demo_table()
    save_figure(demo_figure(table), IMAGES / "demo.png")
    save_figure(demo_figure(table, narrow=True), IMAGES / "demo-narrow.png")
    blocks = table.details.blocks if table.details else ()
    save_figure(draw("fig2", Sources(blocks=blocks)), IMAGES / "fig2.png")
    show(demo_model("encoder"), 0, coupling=True).save(IMAGES / "coupling.png")
    show(demo_model("decoder"), 3).save(IMAGES / "form.png")
    records = pl.read_csv(CONVERSIONS, schema=convert.CONVERT_SCHEMA)
    save_figure(convert.dose_curves(records), IMAGES / "convert.png")
    mistaken()
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.html")
        write_report(table, report)
        photograph(report, IMAGES / "report.png")
    pair = read_sources(TRAINING)
    save_figure(draw("fig3", pair), IMAGES / "fig3.png")
    save_figure(draw("s3", replace(pair, published=True)), IMAGES / "figs3.png")
    with TemporaryDirectory() as folder:
        runs = recorded(Path(folder))
        save_figure(draw("s5", runs), IMAGES / "figs5.png")
        save_figure(draw("losses", runs), IMAGES / "losses.png")
    save_figure(loss_by_scale(doses()), IMAGES / "dose.png")


if __name__ == "__main__":
    main()
