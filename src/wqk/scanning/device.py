"""Forms on a PyTorch device, such as a GPU."""

from __future__ import annotations

from collections.abc import Callable

from wqk.errors import MissingPackage, first_line, required_by
from wqk.forms import BilinearForm


def mover(device: str) -> Callable[[BilinearForm], BilinearForm]:
    """A function that moves a form to a device, such as ``"cuda"``.

    Raises `MissingPackage` if PyTorch is not installed, or cannot use the device.
    """
    with required_by("a device"):
        import torch
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise MissingPackage(
            f"device {device!r}: PyTorch cannot use it here ({first_line(error)})", package="torch"
        ) from None

    def move(form: BilinearForm) -> BilinearForm:
        return BilinearForm.from_factors(
            *(torch.tensor(f, device=device) for f in (form.query, form.key))
        )

    return move
