"""Which layers of a module are blocks: what is gathered, checkpointed and compiled one at a time."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def blocks(root: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The layers that are modules of several parts and share no parameter with the rest of `root`.

    A lone norm or linear is too small to gather by itself, and tied parameters need one owner.
    """
    owners: dict[int, int] = {}
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return [
        layer
        for layer in layers
        if any(True for _ in layer.children())
        and any(True for _ in layer.parameters())
        and all(owners[id(p)] == 1 for p in layer.parameters())
    ]
