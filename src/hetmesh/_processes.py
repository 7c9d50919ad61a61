"""What concerns a process as a whole: no thread at a fork, no worker that outlives its parent, garbage collection."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1  # prctl's


def threads(pid: int | None = None) -> int:
    """Threads of a process (this one by default), those that libraries started too; at least 1.

    A fork copies one thread and every lock: a lock that another thread held stays locked for ever in the child.
    """
    mine = threading.active_count() if pid is None else 1
    try:
        return max(mine, len(os.listdir(f"/proc/{'self' if pid is None else pid}/task")))
    except OSError:  # no Linux
        return mine


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """In the body torch computes in one thread, as each rank of a run on one machine does, and starts no others."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def no_blas_threads() -> Iterator[None]:
    """OpenBLAS starts a thread per core when numpy is first imported; where that happens in the body, it does not."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For bodies that make many objects of which none is garbage: each collection goes through all that the process
    has, which takes a quarter of the time of importing torch and transformers, and a fifth of a search."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def die_with_parent(parent: int) -> None:
    """End this process (SIGKILL) when process `parent`, which started it, ends in whatever way. Linux; else nothing."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
