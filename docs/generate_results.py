"""Write the tables of docs/results/*.md from the records and contrasts beside them.

python docs/generate_results.py
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from wqk.errors import RunError
from wqk_lab.claims import claims as paper_claims
from wqk_lab.figures.convert import CONVERT_SCHEMA, over_seeds
from wqk_lab.runs.contrasts import (
    DEFINITION,
    Records,
    claims_table,
    contrasts_table,
    interval_of,
    read_definition,
    read_records,
    results,
    unnamed,
    verdicts,
)
from wqk_lab.runs.descent import Descent, descent
from wqk_lab.runs.seeds import by_seed, interval, paired
from wqk_lab.runs.speedup import saved_share

FOLDER = Path(__file__).parent / "results"

# Candidate, baseline, and the step up to which they are compared.
SPEEDUPS = [
    *((start, "random", 1000) for start in ("published", "published-independent")),
    *((start, "random", 1000) for start in ("published-values", "symmetric", "symmetric-norm-1")),
    *(
        (f"{start}-to-3000", "random-to-3000", 3000)
        for start in ("published", "published-independent")
    ),
    ("published-to-3000", "published-independent-to-3000", 3000),
]
# Steps of conversion that the page lists.
DOSES = (0, 20, 40, 80, 160, 320, 800)

# The pairs of `make train`: their texts, and the beginnings of their names.
TEXTS = {"Python's docstrings": "", "Wikipedia": "wikipedia-"}
PAIR_WORDS = (
    "On {text} an encoder's symmetric part alone keeps {0} of the loss that all scores explain, "
    "and its skew part {1}. A decoder's parts keep {2} and {3}."
)

# Models that were trained again and measured with a control of the scores' size, with their texts:
# the pair of `make train`, and small models.
PAIRS_AGAIN = {
    "rerun-encoder": "Python's docstrings",
    "rerun-wikipedia-encoder": "Wikipedia",
    "rerun-decoder": "Python's docstrings",
    "rerun-wikipedia-decoder": "Wikipedia",
}
SMALL_AGAIN = {
    "rerun-small-encoder": "Wikipedia",
    "rerun-small-reviews-encoder": "reviews",
    "rerun-small-decoder": "Wikipedia",
    "rerun-small-reviews-decoder": "reviews",
}

# Phrases for verdicts on a part that was predicted to do worse or better than random halves.
THAN_RANDOM = {
    ("less", "reproduced"): "worse than random halves",
    ("less", "too small"): "worse than random halves, by less than would matter",
    ("less", "reversed"): "better than random halves",
    ("less", "not reproduced"): "no worse than random halves",
    ("more", "reproduced"): "better than random halves",
    ("more", "too small"): "better than random halves, by less than would matter",
    ("more", "reversed"): "worse than random halves",
    ("more", "not reproduced"): "no better than random halves",
}

UNDECIDED = "neither worse nor better than random halves beyond chance"

# The paragraph to quote, with the estimates of contrasts and of the paper's claims to be filled in.
SUMMARY = FOLDER / "summary.template"
# The verdicts that the paragraph follows from: with others it is not written.
REQUIRED = {
    **dict.fromkeys(["S1", "S4", "S5", "S6", "S7", "D1", "D9", "D10"], "holds"),
    **dict.fromkeys(["S2", "D4"], "open"),
    "D3": "contradicted",
    **dict.fromkeys(
        [
            "mask-in-masked-symmetry",
            "loss-under-full-symmetry",
            "symmetric-heads-plateau",
            "published",
            "scale",
        ],
        "reproduced",
    ),
    **dict.fromkeys(["either-sign-plateau", "both-interaction"], "not reproduced"),
    **dict.fromkeys(["symmetry-at-scale", "symmetric-heads-3000"], "undecided"),
}

SCHEDULE, SPACING, SMOOTHING = 3000, 100, 0.05


def speedups_table(records: Records) -> list[str]:
    """Return a table of the shares of the steps that starts save, from the recorded losses."""
    lines = ["| start | against | to step | seeds | steps saved |", "|:--|:--|--:|--:|--:|"]
    for candidate, baseline, last in SPEEDUPS:
        steps = np.arange(SPACING, last + 1, SPACING, dtype=float)
        baseline_curves = loss_curves(records, baseline, steps)
        candidate_curves = loss_curves(records, candidate, steps)
        curve_pairs = by_seed(baseline_curves, candidate_curves).values()
        shares = [saved_share(*curves) for curves in curve_pairs]
        saved = interval(paired(shares), "+.0%")
        lines.append(f"| `{candidate}` | `{baseline}` | {last:,} | {len(shares)} | {saved} |")
    return lines


def loss_curves(records: Records, start: str, steps: np.ndarray) -> dict[int, Descent]:
    """Return the falling curve of a start's losses, by seed."""
    losses_by_step = [records[f"loss at step {step:.0f}"][start] for step in steps]
    curves = {}
    for seed, losses in by_seed(*losses_by_step).items():
        curves[seed] = descent(steps, np.array(losses), SMOOTHING * SCHEDULE)
    return curves


