"""Hidden synonyms: names of other libraries with exactly one meaning here. They work.

The tables of this file are complete: no other synonym exists. A synonym appears in no help, stub or
page, and is no part of the contract. Names with several meanings are in `wqk._guesses`, and lead to
advice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Functions of the package, by their synonyms.
FUNCTIONS = {
    **dict.fromkeys(("from_pretrained", "load", "load_model", "open_model"), "open"),
    "max_logits": "logits",
}


# Methods of pandas' frames that a table has by way of `to_pandas`.
PANDAS = frozenset(
    [
        "agg",
        "aggregate",
        "apply",
        "boxplot",
        "corr",
        "describe",
        "groupby",
        "hist",
        "nlargest",
        "nsmallest",
        "pivot_table",
        "query",
        "sort_values",
    ]
)
# Of these, the methods that compute one result of several rows.
PANDAS_AGGREGATES = frozenset(
    ["agg", "aggregate", "boxplot", "corr", "describe", "groupby", "hist", "pivot_table"]
)
# Attributes of polars' frames that a table has by way of its frame.
POLARS = (
    "columns",
    "dtypes",
    "group_by",
    "head",
    "schema",
    "select",
    "sort",
    "tail",
    "to_dicts",
    "to_numpy",
    "with_columns",
)

# Attributes that stand for a synonym, by the class of their owner. Classes that inherit from the
# owner have the same synonyms. A dot leads to an attribute of the attribute.
ATTRIBUTES: dict[str, Mapping[str, str]] = {
    "Table": {
        "df": "frame",
        "to_csv": "_to_csv",
        "to_json": "_to_json",
        "to_latex": "_to_latex",
        "to_markdown": "_to_markdown",
        "to_parquet": "write",
        "save": "write",
        "to_polars": "frame.clone",
        **{name: f"frame.{name}" for name in POLARS},
    },
    "Result": {
        "df": "frame",
        "to_csv": "_to_csv",
        "to_json": "_to_json",
        "to_pandas": "frame.to_pandas",
        "to_polars": "frame.clone",
    },
    "Model": {
        **dict.fromkeys(("n_layers", "num_layers", "num_hidden_layers"), "_layer_count"),
        **dict.fromkeys(("n_heads", "num_heads", "num_attention_heads"), "_head_count"),
        **dict.fromkeys(("n_key_value_heads", "num_key_value_heads"), "_key_head_count"),
        "blocks": "layers",
        "config": "checkpoint.config",
    },
    "Block": {
        **dict.fromkeys(("qk", "W_qk", "W_QK"), "form"),
        **{name: f"form.{name}" for name in ("directionality", "norm", "symmetry")},
        **dict.fromkeys(("n_heads", "num_heads"), "head_count"),
        **dict.fromkeys(("OV", "W_OV"), "ov"),
        "W_Q": "heads.query",
        "W_K": "heads.key",
    },
    "Head": {
        **dict.fromkeys(("QK", "W_QK"), "qk"),
        **dict.fromkeys(("OV", "W_OV"), "ov"),
        **dict.fromkeys(("W_V", "W_v"), "ov.query"),
        **dict.fromkeys(("W_O", "W_o"), "ov.key.T"),
    },
    "BilinearForm": {
        **dict.fromkeys(("W_Q", "W_q"), "query"),
        **dict.fromkeys(("W_K", "W_k"), "key"),
        "antisymmetric_part": "skew_part",
        "eigvals": "eigenvalues",
        "frobenius_norm": "norm",
        "svdvals": "singular_values",
        "to_dense": "dense",
        "to_numpy": "numpy",
        "todense": "dense",
    },
    "Clipper": {"step": "__call__"},
    "Monitor": {"step": "__call__", "to_pandas": "table.to_pandas"},
    "CheckpointComparison": dict.fromkeys(("equal", "is_same", "ok"), "same"),
    "Verification": dict.fromkeys(("max_difference", "max_error"), "difference"),
    "Kinship": dict.fromkeys(("p_value", "pvalue"), "p"),
}


def meant_attribute(owner: object, name: str) -> str:
    """Return the attribute that a synonym stands for; empty if the name is no synonym.

    Examples
    --------
    >>> import wqk
    >>> model = wqk.open(wqk.demo_model("encoder"))
    >>> meant_attribute(model, "config"), meant_attribute(model, "nonsense")
    ('checkpoint.config', '')
    """
    for owner_class in type(owner).__mro__:
        meanings = ATTRIBUTES.get(owner_class.__name__, {})
        if name in meanings:
            return meanings[name]
    return ""


# Keywords of functions, and the keywords that they may stand for. They do not work, and an error
# names the keyword of the function.
KEYWORDS = {
    **dict.fromkeys(("k", "limit", "n", "top_k", "topk"), "top"),
    **dict.fromkeys(("atol", "rtol", "tol"), "tolerance"),
    **dict.fromkeys(("folder", "out_dir", "output", "output_dir", "save"), "out"),
    **dict.fromkeys(("filename", "log_path", "out"), "path"),
    "layer": "layers",
    "per_head": "heads",
    **dict.fromkeys(("tau", "threshold"), "limit"),
}

# Verbs of the command, by their synonyms.
VERBS = {
    **dict.fromkeys(("describe", "info", "inspect", "ls"), "explain"),
    **dict.fromkeys(("analyse", "analyze", "score"), "scan"),
    **dict.fromkeys(("fig", "figures"), "figure"),
}

# Options, and the words that replace them if the verb has the first word as an option.
OPTIONS: dict[str, Sequence[str]] = {
    **dict.fromkeys(("--output", "--output-file", "--outfile", "--save"), ("--out",)),
    **dict.fromkeys(("--output-dir", "--outdir"), ("--out",)),
    **dict.fromkeys(("--latex", "--tex", "--to-latex"), ("--out", "-.tex")),
    **dict.fromkeys(("--markdown", "--md"), ("--out", "-.md")),
    **dict.fromkeys(("--jsonl", "--ndjson"), ("--out", "-.jsonl")),
    **dict.fromkeys(("--as-json", "--to-json"), ("--json",)),
    "--to-csv": ("--csv",),
    **dict.fromkeys(("--plot", "--figure", "--save-plot"), ("--picture",)),
    "--html": ("--report",),
    "--layer": ("--layers",),
    **dict.fromkeys(("--all-heads", "--by-head", "--per-head"), ("--heads",)),
    **dict.fromkeys(("--num-workers", "--workers", "--processes", "-j"), ("--jobs",)),
    **dict.fromkeys(("--limit", "--topk", "--top-k", "-k", "-n"), ("--top",)),
    **dict.fromkeys(("--sort-by", "--order-by"), ("--sort",)),
    **dict.fromkeys(("--fold-ln", "--fold-norms"), ("--fold-norm",)),
    **dict.fromkeys(("--tol", "--atol", "--rtol"), ("--tolerance",)),
    "--base-model": ("--base",),
    "--ov": ("--circuit", "ov"),
    "--all-columns": ("--full",),
    "--fix": ("--repair",),
}

# Values of ``--format``, and the words that replace the option with its value.
FORMAT_OPTIONS = ("--format", "--fmt", "--output-format", "-f")
FORMATS: dict[str, Sequence[str]] = {
    "csv": ("--csv",),
    "json": ("--json",),
    **dict.fromkeys(("latex", "tex"), ("--out", "-.tex")),
    **dict.fromkeys(("markdown", "md"), ("--out", "-.md")),
    **dict.fromkeys(("jsonl", "ndjson"), ("--out", "-.jsonl")),
}

# The option of an adapter's folder: the folder is the checkpoint, and the other one its base.
ADAPTER_OPTIONS = ("--adapter", "--lora", "--peft")

# Options that only repeat that the checkpoint comes next.
CHECKPOINT_OPTIONS = ("--checkpoint", "--model", "--model-path", "--ref")

# Options of words that follow a verb's own arguments, in their order; the words are whole numbers.
NUMBERED = {"show": ("--layer", "--head"), "tokens": ("--layer", "--head")}
# The option of a last word with one of these endings.
BY_ENDING = {
    "parts": ("--text", (".txt", ".jsonl")),
    "report": ("--out", (".html",)),
    "show": ("--out", (".png", ".pdf", ".svg")),
}
# The option of words that follow a verb's own arguments, if each is one of these.
BY_WORD = {"train": ("--mode", ("encoder", "decoder"))}
