"""Sentences about the outcome of a comparison, made from its records.

Only this file joins counts, causes and places into sentences. Reasons of single causes are made
with the causes, in `wqk.sameness.mismatches` and next to the finders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from wqk._console import counted, farthest, few, rounded_up
from wqk.sameness.comparisons import BlockComparison, Cause, Comparison, LoneBlocks
from wqk.sameness.mismatches import Kind
from wqk.sameness.places_in_words import layers_in_words, places_in_words
from wqk.sameness.verdicts import Verdict

# Kinds with a printed reason even without a known repair.
NAMED_WITHOUT_REPAIR = (
    Kind.SETTING,
    Kind.ROTARY,
    Kind.LAYER,
    Kind.QUANTIZED,
    Kind.BLOCK_SCALES,
)
# Number of listed settings.
MOST_SETTINGS = 3
# Place of towers that a GGUF file lacks.
MMPROJ = " (llama.cpp keeps towers in a file of their own, mmproj)"


def outcome(comparison: Comparison, *, with_causes: bool = True) -> str:
    """Return the outcome of a comparison in one sentence.

    Without ``with_causes``, blocks that differ are only counted; the printed lines list their
    causes.
    """
    if comparison.verdict is Verdict.DIFFERENT:
        return _differences(comparison, with_causes)
    if comparison.verdict is Verdict.NOT_DECIDED:
        return _doubts(comparison)
    return _sameness(comparison)


def _differences(comparison: Comparison, with_causes: bool) -> str:
    parts = [_different_blocks(comparison, with_causes)]
    parts += [_lone_blocks(blocks) for blocks in comparison.alone]
    parts += [_different_tensors(comparison), _different_settings(comparison)]
    differences = "; ".join(part for part in parts if part)
    beyond = ", beyond what quantization explains" if comparison.quantized else ""
    compared = _compared(comparison)
    equal = f" Equal: {compared}." if compared else ""
    return f"Not the same{beyond}: {differences}.{equal}{_moved_most(comparison)}"


def _doubts(comparison: Comparison) -> str:
    reasons = [
        f"{reason} ({places_in_words(places)})" for reason, places in comparison.undecided.items()
    ]
    compared = _compared(comparison)
    equal = f" Equal as far as compared: {compared}." if compared else ""
    return f"Not decided: {'; '.join(reasons)}.{equal}"


def _sameness(comparison: Comparison) -> str:
    attention = "attention" if comparison.blocks else "mixers of tokens"
    subject = f"The same {attention}"
    if comparison.unknown:
        subject += ", as far as it was compared"
    is_whole = not (comparison.not_compared or comparison.settings_not_compared)
    if is_whole and not comparison.unknown:
        subject = "The same model"
    if comparison.quantized:
        subject += f" but for quantization ({', '.join(comparison.quantized)})"
    sameness = f"{subject}: {_compared(comparison)}."
    if not comparison.blocks:
        return sameness
    return f"{sameness} {_largest_distance(comparison)}{_moved_most(comparison)}"


def _largest_distance(comparison: Comparison) -> str:
    """Return a sentence on the largest distance of a head, and the distance that is allowed."""
    largest = max(block.farthest for block in comparison.blocks)
    allowed = max(block.tolerance for block in comparison.blocks)
    explanation = "that the rounding of the stored numbers explains"
    if comparison.accepted:
        allowed = max(allowed, comparison.accepted)
        explanation = "that --tolerance accepts"
    return (
        f"Heads lie at most {largest:.1e} apart, relative to their norm, within the {allowed:.1e} "
        f"{explanation}."
    )


def _different_blocks(comparison: Comparison, with_causes: bool) -> str:
    """Return the number of differing blocks, with causes and distances; else empty."""
    differing = comparison.different_blocks
    if not differing:
        return ""
    count = f"{len(differing)} of {len(comparison.blocks)} blocks differ"
    distance = _range_of_distances(differing) + _accepting_tolerance(comparison)
    if differ_in_settings_alone(differing):
        count += ", in the configuration alone"
    if not with_causes:
        return f"{count}{distance}"
    causes = [_name_of_cause(cause) for cause in comparison.causes if cause.places]
    return f"{count}: {'; '.join(dict.fromkeys(causes))}{distance}"


def _range_of_distances(blocks: Sequence[BlockComparison]) -> str:
    """Return the relative distances of blocks in brackets; empty if rounding explains all."""
    distances = [block.farthest for block in blocks if block.farthest > block.tolerance]
    if not distances:
        return ""
    low, high = min(distances), max(distances)
    largest = rounded_up(high)
    spread = f"up to {largest}" if high <= 2 * low else f"{low:.2g} to {largest}"
    is_unexplained = all(mismatch.unexplained for block in blocks for mismatch in block.mismatches)
    if is_unexplained and len(distances) > 1:
        place = max(blocks, key=lambda block: block.farthest).place
        is_one_stack = len({(block.stack, block.kind) for block in blocks}) == 1
        where = layers_in_words({place.layer}) if is_one_stack else places_in_words([place])
        spread += f", largest in {where}"
    return f" (relative distance {spread})"


def _accepting_tolerance(comparison: Comparison) -> str:
    """Return the tolerance that accepts the candidate, if all that differs is close; else empty."""
    differing = comparison.different_blocks
    is_close = all(mismatch.is_close for block in differing for mismatch in block.mismatches)
    elsewhere = (*comparison.alone, *comparison.settings, *comparison.tensor_causes)
    distances = [block.farthest for block in differing]
    distances += [tensor.distance for tensor in comparison.differing]
    if not is_close or elsewhere or not all(map(math.isfinite, distances)):
        return ""
    return f", which --tolerance {rounded_up(max(distances))} accepts"


def differ_in_settings_alone(blocks: Sequence[BlockComparison]) -> bool:
    """Return whether blocks have equal weights, and differ in settings of the configuration."""
    return all(
        block.farthest <= block.tolerance
        and not block.unequal
        and all(mismatch.verdict is Kind.SETTING for mismatch in block.mismatches)
        for block in blocks
    )


def _name_of_cause(cause: Cause) -> str:
    """Return the reason of a cause of blocks; the kind if the reason is only a distance."""
    mismatch = cause.mismatch
    is_named = mismatch.steps or mismatch.verdict in NAMED_WITHOUT_REPAIR
    return mismatch.reason if is_named else str(mismatch.verdict)


def _lone_blocks(blocks: LoneBlocks) -> str:
    """Return the number of blocks that exist in only one model."""
    text = f"{counted(len(blocks.places), 'block')} only in {blocks.model}"
    is_tower = blocks.places[0].stack.startswith(("vision", "audio"))
    if is_tower and blocks.lacking.endswith(".gguf"):
        return text + MMPROJ
    return text


def _different_tensors(comparison: Comparison) -> str:
    """Return the number of differing tensors outside the forms, with causes; else empty."""
    texts = [f"{cause.mismatch.reason}, {cause.where}" for cause in comparison.tensor_causes]
    if comparison.unexplained:
        texts.append(few([*map(str, comparison.unexplained)], 1))
    if not comparison.differing:
        return "; ".join(texts)
    causes = f" ({'; '.join(texts)})" if texts else ""
    return f"{_number_that_differs(len(comparison.differing), 'tensor')}{causes}"


def _different_settings(comparison: Comparison) -> str:
    """Return the number of differing settings, and the first few; else empty."""
    settings = comparison.settings
    if not settings:
        return ""
    first = "; ".join(map(str, settings[:MOST_SETTINGS]))
    more = " …" if len(settings) > MOST_SETTINGS else ""
    return f"{_number_that_differs(len(settings), 'setting')} ({first}{more})"


def _number_that_differs(count: int, noun: str) -> str:
    """Return a number of parts with the verb *differ*.

    Examples
    --------
    >>> _number_that_differs(1, "tensor"), _number_that_differs(2, "tensor")
    ('1 tensor differs', '2 tensors differ')
    """
    verb = "differs" if count == 1 else "differ"
    return f"{counted(count, noun)} {verb}"


def _compared(comparison: Comparison) -> str:
    """Return the counts of equal parts, and the parts that were not compared."""
    texts = [
        f"{title} {count.same}/{count.compared}"
        for title, count in comparison.counts.items()
        if count.compared
    ]
    if comparison.unknown:
        texts.append(f"not compared: {few(comparison.unknown)}")
    if comparison.not_compared:
        hint = " (--all compares them)" if comparison.attention_alone else ""
        other_tensors = counted(len(comparison.not_compared), "other tensor")
        texts.append(f"{other_tensors} not compared{hint}")
    if comparison.settings_not_compared:
        keys = few(comparison.settings_not_compared)
        texts.append(f"other settings, not compared: {keys}")
    return " · ".join(texts)


def _moved_most(comparison: Comparison) -> str:
    """Return a sentence on the heads of quantized weights that moved most; else empty."""
    if not comparison.quantized:
        return ""
    is_one_stack = len({(block.stack, block.kind) for block in comparison.blocks}) == 1
    moves: list[tuple[float, str]] = []
    for block in comparison.blocks:
        prefix = "" if is_one_stack else f"{block.stack} {block.kind} "
        for head, distance in enumerate(block.moved):
            if math.isfinite(distance):
                moves.append((distance, f"{prefix}{block.layer}.{head}"))
    measure = "the distance of their scores, with norms, biases and positions"
    return f" {farthest(moves, measure)}" if moves else ""


def commented(repair: str) -> str:
    """Return the code of a repair, after comments on its variables."""
    return "\n".join([*_comments(repair), repair])


def _comments(repair: str) -> Iterator[str]:
    """Yield a comment for each variable in the code of a repair."""
    if "tensors[" in repair:
        yield "# tensors: the candidate's, by name"
    if "reference[" in repair:
        yield "# reference: the reference's, under the candidate's names and in its layout"
    if "adapter[" in repair:
        yield "# adapter: factors of the adapter by the weights' names in the candidate;"
        yield "# adapter[name] is (lora_A.weight, lora_B.weight) of the module"
    if "config[" in repair or "config.pop" in repair:
        yield "# config: the candidate's config.json"
