"""A recipe on ranks that are forked from this process, whose imports and caches they have: a second instead of many."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

WAIT = timedelta(minutes=30)
"""Longer than a class may take, so that its own limit is the one that counts."""


def run_on_ranks(recipe: Any, steps: int, size: int, lr: float) -> list[Any]:
    """`hetmesh.testing.parity.run` on so many ranks. Raises RuntimeError: a rank failed; with what it said."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        ranks = [
            context.Process(target=_rank, args=(rank, size, recipe, steps, lr, Path(folder) / "store", pipes[rank][1]))
            for rank in range(size)
        ]
        for process, (_, theirs) in zip(ranks, pipes, strict=True):
            process.start()
            theirs.close()
        try:
            answers = []
            for rank, (ours, _) in enumerate(pipes):
                done, value = pickle.loads(ours.recv_bytes()) if ours.poll(WAIT.seconds) else (False, "no answer")
                if not done:
                    raise RuntimeError(f"rank {rank}: {value}")
                answers.append(value)
            return answers
        finally:
            for process in ranks:
                process.kill()
                process.join()


def in_a_fork(function: Callable[[], Any]) -> Any:
    """What it gives in a process that is forked from this one, which then has not computed backwards itself and can be
    forked again. Raises RuntimeError: it fails; with what it said."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def call() -> None:
        try:
            answer = (True, function())
        except BaseException as error:
            answer = (False, f"{type(error).__name__}: {' '.join(str(error).split())}")
        theirs.send(answer)
        os._exit(0)

    process = context.Process(target=call)
    process.start()
    theirs.close()
    try:
        done, value = ours.recv()
    except EOFError:
        done, value = False, "the process died"
    finally:
        process.join()
    if not done:
        raise RuntimeError(value)
    return value


def _rank(rank: int, size: int, recipe: Any, steps: int, lr: float, store: Path, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    from hetmesh._torch_compat import one_gloo_device
    from hetmesh.boundary import World
    from hetmesh.testing.parity import run

    torch.set_num_threads(1)
    try:
        with one_gloo_device():
            dist.init_process_group(
                "gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size, timeout=WAIT
            )
        answer = (True, run(recipe, World.current(), steps, lr=lr))
    except BaseException as error:
        if os.environ.get("SHOW_TRACEBACK"):
            traceback.print_exception(error)
        answer = (False, f"{type(error).__name__}: {' '.join(str(error).split())}")
    pipe.send_bytes(pickle.dumps(answer))
    os._exit(0)
