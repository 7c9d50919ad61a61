"""Whether a user's module enters each of its layers once, whatever it reads, so that FSDP can gather them one by one.

Found by calling it in training mode and recording which functions of torch get its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hetmesh._torch_compat import tree_leaves
from hetmesh.models.user.adapters import UserAdapter, UserItemsEncoder, UserSink
from hetmesh.models.user.probe import MAX_PARAMETERS, n_parameters, sample_calls


def enters_layers_once(adapter: UserAdapter, example: nn.Module, vocab_size: int) -> bool:
    """Whether each call enters each layer once and uses the same parameters, each inside its layer: calls with several
    samples, with each alone, with zeros, and for an LLM without rows.

    False for encoders of items of several shapes, and for modules that cannot be called like this; True for an LLM
    whose data has no tokens. Modules of more than MAX_PARAMETERS parameters are called without memory.
    """
    if isinstance(adapter, UserItemsEncoder):
        return False
    if isinstance(adapter, UserSink) and vocab_size < 2:
        return True
    device = "cpu" if n_parameters(example) <= MAX_PARAMETERS else "meta"
    together, apart = sample_calls(adapter, vocab_size)
    calls = [together, *apart, tuple(map(_zeros, apart[0]))]  # a lane without items gets zeros
    if isinstance(adapter, UserSink):
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
