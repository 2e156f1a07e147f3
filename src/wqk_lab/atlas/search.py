"""Looking up published models by name."""

from __future__ import annotations

import difflib

import polars as pl

from wqk._console import last_part
from wqk.errors import UnknownName
from wqk_lab.atlas.ranks import ATLAS_COLUMNS, published
from wqk_lab.atlas.reference import drawn_models


def all_published() -> pl.DataFrame:
    """Return the printed rows, then the rows of models that are only in figures.

    Examples
    --------
    >>> all_published()["modality"].value_counts(sort=True).rows()
    [('language', 113), ('audio', 46), ('vision', 39)]
    """
    return pl.concat([published(), drawn_models()])


def lookup(name: str, rows: pl.DataFrame | None = None) -> pl.DataFrame:
    """Return the rows of a model, by its name in the tables or its Hub id.

    Parameters
    ----------
    name
        ``BERT-base``, ``google-bert/bert-base-uncased`` or ``bert-base-uncased``, in any case;
        several checkpoints may have one printed name.
    rows
        Rows to search; by default everything published.

    Returns
    -------
    polars.DataFrame
        As `published`, without repeated rows.

    Raises
    ------
    UnknownName
        No row has the name; the message lists similar names.

    Examples
    --------
    >>> lookup("bert-base-uncased")["symmetry"].to_list()
    [0.51]
    >>> lookup("LLaMA3-8B").select("model", "symmetry", "directionality").rows()
    [('meta-llama/Meta-Llama-3-8B', 0.0, -0.65), ('meta-llama/Meta-Llama-3-8B', 0.0, 0.01)]
    """
    rows = all_published() if rows is None else rows
    spelled = name.strip().lower()
    model = pl.col("model")
    names = (pl.col("name"), model, model.str.split("/").list.last())
    matching = rows.filter(pl.any_horizontal(each.str.to_lowercase() == spelled for each in names))
    if matching.is_empty():
        spellings = (*rows["name"], *rows["model"], *map(last_part, rows["model"]))
        spelling_of = {spelling.lower(): spelling for spelling in reversed(spellings)}
        close = difflib.get_close_matches(spelled, spelling_of, n=5, cutoff=0.55)
        similar = list(dict.fromkeys(spelling_of[c] for c in close))
        hint = (
            f"did you mean {', '.join(similar)}?" if similar else "wqk lab atlas lists all models"
        )
        raise UnknownName(
            f"{name}: the paper has no model with this name or Hub id; {hint}",
            name=name,
            close=similar,
        )
    same = [column for column in ATLAS_COLUMNS if column not in ("name", "sound", "printed")]
    return matching.unique(subset=same, keep="first", maintain_order=True)
