"""InFlight: a dispatch mode that sees every operation, and knows which bytes are in flight.

The rules of buffers: until somebody has waited, what is being received may not be touched, and what is being sent may
only be read. After a wait the first operation that touches a buffer makes the host wait for it, as a stream would.
Views are not touches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from hetmesh._torch_compat import FakeTensor, TorchDispatchMode, tree_leaves
from hetmesh.testing.emulated_queue import Batch, EmulatedError

# They take shape and type of a tensor, and not what is in it.
_SHAPES = ("empty_like", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "zeros_like")
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_EQUAL_SIZES = ("allreduce", "all_reduce", "allgather", "all_gather", "reduce_scatter", "broadcast", "_reduce_scatter")

Collectives = dict[str, list[str]]
"""Per process group, by name, the collectives of this rank in order."""
Launch = tuple[str, str, Sequence[Sequence[int]]]
"""A batch: what it is, its communicator, and its messages: the peer, and 1 where it is sent to."""
_Message = tuple[str, int, int, int]  # communicator, sender, receiver, number among those


class InFlightWork(Protocol):
    """What is known of a work."""

    batch: Batch
    waited: bool

    def deliver(self) -> None:
        """Block until it is over and put what came in place."""


@dataclass(eq=False)
class _Region:
    """Contiguous bytes in flight, of one storage."""

    start: int
    stop: int
    sends: bool
    work: InFlightWork


class InFlight(TorchDispatchMode):
    """See above. Enter it around a step; `watching`: whether it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.watching = False
        self._regions: dict[int, list[_Region]] = {}  # by the address of the storage, which the work keeps alive
        self._collectives: Collectives = {}

    def __enter__(self) -> Any:
        self.watching = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.watching = False
        super().__exit__(*error)

    def add(self, work: InFlightWork) -> None:
        """The buffers of `work` are in flight from here on."""
        for part in work.batch.parts:
            if part.buffer.numel():
                start = int(part.buffer.storage_offset()) * part.buffer.itemsize
                region = _Region(start, start + part.buffer.nbytes, part.sends, work)
                self._regions.setdefault(_storage(part.buffer), []).append(region)

    def remove(self, work: InFlightWork) -> None:
        """They are not any more."""
        for part in work.batch.parts:
            key = _storage(part.buffer)
            left = [region for region in self._regions.get(key, []) if region.work is not work]
            self._regions[key] = left
            if not left:
                del self._regions[key]

    def take_collectives(self) -> Collectives:
        """What was seen since the last call."""
        seen, self._collectives = self._collectives, {}
        return seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not Tensor and kind is not nn.Parameter for kind in types):
            if any(issubclass(kind, FakeTensor) for kind in types):
                return func(*args, **(kwargs or {}))  # shapes alone: DTensor works out what an operation gives
            return NotImplemented  # it comes again, with what is inside
        kwargs = kwargs or {}
        if func.namespace in _COLLECTIVES:
            self._note(func, args, kwargs)
        if self._regions and func._schema.name.removeprefix("aten::") not in _SHAPES:
            self._check(func, args, kwargs)
        return func(*args, **kwargs)

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for tensor, writes in _touched(func, args, kwargs):
            for region in tuple(self._regions.get(_storage(tensor), ())):
                if (region.sends and not writes) or not _overlap(tensor, region):
                    continue
                if not region.work.waited:
                    does = "writes to" if writes else "reads"
                    what = "is being sent" if region.sends else "has not come yet"
                    raise EmulatedError(
                        f"{func._schema.name} {does} a buffer that {what}: {region.work.batch} was posted, and nobody "
                        "has waited for it"
                    )
                region.work.deliver()

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        name = func._schema.name.split("::")[1].rstrip("_")
        if name in ("wait_tensor", "send", "recv", "recv_any_source", "barrier", "monitored_barrier"):
            return
        leaves = tree_leaves((args, kwargs))
        group = _group_name(func, args, kwargs)
        if group is None:
            return
        sizes = [leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)] if name.startswith(_EQUAL_SIZES) else []
        self._collectives.setdefault(group, []).append(f"{name}{sizes if sizes else ''}")


