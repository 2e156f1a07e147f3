"""Every family file is proven on every run: a tiny random model is run and compared with its plan.

Families that `test_proofs.py` builds models of are proven there. All others are proven here by the
quickest of their model types, as the tool that derives families proves them.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tests.families.architectures import ALL, FURTHER
from tests.families.completeness import absent, omissions, other_in_memory, under_live_names
from tests.families.proving import save
from tests.families.test_derived import outcomes
from tests.families.test_published import FOUND
from tests.families.test_rotations import HALVES_IN_MEMORY
from tools.deriving.building import build
from tools.deriving.probing import record_type
from tools.deriving.proof import WEAK, faults
from tools.deriving.records import RunRecord, read_record
from tools.deriving.shrinking import small_file
from tools.deriving.writing import BY_TABLE

import wqk
from wqk.checkpoints import Checkpoint, open_checkpoint
from wqk.families import AttentionRule, families, find_family, plan_attention

PROVEN = tomllib.loads(Path(__file__).with_name("proven.toml").read_text(encoding="utf-8"))
QUICKER, BY_LAYERS, UNFED = (PROVEN[table] for table in ("quicker", "by-layers", "unfed"))
ELSEWHERE = {name: file for file, names in PROVEN["elsewhere"].items() for name in names}


@cache
def model_types() -> dict[str, str]:
    """The model type of every class of transformers, none of which is imported."""
    from transformers.models.auto import modeling_auto

    return {
        name: model_type
        for mapping, names in vars(modeling_auto).items()
        if mapping.endswith("_MAPPING_NAMES")
        for model_type, listed in names.items()
        for name in ([listed] if isinstance(listed, str) else listed)
    }


@cache
def by_table() -> set[str]:
    """The families of the models in the tables of architectures."""
    model_types_of_table = {a.hub.get("model_type") or model_types().get(a.model) for a in ALL}
    return {
        family.name
        for family in families().values()
        if model_types_of_table.intersection(family.model_types) and family.attention
    }


@cache
def quickest() -> dict[str, str]:
    """A model type of every family that no table and no other test proves."""
    type_by_family: dict[str, str] = {}
    for name in families():
        types = [
            row["type"]
            for row in outcomes()
            if row["family"] == name
            and row["outcome"] in ("proven", "partial")
            and row["why"] != BY_TABLE
        ]
        if types and name not in by_table() and name not in ELSEWHERE:
            named_like_family = [
                model_type for model_type in types if model_type.replace("_", "-") == name
            ]
            type_by_family[name] = [*named_like_family, *types][0]
    return type_by_family | QUICKER | BY_LAYERS


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the recorded models, each of which runs once for all tests of this file."""
    return tmp_path_factory.mktemp("records")


def recorded_once(model_type: str, records: Path) -> tuple[RunRecord, Checkpoint]:
    folder = records / model_type
    if not folder.exists():
        record_type(model_type, folder)
    return read_record(folder), open_checkpoint(folder)


@pytest.mark.parametrize("name", quickest())
def test_the_family_is_what_the_model_computes(name: str, records: Path) -> None:
    record, checkpoint = recorded_once(quickest()[name], records)
    family = find_family(checkpoint)
    assert name in family.name.split(" + ")
    with np.errstate(all="ignore"):  # of what a model normalizes to nothing
        problems = faults(record, checkpoint, family)
    assert any(" feeds " in fault for fault in problems) == (name in UNFED)
    assert [fault for fault in problems if " makes the " in fault] == []
    proven_problems = [fault for fault in problems if not fault.startswith(WEAK)]
    assert any(map(is_unseen, proven_problems)) == (name in BY_LAYERS)
    assert [fault for fault in proven_problems if not is_unseen(fault)] == []
    assert omissions(checkpoint, family) == []
    if name not in PROVEN["in-memory"]["otherwise"]:
        live = under_live_names(checkpoint, record.names)
        assert other_in_memory(checkpoint, family, live) == []
    assert absent(plan_attention(checkpoint, family)) == []


def is_unseen(fault: str) -> bool:
    return fault.endswith("were not seen")


def test_every_family_is_proven_somewhere() -> None:
    described = {family.name for family in families().values() if family.attention}
    assert described == by_table() | set(quickest()) | set(ELSEWHERE)
    for name, file in ELSEWHERE.items():
        text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
        names = {name, name.partition("-")[0], *families()[name].model_types}
        assert any(word in text for word in names), name
    assert not set(ELSEWHERE) & (by_table() | set(quickest())), "proven here, too"


# Types that have other tensors where they run than in their files.
OTHER_IN_MEMORY = (
    "gte",
    "hrm_text",
    "jina_embeddings_v3",
    "molmo2_text",
    "nomic_bert",
    "radio",
    "rf_detr",
    "step3p5_vision",
    "tipsv2_text_model",
    "tipsv2_vision_model",
)


@pytest.mark.filterwarnings("ignore:You'd better set embed_dim")
@pytest.mark.parametrize("model_type", OTHER_IN_MEMORY)
def test_what_runs_is_read_as_its_file(model_type: str, tmp_path: Path) -> None:
    model, _ = build(model_type, 0)
    model.save_pretrained(tmp_path)
    assert wqk.same(model, tmp_path).same is not False  # a rotation may be only named
    checkpoint = open_checkpoint(tmp_path)
    differences = other_in_memory(checkpoint, find_family(checkpoint), open_checkpoint(model))
    assert bool(differences) == (model_type in HALVES_IN_MEMORY)  # test_rotations.py proves these
    assert wqk.open(model).plans[0].rule != wqk.open(tmp_path).plans[0].rule


@pytest.mark.filterwarnings("ignore:You'd better set embed_dim")
def test_every_rule_is_that_of_a_proven_model_or_marked(records: Path, tmp_path: Path) -> None:
    """A family with several tables is not proven by a model that has one of them.

    What has no softmax is proven by `test_mixers.py`.
    """
    several = {name for name, family in families().items() if len(family.attention) > 1}
    opened: list[wqk.Model] = []
    for architecture in (*ALL, FURTHER["longt5-global"]):
        model_type = architecture.hub.get("model_type") or model_types().get(architecture.model)
        if any(model_type in families()[name].model_types for name in several):
            save(architecture, tmp_path / architecture.name)
            opened.append(wqk.open(tmp_path / architecture.name))
    for number, config in enumerate(FOUND):
        if any(config["model_type"] in families()[name].model_types for name in several):
            record_type(config["model_type"], tmp_path / str(number), small_file(config))
            opened.append(wqk.open(tmp_path / str(number)))
    for name in several & set(quickest()):
        _, checkpoint = recorded_once(quickest()[name], records)
        opened.append(wqk.open(checkpoint))
    opened += [wqk.open(build(model_type, 0)[0]) for model_type in OTHER_IN_MEMORY]
    proven = {
        (name, _table(plan.rule))
        for model in opened
        for plan in model.plans
        for name in plan.family.split(" + ")
    }
    missing = {
        f"{name} {place}"
        for name in several - set(ELSEWHERE)
        for place, rule in enumerate(families()[name].attention)
        if not rule.between and (name, _table(rule)) not in proven
    }
    assert sorted(missing) == sorted(PROVEN["unproven"])


def _table(rule: AttentionRule) -> tuple[object, ...]:
    """Identity of a table, whatever was filled in later."""
    return (
        rule.stack,
        rule.kind,
        rule.query,
        rule.key,
        rule.fused,
        rule.only_if,
        rule.rotary_only,
        rule.every_layer,
    )
