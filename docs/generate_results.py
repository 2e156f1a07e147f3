"""Writes the tables of docs/results/*.md from the records and contrasts beside them.

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
from wqk_lab.figures.convert import SCHEMA, over_seeds
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

# What the pairs of `make train` show, with their numbers to be filled in.
SIZED = ("random, size of symmetric", "random, size of skew")
TEXTS = {"Python's docstrings": "", "Wikipedia": "wikipedia-"}
WORDS = (
    "On {text}, of the loss that all attention scores explain, an encoder's symmetric part alone "
    "keeps {0}, its skew part {1}, and halves chosen at random {2}; a decoder's keep {3}, {4} and "
    "{5}. A random part as large as the encoder's symmetric part keeps {6}, one as large as its "
    "skew part {7} (means over {8} encoders and {9} decoders)."
)
# What follows, and the verdicts that it follows from: with others the page is not written.
FOLLOWS = (
    "So on both texts an encoder and a decoder do worse with either part alone than with a random "
    "half ({without}): neither part can be spared, and none does the work by itself. In decoders "
    "the symmetric part is the one that keeps more ({ahead}). That encoders rest on symmetry and "
    "decoders on direction does not follow: the symmetric part is ahead by more in encoders on the "
    "docstrings, by borrowed variance alone (`interaction`), by less on Wikipedia "
    "(`wikipedia-interaction`), and no more on both together (`both-interaction`)."
)
WITHOUT = [
    f"{prefix}{model}-{part}"
    for prefix in TEXTS.values()
    for model in ("encoder", "decoder")
    for part in ("symmetric", "skew")
]
AHEAD = ["decoder-parts", "wikipedia-decoder-parts"]
VERDICTS = {
    **dict.fromkeys([*WITHOUT, *AHEAD, "interaction"], "reproduced"),
    "wikipedia-interaction": "reversed",
    "both-interaction": "not reproduced",
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
    return pl.read_csv(FOLDER / "conversion" / "scores.csv", schema=SCHEMA)


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


def causes() -> list[str]:
    """What of the paper's picture holds as a cause, and what does not, in lists to quote."""
    told: dict[str, list[str]] = {title: [] for title in dict.fromkeys(OUTCOMES.values())}
    for folder in FOLDERS:
        for claim, verdict, result in verdicts(folder):
            if claim.quote and result is not None:
                unit = next((u for of, u in UNITS.items() if of in result.contrast.measure), "")
                effect = interval_of(result, *result.allowed).replace(" [", f"{unit} [")
                effect += ", by borrowed variance" * result.borrows
                said = f"{claim.quote}{'°' * claim.foretold} (`{claim.contrast}`, {effect})"
                told[OUTCOMES[verdict]].append(said)
    lines = []
    for title, some in told.items():
        lines += [f"> {title}:", ">", *(f"> - {one}" for one in some), ">"] if some else []
    note = (
        "All of it in models of two to four layers; intervals allow for all contrasts of a page. "
        "Sentences with ° were chosen before their runs, the others after some of them."
    )
    return [*lines, f"> {note}"]


def shares() -> pl.DataFrame:
    """The records of parts of the scores."""
    return pl.read_csv(FOLDER / "parts" / "shares.csv")


def shares_table() -> list[str]:
    """The share that each part keeps: means over seeds, and their ends; a lone model's interval."""
    names = ["symmetric", "skew", "random", "half", *SIZED, "next head"]
    lines = [
        f"| models, step | seeds | explained | {' | '.join(names)} |",
        f"|:--|--:|--:|{'--:|' * len(names)}",
    ]
    for title, group in _cells(shares().filter(pl.col("layer").is_null()).drop_nulls("share")):
        parts = {part: rows for (part,), rows in group.group_by("part")}
        explained = parts["none"]["loss"].mean() - parts["whole"]["loss"].mean()
        ends = ("share", "share") if title[1] > 1 else ("low", "high")
        cells = [
            f"{rows['share'].mean():.0%} [{rows[ends[0]].min():.0%}, {rows[ends[1]].max():.0%}]"
            for rows in (parts[name] for name in names)
        ]
        shown = " | ".join([f"{explained:.3f}", *cells]).replace("-", "−")
        lines.append(f"| {title[0]} | {title[1]} | {shown} |")
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
        cells = [
            f"{by_part[name][what].mean():+.{digits}f}".replace("-", "−")
            for what, digits in (("derivative", 3), ("curvature", 2))
            for name in names
        ]
        lines.append(f"| {title[0]} | {title[1]} | {' | '.join(cells)} |")
    return lines


def _cells(rows: pl.DataFrame) -> Iterator[tuple[tuple[str, int], pl.DataFrame]]:
    """The records of each cell and step, with its title and number of seeds."""
    for (name, step), group in rows.sort("model", "step").group_by(
        "model", "step", maintain_order=True
    ):
        title = str(name) if step is None else f"{name}, {step:,}"
        yield (title, group["seed"].n_unique()), group


def in_words() -> list[str]:
    """What the pairs show, with their numbers; RunError if it no longer follows from them."""
    found = {claim.contrast: verdict for claim, verdict, _ in verdicts(FOLDER / "parts")}
    if wrong := [name for name, verdict in VERDICTS.items() if found[name] != verdict]:
        raise RunError(f"the paragraph in words says otherwise than {', '.join(wrong)}")
    shown = shares().filter(pl.col("layer").is_null(), step=1600).drop_nulls("share")
    means = shown.group_by("model", "part").agg(pl.col("share").mean())
    kept = {(row["model"], row["part"]): f"{row['share']:.0%}" for row in means.to_dicts()}
    sentences = []
    for text, prefix in TEXTS.items():
        encoder, decoder = (f"{prefix}{mode}" for mode in ("encoder", "decoder"))
        said = [kept[m, p] for m in (encoder, decoder) for p in ("symmetric", "skew", "random")]
        said += [kept[encoder, part] for part in SIZED]
        seeds = (shown.filter(model=model)["seed"].n_unique() for model in (encoder, decoder))
        sentences.append(WORDS.format(*said, *seeds, text=text))
    named = ({"without": WITHOUT, "ahead": AHEAD}).items()
    lists = {key: ", ".join(f"`{name}`" for name in names) for key, names in named}
    return ["> " + " ".join([*sentences, FOLLOWS.format(**lists)])]


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
    "index.md": Page(
        FOLDER, {"causes": causes, "speedups": lambda: speedups_table(read_records(FOLDER))}
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
        {"shares": shares_table, "curvatures": curvatures_table, "in words": in_words},
    ),
    "starts.md": Page(FOLDER / "starts", {}),
    "linear.md": Page(FOLDER / "linear", {"models": models_table}),
    "directionality.md": Page(FOLDER / "directionality", {}),
}

# Folders with contrasts.
FOLDERS = [page.folder for page in PAGES.values() if page.folder is not None]

# How the verdicts are told to somebody who reads no tables.
OUTCOMES = {
    "reproduced": "What holds as a cause",
    "not reproduced": "What does not",
    "too small": "What does not",
    "reversed": "What is the other way round",
    "undecided": "What is open",
    "depends": "What is open",
}

UNITS = {"end of the plateau": " steps", "loss": " nats"}


def write_contrasts() -> None:
    """Write all contrasts, each by itself, into files that the pages include."""
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
