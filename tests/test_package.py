"""The wheel: everything is in it, and its declared core dependencies are enough to run it."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest

from wqk._version import ADDRESS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def metadata_of(wheel: Path) -> Message:
    """The metadata of a wheel, whose body is its description."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        return email.message_from_bytes(archive.read(name))


def core_requirements(wheel: Path) -> set[str]:
    """Names of the packages that the wheel itself requires, without extras."""
    return named(metadata_of(wheel).get_all("Requires-Dist", []))


def named(lines: list[str]) -> set[str]:
    """Names of the requirements that hold here, on this Python, without extras."""
    from packaging.requirements import Requirement

    names: set[str] = set()
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            names.add(re.sub(r"[-_.]+", "-", requirement.name).lower())
    return names


def closure(names: set[str]) -> set[str]:
    requirements: set[str] = set()
    todo = set(names)
    while todo:
        name = todo.pop()
        requirements.add(name)
        todo |= named(metadata.requires(name) or []) - requirements
    return requirements


def test_the_wheel_runs_the_demo_with_its_core_dependencies_alone(wheel, tmp_path):
    environment = tmp_path / "empty"
    venv.create(environment)
    paths = {"base": str(environment), "platbase": str(environment)}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # What an installer would fetch: each core dependency, and what it needs in turn.
    for name in closure(core_requirements(wheel)):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    python = environment / "bin" / "python"
    absent = "import importlib.util as u; print([n for n in ('torch', 'pytest') if u.find_spec(n)])"
    assert subprocess.check_output([python, "-c", absent], text=True).strip() == "[]"
    done = subprocess.run(
        [python, "-m", "wqk", "demo"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "symmetry" in done.stdout
    assert "decoder" in done.stdout


def test_the_wheel_is_small_and_complete(wheel: Path) -> None:
    assert wheel.stat().st_size < 2_300_000
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "wqk").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected <= names


def test_links_of_the_description_work_on_a_package_index(wheel: Path) -> None:
    description = metadata_of(wheel).get_payload(decode=True).decode("utf-8")
    links = re.findall(r"\]\(([^)]+)\)|srcset=\"([^\"]+)\"", description)
    links = [link or picture for link, picture in links]
    assert len(links) > 15
    assert [link for link in links if not link.startswith("https://")] == []
    of_the_project = [link for link in links if link.startswith(ADDRESS)]
    for picture in ("demo", "demo-narrow"):
        assert f"{ADDRESS}/raw/main/docs/images/{picture}.png" in of_the_project
    for link in of_the_project:
        path = re.sub(r"^/(blob|raw)/main/", "", link.removeprefix(ADDRESS))
        assert (ROOT / path).exists()
