"""What a column of a table is, and those of a score table, declared once.

The order of `COLUMNS` is a contract: a new column is added at the end. Types, headings on the
terminal and in files, what stands under a table, the pages of the documentation, and the value in
files that were written before a column existed, all follow from these records.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes
    ----------
    name
        Also the attribute in rows, files and JSON.
    type
        ``str``, ``int`` or ``float``.
    meaning
        In a few words.
    heading
        On a terminal and in Markdown; without one, the column is only in files for programs.
    latex
        The heading in LaTeX, if it is a formula there.
    missing
        The value in files that lack the column; most often, none is known.
    chance
        The column that holds what chance would give.
    """

    name: str
    type: type[str] | type[int] | type[float]
    meaning: str
    heading: str = ""
    latex: str = ""
    missing: str | int | None = None
    chance: str = ""


COLUMNS = (
    Column("checkpoint", str, "the checkpoint's name: a path, a Hub id, a class"),
    Column("revision", str, "its revision on the Hub"),
    Column("step", int, "the training step, where the checkpoint is one of several"),
    Column("model_type", str, "as in the configuration"),
    Column("family", str, "the family that says which tensors are queries and keys"),
    Column("parameters", int, "number of all parameters"),
    Column("stack", str, "encoder, decoder, vision, …"),
    Column("kind", str, "self- or cross-attention", missing="self"),
    Column("window", str, "tokens that local attention reaches", "window"),
    Column("layer", int, "from 0, within its stack", "layer"),
    Column("head", int, "from 0; none in the row of a whole layer", "head"),
    Column("key_head", int, "the key head that it shares"),
    Column("heads", int, "query heads of the layer"),
    Column("key_heads", int, "key heads of the layer"),
    Column("rank", int, "largest rank of the form, from its factors"),
    Column("d_query", int, "width of the side of the queries"),
    Column("d_key", int, "width of the side of the keys"),
    Column("applications", int, "how often a shared layer is applied", missing=1),
    Column("circuit", str, "qk, or ov for values and outputs", missing="qk"),
    Column("distance", int, "from key to query in tokens (rotary models)", missing=0),
    Column("norm", float, "Frobenius norm of the form", "norm", r"$\lVert W_{qk} \rVert$"),
    Column("symmetry", float,
           "1 if the form is symmetric, −1 if skew-symmetric, about 0 if untrained",
           "symmetry", "$s$"),
    Column("symmetry_null", float,
           "symmetry that is expected by chance, with random signs of the rows", "null", "$s_0$"),
    Column("symmetry_within_heads", float, "the part of symmetry within single heads",
           "in heads", "$s$ in heads"),
    Column("symmetry_between_heads", float, "the part of symmetry between different heads"),
    Column("symmetry_within_random", float,
           "the part within heads, if the rank dimensions were assigned to heads at random",
           "(random)"),
    Column("directionality", float,
           "by Definition 3.2: norms beyond mean + gamma · standard deviation, summed over rows "
           "(R) and columns (C), as (R − C) / (R + C); below 0 where columns dominate",
           "directionality", "$d$"),
    Column("directionality_excess", float,
           "directionality as published: sums what these norms have beyond the threshold",
           "(excess)", "$d$ (excess)"),
    Column("status", str, "why the scores are to be doubted; ok if nothing is known", "status"),
)  # fmt: skip

# The terms of first and second order of an update; see `wqk.forms.update_terms`.
UPDATE_COLUMNS = tuple(
    Column(f"{order}_order_{name}", float, f"{what} of the update's term of {order} order")
    for order in ("first", "second")
    for name, what in (("norm", "norm"), ("spectral_norm", "σ₁"), ("stable_rank", "stable rank"))
)

# What a monitor measures of attention logits; see `wqk.live.logits`.
LOGIT_COLUMNS = (
    Column("max_logit", float, "the largest logit, before a soft cap"),
    Column("logit_std", float, "standard deviation of the logits"),
    Column("attention_entropy", float, "mean entropy of a token's attention, in nats"),
    Column("attention_top_share", float, "mean of a token's largest attention weight"),
)
