"""Build a module: in full, deferred (values without memory), or without weights at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hetmesh._torch_compat import has_gradient_hooks
from hetmesh.errors import RecipeError
from hetmesh.models.adapter import Adapter
from hetmesh.models.weights.deferred import DeferredModule, built_eagerly, random_state, recorded


def build_module(adapter: Adapter, name: str, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The full module on the CPU, with random weights drawn from `(seed, name)` in fp32 and cast to `dtype`.

    Every rank of any layout gets the same weights as one process would, without communication; fp64 runs start from
    the fp32 ones. The global RNG is left as it was.

    Raises:
        RecipeError: nothing initialises one of its parameters.
    """
    return build_deferred(adapter, name, seed, dtype).materialized()


def build_deferred(adapter: Adapter, name: str, seed: int, dtype: torch.dtype = torch.float32) -> DeferredModule:
    """What `build_module` makes, before its parameters have memory: each rank fills in what it keeps.

    A module whose constructor computes with its weights is built eagerly, and they are held in full until they are
    sharded.

    Raises:
        RecipeError: nothing initialises one of its parameters.
    """

    def build() -> nn.Module:
        return _build(adapter, name).to(dtype)

    found = recorded(build, name, seed)
    return built_eagerly(build, name, seed, found) if isinstance(found, str) else found


def reason_built_whole(adapter: Adapter, name: str) -> str | None:
    """Why every rank of a module builds it in full; None if its weights are drawn row by row. Takes no memory.

    Raises:
        RecipeError: nothing initialises one of its parameters.
    """
    found = recorded(lambda: _build(adapter, name), name, 0)
    return found if isinstance(found, str) else None


def build_empty(adapter: Adapter, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The full module without weights: parameters on the meta device, buffers with values, the same on every rank.

    A parameter has memory only while its layer is constructed, so the peak is one parameter.
    """
    with random_state("", 0), _parameters_on_meta():
        return _build(adapter).to(dtype)


def build_on_meta(adapter: Adapter) -> nn.Module | None:
    """The full module without any memory, for inspection; None if it cannot be built on the meta device."""
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
                f"{where} has a gradient hook, which sharding would drop, or call with a share of a microbatch's "
                "gradient: change the gradient in forward, by a torch.autograd.Function"
            )
        if tensor.is_complex():
            raise RecipeError(
                f"{where} is complex, and would lose its imaginary part when the module is cast to its dtype: "
                "register torch.view_as_real of it, and use torch.view_as_complex in forward"
            )
    return module


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters move to the meta device as they are registered. (`torch.device("meta")` would move the buffers too,
    and those that no checkpoint holds, such as rotary frequencies, would be lost.)"""
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
