"""Payloads loaded by worker processes ahead of need, and handed over in shared memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hetmesh._processes import die_with_parent, threads
from hetmesh._torch_compat import shared_buffer
from hetmesh.data.payloads import Payload, Payloads, SplitSources, Unreadable, Wanted
from hetmesh.data.source import Sample
from hetmesh.errors import LoaderError

POLL_SECONDS = 1.0
"""Between two looks at whether a worker still lives, or has been at one sample for too long."""

START_SECONDS = 60.0
"""That worker processes may take to begin with a first sample."""

IDLE = -1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_DEAD = "a process that loads samples has died"
_DIED, _SLOW = "DataLoader worker", "DataLoader timed out"  # how torch's messages begin


class InWorkers(Payloads):
    """Loads in `count` worker processes of a torch DataLoader, each with up to `prefetch` requests ahead of need.

    Workers are forked from this process if it has but one thread (so they share what it has imported and its sources),
    else from a fork server, which never had any: no lock of another thread is ever copied.

    Args:
        timeout: seconds that one sample may take.

    Raises:
        LoaderError: a worker has died, or took too long; from `get` too.
    """

    def __init__(self, sources: SplitSources, count: int, prefetch: int = 2, timeout: float = 100.0) -> None:
        super().__init__(sources)
        self.timeout = timeout
        self._more: Callable[[], None] = lambda: None
        self._waiting: deque[Sequence[Wanted]] = deque()  # for a worker
        self._known: Counter[Wanted] = Counter()  # announced and not yet handed out -> how often
        self._ready: dict[Wanted, list[Payload]] = {}
        method = "fork" if threads() == 1 and sys.platform == "linux" else "forkserver"
        if method == "forkserver":
            torch.multiprocessing.get_context(method).set_forkserver_preload([__name__])
        # What each worker is loading: number of the split, index of the sample, IDLE between two.
        self._at = torch.full((count, 2), IDLE, dtype=torch.int64).share_memory_()
        loader: DataLoader[Any] = DataLoader(
            _Requests(sources, self._at),
            batch_size=None,
            sampler=iter(self._next, None),  # without end
            num_workers=count,
            prefetch_factor=prefetch,
            collate_fn=_identity,
            timeout=POLL_SECONDS,
            worker_init_fn=partial(_begin, os.getpid() if method == "fork" else None),
            multiprocessing_context=method,
            generator=torch.Generator(),  # so that what is random in training does not depend on workers
        )
        # What is here now stays: collections that go through it take as long as many samples, and unshare its memory.
        self._froze = not gc.get_freeze_count()
        gc.freeze()
        self._results: Iterator[tuple[Sequence[Wanted], Tensor, list[Any]]]
        try:
            with _own_sigchld():
                self._results = iter(loader)
        except (RuntimeError, ConnectionError, EOFError) as error:
            self._unfreeze()
            if isinstance(error, RuntimeError) and not str(error).startswith(_DIED):
                raise
            raise LoaderError(f"{_DEAD} while it was started: {_reason(error)}") from error

    def announce(self, requests: Sequence[Sequence[Wanted]]) -> None:
        """Load these, a request by one worker, as workers have time."""
        for request in requests:
            self._waiting.append(tuple(request))
            self._known.update(request)

    def when_idle(self, more: Callable[[], None]) -> None:
        """Call `more` when nothing waits for a worker."""
        self._more = more

    def get(self, wanted: Sequence[Wanted]) -> list[Payload]:
        """Wait until all of these are loaded. What was not announced is loaded next."""
        # (not Counter's -, which goes through all that is known)
        missing = tuple(request for request, n in Counter(wanted).items() for _ in range(n - self._known[request]))
        if missing:
            self._waiting.appendleft(missing)
            self._known.update(missing)
        return [self._take(request) for request in wanted]

    def _next(self) -> Sequence[Wanted]:
        """What the DataLoader sends to a worker next; nothing if there is nothing to load yet."""
        if not self._waiting:
            self._more()
        return self._waiting.popleft() if self._waiting else ()

    def _take(self, wanted: Wanted) -> Payload:
        since, seen = time.monotonic(), self._at.clone()
        while wanted not in self._ready:
            try:
                request, buffer, parts = next(self._results)
            except RuntimeError as error:
                if str(error).startswith(_DIED):
                    raise LoaderError(self._dead(error)) from error
                if not str(error).startswith(_SLOW):
                    raise
                if not torch.equal(seen, self._at):
                    since, seen = time.monotonic(), self._at.clone()
                # A process that starts on a busy machine may take longer.
                limit = self.timeout if torch.any(self._at != IDLE) else max(self.timeout, START_SECONDS)
                if time.monotonic() - since >= limit:
                    raise LoaderError(
                        f"loading {self._loading()} did not finish within {limit:g} s (worker processes of "
                        "[data] num_workers)"
                    ) from error
                continue
            except (ConnectionError, EOFError) as error:  # it had answered, and died before its memory was handed over
                raise LoaderError(self._dead(error)) from error
            since, seen = time.monotonic(), self._at.clone()
            for loaded, payload in zip(request, unpacked(buffer, parts), strict=True):
                self._ready.setdefault(loaded, []).append(payload)
        payload = self._ready[wanted].pop()
        if not self._ready[wanted]:
            del self._ready[wanted]
        self._known[wanted] -= 1
        if not self._known[wanted]:
            del self._known[wanted]
        return payload

    def _loading(self) -> str:
        busy = [(self.sources.splits[split], index) for split, index in self._at.tolist() if index != IDLE]
        return ", ".join(f"sample {self._name(split, index)!r}" for split, index in busy) or "nothing"

    def _name(self, split: str, index: int) -> str:
        try:
            return self.sources[split].meta(index).id
        except Exception:  # that the sample is broken may be why
            return f"number {index} of {split}"

    def _dead(self, error: BaseException) -> str:
        return f"{_DEAD} while it was at {self._loading()}: {_reason(error)}"

    def __exit__(self, *_: object) -> None:
        del self._results  # which ends the workers
        self._unfreeze()

    def _unfreeze(self) -> None:
        if self._froze:
            gc.unfreeze()


def _reason(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].removeprefix("DataLoader ")


class _Requests(Dataset[Any]):
    """What a worker does with a request: load its samples and lay them into one buffer of shared memory."""

    def __init__(self, sources: SplitSources, at: Tensor) -> None:
        self.sources, self.at = sources, at

    def __getitem__(self, request: Sequence[Wanted]) -> tuple[Sequence[Wanted], Tensor, list[Any]]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        mine, payloads = self.at.numpy()[info.id], []  # whose dispatch costs less than that of tensors
        for wanted in request:
            if self.sources.made(wanted.split) is None:
                self.sources[wanted.split]
                gc.freeze()  # as in the main process
            mine[0] = self.sources.splits.index(wanted.split)
            mine[1] = wanted.index
            payloads.append(self.sources.load(wanted))
        mine[1] = IDLE
        try:
            return request, *packed(payloads)
        except OSError as error:
            raise LoaderError(f"no shared memory for the next {len(request)} samples: {error}") from error


def _begin(parent: int | None, worker: int) -> None:
    """Before a worker's first request; `parent` is the process that forked it, None if a fork server did."""
    if parent is not None:  # else torch looks now and then whether the server is still there, which ends with us
        die_with_parent(parent)
    # What is sent to the whole group (Ctrl-C, SIGTERM by torchrun and Slurm) is the trainer's to handle: it ends its
    # step, for which it may need another sample, saves, and ends its workers.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.excepthook = _without_lost_connections
    _keep_memory()


