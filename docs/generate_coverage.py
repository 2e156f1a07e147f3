"""The page of covered models, from the families' data and from what running the models showed.

Nothing in it is written by hand: `model-types.jsonl` is written by `tools/deriving`, which
builds a tiny random model of every type and compares the products of its queries and keys with the
forms that are read from the saved file.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from wqk.checkpoints.gguf import architectures, commit
from wqk.families import families
from wqk.families.family import family_of_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from wqk.families import AttentionRule, Family

OUTCOMES = Path(__file__).parent / "model-types.jsonl"
CONVERTED = Path(__file__).parents[1] / "tests" / "families" / "llama-cpp.jsonl"
PUBLISHED = Path(__file__).parents[1] / "tests" / "families" / "published.jsonl"

HEAD = """\
# Models that are read

<p class="filter" hidden><label>Is your model read?
<input type="search" placeholder="gemma, gguf, refused, …"></label> <output></output></p>

`wqk` reads {types} model types in {families} families, and composite models with parts of these
types. The tables below are folded; the box above opens the rows that contain its words. For a
checkpoint of your own, `wqk explain REF` shows the family, and `wqk verify REF` compares the forms
with the running model. `wqk models` prints the list in a terminal, `wqk models WORD` a part of it.

Each model type of transformers {version} was tested: a tiny random model was built, saved and run.
The products of queries and keys that the model computed were compared, at distance 0, with the
forms that are read from the saved file; scales, masks and rotary positions were compared as well.
The outcomes of {all} types:

| outcome | types | meaning |
|---|--:|---|
{counts}
A guess follows from the names of tensors. The scores of a guess have the status `guessed`.
"""

MEANINGS = {
    "proven": "read right, in every point that was compared",
    "partial": "read right, the form being a part of the score, with the reason",
    "guessed, right": "no family: a guess, with status `guessed`, whose forms are right",
    "guessed, incomplete": "no family: a right guess that leaves some attention out",
    "guessed, wrong": "no family: a guess, with status `guessed`, of something else",
    "read, right": "forms are right; another point could not be confirmed",
    "read, incomplete": "what is read is right; other attention of the model is not read",
    "read, wrong": "read wrongly",
    "refused": "refused, with the reason",
    "silent": "no softmax attention was seen",
    "not run": "could not be run here",
    "not built": "could not be built here",
    "pending": "not measured yet",
}

OUTSIDE = """\
## Attention without a form

Some attention has no W_q W_kᵀ, and is not read:

- Deformable attention (the pixel decoder of Mask2Former, the encoder of Deformable DETR) has no
  keys: weights and places are linear in the query.
- Attention by convolution, by Fourier transform or by recurrence.

A model without code in `transformers` can be read with a [family file](how-to/family.md)
(`--family FILE.toml`), but not verified.
"""

GGUF = """\
## GGUF, by architecture

