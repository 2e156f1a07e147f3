"""Writes the tables of docs/results/*.md from the records and contrasts beside them.

python docs/generate_results.py
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from wqk._console import counted
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
from wqk_lab.runs.descent import descent
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
    "On {text}, of the loss that all attention scores explain, an encoder's symmetric part alone "
    "keeps {0}, its skew part {1}, and S/2 {2}; a decoder's keep {3}, {4} and {5} (means over {6} "
    "encoders and {7} decoders)."
)

# Models that were trained again, and the parts that are compared with random halves of their size.
RERUN = {
    "rerun-small-encoder": "small encoder",
    "rerun-small-decoder": "small decoder",
    "rerun-encoder": "encoder of `make train`",
    "rerun-decoder": "decoder of `make train`",
}

# What a verdict says of a part that was predicted to do worse or better than random halves.
THAN_RANDOM = {
    ("less", "reproduced"): "worse than random halves",
    ("less", "too small"): "worse than random halves, by less than would matter",
    ("less", "reversed"): "better than random halves",
    ("less", "not reproduced"): "not worse than random halves",
    ("less", "undecided"): "neither worse nor better than random halves, as far as can be told",
    ("more", "reproduced"): "better than random halves",
    ("more", "too small"): "better than random halves, by less than would matter",
    ("more", "reversed"): "worse than random halves",
    ("more", "not reproduced"): "not better than random halves",
    ("more", "undecided"): "neither worse nor better than random halves, as far as can be told",
}

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
    """Shares of the steps saved, from the recorded losses."""
    lines = ["| start | against | to step | seeds | steps saved |", "|:--|:--|--:|--:|--:|"]
    for start, other, last in SPEEDUPS:
        steps = range(SPACING, last + 1, SPACING)
        looks = [records[f"loss at step {step}"] for step in steps]
        losses = by_seed(*(look[cell] for cell in (other, start) for look in looks))
        saved = [
            saved_share(
                *(
                    descent(np.array(steps, float), curve, SMOOTHING * SCHEDULE)
                    for curve in np.reshape(both, (2, -1))
                )
            )
            for both in losses.values()
        ]
        share = interval(paired(saved), "+.0%")
        lines.append(f"| `{start}` | `{other}` | {last:,} | {len(losses)} | {share} |")
    return lines


def conversions() -> pl.DataFrame:
    """The records of conversions."""
    return pl.read_csv(FOLDER / "conversion" / "scores.csv", schema=CONVERT_SCHEMA)


def doses_table(quantity: str) -> list[str]:
    """A score of each condition against steps of conversion: means over layers and seeds."""
    rows = over_seeds(conversions().filter(pl.col("layer").is_null()))
    shown = rows.filter(pl.col("step").is_in(DOSES), quantity=quantity)
    steps = sorted(set(shown["step"]))
    return _conditions_table(shown, "step", [f"step {step}" for step in steps])


def layers_table(quantity: str) -> list[str]:
    """The same by layer, at the last step."""
    rows = over_seeds(conversions().drop_nulls("layer"))
    shown = rows.filter(pl.col("step") == pl.col("step").max(), quantity=quantity)
    layers = sorted(set(shown["layer"]))
    return _conditions_table(shown, "layer", [f"layer {layer}" for layer in layers])


def kept_table() -> list[str]:
    """What is left of the parent's form at the last step, and the symmetry of the rest."""
    names = {"kept_symmetric": "symmetric part", "kept_skew": "skew part", "new_symmetry": "rest"}
    rows = conversions().filter(pl.col("layer").is_null(), pl.col("step") == pl.col("step").max())
    shown = over_seeds(rows, tuple(names)).with_columns(
        pl.col("quantity").replace_strict({name: at for at, name in enumerate(names)})
    )
    return _conditions_table(shown, "quantity", [*names.values()])


def _conditions_table(rows: pl.DataFrame, column: str, heads: list[str]) -> list[str]:
    """Mean and half the width of its 95 % interval (none for one seed), by text and condition."""
    lines = [f"| text | continued from | loss | attention | {' | '.join(heads)} |"]
    lines.append(f"|:--|:--|:--|:--|{'--:|' * len(heads)}")
    keys = ["corpus", "origin", "loss", "attention"]
    for key, group in rows.group_by(keys, maintain_order=True):
        cells = [
            (f"{value:+.2f}" + (f" ± {high - value:.2f}" if high is not None else "")).replace(
                "-", "−"
            )
            for value, high in group.sort(column).select("value", "high").rows()
        ]
        named = [str(name).replace(", ", " → ") for name in key]
        lines.append(f"| {' | '.join(named + cells)} |")
    return lines


