"""Names that one may try on `wqk` for its public ones; the error on each says the right one."""

_TRIED = {
    "BilinearForm": "FactoredMatrix Form LowRank QKForm form",
    "Monitor": "attach monitor",
    "ScoreCallback": "Callback TrainerCallback callback",
    "ScoreTable": "DataFrame Table table",
    "demo_model": "demo example",
    "diff": "compare difference distance",
    "explain": "describe info summary",
    "initialize_": "init_ initialize",
    "join": "concat merge",
    "tokens": "top_tokens token_pairs",
    "open": "attention from_pretrained head layer load load_checkpoint load_model read "
    "read_attention",
    "Block": "Attention block heads",
    "read_table": "load_table read_csv read_parquet",
    "same": "allclose equal is_same similarity",
    "scan": "analyze compute measure score scores",
    "show": "display draw heatmap plot view visualize",
    "verify": "check test validate",
    "report": "html to_html",
    "wqk_lab.atlas": "atlas published",
    "wqk_lab.figures": "figure figures",
    "wqk_lab.corpus": "build_corpus corpus",
    "wqk_lab.experiments": "experiments run_experiments",
    "wqk_lab.glue": "fine_tune glue",
    "wqk_lab.speedup": "speedup speedups",
    "wqk_lab.study": "study theory",
    "wqk_lab.train": "fit train",
}

SYNONYMS = {name: meant for meant, names in _TRIED.items() for name in names.split()}
