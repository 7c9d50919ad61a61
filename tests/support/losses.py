"""Losses that recipes name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def squares(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """The summed squares of what a module returns, of any unit."""
    return output.square().sum()


def distances(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """The summed absolute differences from the targets of a module after the LLM."""
    return (output - batch["targets"]).abs().sum()


def mean_distance(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """A mistake: a mean over the rows of a microbatch."""
    return (output - batch["targets"]).abs().mean()
