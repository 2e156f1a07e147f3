"""Hidden synonyms: names of other libraries with exactly one meaning here, which work.

The tables of this file are complete: no other synonym exists. A synonym appears in no help, stub or
page, and is not part of the contract. Names with several meanings are in `wqk._guesses`, and result
in advice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

# Verbs that are also functions, by synonym.
_VERBS_AND_FUNCTIONS = {
    **dict.fromkeys(("describe", "info", "inspect", "ls", "summary"), "explain"),
    **dict.fromkeys(("analyse", "analyze", "score", "scores"), "scan"),
    **dict.fromkeys(("composition", "composition_scores"), "compose"),
    **dict.fromkeys(("lineage", "related"), "kin"),
    **dict.fromkeys(("changes", "delta", "difference"), "diff"),
    **dict.fromkeys(("token_pairs", "top_tokens"), "tokens"),
    **dict.fromkeys(("architectures", "list_models", "model_types"), "models"),
    **dict.fromkeys(("supported", "supported_models"), "models"),
}

# Functions of the package, by synonym.
FUNCTIONS = {
    **_VERBS_AND_FUNCTIONS,
    **dict.fromkeys(("from_pretrained", "load", "load_checkpoint", "load_model"), "open"),
    "open_model": "open",
    "max_logits": "logits",
    "all_composition_scores": "compose",
    **dict.fromkeys(("load_scores", "load_table", "read_csv", "read_parquet"), "read_table"),
    **dict.fromkeys(("concat", "join_tables"), "join"),
    **dict.fromkeys(("is_same", "check_conversion"), "same"),
    **dict.fromkeys(("sym", "symmetry_of", "symmetry_score"), "symmetry"),
    "directionality_score": "directionality",
    **dict.fromkeys(("attention_maps", "attention_patterns"), "attention_matrices"),
    **dict.fromkeys(("attention_weights", "attentions", "get_attention"), "attention_matrices"),
    **dict.fromkeys(("detect_heads", "head_detector", "head_labels"), "label_heads"),
    **dict.fromkeys(("head_coupling", "couplings"), "coupling"),
    **dict.fromkeys(("QKClip", "QKClipper", "QkClip", "MuonClip"), "Clipper"),
}


# Methods of polars' frames that compute one result from several rows.
FRAME_AGGREGATES = frozenset(
    ["count", "max", "mean", "median", "min", "quantile", "std", "sum", "var"]
)
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
    ]
)
# Methods of pandas' frames that compute one result from several rows.
PANDAS_AGGREGATES = frozenset(
    ["agg", "aggregate", "boxplot", "corr", "describe", "groupby", "hist", "pivot_table"]
)
# The methods that choose rows by rank.
PANDAS_RANKINGS = frozenset(["nlargest", "nsmallest"])
# Attributes of polars' frames that a table has by way of its frame.
POLARS = (
    "columns",
    "dtypes",
    "head",
    "schema",
    "shape",
    "tail",
    "to_dicts",
    "to_numpy",
    "with_columns",
)

# Attributes that stand for a synonym, by the class of their owner. Classes that inherit from the
# owner have the same synonyms. A dot leads to an attribute of the attribute, parentheses call it.
ATTRIBUTES: dict[str, Mapping[str, str]] = {
    "Table": {
        **dict.fromkeys(("df", "data"), "frame"),
        "json": "_to_json",
        "to_csv": "_to_csv",
        "to_json": "_to_json",
        **dict.fromkeys(("latex", "to_latex"), "_to_latex"),
        **dict.fromkeys(("markdown", "to_markdown"), "_to_markdown"),
        "to_parquet": "write",
        "save": "write",
        "write_csv": "_to_csv",
        "write_json": "_to_json",
        "write_parquet": "write",
        "group_by": "_group_by",
        "select": "_select",
        "sort": "_sort",
        "sort_values": "_sort_values",
        "where": "filter",
        "to_polars": "frame.clone",
        "to_string": "__repr__",
        "values": "frame.to_numpy()",
        **{name: f"frame.{name}" for name in POLARS},
    },
    "Result": {
        "df": "frame",
        "json": "_to_json",
        "to_csv": "_to_csv",
        "to_json": "_to_json",
        "to_pandas": "frame.to_pandas",
        "to_polars": "frame.clone",
    },
    "Model": {
        **dict.fromkeys(("n_layers", "num_layers", "num_hidden_layers"), "_layer_count"),
        **dict.fromkeys(("n_heads", "num_heads", "num_attention_heads"), "_head_count"),
        **dict.fromkeys(("n_key_value_heads", "num_key_value_heads"), "_key_head_count"),
        **dict.fromkeys(("n_kv_heads", "num_kv_heads", "n_key_heads"), "_key_head_count"),
        **dict.fromkeys(("d_model", "hidden_size", "n_embd", "width"), "_width"),
        **dict.fromkeys(("d_head", "head_dim", "head_width"), "_head_width"),
        **dict.fromkeys(("architecture", "model_type"), "_model_type"),
        "blocks": "layers",
        "config": "checkpoint.config",
        "dtype": "_dtype",
    },
    "Block": {
        **dict.fromkeys(("qk", "QK", "W_qk", "W_QK"), "form"),
        **dict.fromkeys(("attention", "attn"), "_itself"),
        **{name: f"form.{name}" for name in ("directionality", "norm", "symmetry")},
        **dict.fromkeys(("n_heads", "num_heads", "num_attention_heads"), "head_count"),
        **dict.fromkeys(("n_kv_heads", "num_key_value_heads", "num_kv_heads"), "key_head_count"),
        **{name: f"form.{name}" for name in ("plot", "svd")},
        **dict.fromkeys(("OV", "W_OV"), "ov"),
        "W_Q": "heads.query",
        "W_K": "heads.key",
    },
    "Head": {
        **dict.fromkeys(("form", "QK", "W_QK"), "qk"),
        **dict.fromkeys(("OV", "W_OV"), "ov"),
        **dict.fromkeys(("W_V", "W_v", "v"), "ov.query"),
        **dict.fromkeys(("W_O", "W_o", "o"), "ov.key.T"),
    },
    "BilinearForm": {
        **dict.fromkeys(("W_Q", "W_q", "q", "query_weight"), "query"),
        **dict.fromkeys(("W_K", "W_k", "k", "key_weight"), "key"),
        **dict.fromkeys(("M", "matrix", "AB"), "dense()"),
        **dict.fromkeys(("sym", "symmetric"), "symmetric_part"),
        **dict.fromkeys(("antisym", "antisymmetric", "antisymmetric_part"), "skew_part"),
        **dict.fromkeys(("skew", "skew_symmetric", "skew_symmetric_part"), "skew_part"),
        **dict.fromkeys(("eigs", "eigvals"), "eigenvalues"),
        **dict.fromkeys(("fro", "frobenius", "frobenius_norm"), "norm"),
        **dict.fromkeys(("svals", "svdvals"), "singular_values"),
        "directionality_score": "directionality",
        "symmetry_score": "symmetry",
        **dict.fromkeys(("to_array", "to_numpy"), "numpy"),
        **dict.fromkeys(("to_dense", "todense", "toarray"), "dense"),
        **dict.fromkeys(("heatmap", "imshow", "show"), "plot"),
        "tolist": "_nested_lists",
        "tr": "trace",
        "transpose": "_transposed",
    },
    "Clipper": {"step": "__call__"},
    "Monitor": {
        **dict.fromkeys(("log", "record", "step", "update"), "__call__"),
        **dict.fromkeys(("df", "frame"), "table.frame"),
        "to_pandas": "table.to_pandas",
        **dict.fromkeys(("history", "scores"), "table"),
    },
    "CheckpointComparison": {
        **dict.fromkeys(("equal", "is_same", "ok"), "same"),
        **dict.fromkeys(("cause", "diagnosis", "why"), "reason"),
        **dict.fromkeys(("blocks", "layers"), "frame"),
    },
    "Verification": dict.fromkeys(("max_difference", "max_error"), "difference"),
    "Explanation": dict.fromkeys(("bytes", "nbytes"), "bytes_to_read"),
    "Kinship": {**dict.fromkeys(("p_value", "pvalue"), "p"), "verdict": "conclusion"},
}


def meant_attribute(owner: object, name: str) -> str:
    """Return the attribute of a synonym; empty if the name is not a synonym.

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


