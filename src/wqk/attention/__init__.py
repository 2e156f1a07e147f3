"""One block of a model: its heads as forms, other coordinates of it, and what it leaves out."""

from wqk.attention.block import Block, Head
from wqk.attention.factors import Coordinates, Omission

__all__ = ["Block", "Coordinates", "Head", "Omission"]
