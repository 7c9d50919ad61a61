"""What held the host up in a profiler's trace: a pure function of its events (Chrome's format, as Kineto writes it)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]

CALLS = ("cuda_runtime", "cuda_driver")
"""Categories of what the host calls."""
WAITS = (
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemset"),
    *("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "cudaFree", "cudaFreeHost"),
)
"""Calls of the runtime or driver that return when the device has done something. Freeing waits for all of it."""
COPIES = ("cudaMemcpyAsync", "cuMemcpyAsync", "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2")
"""Calls that wait only if the memory on the host is not pinned."""
PREPARES = ("cudaMalloc", "cudaHostAlloc", "cuMemCreate", "cuMemMap")
"""Calls that take long and end when memory is warm: counted, and no wait."""
READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero")
"""Operations that read a tensor on the host, on whatever device it lies."""


@dataclass(frozen=True, order=True)
class Block:
    """Calls of one kind from one place.

    Attributes:
        where: the innermost function of hetmesh that was running, `file(line of its def): name`, else the innermost of
            all; in a backward the operation whose gradient it is.
    """

    call: str
    where: str
    count: int


@dataclass(frozen=True)
class Span:
    """A marked part of the trace: what ran on one thread from `start` to `stop`, in microseconds."""

    thread: object
    start: float
    stop: float

    @classmethod
    def of(cls, events: Iterable[Event], name: str) -> Span:
        """That of `record_function(name)`. Raises ValueError unless there is one."""
        found = [e for e in events if e.get("cat") == "user_annotation" and e.get("name") == name]
        if len(found) != 1:
            raise ValueError(f"the trace has {len(found)} spans {name!r}, one is expected")
        return cls(found[0]["tid"], found[0]["ts"], found[0]["ts"] + found[0]["dur"])

    def holds(self, event: Event) -> bool:
        """Whether it began inside, on any thread."""
        return self.start <= event["ts"] < self.stop


def blocks(events: Sequence[Event], span: Span) -> list[Block]:
    """Calls inside `span` that made the host wait for the device, in its thread and in those of backwards."""
    threads = _working(events, span)
    unpinned = {
        e["args"]["correlation"]
        for e in events
        if e.get("cat") == "gpu_memcpy" and ("DtoH" in e["name"] or "HtoD" in e["name"]) and "Pageable" in e["name"]
    }
    calls = [e for e in events if e.get("cat") in CALLS and e["tid"] in threads and span.holds(e)]
    waits = [(e["name"], e) for e in calls if e["name"] in WAITS]
    copies = [e for e in calls if e["name"] in COPIES and e["args"].get("correlation") in unpinned]
    # torch's blocking copy is a copy and a wait, in one operation: one block.
    operations = [_operation(events, e) for _, e in waits]
    alone = [e for e in copies if (operation := _operation(events, e)) is None or operation not in operations]
    return _by_place(events, [*waits, *((f"{e['name']} of memory that is not pinned", e) for e in alone)])


def launches(events: Sequence[Event], span: Span) -> int:
    """Kernels that were launched inside `span`: a trace without any has not seen the device."""
    return sum(e.get("cat") in CALLS and "Launch" in e["name"] and span.holds(e) for e in events)


def _operation(events: Sequence[Event], call: Event) -> Event | None:
    """The innermost operation in which `call` was made."""
    found = [e for e in events if e.get("cat") == "cpu_op" and e["tid"] == call["tid"] and _around(e, call)]
    return max(found, key=lambda e: e["ts"], default=None)


def _around(outer: Event, call: Event) -> bool:
    return outer["ts"] <= call["ts"] < outer["ts"] + outer["dur"]


def reads(events: Sequence[Event], span: Span) -> list[Block]:
    """Operations inside `span` that read a tensor on the host, on any device."""
    threads = _working(events, span)
    found = [e for e in events if e.get("cat") == "cpu_op" and e["name"] in READS]
    return _by_place(events, [(e["name"], e) for e in found if e["tid"] in threads and span.holds(e)])


def prepared(events: Sequence[Event], span: Span) -> int:
    """Calls inside `span` that took new memory from the device or pinned some."""
    return sum(e.get("cat") in CALLS and e["name"] in PREPARES and span.holds(e) for e in events)


def _working(events: Iterable[Event], span: Span) -> set[object]:
    """The thread of `span`, and those in which autograd works for it. Others (a watchdog, a loader) may wait."""
    engine = {e["tid"] for e in events if e.get("cat") == "cpu_op" and e["name"].startswith("autograd::engine::")}
    return {span.thread, *engine}


def _by_place(events: Sequence[Event], calls: Sequence[tuple[str, Event]]) -> list[Block]:
    around = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("python_function", "cpu_op")]
    counts = Counter((call, _place(around, e)) for call, e in calls)
    return sorted(Block(call, where, count) for (call, where), count in counts.items())


def _place(around: Sequence[Event], call: Event) -> str:
    """Where a call came from; the functions around it lie on its thread and begin before it and end behind it."""
    open_ = [e for e in around if e["tid"] == call["tid"] and _around(e, call)]
    open_.sort(key=lambda e: e["ts"])
    files = [e["name"] for e in open_ if e["cat"] == "python_function" and not e["name"].startswith("<")]
    ours = [name for name in files if "hetmesh/" in name]
    backward = [e["name"] for e in open_ if e["name"].startswith("autograd::engine::evaluate_function: ")]
    if backward:
        return f"backward of {backward[-1].partition(': ')[2]}"
    return _shortened((ours or files or ["(unknown)"])[-1])


def _shortened(name: str) -> str:
    """From the package on."""
    at = name.rfind("hetmesh/")
    return name[max(at, 0) :]
