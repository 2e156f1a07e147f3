"""The page of covered models, from the families' data and from the tables of the tests.

Nothing in it is written by hand: a family that is added to the package, or a model that is added to
a test, is on the page when the documentation is built next.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

from wqk.families import families

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from wqk.families import AttentionRule, Family

TESTS = Path(__file__).parents[1] / "tests" / "families"

HEAD = """\
# Models that are read

`wqk` knows {types} model types in {families} families. A type is *proven* where a tiny random model
of it attends, to 1e-12, with the attention that is computed from the forms read out of its saved
file; the tests that do so are named beside it. Where no family knows a type, the tensors' names are
looked at, and the tables say that it was a guess; `wqk verify` runs the proof on any checkpoint.

What is added to a score beside the form stands under *beside the form*. Where one form per head
does not hold the whole score, the score tables have the status `partial`, and the reason is below.
"""

OUTSIDE = """\
## Attention without a form

Some attention has no W_q W_kᵀ at all, and is not read:

- Deformable attention (the pixel decoder of Mask2Former, the encoder of Deformable DETR): there are
  no keys; the weights and the places that are looked at are linear in the query.
- Attention by convolution, by Fourier transform or by recurrence.

Models that `transformers` has no code for, such as MAGNeT, can be read with a family file of one's
own (`--family FILE.toml`), but not verified.
"""

COLUMNS = ("family", "attention", "layout", "beside the form", "window", "status")


def coverage(tests: Path = TESTS) -> str:
    """The page, in Markdown."""
    known = families()
    proofs = proofs_by_type(known, tests)
    types = sum(len(family.model_types) for family in known.values())
    reasons: dict[str, list[str]] = {}
    notes: dict[str, list[str]] = {}
    for family in known.values():
        for rule in family.attention:
            where = f"`{family.name}` {rule.stack} {rule.kind}"
            for text, gathered in ((_reason(rule), reasons), (rule.note, notes)):
                if text and where not in gathered.setdefault(text, []):
                    gathered[text].append(where)
    refused = {family.name: family.refusal for family in known.values() if family.refusal}
    parts = [
        HEAD.format(types=types, families=len(known)),
        "## Model types\n",
        _table(("family", "model type", "proven by"), _type_rows(known, proofs)),
        "## Attention, by family\n",
        _table(COLUMNS, _attention_rows(known)),
        "## Why some forms are partial\n",
        _list(reasons),
        "## Notes\n",
        _list(notes),
        OUTSIDE,
    ]
    if refused:
        parts.append("Refused, with this line:\n")
        parts.append("".join(f"- `{name}`: {reason}.\n" for name, reason in refused.items()))
    return "\n".join(parts)


def write(path: Path) -> None:
    """Write the page, unless it is there already: an unchanged file is not read anew."""
    page = coverage()
    if not path.exists() or path.read_text(encoding="utf-8") != page:
        path.write_text(page, encoding="utf-8")


def proofs_by_type(known: Mapping[str, Family], tests: Path) -> dict[str, list[str]]:
    """Names of the tests' models, by the model type that each of them is."""
    types = [kind for family in known.values() for kind in family.model_types]
    proofs: dict[str, list[str]] = {}
    for name, model in _tested_models(tests):
        kind = _type_of(name, model, types)
        if kind:
            proofs.setdefault(kind, []).append(name)
    return proofs


def _tested_models(tests: Path) -> Iterator[tuple[str, str]]:
    """Name and class of every ``Architecture("name", "Class", ...)`` in the tests."""
    for file in sorted(tests.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            texts = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant)]
            if node.func.id == "Architecture" and len(texts) == 2:
                yield str(texts[0]), str(texts[1])


def _type_of(name: str, model: str, types: Sequence[str]) -> str | None:
    """The type of a tested model: called as the test is, or else as its class begins."""
    by_letters = {_letters(kind): kind for kind in types}
    if _letters(name) in by_letters:
        return by_letters[_letters(name)]
    for written in (model, name):
        fitting = [letters for letters in by_letters if _letters(written).startswith(letters)]
        if fitting:
            return by_letters[max(fitting, key=len)]
    return None


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _type_rows(
    known: Mapping[str, Family], proofs: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, ...]]:
    for family in known.values():
        for kind in sorted(family.model_types):
            names = ", ".join(dict.fromkeys(proofs.get(kind, ())))
            if not names and family.refusal:
                names = "refused"
            elif not names and family.runs_as:
                names = f"runs as {family.runs_as}"
            yield f"`{family.name}`", f"`{kind}`", names or "not proven"


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
    fused = f" {'|'.join(rule.order)}" if rule.fused else ""
    return rule.layout + fused


def _beside(rule: AttentionRule) -> Iterator[str]:
    """What a score holds beside the form and the biases."""
    if rule.rotary:
        yield f"rotary ({rule.rotary.order})"
    if rule.score.position:
        yield rule.score.position
    if rule.score.softcap:
        yield "softcap"
    if rule.score.sinks:
        yield "sinks"


def _window(rule: AttentionRule) -> str:
    if not rule.score.window:
        return ""
    return "square" if rule.score.window_axes == 2 else "yes"


def _status(rule: AttentionRule) -> str:
    if rule.partial or not rule.norm.gain:
        return "partial"
    return "partial where normalized or cut off" if _reason(rule) else "ok"


def _reason(rule: AttentionRule) -> str:
    """Why the rule's forms are partial, in all models or in those that have the tensors for it."""
    reasons = [rule.partial] if rule.partial else []
    if rule.query.norm or rule.key.norm:
        reasons.append(
            "where queries and keys are normalized token by token, the gains are folded into the "
            "form, the tokens' own scales are not"
        )
    elif not rule.norm.gain:
        reasons.append(
            "queries and keys are normalized token by token before they meet; the tokens' own "
            "scales are not in the form"
        )
    if rule.score.clip:
        reasons.append("where queries and keys are cut off, the form is the score of smaller ones")
    return "; ".join(reasons)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    escaped = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def _list(gathered: Mapping[str, Sequence[str]]) -> str:
    return "".join(
        f"- {text[0].upper()}{text[1:]}: {', '.join(where)}.\n" for text, where in gathered.items()
    )
