"""What one rank's host computes per step when the job is large: metadata, balance, schedule and its own transfers.

A SigLIP encoder on one half of the ranks (data parallel) feeds an 8B LLM on the other half (FSDP over lanes of tensor
parallel 8), 8 microbatches per step, 8 samples per rank: 16,384 samples for 2,048 ranks. The source has its metadata as
arrays, as `hetmesh index` keeps them; samples have one image per 729 patches of a chart-like law. Nothing is trained
and nobody else takes part: one rank draws, expands, balances and plans step after step through `training.upcoming`,
which does so in a thread of its own, as in a run. The worse of two ranks is reported, one of the encoder and one of the
LLM.

CPU milliseconds are those of the whole process per step; those of the training thread are what it does itself: take
the step, count its targets and tokens, and, on rank 0, its FLOPs. Medians over the steps. What a schedule costs is paid
in the first step, since later ones have the same one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.balance.laws import chart
from hetmesh.data import Loader
from hetmesh.graph import MediaItem, MetaArrays, SampleMeta
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.training.job import Job
from hetmesh.training.upcoming import AHEAD, Upcoming

JUDGES = ("src/hetmesh/balance", "src/hetmesh/layout", "src/hetmesh/boundary", "src/hetmesh/training/upcoming.py")
"""What an output of it judges (`kept.py`)."""

RECIPE = Path(__file__).parents[2] / "recipes" / "siglip_qwen3_8b.toml"
MICROBATCHES, TENSOR_PARALLEL, PER_RANK, NODE = 8, 8, 8, 8
IMAGE_ROWS, SIZE = 729, (3, 384, 384)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How large, and how often."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--policies", nargs="+", default=["two_dim", "auto"])


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every size with every policy, each in a process of its own with one thread for arrays, as ranks have it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    result: dict[str, Any] = {"steps": args.steps, "samples_per_rank": PER_RANK, "microbatches": MICROBATCHES}
    for ranks in args.ranks:
        for policy in args.policies:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
                found = [
                    processes.submit(measure, ranks, policy, rank, args.steps).result() for rank in (0, ranks // 2)
                ]
            suffix = f"{ranks}" if policy == "two_dim" else f"{ranks}_{policy}"
            for key in ("cpu_ms", "main_ms", "first_step_ms"):
                result[f"{key}_{suffix}"] = round(max(each[key] for each in found), 1)
    return result


def measure(ranks: int, policy: str, rank: int, steps: int) -> dict[str, float]:
    """CPU milliseconds of one rank per step."""
    job = host_of(ranks, policy, rank)
    began = time.process_time()
    upcoming = Upcoming(job.loader, job.plan_step, 1 << 30, AHEAD[job.recipe.data.num_workers > 0])
    cpu, main = [], []
    for step in range(steps + 1):
        before = time.process_time() if step else began
        mine = time.thread_time()
        taken = upcoming.take()
        _ = taken.plan.num_targets, taken.plan.num_tokens, (taken.drawn.metas.num_targets == 0).sum()
        if rank == 0:
            for name in job.graph.order:
                taken.plan.lane_work(name)
        main.append(time.thread_time() - mine)
        upcoming.settle()
        cpu.append(time.process_time() - before)
    upcoming.close()
    middle = [statistics.median(times[1:]) * 1e3 for times in (cpu, main)]
    return {"cpu_ms": middle[0], "main_ms": middle[1], "first_step_ms": cpu[0] * 1e3}


def host_of(ranks: int, policy: str, rank: int) -> Job:
    """The part of a job that plans: no process group, no weights."""
    half, samples = ranks // 2, ranks * PER_RANK
    lanes = half // TENSOR_PARALLEL
    keys = {
        "parallelism.vision.ranks": f"0-{half - 1}",
        "parallelism.vision.data_parallel_replicate_degree": half,
        "parallelism.llm.ranks": f"{half}-{ranks - 1}",
        "parallelism.llm.data_parallel_shard_degree": lanes,
        "parallelism.llm.tensor_parallel_degree": TENSOR_PARALLEL,
        "training.local_batch_size": samples // (MICROBATCHES * lanes),
        "training.global_batch_size": samples,
        "balance.policy": policy,
        "data.source": "benchmarks.host:IndexedSource",
        "data.options.samples": 2 * samples,
    }
    before, _, after = RECIPE.read_text(encoding="utf-8").partition("[data.options]")
    text = before + "[" + after.partition("\n[")[2]  # without the options of its own source
    resolved = resolve(parse_recipe(text, [f"--{key}={value}" for key, value in keys.items()]))
    loader = Loader(resolved.source, samples, resolved.expander, seed=0)
    world: Any = SimpleNamespace(rank=rank, ranks_per_node=NODE, size=ranks, device=torch.device("cpu"))
    nothing: Any = None
    return Job(resolved, world, loader, nothing, {}, nothing)


class IndexedSource:
    """Conversations about charts whose metadata are arrays; there are no payloads."""

    vocab_size, pad_id, placeholders = 151936, 0, {"image": 1}

    def __init__(self, split: str = "train", samples: int = 1024) -> None:
        rows = chart(4096)(samples, np.random.default_rng(0), 0.0)
        images = np.maximum(np.rint(rows["vision"][0] / IMAGE_ROWS), 1).astype(int).tolist()
        text = np.maximum(rows["llm"][0] - rows["vision"][0] // 4, 16).tolist()
        self._metas = MetaArrays.of([_meta(i, *each) for i, each in enumerate(zip(images, text, strict=True))])
        object.__setattr__(self._metas, "given", ())  # as they come from a file

    def __len__(self) -> int:
        return len(self._metas)

    def meta(self, index: int) -> SampleMeta:
        """One of them."""
        return self._metas.meta(index)

    def metas(self, indices: Any) -> MetaArrays:
        """Some of them."""
        return self._metas.take(indices)

    def load(self, index: int, kinds: Any = None) -> Any:
        """There is nothing to load."""
        raise NotImplementedError


def _meta(index: int, images: int, text: int) -> SampleMeta:
    """Images first, then text whose second half is the answer."""
    media = tuple(MediaItem("image", SIZE, i) for i in range(images))
    return SampleMeta(f"chart-{index:08}", images + text, media, ((images + text // 2, images + text),))


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{'':26}  ms per step"]
    return "\n".join([*lines, *(f"{key:26} {value:>11}" for key, value in result.items() if "_ms_" in key)])
