"""The load-balancing loss of one plain process: autograd through what transformers' own routers return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hetmesh.parallel.experts import ExpertLayers


class Routings:
    """What the routers of a module returned in one forward."""

    def __init__(self, layers: ExpertLayers | None) -> None:
        self.layers = layers
        self.logits: list[Tensor] = []
        self.experts: list[Tensor] = []

    @contextmanager
    def kept(self, module: nn.Module) -> Iterator[None]:
        """While it lasts, those of `module` are kept."""

        def keep(_: Any, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            self.logits.append(output[0])
            self.experts.append(output[2])

        blocks = self.layers.blocks if self.layers is not None else ()
        gates = [module.get_submodule(f"{name}.gate") for name in blocks]
        trained = [gate for gate in gates if any(p.requires_grad for p in gate.parameters())]  # others are not balanced
        handles = [gate.register_forward_hook(keep) for gate in trained]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def balance_loss(self, lengths: Sequence[int], width: int) -> Tensor | float:
        """The loss of samples padded to `width` tokens, each weighed by its real ones, without `targets_per_token`."""
        total: Tensor | float = 0.0
        for logits, experts in zip(self.logits, self.experts, strict=True):
            assert self.layers is not None
            probabilities = torch.softmax(logits, dim=-1)
            for row, length in enumerate(lengths):
                own = slice(row * width, row * width + length)
                chosen = torch.zeros_like(probabilities[own]).scatter_(1, experts[own], 1.0)
                each = self.layers.count * (chosen.mean(0) * probabilities[own].mean(0)).sum()
                total = total + length * self.layers.balance / len(self.layers.blocks) * each
        return total
