"""What checkpoints cost: steps with a save beside training and without, and saves and loads beside plain torch.save.

The model of digits at `--width`, FSDP over `--ranks` processes. In each round, in turns: `--steps` steps without a
save, as many after an asynchronous one, as many after a synchronous one, and the same bytes with plain torch.save and
torch.load, each rank its share into a file of its own, all at once. Of every time the slowest rank counts; results are
medians of the rounds.

    async_overhead   time of the steps with an asynchronous save over that of those without, less 1
    blocked_share    time that an asynchronous save holds training up over that of a synchronous one
    save_ratio       bandwidth of a synchronous save over that of torch.save, both until the bytes are on the disk
    load_ratio       bandwidth of a load, checksums compared and all, over that of torch.load, both from the disk

`save_ratio_to_cache` is over torch.save that leaves the bytes in the cache, which a checkpoint must not, and
`load_ratio_from_cache` is where both find them there, which no run does that is started again on another machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetmesh.boundary import World
from hetmesh.checkpoint.checkpointer import Checkpointer
from hetmesh.recipe.recipe import Recipe, load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.pool import WorkerPool
from hetmesh.training.trainer import Trainer

JUDGES = (
    "src/hetmesh/checkpoint",
    "src/hetmesh/checkpoint/checkpointer.py",
    "src/hetmesh/records/checksums.py",
)
"""What an output of it judges (`kept.py`)."""

WARM_UP = 3  # steps
RECIPE = Path(__file__).parents[2] / "recipes" / "digits_single.toml"
KEYS = ("none", "async", "sync")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="of which one is saved (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="samples per step (default %(default)s)")
    parser.add_argument("--width", type=int, default=1536, help="of encoder and LLM (default %(default)s)")
    parser.add_argument("--folder", type=Path, help="on the disk to write to; by default that of temporary files")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, WorkerPool(args.ranks) as pool:
        recipe = _recipe(args, folder)
        ranks = pool.run(_measure, recipe, args.rounds, args.steps, timeout=3600)
    return result(ranks)


def result(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all ranks, each with seconds by name and round, as the benchmark's."""
    names = ranks[0]["seconds"]
    worst = {name: [max(each) for each in zip(*(r["seconds"][name] for r in ranks), strict=True)] for name in names}

    def ratio(over: str, under: str) -> float:
        return statistics.median(a / b for a, b in zip(worst[over], worst[under], strict=True))

    return {
        "async_overhead": round(ratio("steps async", "steps none") - 1, 4),
        "sync_overhead": round(ratio("steps sync", "steps none") - 1, 4),
        "blocked_share": round(ratio("blocked async", "blocked sync"), 4),
        "save_ratio": round(ratio("torch.save", "blocked sync"), 4),
        "save_ratio_to_cache": round(ratio("torch.save to cache", "blocked sync"), 4),
        "load_ratio": round(ratio("torch.load", "load"), 4),
        "load_ratio_from_cache": round(ratio("torch.load from cache", "load from cache"), 4),
        "bytes": sum(r["bytes"] for r in ranks),
        "ranks": len(ranks),
        "seconds": {name: round(statistics.median(values), 4) for name, values in worst.items()},
    }


def _recipe(args: argparse.Namespace, folder: str) -> Recipe:
    extra = [f"--modules.{m}.config.hidden_size={args.width}" for m in ("vision", "llm")]
    extra += [f"--modules.{m}.config.intermediate_size={2 * args.width}" for m in ("vision", "llm")]
    extra += [f"--modules.llm.config.head_dim={args.width // 4}", f"--job.dump_folder={folder}/run"]
    extra += ["--training.steps=100000", f"--training.local_batch_size={args.batch // args.ranks}"]
    extra += ["--metrics.enable_tensorboard=false", "--checkpoint.enable=true", "--checkpoint.keep_latest_k=1"]
    for module in ("vision", "projector", "llm"):
        extra += [f"--parallelism.{module}.ranks=0-{args.ranks - 1}"]
        extra += [f"--parallelism.{module}.data_parallel_shard_degree={args.ranks}"]
    return load_recipe(RECIPE, extra)