# Learning rates of the starts that were trained with several, as printed, and the ends of the names
# of their cells.
LEARNING_RATES = {"2.5·10⁻⁴": "-rate-0.00025", "5·10⁻⁴": "", "10⁻³": "-rate-0.001"}


def learning_rates_table() -> list[str]:
    """Return a table of the steps at which three seeds leave the plateau, by learning rate."""
    runs = pl.read_csv(FOLDER / "table1-cpu" / "runs.csv").filter(step=1000)
    step_of_run = dict(runs.select("run", "first_below_3").iter_rows())
    lines = [
        "| learning rate | random below 3.0 at step | `symmetric` | `published` |",
        "|:--|:--|:--|:--|",
    ]
    for rate, suffix in LEARNING_RATES.items():
        cells = []
        for start in ("random", "symmetric", "published"):
            steps = [step_of_run[f"{start}{suffix}-{seed}"] for seed in (1, 2, 3)]
            cells.append(", ".join("–" if step is None else str(step) for step in steps))
        lines.append(f"| {rate} | {' | '.join(cells)} |")
    return lines


def conversions() -> pl.DataFrame:
    """Return the records of conversions."""
    return pl.read_csv(FOLDER / "conversion" / "scores.csv", schema=CONVERT_SCHEMA)


def doses_table(quantity: str) -> list[str]:
    """Return a table of a score by condition and step: means over layers and seeds."""
    rows = over_seeds(conversions().filter(pl.col("layer").is_null()))
    shown = rows.filter(pl.col("step").is_in(DOSES), quantity=quantity)
    steps = sorted(set(shown["step"]))
    return _conditions_table(shown, "step", [f"step {step}" for step in steps])


def layers_table(quantity: str) -> list[str]:
    """Return a table of a score by condition and layer, at the last step."""
    rows = over_seeds(conversions().drop_nulls("layer"))
    shown = rows.filter(pl.col("step") == pl.col("step").max(), quantity=quantity)
    layers = sorted(set(shown["layer"]))
    return _conditions_table(shown, "layer", [f"layer {layer}" for layer in layers])


def kept_table() -> list[str]:
    """Return a table of what is left of the parent's form, and of the rest's symmetry."""
    names = {"kept_symmetric": "symmetric part", "kept_skew": "skew part", "new_symmetry": "rest"}
    rows = conversions().filter(pl.col("layer").is_null(), pl.col("step") == pl.col("step").max())
    shown = over_seeds(rows, tuple(names)).with_columns(
        pl.col("quantity").replace_strict({name: at for at, name in enumerate(names)})
    )
    return _conditions_table(shown, "quantity", [*names.values()])


def _conditions_table(rows: pl.DataFrame, column: str, heads: list[str]) -> list[str]:
    """Return a table by text and condition: means, and half the width of their 95 % intervals.

    A mean of one seed has no interval.
    """
    lines = [f"| text | continued from | loss | attention | {' | '.join(heads)} |"]
    lines.append(f"|:--|:--|:--|:--|{'--:|' * len(heads)}")
    keys = ["corpus", "origin", "loss", "attention"]
    for key, group in rows.group_by(keys, maintain_order=True):
        cells = [str(name).replace(", ", " → ") for name in key]
        for mean, high in group.sort(column).select("value", "high").iter_rows():
            reach = "" if high is None else f" ± {high - mean:.2f}"
            cells.append(signed(mean, 2) + reach)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def signed(value: float, digits: int) -> str:
    """Return a number with its sign, a true minus.

    Examples
    --------
    >>> signed(-0.5, 2), signed(1, 1)
    ('−0.50', '+1.0')
    """
    return f"{value:+.{digits}f}".replace("-", "−")


