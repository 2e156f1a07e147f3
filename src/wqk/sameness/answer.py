"""Result of `wqk.same`, shown as a sentence, a table, a picture, JSON or code.

`wqk.sameness.comparisons` contains the records of the compared parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wqk._console import Result, json_value
from wqk._style import current
from wqk.sameness import sentences
from wqk.sameness.comparisons import Comparison
from wqk.sameness.drawing import plot_distances
from wqk.sameness.printing import printed
from wqk.sameness.tensor_comparisons import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Columns of the table of blocks.
BLOCK_COLUMNS = ("stack", "kind", "layer", "same", "distance", "tolerance", "reason", "repair")
# Attributes that people may try on a comparison, with the attributes that exist.
SYNONYMS = {
    **dict.fromkeys(("differences", "explain", "mismatches", "reasons", "why"), "causes"),
    **dict.fromkeys(("code", "fix", "fixes", "repairs"), "repair"),
}


@dataclass(frozen=True, repr=False)
class CheckpointComparison(Comparison, Result, synonyms=SYNONYMS):
    """Comparison of a reference and a candidate, block by block.

    Attributes
    ----------
    reference, candidate
        The names of the two models.
    blocks
        The blocks that both models have, in the order of the reference.
    missing, added
        Blocks that only the reference has, and blocks that only the candidate has.
    notes
        Remarks on the comparison: parts that were not compared, guesses, values rounded to a
        narrower type than their stored type.
    tensors
        Tensors outside the forms: tensors of attention and of other mixers; with ``everything``,
        all other tensors.
    unknown
        Parts of attention that could not be compared: values that a family does not name, tensors
        that one model lacks or stores in another layout.
    not_compared
        Names of the other tensors that were not compared.
    accepted
        The tolerance of the call.
    quantized
        Formats with few bits that only one of the two models uses for weights of forms.
    settings
        Differing settings of the configurations, besides settings of blocks; with ``everything``,
        all settings.
    settings_not_compared
        Keys of the remaining settings that differ, with dots for nested parts.
    tensor_causes
        Causes of differing tensors outside the forms.
    adapter
        One sentence on the shares of the reference's adapter that the candidate contains.
    attention_alone
        True if the other tensors are not compared because ``everything`` is off.
    weights
        The fitted weight of each parent of a merge, by name; the smallest and the largest weight if
        tensors differ.
    repaired
        The repaired copy of the candidate, if one was written.
    """

    @property
    def commented_repair(self) -> str:
        """The code of the repair, after comments on its variables."""
        return sentences.commented(self.repair)

    @property
    def sentence(self) -> str:
        """The outcome in one sentence: equal and different parts, and parts not compared."""
        return sentences.outcome(self)

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield a row of the table for each block."""
        for block in self.blocks:
            row = {column: getattr(block, column) for column in BLOCK_COLUMNS}
            row["distance"] = block.farthest
            row["reason"] = block.reason or None
            row["repair"] = block.repair or None
            yield row

    @current
    def plot(self) -> Figure:
        """Draw the distance of every head from the same head of the other model, by attention.

        Heads that are equal up to rounding are pale. A bar next to each layer has the color of the
        layer's first cause. The causes are named below.

        Raises
        ------
        TableError
            No block was compared.
        MissingPackage
            Matplotlib is not installed.
        """
        return plot_distances(self)

    def _drawn(self) -> Figure | None:
        return self.plot() if self.different_blocks else None

    def _shown(self, width: int) -> Iterator[Any]:
        """Yield the verdict, then the distances, the causes with their layers, and the repair."""
        return printed(self)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        unequal = [tensor for tensor in self.tensors if tensor.outcome is not Outcome.EQUAL]
        values = {
            "reference": self.reference,
            "candidate": self.candidate,
            "same": self.same,
            "verdict": self.verdict,
            "sentence": self.sentence,
            "causes": [cause.to_dict() for cause in self.causes],
            "missing": self.missing,
            "added": self.added,
            "notes": self.notes,
            "counts": self.counts,
            "tensors": unequal,
            "unknown": self.unknown,
            "not_compared": self.not_compared,
            "adapter": self.adapter or None,
            "settings_not_compared": self.settings_not_compared,
            "weights": dict(self.weights) or None,
            "blocks": [block.to_dict() for block in self.blocks],
            "repaired": self.repaired,
        }
        return {name: json_value(value) for name, value in values.items()}
