"""Comparison of a family with a recorded model: forms, scale, positions, masks.

Axes: n windows and heads, I queries, J keys, R head width, T tokens, H heads, G key heads.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import numpy as np
from tools.deriving.judging import (
    MOST_WINDOWS,
    ReadAttention,
    beside,
    content_of,
    head_biases,
    is_learned,
    judge,
    named_alike,
    of_channels,
    owners,
)

from wqk.attention import Block
from wqk.families import Composed, plan_attention
from wqk.families.windows import ChunkWindow, LocalWindow, Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tools.deriving.records import Circuit, Product, RunRecord, Site, VectorSource

    from wqk.checkpoints import Checkpoint
    from wqk.families import AttentionPlan, Family

# Families whose positions are an einsum of queries with a projection, which is not followed.
UNFOLLOWED = {"bros"}

# Share of tokens that have to be turned by rows and columns; the others are no patches.
LEAST_EXPLAINED = 0.8

# A fault that makes no statement of the family wrong.
WEAK = "not said:"
# One that the run cannot tell.
UNSEEN = "not seen"
SAME = 2e-3
ROUNDED = 1e-5  # of a sum of products in single precision
TINY = 1e-6  # relative difference of two numbers of single precision


def faults(record: RunRecord, checkpoint: Checkpoint, family: Family) -> list[str]:
    """List the faults and omissions of a family for a model; empty if the family is proven.

    Raises
    ------
    WqkError
        The family does not fit the saved file.
    """
    plans = plan_attention(checkpoint, family)
    at_once = list(_plain_faults(record, plans, bool(family.model_types)))
    if at_once or not plans:  # mixers without a softmax have proofs of their own
        return at_once
    first = Block(checkpoint, plans[0])
    similar = [site for site in record.sites if named_alike(first, site) and _own(first, site)]
    if similar and not any(map(ReadAttention(first).fits_some, similar)):
        return [f"{plans[0].query.tensor} is read wrongly"]
    attentions = [Block(checkpoint, p) for p in plans]
    judged = judge(record.sites, attentions)
    fault_list = [
        f"{WEAK} {site.module} has learned queries"
        if is_learned(site)
        else f"{WEAK} {site.module} scores channels, not tokens"
        if of_channels(site, record, checkpoint)
        else f"{site.module} is not read"
        for site in (record.sites[n] for n in judged.unmatched_sites)
    ]
    fault_list += [f"{plans[n].query.tensor} is read wrongly" for n in judged.unmatched_plans]
    fault_list += [f"{WEAK} {name} was not run" for name in record.unreached]
    if not all(fault.startswith(WEAK) for fault in fault_list):
        return fault_list
    fault_list += dict.fromkeys(_epsilon_faults(record, plans))
    seen = {site.module for site in record.turned}
    for number, attention in enumerate(attentions):
        for site in judged.matched[number]:
            module = record.sites[site].module
            if module not in seen:  # run by itself, without what the model gives it
                fault_list.append(f"positions and mask of {module} were {UNSEEN}")
                continue
            fault_list += _site_faults(checkpoint, attention, record.sites[site])
            fault_list += _circuit_faults(attention, record.sites[site].circuit)
        if all(fault.startswith(WEAK) for fault in fault_list):
            if plans[number].positional:
                attention = Block(checkpoint, plans[number])
            fault_list += _turned_faults(record.turned, attention, record, judged.matched[number])
    return list(dict.fromkeys(fault_list))


def _own(attention: Block, site: Site) -> bool:
    """Return whether no other tower has tensors of these names."""
    name = attention.plan.query.tensor
    recorded = {s.parameter for product in site.products for s in product.query_sources}
    return any(
        recorded_name and (recorded_name.endswith(name) or name.endswith(recorded_name))
        for recorded_name in recorded
    )


def _plain_faults(record: RunRecord, plans: Sequence[AttentionPlan], alone: bool) -> Iterator[str]:
    """List faults that shapes and masks show before anything is read."""
    if len(plans) > len(record.sites):
        yield f"{len(plans)} attentions are said, {len(record.sites)} were seen"
    widths = {p.queries.shape[-1] for site in record.sites for p in content_of(site)}
    for p in plans:
        if not any(width >= p.query.head_width for width in widths):
            yield f"{p.query.tensor} is read wrongly: no head has width {p.query.head_width}"
    spoken = re.fullmatch(r".*[_-](text|vision|audio)([_-]model)?", record.model_type)
    other_modalities = {"text", "vision", "audio"} - {spoken[1]} if spoken and alone else set()
    for p in plans:
        if p.stack in other_modalities:
            yield f"the stack is {p.stack}, of a part for {spoken[1] if spoken else ''}"
    fully_run = {site.module for site in record.turned}  # run with what the model gives them
    seen_causal = [
        s.causal for s in record.sites if s.reach > 0 and (s.module in fully_run or not fully_run)
    ]
    planned_causal = [p.causal for p in plans if p.kind == "self"]
    if (
        seen_causal
        and planned_causal
        and (
            (all(seen_causal) and not any(planned_causal))
            or (all(planned_causal) and not any(seen_causal))
        )
    ):
        yield f"causal is {seen_causal[0]} everywhere"


def _site_faults(checkpoint: Checkpoint, attention: Block, site: Site) -> Iterator[str]:
    p = attention.plan
    product = next(c for c in content_of(site) if ReadAttention(attention).fits(c))
    tokens = product.queries.shape[1]
    if "tanh" in product.through and not p.softcap:
        yield "scores are capped"
    if site.reach >= 0 and p.kind == "self":
        if site.causal != p.causal and tokens > 1 and site.reach:  # not each token itself alone
            yield f"causal is {site.causal}"
        if site.causal and p.stack in ("encoder", "vision"):
            yield "the stack is no encoder"
        reach = tokens - 1
        if isinstance(p.window, ChunkWindow):
            reach = min(reach, p.window.size - 1)
        elif isinstance(p.window, Span):
            reach = min(reach, max(p.window.back, p.window.ahead))
        # Several pictures in a row, each of which sees itself alone.
        packed = not (p.window or site.causal) and tokens % (site.reach + 1) == 0
        sized = p.rule.window_axes == 1 and not isinstance(p.window, LocalWindow)
        if sized and site.reach != reach and not packed:
            yield f"attention reaches {site.reach}, said {reach}"
    yield from _kind_faults(p, product)
    yield from _use_faults(p, site)
    has_others = beside(site)
    complete = [c for c in content_of(site) if c.queries.shape[0] >= product.queries.shape[0]]
    named = p.position or p.positional or not p.rule.whole_score
    if not (named or all(map(ReadAttention(attention).fits, complete))):
        yield "another product is added to the form's"
    has_terms = p.position or p.sinks or not p.rule.whole_score
    stored = checkpoint.tensors()
    terms = [term for term in product.terms if term in stored or not site.causal]  # or its mask
    if not p.sinks and any("sink" in term for term in product.terms):
        yield "a sink is beside the keys"
    if (terms or has_others) and not has_terms:
        yield f"beside the form: {', '.join(terms[:2]) or 'another product'}"
    shape = attention.query.weight.shape[:2]
    explained = p.rule.note or p.query.norm
    if any(bias.shape == shape for bias in head_biases(product)) and not explained:
        yield "beside the form: a vector of each head that is added to the queries"
    if p.position == "relative" and not (product.terms or has_others or p.family in UNFOLLOWED):
        yield "nothing is added beside the form"
    yield from _input_faults(checkpoint, p, product)
    if (
        not isinstance(p.query.projection, Composed)
        and p.positional is None
        and p.query.temperature is None
    ):
        scale = _scale(attention, product)
        if scale is not None and math.isnan(scale):
            if p.rule.partial:
                return
            yield "tokens have scales of their own, which is not said"
        elif scale is not None and abs(scale / p.score_scale - 1) > SAME:
            yield f"scale is {scale:.6g}, said {p.score_scale:.6g}"


def _kind_faults(p: AttentionPlan, product: Product) -> Iterator[str]:
    """List faults of attentions whose queries and keys come from other tokens than planned."""
    query, key = (
        next((s for s in sources if s.parameter and not (s.depth or "leaf" in s.operations)), None)
        for sources in (product.query_sources, product.key_sources)
    )
    if query is None or key is None or query.given.shape[1] != key.given.shape[1]:
        return
    shorter, longer = sorted((query.given, key.given), key=len)
    unrelated = len(longer) % len(shorter) and not (shorter[:, None] == longer).all(axis=-1).any()
    if p.kind == "self" and unrelated:  # some pool their queries, or their keys
        yield f"{p.query.tensor} attends to other tokens than its own"
    windows = len(product.queries) // p.query.heads  # two pictures, say, that see each other
    if p.kind == "cross" and windows == 1 and np.array_equal(query.given, key.given):
        yield f"{p.query.tensor} attends to its own tokens"


def _use_faults(p: AttentionPlan, site: Site) -> Iterator[str]:
    """List faults in the sides of the products that are added to the form's product."""
    content = content_of(site)
    query = _made_by([c.query_sources for c in content])
    key = _made_by([c.key_sources for c in content])
    further = [c for c in site.products if c not in content and "topk" not in c.through]
    names = _made_by([s for c in further for s in (c.query_sources, c.key_sources)])
    for side, parameters in (("query", query - key), ("key", key - query)):
        if p.position and names & parameters and side not in p.position_uses:
            yield f"what is added to the scores of {p.query.tensor} is made with its {side}"
    if p.position and names & query & key and not p.position_uses:
        yield f"what is added to the scores of {p.query.tensor} is made with it"


