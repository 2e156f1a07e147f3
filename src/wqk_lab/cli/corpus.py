"""``wqk lab corpus``: text into a token store, to train on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wqk._console import counted
from wqk.cli.options import COUNT, PATH, REF, Number, json_output
from wqk_lab.training.corpus.settings import ALPHABET, CorpusOptions
from wqk_lab.training.declared import documented, options_of

if TYPE_CHECKING:  # the help of all verbs imports this file
    from wqk_lab.training.corpus import CorpusProgress, TokenStore


def _size_or_file(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


@documented
@click.command()
@click.argument("texts", nargs=-1, metavar="TEXT...", type=REF)
@click.option("--out", "-o", type=PATH, metavar="DIR")
@click.option("--check", type=PATH, metavar="STORE")
@options_of(CorpusOptions, types={"vocabulary": _size_or_file, "held_out": Number(min=0)})
@click.option("--jobs", type=COUNT, metavar="N")
@json_output
def corpus(
    texts: tuple[str, ...],
    out: Path | None,
    check: Path | None,
    jobs: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Turn text into a token store, DIR, for wqk lab train.

    TEXT is a file (.txt, .jsonl, .csv, .parquet; also .xz, .gz, .bz2, .zst), a folder of them, a
    Hub data set (owner/name), or wikipedia, jigsaw or redpajama. The same text and options
    give the same store, byte for byte. An interrupted build leaves nothing.

    \b
    Examples:
      wqk lab corpus articles.jsonl.xz -o store
      wqk lab corpus articles.jsonl.xz --text characters -o store
      wqk lab corpus comments.csv --field comment_text --vocabulary vocab.txt -o store
      wqk lab corpus book.txt --document paragraph --vocabulary 4000 -o store
      wqk lab corpus --check store

    Parameters
    ----------
    out
        Folder of the store.  [required, unless --check is given]
    check
        Instead of making a store, read all files of this one, and compare them with its header.
    jobs
        Threads.  [default: all cores]
    """
    from wqk.cli import display
    from wqk_lab.training.corpus import TokenStore, build_corpus

    if check is not None:
        if texts or out is not None:
            raise click.UsageError(
                "--check STORE reads a finished store; leave out TEXT and --out."
            )
        checked = TokenStore.open(check)
        checked.verify()
        _print(checked, as_json)
        display.say("every file matches the header's SHA-256")
        return
    missing = ([] if texts else ["TEXT..."]) + ([] if out else ["-o"])
    if missing or out is None:
        call = f"{click.get_current_context().command_path} TEXT... -o DIR"
        raise click.UsageError(f"Missing {', '.join(missing)}: {call}")
    chosen = CorpusOptions(**options)
    with display.bar("reading", _progress()) as on_progress:
        store = build_corpus(texts, out, chosen, jobs=jobs, on_progress=on_progress)
    _print(store, as_json)
    if not as_json:
        _say_next(store)


def _progress() -> Callable[[CorpusProgress], dict[str, Any]]:
    """Return the fields of the bar: stage of the build, progress within the stage, speed."""
    start_by_stage: dict[str, float] = {}

    def changes(done: CorpusProgress) -> dict[str, Any]:
        now = time.perf_counter()
        seconds = now - start_by_stage.setdefault(done.stage, now)
        fields: dict[str, Any] = {"description": done.stage, "text": _rate(done, seconds)}
        if done.share:
            return fields | {"total": 1.0, "completed": done.share}
        return fields | {"total": None}

    return changes


def _rate(done: CorpusProgress, seconds: float) -> str:
    """Return the progress and speed of a stage.

    Examples
    --------
    >>> from wqk_lab.training.corpus import CorpusProgress
    >>> _rate(CorpusProgress("tokenizing", 1200, 8_000_000, 1_700_000, 0.5), 2.0)
    '1,200 documents, 8.0 M characters, 0.85 M tokens/s'
    """
    if not done.documents:
        return ""
    amount, name = (done.tokens, "tokens") if done.tokens else (done.characters, "characters")
    speed = f"{amount / max(seconds, 1e-9) / 1e6:.2g} M {name}/s"
    return f"{done.documents:,} documents, {done.characters / 1e6:.1f} M characters, {speed}"


# More than this share of the tokens held out is hardly what was meant.
MUCH = 0.2


def held_out_warning(tokens: Mapping[str, int]) -> str:
    """Return a warning if much of the text is held out; empty otherwise.

    Examples
    --------
    >>> held_out_warning({"train": 540, "held_out": 460})
    '46 % of the tokens are held out, since whole documents are; split them with --document ...'
    >>> held_out_warning({"train": 99, "held_out": 1})
    ''
    """
    share = tokens["held_out"] / max(1, sum(tokens.values()))
    if share <= MUCH:
        return ""
    return (
        f"{share:.0%} of the tokens are held out, since whole documents are; split them with "
        "--document paragraph, or hold out fewer with --held-out"
    ).replace("%", " %", 1)


def unknown_tokens(store: TokenStore) -> str:
    """Describe the unknown tokens of the text; empty if the store does not have their number."""
    unknown = store.about.get("unknown")
    if unknown is None:
        return ""
    tokens = sum(split.tokens for split in store.splits.values())
    if not unknown["tokens"]:
        return "unknown: 0 tokens (0 %)"
    percent = 100 * unknown["tokens"] / max(1, tokens)
    if "distinct_characters" not in unknown:
        return f"unknown: {counted(unknown['tokens'], 'token')} ({percent:.2g} %)"
    distinct = counted(unknown["distinct_characters"], "distinct character")
    # The alphabet is learned from the training text.
    most = store.about["options"].get("characters") or ALPHABET
    is_full = store.vocabulary_size - len(store.special) >= most
    reason = "--characters N keeps more" if is_full else "they occur in the held-out text alone"
    return f"unknown: {distinct} outside the alphabet, {percent:.2g} % of the tokens; {reason}"


def _print(store: TokenStore, as_json: bool) -> None:
    from wqk.cli import display

    without_special = store.vocabulary_size - len(store.special)
    if as_json:
        header = store.header
        names = ("fingerprint", "unit", "vocabulary_size", "special", "splits")
        facts = {"folder": str(store.folder)} | {name: header[name] for name in names}
        facts["vocabulary_without_special"] = without_special
        display.print_object(facts | dict(store.about))
        return
    kind = "character" if store.unit == "characters" else "token"
    click.echo(
        f"{store.folder}: {store.unit}, vocabulary of {store.vocabulary_size:,} "
        f"({counted(without_special, kind)} and {len(store.special)} special)"
    )
    for name, split in store.splits.items():
        click.echo(
            f"  {name.replace('_', ' '):9}{split.documents:>10,} documents {split.tokens:>14,} "
            f"tokens {split.characters:>14,} characters"
        )
    if sentence := unknown_tokens(store):
        click.echo(f"  {sentence}")
    click.echo(f"  fingerprint {store.fingerprint[:16]}")
    if warning := held_out_warning({name: split.tokens for name, split in store.splits.items()}):
        display.say(warning)


def _say_next(store: TokenStore) -> None:
    """Name the command that trains on a new store."""
    from wqk.cli import display

    display.say(f"train on it: wqk lab train --corpus {store.folder} -o RUN")
