"""The loss is a sum. It is divided once per step, by the valid target tokens of the whole global batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def sum_cross_entropy(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Summed cross-entropy of logits `[num_targets, vocab]` against `batch["targets"]`; a connected 0 without any.

    Half-precision logits are raised to fp32; fp64 stays fp64.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return cross_entropy(logits, batch["targets"], reduction="sum")
