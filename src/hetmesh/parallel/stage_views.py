"""A module without the layers of other pipeline stages, and views of it that run one stage each.

Names stay: a layer that is left out is replaced by one that hands its input on, so that the model's own forward still
walks over all of its layers and parameters keep their names, which checkpoints and learning rates go by.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

PREVIOUS = "<previous stage>"
"""Key of the activations of the stage before among the inputs of a stage."""


class PassThrough(nn.Module):
    """Stands for a layer of another stage: returns its first argument."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


def shared_parameters(module: nn.Module) -> frozenset[str]:
    """FQNs, the first of each, of parameters that several submodules hold."""
    names: dict[int, list[str]] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner.named_parameters(prefix, recurse=False):
            names.setdefault(id(parameter), []).append(name)
    return frozenset(found[0] for found in names.values() if len(found) > 1)


def is_absent(module: nn.Module) -> bool:
    """Whether a layer belongs to another stage."""
    return isinstance(module, PassThrough)


def prune(module: nn.Module, layers: Sequence[str], kept: Iterable[str]) -> None:
    """Replace every layer that is not `kept` in place. One that shares a parameter with a later layer that is kept
    stays (a tied embedding stays with the head, unused): the parameter keeps its first name."""
    for name in _absent(module, layers, kept):
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, PassThrough())
    pruned: Any = module
    pruned.absent_layers = tuple(name for name in layers if is_absent(module.get_submodule(name)))


def view(module: nn.Module, layers: Sequence[str], kept: Iterable[str]) -> nn.Module:
    """A module that runs only the layers `kept`, sharing all its layers and parameters with `module`."""
    seen = _shallow(module)
    for name in _absent(module, layers, kept):
        *path, child = name.split(".")
        parent = seen
        for part in path:
            if parent._modules[part] is module.get_submodule(".".join(path[: path.index(part) + 1])):
                parent._modules[part] = _shallow(parent._modules[part])  # type: ignore[arg-type]
            parent = parent._modules[part]  # type: ignore[assignment]
        parent._modules[child] = PassThrough()
    return seen


def absent_layers(module: nn.Module) -> tuple[str, ...]:
    """FQNs of the layers that `prune` has replaced."""
    return getattr(module, "absent_layers", ())


def _absent(module: nn.Module, layers: Sequence[str], kept: Iterable[str]) -> list[str]:
    kept = set(kept)
    absent = []
    shared: set[int] = set()  # parameters of kept layers that come later
    for name in reversed(layers):
        parameters = {id(p) for p in module.get_submodule(name).parameters()}
        if name in kept:
            shared |= parameters
        elif not parameters & shared:
            absent.append(name)
    return absent


def _shallow(module: nn.Module) -> nn.Module:
    """A copy with its own table of children, which it shares."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
