"""Guessed names of functions, verbs and options, and the names in wqk.

The guesses come from other libraries, and from watching people who use wqk for the first time.
`GUESSES` serves Python and the command; `OPTION_GUESSES` has the options of the command.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Guess(NamedTuple):
    """A function with the names that people guess for the function.

    Attributes
    ----------
    call
        The call of the function in Python.
    command
        The verb of the command, as a clause; empty if the command has no such verb.
    names
        Guessed names, separated by spaces.
    """

    call: str
    command: str
    names: str


_EXPLAIN = "wqk explain REF shows what a checkpoint contains, and what a scan would read"
_SCAN = "wqk scan REF scores every layer"
_WATCH = "wqk watch RUN scores each checkpoint of a run as soon as it is complete"
_REPORT = "wqk report TABLE... -o report.html shows score tables"

GUESSES = (
    Guess(
        call="wqk.open(ref)",
        command=_EXPLAIN,
        names="attention from_pretrained head layer load load_checkpoint load_model open_model "
        "read read_attention",
    ),
    Guess(
        call="wqk.scan(ref)",
        command=_SCAN,
        names="analyse analyze compute evaluate measure run score score_model scores stats",
    ),
    Guess(call="wqk.explain(ref)", command=_EXPLAIN, names="describe info inspect summary"),
    Guess(
        call="wqk.same(reference, candidate)",
        command="wqk same REFERENCE CANDIDATE compares two checkpoints, and with --repair FOLDER "
        "it writes a repaired copy",
        names="allclose check_conversion compare conversion convert equal equals is_same repair "
        "similarity",
    ),
    Guess(
        call="wqk.diff(reference, candidate)",
        command="wqk diff A B measures how far apart the forms of two checkpoints are",
        names="changes delta difference distance",
    ),
    Guess(
        call="wqk.kin(reference, candidate)",
        command="wqk kin A B finds out whether two checkpoints are related",
        names="fingerprint lineage parent related",
    ),
    Guess(
        call="wqk.verify(ref)",
        command="wqk verify REF compares the scores with those of the running model",
        names="check test validate",
    ),
    Guess(call="wqk.watch(run, out=folder)", command=_WATCH, names="follow tail track"),
    Guess(
        call="wqk.Monitor(model, path)",
        command=_WATCH,
        names="Tracker attach hook log monitor monitoring",
    ),
    Guess(
        call="wqk.ScoreCallback(folder)",
        command=_WATCH,
        names="Callback LightningCallback TrainerCallback WqkCallback callback",
    ),
    Guess(
        call="wqk.show(ref, layer)",
        command="wqk show REF --layer L draws a form, and wqk scan REF --picture FILE.png the "
        "scores of all layers",
        names="display draw heatmap picture plot view visualise visualize",
    ),
    Guess(
        call="wqk.tokens(ref, layer, head)",
        command="wqk tokens REF --layer L --head H shows the tokens that a head matches",
        names="directions logit_lens token_pairs top_tokens vocabulary",
    ),
    Guess(
        call="wqk.compose(ref)",
        command="wqk compose REF finds the heads that read what earlier heads write",
        names="all_composition_scores circuits composition composition_scores induction",
    ),
    Guess(
        call="wqk.survey(refs, out=folder)",
        command="wqk survey REF... --out DIR scores many checkpoints into one table",
        names="batch scan_many sweep",
    ),
    Guess(call="wqk.report(table, path)", command=_REPORT, names="dashboard html to_html"),
    Guess(
        call="wqk.read_table(path)",
        command=_REPORT,
        names="load_scores load_table read_csv read_parquet table_file",
    ),
    Guess(call="wqk.join(tables)", command="", names="concat merge"),
    Guess(
        call="wqk.initialize_(model)",
        command="initial weights are set in Python: wqk.initialize_(model)",
        names="init init_ init_symmetric initialize initialize_symmetric symmetric_init "
        "symmetric_init_ symmetrize symmetrize_",
    ),
    Guess(
        call="wqk.clip_(model, limit)",
        command="weights are clipped in Python: wqk.clip_(model, limit)",
        names="clip muonclip qk_clip qk_clip_ qkclip",
    ),
    Guess(
        call="wqk.attention_matrices(model, batch)",
        command="attention weights are computed in Python: wqk.attention_matrices(model, batch)",
        names="attention_maps attention_patterns attention_weights attentions get_attention",
    ),
    Guess(
        call="wqk.label_heads(model)",
        command="heads are labeled in Python: wqk.label_heads(model)",
        names="detect_heads head_detector head_labels induction_heads previous_token_heads",
    ),
    Guess(call="wqk.symmetry(query, key)", command=_SCAN, names="sym symmetry_of symmetry_score"),
    Guess(
        call="wqk.directionality(query, key)",
        command=_SCAN,
        names="direction directional directionality_score",
    ),
    Guess(
        call="wqk.BilinearForm(query, key)",
        command="",
        names="FactoredMatrix Form LowRank QKForm form get_qk qk_matrix",
    ),
    Guess(
        call="wqk.Block: wqk.open(ref)[layer]", command="", names="Attention block get_layer heads"
    ),
    Guess(
        call="wqk.ScoreTable: wqk.scan(ref)",
        command="",
        names="DataFrame Table dataframe table",
    ),
    Guess(
        call='wqk.demo_model("encoder")',
        command="wqk demo scans two small models",
        names="demo example sample",
    ),
    # Verbs of the laboratory, which is a package of its own.
    Guess(call="wqk_lab.atlas(...)", command="wqk lab atlas", names="atlas published"),
    Guess(
        call="wqk_lab.corpus(...)",
        command="wqk lab corpus makes a token store of texts",
        names="build_corpus corpus tokenize",
    ),
    Guess(
        call="wqk_lab.experiments(...)",
        command="wqk lab experiments repeats the paper's training runs",
        names="experiments reproduce run_experiments",
    ),
    Guess(
        call="wqk_lab.figures",
        command="wqk lab figure NAME draws a figure of the paper",
        names="figure figures paper",
    ),
    Guess(call="wqk_lab.glue(...)", command="wqk lab glue", names="fine_tune finetune glue"),
    Guess(call="wqk_lab.speedup(...)", command="wqk lab speedup", names="speedup speedups"),
    Guess(
        call="wqk_lab.study(...)",
        command="wqk lab theory REF --corpus FILE tests the paper's statements",
        names="study theory",
    ),
    Guess(
        call="wqk_lab.train(...)",
        command="wqk lab train trains a small model and follows its scores",
        names="fit pretrain train",
    ),
    # What only the command has.
    Guess(
        call="",
        command="the page of commands has the line for your shell's start-up file",
        names="completion completions install-completion",
    ),
    Guess(call="", command="wqk scan REF --out scores.tex writes LaTeX", names="latex tex"),
    Guess(call="", command="wqk --version prints the version", names="version"),
    Guess(
        call="",
        command="the BibTeX entry is on the page How to cite, and in every report",
        names="bibtex citation cite",
    ),
    Guess(
        call="",
        command="wqk lab figure NAME --out FILE.md writes table1, tableS2 or tableS3",
        names="table1 tables tables2 tables3",
    ),
    Guess(
        call="",
        command="wqk lab figure NAME draws fig2, fig3 or s1 to s5",
        names="fig fig2 fig3",
    ),
    Guess(
        call="wqk_lab.train(...)",
        command="wqk lab train --penalty symmetric=0.1 adds a penalty to the loss",
        names="penalty symmetry_loss symmetry_penalty",
    ),
)

# The call of Python and the clause for the command that a guessed name leads to.
CALLS = {name: guess.call for guess in GUESSES if guess.call for name in guess.names.split()}
COMMANDS = {
    name.lower(): guess.command
    for guess in GUESSES
    if guess.command
    for name in guess.names.split()
}


class OptionGuess(NamedTuple):
    """Guessed options, and the option with the expected effect.

    Attributes
    ----------
    names
        Guessed options, separated by spaces.
    options
        Options with this effect, separated by spaces; the first option of the verb is suggested.
    advice
        A clause for verbs with one of these options; by default its name. Without ``options``, it
        holds for every verb.
    """

    names: str
    options: str = ""
    advice: str = ""


OPTION_GUESSES = (
    OptionGuess("--latex --tex --to-latex", "--out", "--out FILE.tex writes LaTeX"),
    OptionGuess("--markdown --md", "--out", "--out FILE.md writes Markdown"),
    OptionGuess("--parquet --arrow", "--out", "--out FILE.parquet writes Parquet"),
    OptionGuess("--jsonl --ndjson", "--out", "--out FILE.jsonl writes JSON lines"),
    OptionGuess("--html --web", "--report", "--report FILE.html writes a page"),
    OptionGuess("--html --report --log", "--junit", "--junit FILE.xml writes a report"),
    OptionGuess("--xml --junit-xml --junitxml", "--junit"),
    OptionGuess("--tsv --table --to-csv", "--csv"),
    OptionGuess("--as-json --to-json", "--json"),
    OptionGuess(
        "--format -f --fmt --output-format --type",
        "--csv --json",
        "--csv and --json print these formats, and the ending of a file chooses its own",
    ),
    OptionGuess(
        "--output --output-file --output-dir --outfile --outdir --save --save-to --write --dest "
        "--file --export -w -d",
        "--out --picture",
    ),
    OptionGuess(
        "--plot --figure --fig --png --pdf --svg --image --img --draw --chart --save-plot "
        "--visualize --heatmap -p",
        "--picture --out",
    ),
    OptionGuess(
        "--quiet --silent --no-progress -q -s",
        advice="2>/dev/null leaves only the result; a pipe shows no progress",
    ),
    OptionGuess("--verbose --long --wide --all-columns --details-all -v", "--full --verbose"),
    OptionGuess("--verbose -v", "--json", "--json prints all fields"),
    OptionGuess("--layer --block --blocks -l", "--layers --layer"),
    OptionGuess("--layers", "--layer"),
    OptionGuess("--layer --layers", "--csv", "all layers are read; the rows of --csv have a layer"),
    OptionGuess("--head --per-head --by-head --all-heads --every-head", "--head --heads"),
    OptionGuess("--heads", "--head"),
    OptionGuess(
        "--model --ref --checkpoint --ckpt --path --input --model-name --model-path --dir -i -m",
        advice="the checkpoint is an argument, without an option before it",
    ),
    OptionGuess("--gpu --cuda", "--device", "--device cuda computes on a GPU"),
    OptionGuess("--cpu", "--device", "the processor is the default; leave it out"),
    OptionGuess(
        "--workers --num-workers --threads --parallel --processes --procs --cores -j", "--jobs"
    ),
    OptionGuess("--limit --max --rows --num --topk --top-k --first --n -k -n", "--top"),
    OptionGuess("--order --sort-by --order-by --by --rank", "--sort"),
    OptionGuess(
        "--fold --fold-ln --fold-layernorm --ln --norm --layernorm --fold-norms", "--fold-norm"
    ),
    OptionGuess("--svd --singular --directions --singular-directions", "--directions --spectrum"),
    OptionGuess("--ov --qk", "--circuit", "--circuit ov scores values and outputs"),
    OptionGuess("--threshold --outlier --outliers --sigma --std", "--gamma"),
    OptionGuess("--tol --atol --rtol --eps --epsilon", "--tolerance"),
    OptionGuess("--k --q --v --side", "--kind", "--kind k chooses the side: q, k, v or all"),
    OptionGuess("--map --heat-map --matrix", "--matrix --picture"),
    OptionGuess("--rev --branch --commit --tag", "--revision"),
    OptionGuess("--config --architecture --arch --model-type", "--family"),
    OptionGuess("--num-heads --n-heads --n-head --num-attention-heads", "--heads-per-layer"),
    OptionGuess("--kv-heads --num-kv-heads --num-key-value-heads", "--key-heads"),
    OptionGuess("--interval --poll --refresh --sleep", "--every"),
    OptionGuess("--last --stop --end --max-steps", "--until"),
    OptionGuess("--once", "--until", "wqk scan RUN scores the steps of a run and ends"),
    OptionGuess(
        "--csv --json", "--until", "the scores are written to DIR/wqk-scores; wqk scan RUN prints"
    ),
    OptionGuess("--fix --apply --write-fix", "--repair"),
    OptionGuess("--dryrun --dry --list --plan", "--dry-run"),
    OptionGuess("--base-model --base-path", "--base"),
    OptionGuess("--resume --continue", "--out", "the same command resumes what was interrupted"),
    OptionGuess("--token --hf-token --auth", advice="set HF_TOKEN in the environment"),
    OptionGuess("--offline --local-files-only", advice="set HF_HUB_OFFLINE=1 in the environment"),
    OptionGuess("--cache --cache-dir", advice="set HF_HUB_CACHE in the environment"),
    OptionGuess(
        "--trust-remote-code", advice="no code of a checkpoint is run; leave the option out"
    ),
    OptionGuess("--text --data --dataset --corpus", "--text --corpus"),
)


def option_advice(name: str, options: Collection[str]) -> str:
    """Return a clause for an option that a verb lacks; empty if nothing is known of it.

    Parameters
    ----------
    name
        The option that was typed.
    options
        The options that the verb has.

    Examples
    --------
    >>> option_advice("--plot", ["--out", "--picture"]), option_advice("--nonsense", ["--out"])
    ('did you mean --picture?', '')
    >>> option_advice("--latex", ["--out"]), option_advice("--latex", ["--json"])
    ('--out FILE.tex writes LaTeX', '')
    """
    for guess in OPTION_GUESSES:
        if name not in guess.names.split():
            continue
        if not guess.options:
            return guess.advice
        for option in guess.options.split():
            if option in options and option != name:
                return guess.advice or f"did you mean {option}?"
    return ""
