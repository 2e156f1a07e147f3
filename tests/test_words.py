"""Names and words: habits that readers stumble over stay out of the code.

`docs/glossary.md` has the rules. This test contains only the worst habits, with generous limits: a
number below a limit proves nothing. A reader decides.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "src/wqk",
    "src/wqk_lab",
    "tools",
    "benchmarks",
    "tests/cli",
    "tests/forms",
    "tests/attention",
    "tests/inspecting",
    "tests/kinship",
    "tests/scanning",
    "tests/reporting",
    "tests/storage",
    "tests/tables",
    "tests/lab",
    "tests/live",
    "tests/checkpoints",
    "tests/families",
    "tests/sameness",
    "tests/attacks",
)

OPENERS = re.compile(r"(what|whether|how|which|where|of|whose|who)\b", re.IGNORECASE)

# Software does not speak; the other words are rare, or ambiguous in the sense that they had here.
BANNED = re.compile(
    r"\b(beside|likewise|so many|so much|it says|which says|tells|is told|are told|is said|are said"
    r"|other than the|taken for granted|made anew)\b",
    re.IGNORECASE,
)

# Variables that name nothing.
VAGUE = {
    *("one", "ones", "found", "told", "said", "some", "own", "apart", "its", "his", "others"),
    *("what", "which", "how", "these", "those", "few", "many", "rest", "wanted", "given"),
    *("beside", "alike", "words", "thing", "things", "stuff", "it", "they", "them", "such"),
}

PRONOUNS = re.compile(
    r"\b(it|its|they|them|their|this|that|these|those|one|ones|which|what|whose|whom|such|so|other|others)\b",
    re.IGNORECASE,
)
MOST_PRONOUNS = 12  # in 100 words of the docstrings of a file; six admired packages have 3 to 5
MOST_PRONOUNS_OF_TOOLS = 15  # their pages are still to be rewritten
FEWEST_WORDS = 150  # files with less text are not counted

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def files() -> list[Path]:
    """All files whose words are checked."""
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield place and text of every docstring, without examples and code."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            text = re.sub(r"(?ms)^Examples\n-+.*|``[^`]*``|`[^`]*`|^\s*>>>.*$", " x ", text)
            text = re.sub(r"(?m)^\w+(?:, \w+)*\n(?=    )", "", text)  # names of parameters
            yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


def comments(path: Path) -> Iterator[tuple[str, str]]:
    """Yield place and text of every comment line."""
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if match := re.search(r"(?:^|\s)# (.*)", line):
            yield f"{path.relative_to(ROOT)}:{number}", match[1]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_words(path: Path) -> None:
    problems = []
    word_count = pronouns = 0
    for place, text in docstrings(path):
        if OPENERS.match(text):
            problems.append(f"{place}: the summary begins with {text.split()[0]!r}")
        word_count += len(re.findall("[A-Za-z]+", text))
        pronouns += len(PRONOUNS.findall(text))
    for place, text in (*docstrings(path), *comments(path)):
        if match := BANNED.search(text):
            problems.append(f"{place}: {match[0]!r}")
    rate = 100 * pronouns / max(word_count, 1)
    is_tool = path.is_relative_to(ROOT / "tools")
    if word_count > FEWEST_WORDS and rate > (MOST_PRONOUNS_OF_TOOLS if is_tool else MOST_PRONOUNS):
        problems.append(f"{rate:.0f} pronouns in 100 words of docstrings: repeat the nouns")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_names(path: Path) -> None:
    problems = []
    tree = ast.parse(path.read_text("utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED[2:])]
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
                problems.append(f"{path.relative_to(ROOT)}:{node.lineno}: the variable {node.id!r}")
    assert not problems, "\n".join(problems)


def test_bad_habits_are_noticed(tmp_path: Path) -> None:
    assert OPENERS.match("Whether two forms are one.")
    assert not OPENERS.match("Return whether two forms are equal.")
    assert BANNED.search("stored beside the weights")
    assert not BANNED.search("stored besides the weights")
