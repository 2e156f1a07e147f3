"""Evidence for `wqk kin`: unrelated pairs, children of every kind, other methods, evasion, costs.

``python -m benchmarks.populations`` trains the models first. Then, each printing Markdown:

    python -m benchmarks.kinship unrelated MODELS
    python -m benchmarks.kinship children MODELS --text FILE FILE
    python -m benchmarks.kinship evasion MODELS --text FILE
    python -m benchmarks.kinship costs
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import wqk
from benchmarks.descendants import (
    CHANGES,
    TRAINED,
    Model,
    permute_heads,
    rotate_stream,
    train_child,
    turn_dimensions,
)
from benchmarks.generate import LLAMA_3_8B, write_checkpoint
from benchmarks.rivals import RIVALS
from wqk.attention.factors import FOLDED, lacks_norm
from wqk.checkpoints.modules import StateDict
from wqk.kinship.fingerprints import fingerprint
from wqk.kinship.randomization import TESTS, gather

if TYPE_CHECKING:
    from wqk.kinship.fingerprints import Fingerprint
    from wqk.kinship.randomization import KinshipEvidence


# Parents in addition to all that were trained long; their children are trained, too.
PARENTS = ("short-seed0", "short-seed1")


def load_models(folder: Path) -> list[Model]:
    """Every model of a population."""
    return [
        Model.load(path) for path in sorted(folder.iterdir()) if (path / "config.json").exists()
    ]


def prints(model: Model, folds: bool) -> list[Fingerprint]:
    """Return the fingerprints that the test keeps of a model."""
    checkpoint = StateDict(model.tensors, model.config, model.name)
    fingerprints = [fingerprint(block, folds) for block in wqk.open(checkpoint)]
    return [print_of_block for print_of_block in fingerprints if print_of_block is not None]


def can_fold(model: Model) -> bool:
    """Return whether a known norm feeds every block."""
    checkpoint = StateDict(model.tensors, model.config, model.name)
    return not any(lacks_norm(plan, FOLDED) for plan in wqk.open(checkpoint).plans)


def compare(a: Model, b: Model, renumberings: int, seed: int = 0) -> KinshipEvidence:
    """As `wqk.kin` does."""
    folds = can_fold(a) and can_fold(b)
    return gather(prints(a, folds), prints(b, folds), renumberings, seed)


def interval(hits: int, count: int, level: float = 0.95) -> tuple[float, float]:
    """Clopper and Pearson's interval of a share."""
    from scipy.stats import beta

    tail = (1 - level) / 2
    low = 0.0 if hits == 0 else float(beta.ppf(tail, hits, count - hits + 1))
    high = 1.0 if hits == count else float(beta.ppf(1 - tail, hits + 1, count - hits))
    return low, high


def drawn_like(model: Model, seed: int) -> Model:
    """Random weights with the norms of a trained model's rows and columns."""
    random = np.random.default_rng(seed)
    tensors = dict(model.tensors)
    for name, weight in model.tensors.items():
        if weight.ndim == 2:
            drawn = random.standard_normal(weight.shape).astype(np.float32)
            for axis in (0, 1, 0, 1):
                norms = np.linalg.norm(weight, axis=axis, keepdims=True)
                drawn *= norms / np.linalg.norm(drawn, axis=axis, keepdims=True)
            # The order of rows and columns is the model's own, and carries no kinship.
            tensors[name] = drawn[random.permutation(len(drawn))][
                :, random.permutation(drawn.shape[1])
            ]
    return replace(model, name=f"drawn like {model.name}", tensors=tensors)


