"""One attention block: heads as forms, coordinates of forms, terms outside the forms."""

from wqk.attention.block import Block, Head
from wqk.attention.factors import Coordinates, Omission

__all__ = ["Block", "Coordinates", "Head", "Omission"]
