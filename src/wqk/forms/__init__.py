"""The query-key form, stored as two factors: kernels, scores, spectra, images."""

from wqk.forms.form import BilinearForm

__all__ = ["BilinearForm"]
