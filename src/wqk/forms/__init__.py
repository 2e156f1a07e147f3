"""The query-key form as its factors: kernels, scores, images, and whether it looks random."""

from wqk.forms.form import BilinearForm

__all__ = ["BilinearForm"]