def made(name: str, text: str) -> str:
    """A page with its tables made anew; RunError if a bold sentence names no measured contrast."""
    page = PAGES[name]
    for title, table in page.tables.items():
        begin, end = f"<!-- {title}: begin -->", f"<!-- {title}: end -->"
        before, rest = text.split(begin)
        text = "\n".join([before + begin, "", *table(), "", end + rest.split(end)[1]])
    if wrong := unnamed(text, page.names()):
        raise RunError(f"bold, and no measured contrast named: {'; '.join(wrong)}")
    return text


def summary() -> list[str]:
    """One paragraph to quote; RunError if it no longer follows from its contrasts."""
    estimates, outcomes = {}, {}
    for claim in paper_claims().claims:
        estimates[claim.number], outcomes[claim.number] = claim.shown_estimate, claim.verdict
    for folder in FOLDERS:
        for claim, verdict, result in verdicts(folder):
            outcomes[claim.contrast] = verdict
            if result is not None:
                estimates[claim.contrast] = interval_of(result, *result.allowed)
    if wrong := [name for name, verdict in REQUIRED.items() if outcomes[name] != verdict]:
        raise RunError(f"the paragraph to quote says otherwise than {', '.join(wrong)}")
    parts = than_random("rerun-small-encoder", "rerun-small-decoder")
    template = " ".join(SUMMARY.read_text(encoding="utf-8").split())
    text = template.replace("{parts}", parts).replace("{directionality}", why_columns())
    for name, estimate in estimates.items():
        text = text.replace(f"{{{name}}}", estimate)
    return [f"> {text}"]


def than_random(*models: str) -> str:
    """Sentences about parts alone and random halves as large as the models' own, from verdicts."""
    found = {claim.contrast: (claim, verdict) for claim, verdict, _ in verdicts(PARTS)}
    sentences = []
    for model in models:
        clauses = []
        for part in ("symmetric", "skew"):
            claim, verdict = found[f"{model}-{part}"]
            if verdict != "not run":
                words = THAN_RANDOM[claim.predicts, verdict]
                clauses.append(f"with its {part} part alone does {words} (`{claim.contrast}`)")
        if clauses:
            who = with_article(RERUN[model])
            sentences.append(f"{who[0].upper()}{who[1:]} {', and '.join(clauses)}.")
    return " ".join(sentences)


