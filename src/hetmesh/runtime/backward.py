"""The backward of one stage, whole or in two parts. The autograd graph ends at the stage's inputs, which are leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hetmesh._torch_compat import split_backward


def backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add the gradients of all leaves to their `.grad`. `gradients` are those of `outputs`; None for a loss."""
    pairs = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if out.requires_grad]
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])


class SplitBackward:
    """A backward in two parts: `input_part` now, `weight_part` whenever there is time.

    The weights' part is linear in what the inputs' part passes through each layer; torch keeps those intermediate
    gradients between the parts (`torch.distributed.pipelining`).
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.groups: list[dict[str, Any]] = []

    def input_part(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]
    ) -> None:
        """Add the gradients of `leaves` to their `.grad`."""
        given = [gradient for gradient in gradients if gradient is not None] or None  # none for a loss
        # torch detaches outputs in place, to free what only the inputs' part needed: a view cannot be
        whole = [out.clone() if out._is_view() else out for out in outputs]
        input_part, _ = split_backward()
        _, self.groups = input_part(whole, given, list(leaves), iter(self.parameters))

    def weight_part(self) -> None:
        """Add the gradients of the parameters to their `.grad`."""
        _, weight_part = split_backward()
        weight_part(iter(self.parameters), self.groups)
        self.groups = []
