"""Linear attention and state spaces: the forms are what enters the models' own kernels."""

from __future__ import annotations

import inspect
import json
import math
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.command import refuse
from tests.families.architectures import FURTHER
from tests.families.proving import edit_config, edit_tensors, save, torch, transformers
from tests.families.test_every_family import model_types
from tests.stand_in import Module
from tools.deriving import building
from tools.deriving.shrinking import small_file

import wqk
from wqk.errors import CheckpointError, UnknownFamily
from wqk.families import families

CASES = {name: one for name, one in FURTHER.items() if one.mixers}
DERIVED = ["glm5_next_text", "bailing_hybrid", "qwen4_exp_text"]


class Kernel(NamedTuple):
    """A model's own kernel: names of the queries and keys, and values that silence the rest."""

    query: str
    key: str
    quiet: dict[str, Callable[[Any], Any]]
    channels_first: bool = False


# A step small enough that the delta rule corrects nothing in single precision.
STEP = 2.0**-24
STILL = {"g": torch.zeros_like, "beta": lambda beta: torch.full_like(beta, STEP)}
ONE = {"A": torch.zeros_like, "D": torch.zeros_like, "dt": torch.zeros_like}


def unit(bias: Any) -> Any:
    """Biases whose softplus, the size of the steps, is 1."""
    return torch.full_like(bias, math.log(math.e - 1))


KERNELS = {
    "torch_chunk_gated_delta_rule": Kernel("query", "key", STILL),
    "chunk_kimi_delta_attention": Kernel("query", "key", STILL),
    "mamba2_chunk_scan": Kernel("C", "B", ONE | {"dt_bias": unit}),
    "mamba_selective_scan": Kernel("C", "B", ONE | {"delta_bias": unit, "z": lambda _: None}, True),
}


def heard(
    model: Any, monkeypatch: pytest.MonkeyPatch, quiet: bool = False
) -> list[tuple[Any, Any]]:
    """Run the model and return the queries and keys (1, N, heads, width) of the kernels' calls."""
    file = sys.modules[type(model).__module__]
    model.config._experts_implementation = "eager"  # the fused kernels know no float64
    sides_of_calls: list[tuple[Any, Any]] = []
    for name in KERNELS.keys() & vars(file).keys():
        function = getattr(file, name)

        def listening(*args: Any, _own: Any = function, _name: str = name, **named: Any) -> Any:
            call, kernel = inspect.signature(_own).bind(*args, **named), KERNELS[_name]
            sides = (call.arguments[side].detach() for side in (kernel.query, kernel.key))
            sides_of_calls.append(
                tuple(vectors.mT if kernel.channels_first else vectors for vectors in sides)
            )
            for argument, changed in kernel.quiet.items() if quiet else ():
                call.arguments[argument] = changed(call.arguments[argument])
            return _own(*call.args, **call.kwargs)

        monkeypatch.setattr(file, name, listening)
    for name, module in model.named_modules():
        if name.endswith("mlstm_backend"):
            module.register_forward_pre_hook(
                lambda _, args, named: sides_of_calls.append(
                    tuple(named[side].detach().transpose(1, 2) for side in ("query", "key"))
                ),
                with_kwargs=True,
            )
    with torch.no_grad():
        model(input_ids=torch.arange(3, 16)[None], use_cache=False)
    return sides_of_calls


def projected(side: Any, x: np.ndarray) -> np.ndarray:
    """Queries or keys of inputs (N, D), all heads of the side next to each other."""
    added = 0 if side.stored_bias is None else side.stored_bias.reshape(-1)
    return np.concatenate([x @ np.asarray(head, float).T for head in side.weight], -1) + added


