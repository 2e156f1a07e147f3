"""The action for workflows: its steps run as they are written in action.yml."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import yaml
from tests import small

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
ACTION_PATH = "${{ github.action_path }}"
INPUT = re.compile(r"\$\{\{ inputs\.(\w+) \}\}")


class Outcome(NamedTuple):
    """Exit status of a step, and what the step passes on."""

    status: int
    outputs: dict[str, str]
    summary: str


def run_step(name: str, inputs: dict[str, str], folder: Path, **variables: str) -> Outcome:
    """Run one step of the action in a folder, as a runner does, with further variables."""
    (step,) = [step for step in ACTION["runs"]["steps"] if step["name"] == name]
    defaults = {
        name: str(declaration.get("default", "")) for name, declaration in ACTION["inputs"].items()
    }
    values = defaults | inputs
    environment = {
        name: INPUT.sub(lambda match: values[match[1]], text).replace(ACTION_PATH, str(ROOT))
        for name, text in step["env"].items()
    }
    outputs, summary = folder / "outputs", folder / "summary"
    outputs.write_text("")
    environment |= variables | {
        "GITHUB_OUTPUT": str(outputs),
        "GITHUB_STEP_SUMMARY": str(summary),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True)
    lines = outputs.read_text("utf-8").splitlines()
    return Outcome(
        done.returncode,
        dict(line.split("=", 1) for line in lines),
        summary.read_text("utf-8") if summary.exists() else "",
    )


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with a model, a copy, and two copies that differ in or outside attention."""
    model = small.llama(sides="qkvo")
    feed_forward = {"model.layers.0.mlp.up_proj.weight": np.ones((8, 24))}
    for name in ("original", "copy", "other", "outside"):
        small.save(tmp_path / name, model._arrays | feed_forward, model.config)
    small.edit(tmp_path / "other", lambda name, values: -values if "k_proj" in name else values)
    small.edit(tmp_path / "outside", lambda name, values: -values if "mlp" in name else values)
    return tmp_path


@pytest.mark.parametrize(("candidate", "status"), [("copy", 0), ("other", 1), ("absent", 2)])
def test_the_comparison_ends_as_wqk_same_does(candidate: str, status: int, models: Path) -> None:
    inputs = {"reference": "original", "candidate": candidate, "all": "true"}
    outcome = run_step("Compare", inputs, models)
    assert outcome.status == status
    assert outcome.outputs == {"status": str(status), "report": "wqk-same.xml"}
    assert ("absent" in outcome.summary) == (status == 2)
    if status < 2:
        assert (models / "wqk-same.xml").is_file()


def test_all_compares_tensors_outside_attention(models: Path) -> None:
    inputs = {"reference": "original", "candidate": "outside"}
    assert run_step("Compare", inputs, models).status == 0
    assert run_step("Compare", inputs | {"all": "true"}, models).status == 1


def test_a_tolerance_is_passed_on(models: Path) -> None:
    inputs = {"reference": "original", "candidate": "other", "tolerance": "3"}
    assert run_step("Compare", inputs, models).status == 0


def test_the_first_step_installs_the_package_that_the_second_runs(models: Path) -> None:
    site = models / "site"
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    assert run_step("Install wqk", {}, models, PIP_TARGET=str(site), **offline).status == 0
    assert (site / "bin" / "wqk").is_file()
    inputs = {"reference": "original", "candidate": "copy"}
    assert run_step("Compare", inputs, models, PYTHONPATH=str(site)).status == 0


def test_the_example_passes_inputs_that_the_action_has() -> None:
    example = yaml.safe_load((ROOT / "examples" / "wqk-check.yml").read_text("utf-8"))
    (job,) = example["jobs"].values()
    (inputs,) = [step["with"] for step in job["steps"] if "wqk" in step.get("uses", "")]
    assert set(inputs) <= set(ACTION["inputs"])
    required = {
        name for name, declaration in ACTION["inputs"].items() if declaration.get("required")
    }
    assert required <= set(inputs)


def test_every_input_is_used() -> None:
    used: set[str] = set()
    for step in ACTION["runs"]["steps"]:
        for text in step["env"].values():
            used.update(INPUT.findall(text))
    assert used == set(ACTION["inputs"])
