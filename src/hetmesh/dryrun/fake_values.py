"""The values that a tensor of the fake device has, where the host knows them."""

from __future__ import annotations

from torch import Tensor

MAX_KNOWN = {True: 1 << 10, False: 1 << 24}
"""Most elements of a tensor whose values are kept, by whether they are floating-point numbers."""


def known_value(x: Tensor) -> Tensor | None:
    """The values of `x`, on the host; None where they are not known. Not to be changed."""
    value = getattr(x, "hetmesh_value", None)
    if value is None or getattr(value.untyped_storage(), "hetmesh_unknown", False):
        return None
    return value


def learn(x: Tensor, value: Tensor | None) -> None:
    """Keep `value` as the values of `x`, unless there are too many; values of its views are views of them."""
    if value is not None and x.numel() <= MAX_KNOWN[x.is_floating_point()] and not x.is_complex():
        x.hetmesh_value = value  # type: ignore[attr-defined]


def forget(x: Tensor) -> None:
    """The values of `x` and of all that shares its memory are not known any more."""
    value = getattr(x, "hetmesh_value", None)
    if value is not None:
        value.untyped_storage().hetmesh_unknown = True