def convolved(module: Any, sides: list[np.ndarray]) -> list[np.ndarray]:
    """Sides (N, C) after the module's own convolution over tokens, and activation."""
    if not hasattr(module, "conv1d"):
        return sides
    x = torch.from_numpy(np.concatenate(sides, -1)).T[None]
    mixed = torch.nn.functional.silu(module.conv1d(x)[..., : x.shape[-1]])[0].T
    widths = np.cumsum([side.shape[-1] for side in sides])[:-1]
    return np.split(mixed.detach().numpy(), widths, -1)


def test_every_mixer_is_that_of_a_proven_model() -> None:
    types = {
        *DERIVED,
        "rwkv7",
        *(model_types()[architecture.model] for architecture in CASES.values()),
    }
    proven = [family for family in families().values() if types.intersection(family.model_types)]
    named = {name for family in proven for name in family.mixers}
    # As llama.cpp stores them: tests/families/test_llama_cpp.py.
    mixers = {name for family in families().values() for name in family.mixers}
    assert {name for name in mixers if not name.startswith("gguf-")} == named


PUBLISHED = {
    row["model"]: row["config"]
    for row in map(
        json.loads, Path(__file__).with_name("published.jsonl").read_text("utf-8").splitlines()
    )
}
HYBRIDS = [
    "Qwen/Qwen3.5-397B-A17B",
    "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.5-9B",
    "Qwen/Qwen3-Next-80B-A3B-Thinking",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nvidia/Nemotron-H-56B-Base-8K",
    "ai21labs/AI21-Jamba-1.5-Mini",
    "tiiuae/falcon-mamba-7b",
]


# Numbers of a configuration that can be any.
ANY = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_head_dim": 12,
    "linear_num_heads": 5,
    "linear_conv_kernel_dim": 5,
    "state_size": 12,
    "mamba_d_state": 12,
    "ssm_state_size": 12,
    "conv_kernel": 5,
    "mamba_d_conv": 5,
    "mamba_dt_rank": 9,
    "time_step_rank": 9,
    "chunk_size": 9,
    "mamba_chunk_size": 9,
}
# Groups, what divides into them, and how often.
GROUPINGS = [
    ("linear_num_key_heads", "linear_num_value_heads", None),
    ("n_groups", "num_heads", "head_dim"),
    ("n_groups", "mamba_num_heads", "mamba_head_dim"),
    ("mamba_n_groups", "mamba_n_heads", "mamba_d_head"),
    ("mamba_ngroups", "n_mamba_heads", None),
]
SWITCHES = ("use_bias", "use_conv_bias", "mamba_conv_bias", "mamba_proj_bias", "mamba_rms_norm")


def drawn(config: dict[str, Any], defaults: dict[str, Any], seed: int) -> dict[str, Any]:
    """Draw numbers and switches of layers without a softmax; the width of the model stays."""
    rng = random.Random(seed)
    settings: dict[str, Any] = {key: rng.randint(2, most) for key, most in ANY.items()}
    settings |= {key: rng.random() < 0.5 for key in SWITCHES}
    for groups, heads, width in GROUPINGS:
        if not config.keys() >= {groups, heads}:
            continue
        settings[groups] = rng.choice((1, 2, 3))
        settings[heads] = settings[groups] * rng.choice((1, 2, 4))
        if width in config:
            settings[width] = config[heads] * config[width] // settings[heads]
    return config | {key: value for key, value in settings.items() if key in defaults}


def made(name: str, folder: Path, seed: int | None = None, **settings: Any) -> Any:
    """Make and save a model in double precision, with changed settings, drawn if a seed is given.

    Widths and depths of published configurations are shrunk; groups and heads without a softmax
    are kept.
    """
    if name in CASES:
        settings_of_case, kind = (
            CASES[name].config | settings,
            getattr(transformers, CASES[name].model),
        )
        if seed is not None:
            settings_of_case = drawn(settings_of_case, kind.config_class().to_dict(), seed)
        return save(replace(CASES[name], config=settings_of_case), folder).double().eval()
    if name in DERIVED:
        model = building.build(name, 0)[0]
        model.save_pretrained(folder)
        return model.double()
    table = small_file(PUBLISHED[name])
    if pattern := table.get("hybrid_override_pattern"):
        table |= {"hybrid_override_pattern": pattern[:9], "num_hidden_layers": 9, "n_groups": 4}
    config = transformers.CONFIG_MAPPING[table["model_type"]].from_dict(dict(table))
    model = transformers.AutoModel.from_config(config)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(table))
    return model.double().eval()


