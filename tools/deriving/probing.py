"""Every model type of `transformers`, built tiny, run, and compared with what wqk reads of it.

    python -m tools.deriving.probing RECORDS [TYPE...]

Models are built and run once, each in a process with limits of its own, and leave a record; what
wqk reads of the saved files is compared with the records each time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.deriving.judging import judge
from tools.deriving.records import RunRecord, read_record, write_record

import wqk
from wqk.attention import Block
from wqk.checkpoints import open_checkpoint
from wqk.errors import WqkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from wqk.families import AttentionPlan

SECONDS = 20  # of one processor
WALL = 10  # times as long by the clock, on a busy machine
BYTES = 8 << 30


def record_type(model_type: str, folder: Path, file: Mapping[str, Any] | None = None) -> None:
    """Build and run a model type; into the folder go the saved model and the record.

    With ``file``, a ``config.json`` with small numbers, the model is that file's, which is saved
    as it is.
    """

    from tools.deriving.building import build, position_tables
    from tools.deriving.running import TracedRun
    from tools.deriving.tracing import GraphTrace

    reasons, best = [], None
    for variant in range(4 if file is None else 1):
        try:
            with GraphTrace() as trace:
                model, built = build(model_type, variant, file=file)
            computed_once = trace.flattened or position_tables(model)
            turned = build(model_type, variant, False, file)[0] if computed_once else None
        except Exception as error:
            reasons.append(_line(error))
            continue
        try:
            run = TracedRun(model, turned)
        except Exception as error:  # of a variant; the next may do
            reasons.append(f"{built}: {_line(error)}")
            continue
        missing = len(run.notes + run.unreached)
        if best is None or missing < best[0]:
            best = (missing, built, run)
            _write(model_type, built, run, folder)
            if file is not None:
                (folder / "config.json").write_text(json.dumps(dict(file)), encoding="utf-8")
        if not missing or run.turned or (variant and run.sites):
            break
    if best is None:
        why = " | ".join(dict.fromkeys(reasons))
        write_record(RunRecord(model_type, failure=why), folder)


def _write(model_type: str, built: str, run: Any, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    record = RunRecord(model_type, built, "", run.notes, run.unreached, run.sites, run.turned)
    if hasattr(run.model, "save_pretrained"):
        run.model.save_pretrained(folder)
    else:
        from safetensors.torch import save_file

        run.model.config.save_pretrained(folder)
        tensors = {name: value.contiguous() for name, value in run.model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
    record.names = _renamed(run.model, folder)
    record.epsilons = {
        f"{name}.weight": epsilon
        for name, module in run.model.named_modules()
        if (epsilon := epsilon_of(module)) is not None
    }
    write_record(record, folder)


def epsilon_of(module: Any) -> float | None:
    """Return the epsilon of a norm, under any attribute name."""
    attribute_names = ("eps", "variance_epsilon", "epsilon", "norm_eps")
    epsilon = next(
        (value for name in attribute_names if (value := getattr(module, name, None))), None
    )
    return epsilon if isinstance(epsilon, float) else None


def _renamed(model: Any, folder: Path) -> dict[str, str]:
    """The parameters that the saved file calls otherwise, and how; they are known by their values.

    What saving joins or splits is not among them.
    """
    from safetensors.torch import load_file

    saved = {
        name: value for f in folder.glob("*.safetensors") for name, value in load_file(f).items()
    }
    by_value = {_digest(value): name for name, value in saved.items()}
    live = {name: value for name, value in model.state_dict().items() if name not in saved}
    saved_names = {name: by_value.get(_digest(value)) for name, value in live.items()}
    return {
        name: saved_name
        for name, saved_name in saved_names.items()
        if saved_name and saved_name != name
    }


def _digest(tensor: Any) -> bytes:
    data = tensor.detach().contiguous().numpy().tobytes()
    return hashlib.sha256(f"{tuple(tensor.shape)}".encode() + data).digest()


def record_all(types: Iterable[str], folder: Path) -> None:
    """Records of those types that have none yet, each made by a process of its own.

    PyTorch and transformers are imported once, before the processes are forked off. A process may
    run out of time or memory, hang or crash: its record says so, and the next type's turn comes.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import PreTrainedModel  # noqa: F401 - loaded once, for all processes
    from transformers.models.auto import modeling_auto  # noqa: F401

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    # What is loaded late is loaded once, for all processes.
    with tempfile.TemporaryDirectory() as scratch:
        record_type("llama", Path(scratch) / "llama")
    for model_type in types:
        type_folder = folder / model_type
        if (type_folder / "record.json").exists():
            continue
        unfinished = folder / f".{model_type}"
        shutil.rmtree(unfinished, ignore_errors=True)
        started = time.monotonic()

        def work(model_type: str = model_type, unfinished: Path = unfinished) -> None:
            try:
                record_type(model_type, unfinished)
            except Exception as error:
                if not (unfinished / "record.json").exists():
                    write_record(RunRecord(model_type, failure=_line(error)), unfinished)

        ended = in_a_process(work)
        if not (unfinished / "record.json").exists():
            write_record(RunRecord(model_type, failure=ended), unfinished)
        shutil.rmtree(type_folder, ignore_errors=True)
        unfinished.rename(type_folder)
        print(f"{model_type:40} {time.monotonic() - started:6.1f} s {ended}", flush=True)


