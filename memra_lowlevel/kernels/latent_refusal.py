"""How the latent kernels refuse an argument."""

from __future__ import annotations

from ..errors import ArgumentError

__all__ = ["refused"]


def refused(kernel: str, name: str, expected: str, got: str) -> ArgumentError:
    """Return the error that says what a kernel wants in place of an argument."""
    return ArgumentError(
        f"{kernel}: {name} must be {expected}, got {got}",
        kernel=kernel, name=name, expected=expected, got=got,
    )  # fmt: skip