MADE = [
    *((name, seed) for name in CASES for seed in (None, 0, 1)),
    *((name, None) for name in (*DERIVED, *HYBRIDS)),
    *(pytest.param(name, n, marks=pytest.mark.campaign) for name in CASES for n in range(2, 20)),
]


@pytest.mark.parametrize(("name", "seed"), MADE)
def test_the_forms_are_what_enters_the_kernel(name, seed, tmp_path, monkeypatch):
    model = made(name, tmp_path, seed)
    opened = wqk.open(tmp_path)
    layers_by_kind: dict[str, list[int]] = {}
    for plan in opened.mixers:
        layers_by_kind.setdefault(plan.kind, []).append(plan.layer)
    assert layers_by_kind == CASES[name].mixers if name in CASES else len(layers_by_kind) == 1
    inputs: dict[str, Any] = {}
    live = wqk.open(model).mixers  # whose names are the module's
    for plan in live:
        inside = plan.query.tensor.removesuffix(".weight")
        model.get_submodule(inside).register_forward_pre_hook(
            lambda _, args, inside=inside: inputs.__setitem__(inside, args[0].detach())
        )
    kernels = heard(model, monkeypatch)
    for number, plan in enumerate(opened.mixers):
        block = opened.block(plan.layer, kind=plan.kind)
        inside = live[number].query.tensor.removesuffix(".weight")
        x = inputs[inside][0].numpy()
        module = model.get_submodule(inside.rpartition(".")[0])
        heads = plan.query.heads
        if plan.value is None:  # Mamba-1, which projects what is convolved already
            rebuilt = [side(x).swapaxes(0, 1) for side in (block.queries, block.keys)]
            for side, entering in zip(rebuilt, kernels[number], strict=True):
                np.testing.assert_allclose(side[:, 0], entering[0], atol=1e-6, rtol=1e-6)
            continue
        q, k, v = (projected(side, x) for side in (*block.query_key, block.value_output[0]))
        if opened.family == "minimax":
            assert_lightning(model, module, x, q, k, v, heads)
            continue
        order = [q, k, v] if plan.kind == "linear" else [v, k, q]
        if opened.family == "falcon-h1":
            multipliers = model.config.ssm_multipliers
            order = [side * multipliers[n] for side, n in zip(order, (1, 2, 3), strict=True)]
        mixed = convolved(module, order)
        sides = (mixed[0], mixed[1]) if plan.kind == "linear" else (mixed[2], mixed[1])
        for rebuilt, entering in zip(sides, kernels[number], strict=True):
            kernel_side = entering[0].numpy().reshape(len(x), -1, plan.query.head_width)
            rebuilt = rebuilt.reshape(len(x), heads, -1)
            repeats = (
                kernel_side.shape[1] // heads
            )  # some kernels are given a head for each value head
            np.testing.assert_allclose(np.repeat(rebuilt, repeats, 1), kernel_side, atol=1e-12)


# What the norms after the kernels are called.
AFTER = {"norm", "o_norm", "multihead_norm"}


