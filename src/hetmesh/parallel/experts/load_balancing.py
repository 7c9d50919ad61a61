"""The load-balancing loss: per sample, so that it is a sum over samples and equal in every layout.

Its form is that of Switch Transformers (arXiv 2101.03961, equations 4 to 6) as transformers has it,
`E * sum_e f_e * P_e`, with `f_e` the choices of expert e per token and `P_e` its mean probability, but over the tokens
of one sample, as DeepSeek-V3's sequence-wise loss (arXiv 2412.19437, equations 17 to 20): over a microbatch or a lane
it would depend on which samples meet there. Samples count by their tokens, blocks alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hetmesh.parallel.experts.routed_tokens import LaneSamples


def choices_per_sample(experts: Tensor, samples: LaneSamples, count: int) -> Tensor:
    """How often this rank's tokens of each sample chose each expert: `[samples, count]`, float64. `experts`: int64
    `[tokens, chosen]`."""
    number = len(samples.tokens)
    flat = (samples.of_token[:, None] * count + experts).reshape(-1)
    ones = torch.ones_like(flat, dtype=torch.float64)
    return ones.new_zeros(number * count).scatter_add_(0, flat, ones).view(number, count)


@torch.no_grad()
def balance_terms(probabilities: Tensor, choices: Tensor, samples: LaneSamples) -> tuple[Tensor, Tensor]:
    """The loss of one block and its gradient, which depends on the choices alone: counts, without a gradient.

    Args:
        probabilities: `[tokens, experts]`, summing to 1.
        choices: `[samples, experts]`, over all ranks that share the samples.

    Returns:
        The share of these tokens in the loss, without the coefficient, in targets: 0-d float64; and its gradient with
        respect to the probabilities, `[tokens, experts]`, of their dtype.
    """
    tokens = samples.tokens.clamp(min=1)[:, None].to(choices.dtype)
    fractions = choices / tokens
    factors = samples.weights.to(choices.dtype)[:, None] * choices.shape[1] / tokens
    gradient = (fractions * factors).index_select(0, samples.of_token)
    return (gradient * probabilities).sum(), gradient.to(probabilities.dtype)


def inject(weights: Tensor, probabilities: Tensor, gradient: Tensor) -> Tensor:
    """`weights` as they are; the backward adds `gradient` to that of `probabilities`. So a loss of a block in the
    middle of a pipeline needs no way to the last stage."""
    return _Inject.apply(weights, probabilities, gradient)


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, probabilities: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradients[0], gradient, None