Of the {all} architectures of llama.cpp at commit {commit}, {read} are read and {refused} are
refused. The facts about each architecture come from llama.cpp's sources. For an architecture marked
*converted*, every test reads a file that llama.cpp's own converter wrote.
"""

CONFIGURATIONS = """\
Published settings of {all} models, old keys and large numbers included, were built with small
widths, saved and run. Forms, scales, biases, norms, masks, windows, rotary positions and the
probability of every pair of tokens were compared. {proven} models are read as they run. The others
have no code in transformers that could run.
"""

NO_CODE = (
    "transformers has no code of this type, and wqk no family: a guess, called one, or refused"
)

COLUMNS = ("family", "attention", "layout", "beside the form", "window", "status")


def outcomes() -> tuple[str, list[dict[str, str]]]:
    """The version of transformers, and what became of each of its model types."""
    lines = OUTCOMES.read_text(encoding="utf-8").splitlines()
    first, *rows = map(json.loads, lines)
    return first["transformers"], rows


def coverage() -> str:
    """The page, in Markdown."""
    family_by_name = families()
    version, rows = outcomes()
    counted = Counter(row["outcome"] for row in rows)
    types = sum(len(family.model_types) for family in family_by_name.values())
    reasons: dict[str, list[str]] = {}
    notes: dict[str, list[str]] = {}
    for family in family_by_name.values():
        for rule in family.attention:
            where = f"`{family.name}` {rule.stack} {rule.kind}"
            for text, gathered in ((_reason(rule), reasons), (rule.note, notes)):
                if text and where not in gathered.setdefault(text, []):
                    gathered[text].append(where)
    refused = {family.name: family.refusal for family in family_by_name.values() if family.refusal}
    parts = [
        HEAD.format(
            types=types,
            families=len(family_by_name),
            version=version,
            all=len(rows),
            counts="".join(
                f"| {kind} | {counted[kind]} | {meaning} |\n"
                for kind, meaning in MEANINGS.items()
                if counted[kind]
            ),
        ),
        "## Model types\n",
        _folded(
            f"All {len(rows)} model types",
            _table(
                ("model type", "outcome", "family", "why"),
                ((f"`{r['type']}`", r["outcome"], r["family"], r["why"]) for r in rows),
            ),
        ),
        "## Published configurations\n",
        _published({row["type"] for row in rows}),
        "## Attention, by family\n",
        _folded(
            f"{len(family_by_name)} families", _table(COLUMNS, _attention_rows(family_by_name))
        ),
        *_gguf(),
        "## Why some forms are partial\n",
        _folded("Reasons, with families", _list(reasons)),
        "## Notes\n",
        _folded("Notes on families", _list(notes)),
        OUTSIDE,
    ]
    if refused:
        lines = "".join(f"- `{name}`: {reason}.\n" for name, reason in refused.items())
        parts.append(_folded("Refused families, with the message", lines))
    return "\n".join(parts)


def _gguf() -> Iterator[str]:
    """What becomes of each architecture of llama.cpp."""
    lines = CONVERTED.read_text(encoding="utf-8").splitlines()
    converted = {json.loads(line)["metadata"]["general.architecture"] for line in lines}
    rows = []
    for name, code in sorted(architectures().items()):
        family = family_of_type(f"gguf-{name}")
        refused = family.refusal if family else ""
        window = code.get("window", {}).get("kind", "")
        turned = "" if refused else code.get("rotary", "")
        mark = "yes" if name in converted else ""
        facts = (turned, window, mark, "refused" if refused else "read", refused)
        rows.append((f"`{name}`", family.name if family else "", *facts))
    read = sum(row[-2] == "read" for row in rows)
    yield GGUF.format(all=len(rows), commit=commit()[:9], read=read, refused=len(rows) - read)
    columns = ("architecture", "family", "rotary", "window", "converted", "outcome", "why")
    yield _folded(f"All {len(rows)} architectures", _table(columns, rows))


def _published(types: set[str]) -> str:
    """The table of published configurations, all of which the tests prove."""
    lines = [json.loads(line) for line in PUBLISHED.read_text(encoding="utf-8").splitlines()]
    rows = []
    for line in lines:
        kind, place = line["config"]["model_type"], line["repository"]
        family = family_of_type(kind)
        reading = NO_CODE if family is None else f"read, not run: {NO_CODE.partition(',')[0]}"
        reading = f"refused: {family.refusal}" if family and family.refusal else reading
        outcome = "proven" if kind in types else reading
        link = f"[{place}](https://github.com/{place}/tree/{line['commit']})"
        rows.append((line["model"], f"`{kind}`", outcome, link))
    proven = sum(row[2] == "proven" for row in rows)
    table = _table(("model", "model type", "outcome", "seen in"), rows)
    text = CONFIGURATIONS.format(all=len(rows), proven=proven)
    return f"{text}\n{_folded(f'All {len(rows)} models', table)}"


def write(path: Path) -> None:
    """Write the page, unless it is there already: an unchanged file is not read anew."""
    page = coverage()
    if not path.exists() or path.read_text(encoding="utf-8") != page:
        path.write_text(page, encoding="utf-8")


def _attention_rows(known: Mapping[str, Family]) -> Iterator[tuple[str, ...]]:
    for family in known.values():
        rows = [
            (
                f"`{family.name}`",
                f"{rule.stack} {rule.kind}",
                _layout(rule),
                ", ".join(_beside(rule)),
                _window(rule),
                _status(rule),
            )
            for rule in family.attention
        ]
        yield from dict.fromkeys(rows)


def _layout(rule: AttentionRule) -> str:
    fused = f" {'|'.join(role for role, *_ in rule.sections) or 'q|k|v'}" if rule.fused else ""
    return rule.layout + fused


def _beside(rule: AttentionRule) -> Iterator[str]:
    """What a score holds beside the form and the biases."""
    if rule.rotary and rule.rotary.axes == 1:
        yield f"rotary ({rule.rotary.order})"
    if rule.position:
        yield rule.position
    if rule.softcap:
        yield "softcap"
    if rule.sinks:
        yield "sinks"


def _window(rule: AttentionRule) -> str:
    if not rule.window:
        return ""
    return "square" if rule.window_axes == 2 else "yes"


def _status(rule: AttentionRule) -> str:
    if rule.partial or not rule.norm_gain:
        return "partial"
    return "partial where normalized or cut off" if _reason(rule) else "ok"


def _reason(rule: AttentionRule) -> str:
    """Why the rule's forms are partial, in all models or in those that have the tensors for it."""
    reasons = [rule.partial] if rule.partial else []
    if rule.query_norm or rule.key_norm:
        reasons.append(
            "where queries and keys are normalized token by token, the gains are folded into the "
            "form, the tokens' own scales are not"
        )
    elif not rule.norm_gain:
        reasons.append(
            "queries and keys are normalized token by token before they meet; the tokens' own "
            "scales are not in the form"
        )
    if rule.clip:
        reasons.append("where queries and keys are cut off, the form is the score of smaller ones")
    return "; ".join(reasons)


def _folded(title: str, content: str) -> str:
    """Content that opens on a click, and where the page's filter finds rows in it."""
    return f"<details><summary>{title}</summary>\n\n{content}\n</details>\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    escaped = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def _list(gathered: Mapping[str, Sequence[str]]) -> str:
    return "".join(
        f"- {text[0].upper()}{text[1:]}: {', '.join(where)}.\n" for text, where in gathered.items()
    )
