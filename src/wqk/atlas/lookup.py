"""Finding a published model by name."""

from __future__ import annotations

import difflib

import polars as pl

from wqk.atlas.published import COLUMNS, last_part, published
from wqk.atlas.reference import drawn_models
from wqk.errors import UnknownName


def all_published() -> pl.DataFrame:
    """The printed rows, then those of the models that the paper only draws.

    Examples
    --------
    >>> all_published()["modality"].value_counts(sort=True).rows()
    [('language', 113), ('audio', 46), ('vision', 39)]
    """
    return pl.concat([published(), drawn_models()])


def lookup(name: str, rows: pl.DataFrame | None = None) -> pl.DataFrame:
    """The rows of a model, by its name in the tables or by its id on the hub.

    Parameters
    ----------
    name
        ``BERT-base``, ``google-bert/bert-base-uncased`` or ``bert-base-uncased``, in any case. A
        printed name may stand for several checkpoints.
    rows
        Rows to search; by default everything published.

    Returns
    -------
    polars.DataFrame
        As `published`; of equal rows of one checkpoint, the first.

    Raises
    ------
    UnknownName
        There is no such row. The message lists similar names.

    Examples
    --------
    >>> lookup("bert-base-uncased")["symmetry"].to_list()
    [0.51]
    >>> lookup("LLaMA3-8B").select("model", "symmetry", "directionality").rows()
    [('meta-llama/Meta-Llama-3-8B', 0.0, -0.65), ('meta-llama/Meta-Llama-3-8B', 0.0, 0.01)]
    """
    rows = all_published() if rows is None else rows
    wanted = name.strip().lower()
    known: dict[str, str] = {}
    for spelling in (*rows["name"], *rows["model"], *map(last_part, rows["model"])):
        known.setdefault(spelling.lower(), spelling)
    matching = rows.filter(
        (pl.col("name").str.to_lowercase() == wanted)
        | (pl.col("model").str.to_lowercase() == wanted)
        | (pl.col("model").str.split("/").list.last().str.to_lowercase() == wanted)
    )
    if matching.is_empty():
        close = difflib.get_close_matches(wanted, known, n=5, cutoff=0.55)
        names = list(dict.fromkeys(known[c] for c in close))
        hint = f"did you mean {', '.join(names)}?" if names else "wqk atlas lists what there is"
        raise UnknownName(
            f"{name}: the paper has no model with this name or Hub id; {hint}",
            name=name,
            close=names,
        )
    same = [column for column in COLUMNS if column not in ("name", "sound")]
    return matching.unique(subset=same, keep="first", maintain_order=True)