def _measure(rank: int, recipe: Recipe, rounds: int, steps: int) -> dict[str, Any]:
    """One rank's seconds by name and round, and the bytes that it writes."""
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, body: Callable[[], object]) -> None:
        dist.barrier()
        started = time.perf_counter()
        body()
        seconds.setdefault(name, []).append(time.perf_counter() - started)

    trainer = Trainer(resolve(recipe), World.current())
    saving = Saving(trainer)
    for _ in range(WARM_UP):
        trainer.train_step()
    for kind in ("async", "sync"):  # plans are made, memory is there
        saving.begin(kind)
        saving.wait()
    for number in range(rounds):
        for kind in KEYS if number % 2 else KEYS[::-1]:
            saving.blocked = 0.0
            timed(f"steps {kind}", lambda kind=kind: saving.steps(kind, steps))  # type: ignore[misc]
            if kind != "none":
                seconds.setdefault(f"blocked {kind}", []).append(saving.blocked)
            saving.wait()
        plain = Plain(trainer.folder, rank, saving.held())
        timed("torch.save", lambda plain=plain: plain.save(to_disk=True))  # type: ignore[misc]
        timed("torch.save to cache", lambda plain=plain: plain.save(to_disk=False))  # type: ignore[misc]
        for name, uncached in (("", uncache), (" from cache", lambda _: None)):
            for load in (plain, saving) if number % 2 else (saving, plain):
                uncached(load.loaded())
                timed(f"{load.name}{name}", load.load)
        plain.remove()
    trainer.reporter.close()
    trainer.upcoming.close()
    dist.barrier()  # others remove files of theirs there
    if rank == 0:
        shutil.rmtree(trainer.folder, ignore_errors=True)
    return {"seconds": seconds, "bytes": sum(t.nbytes for t in saving.held().values())}


def uncache(file: Path) -> None:
    """Let the machine forget what it keeps in memory of a file that is on the disk."""
    with open(file, "rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Saving:
    """A trainer's steps and saves, and for how long saves held it up."""

    name = "load"

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.blocked = trainer, 0.0
        own = trainer.checkpointer
        self.savers = {
            "sync": own,
            "async": Checkpointer(own.world, own.folder, own.keep_latest, own.timeout, asynchronous=True),
        }

    def begin(self, kind: str) -> None:
        self._held_up(lambda: self.savers[kind].save(*self._state()))

    def steps(self, kind: str, count: int) -> None:
        if kind != "none":
            self.begin(kind)
        for _ in range(count):
            self.trainer.train_step()
            if kind != "none":
                self._held_up(self.savers[kind].check)

    def wait(self) -> None:
        for saver in self.savers.values():
            saver.wait()

    def held(self) -> dict[str, Tensor]:
        """The tensors that this rank writes."""
        saver = self.savers["sync"]
        items, planner = saver.plans.share(saver._state(*self._state()[1:]))
        values = {f"{item.index}": planner.lookup_object(item.index) for item in items}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def loaded(self) -> Path:
        """This rank's part of what `load` reads."""
        saver = self.savers["sync"]
        return saver.folder / f"step-{saver.steps()[-1]}" / f"__{saver.world.rank}_0.distcp"

    def load(self) -> None:
        saver = self.savers["sync"]
        saver.load(saver.steps()[-1], *self._state()[1:])

    def _state(self) -> tuple[int, Any, Any, Any]:
        trainer = self.trainer
        return trainer.step, trainer.job.root, trainer.optimizers, trainer.checkpoints.state(trainer.progress)

    def _held_up(self, body: Callable[[], object]) -> None:
        started = time.perf_counter()
        body()
        self.blocked += time.perf_counter() - started


class Plain:
    """The same bytes with torch.save and torch.load; like a checkpoint, each time in a new file."""

    name = "torch.load"

    def __init__(self, folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> None:
        self.files = [folder / f"plain{rank}_{to_disk}.pt" for to_disk in (False, True)]
        self.tensors = {name: t.detach().clone() for name, t in tensors.items()}

    def save(self, to_disk: bool) -> None:
        with open(self.files[to_disk], "xb") as stream:
            torch.save(self.tensors, stream)
            if to_disk:
                stream.flush()
                os.fsync(stream.fileno())

    def loaded(self) -> Path:
        """What `load` reads."""
        return self.files[True]

    def load(self) -> None:
        torch.load(self.files[True])

    def remove(self) -> None:
        for file in self.files:
            file.unlink()


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    ratios = [f"{name:20} {value}" for name, value in result.items() if name not in ("seconds", "bytes", "ranks")]
    times = [f"{name:20} {value:.3f} s" for name, value in result["seconds"].items()]
    return "\n".join([f"{result['bytes'] / 2**20:.0f} MiB, {result['ranks']} ranks", *ratios, *times])
