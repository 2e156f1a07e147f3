"""Every model type of `transformers`, built tiny, run, and compared with what wqk reads of it.

    python -m tests.families.deriving.probing OUT.jsonl [TYPE...]

Goes on where it was interrupted; each type has a process, a time limit and a memory limit of its
own.
"""

from __future__ import annotations

import argparse
import contextlib
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
from typing import Any

SECONDS = 40
BYTES = 8 << 30


def probe(model_type: str) -> dict[str, Any]:
    """What wqk reads of a type, and what the model computes."""
    import torch
    from tests.families.deriving.building import build
    from tests.families.deriving.judging import judge
    from tests.families.deriving.running import run
    from tests.families.deriving.tracing import Trace

    from wqk.attention import attention_plans, load_attention
    from wqk.checkpoints import open_checkpoint
    from wqk.errors import WqkError

    result: dict[str, Any] = {"type": model_type}
    try:
        with Trace():
            model, result["built"] = build(model_type)
    except Exception as error:
        return result | {"verdict": "not built", "why": _line(error)}
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        model.save_pretrained(folder)
        torch.set_grad_enabled(False)
        sites, notes = run(model)
        result["notes"] = notes
        result["sites"] = [_site(site) for site in sites]
        try:
            checkpoint = open_checkpoint(folder)
            plans = attention_plans(checkpoint)
            attentions = [load_attention(checkpoint, plan) for plan in plans]
        except WqkError as error:
            told = str(error).replace(str(folder), "").lstrip(": ")
            verdict = "refused" if sites else _silent(notes)
            return result | {"verdict": verdict, "why": told}
        result["family"] = plans[0].family
        result["guess"] = plans[0].rule.guess
        result["plans"] = [_plan(plan) for plan in plans]
        if not sites:
            return result | {"verdict": _silent(notes), "why": "; ".join(notes)[:300]}
        judged = judge(sites, attentions)
        result["unmatched_sites"] = judged.unmatched_sites
        result["unmatched_plans"] = judged.unmatched_plans
        return result | {"verdict": _verdict(judged)}
    except Exception as error:
        return result | {"verdict": "not run", "why": _line(error)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _silent(notes: list[str]) -> str:
    return "not run" if notes else "no softmax attention"


def _verdict(judged: Any) -> str:
    if not judged.matched:
        return "wrong"
    if judged.unmatched_sites:
        return "wrong in part" if judged.unmatched_plans else "incomplete"
    return "right, not all run" if judged.unmatched_plans else "right"


def _site(site: Any) -> dict[str, Any]:
    products = []
    for p in site.products:
        q, k = (next(iter(s), None) for s in (p.query_sources, p.key_sources))
        products.append(
            {
                "shape": [*p.queries.shape, p.keys.shape[1]],
                "query": q.parameter if q else "",
                "key": k.parameter if k else "",
                "query_through": sorted(set(q.operations)) if q else [],
                "key_through": sorted(set(k.operations)) if k else [],
                "varies": p.varies,
            }
        )
    return {"module": site.module, "products": products}


def _plan(plan: Any) -> list[Any]:
    return [
        plan.stack, plan.kind, plan.layer, plan.query.tensor, plan.query.heads,
        plan.key.heads, plan.query.head_width, plan.status,
    ]  # fmt: skip


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:400]


def _in_process(model_type: str, seconds: int) -> dict[str, Any]:
    """The result of a forked process; or why there is none."""
    reader, writer = os.pipe()
    started = time.time()
    child = os.fork()
    if child == 0:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        signal.alarm(seconds)
        with Path(os.devnull).open("w") as quiet:
            os.dup2(quiet.fileno(), 1)
            os.dup2(quiet.fileno(), 2)
        try:
            result = probe(model_type)
        except BaseException as error:
            result = {"type": model_type, "verdict": "not run", "why": _line(error)}
        with os.fdopen(writer, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    took = round(time.time() - started, 1)
    if text:
        with contextlib.suppress(json.JSONDecodeError):
            return {**json.loads(text), "seconds": took}
    return {
        "type": model_type,
        "verdict": "not run",
        "why": f"ended with {status}",
        "seconds": took,
    }


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The last result of each type."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row["type"]: row for row in map(json.loads, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--seconds", type=int, default=SECONDS)
    parser.add_argument("--again", help="only types whose last verdict contains this")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import PreTrainedModel  # noqa: F401
    from transformers.models.auto import modeling_auto  # noqa: F401
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    torch.set_num_threads(1)
    done = read_results(given.out)
    if given.again:
        wanted = [t for t, row in done.items() if given.again in row["verdict"]]
    else:
        wanted = given.types or [t for t in CONFIG_MAPPING_NAMES if t not in done]
    with given.out.open("a", encoding="utf-8") as file:
        for model_type in wanted:
            row = _in_process(model_type, given.seconds)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{row['type']:32} {row['verdict']:20} {row.get('why', '')[:150]}", flush=True)
    print(Counter(row["verdict"] for row in read_results(given.out).values()), file=sys.stderr)


if __name__ == "__main__":
    main()
