"""A recipe on ranks that are forked from this process, whose imports and caches they have: a second instead of many."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
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
        answer = (True, run(recipe, World.current(), steps, lr))
    except BaseException as error:
        if os.environ.get("SHOW_TRACEBACK"):
            traceback.print_exception(error)
        answer = (False, f"{type(error).__name__}: {' '.join(str(error).split())}")
    pipe.send_bytes(pickle.dumps(answer))
    os._exit(0)
