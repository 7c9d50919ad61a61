"""Which samples the tokens of a microbatch belong to, as mixture-of-experts blocks need it, what they noted, and the
load-balancing loss: per sample, so that it is a sum over samples and equal in every layout.

The form of the loss is that of Switch Transformers (arXiv 2101.03961, equations 4 to 6) as transformers has it,
`E * sum_e f_e * P_e`, with `f_e` the choices of expert e per token and `P_e` its mean probability, but over the tokens
of one sample, as DeepSeek-V3's sequence-wise loss (arXiv 2412.19437, equations 17 to 20): over a microbatch or a lane
it would depend on which samples meet there. Samples count by their tokens, blocks alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetmesh.errors import BoundaryError
from hetmesh.parallel.random_state import current_microbatch, current_step

KEYS = ("token_samples", "sample_tokens", "sample_weights")
"""Of the batch of a packed lane (`hetmesh.models.packing.lane_samples`)."""


Load = tuple[Tensor, Tensor]
"""Of one block: the load-balancing loss of this rank's tokens, in targets, without its coefficient; and how many of
them went to each expert, `[experts]`."""


@dataclass(frozen=True)
class LaneSamples:
    """The real tokens of one rank: what follows them in a block's input is padding, and is not routed.

    Attributes:
        of_token: int64 `[tokens]`: the sample of each token that the rank keeps, by its place in the lane.
        tokens: int64 `[samples]`: tokens of each sample of the lane, on all ranks that share them.
        weights: float64 `[samples]`: what each sample's load-balancing loss counts, in targets: over all samples of a
            global batch they sum to its targets.
    """

    of_token: Tensor
    tokens: Tensor
    weights: Tensor


class RoutedTokens:
    """What the mixture-of-experts blocks of one module share, by microbatch: a block may be computed again later."""

    def __init__(self) -> None:
        self._samples: dict[int, LaneSamples] = {}
        self._step = 0
        self._loads: dict[tuple[int, int], Load] = {}

    def note(self, batch: Mapping[str, Tensor]) -> None:
        """Take what a batch says of the microbatch that is about to be computed. Raises BoundaryError if its samples
        are not packed in one row, so that padding could not be told from tokens."""
        if missing := [key for key in KEYS if key not in batch]:
            raise BoundaryError(f"experts need the samples of a lane in one row, but its batch has no {missing}")
        self._samples[current_microbatch()] = LaneSamples(*(batch[key] for key in KEYS))

    @property
    def samples(self) -> LaneSamples:
        """Those of the microbatch that is computed, or computed again."""
        return self._samples[current_microbatch()]

    def count(self, block: int, load: Load) -> None:
        """Keep the load of one block in this microbatch; what an earlier step left is dropped."""
        if current_step() != self._step:
            self._step = current_step()
            self._loads.clear()
        self._loads[current_microbatch(), block] = load  # computed again, it is the same

    def loads(self) -> dict[int, Load]:
        """Those of the last step, summed over microbatches, by number of the block; nothing is read."""
        sums: dict[int, Load] = {}
        for (_, block), load in sorted(self._loads.items(), key=lambda item: item[0]):
            before = sums.get(block)
            sums[block] = load if before is None else (before[0] + load[0], before[1] + load[1])
        return sums


def routed_tokens(module: nn.Module) -> RoutedTokens | None:
    """What the mixture-of-experts blocks of `module` share; None where it has none."""
    return getattr(module, "hetmesh_experts", None)


def choices_per_sample(experts: Tensor, samples: LaneSamples, count: int) -> Tensor:
    """How often this rank's tokens of each sample chose each expert: `[samples, count]`, float64. `experts`: int64
    `[tokens, chosen]`."""
    number = len(samples.tokens)
    flat = (samples.of_token[:, None] * count + experts).reshape(-1)
    ones = torch.ones_like(flat, dtype=torch.float64)
    return ones.new_zeros(number * count).scatter_add_(0, flat, ones).view(number, count)


@dataclass(frozen=True)
class BalanceTerms:
    """What the loss of one block is to this rank's tokens.

    Attributes:
        loss: 0-d float64: the share of these tokens, without the coefficient; in targets.
        gradient: of that, with respect to the probabilities `[tokens, experts]`; of their dtype.
    """

    loss: Tensor
    gradient: Tensor


@torch.no_grad()
def balance_terms(probabilities: Tensor, choices: Tensor, samples: LaneSamples) -> BalanceTerms:
    """The loss and its gradient, which depends on the choices alone: these are counts, without a gradient.

    Args:
        probabilities: `[tokens, experts]`, summing to 1.
        choices: `[samples, experts]`, over all ranks that share the samples.
    """
    tokens = samples.tokens.clamp(min=1)[:, None].to(choices.dtype)
    fractions = choices / tokens
    factors = samples.weights.to(choices.dtype)[:, None] * choices.shape[1] / tokens
    gradient = (fractions * factors).index_select(0, samples.of_token)
    return BalanceTerms((gradient * probabilities).sum(), gradient.to(probabilities.dtype))


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
