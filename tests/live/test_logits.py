"""Measured logits are those of the model's own attention, and measuring them changes nothing."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from tests.families.architectures import ALL, FURTHER, NAMED, Architecture
from tests.limits import failing
from tests.live.models import bert, gpt2, llama, train_step
from tests.live.softmaxes import difference, measured, own_logits, trainable
from tests.live.test_contract import derived
from tools.deriving.feeding import adapted, model_feeds
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.llama.modeling_llama import eager_attention_forward

import wqk
from wqk.errors import CheckpointError
from wqk.families import Place
from wqk.live import calls
from wqk.live import logits as measuring
from wqk.live.calls import ObservedCall
from wqk.live.logits import LogitMeter
from wqk.live.running import double_precision
from wqk.live.scoring import logit_summary
from wqk.live.statistics import HeadStatistics
from wqk.tables.score_table import ScoreTable

# Fused, grouped, latent, normalized, windowed, capped, with sinks, linear biases, cross-attention.
FEW = (
    "bert",
    "gpt2",
    "llama-yarn",
    "gemma2",
    "qwen3",
    "olmo2",
    "deepseek-v3",
    "gpt-oss",
    "bloom",
    "t5",
    "mpnet",
    "umt5",
    "wavlm",
    "modernbert",
    "albert-groups",
    "swin",
)


# Types whose modules take masks that mean something else, or make blocks of their tokens,
# and further settings.
OWN: dict[str, dict[str, Any]] = {
    "fsmt": {},
    "canine": {},
    "granite_speech_encoder": {"context_size": 4, "max_pos_emb": 8},
    "granite_speech5_encoder": {},
    "hunyuan_vl_vision": {},
    "funnel": {},
    "mpt": {},
    "vitdet": {},
    "mask2former": {},
    "blt_global_transformer": {},
}


# Towers whose patches have rotary positions of rows and columns.
TOWERS = ("qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision", "dinov3_vit", "sam3_vit_model")


def prove(model: Any, inputs: dict[str, Any] | None = None) -> None:
    """Compare all measures of all blocks, in float64, with those of the model's own softmax."""
    meter, logits, seen = measured(model, inputs=inputs)
    assert not logits.missing
    for plan in meter.plans:
        place = plan.place
        if not seen[place]:  # its part of the model does not run, or is not looked at
            continue
        if plan.query.temperature:  # the model's own scores are not to be had without its bias
            continue
        assert difference(logits.blocks[place], own_logits(plan, seen[place])) < 1e-9, place


@pytest.mark.parametrize("name", FEW)
def test_measured_logits_are_those_of_the_model_s_own_softmax(name: str) -> None:
    prove(trainable(NAMED[name]))


@pytest.mark.parametrize("model_type", OWN)
def test_they_are_where_masks_or_blocks_of_tokens_are_a_module_s_own(model_type: str) -> None:
    model = derived(model_type, OWN[model_type])
    prove(model, inputs=fed(model))


@pytest.mark.parametrize("model_type", TOWERS)
def test_they_are_in_towers_with_positions_on_two_axes(model_type: str) -> None:
    model = derived(model_type, {})
    prove(model, inputs=fed(model))


def fed(model: Any) -> dict[str, Any]:
    """Inputs that a type's tiny model accepts; the last text is shorter."""
    with torch.no_grad(), double_precision():
        for feed_of_type in model_feeds(model):
            feed: dict[str, Any] | None = feed_of_type
            while feed:
                if "input_ids" in feed:
                    shorter = torch.arange(feed["input_ids"].shape[1]) < 8
                    feed["attention_mask"] = torch.stack([shorter | True, shorter]).long()
                try:
                    model(**feed)
                    return feed
                except Exception as error:  # each model's code has its own
                    feed = adapted(feed, str(error))
    raise AssertionError("it did not run")


@pytest.mark.campaign
@pytest.mark.parametrize("architecture", ALL, ids=lambda architecture: architecture.name)
def test_they_are_in_every_architecture(architecture: Architecture) -> None:
    prove(trainable(architecture))


