"""The loss is a sum. It is divided once per step, by the valid target tokens of the whole global batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from hetmesh.errors import LossError
from hetmesh.parallel import ParallelModule

CustomLoss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""A user's loss: logits `[targets, vocab]` of this rank's lane and microbatch, and the batch of the LLM, in which
`batch["targets"]` are the true tokens -> the SUM over these targets, a scalar; a connected 0 without any. It runs on
every rank that computes logits, in every microbatch."""


def sum_cross_entropy(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Summed cross-entropy of logits `[num_targets, vocab]` against `batch["targets"]`; a connected 0 without any.

    Half-precision logits are raised to fp32; fp64 stays fp64.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return cross_entropy(logits, batch["targets"], reduction="sum")


def cross_entropy_of(sink: ParallelModule | None) -> Callable[[Tensor, Mapping[str, Tensor]], Tensor]:
    """`sum_cross_entropy` of the logits that `sink` gives on this rank, which may be a share of the vocabulary; None:
    this rank computes none."""
    if sink is None or (vocabulary := sink.vocabulary) is None:
        return sum_cross_entropy
    return lambda logits, batch: vocabulary.sum_cross_entropy(logits, batch["targets"])


def rounding(dtype: torch.dtype) -> float:
    """By which share a sum of losses of `dtype` may differ from that of two halves: a mean is off by about half."""
    return max(1e-3, 16 * torch.finfo(dtype).eps)


class CheckedLoss:
    """A custom loss, checked to be a sum: a mean would weigh targets by the microbatch and the
    rank that they are in.

    Raises:
        LossError: it gives something else than a scalar that depends on the logits; or, of the first batch with several
            targets, something else than the sum of what it gives for two halves of them.
    """

    def __init__(self, loss: CustomLoss) -> None:
        self.loss = loss
        self._tried = False

    def __call__(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        value = self.loss(logits, batch)
        name = getattr(self.loss, "__qualname__", type(self.loss).__name__)
        if not isinstance(value, Tensor) or value.shape != () or not value.is_floating_point():
            given = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise LossError(f"loss {name}: must return a scalar tensor, the sum over batch['targets'], got {given}")
        if logits.requires_grad and torch.is_grad_enabled() and not value.requires_grad:
            raise LossError(
                f"loss {name}: what it returns does not depend on the logits, so nothing can be trained by it"
            )
        if not self._tried and len(logits) > 1:
            self._try(name, logits.detach(), batch, value.detach())
            self._tried = True
        return value

    @torch.no_grad()
    def _try(self, name: str, logits: Tensor, batch: Mapping[str, Tensor], value: Tensor) -> None:
        half, whole, parts = len(logits) // 2, float(value), []
        for part in (slice(None, half), slice(half, None)):
            half_batch = {key: batch[key][part] for key in _OF_TARGETS if key in batch}
            parts.append(float(self.loss(logits[part], {**batch, **half_batch})))
        if not math.isfinite(whole) or abs(sum(parts) - whole) <= rounding(value.dtype) * max(
            map(abs, (whole, *parts))
        ):
            return
        raise LossError(
            f"loss {name}: must be a sum over batch['targets'], but gives {whole:.6g} for {len(logits)} targets, and "
            f"{parts[0]:.6g} + {parts[1]:.6g} for the two halves of them; a mean is taken once, over the global batch, "
            "by hetmesh"
        )


_OF_TARGETS = ("targets", "target_positions", "target_index")
