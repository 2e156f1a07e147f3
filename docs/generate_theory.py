r"""Write the tables of docs/theory/*.md from the records in docs/theory/records.

    python docs/generate_theory.py              # the pages, from the records
    python docs/generate_theory.py --draw       # first, draw the records of random matrices again
    python docs/generate_theory.py --count characters=STORE wikipedia=FILE reviews=FILE \
        comments=FILE --model BERT   # and count texts, files by the tokenizer of a model

``records/sources.toml`` has the command and the machine behind every record, and whether the models
still exist. `docs/generate_assumptions.py` and `tests/lab/theory/rates.py` write the records and
the tables of two more pages.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from wqk.forms import BilinearForm
from wqk_lab.theory.bounds import simulate_scores
from wqk_lab.theory.counts import count_pairs, cut, shares_above_one
from wqk_lab.theory.tails import tails
from wqk_lab.theory.text import open_text
from wqk_lab.theory.verdict import Estimate, Sample

THEORY = Path(__file__).parent / "theory"
RECORDS = THEORY / "records"

# Width, rank and number of random matrices, by row of the first table of bounds.md.
RANDOM_SHAPES = [
    (64, None, 2000),
    (64, 16, 2000),
    (64, 1, 2000),
    (128, 64, 2000),
    (256, 64, 2000),
    (768, 64, 500),
]
# Laws of the entries, by their names in `wqk_lab.theory.bounds.LAWS`, as the page names them.
LAWS = {
    "normal": "normal",
    "uniform": "uniform on [−1, 1]",
    "sparse": "normal, 95 % zeros",
    "student": "Student's t, 3 degrees",
    "cauchy": "Cauchy",
    "not centered": "normal about 0.5",
}
LAW_RANKS = (None, 16)

# Updates of Theorem S1.12: width, tokens t*, opposite tokens of each, and draws.
WIDTH, TOKENS, OPPOSITE, DRAWS = 128, 256, 16, 100
VARIANCES = {
    "log-normal": np.exp(np.random.default_rng(0).standard_normal(WIDTH)),
    "1/m": 1 / np.arange(1, WIDTH + 1),
    "evenly spaced, 0.1 to 2": np.linspace(0.1, 2, WIDTH),
    "isotropic": np.ones(WIDTH),
}
# Variances and share of the tokens t* that act as context, by row of the table of growth.md.
UPDATES = [
    ("log-normal", 1.0),
    ("log-normal", 0.75),
    ("log-normal", 0.5),
    ("log-normal", 0.0),
    ("1/m", 1.0),
    ("evenly spaced, 0.1 to 2", 1.0),
    ("isotropic", 1.0),
]
SHARE_NAMES = {1.0: "all", 0.75: "75 %", 0.5: "half", 0.0: "none"}

# Texts of counts.md, and the tokens of one block.
TEXTS = {
    "characters": "Wikipedia, characters",
    "wikipedia": "Wikipedia, WordPiece",
    "reviews": "film reviews, WordPiece",
    "comments": "talk-page comments, WordPiece",
}
COUNTED_BLOCK = 512

# In the table of two runs: quantities with a bold first step, and the row that spells out "steps".
BOLD = ("signs of their gradients", "change that followed")
FIRST_CHANGE = ("decoder", "0")


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Mean and standard error of the mean."""
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)


def drawn_scores(width: int, rank: int | None, law: str, trials: int) -> dict[str, object]:
    """Draw random matrices; return a line of the record of their scores."""
    scores = simulate_scores(width, rank, law, trials=trials)
    symmetry, symmetry_error = mean_and_error(scores.symmetry)
    directionality, directionality_error = mean_and_error(scores.directionality)
    return {
        "law": law,
        "width": width,
        "rank": rank,
        "trials": trials,
        "symmetry": symmetry,
        "symmetry_error": symmetry_error,
        "symmetry_deviation": float(scores.symmetry.std(ddof=1)),
        "directionality": directionality,
        "directionality_error": directionality_error,
        "directionality_deviation": float(scores.directionality.std(ddof=1)),
        "excess_deviation": float(scores.excess.std(ddof=1)),
    }


def draw_random_matrices() -> pl.DataFrame:
    """Draw the random matrices of bounds.md; a line for each law, width and rank."""
    lines = [drawn_scores(width, rank, "normal", trials) for width, rank, trials in RANDOM_SHAPES]
    for law in LAWS:
        if law == "normal":  # among the shapes above
            continue
        for rank in LAW_RANKS:
            lines.append(drawn_scores(64, rank, law, 2000))
    return pl.DataFrame(lines, infer_schema_length=None)