def _without_lost_connections(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print what the thread that hands tensors over could not handle, but for a connection that the trainer left: it
    was killed, which its launcher reports."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)


def _keep_memory() -> None:
    """Let this process's allocator keep what one image needed for the next, instead of taking new pages each time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; mallopt(3) has the numbers
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that it takes
        mallopt(_M_TRIM_THRESHOLD, 256 << 20)


@contextlib.contextmanager
def _own_sigchld() -> Iterator[None]:
    """Keep torch from handling SIGCHLD after the body: it raises wherever this process happens to be when a worker
    dies, in the middle of a collective, say. `get` finds out within a second, and knows at which sample it was."""
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, before)


def _identity(request: Any) -> Any:
    return request


_ALIGNMENT = 64


def packed(payloads: Sequence[Payload]) -> tuple[Tensor, list[Any]]:
    """Payloads as one buffer, uint8 `[bytes]`, and what lies where: a file descriptor per request, not per tensor.

    Items of a kind lie right after one another, as tensors of units by one name, so that a batch of them can be a view.
    """
    pieces: list[tuple[int, Tensor]] = []
    size, last = 0, None

    def lay(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], int]:
        nonlocal size, last
        start = size if tensor.dtype == last else -(-size // _ALIGNMENT) * _ALIGNMENT
        size, last = start + tensor.nbytes, tensor.dtype
        pieces.append((start, tensor))
        return tensor.dtype, tuple(tensor.shape), start

    samples = [payload for payload in payloads if not isinstance(payload, Unreadable)]
    kinds = dict.fromkeys(kind for sample in samples for kind in sample.media)
    media = [item for kind in kinds for sample in samples for item in sample.media.get(kind, ())]
    keys = dict.fromkeys((kind, key) for sample in samples for kind, unit in sample.units.items() for key in unit)
    units = [s.units[kind][key] for kind, key in keys for s in samples if key in s.units.get(kind, ())]
    values = [value for sample in samples for value in sample.values.values()]
    laid = {id(t): lay(t) for t in [*(sample.tokens for sample in samples), *media, *units, *values]}
    parts = [_with(p, lambda t: laid[id(t)]) if isinstance(p, Sample) else p for p in payloads]
    return shared_buffer(size, pieces), parts


def unpacked(buffer: Tensor, parts: Sequence[Any]) -> list[Payload]:
    """The payloads of `packed`; their tensors lie in the buffer."""

    def at(dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        return buffer[start : start + count].view(dtype).view(shape)

    return [_with(part, lambda laid: at(*laid)) if isinstance(part, Sample) else part for part in parts]


def _with(sample: Sample, use: Callable[[Any], Any]) -> Sample:
    """`sample` with what `use` makes of each tensor."""
    media = {kind: tuple(map(use, items)) for kind, items in sample.media.items()}
    units = {kind: {key: use(t) for key, t in unit.items()} for kind, unit in sample.units.items()}
    values = {name: use(value) for name, value in sample.values.items()}
    return replace(sample, tokens=use(sample.tokens), media=media, units=units, values=values)