def _made_by(sources: Sequence[Sequence[VectorSource]]) -> set[str]:
    """The parameters whose products these are."""
    return {
        s.parameter for source_list in sources for s in source_list if s.parameter and not s.depth
    }


def _circuit_faults(attention: Block, circuit: Circuit | None) -> Iterator[str]:
    """List faults of values and outputs, compared with those of the softmax."""
    p = attention.plan
    if circuit is None or p.rule.partial:
        return
    named = next((s.parameter for s in circuit.sources if s.parameter and not s.depth), "")
    if p.value is None and named and circuit.values.shape[-1] == p.key.head_width:
        yield f"{WEAK} {named} makes the values of {p.query.tensor}"
    if p.output is None and circuit.given.shape[1] == p.query.heads * circuit.values.shape[-1]:
        yield f"{WEAK} {circuit.output} makes the outputs of {p.query.tensor}"
    if p.value is None or p.output is None:
        return
    value, output = (np.asarray(f.weight, np.float64) for f in attention.value_output)
    bias = attention.value_output[0].bias
    expected = [
        s.given @ value.swapaxes(-1, -2) + (0.0 if bias is None else bias[:, None])
        for s in circuit.sources
        if s.given.shape[-1] == value.shape[-1]
    ]
    recorded = circuit.values[:MOST_WINDOWS].astype(np.float64)
    recorded[np.ptp(recorded, axis=-1) == 0] = 0.0  # what fills up windows is one number
    limit = math.inf if p.clip is None else p.clip
    fitting = [v.clip(-limit, limit) for v in expected if v.shape[-1] == recorded.shape[-1]]
    least = 1.0 if p.rule.whole_score else 0.5  # some also have values of another attention
    if named and all(owners(recorded, rows, None, least=least) is None for rows in fitting):
        yield f"{p.value.tensor} does not make the values of {p.query.tensor}"
    if circuit.output and p.output.norm is None:
        inputs, result = (rows - rows[:1] for rows in (circuit.given, circuit.result))
        weight = output.reshape(-1, output.shape[-1])
        has_same_shape = inputs.shape[1] == len(weight) and result.shape[1] == weight.shape[1]
        allowed = SAME * np.abs(result).max() + ROUNDED * np.abs(circuit.result).max(initial=0)
        if not has_same_shape or np.abs(inputs @ weight - result).max() > allowed:
            yield f"{p.output.tensor} does not make the outputs of {p.query.tensor}"


