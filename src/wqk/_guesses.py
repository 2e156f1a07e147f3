"""Guessed names of functions, verbs and options, and the names in wqk.

The guesses come from other libraries, and from observations of people who use wqk for the first
time. `GUESSES` is for Python and the command; `OPTION_GUESSES` is for the options of the command.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from wqk._synonyms import FUNCTIONS


class Guess(NamedTuple):
    """A function, with names that people guess for the function.

    Attributes
    ----------
    call
        The call of the function in Python.
    command
        The verb of the command, as a clause; empty if the command has no such verb.
    names
        Guessed names.
    """

    call: str
    command: str
    names: tuple[str, ...]


def _guess(call: str, command: str, names: str) -> Guess:
    """Return a guess, from names separated by spaces."""
    return Guess(call, command, tuple(names.split()))


_EXPLAIN = "wqk explain REF shows what a checkpoint contains, and what a scan would read"
_SCAN = "wqk scan REF scores every layer"
_WATCH = "wqk watch RUN scores each checkpoint of a run as soon as it is complete"
_REPORT = "wqk report TABLE... -o report.html shows score tables"
_COMPLETION = (
    'eval "$(_WQK_COMPLETE=bash_source wqk)" in ~/.bashrc completes words; for other shells, '
    "zsh_source or fish_source"
)
_TABLES = "wqk lab figure NAME --out FILE.md writes table1, tableS2 or tableS3"

GUESSES = (
    _guess(
        call="wqk.open(ref)",
        command=_EXPLAIN,
        names="attention from_pretrained head layer load load_checkpoint load_model open_model "
        "read_attention",
    ),
    _guess(
        call="wqk.open(ref), or wqk.read_table(path) for a table of scores",
        command=_EXPLAIN,
        names="read",
    ),
    _guess(
        call="wqk.scan(ref)",
        command=_SCAN,
        names="WeightWatcher compute evaluate measure run score_model stats",
    ),
    _guess(
        call="wqk.explain(ref)",
        command=_EXPLAIN,
        names="cat config dtypes keys modules parameters params shapes tensors tree weights",
    ),
    _guess(
        call="wqk.same(reference, candidate)",
        command="wqk same REFERENCE CANDIDATE compares two checkpoints, and with --repair FOLDER "
        "it writes a repaired copy",
        names="allclose conversion convert equal equals similarity",
    ),
    _guess(
        call="wqk.same(reference, candidate, repair=folder)",
        command="wqk same REFERENCE CANDIDATE --repair FOLDER writes a repaired copy",
        names="fix repair",
    ),
    _guess(
        call="wqk.same(reference, candidate), if the two should be equal, "
        "wqk.diff(reference, candidate), for how far one moved, "
        "or wqk.scan([a, b]), for the scores of both",
        command="expected wqk same A B, if B should equal A, as after a conversion; "
        "wqk diff A B, for how far B moved from A, as in training; "
        "or wqk scan A B, for the scores of both",
        names="compare compare_models compare_runs",
    ),
    _guess(
        call="wqk.diff(reference, candidate) of two models, or (a - b).norm / a.norm of two forms",
        command="wqk diff A B measures how far apart the forms of two checkpoints are",
        names="distance",
    ),
    _guess(
        call="wqk.kin(reference, candidate)",
        command="wqk kin A B finds out whether two checkpoints are related",
        names="fingerprint kinship parent",
    ),
    _guess(
        call="wqk.verify(ref)",
        command="wqk verify REF compares the scores with those of the running model",
        names="check test validate",
    ),
    _guess(
        call="wqk.watch(run, out=folder), or wqk.scan(run) for the steps that are there",
        command=_WATCH,
        names="follow tail track",
    ),
    _guess(
        call="wqk.Monitor(model, path)",
        command=_WATCH,
        names="Tracker attach hook log monitor monitoring",
    ),
    _guess(
        call="wqk.ScoreCallback(folder).attach(trainer)",
        command=_WATCH,
        names="Callback HFCallback HuggingFaceCallback TrainerCallback WqkCallback callback "
        "callbacks",
    ),
    _guess(
        call="wqk.Monitor(module, path) in a callback of Lightning, whose steps call monitor(step)",
        command="",
        names="LightningCallback lightning pytorch_lightning",
    ),
    _guess(
        call="wqk.scan(ref).plot(), wqk.join(tables).plot(), or wqk.show(ref, layer)",
        command="wqk show REF --layer L draws a form, and wqk scan REF --picture FILE.png the "
        "scores of all layers",
        names="display draw heatmap picture plot view visualise visualize",
    ),
    _guess(
        call="wqk.tokens(ref, layer, head)",
        command="wqk tokens REF --layer L --head H shows the tokens that a head matches",
        names="directions logit_lens vocabulary",
    ),
    _guess(
        call="wqk.parts(ref, text, each_head=True), with the loss without each head's scores",
        command="",
        names="ablate ablate_head ablate_heads ablation knockout zero_ablate",
    ),
    _guess(
        call="wqk.compose(ref)",
        command="wqk compose REF finds the heads that read what earlier heads write",
        names="circuits induction",
    ),
    _guess(
        call="wqk.survey(refs, out=folder)",
        command="wqk survey REF... --out DIR scores many checkpoints into one table",
        names="batch scan_many sweep",
    ),
    _guess(call="wqk.report(table, path)", command=_REPORT, names="dashboard html to_html"),
    _guess(
        call="wqk.read_table(path)",
        command=_REPORT,
        names="table_file",
    ),
    _guess(call="wqk.join(tables)", command="", names="merge"),
    _guess(
        call='wqk.initialize_(model, "symmetric")',
        command='initial weights are set in Python: wqk.initialize_(model, "symmetric")',
        names="init init_ init_symmetric initialize initialize_symmetric symmetric_init "
        "symmetric_init_ symmetrize symmetrize_",
    ),
    _guess(
        call="wqk.clip_(model, limit, wqk.logits(model, batch))",
        command="weights are clipped in Python: wqk.clip_(model, limit, wqk.logits(model, batch))",
        names="clip muonclip qk_clip qk_clip_ qkclip",
    ),
    _guess(
        call="",
        command="attention weights are computed in Python: wqk.attention_matrices(model, batch)",
        names="attention_maps attention_patterns attention_weights attentions get_attention",
    ),
    _guess(
        call="wqk.label_heads(ref)",
        command="heads are labeled in Python: wqk.label_heads(ref)",
        names="induction_heads previous_token_heads",
    ),
    _guess(
        call="",
        command="heads are labeled in Python: wqk.label_heads(ref)",
        names="detect_heads head_detector head_labels label label_heads",
    ),
    _guess(
        call="",
        command="wqk scan REF scores a checkpoint; the page Definitions has the formulas",
        names="definition definitions directionality formula formulas symmetry",
    ),
    _guess(call="wqk.symmetry(query, key)", command=_SCAN, names="symmetric"),
    _guess(call="wqk.directionality(query, key)", command=_SCAN, names="direction directional"),
    _guess(
        call='wqk.scan(ref, measures=["ceiling"])',
        command="wqk scan REF --ceiling adds the largest score that any input can produce",
        names="bound bounds ceiling ceilings logit_bound max_logit",
    ),
    _guess(
        call='wqk.scan(ref, measures=["spectrum"])',
        command="wqk scan REF --spectrum adds measures of singular values and eigenvalues",
        names="spectra spectrum",
    ),
    _guess(
        call="wqk.open(ref)[layer, head].qk, a form: form.eigenvalues(), form.svd(), form.norm",
        command="wqk scan REF --spectrum has measures of them; in Python, "
        "wqk.open(ref)[layer, head] has svd(), singular_values() and eigenvalues()",
        names="eig eigen eigenvalue eigenvalues eigs norm norms rank singular singular_values "
        "singularvalues svd svdvals",
    ),
    _guess(
        call="wqk.open(ref)[layer, head].numpy()",
        command="in Python, wqk.open(ref)[layer, head].numpy() is the matrix of a head; "
        "wqk scan REF -o FILE.csv writes the scores",
        names="dump export extract form forms matrices matrix save to_numpy w_qk write",
    ),
    _guess(
        call="wqk.coupling(model[layer]), which compares each head with the others' transposes; "
        "the cosine of two forms a and b is (a @ b.T).trace / (a.norm * b.norm)",
        command="wqk diff A B has the cosine of corresponding forms; "
        "wqk show REF --layer L --coupling compares heads with transposes",
        names="cosine cosine_similarity head_similarity",
    ),
    _guess(
        call="wqk.scan(folder), or wqk.open_run(folder)",
        command="wqk scan RUN scores all steps in the folder of a run; "
        "wqk scan REF --revision R --revision S those of a Hub id",
        names="checkpoints dynamics evolution history steps timeline trajectories trajectory "
        "trajectory_of",
    ),
    _guess(
        call="",
        command="logits of a text are computed in Python: wqk.logits(model, batch); "
        "wqk scan REF --ceiling has their largest value for any input",
        names="logits max_logits maxlogits",
    ),
    _guess(
        call='wqk.scan(ref)["symmetry_null"], or wqk.symmetry_null(query, key)',
        command="wqk scan REF --full prints what chance gives",
        names="baseline chance expected expected_symmetry null random random_baseline",
    ),
    _guess(
        call="wqk.scan(ref), whose printed table ranks the checkpoint among published ones",
        command="wqk scan REF ranks a checkpoint among published ones; wqk lab atlas has their "
        "scores",
        names="percentile percentiles rank_among typical typical_scores",
    ),
    _guess(
        call="wqk.BilinearForm(query, key)",
        command="",
        names="FactoredMatrix Form LowRank QKForm get_qk qk_matrix",
    ),
    _guess(
        call="wqk.Block: wqk.open(ref)[layer]", command="", names="Attention block get_layer heads"
    ),
    _guess(
        call="wqk.ScoreTable: wqk.scan(ref)",
        command=_TABLES,
        names="DataFrame Table dataframe table",
    ),
    _guess(
        call='wqk.demo_model("encoder")',
        command="wqk demo scans two small models",
        names="demo example sample",
    ),
    # Verbs of the laboratory, a separate package.
    _guess(call="wqk_lab.atlas.published()", command="wqk lab atlas", names="atlas published"),
    _guess(
        call="wqk_lab.corpus(...)",
        command="wqk lab corpus makes a token store of texts",
        names="build_corpus corpus tokenize",
    ),
    _guess(
        call="wqk_lab.experiments(...)",
        command="wqk lab experiments repeats the paper's training runs",
        names="experiments reproduce run_experiments",
    ),
    _guess(
        call="wqk_lab.figures",
        command="wqk lab figure NAME draws a figure of the paper",
        names="figure figures paper",
    ),
    _guess(call="wqk_lab.glue(...)", command="wqk lab glue", names="fine_tune finetune glue"),
    _guess(call="wqk_lab.speedup(...)", command="wqk lab speedup", names="speedup speedups"),
    _guess(
        call="wqk_lab.study(...)",
        command="wqk lab theory REF --corpus FILE tests the paper's statements",
        names="study theory",
    ),
    _guess(
        call="wqk_lab.train(...)",
        command="wqk lab train trains a small model and follows its scores",
        names="fit pretrain train",
    ),
    _guess(
        call="help(wqk), or help(wqk.scan) for one function",
        command="wqk --help lists the commands, and wqk COMMAND --help the options of one",
        names="doc docs documentation help man manual usage",
    ),
    # Features that only the command has.
    _guess(
        call="",
        command=_COMPLETION,
        names="completion completions install_completion",
    ),
    _guess(call="", command="wqk scan REF --out scores.tex writes LaTeX", names="latex tex"),
    _guess(
        call="",
        command="wqk models lists the model types that are read, wqk --help the commands, and "
        "wqk explain REF the tensors of a checkpoint",
        names="list",
    ),
    _guess(
        call="",
        command="wqk same REFERENCE CANDIDATE --junit FILE.xml compares two checkpoints in "
        "continuous integration; its exit status is 1 if they differ",
        names="ci junit",
    ),
    _guess(
        call="",
        command="wqk same ORIGINAL CHANGED compares a checkpoint that another program wrote",
        names="dequantize prune quantize",
    ),
    _guess(
        call="wqk.report(table, path), whose page has the BibTeX entry",
        command="the BibTeX entry is on the page How to cite, and in every report",
        names="bibtex citation cite",
    ),
    _guess(
        call="",
        command=_TABLES,
        names="table1 tables tables2 tables3",
    ),
    _guess(
        call="",
        command="wqk lab figure NAME draws fig2, fig3 or s1 to s5",
        names="fig fig2 fig3",
    ),
    _guess(
        call="wqk_lab.train(...)",
        command="wqk lab train --penalty symmetric=0.1 adds a penalty to the loss",
        names="penalty symmetry_loss symmetry_penalty",
    ),
)

# The call of Python and the clause for the command that a guessed name leads to.
CALLS = {name: guess.call for guess in GUESSES if guess.call for name in guess.names}
# The calls of functions by their own names.
FUNCTION_CALLS = {
    "compose": "wqk.compose(ref)",
    "coupling": "wqk.coupling(model[layer])",
    "diff": "wqk.diff(reference, candidate)",
    "explain": "wqk.explain(ref)",
    "kin": "wqk.kin(reference, candidate)",
    "logits": "wqk.logits(model, batch)",
    "parts": "wqk.parts(ref, text)",
    "same": "wqk.same(reference, candidate)",
    "scan": "wqk.scan(ref)",
    "show": "wqk.show(ref, layer, head)",
    "survey": "wqk.survey(refs, out=folder)",
    "tokens": "wqk.tokens(ref, layer, head)",
    "verify": "wqk.verify(ref)",
}
# People also look for functions, and for their synonyms, among the attributes of objects.
METHOD_CALLS = {
    **CALLS,
    **FUNCTION_CALLS,
    **{
        name: FUNCTION_CALLS[function]
        for name, function in FUNCTIONS.items()
        if function in FUNCTION_CALLS
    },
}

# Unknown keywords of functions, with advice.
KEYWORD_ADVICE = {
    **dict.fromkeys(
        ("adapter", "adapter_path", "lora", "peft"),
        "the adapter is the checkpoint: wqk.open(adapter, base=base)",
    ),
    **dict.fromkeys(
        ("ax", "axes", "axis"), "the figure has axes of its own; save it with figure.savefig(path)"
    ),
    **dict.fromkeys(
        ("args", "input_ids", "inputs", "kwargs"),
        'what the module is called with is one argument, such as batch={"input_ids": ids}',
    ),
    **dict.fromkeys(
        ("device", "device_map", "load_in_8bit"),
        "weights are read by NumPy; wqk.scan(ref, device=...) multiplies on a GPU",
    ),
    "distance": "a form at a distance is wqk.open(ref)[layer, head].at(distance)",
    **dict.fromkeys(
        ("progress", "quiet", "show_progress", "silent", "verbose"),
        "nothing is printed unless on_progress= is passed; leave it out",
    ),
    "trust_remote_code": "no code of a checkpoint is run; leave it out",
    "config": "options of wqk.open replace a configuration: wqk.open(ref, family=..., "
    "heads_per_layer=..., key_heads=...)",
    **dict.fromkeys(
        ("dtype", "precision", "torch_dtype"),
        "weights are read in their stored number type; leave it out",
    ),
}
# Keywords of `wqk.open` alone.
OPENING_KEYWORDS = (
    "base",
    "cache_dir",
    "family",
    "heads_per_layer",
    "key_heads",
    "local_files_only",
    "revision",
    "subfolder",
)
COMMANDS = {
    name.lower().replace("-", "_"): guess.command
    for guess in GUESSES
    if guess.command
    for name in guess.names
}


class OptionGuess(NamedTuple):
    """Guessed options, and the option with the expected effect.

    Attributes
    ----------
    names
        Guessed options.
    options
        Options with this effect; the first option of the verb is suggested.
    advice
        A clause for verbs with one of these options; by default the name of the option. Without
        ``options``, the clause is for every verb.
    verb
        The only verb of the guess; empty for all verbs.
    """

    names: tuple[str, ...]
    options: tuple[str, ...]
    advice: str
    verb: str = ""


def _option_guess(names: str, options: str = "", advice: str = "", verb: str = "") -> OptionGuess:
    """Return a guess, from names and options separated by spaces."""
    return OptionGuess(tuple(names.split()), tuple(options.split()), advice, verb)


OPTION_GUESSES = (
    # Guesses for one verb.
    _option_guess(
        "--summary --summarize --median --medians --mean --quantiles --quartiles --stats",
        advice="--json prints medians and quartiles under summary: "
        "wqk scan REF --json | jq '.summary[].symmetry_median'",
        verb="scan",
    ),
    _option_guess(
        "--metric --metrics --measure --measures --score --scores",
        advice="symmetry and directionality are always scored; --full prints every score, "
        "--csv --columns NAME some of them, and --spectrum or --ceiling adds measures",
        verb="scan",
    ),
    _option_guess(
        "--tensors --names --files --size --sizes --bytes --shapes --layers --layer",
        advice="the table lists tensors, layers and bytes, and --json also their shapes",
        verb="explain",
    ),
    _option_guess(
        "--token --word --from --source --id",
        advice="--query TOKEN lists the keys of one token, --key TOKEN its queries",
        verb="tokens",
    ),
    _option_guess(
        "--all --every --all-layers --all-heads",
        advice="one layer is drawn; wqk scan REF --picture FILE draws all layers, and "
        "wqk report REF all matrices",
        verb="show",
    ),
    _option_guess(
        "--picture --plot --figure --png",
        advice="wqk scan RUN --picture FILE draws the steps that are there",
        verb="watch",
    ),
    _option_guess(
        "--text --data --dataset --texts",
        advice="a text becomes a token store first: wqk lab corpus TEXT -o STORE; then "
        "wqk lab train --corpus STORE -o RUN",
        verb="train",
    ),
    _option_guess(
        "--exact --strict --bitwise --allclose",
        advice="the comparison is exact up to the rounding of the number types; --all compares "
        "every other tensor too, and --tolerance X accepts differences",
        verb="same",
    ),
    _option_guess(
        "--sort --sort-by --order-by --largest --most",
        advice="--top N prints the rows that moved most, and --heads --top N the heads",
        verb="diff",
    ),
    _option_guess(
        "--encoder --decoder --model",
        advice="both models are scanned; wqk scan demo:encoder or demo:decoder scores one",
        verb="demo",
    ),
    *(
        _option_guess(
            "--latex --tex --to-latex --markdown --md --csv",
            advice="wqk scan REF --out FILE.tex writes scores as LaTeX, FILE.md as Markdown, and "
            "FILE.csv as CSV",
            verb=verb,
        )
        for verb in ("train", "report", "pairs", "experiments")
    ),
    _option_guess(
        "--random --symmetric --skew --part",
        advice="every part is measured in any case: symmetric, skew and random",
        verb="parts",
    ),
    _option_guess("--json", advice="wqk scan REF --json prints the scores", verb="report"),
    # Guesses of all verbs that have an option with the effect.
    _option_guess("--latex --tex --to-latex", "--out", "--out FILE.tex writes LaTeX"),
    _option_guess("--markdown --md", "--out", "--out FILE.md writes Markdown"),
    _option_guess("--parquet --arrow", "--out", "--out FILE.parquet writes Parquet"),
    _option_guess("--jsonl --ndjson", "--out", "--out FILE.jsonl writes JSON lines"),
    _option_guess("--html --web", "--report", "--report FILE.html writes a page"),
    _option_guess("--html --report --log", "--junit", "--junit FILE.xml writes a report"),
    _option_guess("--xml --junit-xml --junitxml", "--junit"),
    _option_guess("--tsv --table --to-csv", "--csv"),
    _option_guess("--csv --tsv", "--json", "--json prints all values"),
    _option_guess("--as-json --to-json", "--json"),
    # The options of verbs that write tables in every format; others have only two formats.
    _option_guess(
        "--format -f --fmt --output-format --type",
        "--details --terms --matrix",
        "--csv and --json print these formats, and --out FILE.tex, FILE.md, FILE.jsonl or "
        "FILE.parquet writes others",
    ),
    _option_guess(
        "--format -f --fmt --output-format --type",
        "--csv --json",
        "--csv and --json print these formats, and there is no other",
    ),
    _option_guess(
        "--output --output-file --output-dir --outfile --outdir --save --save-to --write --dest "
        "--file --export -w -d",
        "--out --picture",
    ),
    _option_guess(
        "--plot --figure --fig --png --pdf --svg --image --img --draw --chart --save-plot "
        "--visualize -p",
        "--picture --out",
    ),
    _option_guess(
        "--quiet --silent -q -s",
        "--tolerance --matches --seed",
        ">/dev/null leaves only the exit status",
    ),
    _option_guess(
        "--code --print-code --show-code --show-fix --patch --script --diff",
        "--repair",
        "the code of the repair is printed with the result, --json has it under repair, and "
        "--repair FOLDER writes the repaired checkpoint",
    ),
    _option_guess(
        "--quiet --silent --no-progress -q -s",
        advice="2>/dev/null leaves only the result; a pipe shows no progress",
    ),
    _option_guess("--verbose --long --wide --all-columns --details-all -v", "--full --verbose"),
    _option_guess("--verbose -v", "--json", "--json prints all fields"),
    _option_guess("--layer --block --blocks -l", "--layers --layer"),
    _option_guess("--layers", "--layer"),
    _option_guess(
        "--layer --layers", "--csv", "all layers are read; the rows of --csv have a layer"
    ),
    _option_guess("--head --per-head --by-head --all-heads --every-head", "--head --heads"),
    _option_guess("--heads", "--head"),
    _option_guess(
        "--model --ref --checkpoint --ckpt --path --input --model-name --model-path --dir -i -m",
        advice="the checkpoint is an argument, without an option before it",
    ),
    _option_guess("--gpu --cuda", "--device", "--device cuda computes on a GPU"),
    _option_guess("--cpu", "--device", "the processor is the default; leave it out"),
    _option_guess(
        "--workers --num-workers --threads --parallel --processes --procs --cores -j", "--jobs"
    ),
    _option_guess("--limit --max --rows --num --topk --top-k --first --n -k -n", "--top"),
    _option_guess(
        "--asc --ascending --desc --descending --reverse --tail --bottom -r",
        "--sort",
        "--sort symmetry prints the largest values first, --sort -symmetry the smallest",
    ),
    _option_guess("--sort --sort-by --order-by", "--csv", "sort the rows of --csv"),
    _option_guess("--where --filter --query", "--csv", "filter the rows of --csv"),
    _option_guess(
        "--column --select --fields", "--columns", "--csv --columns NAME,NAME prints some"
    ),
    _option_guess("--columns --column --select --fields", "--csv", "--csv prints all columns"),
    _option_guess("--no-color --no-colour --color", advice="set NO_COLOR=1 in the environment"),
    _option_guess(
        "--steps --step --last --all --all-steps",
        "--details",
        "the folder of a run stands for all its steps, RUN/checkpoint-100 for one",
    ),
    _option_guess("--order --sort-by --order-by --by --rank", "--sort"),
    _option_guess(
        "--fold --fold-ln --fold-layernorm --ln --norm --layernorm --fold-norms", "--fold-norm"
    ),
    _option_guess("--svd --singular --directions --singular-directions", "--directions --spectrum"),
    _option_guess("--ov --qk", "--circuit", "--circuit ov scores values and outputs"),
    _option_guess("--threshold --outlier --outliers --sigma --std", "--gamma"),
    _option_guess("--tol --atol --rtol --eps --epsilon", "--tolerance"),
    _option_guess("--k --q --v --side", "--kind", "--kind k chooses the side: q, k, v or all"),
    _option_guess(
        "--map --heat-map --heatmap",
        "--matrix",
        "--matrix --picture FILE draws a map of all pairs",
    ),
    _option_guess("--matrix", "--picture"),
    _option_guess("--rev --branch --commit --tag", "--revision"),
    _option_guess(
        "--config",
        "--family",
        "config.json is read from the folder of the weights; --family NAME|FILE.toml describes "
        "other tensors",
    ),
    _option_guess("--architecture --arch --model-type", "--family"),
    _option_guess(
        "--check --baseline --compare --fail-above --fail-if --fail-on --max-change --assert",
        advice="wqk same REFERENCE CANDIDATE --tolerance X exits with 1 if two checkpoints differ",
    ),
    _option_guess(
        "--wandb --wandb-project --tensorboard --logdir --log --mlflow --log-to",
        advice="the scores go to loggers in Python: wqk.ScoreCallback(folder).attach(trainer); "
        "Monitor(model)(step) returns those of a step",
    ),
    _option_guess(
        "--dtype --precision --fp32 --float32 --half",
        advice="weights are read in their stored number type and scored in float32 or float64",
    ),
    _option_guess("--install-completion --show-completion --completion", advice=_COMPLETION),
    _option_guess(
        "--list",
        "--published",
        "the figures are fig2, fig3 and s1 to s5, the tables table1, tableS2 and tableS3",
    ),
    _option_guess("--latex", "--published", "--out FILE.tex writes a table as LaTeX"),
    _option_guess(
        "--typical --atlas --percentile",
        advice="wqk scan REF ranks a checkpoint among published ones",
    ),
    _option_guess("--num-heads --n-heads --n-head --num-attention-heads", "--heads-per-layer"),
    _option_guess("--kv-heads --num-kv-heads --num-key-value-heads", "--key-heads"),
    _option_guess("--interval --poll --refresh --sleep", "--every"),
    _option_guess("--last --stop --end --max-steps", "--until"),
    _option_guess("--exit --no-wait --one-shot --oneshot --single", "--once"),
    _option_guess(
        "--csv --json", "--until", "the scores are written to DIR/wqk-scores; wqk scan RUN prints"
    ),
    _option_guess(
        "--fix --apply --write-fix -o --out --output",
        "--repair",
        "--repair FOLDER writes a repaired copy",
    ),
    _option_guess("--dryrun --dry --list --plan -n", "--dry-run"),
    _option_guess(
        "--dry-run --dryrun --dry --list --plan",
        advice="wqk explain REF shows the tensors and bytes that a scan would read",
    ),
    _option_guess("--base-model --base-path", "--base"),
    _option_guess(
        "--adapter --adapters --lora --peft",
        "--base",
        "the adapter's folder is the checkpoint; --base BASE names the model that it changes",
    ),
    _option_guess("--resume --continue", "--out", "the same command resumes what was interrupted"),
    _option_guess("--token --hf-token --auth", advice="set HF_TOKEN in the environment"),
    _option_guess("--offline --local-files-only", advice="set HF_HUB_OFFLINE=1 in the environment"),
    _option_guess("--cache --cache-dir", advice="set HF_HUB_CACHE in the environment"),
    _option_guess(
        "--trust-remote-code", advice="no code of a checkpoint is run; leave the option out"
    ),
    _option_guess("--text --data --dataset --corpus", "--text --corpus"),
)


# Advice on a call that lacks an argument or an option.
MISSING = {
    "train": "a new run also has a token store: wqk lab train --corpus STORE --out RUN; "
    "wqk lab corpus TEXT -o STORE makes one of a text",
}
# Advice on words that follow the arguments of a verb.
EXTRA_ARGUMENTS = {
    "explain": "of two checkpoints, wqk same A B names the difference, and wqk scan A B scores "
    "both",
    **dict.fromkeys(
        ("show", "tokens", "compose", "verify", "parts"),
        "one checkpoint at a time; wqk scan A B scores several",
    ),
    "diff": "two checkpoints at a time; wqk scan A B C scores several",
    "kin": "two models at a time; wqk scan A B C scores several",
    "same": "a merged model has further parents: --merged-with REF",
    "watch": "one run at a time; wqk scan RUN RUN scores the steps of several",
    "train": "a text becomes a token store first: wqk lab corpus TEXT -o STORE; then "
    "wqk lab train --corpus STORE -o RUN",
}


def option_advice(name: str, usages: Mapping[str, str], verb: str = "") -> str:
    """Return a clause for an option that a verb lacks; empty for an unknown option.

    Parameters
    ----------
    name
        The option that was typed.
    usages
        By option of the verb, the option with its value: ``--picture FILE``.
    verb
        Name of the verb.

    Examples
    --------
    >>> usages = {"--json": "--json", "--picture": "--picture FILE"}
    >>> option_advice("--plot", usages), option_advice("--nonsense", usages)
    ('did you mean --picture FILE?', '')
    >>> option_advice("--latex", usages), option_advice("--latex", {"--out": "--out FILE"})
    ('', '--out FILE.tex writes LaTeX')
    """
    for guess in OPTION_GUESSES:
        if name not in guess.names or guess.verb not in ("", verb):
            continue
        if not guess.options:
            return guess.advice
        for option in guess.options:
            if option in usages and option != name:
                return guess.advice or f"did you mean {usages[option]}?"
    return ""