def with_article(noun: str) -> str:
    """A noun with its indefinite article.

    Examples
    --------
    >>> with_article("encoder"), with_article("small encoder")
    ('an encoder', 'a small encoder')
    """
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def prenorm_table() -> list[str]:
    """Scores of the pre-norm runs by layer, as printed: means and deviations over seeds."""
    rows = pl.read_csv(FOLDER / "prenorm" / "scores.csv")
    layers = sorted(set(rows["layer"]))
    lines = [
        f"| score | runs | {' | '.join(f'layer {layer}' for layer in layers)} |",
        f"|:--|:--|{'--:|' * len(layers)}",
    ]
    keys = ["score", "text", "mode"]
    for (score, text, mode), group in rows.group_by(keys, maintain_order=True):
        cells = [
            f"{mean:+.2f} ± {deviation:.2f}".replace("-", "−")
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
    """Fine-tuned models from two starts: each, their difference, and what would have been found."""
    rows = pl.read_csv(FOLDER / "glue" / "scores.csv")
    starts = {name: rows.filter(start=name) for name in ("random", "published")}
    lines = [f"| | {' | '.join(GLUE_COLUMNS.values())} |", f"|:--|{'--:|' * len(GLUE_COLUMNS)}"]
    for name, runs in starts.items():
        cells = [", ".join(f"{v:.3f}".lstrip("0") for v in runs[c]) for c in GLUE_COLUMNS]
        lines.append(f"| {name}, seeds 1, 2, 3 | {' | '.join(cells)} |")
    found = [paired((starts["published"][c] - starts["random"][c]).to_list()) for c in GLUE_COLUMNS]
    differences = [interval(difference, "+.3f") for difference in found]
    lines.append(f"| published against random [95 %] | {' | '.join(differences)} |")
    detectable = [f"{difference.detectable:.3f}" for difference in found]
    lines.append(f"| would have been found (power 80 %) | {' | '.join(detectable)} |")
    words = rows.filter(start="bag of words")
    cells = ["" if words[c][0] is None else f"{words[c][0]:.3f}" for c in GLUE_COLUMNS]
    lines.append(f"| a bag of words | {' | '.join(cells)} |")
    return lines


def why_columns() -> str:
    """The question of directionality, as far as its runs are open."""
    found = {claim.contrast: verdict for claim, verdict, _ in verdicts(FOLDER / "directionality")}
    if found["sgd-against-recorded"] == "reproduced":
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


def shares() -> pl.DataFrame:
    """The records of parts of the scores, those with a control of the scores' size last."""
    files = (pl.read_csv(PARTS / name) for name in ("shares.csv", "controls.csv"))
    return pl.concat(files, how="diagonal_relaxed")


def shares_table() -> list[str]:
    """The share that each part keeps: means over seeds, and their ends; a lone model's interval."""
    lines = [
        f"| models, step | seeds | explained | {' | '.join(SHOWN_PARTS)} |",
        f"|:--|--:|--:|{'--:|' * len(SHOWN_PARTS)}",
    ]
    for title, group in _cells(shares().filter(pl.col("layer").is_null()).drop_nulls("share")):
        parts = {part: rows for (part,), rows in group.group_by("part")}
        explained = parts["none"]["loss"].mean() - parts["whole"]["loss"].mean()
        ends = ("share", "share") if title[1] > 1 else ("low", "high")
        cells = [f"{explained:.3f}"]
        for name in SHOWN_PARTS:
            if name not in parts:
                cells.append("–")
                continue
            rows = parts[name]
            low, high = rows[ends[0]].min(), rows[ends[1]].max()
            cells.append(f"{rows['share'].mean():.0%} [{low:.0%}, {high:.0%}]".replace("-", "−"))
        lines.append(f"| {title[0]} | {title[1]} | {' | '.join(cells)} |")
    return lines


def controls_table() -> list[str]:
    """The size of the control by layer: means over seeds, and their ends."""
    sizes = pl.read_csv(PARTS / "controls.csv").drop_nulls("control_size")
    layers = sorted(set(sizes["layer"]))
    lines = [
        f"| models, step | seeds | {' | '.join(f'layer {layer}' for layer in layers)} |",
        f"|:--|--:|{'--:|' * len(layers)}",
    ]
    for title, group in _cells(sizes):
        cells = []
        for layer in layers:
            size = group.filter(layer=layer)["control_size"]
            shown = f"{size.mean():.2f} [{size.min():.2f}, {size.max():.2f}]" if len(size) else "–"
            cells.append(shown)
        lines.append(f"| {title[0]} | {title[1]} | {' | '.join(cells)} |")
    return lines


def curvatures_table() -> list[str]:
    """Derivatives and curvatures along a factor of a half, over the explained loss: means."""
    names = ["symmetric", "skew", "random", "all"]
    columns = [f"{what}, {name}" for what in ("slope", "curvature") for name in names]
    lines = [
        f"| models, step | seeds | {' | '.join(columns)} |",
        f"|:--|--:|{'--:|' * len(columns)}",
    ]
    for title, group in _cells(shares().drop_nulls("curvature")):
        by_part = {part: rows for (part,), rows in group.group_by("part")}
        cells = []
        for what, digits in (("derivative", 3), ("curvature", 2)):
            for name in names:
                value = by_part[name][what].mean() if name in by_part else None
                cells.append("–" if value is None else f"{value:+.{digits}f}".replace("-", "−"))
        lines.append(f"| {title[0]} | {title[1]} | {' | '.join(cells)} |")
    return lines


def _cells(rows: pl.DataFrame) -> Iterator[tuple[tuple[str, int], pl.DataFrame]]:
    """The rows of each model and step, with their title and number of seeds."""
    for (model, step), group in rows.sort("model", "step").group_by(
        "model", "step", maintain_order=True
    ):
        title = str(model) if step is None else f"{model}, {step:,}"
        yield (title, group["seed"].n_unique()), group


def in_words() -> list[str]:
    """What the pairs and the models with a control show, with their numbers."""
    shown = shares().filter(pl.col("layer").is_null()).drop_nulls("share")
    shown = shown.filter((pl.col("step") == 1600) | pl.col("model").str.starts_with("rerun-"))
    means = shown.group_by("model", "part").agg(pl.col("share").mean())
    kept = {(row["model"], row["part"]): f"{row['share']:.0%}" for row in means.to_dicts()}
    count = dict(shown.group_by("model").agg(pl.col("seed").n_unique()).iter_rows())
    sentences = []
    for text, prefix in TEXTS.items():
        models = [f"{prefix}{mode}" for mode in ("encoder", "decoder")]
        numbers = [kept[m, p] for m in models for p in ("symmetric", "skew", "half")]
        numbers += [str(count[model]) for model in models]
        sentences.append(PAIR_WORDS.format(*numbers, text=text))
    for model, name in RERUN.items():
        if (model, "random") in kept:
            part = [kept[model, p] for p in ("symmetric", "skew", "random")]
            size = [kept[model, f"random, size of {p}"] for p in ("symmetric", "skew")]
            seeds = counted(count[model], "seed")
            sentences.append(
                f"Of {with_article(name)} ({seeds}), the two "
                f"parts keep {part[0]} and {part[1]}, random halves as large as its own {part[2]}, "
                f"and random parts as large as the two {size[0]} and {size[1]}."
            )
    numbers = re.sub(r"-(?=\d+%)", "−", " ".join(sentences))
    return [f"> {numbers} {than_random(*RERUN)}"]


def ends_table(folder: Path) -> list[str]:
    """Losses and scores of the models of a folder: mean ± deviation over seeds."""
    shown = {
        "held_out_loss": ("held-out loss", ".3f"),
        "mean_symmetry": ("symmetry", "+.2f"),
        "mean_directionality": ("directionality (excess)", "+.2f"),
    }
    lines = [
        f"| models | seeds | {' | '.join(title for title, _ in shown.values())} |",
        f"|:--|--:|{'--:|' * len(shown)}",
    ]
    rows = pl.read_csv(folder / "runs.csv")
    for (name,), group in rows.group_by("start", maintain_order=True):
        cells = []
        for column, (_, form) in shown.items():
            deviation = group[column].std() or 0
            cells.append(f"{group[column].mean():{form}} ± {deviation:{form[-3:]}}")
        lines.append(f"| {name} | {group.height} | {' | '.join(cells)} |".replace("-0", "−0"))
    return lines


def models_table() -> list[str]:
    """Scores of the models with linear attention and with softmax: mean ± deviation over seeds."""
    rows = pl.read_csv(FOLDER / "linear" / "runs.csv")
    shown = {"held_out_loss": "held-out loss"}
    for score in ("symmetry", "directionality"):
        shown |= {f"mean_{score}": score, f"{score}_0": "layer 0", f"{score}_1": "layer 1"}
    lines = [f"| model | seeds | {' | '.join(shown.values())} |", f"|:--|--:|{'--:|' * len(shown)}"]
    for (model,), group in rows.group_by("start", maintain_order=True):
        cells = [
            ("{:.2f} ± {:.2f}" if name == "held_out_loss" else "{:+.2f} ± {:.2f}")
            .format(group[name].mean(), group[name].std() or 0)
            .replace("-", "−")
            for name in shown
        ]
        lines.append(f"| {model} | {group.height} | {' | '.join(cells)} |")
    return lines


# Records of our runs that come with the package, for `wqk lab claims`.
SHIPPED = Path(__file__).parents[1] / "src" / "wqk_lab" / "claims" / "data"

# Names of recipes in `wqk lab claims`, by the parents' text and by the kind of attention.
PARENTS = {"wikipedia": "pre-norm, Wikipedia", "reviews": "pre-norm, reviews"}
ATTENTIONS = {"softmax": "softmax beside linear attention", "linear": "linear attention"}


def trained_alike() -> pl.DataFrame:
    """Scores of encoders and decoders that were trained alike: means over layers at the end."""
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
    """The records that the contrasts of starts are made of."""
    records = read_records(FOLDER)
    rows = {
        (contrast.measure, cell, seed, value)
        for contrast in read_definition(FOLDER)[0]
        for cell in contrast.cells
        for seed, value in records[contrast.measure][cell].items()
    }
    return pl.DataFrame(sorted(rows), schema=["measure", "start", "seed", "value"], orient="row")


def symmetries_of_starts() -> pl.DataFrame:
    """Median and range over layers of the symmetry of starts, at step 1,000."""
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
        What makes its tables besides that of the claims, by their titles.
    """

    folder: Path | None
    own_tables: Mapping[str, Callable[[], list[str]]]

    @property
    def tables(self) -> dict[str, Callable[[], list[str]]]:
        """What makes all tables of the page, by their titles."""
        if self.folder is None:
            return dict(self.own_tables)
        return {"claims": partial(claims_table, self.folder), **self.own_tables}

    def names(self) -> Collection[str]:
        """The names of measured contrasts that a bold sentence of the page may follow from."""
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
        path.write_text(made(name, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