def regenerated(name: str, text: str) -> str:
    """Return the text of a page with new tables.

    Raises
    ------
    RunError
        A bold sentence names no measured contrast.
    """
    page = PAGES[name]
    for title, table in page.tables.items():
        begin, end = f"<!-- {title}: begin -->", f"<!-- {title}: end -->"
        before, old_table_and_after = text.split(begin)
        after = old_table_and_after.split(end)[1]
        text = "\n".join([before + begin, "", *table(), "", end + after])
    if baseless := unnamed(text, page.names()):
        raise RunError(f"bold, and no measured contrast named: {'; '.join(baseless)}")
    return text


def summary() -> list[str]:
    """Return the paragraph to quote.

    Raises
    ------
    RunError
        The paragraph no longer follows from its contrasts.
    """
    estimates, outcomes = {}, {}
    for claim in paper_claims().claims:
        estimates[claim.number], outcomes[claim.number] = claim.shown_estimate, claim.verdict
    for folder in FOLDERS:
        for claim, verdict, result in verdicts(folder):
            outcomes[claim.contrast] = verdict
            if result is not None:
                estimates[claim.contrast] = interval_of(result, *result.allowed)
    if changed := [name for name, verdict in REQUIRED.items() if outcomes[name] != verdict]:
        raise RunError(f"the paragraph to quote says otherwise than {', '.join(changed)}")
    paragraphs = []
    for paragraph in SUMMARY.read_text(encoding="utf-8").strip().split("\n\n"):
        text = " ".join(paragraph.split())
        text = text.replace("{parts}", " ".join(than_random(PAIRS_AGAIN)))
        text = text.replace("{directionality}", why_columns())
        for name, estimate in estimates.items():
            text = text.replace(f"{{{name}}}", estimate)
        paragraphs.append(f"> {text}")
    return "\n>\n".join(paragraphs).split("\n")


def than_random(models: Mapping[str, str]) -> list[str]:
    """Return sentences that compare parts alone with random halves as large, from verdicts.

    Parameters
    ----------
    models
        Names of models in the records, with their texts.
    """
    sentences = []
    for mode in ("encoder", "decoder"):
        text_of_model = {model: text for model, text in models.items() if model.endswith(mode)}
        for part in ("skew", "symmetric"):
            outcome = part_alone(text_of_model, part)
            sentences.append(f"With its {part} part alone {with_article(mode)} does {outcome}.")
    return sentences


def part_alone(text_of_model: Mapping[str, str], part: str) -> str:
    """Return the verdicts on a part of models, with their texts and contrasts."""
    outcomes = {outcome[0].contrast: outcome for outcome in verdicts(PARTS)}
    texts_by_phrase: dict[str, list[str]] = {}
    contrasts_by_phrase: dict[str, list[str]] = {}
    for model, text in text_of_model.items():
        claim, verdict, result = outcomes[f"{model}-{part}"]
        if result is None:
            continue
        contrast = f"`{claim.contrast}`"
        if verdict != "undecided" and result.borrows:
            contrast += " by borrowed variance"
        phrase = UNDECIDED
        if verdict != "undecided":
            phrase = THAN_RANDOM[claim.predicts, verdict]
        texts_by_phrase.setdefault(phrase, []).append(text)
        contrasts_by_phrase.setdefault(phrase, []).append(contrast)
    phrases = []
    for phrase, texts in texts_by_phrase.items():
        contrasts = ", ".join(contrasts_by_phrase[phrase])
        phrases.append(f"{phrase} on {' and '.join(texts)} ({contrasts})")
    return ", and ".join(phrases)


def with_article(noun: str) -> str:
    """Return a noun with its indefinite article.

    Examples
    --------
    >>> with_article("encoder"), with_article("small encoder")
    ('an encoder', 'a small encoder')
    """
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def prenorm_table() -> list[str]:
    """Return a table of the pre-norm runs' scores by layer: means and deviations over seeds."""
    rows = pl.read_csv(FOLDER / "prenorm" / "scores.csv")
    layers = sorted(set(rows["layer"]))
    lines = [
        f"| score | runs | {' | '.join(f'layer {layer}' for layer in layers)} |",
        f"|:--|:--|{'--:|' * len(layers)}",
    ]
    keys = ["score", "text", "mode"]
    for (score, text, mode), group in rows.group_by(keys, maintain_order=True):
        cells = [
            f"{signed(mean, 2)} ± {deviation:.2f}"
            for mean, deviation in group.sort("layer").select("mean", "deviation").iter_rows()
        ]
        lines.append(f"| {score} | {text}, {mode} | {' | '.join(cells)} |")
    return lines


