"""Record of a run: a folder with the saved model, and the products of its softmaxes.

A record is made once for each model type and read as often as wqk changes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

MOST_TOKENS = 20_000
MOST_SOURCES = 16


@dataclass(eq=False)
class VectorSource:
    """A product with a parameter, from which queries or keys come."""

    given: np.ndarray  # (T, D)
    parameter: str
    depth: int
    operations: tuple[str, ...] = ()
    norm: tuple[str, ...] = ()  # what put out the given: kind, gain, bias, offset


@dataclass(eq=False)
class Product:
    """One product of queries and keys: (n, I, R) and (n, J, R), windows and heads in n."""

    queries: np.ndarray
    keys: np.ndarray
    query_sources: list[VectorSource]
    key_sources: list[VectorSource]
    varies: int  # how many of the two depend on what the model was given
    factor: float = 1.0  # of the product on its way to the softmax
    through: tuple[str, ...] = ()  # operations on that way
    terms: tuple[str, ...] = ()  # parameters that are added on it


@dataclass(eq=False)
class Circuit:
    """Factors of the softmax's weights in the output, and the projection of the outcome."""

    values: np.ndarray  # (n, J, R), windows and heads in n
    sources: list[VectorSource]
    output: str = ""  # the parameter; empty if the outcome is not projected at once
    given: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))  # (T, H R)
    result: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))  # (T, D)


@dataclass(eq=False)
class Site:
    """One softmax of products of activations."""

    module: str
    products: list[Product] = field(default_factory=list)
    causal: bool = False  # no weight on later keys
    reach: int = -1  # largest distance of a key with some weight; −1 where unknown
    turned: bool = False  # with the rotary positions left in
    circuit: Circuit | None = None


@dataclass
class RunRecord:
    """Facts about one model type that were found without wqk."""

    model_type: str
    built: str = ""
    failure: str = ""  # why there is no model
    notes: list[str] = field(default_factory=list)  # parts that could not be run
    unreached: list[str] = field(default_factory=list)  # projections that no run reached
    sites: list[Site] = field(default_factory=list)
    turned: list[Site] = field(default_factory=list)  # the same with rotary positions left in
    names: dict[str, str] = field(default_factory=dict)  # what parameters are called in the file
    epsilons: dict[str, float] = field(default_factory=dict)  # of norms, by their gains


def write_record(record: RunRecord, folder: Path) -> None:
    """Into a folder in which the model is, or will be, saved."""
    arrays: dict[str, np.ndarray] = {}
    names_by_id: dict[int, str] = {}

    def kept(array: Any) -> str:
        if id(array) not in names_by_id:
            names_by_id[id(array)] = f"a{len(names_by_id)}"
            arrays[names_by_id[id(array)]] = np.asarray(array.numpy(), np.float32)
        return names_by_id[id(array)]

    def sources(source_list: list[Any]) -> list[Any]:
        fitting = [s for s in source_list if s.given.ndim == 2 and len(s.given) <= MOST_TOKENS]
        return [
            [kept(s.given), s.parameter, s.depth, sorted(set(s.operations)), s.norm]
            for s in fitting[:MOST_SOURCES]
        ]

    def circuit(recorded: Circuit | None) -> Any:
        if recorded is None or len(recorded.given) > MOST_TOKENS:
            return None
        rows = [kept(recorded.given), kept(recorded.result)] if recorded.output else None
        return [kept(recorded.values), sources(recorded.sources), recorded.output, rows]

    table = {
        "model_type": record.model_type,
        "built": record.built,
        "failure": record.failure,
        "notes": record.notes,
        "unreached": record.unreached,
        "names": record.names,
        "epsilons": record.epsilons,
        "sites": [
            {
                "module": site.module,
                "causal": site.causal,
                "reach": site.reach,
                "turned": site.turned,
                "circuit": circuit(site.circuit),
                "products": [
                    {
                        "queries": kept(p.queries),
                        "keys": kept(p.keys),
                        "query_sources": sources(p.query_sources),
                        "key_sources": sources(p.key_sources),
                        "varies": p.varies,
                        "factor": p.factor,
                        "through": sorted(set(p.through)),
                        "terms": sorted(set(p.terms)),
                    }
                    for p in site.products
                ],
            }
            for site in [*record.sites, *record.turned]
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "record.npz", **arrays)
    (folder / "record.json").write_text(json.dumps(table), encoding="utf-8")


def read_record(folder: Path) -> RunRecord:
    """Read a record that `write_record` wrote, with parameters named as in the saved file."""
    table = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    names = table.get("names", {})
    with np.load(folder / "record.npz") as file:
        arrays = {name: file[name] for name in file.files}

    def sources(entries: list[Any]) -> list[VectorSource]:
        return [
            VectorSource(
                arrays[a],
                names.get(name, name),
                depth,
                tuple(through),
                tuple(names.get(word, word) for word in norm),
            )
            for a, name, depth, through, norm in entries
        ]

    def circuit(entry: Any) -> Circuit | None:
        if entry is None:
            return None
        values, source_entries, output, rows = entry
        restored = Circuit(arrays[values], sources(source_entries), names.get(output, output))
        return (
            restored
            if rows is None
            else replace(restored, given=arrays[rows[0]], result=arrays[rows[1]])
        )

    sites = [
        Site(
            site["module"],
            [
                Product(
                    arrays[p["queries"]],
                    arrays[p["keys"]],
                    sources(p["query_sources"]),
                    sources(p["key_sources"]),
                    p["varies"],
                    p["factor"],
                    tuple(p["through"]),
                    tuple(names.get(term, term) for term in p["terms"]),
                )
                for p in site["products"]
            ],
            site["causal"],
            site["reach"],
            site["turned"],
            circuit(site.get("circuit")),
        )
        for site in table.pop("sites")
    ]
    table["epsilons"] = {names.get(k, k): v for k, v in table.get("epsilons", {}).items()}
    flat = [site for site in sites if not site.turned]
    return RunRecord(**table, sites=flat, turned=[site for site in sites if site.turned])
