"""Whether layers of a user's module that say so work on tokens one by one.

With sequence parallelism the parts of a layer that have row-wise linears get all tokens, and everything else a share.
So a layer is tried with those parts left out: what it makes of some tokens must not depend on the others.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.build import build_module
from hetmesh.models.user.adapters import UserAdapter
from hetmesh.models.user.packing_probe import LARGEST
from hetmesh.models.user.token_shares import sharded_layers
from hetmesh.parallel.tensor_parallel import matching


class _Nothing(nn.Module):
    """Stands for a part that gets all tokens."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros_like(hidden)


def check_tokenwise(adapter: UserAdapter, example: nn.Module, request: AdapterRequest) -> None:
    """Try the layers of `token_sharded`, with random weights.

    Raises:
        RecipeError: one mixes tokens, or no part of them has a row-wise linear.
    """
    where = f"{request.key}: {type(example).__name__} declares `token_sharded`"
    styles = {name: style for pattern, style in adapter.plan.items() for name in matching(example, pattern)}
    parents = {name.rpartition(".")[0] for name, style in styles.items() if style == "rowwise"}
    layers = sharded_layers(adapter.layers(), adapter.abilities.token_sharded)
    if not any(f"{parent}.".startswith(f"{layer}.") for parent in parents for layer in layers):
        raise RecipeError(f"{where}, but none of {list(layers)} has a rowwise linear in its tensor_parallel_plan")
    if whole := [layer for layer in layers if layer in parents]:
        raise RecipeError(
            f"{where}, but {whole} are themselves what gets all tokens: put them into a layer around them"
        )
    if sum(p.numel() for p in example.parameters()) > LARGEST:
        return
    module = build_module(adapter, request.name, 0, torch.float64).eval()
    for parent in parents:
        owner, _, child = parent.rpartition(".")
        setattr(module.get_submodule(owner), child, _Nothing())
    for layer in layers:
        _try(module.get_submodule(layer), layer, _width(module, layer, adapter), where)


def _width(module: nn.Module, layer: str, adapter: UserAdapter) -> int:
    if adapter.abilities.activation is not None:
        return adapter.abilities.activation.features
    return next(p.shape[-1] for p in module.get_submodule(layer).parameters())


def _try(layer: nn.Module, name: str, width: int, where: str) -> None:
    tokens = torch.randn(1, 6, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    count = sum(p.default is p.empty for p in inspect.signature(layer.forward).parameters.values())
    more: tuple[None, ...] = (None,) * max(count - 1, 0)
    try:
        with torch.no_grad():
            whole, some = layer(tokens, *more), layer(tokens[:, 2:5], *more)
    except Exception as error:
        raise RecipeError(f"{where}, but layer {name!r} failed on some tokens, [1, 3, {width}]: {error}") from error
    if whole.shape[:2] != (1, 6) or not torch.allclose(whole[:, 2:5], some, rtol=1e-9, atol=1e-9):
        raise RecipeError(f"{where}, but outside of its parts with row-wise linears layer {name!r} mixes tokens")