def planted_update(variances: np.ndarray, share: float, seed: int) -> BilinearForm:
    """Draw an update under the assumptions of Theorem S1.12.

    Of the tokens t*, a share acts as context, Σ_i β_i x_i yᵀ; the others are predicted,
    y (Σ_j β_j x_j)ᵀ. The x have the variances; every y has the identity as covariance.
    """
    random = np.random.default_rng(seed)
    x = np.sqrt(variances) * random.standard_normal((TOKENS, OPPOSITE, WIDTH))
    beta, y = random.standard_normal((TOKENS, OPPOSITE, 1)), random.standard_normal((TOKENS, WIDTH))
    summed = (beta * x).sum(axis=1)
    is_context = np.arange(TOKENS)[:, None] < share * TOKENS
    query, key = np.where(is_context, summed, y), np.where(is_context, y, summed)
    return BilinearForm.from_factors(query.T, key.T)


def draw_updates() -> pl.DataFrame:
    """Draw the updates of growth.md; a line for each draw."""
    lines = []
    for name, share in UPDATES:
        for seed in range(DRAWS):
            compared = tails(planted_update(VARIANCES[name], share, seed))
            line = {"variances": name, "context_share": share, "seed": seed}
            lines.append(line | {field: round(v, 5) for field, v in compared._asdict().items()})
    return pl.DataFrame(lines)


def count_texts(paths: dict[str, str], model: str) -> pl.DataFrame:
    """Count tokens of texts as context and as prediction; a line for each chunk of a text."""
    lines = []
    for text_name, path in paths.items():
        text = open_text(Path(path), ref=model)
        for way in ("documents", "stream"):
            pieces = cut(text.documents, way, COUNTED_BLOCK)
            shares = shares_above_one(count_pairs(text.tokens, pieces, text.vocabulary_size))
            for chunk, values in enumerate(zip(*shares.values(), strict=True)):
                line = {"text": text_name, "tokens": len(text.tokens)}
                line |= {"documents": len(text.documents) - 1, "cut": way, "chunk": chunk}
                lines.append(line | dict(zip(shares, (round(v, 5) for v in values), strict=True)))
    return pl.DataFrame(lines)


def shown(value: float, digits: int, *, sign: bool = False) -> str:
    """Return a number as the pages print it, with a true minus sign."""
    return f"{value:{'+' if sign else ''}.{digits}f}".replace("-", "−")


def random_table() -> Iterator[str]:
    """Scores of normal random matrices, by width and rank."""
    yield (
        "| d | rank | E[s] | 1/d | 8/d | deviation of s | √2/d | E[d] | deviation of d | (excess) |"
    )
    yield "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    lines = pl.read_csv(RECORDS / "random-matrices.csv").filter(law="normal")
    for line in lines.iter_rows(named=True):
        width = line["width"]
        cells = [
            str(width),
            "dense" if line["rank"] is None else str(line["rank"]),
            f"{line['symmetry']:.4f} ± {line['symmetry_error']:.4f}",
            f"{1 / width:.4f}",
            f"{8 / width:.3f}",
            f"{line['symmetry_deviation']:.4f}",
            f"{2**0.5 / width:.4f}",
            f"{shown(line['directionality'], 3, sign=True)} ± {line['directionality_error']:.3f}",
            f"{line['directionality_deviation']:.2f}",
            f"{line['excess_deviation']:.2f}",
        ]
        yield f"| {' | '.join(cells)} |"


def laws_table() -> Iterator[str]:
    """Scores of random matrices of width 64, by the law of their entries."""
    yield "| distribution | | E[s] | deviation of s | E[d] | deviation of d |"
    yield "|---|---|---:|---:|---:|---:|"
    lines = pl.read_csv(RECORDS / "random-matrices.csv").filter(pl.col("width") == 64)
    for law, title in LAWS.items():
        for rank in LAW_RANKS:
            of_rank = pl.col("rank").is_null() if rank is None else pl.col("rank") == rank
            line = lines.filter(of_rank, law=law).row(0, named=True)
            cells = [
                title if rank is None else "",
                "dense" if rank is None else f"rank {rank}",
                f"{line['symmetry']:.4f} ± {line['symmetry_error']:.4f}",
                f"{line['symmetry_deviation']:.3f}",
                f"{shown(line['directionality'], 3, sign=True)} "
                f"± {line['directionality_error']:.3f}",
                f"{line['directionality_deviation']:.2f}",
            ]
            yield f"| {' | '.join(cells)} |".replace("|  |", "| |")


def updates_table() -> Iterator[str]:
    """Tails of updates under the assumptions of Theorem S1.12: means with 95 % intervals."""
    yield (
        "| Σ_mm | tokens as context | ln(Var‖column‖/Var‖row‖) | directionality | (excess) "
        "| longest norm is a column's |"
    )
    yield "|---|---:|---:|---:|---:|---:|"
    draws = pl.read_csv(RECORDS / "updates.csv")
    previous = None
    for name, share in UPDATES:
        row = draws.filter(variances=name, context_share=share)
        cells = [name if name != previous else "", SHARE_NAMES[share]]
        for column in ("log_variance_ratio", "directionality", "directionality_excess"):
            mean, error = mean_and_error(row[column].to_numpy())
            cells.append(f"{shown(mean, 2, sign=True)} ± {1.96 * error:.2f}")
        cells.append(f"{(row['reach'] > 1).mean():.0%}".replace("%", " %"))
        yield f"| {' | '.join(cells)} |".replace("|  |", "| |")
        previous = name


