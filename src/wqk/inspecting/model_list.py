"""List of the supported model types, from the files of the families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wqk._console import Result, counted
from wqk.families import Family, families
from wqk.families.model_types import composite_types
from wqk.tables.sheet import Sheet

UNLISTED = (
    "The attention of a model without a family is guessed from the names of its tensors: "
    "wqk explain REF shows what is found in a checkpoint."
)


@dataclass(frozen=True)
class ModelType:
    """A model type, and the attention that wqk reads from such models.

    Attributes
    ----------
    model_type
        The ``model_type`` of ``config.json``; ``gguf-`` and the architecture for files of GGUF.
    family
        The family that describes the tensors; of a composite model, the families of its parts.
    attention
        Stacks and kinds of attention, such as ``decoder self``.
    refusal
        The reason why models of the type cannot be read; empty if they can be read.
    """

    model_type: str
    family: str
    attention: str
    refusal: str


@dataclass(frozen=True, repr=False)
class ModelTypes(Result):
    """Model types with known attention.

    Attributes
    ----------
    word
        Word in the names of the types or of their families; empty for all types.
    types
        The types, in alphabetical order.
    """

    word: str
    types: tuple[ModelType, ...]

    @property
    def sentence(self) -> str:
        """The number of types."""
        types = counted(len(self.types), "model type")
        if self.word:
            types += f" with {self.word!r} in the name of the type or of the family"
        return f"{types}. {UNLISTED}"

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        for model_type in self.types:
            yield vars(model_type)

    def _shown(self, width: int) -> Iterator[Any]:
        from rich.text import Text

        table = Sheet.of(
            "model type", "family", "attention", text=["model type", "family", "attention"]
        )
        for row in self.types:
            refused = f"refused: {row.refusal}"
            table.add(row.model_type, row.family, refused if row.refusal else row.attention)
        if self.types:
            yield table
        yield Text(self.sentence, style="dim")


def models(word: str = "") -> ModelTypes:
    """List the model types that are read.

    Parameters
    ----------
    word
        Only types with this word in their name, or in the name of their family. Capitals, hyphens
        and underscores make no difference.

    Examples
    --------
    >>> [row.model_type for row in models("bloom").types]
    ['bloom', 'gguf-bloom']
    """
    family_by_type: dict[str, Family] = {}
    for family in families().values():
        family_by_type |= dict.fromkeys(family.model_types, family)
    types = [_of_family(name, family) for name, family in family_by_type.items()]
    for name, part_types in composite_types().items():
        parts = [family_by_type[part] for part in part_types.values() if part in family_by_type]
        if name not in family_by_type and parts:
            types.append(_of_parts(name, parts))
    chosen = [
        row
        for row in types
        if _letters(word) in f"{_letters(row.model_type)} {_letters(row.family)}"
    ]
    return ModelTypes(word, tuple(sorted(chosen, key=lambda row: row.model_type)))


def _letters(name: str) -> str:
    """Return the letters and digits of a name, for a comparison without case and hyphens."""
    return "".join(filter(str.isalnum, name.lower()))


def _of_family(name: str, family: Family) -> ModelType:
    """Return the row of a type in a family's list."""
    attention = [f"{rule.stack} {rule.kind}" for rule in family.attention]
    shown = ", ".join(dict.fromkeys([*attention, *family.mixers]))
    return ModelType(name, family.name, shown, family.refusal)


def _of_parts(name: str, parts: list[Family]) -> ModelType:
    """Return the row of a composite model, with the families of the parts."""
    rows = [_of_family(name, family) for family in parts]
    families_of_parts = dict.fromkeys(row.family for row in rows)
    attention = dict.fromkeys(row.attention for row in rows if row.attention)
    refusals = dict.fromkeys(row.refusal for row in rows if row.refusal)
    return ModelType(
        model_type=name,
        family=" + ".join(families_of_parts),
        attention=", ".join(attention),
        refusal="; ".join(refusals),
    )
