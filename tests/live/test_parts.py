"""Parts of the scores: against the model itself, a direct computation, and planted structure."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peft
import polars as pl
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tests.small import sizes

import wqk
from wqk.errors import CheckpointError, CorpusError, FormError, UnknownFamily
from wqk.live.held_out import choose
from wqk.live.mixing import NONE, SKEW, SYMMETRIC, Mixer, ScorePart, ScorePlace, mixed
from wqk.live.parts import SHARES, share_kept
from wqk.live.reflections import InputRoots, involution
from wqk.reporting.pictures import parts_figure

N = 7
COMMON = {"vocab_size": 40, "bos_token_id": None, "eos_token_id": None}


class Kind(NamedTuple):
    """A model, its attention of layer 0, and what its scores hold besides products."""

    name: str
    config: dict[str, Any]
    attention: str  # its module
    output: str  # the module in it or next to it that takes the outputs of the heads
    projections: Callable[[Any], list[Any]]  # the weights of queries, keys and values, (D, …)
    scale: float
    stack: str = "decoder"
    rotary: bool = False


def transposed(*names: str) -> Callable[[Any], list[Any]]:
    return lambda attention: [getattr(attention, name).weight.T for name in names]


SIZE = sizes(24, 2, 4, intermediate_size=32)
KINDS = [
    Kind(
        "BertForMaskedLM",
        {**SIZE, "max_position_embeddings": 16},
        "bert.encoder.layer.0.attention.self",
        "bert.encoder.layer.0.attention.output.dense",
        transposed("query", "key", "value"),
        6**-0.5,
        "encoder",
    ),
    Kind(
        "GPT2LMHeadModel",
        {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 16},
        "transformer.h.0.attn",
        "transformer.h.0.attn.c_proj",
        lambda attention: list(attention.c_attn.weight.split(24, dim=1)),
        6**-0.5,
    ),
    Kind(
        "LlamaForCausalLM",
        {**SIZE, "num_key_value_heads": 2, "max_position_embeddings": 16},
        "model.layers.0.self_attn",
        "model.layers.0.self_attn.o_proj",
        transposed("q_proj", "k_proj", "v_proj"),
        6**-0.5,
        rotary=True,
    ),
    Kind(
        "T5ForConditionalGeneration",
        {
            "d_model": 24,
            "num_layers": 2,
            "num_heads": 4,
            "d_kv": 6,
            "d_ff": 32,
            "decoder_start_token_id": 0,
        },
        "encoder.block.0.layer.0.SelfAttention",
        "encoder.block.0.layer.0.SelfAttention.o",
        transposed("q", "k", "v"),
        1.0,
        "encoder",
    ),
]
GEMMA = Kind(
    "Gemma2ForCausalLM",
    {**SIZE, "num_key_value_heads": 2, "head_dim": 6, "attn_logit_softcapping": 0.5},
    "",
    "",
    transposed(),
    1.0,
)
named = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def made(kind: Kind, dtype: Any = torch.float64, seed: int = 0) -> Any:
    """A model with weights large enough that attention matters."""
    torch.manual_seed(seed)
    maker = getattr(transformers, kind.name)
    values = {k: v for k, v in COMMON.items() if kind.name[:2] not in ("T5",) or k == "vocab_size"}
    config = maker.config_class(**values, **kind.config)
    model = maker._from_config(config, attn_implementation="eager").to(dtype).eval()
    for weight in model.parameters():
        weight.data.mul_(3 if weight.ndim > 1 else 1)
    return model


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 40, (2, N), generator=torch.Generator().manual_seed(seed))


def output(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    more = {"labels": tokens} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False, **more).logits
    return logits


# The text that second moments of inputs are measured on.
MEASURED = torch.randint(5, 40, (40, N), generator=torch.Generator().manual_seed(9))


def with_part(model: Any, tokens: torch.Tensor, part: ScorePart, place: ScorePlace) -> torch.Tensor:
    with Mixer(wqk.open(model)).installed() as mixer:
        mixer.measure_inputs(lambda: output(model, MEASURED))
        mixer.place, mixer.part = place, part
        return output(model, tokens)


@pytest.mark.parametrize("kind", [*KINDS, GEMMA], ids=lambda kind: kind.name)
@pytest.mark.parametrize("mirror", ["transpose", "next head", "involution"])
def test_at_one_and_one_the_model_is_itself_bit_for_bit(kind: Kind, mirror: Any) -> None:
    model = made(kind, torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    plain = output(model, ids())
    with_both_parts = with_part(model, ids(), mixed("", 1, 1, mirror), ScorePlace(kind.stack))
    with_one_part = with_part(model, ids(), mixed("", 1, 0, mirror), ScorePlace(kind.stack))
    assert torch.equal(plain, with_both_parts)
    assert not torch.allclose(plain, with_one_part, atol=1e-4)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert hooks == sum(len(module._forward_pre_hooks) for module in model.modules())
    assert model.config._attn_implementation == "eager"


def rotated(x: np.ndarray) -> np.ndarray:
    """Half-split rotary positions of base 10,000 on (B, H, N, R)."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[-2])[:, None] * 10_000.0 ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def directly(
    kind: Kind,
    model: Any,
    x: np.ndarray,
    mix: Callable[[np.ndarray], np.ndarray],
    reflection: np.ndarray | None = None,
) -> np.ndarray:
    """Outputs of the heads of layer 0, (B, N, H R), computed from its weights."""
    attention = model.get_submodule(kind.attention)
    weights = [w.detach().numpy() for w in kind.projections(attention)]

    def heads(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        split = (x @ weight).reshape(*x.shape[:2], -1, 6).swapaxes(1, 2)
        return np.asarray(split.repeat(4 // split.shape[1], axis=1))

    def scores(x: np.ndarray) -> np.ndarray:
        q, k = heads(x, weights[0]), heads(x, weights[1])
        if kind.rotary:
            q, k = rotated(q), rotated(k)
        return kind.scale * np.einsum("bhir,bhjr->bhij", q, k)

    s = scores(x)
    mirror = s if reflection is None else scores(x @ reflection)
    logits = mix(np.stack([s, mirror.swapaxes(-1, -2)]))
    if kind.name.startswith("T5"):
        logits = logits + attention.compute_bias(N, N).detach().numpy()
    if kind.stack == "decoder":
        logits = np.where(np.tri(N, dtype=bool), logits, -np.inf)
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    return np.asarray((chances @ heads(x, weights[2])).swapaxes(1, 2).reshape(*x.shape[:2], -1))


def inputs_of_layer_0(kind: Kind, model: Any, tokens: torch.Tensor) -> np.ndarray:
    """The inputs (B, N, D) of the attention of layer 0."""
    inputs: list[torch.Tensor] = []

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])

    hook = model.get_submodule(kind.attention).register_forward_pre_hook(keep, with_kwargs=True)
    output(model, tokens)
    hook.remove()
    return inputs[0].numpy()


def heard(kind: Kind, model: Any, part: ScorePart, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The inputs of layer 0's attention, and what its heads put out in the model's own pass."""
    kept: dict[str, Any] = {}

    def given(module: Any, args: Any, kwargs: Any) -> None:
        kept.setdefault("x", args[0] if args else kwargs["hidden_states"])

    def put_out(module: Any, args: Any) -> None:
        kept["out"] = args[0]

    with Mixer(wqk.open(model), seed).installed() as mixer:
        mixer.measure_inputs(lambda: output(model, MEASURED))
        attention, after = model.get_submodule(kind.attention), model.get_submodule(kind.output)
        hooks = [
            attention.register_forward_pre_hook(given, with_kwargs=True, prepend=True),
            after.register_forward_pre_hook(put_out),
        ]
        mixer.place, mixer.part = ScorePlace(kind.stack), part
        output(model, ids())
    for hook in hooks:
        hook.remove()
    return kept["x"].numpy(), kept["out"].numpy()


@named
@pytest.mark.parametrize(("a", "b"), [(1, 0), (0, 1), (0.3, 1.7), (1, -1), (0, 0)])
def test_a_and_b_equal_a_direct_computation(kind: Kind, a: float, b: float) -> None:
    model = made(kind)
    x, out = heard(kind, model, mixed("", a, b))
    expected = directly(kind, model, x, lambda s: a * (s[0] + s[1]) / 2 + b * (s[0] - s[1]) / 2)
    np.testing.assert_allclose(out, expected, atol=1e-6 if kind.rotary else 1e-9)


@named
def test_a_random_involution_equals_a_direct_computation(kind: Kind) -> None:
    model = made(kind)
    inputs = inputs_of_layer_0(kind, model, MEASURED)
    deviations, axes = np.linalg.svd(inputs.reshape(-1, 24), full_matrices=False)[1:]
    deviations = np.maximum(deviations, 1e-3 * deviations[0])  # of a direction without inputs
    reflection = axes.T / deviations @ axes @ involution(24, (5, 3)) @ axes.T * deviations @ axes
    np.testing.assert_allclose(reflection @ reflection, np.eye(24), atol=1e-9)
    x, out = heard(kind, model, mixed("", 1, 0, "involution", 3), seed=5)
    expected = directly(kind, model, x, lambda s: (s[0] + s[1]) / 2, reflection)
    np.testing.assert_allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[2]], ids=lambda kind: kind.name)
@pytest.mark.parametrize("mirror", ["transpose", "next head", "involution"])
def test_a_later_token_changes_nothing_before_it(kind: Kind, mirror: Any) -> None:
    model, place = made(kind), ScorePlace("decoder")
    tokens, changed = ids(), ids()
    changed[:, 4:] = ids(1)[:, 4:]
    for part in (mixed("", 1, 0, mirror), mixed("", 0, 1, mirror)):
        logits, logits_of_changed = (
            with_part(model, ids_of_text, part, place) for ids_of_text in (tokens, changed)
        )
        torch.testing.assert_close(logits[:, :4], logits_of_changed[:, :4], rtol=0, atol=1e-12)
        assert not torch.allclose(logits[:, 4:], logits_of_changed[:, 4:])


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1]], ids=lambda kind: kind.name)
def test_heads_that_were_made_symmetric_keep_all(kind: Kind) -> None:
    model, place = made(kind), ScorePlace(kind.stack)
    wqk.initialize_(model, "symmetric", seed=1)
    plain, without_scores = output(model, ids()), with_part(model, ids(), NONE, place)
    torch.testing.assert_close(with_part(model, ids(), SYMMETRIC, place), plain)
    torch.testing.assert_close(with_part(model, ids(), SKEW, place), without_scores)
    assert not torch.allclose(plain, without_scores, atol=1e-3)
    wqk.initialize_(model, "skew", seed=1)
    torch.testing.assert_close(with_part(model, ids(), SYMMETRIC, place), without_scores)


@pytest.mark.parametrize("kind", [KINDS[2], GEMMA], ids=lambda kind: kind.name)
def test_no_scores_are_those_of_queries_that_are_zero(kind: Kind) -> None:
    """Also under a soft cap, which comes before what is added to the mask."""
    model = made(kind)
    without_scores, plain = (
        with_part(model, ids(), NONE, ScorePlace("decoder")),
        output(model, ids()),
    )
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.zero_()
    torch.testing.assert_close(without_scores, output(model, ids()))
    assert not torch.allclose(without_scores, plain, atol=1e-3)


def test_one_layer_and_one_head_are_changed_alone() -> None:
    model = made(KINDS[0])
    plain = output(model, ids())
    by_head = [with_part(model, ids(), NONE, ScorePlace("encoder", 0, head)) for head in range(4)]
    assert not any(torch.allclose(without_head, plain, atol=1e-6) for without_head in by_head)
    assert not torch.allclose(by_head[0], by_head[1], atol=1e-6)
    # In a model of one head, a head is the layer.
    model = made(KINDS[0]._replace(config={**KINDS[0].config, "num_attention_heads": 1}))
    torch.testing.assert_close(
        with_part(model, ids(), SKEW, ScorePlace("encoder", 1, 0)),
        with_part(model, ids(), SKEW, ScorePlace("encoder", 1)),
    )


def test_each_head_is_measured_alone() -> None:
    """Each head of each layer has its losses; in a model of one head, these are the layer's."""
    one_head = {**KINDS[1].config, "n_head": 1}
    for config, heads in ((KINDS[1].config, 4), (one_head, 1)):
        model = made(KINDS[1]._replace(config=config))
        parts = wqk.parts(model, tokens=rising(8, 1), draws=1, each_layer=True, each_head=True)
        is_of_layer = pl.col("layer").is_not_null() & pl.col("head").is_null()
        of_heads = parts.shares.filter(pl.col("head").is_not_null())
        of_layers = parts.shares.filter(is_of_layer)
        places = of_heads.select("layer", "head").unique(maintain_order=True).rows()
        assert places == [(layer, head) for layer in range(2) for head in range(heads)]
        losses = parts.shares.filter(pl.col("layer").is_null())["loss"]
        # The next of one head is the head itself, whose part is then the symmetric part.
        assert losses.n_unique() == len(losses) - (heads == 1)
    for column in ("part", "loss"):
        assert of_heads[column].to_list() == of_layers[column].to_list()


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_a_rank_is_that_of_the_best_approximation(rank: int) -> None:
    model = made(KINDS[0])
    x, out = heard(KINDS[0], model, ScorePart("", 0, 1, "rank", rank))
    attention = model.get_submodule(KINDS[0].attention)
    forms = []
    for side in (attention.query, attention.key):
        forms.append(side.weight.detach().numpy().reshape(4, 6, 24).swapaxes(1, 2))
    left, values, right = np.linalg.svd(forms[0] @ forms[1].swapaxes(1, 2))
    best = (left[..., :rank] * values[:, None, :rank]) @ right[:, :rank]
    expected = directly(
        KINDS[0], model, x, lambda _: 6**-0.5 * np.einsum("bid,hde,bje->bhij", x, best, x)
    )
    np.testing.assert_allclose(out, expected, atol=1e-8)


# In a trained model, inputs lie in few directions.


@pytest.fixture(scope="module")
def trained() -> Any:
    """A decoder of two layers that continues rising tokens, trained for about a second."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel._from_config(
        transformers.GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=12,
            vocab_size=20,
            bos_token_id=None,
            eos_token_id=None,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        ),
        attn_implementation="eager",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(60):
        tokens = torch.from_numpy(rising(16, seed))
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def rising(count: int, seed: int) -> np.ndarray:
    """Token ids (count, 12): each row rises by 1 to 3 at a step, modulo 20."""
    random = np.random.default_rng(seed)
    begin, step = random.integers(0, 20, (count, 1)), random.integers(1, 4, (count, 1))
    return np.asarray((begin + step * np.arange(12)) % 20)


def plain_involution(moments: np.ndarray, least_moment: float = 0) -> InputRoots:
    """The roots with which R′ is the orthogonal involution R, whatever the inputs are."""
    return InputRoots(np.eye(len(moments)), np.eye(len(moments)))


def test_the_control_is_as_large_as_the_scores(trained: Any) -> None:
    measured = wqk.parts(trained, tokens=rising(32, 999))
    assert measured.control_size["layer"].to_list() == [0, 1]
    assert measured.control_size["size"].is_between(0.7, 1.4).all()
    assert measured.shares.filter(part="random")["share"].null_count() == 0
    assert [row["layer"] for row in measured.to_dict()["control_size"]] == [0, 1]
    shown = " ".join(repr(measured).split())
    assert "next to the scores (ratio of the sums of squares; 1: equally large), by layer" in shown
    assert "control_size" not in shown
    assert "with random, not with 100 %" in repr(measured)


def test_a_picture_of_parts_has_each_share_and_each_loss() -> None:
    names = ["whole", "none", "symmetric", "skew", "random, size of skew"]
    row = {"stack": "decoder", "layer": None, "head": None}
    shares = [1.0, 0.0, 0.8, 0.4, 0.2]
    parts = [
        {**row, "part": part, "share": share, "low": share - 0.1, "high": share + 0.2}
        for part, share in zip(names, shares, strict=True)
    ]
    of_layers = [
        {**parts[names.index(part)], "layer": layer, "share": (layer + 1) * share}
        for part, share in (("symmetric", 0.3), ("skew", 0.1))
        for layer in (0, 1)
    ]
    losses = {"symmetric": [2.0, 1.0], "skew": [3.0, 1.0]}
    curves = pl.DataFrame(
        [
            {"stack": "decoder", "direction": direction, "factor": factor, "loss": loss}
            for direction, both in losses.items()
            for factor, loss in zip((0.0, 1.0), both, strict=True)
        ]
    )
    figure = parts_figure(pl.DataFrame([*parts, *of_layers]), curves, "next")
    of_losses, of_shares, by_layer = figure.axes
    assert [line.get_ydata().tolist() for line in of_losses.lines[:2]] == [*losses.values()]
    labels = [text.get_text() for text in of_shares.get_yticklabels()]
    assert labels == ["random,\nsize of skew", "skew", "symmetric"]
    points = [container.lines[0].get_xdata()[0] for container in of_shares.containers]
    assert points == [0.2, 0.4, 0.8]
    assert [by_layer.lines[n].get_ydata().tolist() for n in (0, 1)] == [[0.3, 0.6], [0.1, 0.2]]


def test_the_legend_has_all_points_and_a_blank_layer_a_note() -> None:
    row = {"stack": "encoder", "layer": None, "head": None, "loss": 2.0, "low": 0.1, "high": 0.3}
    names = ("symmetric", "skew", "random", "random, size of symmetric", "next head")
    rows = [{**row, "part": part, "share": 0.2} for part in names]
    blank = {"share": None, "low": None, "high": None}
    rows += [{**row, "part": part, "share": 0.2, "layer": 0} for part in names[:3]]
    rows += [{**row, "part": part, "layer": 1, **blank} for part in names[:3]]
    figure = parts_figure(pl.DataFrame(rows, schema=SHARES), pl.DataFrame(), "masked")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[-2:] == [
        "half, and half of the next head's, transposed",
        "random, size of a part",
    ]
    notes = [(text.get_position()[0], text.get_text()) for text in figure.axes[1].texts]
    assert notes == [(1, "no share: scores explain nothing")]


def test_a_part_is_concluded_from_the_control_of_its_size(trained: Any) -> None:
    """The difference of shares is that of the two shares, with its own interval."""
    measured = wqk.parts(trained, tokens=rising(32, 999))
    shares = dict(measured.shares.filter(pl.col("layer").is_null()).select("part", "share").rows())
    assert measured.contrasts["part"].to_list() == ["symmetric", "skew"]
    for row in measured.contrasts.iter_rows(named=True):
        assert row["difference"] == pytest.approx(shares[row["part"]] - shares[row["control"]])
        assert row["low"] < row["difference"] < row["high"]
    assert [sentence[:14] for sentence in measured.conclusions] == [
        "The symmetric ",
        "The skew part ",
    ]
    shown = " ".join(repr(measured).split())
    assert all(sentence in shown for sentence in measured.conclusions)


def test_a_layer_takes_the_share_whose_control_is_nearest_to_its_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is near enough with the first share keeps it; another comes back from a worse.

    Sizes of controls are planted, by layer and by the share of small moments.
    """
    monkeypatch.setattr("wqk.live.parts.LEAST_MOMENTS", (1e-6, 1e-5, 1e-4, 1e-3))
    sizes = {
        0: {1e-6: 3.6, 1e-5: 2.0, 1e-4: 1.1, 1e-3: 0.4},
        1: {1e-6: 1.4, 1e-5: 1.0, 1e-4: 0.9, 1e-3: 0.5},
        2: {1e-6: 0.6, 1e-5: 0.5, 1e-4: 0.3, 1e-3: 0.1},
    }
    least_moments = dict.fromkeys(sizes, 1e-6)

    def raise_moments(_: Mixer, stack: str, raised: dict[int, float]) -> None:
        least_moments.update(raised)

    def control_sizes(*_: object) -> dict[int, float]:
        return {layer: by_moment[least_moments[layer]] for layer, by_moment in sizes.items()}

    monkeypatch.setattr(Mixer, "raise_moments", raise_moments)
    monkeypatch.setattr(Mixer, "control_sizes", control_sizes)
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, n_positions=32, **COMMON)
    model = transformers.GPT2LMHeadModel(config)
    measured = wqk.parts(model, tokens=rising(32, 999)).control_size
    assert measured["size"].to_list() == pytest.approx([1.1, 1.4, 0.6])
    assert measured["least_moment"].to_list() == [1e-4, 1e-6, 1e-6]
    assert least_moments == {0: 1e-4, 1: 1e-6, 2: 1e-6}


def test_a_control_that_turns_weights_away_from_inputs_is_refused(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain orthogonal involution, which nearly removes the scores of a trained model."""
    monkeypatch.setattr("wqk.live.mixing.input_roots", plain_involution)
    measured = wqk.parts(trained, tokens=rising(32, 999), each_layer=True, curves=True)
    assert (measured.control_size["size"] < 0.5).all()
    random = measured.shares.filter(pl.col("part").str.starts_with("random"))
    assert random["share"].null_count() == random["loss"].null_count() == len(random)
    symmetric = measured.shares.filter(pl.col("layer").is_null(), part="symmetric")["share"]
    assert symmetric.null_count() == 0
    assert measured.slopes.filter(direction="random")["curvature"].to_list() == [None]
    assert "random" not in measured.curves["direction"].to_list()
    assert "their control is refused" in measured.sentence
    assert "control refused in decoder layers 0, 1: its size lies outside 0.5 to 2" in repr(
        measured
    )


def test_derivatives_are_those_of_autograd() -> None:
    kind = KINDS[0]
    model, tokens = (
        made(kind),
        torch.randint(5, 40, (4, 8), generator=torch.Generator().manual_seed(2)),
    )
    model.config.mask_token_id = 3
    measured = wqk.parts(model, tokens=tokens, blocks=4, draws=1)
    slopes = {row["direction"]: row for row in measured.slopes.rows(named=True)}
    total = slopes["symmetric"]["derivative"] + slopes["skew"]["derivative"]
    assert total == pytest.approx(slopes["all"]["derivative"], rel=0.02)
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    hidden = np.random.default_rng(0).random((4, 8)).argsort(axis=1).argsort(axis=1) < 1
    with Mixer(wqk.open(model)).installed() as mixer:
        mixer.place, mixer.part = ScorePlace("encoder"), ScorePart("", factor, 0.0)  # type: ignore[arg-type]
        logits = model(input_ids=tokens.masked_fill(torch.from_numpy(hidden), 3)).logits
        loss = torch.nn.functional.cross_entropy(logits[hidden], tokens[hidden])
    (slope,) = torch.autograd.grad(loss, factor)
    assert slopes["all"]["derivative"] == pytest.approx(float(slope), rel=0.02)


def test_what_is_seen_is_not_predicted() -> None:
    """States are compared where a model would predict the next token and attends to it."""
    decoder = Kind("BertLMHeadModel", KINDS[0].config, "", "", transposed(), 1.0)
    lifted = KINDS[2]._replace(config=KINDS[2].config | {"is_causal": False})
    for kind in (decoder, lifted):
        model, later = made(kind), ids()
        later[:, -1] = 6
        assert not torch.allclose(output(model, ids())[:, :-1], output(model, later)[:, :-1])
        measured, states = (
            wqk.parts(measured_model, tokens=TOKENS, block=8, blocks=4)
            for measured_model in (model, model.base_model)
        )
        assert measured.predicts == "states"
        assert measured.shares.equals(states.shares)
    causal = made(decoder._replace(config=KINDS[0].config | {"is_decoder": True}))
    assert wqk.parts(causal, tokens=TOKENS, block=8, blocks=4).predicts == "causal"


@pytest.mark.parametrize("blocks", [4, 64])
def test_intervals_cover_the_share(blocks: int) -> None:
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        explained = random.gamma(16, 0.0625, blocks)
        kept = 0.6 * explained + random.normal(0, 0.1, blocks)
        loss = random.normal(2, 0.5, blocks)
        _, low, high = share_kept(loss + explained - kept, loss + explained, loss)
        hits += (low or 1) <= 0.6 <= (high or 0)
    assert 0.9 < hits / 300 < 0.99
    assert share_kept(*random.normal(0, 1, (3, 64))) == (None, None, None)


def deberta() -> Any:
    return transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**SIZE, vocab_size=40))


def adapted(**about: Any) -> Any:
    about |= {"task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(**about) if "r" in about else peft.PromptTuningConfig(**about)
    return peft.get_peft_model(made(KINDS[2], torch.float32), config)


TOKENS = np.arange(400) % 29
REFUSED: list[tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = [
    (deberta, {}, UnknownFamily, "computes its attention itself"),
    (lambda: made(KINDS[3]), {"stack": "cross"}, CheckpointError, "come from different sequences"),
    (lambda: made(KINDS[1]), {"stack": "encoder"}, CheckpointError, "it has that of: decoder"),
    (lambda: made(KINDS[2]), {"rank": [2]}, UnknownFamily, "with rotary positions a head has no"),
    (lambda: made(KINDS[0]), {}, CorpusError, "no mask token is known"),
    (lambda: made(KINDS[1]), {"block": 99}, CorpusError, "the model has 16 positions"),
    (lambda: made(KINDS[1]), {"tokens": TOKENS + 30}, CorpusError, "a vocabulary of 40"),
    (lambda: made(KINDS[1]), {"tokens": TOKENS / 2}, CorpusError, "must be whole numbers"),
    (lambda: made(KINDS[1]), {"tokens": TOKENS[:20]}, CorpusError, "hold no 2 blocks"),
    (lambda: made(KINDS[1]), {"block": 1}, CorpusError, "hold no 2 blocks of 1"),
    (lambda: made(KINDS[1]), {"block": 0}, CorpusError, "hold no 2 blocks of 0"),
    (lambda: made(KINDS[1]), {"tokens": TOKENS[None, :9]}, CorpusError, r"2 or more blocks.*1, 9"),
    (lambda: made(KINDS[1]), {"tokens": TOKENS[:4, None]}, CorpusError, r"more tokens, .*4, 1"),
    (lambda: made(KINDS[0]), {"tokens": TOKENS.reshape(8, 50)}, CorpusError, "no mask token"),
    (lambda: made(KINDS[1]), {"tokens": TOKENS.reshape(8, 50)}, CheckpointError, "cannot be run"),
    (lambda: made(KINDS[1]), {"draws": 0}, FormError, "draws must be 1 or more, got 0"),
    (lambda: made(KINDS[1]), {"rank": [2, -1]}, FormError, "rank must be 1 or more, got -1"),
    (
        lambda: adapted(num_virtual_tokens=2),
        {},
        CheckpointError,
        "its learned prompts would be left out",
    ),
    (lambda: transformers.ViTModel(transformers.ViTConfig(**SIZE)), {}, CheckpointError, "tokens"),
    (lambda: made(KINDS[1]), {"tokens": None}, CorpusError, "give one of text, corpus and tokens"),
    (
        lambda: made(KINDS[1]),
        {"tokens": None, "text": __file__},
        CorpusError,
        "tokenizer of a saved",
    ),
    (
        lambda: made(KINDS[1]),
        {"tokens": None, "text": "none.txt"},
        CorpusError,
        "none.txt: cannot be",
    ),
    (
        lambda: made(KINDS[1]),
        {"tokens": None, "corpus": "/none"},
        CorpusError,
        "no folder|is not a",
    ),
]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
@pytest.mark.parametrize(("model", "options", "error", "message"), REFUSED)
def test_what_is_refused(model: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        wqk.parts(model(), **{"tokens": TOKENS, **options})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "predicts"),
    [
        ("BertForPreTraining", "masked"),
        ("BertForSequenceClassification", "states"),
        ("ElectraForPreTraining", "states"),
        ("", "causal"),
    ],
)
def test_what_a_model_predicts_and_that_its_whole_loss_is_its_own(name: str, predicts: str) -> None:
    tokens = TOKENS.reshape(50, 8)
    plain = KINDS[0]._replace(name=name)
    model = made(plain, torch.float32) if name else adapted(r=2, init_lora_weights=False)
    model.config.mask_token_id = 3
    measured = wqk.parts(model, tokens=tokens, draws=1, seed=2)
    expected, ids = 0.0, torch.from_numpy(tokens)
    with torch.no_grad():
        if predicts == "masked":
            hidden = choose(np.random.default_rng(2), tokens.shape, 0.15)
            logits = model(ids.masked_fill(torch.from_numpy(hidden), 3)).prediction_logits
            expected = float(torch.nn.functional.cross_entropy(logits[hidden], ids[hidden]))
        elif predicts == "causal":
            expected = float(model(ids, labels=ids).loss)
    assert measured.predicts == predicts
    assert measured.shares["loss"][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_of_scores_that_explain_nothing_the_losses_are_drawn_and_a_reason_is_given() -> None:
    model = adapted(r=2, init_lora_weights=False)
    measured = wqk.parts(model, tokens=TOKENS.reshape(50, 8), draws=1)
    null = pl.lit(None, pl.Float64)
    shares = measured.shares.with_columns(share=null, low=null, high=null)
    nothing = replace(measured, shares=shares)
    assert "the loss is higher by no more than chance between blocks" in " ".join(
        str(nothing).split()
    )
    (axes,) = nothing.plot().axes
    parts_drawn = [label.get_text() for label in axes.get_yticklabels()]
    assert parts_drawn[::-1] == shares["part"].to_list()
    losses_drawn = [line.get_xdata()[0] for line in axes.lines[: len(parts_drawn)]]
    assert losses_drawn[::-1] == shares["loss"].to_list()
    assert "explain no more than chance" in axes.get_xlabel()
    by_layer = shares.with_columns(layer=pl.lit(0)).vstack(shares.with_columns(layer=pl.lit(1)))
    whole_and_layers = shares.vstack(by_layer.with_columns(pl.col("layer").cast(pl.Int64)))
    _, layers = replace(nothing, shares=whole_and_layers).plot().axes
    assert layers.get_ylabel() == "loss (nats)"
    assert len(layers.lines[0].get_xdata()) == 2
    of_scores = pl.lit(0.5)
    explained = replace(measured, shares=shares.with_columns(share=of_scores, low=null, high=null))
    assert "chance between blocks" not in str(explained)


@pytest.mark.filterwarnings("ignore")
def test_a_folder_with_an_adapter_is_refused(tmp_path: Path) -> None:
    made(KINDS[2], torch.float32).save_pretrained(tmp_path / "base")
    model = adapted(r=2, init_lora_weights=False)
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="merge it into its base with PEFT"):
        wqk.parts(tmp_path / "adapter", tokens=TOKENS)
    (tmp_path / "base").rename(tmp_path / "moved")
    opened = wqk.open(tmp_path / "adapter", base=tmp_path / "moved")
    assert "base" not in opened.hub, "transformers has no such option"
    with pytest.raises(CheckpointError, match="merge it into its base with PEFT"):
        wqk.parts(opened, tokens=TOKENS)


def test_a_checkpoint_without_its_other_tensors_is_refused(tmp_path: Path) -> None:
    """Tensors that a file lacks are drawn by transformers; a head and a pooler may be lacking."""
    model = made(KINDS[0], torch.float32)
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({n: t for n, t in tensors.items() if not n.startswith("cls")}, file)
    assert wqk.parts(str(tmp_path), tokens=TOKENS, block=8, blocks=4).predicts == "states"
    save_file({n: t for n, t in tensors.items() if "self" in n}, file)
    with pytest.raises(CheckpointError, match="lacks 25 tensors that the model runs with"):
        wqk.parts(str(tmp_path), tokens=TOKENS, block=8, blocks=4)
    with pytest.raises(CheckpointError, match="with all weights is demo:induction"):
        wqk.parts("demo:encoder", tokens=TOKENS, block=8, blocks=4)


def test_a_tokenizer_without_words_is_refused(tmp_path: Path) -> None:
    """transformers makes one for BERT where a folder has none: every word is then unknown."""
    made(KINDS[0], torch.float32).save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("one fish two fish " * 40)
    with pytest.raises(CorpusError, match="model: has no tokenizer that encodes text"):
        wqk.parts(str(tmp_path / "model"), text=text, block=8, blocks=4)
    made(KINDS[2], torch.float32).save_pretrained(tmp_path / "none")
    with pytest.raises(CorpusError, match="none: has no tokenizer that encodes text"):
        wqk.parts(str(tmp_path / "none"), text=text, block=8, blocks=4)


def test_a_text_is_read_as_a_corpus_is(tmp_path: Path) -> None:
    """Compressed, and as JSON Lines of which only the texts are read."""
    folder = tmp_path / "model"
    made(KINDS[0], torch.float32).save_pretrained(folder)
    text = "one fish two fish " * 40
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[MASK]", *set(text.split())]))
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(folder)
    plain, compressed, rows = (tmp_path / name for name in ("a.txt", "a.txt.gz", "a.jsonl.xz"))
    plain.write_text(text)
    compressed.write_bytes(gzip.compress(text.encode()))
    lines = "".join(json.dumps({"id": 3, "text": half}) + "\n" for half in (text[:360], text[360:]))
    rows.write_bytes(lzma.compress(lines.encode()))
    inside = wqk.open(tmp_path, subfolder="model")  # whose tokenizer lies there, too
    losses = [
        wqk.parts(ref, text=of, block=8, blocks=4).shares["loss"].to_list()
        for ref, of in ((str(folder), plain), (str(folder), compressed), (inside, rows))
    ]
    assert losses[0] == losses[1] == losses[2]
    # The tokenizer knows the mask token, too, where token ids are given.
    assert wqk.parts(str(folder), tokens=TOKENS % 7, block=8, blocks=4).predicts == "masked"
    compressed.write_bytes(b"no gzip at all")
    with pytest.raises(CorpusError, match=r"a\.txt\.gz: cannot be read as text"):
        wqk.parts(str(folder), text=compressed, block=8, blocks=4)
    rows.write_bytes(lzma.compress(b'{"words": "one"}\n'))
    with pytest.raises(CorpusError, match='expected a JSON object with a "text"'):
        wqk.parts(str(folder), text=rows, block=8, blocks=4)


def test_the_loss_stands_next_to_that_of_the_frequencies_of_tokens() -> None:
    tokens = np.tile(np.array([[1, 1, 2, 3]]), (6, 3))
    measured = wqk.parts(made(KINDS[2], torch.float32), tokens=tokens, draws=1)
    shares = np.array([5, 3, 3]) / 11 if measured.predicts == "causal" else np.array([2, 1, 1]) / 4
    entropy = float(-(shares * np.log(shares)).sum())
    assert measured.settings["frequency_loss"] == pytest.approx(entropy)
    printed = " ".join(str(measured).split())
    assert f"have a loss of {entropy:.4f}" in printed
    assert "next head: half of the scores" in printed
    assert "worse than no scores" in printed


def test_a_model_of_attention_alone_is_named_so() -> None:
    """The small model of the package has no MLPs; transformers runs its type with MLPs of zeros."""
    tokens = np.random.default_rng(0).integers(32, size=(4, 12))
    parts = wqk.parts("demo:induction", tokens=np.tile(tokens, 2), draws=1)
    assert "the model was run with attention alone" in " ".join(str(parts).split())
