"""Another layout without a file, beside save, start and load: bytes, memory and time of `Job.relayout`.

A model of digits with wide layers goes around over two processes: FSDP, tensor parallel, two pipeline stages, one rank
alone, and back. On each way the state is first saved, then moved; then two new processes start in the new layout and
load what was saved, while the others wait. Of every time the slowest rank counts.

    bytes_over_bound  bytes that ranks received (communication log) over those that they hold in the new layout and did
                      not in the old one, counted from the intervals of both
    peak              most bytes of tensors on a rank while it moves over the larger of its two shares, worst way
    peak_resident     the same by what the operating system says, memory that ranks share to pass messages included
    time_share        time of the relayout over that of save, start and load; median of the ways, and `worst_time_share`
"""

from __future__ import annotations

import argparse
import math
import os
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetmesh.boundary import World, init
from hetmesh.layout.intervals import extent, overlap
from hetmesh.recipe.recipe import Recipe, load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.runtime.live_bytes import LiveBytes
from hetmesh.testing.pool import WorkerPool
from hetmesh.training.checkpoints import Progress, RunCheckpoints
from hetmesh.training.job import Job
from hetmesh.training.optimizers import take_step
from support.relayouts import Region, bytes_of, regions, state

JUDGES = (
    "src/hetmesh/checkpoint",
    "src/hetmesh/layout",
    "src/hetmesh/boundary",
    "src/hetmesh/training/job.py",
)
"""What an output of it judges (`kept.py`)."""

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_single.toml"
PARALLEL: dict[str, dict[str, Any]] = {
    "fsdp": {"ranks": "0-1", "data_parallel_shard_degree": 2},
    "tp": {"ranks": "0-1", "tensor_parallel_degree": 2},
    "pp": {"ranks": "0-1", "pipeline_parallel_degree": 2},
    "alone": {"ranks": "1"},
}
_job: Job | None = None  # of a worker, between two calls


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--rounds", type=int, default=1, help="default %(default)s")
    parser.add_argument("--width", type=int, default=512, help="of encoder and LLM (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of each (default %(default)s)")
    parser.add_argument("--folder", type=Path, help="on the disk to write to; by default that of temporary files")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all."""
    names = [*PARALLEL] * args.rounds
    ways = list(zip(names, [*names[1:], names[0]], strict=True))
    found = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, WorkerPool(2) as pool:
        recipes = {name: _recipe(args, name, folder) for name in PARALLEL}
        pool.run(_begin, recipes[names[0]], timeout=300)
        for number, (first, second) in enumerate(ways, 1):
            place = Path(folder) / str(number)
            ranks = pool.run(_save_and_move, recipes[second], place, number, timeout=600)
            found.append(
                {"way": f"{first} -> {second}", **way(ranks), "start_and_load_s": _started(recipes[second], place)}
            )
    return result(found)


def way(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all ranks measured on one way, together."""
    bound = sum(lacking(rank["before"], rank["after"]) for rank in ranks)
    return {
        "state_bytes": sum(rank["bytes"][0] for rank in ranks),
        "received_bytes": sum(rank["received"] for rank in ranks),
        "bound_bytes": bound,
        "peak": max(rank["peak"] for rank in ranks),
        "peak_resident": max(rank["peak_resident"] for rank in ranks),
        "save_s": max(rank["save_s"] for rank in ranks),
        "relayout_s": max(rank["relayout_s"] for rank in ranks),
    }