def one_pass(model: Any, meter: LogitMeter, tokens: Any = None) -> Any:
    tokens = torch.arange(16).reshape(2, 8) if tokens is None else tokens
    meter.start()
    model(tokens)
    return meter.logits


def as_arrays(logits: Any) -> np.ndarray:
    return np.stack([np.stack(block) for block in logits.blocks.values()])


def test_dropout_that_is_on_is_said() -> None:
    network = gpt2()
    batch = torch.arange(12)[None]
    assert not wqk.logits(network.eval(), batch).has_dropout
    assert "dropout" not in str(wqk.logits(network, batch))
    measured = wqk.logits(network.train(), batch)
    assert measured.has_dropout
    assert measured.largest != wqk.logits(network, batch).largest
    assert "another pass has other logits; model.eval() switches it off" in " ".join(
        str(measured).split()
    )
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert not wqk.logits(network, batch).has_dropout


def test_tiles_and_kernels_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama().double().train()
    meter = LogitMeter(model)
    measures = []
    for kernel, tile in (("eager", 2**19), ("sdpa", 2**19), ("eager", 40), ("sdpa", 40)):
        model.set_attn_implementation(kernel)
        monkeypatch.setattr(calls, "CACHED_TILE", tile)
        measures.append(as_arrays(one_pass(model, meter)))
    # Eager attention computes its softmax in float32, and so the second layer's inputs.
    np.testing.assert_allclose(measures[1], measures[0], rtol=1e-6)
    np.testing.assert_allclose(measures[2], measures[0], rtol=1e-12)
    np.testing.assert_allclose(measures[3], measures[1], rtol=1e-12)


def test_products_are_whole_where_training_rounds_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    backends, precisions, add = torch.backends, [], HeadStatistics.add

    def said() -> tuple[str, str]:
        return backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision

    def noted(*arguments: Any) -> None:
        precisions.append(said())
        add(*arguments)

    monkeypatch.setattr(HeadStatistics, "add", noted)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        model = llama().train()
        one_pass(model, LogitMeter(model))
        assert said() == ("tf32", "bf16")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(precisions) == {("ieee", "ieee")}


def test_a_small_spread_of_large_logits_loses_no_digits() -> None:
    scores = 500 + torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)) / 100
    statistics = HeadStatistics(3, "cpu")
    for part in scores.split(1):
        statistics.add(ObservedCall(operation="", scores=part, weights=part.softmax(-1)))
    expected = scores.double().std((0, 2, 3), correction=0).numpy()
    np.testing.assert_allclose(statistics.result().logit_std, expected, rtol=1e-6)


def test_the_first_sequences_are_measured() -> None:
    model = llama().double().train()
    tokens = torch.randint(20, (3, 8), generator=torch.Generator().manual_seed(0))
    of_two_sequences = as_arrays(one_pass(model, LogitMeter(model, sequences=2), tokens))
    np.testing.assert_allclose(
        of_two_sequences, as_arrays(one_pass(model, LogitMeter(model), tokens[:2]))
    )
    several = LogitMeter(model, training=False, passes=None)
    several.start(), model(tokens[:1]), model(tokens[1:2])
    np.testing.assert_allclose(as_arrays(several.logits), of_two_sequences)


def test_padding_does_not_count() -> None:
    """Padding of the sequence that is read; a reading sequence of equal length has no padding."""
    tokens = torch.randint(20, (1, 11), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(11) < 8)[None].long()
    cases = (llama().double(), {}), (trainable(NAMED["bart"]), {"decoder_input_ids": tokens})
    for model, further_inputs in cases:
        alone = wqk.logits(model, {"input_ids": tokens[:, :8], **further_inputs})
        padded = wqk.logits(model, {"input_ids": tokens, "attention_mask": mask, **further_inputs})
        assert_frame_equal(padded.frame, alone.frame)


