"""The values that a tensor of the fake device has, where the host knows them."""

from __future__ import annotations

from torch import Tensor

MOST_KNOWN = {True: 1 << 10, False: 1 << 24}
"""Elements of a tensor whose values are kept: of floating point, and of integers and booleans."""


def may_know(x: Tensor) -> bool:
    """Whether values of its size and kind are kept."""
    return x.numel() <= MOST_KNOWN[x.is_floating_point()] and not x.is_complex()


def known_value(x: Tensor) -> Tensor | None:
    """The values of `x`, on the host; None where they are not known. Not to be changed."""
    value = getattr(x, "hetmesh_value", None)
    if value is None or getattr(value.untyped_storage(), "hetmesh_unknown", False):
        return None
    return value


def learn(x: Tensor, value: Tensor | None) -> None:
    """`x` has these values from now on; so have its views, whose values are views of them."""
    if value is not None and may_know(x):
        x.hetmesh_value = value  # type: ignore[attr-defined]


def forget(x: Tensor) -> None:
    """The values of `x` and of all that shares its memory are not known any more."""
    value = getattr(x, "hetmesh_value", None)
    if value is not None:
        value.untyped_storage().hetmesh_unknown = True
