"""One attention block: its heads as forms, coordinates of forms, terms that forms leave out."""

from wqk.attention.block import Block, Head
from wqk.attention.factors import Coordinates, Omission

__all__ = ["Block", "Coordinates", "Head", "Omission"]