GLUE_COLUMNS = {
    "cola": "CoLA (Matthews)",
    "stsb": "STS-B (Pearson)",
    "held_out_loss": "held-out loss before (nats)",
}


def glue_table() -> list[str]:
    """Return a table of fine-tuned models: each start, the difference, and the power."""
    rows = pl.read_csv(FOLDER / "glue" / "scores.csv")
    starts = {name: rows.filter(start=name) for name in ("random", "published")}
    lines = [f"| | {' | '.join(GLUE_COLUMNS.values())} |", f"|:--|{'--:|' * len(GLUE_COLUMNS)}"]
    for name, runs in starts.items():
        cells = []
        for column in GLUE_COLUMNS:
            scores = [f"{score:.3f}".removeprefix("0") for score in runs[column]]
            cells.append(", ".join(scores))
        lines.append(f"| {name}, seeds 1, 2, 3 | {' | '.join(cells)} |")
    differences = []
    for column in GLUE_COLUMNS:
        difference = starts["published"][column] - starts["random"][column]
        differences.append(paired(difference.to_list()))
    cells = [interval(difference, "+.3f") for difference in differences]
    lines.append(f"| published against random [95 %] | {' | '.join(cells)} |")
    cells = [f"{difference.detectable:.3f}" for difference in differences]
    lines.append(f"| would have been found (power 80 %) | {' | '.join(cells)} |")
    bag_of_words = rows.filter(start="bag of words").row(0, named=True)
    cells = []
    for column in GLUE_COLUMNS:
        score = bag_of_words[column]
        cells.append("" if score is None else f"{score:.3f}")
    lines.append(f"| a bag of words | {' | '.join(cells)} |")
    return lines


def why_columns() -> str:
    """Return the question of directionality, as far as its runs leave the question open."""
    outcomes = {
        claim.contrast: verdict for claim, verdict, _ in verdicts(FOLDER / "directionality")
    }
    if outcomes["sgd-against-recorded"] == "reproduced":
        return ", why columns dominate with Adam and less with SGD (`sgd-against-recorded`)"
    return ", why columns dominate"


PARTS = FOLDER / "parts"

# Columns of the table of shares.
SHOWN_PARTS = (
    "symmetric",
    "skew",
    "half",
    "random",
    "random, size of symmetric",
    "random, size of skew",
    "next head",
)

# Models that were measured along training, and the steps that only their table shows.
ALONG_TRAINING = ("rerun-wikipedia-encoder", "rerun-wikipedia-decoder")
STEPS_ALONG = (0, 200, 800)
LEAST_EXPLAINED = 0.05  # nats


def shares() -> pl.DataFrame:
    """Return the records of parts of the scores, those with a control of the scores' size last."""
    files = (pl.read_csv(PARTS / name) for name in ("shares.csv", "controls.csv"))
    return pl.concat(files, how="diagonal_relaxed")


def shares_table() -> list[str]:
    """Return a table of the shares that parts keep: means over seeds, and the ends.

    A single model has the interval over blocks of text instead of the ends.
    """
    lines = [
        f"| models, step | seeds | explained | {' | '.join(SHOWN_PARTS)} |",
        f"|:--|--:|--:|{'--:|' * len(SHOWN_PARTS)}",
    ]
    rows = shares().filter(pl.col("layer").is_null()).drop_nulls("share")
    is_along = pl.col("model").is_in(ALONG_TRAINING) & pl.col("step").is_in(STEPS_ALONG)
    rows = rows.filter(~is_along.fill_null(value=False))
    return lines + share_lines(rows)


