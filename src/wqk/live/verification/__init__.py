"""Whether the forms that are read are those that the model attends with: run it and compare."""

from wqk.live.verification.comparison import Verification, VerifiedBlock, verify

__all__ = ["Verification", "VerifiedBlock", "verify"]
