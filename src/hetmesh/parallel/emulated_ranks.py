"""Tensor parallelism of a small module within one process: a thread per rank, one graph for the backward of all.

It runs the layers of `linear.py`; what they ask of a process group is done among the threads. So a plan can be tried
before there are ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hetmesh.parallel.linear import ColwiseLinear, RowwiseLinear
from hetmesh.parallel.tensor_parallel import GRAD_ALLREDUCE

PATIENCE = 120.0
"""Seconds that ranks wait for each other."""

T = TypeVar("T")


class _Enter(torch.autograd.Function):
    """`collectives.enter`, of all ranks at once."""

    @staticmethod
    def forward(ctx: Any, *each: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in each)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        total = torch.stack(gradients).sum(0)
        return tuple(total for _ in gradients)


class _Leave(torch.autograd.Function):
    """`collectives.leave`."""

    @staticmethod
    def forward(ctx: Any, *summands: Tensor) -> tuple[Tensor, ...]:
        total = torch.stack(summands).sum(0)
        return tuple(total.clone() for _ in summands)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


class _Gather(torch.autograd.Function):
    """`collectives.gather`."""

    @staticmethod
    def forward(ctx: Any, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.widths = [shard.shape[-1] for shard in shards]
        whole = torch.cat(shards, -1)
        return tuple(whole.clone() for _ in shards)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.split(ctx.widths, -1)[rank] for rank, each in enumerate(gradients))


class Ranks:
    """The tensor parallel ranks of one forward."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._given: list[Any] = [None] * size
        self._found: tuple[Tensor, ...] = ()
        self._barrier = threading.Barrier(size, timeout=PATIENCE)

    def shard(self, module: nn.Module, styles: Mapping[str, str], rank: int) -> None:
        """Give linears of `module` their forward and this rank's share of their weights, in place.

        Args:
            styles: FQN -> style of `hetmesh.parallel.tensor_parallel`.
        """
        for name, style in styles.items():
            linear: Any = module.get_submodule(name)
            if style == GRAD_ALLREDUCE:
                continue
            if style == "rowwise":
                linear.__class__, linear.leave = RowwiseLinear, partial(self._meet, rank, _Leave)
            else:
                linear.__class__, linear.enter, linear.widths = ColwiseLinear, partial(self._meet, rank, _Enter), None
                if style == "colwise_gather_output":
                    linear.register_forward_hook(lambda _, __, output: self._meet(rank, _Gather, output))
            for key, dim in sharded_dims(style).items():
                if (whole := linear._parameters[key]) is not None:
                    linear._parameters[key] = nn.Parameter(share(whole.detach(), dim, rank, self.size), False)

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """What each rank's call returns.

        Raises:
            What the first of them raised.
        """
        with ThreadPoolExecutor(self.size) as threads:
            running = [threads.submit(self._one, call) for call in calls]
            errors = [error for each in running if (error := each.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        return [each.result() for each in running]

    def _one(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except BaseException:
            self._barrier.abort()  # so that nobody waits for this rank
            raise

    def _meet(self, rank: int, function: Any, x: Tensor) -> Tensor:
        self._given[rank] = x
        if self._barrier.wait() == 0:
            self._found = function.apply(*self._given)
        self._barrier.wait()
        return self._found[rank]


def share(whole: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """This rank's part of a sharded parameter; ranks beyond the last chunk have an empty one."""
    chunks = whole.chunk(size, dim)
    return chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)


def sharded_dims(style: str) -> dict[str, int]:
    """Parameters of a linear of `style` (empty: not in the plan) -> the dim that ranks share."""
    dims = {"rowwise": {"weight": 1}, GRAD_ALLREDUCE: {}, "": {}}
    return dims.get(style, {"weight": 0, "bias": 0})