def print_unrelated(folder: Path, renumberings: int, drawn: int) -> None:
    """All pairs of models without a common seed: whether p is uniform."""
    from scipy.stats import kstest

    models = load_models(folder)
    random = np.random.default_rng(0)
    groups: dict[str, list[tuple[float, KinshipEvidence]]] = defaultdict(list)
    foldable = [can_fold(m) for m in models]
    kept = [
        {folds: prints(m, folds) for folds in {False, can}}
        for m, can in zip(models, foldable, strict=True)
    ]
    for i, j in combinations(range(len(models)), 2):
        folds = foldable[i] and foldable[j]
        evidence = gather(kept[i][folds], kept[j][folds], renumberings, seed=len(models) * i + j)
        if evidence.p is None:
            continue
        first, second = (models[k].name.split("-") for k in (i, j))
        kind = "other architecture"
        if first[0] == second[0]:
            kind = "same architecture"
            if first[1:3] == second[1:3]:
                kind = "same architecture, recipe, text and order"
        groups[kind].append((evidence.p - random.uniform(0, evidence.floor), evidence))
    for k in range(drawn):
        model = models[k % len(models)]
        pair = drawn_like(model, 2 * k), drawn_like(model, 2 * k + 1)
        evidence = compare(*pair, renumberings, seed=k)
        assert evidence.p is not None
        groups["drawn with the norms of a trained model's rows and columns"].append(
            (evidence.p - random.uniform(0, evidence.floor), evidence)
        )
    groups["all"] = [entry for entries in groups.values() for entry in entries]
    print(f"{len(models)} models, {renumberings} renumberings\n")
    print("| pairs | count | mean p | KS distance | KS p | p ≤ .05 | p ≤ .01 | p ≤ .001 (95 %) |")
    print("|:--|--:|--:|--:|--:|--:|--:|--:|")
    for kind, entries in groups.items():
        ps = np.array([p for p, _ in entries])
        test = kstest(ps, "uniform")
        hits = [int((ps <= level).sum()) for level in (0.05, 0.01, 0.001)]
        low, high = interval(hits[2], len(ps))
        print(
            f"| {kind} | {len(ps)} | {ps.mean():.3f} | {test.statistic:.3f} | {test.pvalue:.2f} "
            f"| {hits[0]} | {hits[1]} | {hits[2]} ({low:.1%} to {high:.1%}) |"
        )
    print("\n| test | pairs | mean p | KS distance | KS p |\n|:--|--:|--:|--:|--:|")
    for place, name in enumerate(TESTS):
        tests = [e.results[place].p for _, e in groups["all"]]
        ps = np.array(
            [p - random.uniform(0, 1 / (renumberings + 1)) for p in tests if p is not None]
        )
        test = kstest(ps, "uniform")
        print(
            f"| {name} | {len(ps)} | {ps.mean():.3f} | {test.statistic:.3f} | {test.pvalue:.2f} |"
        )


class Count(NamedTuple):
    """Number of children that were found to be related, and the tests that found them."""

    ps: list[float]
    tests: dict[str, list[float]]


def print_children(folder: Path, texts: list[Path], renumberings: int, kept: Path) -> None:
    """Power by kind of child, with other methods on the same pairs."""
    from sklearn.metrics import roc_auc_score

    models = load_models(folder)
    parents = [
        m for m in models if m.family != "neox" and ("-long-" in m.name or m.name.endswith(PARENTS))
    ]
    strangers = {
        m.name: [o for o in models if o.family == m.family and o is not m] for m in parents
    }
    counts: dict[str, Count] = defaultdict(lambda: Count([], defaultdict(list)))
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def score(a: Model, b: Model, kind: str) -> None:
        evidence = compare(a, b, renumberings)
        if evidence.p is None:
            return
        counts[kind].ps.append(evidence.p)
        for result in evidence.results:
            if result.p is not None:
                counts[kind].tests[result.name].append(result.p)
        scores[kind]["kin"].append(
            -evidence.p
            if evidence.p > evidence.floor
            else max(result.z or 0.0 for result in evidence.results)
        )
        for name, rival in RIVALS.items():
            scores[kind][name].append(rival(a, b))

    for number, parent in enumerate(parents):
        stranger = strangers[parent.name][number % len(strangers[parent.name])]
        for kind, change in CHANGES.items():
            child = change(parent, stranger, number)
            if child is not None:
                score(parent, child, kind)
        for kind in TRAINED if "-short-" in parent.name else ():
            score(parent, train_child(parent, kind, texts, kept), kind)
        for stranger in strangers[parent.name]:
            score(parent, stranger, "unrelated")
        print(f"<!-- {parent.name} done -->", flush=True)
    print(f"\n{len(parents)} parents, {renumberings} renumberings; seen at p ≤ .001\n")
    print("| child | seen | of | largest p | " + " | ".join(TESTS) + " |")
    print("|:--|--:|--:|--:|" + "--:|" * len(TESTS))
    for kind, (ps, tests) in counts.items():
        by = [
            f"{sum(p <= 0.001 for p in tests[t])}/{len(tests[t])}" if tests[t] else "–"
            for t in TESTS
        ]
        print(
            f"| {kind} | {sum(p <= 0.001 for p in ps)} | {len(ps)} | {max(ps):.3g} | "
            + " | ".join(by)
            + " |"
        )
    print("\nAUC against unrelated models of the same shape\n")
    names = ["kin", *RIVALS]
    print("| child | " + " | ".join(names) + " |\n|:--|" + "--:|" * len(names))
    for kind in counts:
        if kind == "unrelated":
            continue
        cells = []
        for name in names:
            related, unrelated = scores[kind][name], scores["unrelated"][name]
            truth = [1] * len(related) + [0] * len(unrelated)
            cells.append(
                f"{roc_auc_score(truth, np.nan_to_num(related + unrelated, nan=-1e9)):.2f}"
            )
        print(f"| {kind} | " + " | ".join(cells) + " |")
    print("\nLargest score of an unrelated pair, and the share of all children above it\n")
    print("| method | largest unrelated | children above |\n|:--|--:|--:|")
    for name in names:
        largest = max(scores["unrelated"][name])
        related = [s for kind in counts if kind != "unrelated" for s in scores[kind][name]]
        print(f"| {name} | {largest:.3g} | {np.mean(np.array(related) > largest):.0%} |")