@pytest.mark.parametrize("name", [*CASES, *DERIVED])
def test_without_decay_and_gates_the_output_is_the_attention_of_the_forms(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    neutral = {"ssm_multipliers": [1.0] * 5, "mamba_rms_norm": True}
    model = made(name, tmp_path, **(neutral if name == "falcon-h1" else {}))
    live = wqk.open(model).mixers  # whose names are the module's
    seen: dict[str, Any] = {}
    for plan in live:
        inside = plan.query.tensor.removesuffix(".weight")
        module = model.get_submodule(inside.rpartition(".")[0])
        silence(module, monkeypatch)
        module.get_submodule(inside.rpartition(".")[2]).register_forward_pre_hook(
            lambda _, args, key=("in", plan.layer): seen.update({key: args[0][0]})
        )
        out = next(m for n, m in module.named_children() if n in ("out_proj", "o_proj", "dense"))
        out.register_forward_hook(
            lambda _, args, out, key=("out", plan.layer): seen.update({key: (out[0], args[0][0])})
        )
    file = sys.modules[type(model).__module__]
    if hasattr(file, "l2norm"):
        monkeypatch.setattr(file, "l2norm", lambda x, **_: x)
    heard(model, monkeypatch, quiet=True)
    for plan in wqk.open(tmp_path).mixers:
        block = wqk.open(tmp_path).block(plan.layer, kind=plan.kind)
        x, (out, mixed) = seen["in", plan.layer].numpy(), seen["out", plan.layer]
        scores = np.tril(block.products(x, x).astype(float))
        if hasattr(file, "l2norm"):
            scores *= STEP * plan.query.head_width**-0.5
        if name == "minimax":
            scores *= 0.5  # its gate
        if name == "xlstm":
            scores *= plan.query.head_width**-0.5
            scores /= np.maximum(np.abs(scores.sum(-1, keepdims=True)), 1)
        if plan.value is None:  # what is mixed are the inner vectors themselves
            expected, out = scores[0] @ x, mixed
        else:
            values = np.asarray(block.at(circuit="ov").dense(), float)
            value_heads = getattr(model.config, "linear_num_value_heads", len(values))
            assert len(values) == value_heads
            scores = scores.repeat(len(values) // len(scores), 0)
            expected = np.einsum("hij,jd,hde->ie", scores, x, values)
        size = np.abs(expected).max()
        np.testing.assert_allclose(out.numpy() / size, expected / size, atol=2e-5)


def silence(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strip a mixer of all operations between projections and kernel, and after the kernel."""
    for name, part in module.named_children():
        if name in AFTER:
            monkeypatch.setattr(part, "forward", lambda x, *_: x)
    with torch.no_grad():
        for conv in (part for name, part in module.named_children() if name == "conv1d"):
            conv.weight.zero_()[..., -1] = 1.0
            if conv.bias is not None:
                conv.bias.zero_()
        for gate in (part for name, part in module.named_children() if name == "output_gate"):
            gate.weight.zero_()
    module.activation = "linear"
    if hasattr(module, "slope_rate"):
        module.act_fn = torch.nn.Identity()
        module.slope_rate.zero_()
        for decay in (module.query_decay, module.key_decay, module.diagonal_decay):
            decay.copy_((decay > 0).to(decay))
    if hasattr(module, "fgate_preact"):
        module.config.gate_soft_cap = 1e9
        monkeypatch.setattr(module.ogate_act_fn, "forward", torch.ones_like)
        for gate, value in ((module.igate_preact, 0.0), (module.fgate_preact, 1e3)):
            gate.weight.data.zero_()
            gate.bias.data.fill_(value)


def assert_lightning(model: Any, module: Any, x: Any, q: Any, k: Any, v: Any, heads: int) -> None:
    """Compare the layer's output with one product of queries and keys with decay."""
    q, k, v = (
        torch.nn.functional.silu(torch.from_numpy(side)).view(len(x), heads, -1).transpose(0, 1)
        for side in (q, k, v)
    )
    distances = torch.arange(len(x))[:, None] - torch.arange(len(x))
    decay = torch.exp(-module.slope_rate * distances) * (distances >= 0)
    out = ((q @ k.mT) * decay @ v).transpose(0, 1).reshape(1, len(x), -1)
    x = torch.from_numpy(x)[None]
    out = module.out_proj(module.norm(out) * torch.sigmoid(module.output_gate(x)))
    actual = module(x, (None, None), torch.ones(1, x.shape[1]))[0]
    torch.testing.assert_close(
        out, actual, atol=1e-5, rtol=1e-5
    )  # its rates are in single precision


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Linear attention in layer 0, and softmax attention in layer 1."""
    folder = tmp_path_factory.mktemp("hybrid") / "model"
    save(CASES["qwen3-next"], folder)
    return folder


def test_layers_without_a_softmax_are_scored_beside_the_others(hybrid: Path) -> None:
    table = wqk.scan(hybrid)
    kinds = table.layers.frame.select("kind", "layer", "status").rows()
    assert [(kind, layer) for kind, layer, _ in kinds] == [("self", 1), ("linear", 0)]
    assert "partial" in kinds[1][2]
    assert "short convolution" in table.metadata["partial"]["decoder linear"]
    (left_out,) = table.metadata["left_out_without_softmax"].values()
    assert left_out == {"linear attention": ["the gains of the norms that feed it"]}
    lines = [line.partition(":")[0] for line in str(table.layers).splitlines() if ":" in line]
    assert lines.count("ignored") == lines.count("ignored in linear attention") == 1
    model = wqk.open(hybrid)
    assert len(model) == 1  # what runs a softmax
    block = model.block(0, kind="linear")
    assert table.layers.frame["symmetry"][1] == pytest.approx(block.form.symmetry, abs=1e-6)
    assert model.select(kind="linear").scored == model.mixers
    notes = " ".join(wqk.explain(hybrid).notes)
    assert "delta rule" in notes
    assert "has no form" not in notes


def test_at_a_distance_only_positions_are_scored(hybrid: Path) -> None:
    table = wqk.scan(hybrid, distances=[0, 4])
    assert set(table.frame["kind"]) == {"self"}
    lacking = "decoder linear attention, layers 0: has no form at a distance"
    assert table.metadata["notes"] == [lacking]
    with pytest.raises(CheckpointError, match=r"its products pass a short convolution.*, SiLU"):
        wqk.open(hybrid).block(0, kind="linear").at(distance=4)
    with pytest.raises(CheckpointError, match="has no form at a distance"):
        wqk.scan(wqk.open(hybrid).select(kind="linear"), distances=[4])


def test_biases_of_both_sides_count_without_a_softmax(tmp_path: Path) -> None:
    model = made("mamba2", tmp_path, use_bias=True)
    block = wqk.open(tmp_path).block(1, kind="state-space")
    x = np.random.default_rng(0).standard_normal((5, 48))
    out = model.layers[1].mixer.in_proj(torch.from_numpy(x)).detach().numpy()
    keys, queries = (
        side.reshape(5, 2, 6).swapaxes(0, 1) for side in np.split(out[:, -28:-4], 2, -1)
    )
    augmented = np.concatenate([x, np.ones((5, 1))], -1)
    products = augmented @ block.at(bias=True).dense() @ augmented.T
    np.testing.assert_allclose(products, queries @ keys.swapaxes(1, 2), atol=1e-5)
    assert "each adds a term in the other side alone" in " ".join(wqk.explain(tmp_path).notes)


def test_mamba_1_has_no_form_of_values_and_outputs(tmp_path: Path) -> None:
    save(CASES["jamba"], tmp_path)
    table = wqk.scan(tmp_path, circuit="ov")
    assert set(table.frame["kind"]) == {"self"}
    assert "state space, layers 0, 2: has no form of values" in table.metadata["notes"][0]
    with pytest.raises(CheckpointError, match="describes no values and outputs"):
        wqk.scan(wqk.open(tmp_path).select(kind="state-space"), circuit="ov")


def test_without_a_softmax_there_are_no_logits_and_no_ceilings(hybrid: Path) -> None:
    table = wqk.scan(hybrid, measures=["ceiling"], heads=False)
    assert [value is None for value in table.frame["score_ceiling"]] == [False, True]
    assert table.metadata["no_ceiling"].keys() == {"decoder linear"}
    with pytest.raises(UnknownFamily, match="no softmax, and so no logits"):
        wqk.open(hybrid).block(0, kind="linear").logits(np.ones((2, 48)), np.ones((2, 48)))


@pytest.mark.parametrize(
    "measure",
    [
        wqk.compose,
        wqk.verify,
        wqk.parts,
        partial(wqk.initialize_, kind="symmetric"),
    ],
    ids=["compose", "verify", "parts", "initialize_"],
)
def test_what_is_about_a_softmax_is_refused_without_one(measure: Any) -> None:
    torch.manual_seed(0)
    model = transformers.Mamba2Model(transformers.Mamba2Config(**CASES["mamba2"].config))
    reason = r"no attention with a softmax; it has decoder state space, layers 0-1"
    with pytest.raises(CheckpointError, match=reason):
        measure(model)


def test_a_pass_without_a_softmax_has_no_logits() -> None:
    torch.manual_seed(0)
    model = transformers.Mamba2Model(transformers.Mamba2Config(**CASES["mamba2"].config))
    with pytest.raises(CheckpointError, match="no attention was observed; expected a softmax"):
        wqk.logits(model, torch.arange(9)[None])


def test_a_model_of_nothing_else_is_no_missing_one(tmp_path: Path) -> None:
    save(CASES["mamba"], tmp_path)
    assert wqk.open(tmp_path)
    message = "no attention with a softmax; it has decoder state space"
    assert message in refuse("verify", tmp_path, width=200)


def test_of_hybrids_the_layers_that_are_left_alone_are_told() -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(**CASES["qwen3-next"].config)
    model = transformers.Qwen3NextForCausalLM(config)
    note = "decoder linear attention, layers 0: left"
    assert note in repr(wqk.initialize_(model, "symmetric"))
    assert note in repr(wqk.clip_(model, 1.0, logits={(1, 0): 2.0}))
    assert note in repr(wqk.parts(model, tokens=torch.arange(320) % 50, block=16, blocks=4))


@pytest.mark.parametrize("name", ["qwen3-next", "kimi-linear", "jamba", "mamba2", "xlstm"])
def test_no_change_of_such_a_layer_passes_as_the_same(name: str, tmp_path: Path) -> None:
    """Every tensor of a layer is changed in turn, without the feed-forward part and its norm."""
    save(CASES[name], tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    comparison = wqk.same(tmp_path / "one", tmp_path / "other")
    assert comparison.same
    assert ("The same mixers of tokens: other" in comparison.sentence) == (not comparison.blocks)
    neighbors = (
        "mlp",
        "moe",
        "feed_forward",
        "ffn",
        "post_attention_layernorm",
        "pre_ff_layernorm",
    )
    tensors = wqk.open_checkpoint(tmp_path / "one").tensors()
    inside = [n for n in tensors if ".0." in n and not any(b in n for b in neighbors)]
    assert len(inside) > 5
    for name in inside:

        def edited(tensors: dict[str, Any], name: str = name) -> dict[str, Any]:
            return tensors | {name: tensors[name] * 1.01 + 0.01}

        edit_tensors(tmp_path / "other", edited)
        assert not wqk.same(tmp_path / "one", tmp_path / "other").same, name
        shutil.copytree(tmp_path / "one", tmp_path / "other", dirs_exist_ok=True)
    # One is lost under other names.
    edit_tensors(
        tmp_path / "other",
        lambda tensors_of_candidate: {
            f"a.{n}": tensors_of_candidate[n] for n in tensors_of_candidate if n != name
        },
    )
    assert (
        f"({name.split('.')[-2]}: missing from the file, layer 0)"
        in wqk.same(tmp_path / "one", tmp_path / "other").sentence
    )


@pytest.mark.parametrize("name", ["mamba2", "qwen3-next"])
def test_kinship_of_one_kind(name: str, tmp_path: Path) -> None:
    def noisy(share: float, tensors: dict[str, Any]) -> dict[str, Any]:
        torch.manual_seed(1)
        return {name: t + share * t.std() * torch.randn_like(t) for name, t in tensors.items()}

    save(CASES[name], tmp_path / "one")
    for share, conclusion in ((0.3, "related"), (100.0, "no sign")):
        shutil.copytree(tmp_path / "one", tmp_path / "other", dirs_exist_ok=True)
        edit_tensors(tmp_path / "other", partial(noisy, share))
        (kind,) = CASES[name].mixers
        models = (
            wqk.open(tmp_path / name_of_folder).select(kind=kind)
            for name_of_folder in ("one", "other")
        )
        assert wqk.kin(*models).conclusion == conclusion


def test_sections_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    save(CASES["qwen3-next"], tmp_path)
    edit_config(tmp_path, {"linear_num_key_heads": 3})
    with pytest.raises(CheckpointError, match=r"in_proj_qkvz.* do not"):
        wqk.open(tmp_path)


def test_the_curves_over_layers_tell_kinds_apart(hybrid: Path) -> None:
    figure = wqk.scan(hybrid).plot()
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == ["model, self-attention", "model, linear attention"]
    curves = figure.axes[0].get_lines()[::2]
    assert [list(map(int, curve.get_xdata())) for curve in curves[:2]] == [[1], [0]]


def rwkv7(heads: int, width: int) -> dict[str, Any]:
    """A small RWKV-7 in its authors' layout, without decay and with open gates."""
    torch.manual_seed(0)
    d, draw = heads * width, torch.randn
    tensors = {"emb.weight": draw(20, d), "head.weight": draw(20, d)}
    for norm in ("blocks.0.ln0", "ln_out"):
        tensors |= {f"{norm}.weight": torch.ones(d), f"{norm}.bias": torch.zeros(d)}
    for n in range(2):
        block: dict[str, Any] = {f"att.x_{side}": torch.zeros(1, 1, d) for side in "rwkvag"}
        for side in ("receptance", "key", "value", "output"):
            block[f"att.{side}.weight"] = draw(d, d) / d**0.5
        for gate in "wav":  # closed, which for decay is none
            block |= {f"att.{gate}0": torch.full((1, 1, d), -1e4)}
            block |= {f"att.{gate}1": torch.zeros(d, 4), f"att.{gate}2": torch.zeros(4, d)}
        block |= {"att.g1": torch.zeros(d, 4), "att.g2": torch.full((4, d), 0.5)}
        block |= {"att.k_k": torch.ones(1, 1, d), "att.k_a": torch.zeros(1, 1, d)}
        block |= {"att.r_k": torch.zeros(heads, width), "ffn.x_k": torch.zeros(1, 1, d)}
        block |= {"att.ln_x.weight": torch.ones(d), "att.ln_x.bias": torch.zeros(d)}
        for norm in ("ln1", "ln2"):
            block |= {f"{norm}.weight": 1 + 0.3 * draw(d), f"{norm}.bias": 0.1 * draw(d)}
        block |= {"ffn.key.weight": torch.zeros(d, d), "ffn.value.weight": torch.zeros(d, d)}
        tensors |= {f"blocks.{n}.{name}": value for name, value in block.items()}
    return tensors


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_rwkv_7_is_what_its_authors_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The authors' package, for this test alone: pip install rwkv==0.8.32."""
    for name, value in {"V7_ON": "1", "JIT_ON": "0", "CUDA_ON": "0"}.items():
        monkeypatch.setenv(f"RWKV_{name}", value)
    package = pytest.importorskip("rwkv.model")
    tensors, ids = rwkv7(3, 8), [3, 7, 1, 15, 3, 9, 11]
    torch.save(tensors, tmp_path / "model.pth")
    out, _ = package.RWKV(str(tmp_path / "model"), "cpu fp32").forward([*ids], None, True)
    normed, model = (
        torch.nn.functional.layer_norm,
        wqk.open(tmp_path / "model.pth", family="rwkv7", heads_per_layer=3),
    )
    x = normed(tensors["emb.weight"][ids], (24,)).double()
    for n in range(2):
        block = model.block(n, kind="linear")
        gain, shift = (tensors[f"blocks.{n}.ln1.{name}"].double() for name in ("weight", "bias"))
        normalized = normed(x, (24,), gain, shift).numpy()
        scores = np.tril(block.products(normalized, normalized).astype(float))
        values, outputs = (np.asarray(side, float) for side in block.weights("ov"))
        mixed = np.einsum("hij,jd,hrd->ihr", scores, normalized, values)
        mixed -= mixed.mean(-1, keepdims=True)
        mixed /= np.sqrt((mixed**2).mean(-1, keepdims=True) + 64e-5)
        x = x + torch.from_numpy(np.einsum("ihr,hrd->id", mixed, outputs))
    logits = normed(x, (24,)) @ tensors["head.weight"].double().T
    torch.testing.assert_close(out.double(), logits, atol=5e-5, rtol=0)


def test_rwkv_7_has_one_form_in_both_spellings() -> None:
    published = {name: value.numpy() for name, value in rwkv7(3, 8).items()}
    names = {
        "blocks.": "model.layers.",
        "att.receptance": "attn.r_proj",
        "att.key": "attn.k_proj",
        "att.value": "attn.v_proj",
        "att.output": "attn.o_proj",
        "ln1.": "attn_norm.",
    }
    respelled = dict(published)
    for before, after in names.items():
        respelled = {name.replace(before, after): value for name, value in respelled.items()}
    config = {"model_type": "rwkv7", "num_heads": 3}
    blocks = [wqk.open(Module(t, config)).block(1, kind="linear") for t in (published, respelled)]
    for circuit in ("qk", "ov"):
        forms = [block.at(circuit=circuit, fold_norm=True).dense() for block in blocks]
        np.testing.assert_array_equal(*forms)
    scores = (
        published["blocks.1.att.receptance.weight"][:8].T @ published["blocks.1.att.key.weight"][:8]
    )
    np.testing.assert_allclose(blocks[1][0].dense(), scores, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3-next", "jamba", "mamba2"])
def test_a_scan_reads_what_explain_says(name: str, tmp_path: Path) -> None:
    save(CASES[name], tmp_path)
    seen: list[Any] = []
    wqk.scan(tmp_path, heads=False, on_progress=seen.append)
    assert seen[-1].bytes_read == wqk.explain(tmp_path).bytes_to_read


def test_an_output_in_one_dimension_is_refused(tmp_path: Path) -> None:
    save(CASES["qwen3-next"], tmp_path)
    name = "layers.0.linear_attn.out_proj.weight"
    edit_tensors(tmp_path, lambda tensors: tensors | {name: tensors[name].reshape(-1)})
    with pytest.raises(CheckpointError, match="expected a matrix"):
        wqk.scan(tmp_path)


@pytest.mark.parametrize(
    ("case", "lost"),
    [
        ("bamba", "layers.2.self_attn.q_proj.weight"),
        ("bamba", "layers.0.mamba.in_proj.weight"),
        ("qwen3-next", "layers.0.linear_attn.in_proj_qkvz.weight"),
    ],
)
def test_a_layer_without_its_queries_is_not_left_out_in_silence(case, lost, tmp_path):
    save(CASES[case], tmp_path)
    edit_tensors(tmp_path, lambda tensors: {name: t for name, t in tensors.items() if name != lost})
    with pytest.raises(CheckpointError, match=r"incomplete, layer \d has .*, but no queries"):
        wqk.scan(tmp_path)
