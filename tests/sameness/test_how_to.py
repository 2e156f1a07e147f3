"""The script and the test file of the page on conversions do what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sameness.conversions import MISTAKES, right
from tests.small import save

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "check-a-conversion.md"


def example(language: str, word: str) -> str:
    """Return the page's only code in a language that contains a word."""
    fences = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    (code,) = (fence for fence in fences if word in fence)
    return str(code)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An original, two right copies and a wrong copy."""
    tensors, config = right("llama")
    for name in ("original", "converted", "converted-bf16"):
        save(tmp_path / name, tensors, config)
    (mistake, *_) = [m for m in MISTAKES if m.model == "llama" and "rotary" in m.verdict]
    mistake.change(tensors, config)
    save(tmp_path / "wrong", tensors, config)
    return tmp_path


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("candidate", "status", "words"),
    [
        ("converted", 0, "the same"),
        ("wrong", 1, "not the same, see report.xml"),
        ("absent", 2, "not compared"),
    ],
)
def test_the_script_handles_the_statuses(
    candidate: str, status: int, words: str, folder: Path
) -> None:
    script = example("sh", "case $?").replace("original converted", f"original ./{candidate}")
    done = run(["bash", "-c", script], folder)
    assert done.returncode == status
    assert words in done.stdout + done.stderr
    assert (folder / "report.xml").exists()


def test_the_test_file_fails_for_a_wrong_copy_alone(folder: Path) -> None:
    text = example("python", "import pytest")
    (folder / "test_conversions.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(folder), "test_conversions.py"]
    done = run(command, folder)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
    (folder / "test_conversions.py").write_text(text.replace("converted-bf16", "wrong"))
    done = run(command, folder)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "rotary order" in done.stdout
