"""Whether a user's module can be cut into pipeline stages between its layers: found by calling it without them. And
whether it enters each of its layers once, whatever it reads, so that FSDP can gather them one by one.

Each layer is replaced by one that returns its input. Called with what a later pipeline stage gets from the one before,
the module must then return just that, and call its layers in order: then nothing is computed between layers, where each
stage would compute it again. No weights are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hetmesh._torch_compat import tree_leaves
from hetmesh.errors import RecipeError
from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.user.adapters import UserAdapter, UserEncoder, UserItemsEncoder, UserLlm
from hetmesh.models.user.probe import MAX_PARAMETERS, n_parameters, sample_calls
from hetmesh.models.weights.build import build_empty
from hetmesh.parallel.stage_views import PassThrough
from hetmesh.parallel.tensor_parallel import within


def first_layers(adapter: UserAdapter, example: nn.Module, request: AdapterRequest) -> tuple[str, ...]:
    """The layers that only the first stage calls, with what the module reads; they stay together there. `example`: an
    instance on the meta device; its layers are replaced."""
    where = f"{request.key}: {type(example).__name__} declares `activation`"
    layers, called = adapter.layers(), list[str]()
    if any(True for name, _ in example.named_buffers() if not within(name, *layers)):
        example = build_empty(adapter)
    outside = [name for name, _ in example.named_parameters() if not within(name, *layers)]
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
        stub = PassThrough()
        stub.register_forward_hook(lambda *_, name=layer: called.append(name))
        setattr(example.get_submodule(parent), child, stub)
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


def _inputs(adapter: UserAdapter, vocab_size: int) -> tuple[Tensor, tuple[Any, ...]]:
    """What a later stage gets, for two items, rows or samples: hidden, and in place of what the module reads."""
    between = adapter.abilities.activation
    assert between is not None
    shape: tuple[int, ...] = (2 * between.per_row, between.features)
    read: tuple[Any, ...] = (None,)
    if isinstance(adapter, UserLlm):
        (batch, _), _ = sample_calls(adapter, max(vocab_size, 2))
        tokens = batch["input_ids"]
        every_token = {"target_positions": torch.arange(tokens.numel()), "targets": tokens.flatten()}
        shape, read = (*tokens.shape, between.features), ({**batch, **every_token}, {})
    elif isinstance(adapter, UserEncoder):
        shape = (2, between.per_row * adapter.rows_per_item + between.per_item, between.features)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)), read


def enters_layers_once(adapter: UserAdapter, example: nn.Module, vocab_size: int) -> bool:
    """Whether each call enters each layer once and uses the same parameters, each inside its layer: calls with several
    samples, with each alone, with zeros, and for an LLM without rows.

    False for encoders of items of several shapes, and for modules that cannot be called like this; True for an LLM
    whose data has no tokens. Modules of more than MAX_PARAMETERS parameters are called without memory.
    """
    if isinstance(adapter, UserItemsEncoder):
        return False
    if isinstance(adapter, UserLlm) and vocab_size < 2:
        return True
    device = "cpu" if n_parameters(example) <= MAX_PARAMETERS else "meta"
    together, apart = sample_calls(adapter, vocab_size)
    calls = [together, *apart, tuple(map(_zeros, apart[0]))]  # a lane without items gets zeros
    if isinstance(adapter, UserLlm):
        batch, inputs = apart[0]
        text = {key: value[:0] if key.startswith("positions.") else value for key, value in batch.items()}
        calls.append((text, {source: rows[:0] for source, rows in inputs.items()}))
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            with torch.device(device):
                module = adapter.build().double()
            layers = [x for x in set(map(module.get_submodule, adapter.layers())) if any(True for _ in x.children())]
            entries = _Entries(module, layers)
            for tensors in calls:
                with entries:
                    adapter.forward(module, *({k: t.to(device) for k, t in part.items()} for part in tensors))
                entries.calls.append((entries.entered, entries.used))
                entries.entered, entries.used = [], set()
    except Exception:  # training reports what is wrong with it for real inputs
        return False
    once = all(sorted(map(id, entered)) == sorted(map(id, layers)) for entered, _ in entries.calls)
    return once and not entries.outside and all(used == entries.calls[0][1] for _, used in entries.calls)


def _zeros(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: torch.zeros_like(t) if t.is_floating_point() else t for key, t in tensors.items()}


class _Entries(TorchFunctionMode):
    """Records which layers are entered and which parameters are used, and whether one is used outside its layer."""

    def __init__(self, module: nn.Module, layers: list[nn.Module]) -> None:
        super().__init__()
        self.owners: dict[int, nn.Module | None] = {id(p): None for p in module.parameters()}
        self.inside: list[nn.Module] = []
        self.entered: list[nn.Module] = []
        self.used: set[int] = set()
        self.outside = False
        self.calls: list[tuple[list[nn.Module], set[int]]] = []
        for layer in layers:
            self.owners |= {id(p): layer for p in layer.parameters()}
            layer.register_forward_pre_hook(self._enter)
            layer.register_forward_hook(lambda layer, *_: self.inside.remove(layer))

    def _enter(self, layer: nn.Module, _: Any) -> None:
        self.inside.append(layer)
        self.entered.append(layer)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            for used in map(id, tree_leaves((args, kwargs))):
                if used in self.owners:
                    owner = self.owners[used]
                    self.used.add(used)
                    self.outside |= owner is not None and owner not in self.inside
        return result