@pytest.mark.parametrize("of_another", [True, False])
def test_every_query_counts_that_reads_another_sequence_as_long(of_another: bool) -> None:
    """PyTorch's attention has no mask of queries; own padding is skipped."""
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True).double()
    x, y = torch.randn(2, 2, 8, 16, generator=torch.Generator().manual_seed(0)).double() * 3
    y = y if of_another else x
    inputs = {
        "query": x,
        "key": y,
        "value": y,
        "key_padding_mask": torch.arange(16).view(2, 8) > 12,
    }
    top_shares = module(**inputs, average_attn_weights=False)[1].detach().amax(-1)
    (block,) = wqk.logits(module, inputs).blocks.values()
    counted = ~inputs["key_padding_mask"] | of_another
    np.testing.assert_allclose(
        block.attention_top_share, top_shares.swapaxes(1, 2)[counted].mean(0)
    )


ADDED = torch.tensor([[0.0, -0.5, 0, 0, 0, -1e4, -1e4, -1e4]])


@pytest.mark.parametrize(
    "mask",
    [ADDED, ADDED[0] * torch.ones(8, 1), ADDED[0].expand(1, 1, 8, 8), ADDED.expand(4, 8, 8)],
    ids=["keys", "pairs", "four axes", "heads"],
)
def test_a_mask_of_any_form_is_observed(mask: torch.Tensor) -> None:
    model = bert()
    model.set_attn_implementation("eager")
    meter = LogitMeter(model)
    meter.start()
    x = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))
    _, attention = model.train().encoder.layer[0].attention.self(5 * x, attention_mask=mask)
    (block,) = meter.logits.blocks.values()
    top = attention[..., :5, :].detach().amax(-1).mean((0, 2))
    np.testing.assert_allclose(block.attention_top_share, top, rtol=1e-5)


def test_what_a_call_shows_or_hides_is_seen_in_its_mask_and_cache() -> None:
    model, tokens = llama(), torch.arange(16).reshape(2, 8)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        step = {"input_ids": tokens[:, :1], "past_key_values": model(tokens).past_key_values}
    attentions = model(**copy.deepcopy(step), output_attentions=True).attentions
    measures = as_arrays(wqk.logits(model, step))
    top = torch.stack(attentions).amax(-1).mean((1, 3)).detach()
    np.testing.assert_allclose(measures[:, 3], top, rtol=1e-5)
    unmasked = {"input_ids": tokens, "attention_mask": torch.zeros(2, 1, 8, 8)}  # later tokens, too
    not_causal = wqk.logits(model, {"input_ids": tokens, "is_causal": False}).frame
    causal = wqk.logits(model, {"input_ids": tokens}).frame
    model.set_attn_implementation("sdpa")
    not_causal = wqk.logits(model, {"input_ids": tokens, "is_causal": False}).frame
    assert_frame_equal(not_causal, wqk.logits(model, unmasked).frame)
    assert not not_causal.equals(causal)


