"""The arguments of `redistribute`, refused by name before anything is computed or sent."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from hetmesh.boundary.transport import check_transport
from hetmesh.errors import BoundaryError
from hetmesh.layout import Layout


def check_arguments(
    x: object,
    dst: object,
    src: object,
    shape: object,
    dtype: object,
    requires_grad: object,
    grad_placements: object,
    transport: str,
    name: object,
    microbatch: object,
) -> tuple[int, ...] | None:
    """Raise BoundaryError for a value of the wrong kind; returns the shape as plain numbers."""
    _check("x", x, "a tensor or None", x is None or isinstance(x, Tensor))
    _check("dst", dst, "a hetmesh.Layout", isinstance(dst, Layout))
    _check("src", src, "a hetmesh.Layout or None", src is None or isinstance(src, Layout))
    _check("dtype", dtype, "a torch.dtype or None", dtype is None or isinstance(dtype, torch.dtype))
    _check("requires_grad", requires_grad, "True or False", isinstance(requires_grad, bool))
    placements = grad_placements is None or (
        isinstance(grad_placements, Sequence) and not isinstance(grad_placements, str)
    )
    _check("grad_placements", grad_placements, "a sequence of placements or None", placements)
    _check("name", name, "a string or None", name is None or isinstance(name, str))
    _check("microbatch", microbatch, "a whole number >= 0", _whole(microbatch))
    check_transport(transport)
    if shape is None:
        return None
    _check("shape", shape, "whole numbers >= 0", isinstance(shape, Sequence) and all(map(_whole, shape)))
    assert isinstance(shape, Sequence)
    return tuple(operator.index(size) for size in shape)


def _whole(value: object) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) >= 0  # type: ignore[arg-type]
    except TypeError:
        return False


def _check(argument: str, value: object, valid: str, good: bool) -> None:
    if not good:
        raise BoundaryError(f"redistribute: {argument} must be {valid}, got {value!r} ({type(value).__name__})")
