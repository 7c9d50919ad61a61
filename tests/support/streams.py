"""An asynchronous accelerator that is a CPU: it runs everything at once, and finds what streams would have got wrong.

`StreamedCpu` is handed to a `World`, or put into one by `streamed`. While it is in use every operation of this thread
counts as queued on the current stream, and each access to a storage is compared with those of other streams that
nothing orders before it (vector clocks, as in torch.cuda._sanitizer). Memory that is given back while another stream
than the one it belongs to may still read it is found too: nobody told `used_by`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from hetmesh._torch_compat import TorchDispatchMode, without_modes
from hetmesh.boundary import World
from hetmesh.boundary.accelerator import Accelerator

_Clock = dict[int, int]
"""Per stream, up to which of its operations all are done."""


@dataclass
class _Accesses:
    """Who used a storage last: the stream that it belongs to, its last write, and the last read on each stream."""

    ref: StorageWeakRef
    home: int
    write: tuple[int, int]
    reads: _Clock = field(default_factory=dict)
    kept_for: set[int] = field(default_factory=set)


class Races(TorchDispatchMode):
    """What is queued on which stream while it is entered.

    Attributes:
        found: in words, what nothing orders.
        host_waits: how often the host has waited for the device.
        used: streams on which anything was queued.
        urgent: streams of high priority.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.host_waits = 0
        self.used: set[int] = set()
        self.urgent: set[int] = set()
        self.current = 0
        self.clocks: list[_Clock] = [{}]
        self._storages: dict[int, _Accesses] = {}
        self._foreign: dict[int, _Accesses] = {}  # of these, those that several streams have used
        self._freed: list[_Accesses] = []  # whose memory the next storage of their stream may take

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, kwargs = func._schema, kwargs or {}
        given = [*_tensors((*args, *kwargs.values()))]
        before = {self._key(t) for t in given}
        result = func(*args, **kwargs)
        writes_arguments = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        if any(r.alias_info is not None for r in schema.returns) and not writes_arguments:
            return result  # a view: nothing is queued
        self._free()
        self._tick()
        collective = func.namespace == "c10d" and "send" not in schema.name
        written = {self._key(t) for t in given} if collective else self._written(schema, args, kwargs)
        for tensor in given:
            self._access(func, tensor, self._key(tensor) in written)
        for tensor in _tensors(result):
            if self._key(tensor) not in before:
                self._access(func, tensor, True)
        return result

    def new_stream(self) -> int:
        """The number of one more."""
        self.clocks.append({})
        return len(self.clocks) - 1

    def wait(self, stream: int, clock: _Clock) -> None:
        """What comes on `stream` from here on is behind `clock`."""
        for other, tick in clock.items():
            self.clocks[stream][other] = max(self.clocks[stream].get(other, 0), tick)

    def wait_on_host(self, clock: _Clock) -> None:
        """What comes on any stream from here on is."""
        self.host_waits += 1
        for stream in range(len(self.clocks)):
            self.wait(stream, clock)

    def copied(self, tensor: Tensor) -> None:
        """A host's tensor, copied on the current stream."""
        self._tick()
        self._access("copy", tensor, True)

    def keep(self, tensor: Tensor, stream: int) -> None:
        """`stream` has said that it uses `tensor`."""
        if (known := self._storages.get(self._key(tensor))) is not None:
            known.kept_for.add(stream)

    def _tick(self) -> None:
        own = self.clocks[self.current]
        own[self.current] = own.get(self.current, 0) + 1
        self.used.add(self.current)

    def _access(self, func: object, tensor: Tensor, write: bool) -> None:
        key, stream = self._key(tensor), self.current
        now = (stream, self.clocks[stream][stream])
        known = self._storages.get(key)
        if known is None:
            ref = StorageWeakRef(_local(tensor).untyped_storage())
            self._storages[key] = _Accesses(ref, stream, now if write else (stream, 0))
            self._take_memory()
            return
        for other, tick in [known.write, *(known.reads.items() if write else ())]:
            if other != stream and self.clocks[stream].get(other, 0) < tick:
                does = "writes" if write else "reads"
                self.found.append(f"{func} on stream {stream} {does} {tuple(tensor.shape)} in use on stream {other}")
        if write:
            known.write, known.reads = now, {}
        else:
            known.reads[stream] = now[1]
        if stream != known.home:
            self._foreign[key] = known

    def _free(self) -> None:
        """Look at storages that are gone by now."""
        for key, known in list(self._foreign.items()):
            if known.ref.expired():
                del self._foreign[key], self._storages[key]
                self._freed.append(known)

    def _take_memory(self) -> None:
        """The current stream takes memory: it may be any that was its own before."""
        own = self.clocks[self.current]
        for known in [each for each in self._freed if each.home == self.current]:
            self._freed.remove(known)
            for other, tick in [known.write, *known.reads.items()]:
                if other not in {known.home, *known.kept_for} and own.get(other, 0) < tick:
                    self.found.append(f"memory of stream {known.home} is taken again while stream {other} uses it")

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return int(_local(tensor).untyped_storage()._cdata)

    def _written(self, schema: Any, args: Any, kwargs: Any) -> set[int]:
        named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        changed = [named.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        return {self._key(t) for t in _tensors(changed)}


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those of an operation's arguments or results, which are tensors or lists of them; `tree_leaves` takes longer."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _Stream:
    def __init__(self, races: Races, number: int) -> None:
        self.races, self.number = races, number
        self._before: list[int] = []

    def wait_event(self, event: _Event) -> None:
        self.races.wait(self.number, event.clock)

    def __enter__(self) -> None:
        self._before.append(self.races.current)
        self.races.current = self.number

    def __exit__(self, *_: object) -> None:
        self.races.current = self._before.pop()


class _Event:
    def __init__(self, races: Races) -> None:
        self.races = races
        self.clock: _Clock = {}

    def record(self) -> None:
        self.clock = dict(self.races.clocks[self.races.current])

    def synchronize(self) -> None:
        self.races.wait_on_host(self.clock)

    def elapsed_time(self, other: _Event) -> float:
        """Operations in between, on all streams."""
        return float(sum(other.clock.values()) - sum(self.clock.values()))


@dataclass(frozen=True)
class StreamedCpu(Accelerator):
    """A CPU whose host must not wait for it.

    Attributes:
        races: what it has been asked for.
    """

    races: Races = field(default_factory=Races, compare=False)

    @property
    def asynchronous(self) -> bool:
        return True

    def pinned(self, tensor: Tensor) -> Tensor:
        with without_modes():  # the host's affair; what it gives stands for the copy on the device as well
            copied = tensor.clone()
        self.races.copied(copied)
        return copied

    def stream(self, *, high_priority: bool = False) -> _Stream:
        stream = _Stream(self.races, self.races.new_stream())
        self.races.urgent |= {stream.number} if high_priority else set()
        return stream

    def current_stream(self) -> _Stream:
        return _Stream(self.races, self.races.current)

    def on(self, stream: Any) -> Any:
        return stream

    def event(self, *, timing: bool = False) -> _Event:
        return _Event(self.races)

    def used_by(self, tensor: Tensor, stream: Any) -> None:
        self.races.keep(tensor, stream.number)

    def synchronize(self) -> None:
        self.races.wait_on_host({stream: ticks.get(stream, 0) for stream, ticks in enumerate(self.races.clocks)})


@contextmanager
def streamed(world: World) -> Iterator[Races]:
    """Inside, `world` computes on a `StreamedCpu`, and ranks share no memory; jobs are built there. Collective."""
    world.connect()
    accelerator, before = StreamedCpu(world.device), (world.accelerator, world.local_peers)
    world.accelerator, world.local_peers = accelerator, None
    try:
        with accelerator.races:
            yield accelerator.races
    finally:
        world.accelerator, world.local_peers = before
