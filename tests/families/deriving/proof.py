"""Whether a family says everything right about a recorded model: forms, scale, positions, masks.

Axes: n windows and heads, I queries, J keys, R head width, T tokens, H heads, G key heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.families.deriving.judging import Read, content_of, judge
from wqk.attention import load_attention
from wqk.families import Composed, plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.families.deriving.records import Record, Site

    from wqk.attention import Attention
    from wqk.checkpoints import Checkpoint
    from wqk.families import AttentionPlan, Family

SAME = 2e-3  # relative difference of two numbers of single precision


def faults(record: Record, checkpoint: Checkpoint, family: Family) -> list[str]:
    """What a family says wrongly, or leaves out, about a model; empty where it is proven.

    Raises
    ------
    WqkError
        The family does not fit the saved file.
    """
    plans = plan(checkpoint, family)
    attentions = [load_attention(checkpoint, p) for p in plans]
    judged = judge(record.sites, attentions)
    found = [f"{record.sites[n].module} is not read" for n in judged.unmatched_sites]
    found += [f"{plans[n].query.tensor} is read wrongly" for n in judged.unmatched_plans]
    if found:
        return found
    for number, attention in enumerate(attentions):
        for site in judged.matched[number]:
            found += _site_faults(checkpoint, attention, record.sites[site])
        if not found:
            found += _turned_faults(record.turned, attention, record, judged.matched[number])
    return list(dict.fromkeys(found))


def _site_faults(checkpoint: Checkpoint, attention: Attention, site: Site) -> Iterator[str]:
    p = attention.plan
    product = next(c for c in content_of(site) if Read(attention).fits(c))
    tokens = product.queries.shape[1]
    if "tanh" in product.through and not p.softcap:
        yield "scores are capped"
    if site.reach >= 0 and p.rule.kind == "self":
        if site.causal != p.causal and tokens > 1:
            yield f"causal is {site.causal}"
        reach = tokens - 1
        if p.window and p.window.isdigit():
            size = int(p.window)
            reach = min(reach, size - 1 if p.causal else size // 2)
        if p.rule.window_axes == 1 and p.window != "local" and site.reach != reach:
            yield f"attention reaches {site.reach}, said {reach}"
    others = len(site.products) > len(content_of(site))
    if (product.terms or others) and not (p.position or p.sinks):
        yield f"beside the form: {', '.join(product.terms[:2]) or 'another product'}"
    if not isinstance(p.query, Composed) and p.positional is None and p.temperature is None:
        scale = _scale(checkpoint, attention, product)
        if scale is not None and abs(scale / p.scale - 1) > SAME:
            yield f"scale is {scale:.6g}, said {p.scale:.6g}"


def _scale(checkpoint: Checkpoint, attention: Attention, product: Any) -> float | None:
    """The factor of the score, measured: of the recorded product beside the read vectors."""
    read = Read(attention)
    factors = []
    for side, rows, sources in (
        ("query", product.queries, product.query_sources),
        ("key", product.keys, product.key_sources),
    ):
        lengths = read.lengths(side, rows, sources, _gains(checkpoint, attention, side))
        if lengths is None:
            return None
        factors.append(lengths)
    return float(factors[0] * factors[1] * product.factor)


def _gains(checkpoint: Checkpoint, attention: Attention, side: str) -> np.ndarray | None:
    """Gains of the norm between projection and score; ones without gains, None without norm."""
    p = attention.plan
    parts = getattr(p, f"{side}_norm")
    if parts:
        values = [np.asarray(a, np.float64).reshape(-1) for a in checkpoint.read(list(parts))]
        return np.concatenate(values) + p.rule.norm_offset
    return None if p.rule.norm_gain else np.ones(1)


def _turned_faults(
    turned: Sequence[Site], attention: Attention, record: Record, sites: Sequence[int]
) -> Iterator[str]:
    """Whether positions turn queries and keys as the plan says."""
    p = attention.plan
    if p.positional is not None or "rotary" in p.position:
        return
    modules = {record.sites[n].module for n in sites}
    mine = [site for site in turned if site.module in modules]
    read = Read(attention, p.rotary)
    if mine and not any(read.fits(product) for site in mine for product in content_of(site)):
        yield "positions are rotary" if p.rotary is None else "positions are not rotary like that"