def training_table() -> list[str]:
    """Return a table of the shares that parts keep along training, of seeds with all steps."""
    rows = pl.read_csv(PARTS / "controls.csv").filter(pl.col("layer").is_null())
    # Before training scores explain nothing, and most runs have no share.
    rows = rows.filter(pl.col("model").is_in(ALONG_TRAINING), pl.col("step") > 0)
    rows = rows.drop_nulls("share")
    steps_of_run = pl.col("step").n_unique().over("model", "seed")
    complete = rows.filter(steps_of_run == steps_of_run.max())
    lines = [
        f"| models, step | seeds | explained | {' | '.join(SHOWN_PARTS)} |",
        f"|:--|--:|--:|{'--:|' * len(SHOWN_PARTS)}",
    ]
    return lines + share_lines(complete)


def share_lines(records: pl.DataFrame) -> list[str]:
    """Return a line for each model and step: shares, as means over seeds, and the ends.

    Where scores explain next to nothing, shares of this are noise, and left out.
    """
    lines = []
    for group in cells_of(records):
        by_part = {part: rows for (part,), rows in group.rows.group_by("part")}
        explained = by_part["none"]["loss"].mean() - by_part["whole"]["loss"].mean()
        ends = ("share", "share") if group.seeds > 1 else ("low", "high")
        cells = [f"{explained:.3f}"]
        for part in SHOWN_PARTS:
            if part not in by_part or explained < LEAST_EXPLAINED:
                cells.append("–")
                continue
            rows = by_part[part]
            low, high = rows[ends[0]].min(), rows[ends[1]].max()
            cells.append(f"{rows['share'].mean():.0%} [{low:.0%}, {high:.0%}]".replace("-", "−"))
        lines.append(f"| {group.title} | {group.seeds} | {' | '.join(cells)} |")
    return lines


def controls_table() -> list[str]:
    """Return a table of the control's size by layer: means over seeds, and the ends."""
    sizes = pl.read_csv(PARTS / "controls.csv").drop_nulls("control_size")
    layers = sorted(set(sizes["layer"]))
    lines = [
        f"| models, step | seeds | {' | '.join(f'layer {layer}' for layer in layers)} |",
        f"|:--|--:|{'--:|' * len(layers)}",
    ]
    for group in cells_of(sizes):
        cells = []
        for layer in layers:
            size = group.rows.filter(layer=layer)["control_size"]
            shown = f"{size.mean():.2f} [{size.min():.2f}, {size.max():.2f}]" if len(size) else "–"
            cells.append(shown)
        lines.append(f"| {group.title} | {group.seeds} | {' | '.join(cells)} |")
    return lines


def curvatures_table() -> list[str]:
    """Return a table of derivatives and curvatures along halves, over the explained loss: means."""
    directions = ["symmetric", "skew", "random", "all"]
    heads = [f"slope, {direction}" for direction in directions]
    heads += [f"curvature, {direction}" for direction in directions]
    lines = [
        f"| models, step | seeds | {' | '.join(heads)} |",
        f"|:--|--:|{'--:|' * len(heads)}",
    ]
    for group in cells_of(shares().drop_nulls("curvature")):
        by_direction = {part: rows for (part,), rows in group.rows.group_by("part")}
        cells = []
        for column, digits in (("derivative", 3), ("curvature", 2)):
            for direction in directions:
                if direction in by_direction:
                    cells.append(signed(by_direction[direction][column].mean(), digits))
                else:
                    cells.append("–")
        lines.append(f"| {group.title} | {group.seeds} | {' | '.join(cells)} |")
    return lines


@dataclass(frozen=True)
class RecordCell:
    """Records of one model at one step, over seeds."""

    title: str
    seeds: int
    rows: pl.DataFrame


def cells_of(rows: pl.DataFrame) -> Iterator[RecordCell]:
    """Yield the records of each model and step."""
    ordered = rows.sort("model", "step")
    for (model, step), group in ordered.group_by("model", "step", maintain_order=True):
        title = str(model) if step is None else f"{model}, {step:,}"
        yield RecordCell(title, group["seed"].n_unique(), group)


