"""Build a module: without memory, and with the values that its parameters begin with, or without weights at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hetmesh._torch_compat import has_gradient_hooks
from hetmesh.errors import RecipeError
from hetmesh.models.adapter import Adapter
from hetmesh.models.weights.unfilled import Unfilled, built_really, random_state, recorded


def build_module(adapter: Adapter, name: str, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The full module on the CPU, with random weights drawn from `(seed, name)` in fp32 and cast to `dtype`.

    Every rank of any layout gets the same weights as one process would, without communication; fp64 runs start from
    the fp32 ones. The global RNG is left as it was.

    Raises:
        RecipeError: nothing initialises one of its parameters.
    """
    return build_unfilled(adapter, name, seed, dtype).filled()


def build_unfilled(adapter: Adapter, name: str, seed: int, dtype: torch.dtype = torch.float32) -> Unfilled:
    """What `build_module` makes, before its parameters have memory: each rank fills in what it keeps.

    A module whose constructor computes with its weights is built really, and they are kept whole until they are taken.

    Raises:
        RecipeError: nothing initialises one of its parameters.
    """

    def build() -> nn.Module:
        return _build(adapter, name).to(dtype)

    found = recorded(build, name, seed)
    return built_really(build, name, seed, found) if isinstance(found, str) else found


def why_whole(adapter: Adapter, name: str) -> str | None:
    """Why a module's weights are kept whole while it is built; None if they are drawn row by row. Takes no memory.

    Raises:
        RecipeError: nothing initialises one of its parameters.
    """
    found = recorded(lambda: _build(adapter, name), name, 0)
    return found if isinstance(found, str) else None


def build_empty(adapter: Adapter, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The full module without weights: parameters on the meta device, buffers as `build_module` makes them, or as
    random, the same on every rank.

    (A parameter has memory while its layer is constructed, and it is never written to: the peak is one of them.)
    """
    with random_state("", 0), _parameters_on_meta():
        return _build(adapter).to(dtype)


def build_on_meta(adapter: Adapter) -> nn.Module | None:
    """The full module without any memory, to look at its parts; None for one that cannot be built that way."""
    try:
        with torch.device("meta"):
            return adapter.build()
    except Exception:  # a user's constructor may compute with its weights
        return None


def _build(adapter: Adapter, name: str = "") -> nn.Module:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        module = adapter.build()
    finally:
        torch.set_default_dtype(default)
    for fqn, tensor in (*module.named_parameters(), *module.named_buffers()):
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        where = f"{f'modules.{name}' if name else type(module).__name__}: {kind} {fqn}"
        if has_gradient_hooks(tensor):
            raise RecipeError(
                f"{where} has a gradient hook, which would be lost, or see a share of a microbatch's gradient, when it "
                "is sharded: change the gradient in forward, by a torch.autograd.Function"
            )
        if tensor.is_complex():
            raise RecipeError(
                f"{where} is complex, and would lose its imaginary part when the module gets its dtype: keep "
                "torch.view_as_real of it, and take torch.view_as_complex in forward"
            )
    return module


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters move to the meta device as they are registered. (`torch.device("meta")` would take the buffers too,
    and those that no checkpoint holds, such as rotary frequencies, could not be recovered.)"""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    owner: Any = nn.Module
    owner.register_parameter = on_meta
    try:
        yield
    finally:
        owner.register_parameter = register
