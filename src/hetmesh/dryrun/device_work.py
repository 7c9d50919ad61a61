"""DeviceWork: what a step gives the device to do, action by action: bytes alive, kernels, FLOPs, collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from hetmesh._torch_compat import FakeTensorMode, tree_leaves
from hetmesh.dryrun.fake_autocast import NAME
from hetmesh.dryrun.host_waits import HostWaits
from hetmesh.runtime.live_bytes import LiveBytes

BEFORE, BEHIND = "before", "behind"
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
        """Both."""
        self.kernels += other.kernels
        self.flops += other.flops
        self.collectives += other.collectives
        self.collective_bytes += other.collective_bytes


_MAKERS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_", "set_", "lift_fresh"}


class DeviceWork(LiveBytes):
    """A `LiveBytes` of the fake device that also knows what else it was given to do.

    Enter it with `FakeTensors`, whose `observe` is `note`.

    Args:
        fake: the mode of what is alive on the device. DTensor works out shapes with tensors of other modes, which have
            the device and the size of the whole, and no memory on any device.

    Attributes:
        by_action: per label of a span, and `BEFORE` and `BEHIND` for what is in none, its work.
    """

    def __init__(self, waits: HostWaits, fake: FakeTensorMode) -> None:
        super().__init__(device=NAME)
        self.waits, self.fake = waits, fake
        self.by_action: dict[object, WorkCount] = {}
        self._label: object = BEFORE
        self._kinds: dict[Any, bool] = {}

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
            self._begin(BEHIND if before == BEFORE else before)

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation on the device."""
        work = self.by_action.setdefault(self._label, WorkCount())
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            if "wait" not in func.__name__:
                work.collectives += 1
                sizes = [_bytes(each) for each in (args, out)]
                work.collective_bytes += max(sizes) if func.namespace != "c10d" else _largest(args)
            return
        known = self._kinds.get(func)
        if known is None:
            name = func._schema.name.partition("::")[2]
            known = self._kinds[func] = not (func.is_view or name in _MAKERS or name in ("detach", "alias"))
        if not known:
            return
        work.kernels += 1
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            work.flops += int(count(*args, **kwargs, out_val=out))


def _bytes(values: Any) -> int:
    return sum(x.nbytes for x in tree_leaves(values) if isinstance(x, Tensor))


def _largest(args: Any) -> int:
    """The larger of what a collective reads and what it writes."""
    return max((_bytes(each) for each in args), default=0)