def in_words() -> list[str]:
    """Return sentences on what parts keep: in the pairs, and beside random halves."""
    rows = shares().filter(pl.col("layer").is_null()).drop_nulls("share")
    ends = rows.filter(pl.col("step") == pl.col("step").max().over("model"))
    means = ends.group_by("model", "part").agg(pl.col("share").mean())
    kept = {}
    for model, part, share in means.iter_rows():
        kept[model, part] = f"{share:.0%}".replace("-", "−")
    of_texts = []
    for text, prefix in TEXTS.items():
        numbers = []
        for model in (f"{prefix}encoder", f"{prefix}decoder"):
            numbers += [kept[model, "symmetric"], kept[model, "skew"]]
        of_texts.append(PAIR_WORDS.format(*numbers, text=text))
    lines = [f"> {' '.join(of_texts)}", ">"]
    lines += [f"> - {sentence}" for sentence in than_random(PAIRS_AGAIN)]
    lines += [">", "> In small models:", ">"]
    lines += [f"> - {sentence}" for sentence in than_random(SMALL_AGAIN)]
    return lines


def ends_table(folder: Path) -> list[str]:
    """Return a table of the models of a folder: mean ± deviation over seeds."""
    columns = ["held_out_loss", "mean_symmetry", "mean_directionality"]
    lines = [
        "| models | seeds | held-out loss | symmetry | directionality (excess) |",
        "|:--|--:|--:|--:|--:|",
    ]
    rows = pl.read_csv(folder / "runs.csv")
    for (name,), group in rows.group_by("start", maintain_order=True):
        cells = [mean_and_deviation(group[column]) for column in columns]
        lines.append(f"| {name} | {group.height} | {' | '.join(cells)} |")
    return lines


def models_table() -> list[str]:
    """Return a table of models with linear attention and with softmax: mean ± deviation."""
    rows = pl.read_csv(FOLDER / "linear" / "runs.csv")
    heads = {"held_out_loss": "held-out loss"}
    for score in ("symmetry", "directionality"):
        heads |= {f"mean_{score}": score, f"{score}_0": "layer 0", f"{score}_1": "layer 1"}
    lines = [f"| model | seeds | {' | '.join(heads.values())} |", f"|:--|--:|{'--:|' * len(heads)}"]
    for (model,), group in rows.group_by("start", maintain_order=True):
        cells = [mean_and_deviation(group[column], loss_digits=2) for column in heads]
        lines.append(f"| {model} | {group.height} | {' | '.join(cells)} |")
    return lines


def mean_and_deviation(values: pl.Series, loss_digits: int = 3) -> str:
    """Return mean ± deviation of losses, or of scores with their sign and two digits."""
    mean, deviation = values.mean(), values.std() or 0
    if values.name == "held_out_loss":
        return f"{mean:.{loss_digits}f} ± {deviation:.{loss_digits}f}"
    return f"{signed(mean, 2)} ± {deviation:.2f}"


# Records of our runs that come with the package, for `wqk lab claims`.
SHIPPED = Path(__file__).parents[1] / "src" / "wqk_lab" / "claims" / "data"

# Names of recipes in `wqk lab claims`, by the parents' text and by the kind of attention.
PARENTS = {"wikipedia": "pre-norm, Wikipedia", "reviews": "pre-norm, reviews"}
ATTENTIONS = {"softmax": "softmax beside linear attention", "linear": "linear attention"}


def trained_alike() -> pl.DataFrame:
    """Return scores of encoders and decoders trained alike: means over layers at the end."""
    parents = conversions().filter(
        pl.col("layer").is_null(), pl.col("origin").is_in(["encoder", "decoder"]), step=0
    )
    converted = parents.unique(["corpus", "origin", "seed"], keep="first").select(
        recipe=pl.col("corpus").replace_strict(PARENTS),
        mode="origin",
        seed="seed",
        symmetry="symmetry",
        directionality="directionality_excess",
    )
    ends = pl.read_csv(FOLDER / "linear" / "runs.csv").filter(pl.col("step") > 0)
    kind = pl.col("start").str.split(" ")
    linear = ends.select(
        recipe=kind.list.first().replace_strict(ATTENTIONS),
        mode=kind.list.last(),
        seed="seed",
        symmetry="mean_symmetry",
        directionality="mean_directionality",
    )
    rows = pl.concat([converted, linear]).with_columns(
        pl.col("symmetry", "directionality").round(5)
    )
    order = [*PARENTS.values(), *ATTENTIONS.values()]
    return rows.sort(
        pl.col("recipe").replace_strict({name: at for at, name in enumerate(order)}), "mode", "seed"
    )