def in_a_process(work: Callable[[], None], seconds: int = 0) -> str:
    """Do work in a forked process within the limits; say how it ended, unless well."""
    seconds = seconds or SECONDS
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        with Path(os.devnull).open("w") as quiet:
            os.dup2(quiet.fileno(), 1)
            os.dup2(quiet.fileno(), 2)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + WALL * seconds
    while not (status := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"hung for {WALL * seconds} seconds"
        time.sleep(0.05)
    code = os.waitstatus_to_exitcode(status[1])
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"took more than {seconds} seconds of a processor"
    return f"ended with {code}" if code else ""


def judge_type(folder: Path) -> dict[str, Any]:
    """Compare the plans that wqk reads of a saved model with the computation of the model."""
    record = read_record(folder)
    result: dict[str, Any] = {
        "type": record.model_type,
        "built": record.built,
        "notes": record.notes,
        "unreached": record.unreached,
    }
    if record.failure:
        return result | {"verdict": "not built", "why": record.failure}
    silent = "not run" if record.notes or record.unreached else "no softmax attention"
    result["modules"] = [site.module for site in record.sites]
    try:
        checkpoint = open_checkpoint(folder)
        plans = wqk.open(checkpoint).plans
        attentions = [Block(checkpoint, plan) for plan in plans]
    except WqkError as error:
        message = str(error).replace(str(folder), "").lstrip(": ")
        return result | {"verdict": "refused" if record.sites else silent, "why": message}
    result["family"] = plans[0].family
    result["guess"] = plans[0].rule.guess
    result["plans"] = [_plan(plan) for plan in plans]
    if not record.sites:
        return result | {"verdict": silent, "why": "; ".join(record.notes)}
    judged = judge(record.sites, attentions)
    result["unmatched_sites"] = judged.unmatched_sites
    result["unmatched_plans"] = judged.unmatched_plans
    if not judged.matched:
        verdict = "wrong"
    elif judged.unmatched_sites:
        verdict = "wrong in part" if judged.unmatched_plans else "incomplete"
    else:
        all_run = not judged.unmatched_plans and not record.unreached
        verdict = "right" if all_run else "right, not all run"
    return result | {"verdict": verdict}


def _plan(plan: AttentionPlan) -> list[Any]:
    return [
        plan.stack,
        plan.kind,
        plan.layer,
        plan.query.tensor,
        plan.query.heads,
        plan.key.heads,
        plan.query.head_width,
        plan.status,
    ]


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:400]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--only-record", action="store_true")
    arguments = parser.parse_args()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    types = arguments.types or list(CONFIG_MAPPING_NAMES)
    record_all(types, arguments.records)
    if arguments.only_record:
        return
    rows = []
    for model_type in types:
        try:
            row = judge_type(arguments.records / model_type)
        except Exception as error:
            row = {"type": model_type, "verdict": "error", "why": _line(error)}
        rows.append(row)
        print(f"{row['type']:32} {row['verdict']:20} {row.get('why', '')[:150]}", flush=True)
    path = arguments.records / "results.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(Counter(row["verdict"] for row in rows), file=sys.stderr)


if __name__ == "__main__":
    main()
