"""wqk: read, measure and follow the query-key form of self-attention, W_qk = W_q W_kᵀ.

The public names are listed in ``__init__.pyi`` and imported when first used. Therefore the command
starts at once, and small tasks load no heavy libraries.
"""

from wqk import errors

# Commands whose functions have another name.
COMMAND_NAMES = {"report": "write_report", "tokens": "match_tokens"}

# By public name, the names of similar functions and classes in other libraries.
NAMES_ELSEWHERE = {
    "BilinearForm": ("FactoredMatrix", "Form", "LowRank", "QKForm", "form"),
    "Block": ("Attention", "block", "heads"),
    "Monitor": ("attach", "monitor"),
    "ScoreCallback": ("Callback", "TrainerCallback", "callback"),
    "ScoreTable": ("DataFrame", "Table", "table"),
    "demo_model": ("demo", "example"),
    "diff": ("compare", "difference", "distance"),
    "explain": ("describe", "info", "summary"),
    "initialize_": ("init_", "initialize"),
    "join": ("concat", "merge"),
    "open": (
        *("attention", "from_pretrained", "head", "layer", "load", "load_checkpoint"),
        *("load_model", "read", "read_attention"),
    ),
    "read_table": ("load_table", "read_csv", "read_parquet"),
    "report": ("html", "to_html"),
    "same": ("allclose", "equal", "is_same", "similarity"),
    "scan": ("analyze", "compute", "measure", "score", "scores"),
    "show": ("display", "draw", "heatmap", "plot", "view", "visualize"),
    "tokens": ("top_tokens", "token_pairs"),
    "verify": ("check", "test", "validate"),
    # Verbs of the laboratory, which is a package of its own.
    "wqk_lab.atlas": ("atlas", "published"),
    "wqk_lab.corpus": ("build_corpus", "corpus"),
    "wqk_lab.experiments": ("experiments", "run_experiments"),
    "wqk_lab.figures": ("figure", "figures"),
    "wqk_lab.glue": ("fine_tune", "glue"),
    "wqk_lab.speedup": ("speedup", "speedups"),
    "wqk_lab.study": ("study", "theory"),
    "wqk_lab.train": ("fit", "train"),
}

__getattr__, __dir__, __all__ = errors.public(__name__, __file__, COMMAND_NAMES, NAMES_ELSEWHERE)