def attribute(owner: object, meaning: str) -> Any:
    """Return the value of an attribute; see `meant_attribute`.

    Examples
    --------
    >>> attribute("text", "upper()"), attribute(1.5, "real.imag")
    ('TEXT', 0.0)
    """
    value: Any = owner
    for step in meaning.split("."):
        value = getattr(value, step.removesuffix("()"))
        if step.endswith("()"):
            value = value()
    return value


# Synonyms of keywords; a function with the synonym as its own keyword is not affected.
KEYWORDS = {
    **dict.fromkeys(("k", "limit", "n", "top_k", "topk"), "top"),
    **dict.fromkeys(("atol", "rtol", "tol"), "tolerance"),
    **dict.fromkeys(("folder", "out_dir", "output", "output_dir", "save"), "out"),
    **dict.fromkeys(("filename", "log_path", "out"), "path"),
    "all": "everything",
    "fold_ln": "fold_norm",
    "distance": "distances",
    "layer": "layers",
    "per_head": "heads",
    **dict.fromkeys(("tau", "threshold"), "limit"),
    **dict.fromkeys(("every_n_steps", "interval", "log_every"), "every"),
    **dict.fromkeys(("n_heads", "num_heads", "num_attention_heads"), "heads_per_layer"),
    **dict.fromkeys(("n_kv_heads", "num_kv_heads", "num_key_value_heads"), "key_heads"),
}
# Keywords with lists as values; a single number stands for a list.
LISTS = ("distances", "layers")