def test_several_texts_in_a_row_do_not_see_each_other() -> None:
    model = llama().double().train()
    tokens = torch.randint(20, (2, 8), generator=torch.Generator().manual_seed(0))
    separate = as_arrays(wqk.logits(model, tokens))
    packed = {"input_ids": tokens.reshape(1, 16), "position_ids": torch.arange(16)[None] % 8}
    packed |= {"use_cache": False}
    expected = separate[:, :5]  # which of the tokens is first differs
    np.testing.assert_allclose(as_arrays(wqk.logits(model, packed))[:, :5], expected)

    def flash(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        """As kernels that read texts by their positions."""
        assert mask is None
        text = (options["position_ids"] == 0).cumsum(1)[0]
        mask_of_texts = (text[:, None] == text).tril().log().to(query)
        return eager_attention_forward(module, query, key, value, mask_of_texts, **options)

    AttentionInterface.register("flash", flash)
    AttentionMaskInterface.register("flash", lambda *_, **__: None)
    model.config._attn_implementation_internal = "flash"
    np.testing.assert_allclose(as_arrays(wqk.logits(model, packed))[:, :5], expected)


def test_positions_that_begin_again_hide_nothing_where_no_mask_does() -> None:
    model, tokens = bert().double(), torch.arange(16)[None]
    model.set_attn_implementation("eager")
    prove(model, inputs={"input_ids": tokens, "position_ids": tokens % 8})


def test_linear_biases_count_the_tokens_that_a_mask_shows() -> None:
    model, tokens = trainable(NAMED["bloom"]), torch.arange(8).repeat(2, 1)
    shown = torch.ones(2, 8).long()
    shown[1, 3:5] = 0
    prove(model, inputs={"input_ids": tokens, "attention_mask": shown, "use_cache": False})


def test_scores_of_positions_and_of_texts_before_are_measured() -> None:
    model = derived("xlnet", {"d_model": 32, "n_head": 4, "d_head": 8})
    prove(model, fed(model))


def test_each_of_two_products_that_are_added_is_a_logit() -> None:
    """LiLT adds the products of a text and of its layout, for either softmax."""
    model = derived("lilt")
    with double_precision():
        logits = wqk.logits(model, fed(model))
    assert not logits.missing
    assert not logits.scores
    of_text, of_layout = (logits.blocks[Place(stack, "self", 0)] for stack in ("text", "layout"))
    assert not np.allclose(of_text.max_logit, of_layout.max_logit)


def test_a_module_that_layers_share_is_measured_in_all_its_runs() -> None:
    model, tokens = bert().double().train(), torch.arange(16).reshape(2, 8)
    model.encoder.layer[1] = copy.deepcopy(model.encoder.layer[0])
    separate = as_arrays(one_pass(model, LogitMeter(model), tokens))[:, :1]
    model.encoder.layer[1] = model.encoder.layer[0]
    shared = as_arrays(one_pass(model, LogitMeter(model), tokens))
    np.testing.assert_allclose(shared[:, 0], [separate.max((0, 1))] * 2)
    np.testing.assert_allclose(shared, as_arrays(wqk.logits(model, tokens)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_repeated_passes_of_checkpointing_count_once(reentrant: bool) -> None:
    plain, repeated = llama().train(), llama().train()
    repeated.activation_checkpointing_enable({"use_reentrant": reentrant})
    repeated.enable_input_require_grads()
    measures = []
    for model in (plain, repeated):
        meter = LogitMeter(model)
        meter.start()
        model(torch.arange(16).reshape(2, 8)).last_hidden_state.sum().backward()
        measures.append(as_arrays(meter.logits))
        assert not meter.is_measuring
    np.testing.assert_allclose(measures[1], measures[0])


def test_passes_in_evaluation_mode_do_not_count() -> None:
    model = bert()
    meter = LogitMeter(model)
    meter.start()
    model.eval()(torch.arange(8)[None])
    assert not meter.has_measured
    model.train()(torch.arange(8)[None])
    assert meter.has_measured


@pytest.mark.parametrize("make", [bert, gpt2, llama])
def test_a_measured_pass_trains_as_any_other(make: Any) -> None:
    models = [make().train() for _ in range(2)]
    for number, model in enumerate(models):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        meter = LogitMeter(model)
        for step in range(2):
            if number:
                meter.start()
            torch.manual_seed(step)
            train_step(model, optimizer, step)
    for parameter, measured_parameter in zip(
        *(model.parameters() for model in models), strict=True
    ):
        assert torch.equal(parameter, measured_parameter)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of PyTorch's compiler
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_models_are_measured(whole: bool) -> None:
    model = llama().train()
    tokens = torch.arange(16).reshape(2, 8)
    expected = as_arrays(one_pass(model, LogitMeter(model), tokens))
    if whole:
        run = torch.compile(model, backend="eager")
    else:
        run = model
        for layer in model.layers:
            layer.compile(backend="eager")
    run(tokens)  # compiled without hooks
    for measured_model in (model, run):
        meter = LogitMeter(measured_model)
        meter.start()
        run(tokens)
        assert not meter.is_measuring
        np.testing.assert_allclose(as_arrays(meter.logits), expected, rtol=1e-5)


def hooks_of(model: Any) -> int:
    """Number of hooks in a model's modules."""
    modules = model.modules()
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)


def test_hooks_go_with_the_meter_and_the_model_with_its_last_user() -> None:
    model = bert().train()
    meter = LogitMeter(model)
    meter.start()
    assert hooks_of(model) == 2 * len([*model.modules()])
    model.encoder.layer[0](torch.ones(1, 4, 32))  # only a part of the model
    assert meter.is_measuring
    meter.stop()
    assert hooks_of(model) == 0
    meter.start()
    del meter
    gc.collect()
    assert hooks_of(model) == 0
    meter = LogitMeter(model)
    meter.start()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_model_is_copied_averaged_and_saved_while_it_is_measured(tmp_path: Path) -> None:
    model = bert().train()
    meter = LogitMeter(model)
    meter.start()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    tokens = torch.arange(16).reshape(2, 8)
    for duplicate in (copy.deepcopy(model), averaged.module):
        with torch.no_grad():
            duplicate.encoder.layer[0].attention.self.query.weight.mul_(100)
        duplicate.train()(tokens)
        assert not meter.has_measured  # by a copy's pass
    averaged.update_parameters(model)
    torch.save(model, tmp_path / "model.pt")
    assert b"wqk" not in (tmp_path / "model.pt").read_bytes()
    torch.load(tmp_path / "model.pt", weights_only=False)(tokens)
    assert not meter.has_measured
    model(tokens)
    np.testing.assert_array_equal(as_arrays(meter.logits), as_arrays(one_pass(model, meter)))


@pytest.mark.parametrize("make", [bert, gpt2, llama])
def test_models_in_bf16_are_measured_as_their_rounding_allows(make: Any) -> None:
    """Against the same weights in float64: within 1 % of a block's largest value, of each measure.

    bf16 numbers next to 1 are 0.4 % apart; seen were differences of up to 0.54 %.
    """
    half = make().to(torch.bfloat16).train()
    exact = make().double().train()
    exact.set_attn_implementation("eager")
    for rounded, parameter in zip(half.parameters(), exact.parameters(), strict=True):
        if rounded.ndim == 2:  # so that logits are far from zero, as in trained models
            rounded.data.mul_(8)
        parameter.data.copy_(rounded.data)
    for module in (*half.modules(), *exact.modules()):
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    tokens = torch.arange(16).reshape(2, 8)
    measures, expected = (
        as_arrays(one_pass(model, LogitMeter(model), tokens)) for model in (half, exact)
    )
    scale = np.abs(expected).max(axis=-1, keepdims=True)
    assert (np.abs(measures - expected) < 0.01 * scale).all()
    assert (measures != expected).any()


def test_no_sequences_are_refused() -> None:
    with pytest.raises(CheckpointError, match="sequences must be 1 or more"):
        LogitMeter(bert(), sequences=0)


def test_a_monitor_completes_its_rows(tmp_path: Path) -> None:
    model = llama().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = wqk.Monitor(model, tmp_path / "run" / "scores.jsonl", every=2, logits=True)
    logged: list[dict[str, float]] = []
    expected = {}
    for step in range(4):
        logged.append(monitor(step))
        if step % 2 == 0:
            tokens = torch.randint(20, (2, 8), generator=torch.Generator().manual_seed(step))
            expected[step] = one_pass(model, LogitMeter(model), tokens)
        else:  # the latest table has the logits of the pass that followed its look
            assert monitor.latest is not None
            assert monitor.latest.frame.drop_nulls("head")["max_logit"].is_finite().all()
        train_step(model, optimizer, step)
    monitor.look(4)
    assert {"wqk/max_logit", "wqk/attention_entropy_median"} <= set(logged[1])
    frame = monitor.table.frame
    for step, logits in expected.items():
        for (stack, kind, layer), block in logits.blocks.items():
            rows = frame.filter(step=step, stack=stack, kind=kind, layer=layer)
            heads = rows.drop_nulls("head").sort("head")
            for name in measuring.COLUMNS:
                np.testing.assert_allclose(heads[name], getattr(block, name), rtol=1e-6)
            assert rows.filter(pl.col("head").is_null())["max_logit"].item() == pytest.approx(
                max(block.max_logit)
            )
    assert frame.filter(step=4)["max_logit"].is_null().all()
    assert logged[1]["wqk/max_logit"] == pytest.approx(expected[0].largest)
    assert monitor.take_logits() is not None
    assert monitor.take_logits() is None
    with_logits = monitor.table.frame.drop(measuring.COLUMNS)
    plain = wqk.Monitor(llama(), tmp_path / "plain" / "scores.jsonl")
    plain(0)
    assert plain.table.frame.drop("checkpoint").equals(
        with_logits.filter(step=0).drop("checkpoint")
    )


def test_a_monitor_records_activations_that_are_not_numbers_and_goes_on(tmp_path: Path) -> None:
    model = bert().train()
    monitor = wqk.Monitor(model, tmp_path / "run" / "scores.jsonl", every=1, logits=True)
    monitor(0)
    model(inputs_embeds=torch.full((1, 4, 32), math.nan))
    monitor(1)
    train_step(model, torch.optim.SGD(model.parameters(), lr=1e-3), 1)
    monitor(2)
    rows = monitor.table.frame.filter(pl.col("head").is_not_null())
    broken, sound = (rows.filter(step=step) for step in (0, 1))
    assert broken["max_logit"].is_nan().all()
    assert set(broken["status"]) == {"non-finite"}
    assert broken["symmetry"].is_finite().all()  # the weights are as they were
    assert sound["max_logit"].is_finite().all()
    assert "non-finite" not in set(sound["status"])


def test_hooks_go_with_a_monitor_and_a_failed_pass_does_not_count(tmp_path: Path) -> None:
    model = llama().train()
    monitor = wqk.Monitor(model, tmp_path / "run" / "scores.jsonl", every=1, logits=True)
    monitor(0)
    assert hooks_of(model) > 0
    hook = model.layers[1].register_forward_pre_hook(failing(RuntimeError("out of memory")))
    tokens = torch.arange(16).reshape(2, 8)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(tokens)
    hook.remove()
    assert torch.backends.mha.get_fastpath_enabled()
    model(tokens)  # the same step, tried again
    assert hooks_of(model) == 0
    monitor(1)
    assert hooks_of(model) > 0
    del monitor
    assert hooks_of(model) == 0


@pytest.mark.parametrize(
    ("name", "after"),
    [("llama-yarn", "layers.1.self_attn.v_proj"), ("gemma3n-text", "layers.1.self_attn.o_proj")],
)
def test_nothing_of_a_pass_that_failed_within_an_attention_is_measured(
    name: str, after: str
) -> None:
    """Nor keys that later layers share."""
    model = trainable({**NAMED, **FURTHER}[name])
    tokens = torch.randint(3, 20, (2, 2, 8), generator=torch.Generator().manual_seed(0))
    measures = []
    for fails in (False, True):
        meter = LogitMeter(model)
        meter.start()
        if fails:
            hook = model.get_submodule(after).register_forward_hook(failing(RuntimeError("odd")))
            with pytest.raises(RuntimeError, match="odd"):
                model(tokens[0])
            hook.remove()
        model(tokens[1])
        measures.append(as_arrays(meter.logits)[-1])  # which had not run
    np.testing.assert_array_equal(*measures)


def test_layers_of_two_stacks_are_logged_apart() -> None:
    unset_names = ("attention_entropy", "attention_top_share", "extreme_logit", "first_token_share")
    unset = dict.fromkeys(unset_names)
    rows = [
        {"stack": stack, "layer": 0, "max_logit": value, "logit_std": value / 2} | unset
        for stack, value in (("encoder", 1.0), ("decoder", 3.0))
    ]
    summary = logit_summary(ScoreTable.from_rows(rows), layers=True)
    assert summary == {
        "max_logit": 3.0,
        "encoder/logit_std_median": 0.5,
        "encoder/layer_00/max_logit": 1.0,
        "encoder/layer_00/logit_std": 0.5,
        "decoder/logit_std_median": 1.5,
        "decoder/layer_00/max_logit": 3.0,
        "decoder/layer_00/logit_std": 1.5,
    }