def print_evasion(folder: Path, text: Path) -> None:
    """Print the ways to evade the test, with their cost in loss."""
    from benchmarks.descendants import held_out_loss

    models = [
        m
        for m in load_models(folder)
        if m.name.startswith(("llama", "grouped")) and "-long-" in m.name
    ]
    print("| change | loss before | after | p | seen |\n|:--|--:|--:|--:|:--|")
    random = np.random.default_rng(0)
    ways = {
        "stream rotated": lambda m: rotate_stream(m, 1),
        "heads permuted": lambda m: permute_heads(m, 1),
        "planes turned": lambda m: turn_dimensions(m, 1),
        "stream rotated, heads permuted": lambda m: permute_heads(rotate_stream(m, 1), 1),
        "stream rotated, planes turned": lambda m: turn_dimensions(rotate_stream(m, 1), 1),
        "heads permuted, planes turned": lambda m: turn_dimensions(permute_heads(m, 1), 1),
        "all three": lambda m: turn_dimensions(permute_heads(rotate_stream(m, 1), 1), 1),
        **{
            f"noise, {s:g} of the weights": lambda m, s=s: m.with_noise(s, random)
            for s in (0.5, 1, 2, 4)
        },
    }
    for model in models[:2]:
        before = held_out_loss(model, text)
        for name, way in ways.items():
            child = way(model)
            evidence = compare(model, child, 4999)
            assert evidence.p is not None
            print(
                f"| {model.name}: {name} | {before:.4f} | {held_out_loss(child, text):.4f} | "
                f"{evidence.p:.4f} | {'yes' if evidence.p <= 0.001 else 'no'} |",
                flush=True,
            )


def print_costs(layers: int) -> None:
    """Time and memory of 8B against 8B, next to a scan's."""
    with tempfile.TemporaryDirectory() as place:
        shape = replace(LLAMA_3_8B, layers=layers)
        folders = [
            write_checkpoint(Path(place) / name, shape, seed) for seed, name in enumerate("ab")
        ]
        clock, processor = time.perf_counter(), time.process_time()
        wqk.scan(folders[0])
        scan = time.perf_counter() - clock, time.process_time() - processor
        clock, processor = time.perf_counter(), time.process_time()
        result = wqk.kin(*folders)
        kin = time.perf_counter() - clock, time.process_time() - processor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(
        json.dumps(
            {
                "layers": layers,
                "scan": scan,
                "kin": kin,
                "p": result.p,
                "peak_MB": round(peak),
            }
        )
    )


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("unrelated", "children", "evasion", "costs"))
    parser.add_argument("models", type=Path, nargs="?")
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--renumberings", type=int, default=1999)
    parser.add_argument("--drawn", type=int, default=100)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--keep", type=Path, default=Path("out/kinship"))
    options = parser.parse_args()
    if options.what == "unrelated":
        print_unrelated(options.models, options.renumberings, options.drawn)
    elif options.what == "children":
        print_children(options.models, options.text, options.renumberings, options.keep)
    elif options.what == "evasion":
        print_evasion(options.models, options.text[0])
    else:
        print_costs(options.layers)


if __name__ == "__main__":
    main()
