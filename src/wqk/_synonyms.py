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
    "match_tokens": "tokens top_tokens",
    "open": "attention from_pretrained head layer load load_checkpoint load_model read "
    "read_attention",
    "Block": "Attention block heads",
    "read_table": "load_table read_csv read_parquet",
    "same": "allclose equal is_same similarity",
    "scan": "analyze compute measure score scores",
    "show": "display draw heatmap plot view visualize",
    "verify": "check test validate",
    "write_report": "report to_html",
    "wqk_lab.atlas": "atlas published",
    "wqk_lab.figures": "figures",
    "wqk_lab.fine_tune": "fine_tune glue",
    "wqk_lab.speedups": "speedup speedups",
    "wqk_lab.study": "study theory",
    "wqk_lab.train": "fit train",
}

SYNONYMS = {name: meant for meant, names in _TRIED.items() for name in names.split()}