def counts_table() -> Iterator[str]:
    """Shares of entries, and of the text, that are context more often than prediction."""
    yield "| text | cut | entries | of the text |"
    yield "|---|---|---:|---:|"
    chunks = pl.read_csv(RECORDS / "counts.csv")
    for text_name, title in TEXTS.items():
        text = chunks.filter(text=text_name)
        size = f"{text['tokens'][0] / 1e6:.1f} M tokens, {text['documents'][0]:,} documents"
        for way, label in (("stream", title), ("documents", size)):
            cells = []
            for share in ("entries", "mass"):
                values = text.filter(cut=way)[share].to_numpy()[:, None]
                estimate = Estimate.of(Sample(values, "chunks"))
                low, high = (f"{100 * end:.1f}" for end in (estimate.low, estimate.high))
                cells.append(f"{100 * estimate.value:.1f} % [{low}, {high}]")
            yield f"| {label} | {way} | {' | '.join(cells)} |"


def ranges_table(record: str, columns: Sequence[str]) -> Iterator[str]:
    """Ranges over layers, a row for each step; the first columns name the row.

    A record has columns ``row``, ``step``, ``quantity``, ``low`` and ``high``; ``low`` and ``high``
    are as printed, and equal where the page has one number.
    """
    lines = pl.read_csv(RECORDS / record, infer_schema_length=0)
    quantities = lines["quantity"].unique(maintain_order=True).to_list()
    yield f"| {' | '.join([*columns, *quantities])} |"
    yield "|---" * (len(columns) + len(quantities)) + "|"
    previous = None
    for (name, step), group in lines.group_by("row", "step", maintain_order=True):
        names = [step] if len(columns) == 1 else ["" if name == previous else name, step]
        cells = []
        for quantity in quantities:
            line = group.filter(quantity=quantity).row(0, named=True)
            ends = (line["low"],) if line["low"] == line["high"] else (line["low"], line["high"])
            cells.append(" to ".join(ends) + (line["unit"] or ""))
        yield f"| {' | '.join([*names, *cells])} |".replace("|  |", "| |").replace("-", "−")
        previous = name


def tails_table() -> Iterator[str]:
    """Side of the longer tail along two runs: ln(Var‖column‖/Var‖row‖) of the four layers."""
    lines = pl.read_csv(RECORDS / "gradients-tails.csv", infer_schema_length=0)
    quantities = lines["quantity"].unique(maintain_order=True).to_list()
    yield f"| | step | {' | '.join(quantities)} |"
    yield "|---|---:" + "|---" * len(quantities) + "|"
    previous = None
    for (name, step), group in lines.group_by("model", "step", maintain_order=True):
        cells = ["" if name == previous else name, step]
        for quantity in quantities:
            layers = group.filter(quantity=quantity).sort("layer")
            values = " ".join(layers["value"]).replace("-", "−")
            until = layers["until"][0] if layers.height else None
            if step == "0" and quantity in BOLD:
                values = f"**{values}**"
            if until is not None:
                steps = (
                    f"steps {step}-{until}" if (name, step) == FIRST_CHANGE else f"{step}-{until}"
                )
                values += f" ({steps})"
            cells.append(values)
        yield f"| {' | '.join(cells)} |".replace("|  |", "| |")
        previous = name


# The tables of each page, by the names of their marks.
TABLES: dict[str, dict[str, Callable[[], Iterator[str]]]] = {
    "bounds.md": {"random": random_table, "laws": laws_table},
    "counts.md": {"counts": counts_table},
    "growth.md": {"updates": updates_table, "tails": tails_table},
    "gradients.md": {
        "softmax": lambda: ranges_table("softmax.csv", ["step"]),
        "starts": lambda: ranges_table("passed-on.csv", ["start", "step"]),
    },
    "pairing.md": {"pairs": lambda: ranges_table("pairs.csv", ["step"])},
}


def written(page: str, text: str) -> str:
    """Return a page's text with its tables from the records."""
    for name, table in TABLES[page].items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, later = text.partition(begin)
        after = later.partition(end)[2]
        text = before + "\n".join([begin, "", *table(), "", end]) + after
    return text


def main() -> None:
    """Draw or count what is asked for, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--count", nargs="+", metavar="TEXT=PATH")
    parser.add_argument("--model", default="bert-base-uncased")
    options = parser.parse_args()
    if options.draw:
        draw_random_matrices().write_csv(RECORDS / "random-matrices.csv")
        draw_updates().write_csv(RECORDS / "updates.csv")
    if options.count:
        paths = dict(argument.split("=", 1) for argument in options.count)
        count_texts(paths, options.model).write_csv(RECORDS / "counts.csv")
    for page in TABLES:
        path = THEORY / page
        path.write_text(written(page, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
