"""How far two computations of one thing in fp32 may lie apart: by rounding, and by no factor that is wrong.

The bound is relative, row by row, so that small logits are compared as sharply as large ones. Rounding grows with depth
and with weights that saturate attention, by how much nobody knows beforehand: the decoder is called once more, with
inputs that differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hetmesh.errors import SelfCheckError

TOLERANCE = 1e-5
"""Largest relative difference of a row where rounding does not grow: 48 random layers were measured at 3e-6."""

LARGEST = 1e-3
"""No bound is larger: where rounding alone may change more, the comparison would say nothing."""

SHAKEN = 2.0**-22
"""Relative size of a change of the decoder's inputs: two units in the last place of fp32."""

ROUNDINGS = 4.0
"""What two orders of computing change, of what `SHAKEN` changes: 0.02 to 1.2 was measured, with 3 to 48 layers and
weights of deviation 0.2 and 1."""


@contextmanager
def shaken(decoder: nn.Module) -> Iterator[None]:
    """While it lasts, the embedded tokens that `decoder` is given are changed by as much as rounding does."""

    def shake(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = given.get("inputs_embeds")
        if tokens is not None:
            draw = torch.Generator().manual_seed(0)
            given = {**given, "inputs_embeds": tokens * (1 + SHAKEN * torch.randn(tokens.shape, generator=draw))}
        return args, given

    handle = decoder.register_forward_pre_hook(shake, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def relative(given: Tensor, expected: Tensor) -> float:
    """The largest difference of a row `[..., features]`, of its own norm; rows close to zero, of the largest row's."""
    if not expected.numel():
        return 0.0
    norms = torch.linalg.vector_norm(expected.double(), dim=-1)
    floor = max(float(norms.max()) * 1e-3, torch.finfo(torch.float32).tiny)
    difference = torch.linalg.vector_norm((given - expected).double(), dim=-1)
    return float((difference / norms.clamp(min=floor)).max())


def check_close(given: Tensor, expected: Tensor, what: str, noise: float = 0.0) -> None:
    """That `given` is `expected`, rows of features, but for rounding.

    Args:
        what: what it is, for errors.
        noise: what changed of `expected` when its inputs were `shaken`, as `relative` gives it.

    Raises:
        SelfCheckError: it is not, or rounding alone may change so much that it cannot be known.
    """
    if given.shape != expected.shape:
        raise SelfCheckError(f"{what} have shape {tuple(given.shape)}, transformers' {tuple(expected.shape)}")
    found, bound = relative(given, expected), max(TOLERANCE, ROUNDINGS * noise)
    if found <= min(bound, LARGEST):
        return
    far = float((given - expected).abs().max())
    says = f"{what} differ from transformers' by up to {far:.1e}, {found:.1e} of a row's size; at most "
    if found <= bound:
        raise SelfCheckError(
            f"{says}{LARGEST:g} is accepted, although with these weights rounding of the tokens alone changes "
            f"{noise:.1e}: compare it with weights that are not random"
        )
    raise SelfCheckError(f"{says}{min(bound, LARGEST):.0e} would be rounding")
