"""Which layers of a module are blocks: what is gathered, checkpointed and compiled one at a time."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

_SMALL = 8  # a layer with less than this fraction of the largest one's parameters is no block


def blocks(root: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The layers that are modules of several parts, share no parameter with the rest of `root`, and are not small.

    A norm, a linear or the embedding of patches is too small to gather by itself (every gather and every reduction has
    a latency), and tied parameters need one owner.
    """
    owners: dict[int, int] = {}
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    several = [
        layer
        for layer in dict.fromkeys(layers)  # one that is listed twice is one block
        if any(True for _ in layer.children())
        and any(True for _ in layer.parameters())
        and all(owners[id(p)] == 1 for p in layer.parameters())
    ]
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in several]
    return [layer for layer, size in zip(several, sizes, strict=True) if _SMALL * size >= max(sizes)]
