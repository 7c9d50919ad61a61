"""Whether a user's module can be cut into pipeline stages between its layers: found by calling it without them.

Each layer is replaced by one that returns its input. Called with what a later pipeline stage gets from the one before,
the module must then return just that, and call its layers in order: then nothing is computed between layers, where each
stage would compute it again. No weights are needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.user.adapters import UserAdapter, UserEncoder, UserSink
from hetmesh.models.user.probe import sample_calls
from hetmesh.models.weights.build import build_empty
from hetmesh.parallel.stages import PassThrough


class _RecordedCall(PassThrough):
    """Stands for a layer, and records that it was called."""

    def __init__(self, name: str, called: list[str]) -> None:
        super().__init__()
        self.name, self.called = name, called

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        self.called.append(self.name)
        return hidden


def first_layers(adapter: UserAdapter, example: nn.Module, request: AdapterRequest) -> tuple[str, ...]:
    """The layers that only the first stage calls, with what the module reads; they stay together there.

    Args:
        example: an instance on the meta device; its layers are replaced.

    Raises:
        RecipeError: the module cannot be cut between its layers, and why.
    """
    where = f"{request.key}: {type(example).__name__} declares `activation`"
    layers, called = adapter.layers(), list[str]()
    if any(True for name, _ in example.named_buffers() if not _inside(name, layers)):
        example = build_empty(adapter)
    outside = [name for name, _ in example.named_parameters() if not _inside(name, layers)]
    if outside:
        raise RecipeError(
            f"{where}, but its parameters {outside[:6]} belong to none of its layers {list(layers)}, so no stage would "
            "own them; put them into a layer"
        )
    if shared := _shared_inside(example, layers):
        raise RecipeError(
            f"{where}, but its layers {shared} share parameters, whose gradients two stages would each have a part of; "
            "only the first and the last layer may share some"
        )
    for layer in layers:
        parent, _, child = layer.rpartition(".")
        setattr(example.get_submodule(parent), child, _RecordedCall(layer, called))
    hidden, read = _inputs(adapter, request.vocab_size)
    try:
        with torch.no_grad():
            output = example(*read, hidden=hidden)
    except Exception as error:
        raise RecipeError(
            f"{where}, but its forward failed as a later pipeline stage, with hidden {tuple(hidden.shape)} in place of "
            f"what it reads, and layers that return their input: {type(error).__name__}: {error}"
        ) from error
    first = len(layers) - len(called)
    if not called or tuple(called) != layers[first:]:
        raise RecipeError(
            f"{where}, but as a later pipeline stage it calls the layers {called}; it must call all but the first few "
            f"of {list(layers)}, each once and in this order"
        )
    same = isinstance(output, Tensor) and output.numel() == hidden.numel()
    if not same or not torch.equal(output.reshape(hidden.shape), hidden):
        raise RecipeError(
            f"{where}, but its forward computes something between its layers, or after the last, which each stage "
            f"would compute again: put it into one of {list(layers)}"
        )
    return layers[: first or 1]


def _shared_inside(example: nn.Module, layers: tuple[str, ...]) -> list[str]:
    """Layers that share a parameter with another one, but for the ends, whose shared weights are summed."""
    owners: dict[int, list[str]] = {}
    for layer in layers:
        for parameter in set(example.get_submodule(layer).parameters()):
            owners.setdefault(id(parameter), []).append(layer)
    return next((names for names in owners.values() if len(names) > 1 and names != [layers[0], layers[-1]]), [])


def _inside(name: str, layers: tuple[str, ...]) -> bool:
    return any(name.startswith(f"{layer}.") for layer in layers)


def _inputs(adapter: UserAdapter, vocab_size: int) -> tuple[Tensor, tuple[Any, ...]]:
    """What a later stage gets, for two items, rows or samples: hidden, and in place of what the module reads."""
    between = adapter.abilities.activation
    assert between is not None
    shape: tuple[int, ...] = (2 * between.per_row, between.features)
    read: tuple[Any, ...] = (None,)
    if isinstance(adapter, UserSink):
        (batch, _), _ = sample_calls(adapter, max(vocab_size, 2))
        tokens = batch["input_ids"]
        every_token = {"target_positions": torch.arange(tokens.numel()), "targets": tokens.flatten()}
        shape, read = (*tokens.shape, between.features), ({**batch, **every_token}, {})
    elif isinstance(adapter, UserEncoder):
        shape = (2, between.per_row * adapter.rows_per_item + between.per_item, between.features)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)), read