def _input_faults(checkpoint: Checkpoint, p: AttentionPlan, product: Product) -> Iterator[str]:
    """List faults of the norms that feed queries and keys."""
    for side, sources in ((p.query, product.query_sources), (p.key, product.key_sources)):
        ending = side.tensor.split(".")[-3:]
        named = [s for s in sources if s.parameter]
        similar = [s for s in named if s.parameter.split(".")[-3:] == ending]
        recorded = next(iter(similar or named), None)
        norm = side.input_norm
        if recorded is not None and norm is None and recorded.norm and recorded.norm[1]:
            yield f"{WEAK} {recorded.norm[1]} feeds {side.tensor}"
        if recorded is None or norm is None:
            continue
        gain = np.asarray(checkpoint.read([norm.gain[0]])[0], np.float64) + norm.offset
        shift = np.asarray(checkpoint.read([norm.bias[0]])[0]) if norm.bias else 0.0
        if norm_kind(recorded.given / norm.factor, gain, shift) not in (norm.kind, "either"):
            yield f"{norm.gain[0].name} does not feed {side.tensor}, or as no {norm.kind} norm"


def _epsilon_faults(record: RunRecord, plans: Sequence[AttentionPlan]) -> Iterator[str]:
    """List norms whose epsilon differs from the model's."""
    for side in (side for plan in plans for side in (plan.query, plan.key)):
        for norm in (side.norm, side.input_norm, getattr(side.projection, "norm", None)):
            recorded = record.epsilons.get(norm.gain[0].name) if norm and norm.gain else None
            if (
                norm
                and recorded is not None
                and not math.isclose(recorded, norm.epsilon, rel_tol=1e-4)
            ):
                yield f"{norm.gain[0].name} has epsilon {recorded:g}, said {norm.epsilon:g}"