def meant_keywords(known: Collection[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords with each synonym replaced by its keyword.

    Examples
    --------
    >>> meant_keywords(["ref", "top", "layers"], {"k": 5, "layer": 3, "new": 1})
    {'top': 5, 'layers': [3], 'new': 1}
    """
    meant: dict[str, Any] = {}
    for name, value in options.items():
        meaning = KEYWORDS.get(name, name)
        if name in known or meaning not in known or meaning in options:
            meaning = name
        if meaning != name and meaning in LISTS and isinstance(value, int):
            value = [value]
        meant[meaning] = value
    return meant


class VerbSynonym(NamedTuple):
    """The verb of the command for a synonym.

    Attributes
    ----------
    verb
        The verb.
    options
        Options that the synonym implies.
    out
        Option that replaces ``--out``; without this option, the synonym has no meaning.
    at_layer, of_table
        The verb for a line with a layer, or with the file of a table, if different.
    """

    verb: str
    options: Sequence[str] = ()
    out: str = ""
    at_layer: str = ""
    of_table: str = ""


# Verbs of the command, by synonym.
VERBS = {
    **{name: VerbSynonym(verb) for name, verb in _VERBS_AND_FUNCTIONS.items()},
    **dict.fromkeys(("fig", "figures", "paper", "reproduce"), VerbSynonym("figure")),
    # A scan has a row for each layer and step of a run, and ranks a checkpoint.
    **dict.fromkeys(("evolution", "timeline", "trajectory", "typical"), VerbSynonym("scan")),
    # Names of packages and modules in Python.
    "families": VerbSynonym("models"),
    "differences": VerbSynonym("diff"),
    "kinship": VerbSynonym("kin"),
    # Options of a verb as verbs.
    **{name: VerbSynonym("scan", (f"--{name}",)) for name in ("bands", "ceiling", "spectrum")},
    "ceilings": VerbSynonym("scan", ("--ceiling",)),
    "heads": VerbSynonym("scan", ("--heads",)),
    # A view of one head includes singular values.
    "head": VerbSynonym("scan", ("--heads", "--spectrum")),
    "coupling": VerbSynonym("show", ("--coupling",)),
    "directions": VerbSynonym("tokens", ("--directions",)),
    **dict.fromkeys(("fix", "repair"), VerbSynonym("same", out="--repair")),
    **dict.fromkeys(
        ("draw", "heatmap", "picture", "plot"),
        VerbSynonym("scan", out="--picture", at_layer="show", of_table="report"),
    ),
}

# Options, and the words that replace them if the verb has the first word as an option.
OPTIONS: dict[str, Sequence[str]] = {
    **dict.fromkeys(("--output", "--output-file", "--outfile", "--save"), ("--out",)),
    **dict.fromkeys(("--output-dir", "--outdir"), ("--out",)),
    **dict.fromkeys(("--latex", "--tex", "--to-latex"), ("--out", "-.tex")),
    **dict.fromkeys(("--markdown", "--md"), ("--out", "-.md")),
    **dict.fromkeys(("--jsonl", "--ndjson"), ("--out", "-.jsonl")),
    **dict.fromkeys(("--filter", "--query"), ("--where",)),
    **dict.fromkeys(("--as-json", "--to-json"), ("--json",)),
    "--to-csv": ("--csv",),
    **dict.fromkeys(("--plot", "--figure", "--save-plot"), ("--picture",)),
    "--html": ("--report",),
    "-l": ("--layer",),
    "--layer": ("--layers",),
    **dict.fromkeys(("--all-heads", "--by-head", "--per-head"), ("--heads",)),
    **dict.fromkeys(("--num-workers", "--workers", "--processes", "-j"), ("--jobs",)),
    **dict.fromkeys(("--limit", "--topk", "--top-k", "-k", "-n"), ("--top",)),
    **dict.fromkeys(("--sort-by", "--order-by"), ("--sort",)),
    **dict.fromkeys(("--fold-ln", "--fold-norms"), ("--fold-norm",)),
    **dict.fromkeys(("--svd", "--singular-values"), ("--spectrum",)),
    **dict.fromkeys(("--interval", "--poll"), ("--every",)),
    **dict.fromkeys(("--tol", "--atol", "--rtol"), ("--tolerance",)),
    "--base-model": ("--base",),
    "--ov": ("--circuit", "ov"),
    "--all-columns": ("--full",),
    "--no-follow": ("--once",),
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
# Options that print a format; with a file as the value, synonyms of ``--out``.
PRINTED = ("--csv", "--json", "--jsonl", "--latex", "--markdown", "--md", "--parquet", "--tex")
TABLE_FILES = (".csv", ".json", ".jsonl", ".md", ".parquet", ".tex")

# Options whose value is a list, separated by commas, and the option that is repeated instead.
REPEATED = {"--revisions": "--revision"}

# The option of an adapter's folder: the folder is the checkpoint, and the other one its base.
ADAPTER_OPTIONS = ("--adapter", "--lora", "--peft")

# Options before the checkpoint, without effect.
CHECKPOINT_OPTIONS = (
    "--checkpoint",
    "--model",
    "--model-name",
    "--model-path",
    "--models",
    "--ref",
    "--refs",
    "-m",
)

# Options that name an argument of a verb, by the name of the argument.
ARGUMENT_OPTIONS = {
    "reference": ("--before", "--old", "--original", "--reference"),
    "candidate": ("--after", "--candidate", "--converted", "--new", "--other"),
}

# Options for the default behavior of a verb, without effect.
ALWAYS = {"survey": ("--continue", "--resume"), "watch": ("--continue", "--follow", "--resume")}

# Options of words that follow a verb's own arguments, in their order; the words are whole numbers.
NUMBERED = {
    "scan": ("--layers", "--head"),
    "show": ("--layer", "--head"),
    "tokens": ("--layer", "--head"),
}
# Options for a last word with one of these endings.
BY_ENDING = {
    "parts": ("--text", (".txt", ".jsonl")),
    "report": ("--out", (".html",)),
    "show": ("--out", (".png", ".pdf", ".svg")),
}
# Options for words after a verb's own arguments, if all words are in the list.
BY_WORD = {"train": ("--mode", ("encoder", "decoder"))}
