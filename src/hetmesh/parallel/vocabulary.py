"""Logits of which every tensor-parallel rank has a share of the vocabulary: their cross-entropy and their arg-max,
without bringing them together.

Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3: of the logits only a few numbers per target cross between
ranks. Unlike in torch's `loss_parallel` logits are local, the vocabulary need not divide, and targets may be none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hetmesh.parallel.gaps import collective
from hetmesh.parallel.linear import ColwiseLinear

CHUNK = 1 << 24
"""Logits that are raised to fp32 at a time, 64 MB: enough for a kernel, and little compared with the rest."""


@dataclass(frozen=True)
class VocabularyShards:
    """How the last dim of logits lies over the ranks of a group.

    Attributes:
        group: the tensor-parallel ranks, all of which call each method with logits of the same targets.
        widths: tokens of each rank's share, in order; some may have none.
    """

    group: dist.ProcessGroup
    widths: tuple[int, ...]

    @property
    def start(self) -> int:
        """The first token of this rank's share."""
        return sum(self.widths[: dist.get_rank(self.group)])

    @torch.no_grad()
    def argmax(self, logits: Tensor, without: Collection[int] = ()) -> Tensor:
        """The most likely token of each target, the first of equal ones, on every rank: int64 `[targets]`. `logits`:
        this rank's share, `[targets, width]`."""
        start, (count, width) = self.start, logits.shape
        if not count:
            return torch.zeros(0, dtype=torch.int64, device=logits.device)
        best = logits.new_full((count,), -torch.inf, dtype=raised(logits.dtype))
        token = torch.zeros(count, dtype=torch.int64, device=logits.device)
        if width:
            excluded = [t - start for t in sorted(without) if start <= t < start + width]
            if excluded:
                logits = logits.index_fill(-1, torch.tensor(excluded, device=logits.device), -torch.inf)
            place = logits.argmax(-1)
            best, token = logits.gather(-1, place[:, None])[:, 0].to(best.dtype), place + start
        bests, tokens = (of_rank.new_empty(len(self.widths), count) for of_rank in (best, token))
        dist.all_gather(list(bests.unbind()), best, group=self.group)
        dist.all_gather(list(tokens.unbind()), token, group=self.group)
        return tokens.gather(0, bests.argmax(0)[None])[0]


def shard_vocabulary(module: nn.Module, head: str) -> VocabularyShards | None:
    """Let the head of `module` leave its logits as shares, in place; None, and nothing changes, where tensor
    parallelism does not split the head, or only a part of it (adapters beside it that are not split alike). `head`: its
    FQN; empty: logits are to be whole."""
    if not head:
        return None
    parts = [part for part in module.get_submodule(head).modules() if isinstance(part, nn.Linear)]
    split = [part for part in parts if isinstance(part, ColwiseLinear)]
    widths = {part.widths for part in split}
    # With LoRA beside it a head is the sum of its layer and an adapter's B, which reads what A, a narrow one, gives.
    summed = [part for part in parts if split and part.out_features == split[0].out_features]
    if len(widths) != 1 or len(summed) != len(split):
        return None
    (width,) = widths
    if width is None:
        return None
    for part in split:
        part.widths = None
    return VocabularyShards(split[0].group, width)


def cross_entropy_with_gradient(
    logits: Tensor, targets: Tensor, shards: VocabularyShards | None, out: Tensor | None
) -> Tensor:
    """The summed cross-entropy of logits `[targets, width]`, without a graph; 0 without any.

    Args:
        targets: true tokens, int64 `[targets]`. With one that is outside of a vocabulary in shares it is nan.
        shards: then logits are this rank's share, and the loss is equal on every rank.
        out: for its gradient by the logits, whose place it may take; None: there is none.
    """
    logits = logits.detach()
    if shards is not None:
        return _of_shares(logits, targets, shards, out)
    losses = []
    for rows in _chunks(len(logits), _TENSORS * logits.shape[1]):
        part = logits[rows].requires_grad_(out is not None)
        with torch.set_grad_enabled(out is not None):
            loss = cross_entropy(part.to(raised(part.dtype)), targets[rows], reduction="sum")
        if out is not None:
            (out[rows],) = torch.autograd.grad(loss, [part])
        losses.append(loss.detach())
    return torch.stack(losses).sum() if losses else logits.new_zeros((), dtype=raised(logits.dtype))


_TENSORS = 4  # in fp32, as large as logits, that torch's cross-entropy makes for a gradient, one after the other


def _of_shares(logits: Tensor, targets: Tensor, shards: VocabularyShards, out: Tensor | None) -> Tensor:
    """Half precision is raised to fp32, some rows at a time. Nothing waits for the device."""
    dtype, (count, width) = raised(logits.dtype), logits.shape
    place = targets - shards.start  # in this rank's share, if it is its own
    own = (place >= 0) & (place < width)
    place = place.clamp(0, max(width - 1, 0))[:, None]
    largest = logits.amax(-1).to(dtype) if width else logits.new_full((count,), -torch.inf, dtype=dtype)
    if count:
        collective(dist.all_reduce, largest, dist.ReduceOp.MAX, group=shards.group)
    sums = logits.new_zeros(2, count, dtype=dtype)  # of exponentials, and the logit of the target
    if width:
        for rows in _chunks(count, width):
            sums[0, rows] = (logits[rows] - largest[rows, None]).exp_().sum(-1)
        sums[1] = torch.where(own, logits.gather(-1, place)[:, 0].to(dtype) - largest, 0)
    nobodys = (targets < 0) | (targets >= sum(shards.widths))
    sums[1].masked_fill_(nobodys, torch.nan)  # 0 would pass for its logit
    if count:
        collective(dist.all_reduce, sums, group=shards.group)
    log_sums = sums[0].log()
    loss = (log_sums - sums[1]).sum()
    if out is None or not width:
        return loss
    for rows in _chunks(count, width):
        part = (logits[rows] - (largest + log_sums)[rows, None]).exp_()  # of half precision and fp32: fp32
        part.scatter_add_(-1, place[rows], -own[rows, None].to(part.dtype))
        out[rows] = part
        del part  # or the next would be made beside it
    return loss


def raised(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a loss of logits in `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _chunks(count: int, width: int) -> Iterator[slice]:
    step = max(CHUNK // width, 1)
    return (slice(first, first + step) for first in range(0, count, step))