def compare_collectives(rank: int, seen: Mapping[int, Collectives]) -> None:
    """Raise EmulatedError if ranks of one group had different collectives in a step than `rank`, or in another order;
    `seen` are those of all ranks."""
    for name, mine in seen[rank].items():
        for other, theirs in ((other, groups[name]) for other, groups in seen.items() if name in groups):
            if mine == theirs:
                continue
            n = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            if n is None:
                difference = f"{len(mine)} collectives in the step, and rank {other} {len(theirs)}"
            else:
                difference = f"{mine[n]} as collective {n} of the step, and rank {other} {theirs[n]}"
            raise EmulatedError(f"process group {name}: rank {rank} had {difference}")


def stuck(launched: Mapping[int, Sequence[Launch]]) -> str:
    """Where ranks wait for each other in a circle, if each carries out its batches one after another; or nothing.

    On a device each communicator has a queue, and NCCL promises nothing of what is at the head of two queues ("Using
    multiple NCCL communicators concurrently" in its manual): kernels of one rank may hold the device until those of
    another rank begin, which wait there after others. So launches must also succeed one after another.

    Args:
        launched: per rank, its batches as launched. Messages of one communicator between two ranks match in order.
    """
    messages = {rank: list(_messages(rank, batches)) for rank, batches in launched.items()}
    at = dict.fromkeys(launched, -1)
    left: dict[int, set[_Message]] = {rank: set() for rank in launched}
    begun: dict[_Message, int] = {}  # by the rank that came to it first
    todo = deque(launched)
    while todo:
        rank = todo.popleft()
        while not left[rank] and at[rank] + 1 < len(messages[rank]):
            at[rank] += 1
            for message in messages[rank][at[rank]]:
                if message in begun:
                    peer = begun.pop(message)
                    left[peer].discard(message)
                    todo.append(peer)
                else:
                    begun[message] = rank
                    left[rank].add(message)
    waiting = {rank: min(messages) for rank, messages in left.items() if messages}
    if not waiting:
        return ""
    return ", ".join(
        f"rank {rank} stands at {launched[rank][at[rank]][0]} (communicator {message[0]}) and waits for rank "
        f"{message[2] if message[1] == rank else message[1]}"
        for rank, message in sorted(waiting.items())[:4]
    )


def _messages(rank: int, batches: Sequence[Launch]) -> list[set[_Message]]:
    counts: Counter[tuple[str, int, int]] = Counter()
    found = []
    for _, communicator, parts in batches:
        batch = set()
        for peer, sends in parts:
            way = (communicator, rank, peer) if sends else (communicator, peer, rank)
            batch.add((*way, counts[way]))
            counts[way] += 1
        found.append(batch)
    return found


def _touched(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """Tensors whose elements an operation reads or writes, and whether it writes."""
    arguments = func._schema.arguments
    given = [*zip(arguments, args, strict=False), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]
    for argument, value in given:
        alias = argument.alias_info
        if alias is not None and not alias.is_write:
            continue  # a view
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor) and tensor.numel():
                yield tensor, alias is not None


def _overlap(tensor: Tensor, region: _Region) -> bool:
    start, size = tensor.storage_offset(), tensor.itemsize
    last = start + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if start * size >= region.stop or (last + 1) * size <= region.start:
        return False
    if tensor.is_contiguous():
        return True
    offsets = np.array(start)
    for n, step in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + step * np.arange(n)
    return bool(np.any((offsets * size < region.stop) & ((offsets + 1) * size > region.start)))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _group_name(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "process_group":
            return str(dist.ProcessGroup.unbox(value).group_name)
        if argument.name == "group_name":
            return str(value)
    return str(kwargs["group_name"]) if "group_name" in kwargs else None