def result(ways: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of all ways."""
    shares = [each["relayout_s"] / (each["save_s"] + each["start_and_load_s"]) for each in ways]
    return {
        "bytes_over_bound": round(sum(e["received_bytes"] for e in ways) / sum(e["bound_bytes"] for e in ways), 4),
        "peak": round(max(each["peak"] for each in ways), 4),
        "peak_resident": round(max(each["peak_resident"] for each in ways), 4),
        "time_share": round(statistics.median(shares), 4),
        "worst_time_share": round(max(shares), 4),
        "ways": [
            {name: round(value, 4) if isinstance(value, float) else value for name, value in each.items()}
            for each in ways
        ],
    }


def lacking(before: Mapping[str, Region], after: Mapping[str, Region]) -> int:
    """Bytes that a rank holds after and not before."""
    total = 0
    for name, (_, itemsize, kept) in after.items():
        had = before[name][2] if name in before else [()] * len(kept)
        shared = (
            math.prod(overlap(sorted(a), sorted(b)) for a, b in zip(kept, had, strict=True)) if name in before else 0
        )
        total += itemsize * (math.prod(map(extent, kept)) - shared)
    return total


def _recipe(args: argparse.Namespace, name: str, folder: str) -> Recipe:
    extra = [f"--modules.{m}.config.{key}={value}" for m in ("vision", "llm") for key, value in _sizes(args).items()]
    extra += [f"--modules.llm.config.head_dim={args.width // 4}", f"--job.dump_folder={folder}/run"]
    extra += ["--training.global_batch_size=4", "--training.local_batch_size=2", "--checkpoint.enable=true"]
    for module in ("vision", "projector", "llm"):
        keys = PARALLEL[name] if module == "llm" or name != "pp" else PARALLEL["fsdp"]
        extra += [f"--parallelism.{module}.{key}={value}" for key, value in keys.items()]
    return load_recipe(RECIPE, extra)


def _sizes(args: argparse.Namespace) -> dict[str, int]:
    return {
        "hidden_size": args.width,
        "intermediate_size": 2 * args.width,
        "num_hidden_layers": args.layers,
    }


def _begin(rank: int, recipe: Recipe) -> None:
    global _job
    torch.set_num_threads(1)
    _job = Job.assemble(resolve(recipe), World.current())
    _step(_job)


def _step(job: Job) -> None:
    job.forward_backward()
    if job.optimizers is not None:
        take_step(*job.optimizers)


def _save_and_move(rank: int, recipe: Recipe, folder: Path, step: int) -> dict[str, Any]:
    assert _job is not None
    checkpoints = RunCheckpoints(_job, _job.optimizers, folder)
    dist.barrier()
    began = time.perf_counter()
    checkpoints.save(Progress(step))
    saved = time.perf_counter() - began
    before = state(_job)
    held, had = bytes_of(before), regions(before)
    live = LiveBytes(before.values())
    del before
    _job.root.zero_grad()
    resident = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    _job.world.log.clear()
    dist.barrier()
    began = time.perf_counter()
    with live:
        _job.relayout(recipe)
    took = time.perf_counter() - began
    most = _resident("VmHWM") - resident + held
    after = state(_job)
    larger = max(held, bytes_of(after), 1)
    measured = {
        "bytes": (held, bytes_of(after)),
        "before": had,
        "after": regions(after),
        "received": _job.world.log.bytes_received(),
        "peak": live.peak / larger,
        "peak_resident": most / larger,
        "save_s": saved,
        "relayout_s": took,
    }
    del after
    _step(_job)
    return measured


def _resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return 1024 * int(found[1])


def _started(recipe: Recipe, folder: Path) -> float:
    """Seconds from the start of new processes until all have loaded the checkpoint."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context, began = get_context("spawn"), time.time()
    processes = [context.Process(target=_load, args=(rank, port, recipe, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"{folder}: a process that should load the checkpoint has failed")
    return max(float((folder / f"loaded{rank}").read_text()) for rank in range(2)) - began


def _load(rank: int, port: int, recipe: Recipe, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    world = init(device="cpu")
    job = Job.assemble(resolve(recipe), world)
    step = max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoint").glob("step-*"))
    RunCheckpoints(job, job.optimizers, folder).start_or_resume(step)
    (folder / f"loaded{rank}").write_text(str(time.time()))
    world.close()


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [f"{name:18} {value}" for name, value in result.items() if name not in ("ways", "kept")]
    for each in result["ways"]:
        files = f"save {each['save_s']:.2f} s, start and load {each['start_and_load_s']:.2f} s"
        lines.append(
            f"{each['way']:18} {each['received_bytes'] / 2**20:.0f} MiB, {each['relayout_s']:.2f} s ({files}), peak "
            f"{each['peak']:.2f}, resident {each['peak_resident']:.2f}"
        )
    return "\n".join(lines)
