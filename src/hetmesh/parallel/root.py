"""All modules of a rank under one root."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class Root(nn.Module):
    """All modules of this rank under one root, so that every parameter has its own name: `llm.model.norm.weight`."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for name, module in modules:
            self.add_module(name, module)
