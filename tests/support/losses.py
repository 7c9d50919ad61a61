"""Losses that recipes name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn.functional import cross_entropy


def squares(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """The summed squares of what a module returns, of any unit."""
    return output.square().sum()


def distances(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """The summed absolute differences from the targets of a module after the LLM."""
    return (output - batch["targets"]).abs().sum()


def mean_distance(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """A mistake: a mean over the rows of a microbatch."""
    return (output - batch["targets"]).abs().mean()


def smoothed(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy with smoothed labels, of an LLM."""
    return cross_entropy(logits, batch["targets"], reduction="sum", label_smoothing=0.1)
