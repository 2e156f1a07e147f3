"""wqk: read, measure and follow the query-key form of self-attention, W_qk = W_q W_kᵀ."""

from wqk._version import __version__
from wqk.forms import BilinearForm
from wqk.scores import coupling, directionality, symmetry, symmetry_null

__all__ = ["BilinearForm", "__version__", "coupling", "directionality", "symmetry", "symmetry_null"]