def starts_compared() -> pl.DataFrame:
    """Return the records that the contrasts of starts are made of."""
    records = read_records(FOLDER)
    rows = {
        (contrast.measure, cell, seed, value)
        for contrast in read_definition(FOLDER)[0]
        for cell in contrast.cells
        for seed, value in records[contrast.measure][cell].items()
    }
    return pl.DataFrame(sorted(rows), schema=["measure", "start", "seed", "value"], orient="row")


def symmetries_of_starts() -> pl.DataFrame:
    """Return median and range over layers of the symmetry of starts, at step 1,000."""
    layers = pl.read_csv(FOLDER / "table1-cpu" / "scores.csv").filter(step=1000)
    symmetry = pl.col("symmetry")
    return (
        layers.group_by("start", "seed")
        .agg(
            symmetry.median().round(5).alias("median"),
            (symmetry.max() - symmetry.min()).round(5).alias("range"),
        )
        .sort("start", "seed")
    )


# The records that come with the package, and what makes them.
EXTRACTS = {
    "trained.csv": trained_alike,
    "starts.csv": starts_compared,
    "symmetries.csv": symmetries_of_starts,
}


def write_extracts(folder: Path = SHIPPED) -> None:
    """Write the records that come with the package, and the contrasts of starts."""
    for name, extract in EXTRACTS.items():
        extract().write_csv(folder / name)
    shutil.copyfile(FOLDER / DEFINITION, folder / DEFINITION)


@dataclass(frozen=True)
class Page:
    """A page of results.

    Attributes
    ----------
    folder
        The folder of its records and contrasts; None for the page of the paper's claims.
    own_tables
        The functions that make the page's tables besides that of the claims, by title.
    """

    folder: Path | None
    own_tables: Mapping[str, Callable[[], list[str]]]

    @property
    def tables(self) -> dict[str, Callable[[], list[str]]]:
        """The functions that make all tables of the page, by title."""
        if self.folder is None:
            return dict(self.own_tables)
        return {"claims": partial(claims_table, self.folder), **self.own_tables}

    def names(self) -> Collection[str]:
        """Return the names of measured contrasts that bold sentences may follow from."""
        if self.folder is None:
            return [claim.number for claim in paper_claims().claims]
        return results(self.folder)


PAGES = {
    "paper.md": Page(None, {"paper": lambda: paper_claims().markdown()}),
    "index.md": Page(FOLDER, {"summary": summary}),
    "table-1.md": Page(
        FOLDER,
        {
            "speedups": lambda: speedups_table(read_records(FOLDER)),
            "learning rates": learning_rates_table,
            "pre-norm": prenorm_table,
            "glue": glue_table,
        },
    ),
    "conversion.md": Page(
        FOLDER / "conversion",
        {
            "symmetry by step": partial(doses_table, "symmetry"),
            "change by step": partial(doses_table, "change_symmetry"),
            "symmetry by layer": partial(layers_table, "symmetry"),
            "change by layer": partial(layers_table, "change_symmetry"),
            "directionality by layer": partial(layers_table, "directionality_excess"),
            "kept": kept_table,
        },
    ),
    "parts.md": Page(
        FOLDER / "parts",
        {
            "shares": shares_table,
            "along training": training_table,
            "controls": controls_table,
            "curvatures": curvatures_table,
            "in words": in_words,
        },
    ),
    "starts.md": Page(FOLDER / "starts", {}),
    "linear.md": Page(FOLDER / "linear", {"models": models_table}),
    "directionality.md": Page(
        FOLDER / "directionality", {"models": partial(ends_table, FOLDER / "directionality")}
    ),
    "larger.md": Page(FOLDER / "larger", {}),
    "collator.md": Page(FOLDER / "collator", {"models": partial(ends_table, FOLDER / "collator")}),
}

# Folders with contrasts.
FOLDERS = list(dict.fromkeys(page.folder for page in PAGES.values() if page.folder is not None))


def write_contrasts() -> None:
    """Write all contrasts, each by itself, into files that the pages link to."""
    for folder in FOLDERS:
        lines = "\n".join(contrasts_table(folder)) + "\n"
        (folder / "all-contrasts.md").write_text(lines, encoding="utf-8")


def main() -> None:
    """Write the records that come with the package, and the pages."""
    write_extracts()
    for name in PAGES:
        path = FOLDER / name
        path.write_text(regenerated(name, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
