"""Head and loss of an LLM by chunks of targets against whole logits: peak memory on a fake device, and time on the CPU.

`peak_bytes`: what a forward and backward adds at most on one rank, on the device of the dry run: a vocabulary of
248,320 tokens, 4 x 4096 targets of width 2048 in bf16, tensor parallel 2. Of a frozen head, so without the gradient of
its weight, which both paths leave behind; `peak_bytes_trained` is with it: 124,160 x 2048 elements in bf16, 0.47 GiB,
which chunks hold from the first of them on. That is what a backward has made at its end, so it cannot be less.
`seconds`: CPU time of forward and backward in fp32 with one thread, whole logits and chunks in turns, with half of such
a share, so that chunks have as many targets as there; `step_ratio` is that of the medians, the larger of two layouts:
the whole vocabulary on one process, and shares of two. Both are what runs (`hetmesh.parallel.CrossEntropy`): whole
logits where a user's loss reads them, or an LLM's own forward returns them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetmesh._torch_compat import fake_process_group
from hetmesh.dryrun.device_work import DeviceWork
from hetmesh.dryrun.fake_device import FakeAccelerator
from hetmesh.dryrun.fake_tensors import FakeTensors
from hetmesh.dryrun.host_waits import HostWaits
from hetmesh.parallel import CrossEntropy, VocabularyShards, logits_or_loss
from hetmesh.parallel.linear import ColwiseLinear, Entry
from hetmesh.parallel.linear_cross_entropy import LOSS, asking_for_loss
from hetmesh.testing.pool import WorkerPool

JUDGES = (
    "src/hetmesh/cost/head.py",
    "src/hetmesh/parallel/linear_cross_entropy.py",
    "src/hetmesh/parallel/vocabulary.py",
    "src/hetmesh/parallel/linear.py",
    "src/hetmesh/dryrun/device_work.py",
    "src/hetmesh/runtime/live_bytes.py",
)
"""What an output of it judges (`kept.py`)."""

VOCABULARY, TARGETS, FEATURES, RANKS = 248_320, 4 * 4096, 2048, 2
PATHS = ("whole", "chunks")
LIMITS = {"peak_gib": 0.4, "step_ratio": 1.03}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes of what is timed."""
    parser.add_argument("--rounds", type=int, default=5, help="of both paths, in turns (default %(default)s)")
    parser.add_argument("--targets", type=int, default=2162, help="that are timed (default %(default)s)")
    parser.add_argument("--features", type=int, default=512, help="of what is timed (default %(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Peaks and times of both paths."""
    peaks, trained = ({path: _peak(path, whether) for path in PATHS} for whether in (False, True))
    sizes = args.rounds, args.targets, args.features
    seconds = {"whole vocabulary": _time(0, 1, *sizes)}
    with WorkerPool(RANKS) as pool:
        of_ranks = pool.run(_time, RANKS, *sizes, timeout=1200)
    seconds[f"shares of {RANKS}"] = {path: max(each[path] for each in of_ranks) for path in PATHS}
    ratios = {layout: each["chunks"] / each["whole"] for layout, each in seconds.items()}
    result = {
        "peak_bytes": peaks,
        "peak_bytes_trained": trained,
        "peak_gib": peaks["chunks"] / 2**30,
        "peak_gib_whole": peaks["whole"] / 2**30,
        "peak_ratio": peaks["chunks"] / peaks["whole"],
        "seconds": seconds,
        "step_ratios": ratios,
        "step_ratio": max(ratios.values()),
    }
    return {**result, "within_limits": all(result[key] <= most for key, most in LIMITS.items())}


def _step(path: str, head: nn.Linear, hidden: Tensor, targets: Tensor, shards: VocabularyShards | None) -> Tensor:
    loss, batch = CrossEntropy(shards), {"targets": targets}
    with asking_for_loss(loss, None) if path == "chunks" else nullcontext():
        output = logits_or_loss(head, head, hidden, batch, plain=True)
    value = output[LOSS] if path == "chunks" else loss(output.pop(""), batch)
    value.backward()
    return value.detach()


def _head(width: int, features: int, group: Any, **how: Any) -> nn.Linear:
    head = nn.Linear(features, width, bias=False, **how)
    if group is not None:
        head.__class__ = ColwiseLinear
        head.group, head.enter, head.widths = group, Entry(group), None  # type: ignore[assignment]
    return head


def _peak(path: str, trained: bool) -> int:
    waits, accelerator = HostWaits(), FakeAccelerator.make()
    with fake_process_group(RANKS), FakeTensors(accelerator, waits) as tensors, DeviceWork(waits, tensors.fake) as work:
        tensors.observe = work.note
        how = {"device": accelerator.device, "dtype": torch.bfloat16}
        shards = VocabularyShards(dist.group.WORLD, (VOCABULARY // RANKS,) * RANKS)  # type: ignore[arg-type]
        head = _head(VOCABULARY // RANKS, FEATURES, shards.group, **how).requires_grad_(trained)
        hidden = torch.empty(TARGETS, FEATURES, requires_grad=True, **how)
        targets = torch.zeros(TARGETS, dtype=torch.int64, device=accelerator.device)
        before = work.live
        with work.span("step"):
            _step(path, head, hidden, targets, shards)
        (span,) = work.spans
    return span.peak - before


def _time(rank: int, ranks: int, rounds: int, targets: int, features: int) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = VOCABULARY // 2 // RANKS
    shards = VocabularyShards(dist.group.WORLD, (width,) * ranks) if ranks > 1 else None  # type: ignore[arg-type]
    head, hidden = _head(width, features, shards and shards.group), torch.randn(targets, features, requires_grad=True)
    wanted = torch.randint(width * ranks, (targets,))
    seconds: dict[str, list[float]] = {path: [] for path in PATHS}
    losses = {}
    for number in range(rounds + 1):
        for path in PATHS if number % 2 else PATHS[::-1]:
            head.weight.grad = hidden.grad = None
            started = time.thread_time() if ranks == 1 else time.process_time()
            losses[path] = float(_step(path, head, hidden, wanted, shards))
            stopped = time.thread_time() if ranks == 1 else time.process_time()
            if number:  # the first one warms up
                seconds[path].append(stopped - started)
    if abs(losses["chunks"] / losses["whole"] - 1) > 1e-5:
        raise RuntimeError(f"the two paths differ: {losses}")
    return {path: statistics.median(each) for path, each in seconds.items()}


def table(result: dict[str, Any]) -> str:
    """Peaks, times and their ratios."""
    lines = [f"{'':24}{'whole':>10}{'chunks':>10}{'ratio':>8}"]
    named = {"peak, GiB": result["peak_bytes"], "trained, GiB": result["peak_bytes_trained"]}
    rows = {name: [each[path] / 2**30 for path in PATHS] for name, each in named.items()}
    rows |= {f"{name}, s": [each[path] for path in PATHS] for name, each in result["seconds"].items()}
    lines += [f"{name:24}{a:>10.3f}{b:>10.3f}{b / a:>8.3f}" for name, (a, b) in rows.items()]
    return "\n".join(lines)