def norm_kind(vectors: np.ndarray, gain: np.ndarray, shift: np.ndarray | float) -> str:
    """Return the norm that gives vectors (T, D) with this gain (D,): rms, layer, both or none."""
    if vectors.shape[-1] != gain.size or not np.all(gain):
        return "either" if vectors.shape[-1] == gain.size else "none"
    normalized = (vectors - shift) / gain
    sizes = np.sqrt((normalized**2).mean(axis=-1))
    # What fills up a window, or follows the text, is zero, before or after the norm.
    usable = (sizes > TINY) & vectors.any(axis=-1)
    if not usable.any():
        return "either"
    if np.abs(sizes[usable] - 1).max() > 0.02:
        return "none"
    return "layer" if np.abs(normalized.mean(axis=-1)[usable]).max() < 1e-3 else "rms"


def _scale(attention: Block, product: Product) -> float | None:
    """The factor of the score, measured: of the recorded product next to what wqk computes."""
    read = ReadAttention(attention, turned=True)
    lengths = [read.length(query, product) for query in (True, False)]
    return None if None in lengths else float(np.prod(lengths) * product.factor)


def _turned_faults(
    turned: Sequence[Site], attention: Block, record: RunRecord, sites: Sequence[int]
) -> Iterator[str]:
    """List faults of the rotation of queries and keys by positions."""
    p = attention.plan
    modules = {record.sites[n].module for n in sites}
    mine = [site for site in turned if site.module in modules]
    if p.axial is not None:
        if mine and "rotary" not in p.position:
            yield "positions are rotary, on axes"
        if mine and not any(
            _turns_by_places(attention, c) for site in mine for c in content_of(site)
        ):
            yield "positions are not rotary like that, on axes"
        return
    if "rotary" in p.position and (p.rotary is None or "axes" not in p.position):
        if any(map(ReadAttention(attention).fits_some, mine)):
            yield "positions are not rotary"
        return
    read = ReadAttention(attention, turned=True)
    if mine and not any(read.fits(product) for site in mine for product in content_of(site)):
        yield "positions are rotary" if p.rotary is None else "positions are not rotary like that"


def _turns_by_places(attention: Block, product: Product) -> bool:
    """Return whether keys are turned by rows and columns, each plane by those of its axis.

    Rows that a file holds interleaved may be halves in the model, which then turns those.
    """
    rotary, (_, head_width, width) = attention.plan.axial, attention.key.weight.shape
    sources = [s.given for s in product.key_sources if s.given.shape[-1] == width]
    if rotary is None or not sources or product.keys.shape[-1] != head_width:
        return False

    def planes(vectors: np.ndarray, pairs: Sequence[np.ndarray]) -> np.ndarray:
        first, second = (vectors[..., dimensions] for dimensions in pairs)
        return (first + 1j * second).reshape(-1, first.shape[-1])

    key_planes = planes(np.asarray(attention.keys(sources[0].astype(np.float64))), rotary.planes)
    rule = attention.plan.rule.rotary
    positions = np.arange(100.0)
    if rule is not None and rule.in_turns:
        centres = {(2 * k + 1) / n - 1 for n in range(1, 33) for k in range(n)}
        positions = np.asarray([0.0, *sorted(centres - {0.0})])
    by = np.exp(1j * positions[:, None] * rotary.frequencies)
    axes = [rotary.plane_axes == axis for axis in range(rotary.axes)]
    for pairs in (rotary.planes, np.arange(head_width).reshape(2, -1)):
        turned = planes(product.keys.astype(np.float64), pairs)
        turned = turned[:: max(1, len(turned) // 40)]
        distances = np.abs(np.abs(turned)[:, None] - np.abs(key_planes)).max(
            -1
        )  # which no turn changes
        turns = turned / key_planes[distances.argmin(1)]
        distances = np.abs(turns[:, None] - by)
        off = np.stack([distances[..., axis].max(-1) for axis in axes], axis=-1)
        explained = (off.min(1) < 0.01).all(-1)
        if explained.mean() > LEAST_EXPLAINED and (off.argmin(1)[explained] > 0).any():
            return True
    return False
