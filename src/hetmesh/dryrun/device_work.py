"""DeviceWork: what a step gives the device to do, action by action: bytes alive, kernels, FLOPs, collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from hetmesh._torch_compat import FakeTensorMode, tree_leaves
from hetmesh.dryrun.fake_kernels import NAME
from hetmesh.dryrun.host_waits import HostWaits
from hetmesh.runtime.live_bytes import LiveBytes

BEFORE, AFTER = "before", "after"
"""The first action and the last one of a step."""


@dataclass
class WorkCount:
    """What the device does.

    Attributes:
        kernels: operations that compute or copy; one may be several launches.
        flops: of those that torch's `flop_counter` knows: products, convolutions, attention.
        collectives: operations of process groups, and of them `collective_bytes`, of the larger side of each.
    """

    kernels: int = 0
    flops: int = 0
    collectives: int = 0
    collective_bytes: int = 0

    def add(self, other: WorkCount) -> None:
        self.kernels += other.kernels
        self.flops += other.flops
        self.collectives += other.collectives
        self.collective_bytes += other.collective_bytes


_NO_KERNEL = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
_NO_KERNEL |= {"resize_", "set_", "lift_fresh", "detach", "alias"}


class DeviceWork(LiveBytes):
    """A `LiveBytes` of the fake device that counts other work, too. Enter it with a `FakeTensors` that calls `note`.

    Args:
        fake: the mode of tensors of the device (`LiveBytes.fake`).

    Attributes:
        by_action: work by label of a span, or `BEFORE` or `AFTER` outside of spans.
    """

    def __init__(self, waits: HostWaits, fake: FakeTensorMode) -> None:
        super().__init__(device=NAME)
        self.waits, self.fake = waits, fake
        self.by_action: dict[object, WorkCount] = {}
        self._label: object = BEFORE
        self._is_kernel: dict[Any, bool] = {}

    def restart(self) -> None:
        super().restart()
        self.by_action.clear()
        self.waits.counts.clear()
        self._begin(BEFORE)

    def _begin(self, label: object) -> None:
        self._label, self.waits.during = label, label

    @contextmanager
    def span(self, label: object) -> Iterator[None]:
        before = self._label
        self._begin(label)
        try:
            with super().span(label):
                yield
        finally:
            self._begin(AFTER if before == BEFORE else before)

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation on the device."""
        work = self.by_action.setdefault(self._label, WorkCount())
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            if "wait" not in func.__name__:
                work.collectives += 1  # the larger of what is read and what is written, both arguments in c10d
                work.collective_bytes += max(map(_bytes, args if func.namespace == "c10d" else (args, out)), default=0)
            return
        if func not in self._is_kernel:
            self._is_kernel[func] = not (func.is_view or func._schema.name.partition("::")[2] in _NO_KERNEL)
        if self._is_kernel[func]:
            work.kernels += 1
            if (flops := flop_registry.get(func.overloadpacket)) is not None:
                work.flops += int(flops(*_with_query_heads(func, args), **kwargs, out_val=out))


def _with_query_heads(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments with as many key and value heads as query heads: torch 2.11's formula of attention, unlike 2.13's,
    does not know grouped queries. FLOPs are the same."""
    if "scaled_dot_product" not in func.__name__:
        return args
    first = int("backward" in func.__name__)  # after the gradient
    query, *others = args[first : first + 3]
    key, value = (x.new_empty((*x.shape[:-3], query.shape[-3], *x.shape[-2:]), device="meta") for x in others)
    return [*args[:first], query, key, value, *args[first + 3 :]]


def _bytes(values: Any) -> int:
    return sum(x.nbytes for x in tree_leaves(values) if isinstance(x, Tensor))
