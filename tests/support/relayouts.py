"""Jobs that change their layout between two steps: what they compute, what they send, and what they hold meanwhile."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import getpid, kill
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hetmesh.boundary import Exchange, World
from hetmesh.checkpoint import relayout
from hetmesh.data.loader import Loader
from hetmesh.models.weights.fill_module import local_share
from hetmesh.parallel import local_part
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.runtime.live_bytes import LiveBytes
from hetmesh.testing.pool import WorkerPool
from hetmesh.testing.precision import exact_dtypes
from hetmesh.training.job import Job
from hetmesh.training.optimizers import take_step
from support import layout_pairs
from support.layout_pairs import LAYOUTS, PIPELINE, VARIANTS
from support.parity_cases import table

MUON = """[optimizer]
name = "torch.optim:Muon"
lr = 0.03
options = { momentum = 0.8, eps = 1e-3, adjust_lr_fn = "match_rms_adamw" }
[[optimizer.param_groups]]
pattern = 'norm|bias|embed|lm_head|experts'
optimizer_name = "AdamW"
optimizer_kwargs = { lr = 1e-2, eps = 0.01 }
"""
ADAFACTOR = """[optimizer]
name = "torch.optim:Adafactor"
lr = 0.03
options = { eps = [0.01, 1e-3] }
"""
MODELS = VARIANTS | {
    "tied": lambda text: text.replace("[modules.llm.config]", "[modules.llm.config]\ntie_word_embeddings = true"),
    "Muon": lambda text: text.replace("[optimizer]\neps = 0.01\n", MUON),
    "Adafactor": lambda text: text.replace("[optimizer]\neps = 0.01\n", ADAFACTOR),
}
"""What changes the text of the model."""
CP = table("llm", "0-3", context_parallel_degree=2, fsdp=2, expert_parallel_degree=2)
PLACES = LAYOUTS | {
    "cp 2, fsdp 2": [table("vision", "0-3", fsdp=4), CP],
    "pp 4": [table("vision", "0-3", fsdp=2), table("llm", "0-3", pp=4) + f"\n{PIPELINE}"],
    "last two ranks": [table("vision", "3"), table("llm", "2-3", fsdp=2)],
    "fsdp 3, fsdp 2": [table("vision", "0-2", fsdp=3), table("llm", "2-3", fsdp=2, expert_parallel_degree=2)],
}
"""Layouts of four ranks, of which some leave ranks out."""

MIN_BYTES = 2**16
"""Of a share that memory is compared with."""

FAULTS = ("another offset", "no optimizer state", "a batch further")
Region = tuple[tuple[int, ...], int, tuple[tuple[tuple[int, int], ...], ...]]
"""Of a tensor: its shape, bytes of an element, and per dim the intervals that a rank holds."""


@dataclass(frozen=True)
class Ridden:
    """What one rank of a job did.

    Attributes:
        losses, norms: of each step.
        logged, told: bytes received in each relayout, as the communication log has them, and as they were returned.
        held: before and after each relayout, what this rank holds.
        peaks: in each relayout, the most bytes of tensors that were alive, over the larger of what this rank holds
            before and after (`counting`).
        drew: whether a relayout drew random numbers.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    logged: tuple[int, ...]
    told: tuple[int, ...]
    held: tuple[tuple[dict[str, Region], dict[str, Region]], ...]
    peaks: tuple[float, ...]
    drew: bool


def ride(rank: int, recipes: Sequence[Recipe], counts: Sequence[int], fault: str = "", own: bool = False) -> Ridden:
    """In a worker: `counts` steps in the layout of each of `recipes`. `own`: with an optimizer of the caller's."""
    world = World.current()
    job = Job.assemble(resolve(recipes[0]), world)
    groups = [{"params": job.parameters()}]  # of a rank that has none too
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=0.01, foreach=False) if own else None
    losses, norms, logged, told, held, peaks, drew = [], [], [], [], [], [], False
    for number, (recipe, count) in enumerate(zip(recipes, counts, strict=True)):
        if number:
            world.log.clear()
            random_state, before = torch.get_rng_state(), state(job, optimizer)
            live, size, had = LiveBytes(before.values()), bytes_of(before), regions(before)
            del before
            with faults(fault), counting(live):
                took = job.relayout(recipe, optimizer)
            after = state(job, optimizer)
            drew |= not torch.equal(random_state, torch.get_rng_state())
            logged.append(world.log.bytes_received())
            told.append(took.bytes_received)
            peaks.append(max(span.peak for span in live.spans) / max(size, bytes_of(after), MIN_BYTES))
            held.append((had, regions(after)))
            del after
        with exact_dtypes(job.root):
            for _ in range(count):
                result = job.forward_backward(0.05)
                losses.append(result.loss)
                norms.append(result.grad_norm)
                if optimizer is not None:
                    optimizer.step()
                elif job.optimizers is not None:
                    take_step(*job.optimizers)
    job.upcoming.close()
    return Ridden(tuple(losses), tuple(norms), tuple(logged), tuple(told), tuple(held), tuple(peaks), drew)


@contextmanager
def counting(live: LiveBytes) -> Iterator[None]:
    """In the body `live` has spans of what takes memory beside the table of names, which tiny models are small beside:
    the new modules, and what moves."""
    assemble, move = Job.assemble, relayout.MovingState.move

    def made(*args: Any) -> Job:
        with live.span("modules"):
            return assemble(*args)

    def moved(moving: relayout.MovingState) -> int:
        with live.span("moves"):
            return move(moving)

    with live, patch.object(Job, "assemble", made), patch.object(relayout.MovingState, "move", moved):
        yield


def state(job: Job, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """The tensors of a rank that travel: parameters, buffers that are saved, and what optimizers keep of them, but for
    single numbers."""
    found: dict[str, Tensor] = dict(job.root.state_dict(keep_vars=True))
    optimizers = [optimizer] if optimizer is not None else [*(job.optimizers or ([],))[0]]
    names = {id(parameter): name for name, parameter in job.root.named_parameters()}
    shared = {id(tensor): name for name, tensor in reversed(found.items())}
    found = {name: tensor for name, tensor in found.items() if shared[id(tensor)] == name}
    for each in optimizers:
        for parameter, kept in each.state.items():
            for key, value in kept.items():
                if isinstance(value, Tensor) and (value.numel() > 1 or isinstance(value, DTensor)):
                    found[f"{names[id(parameter)]} {key}"] = value
    return found


def bytes_of(tensors: dict[str, Tensor]) -> int:
    return sum(local_part(tensor).nbytes for tensor in tensors.values())


def regions(tensors: dict[str, Tensor]) -> dict[str, Region]:
    return {
        name: (tuple(tensor.shape), tensor.dtype.itemsize, local_share(tensor.detach())[1])
        for name, tensor in tensors.items()
    }


def lacking(before: Sequence[dict[str, Region]], after: Sequence[dict[str, Region]]) -> int:
    """Bytes that ranks hold after and did not before, element by element."""
    total = 0
    for had, has in zip(before, after, strict=True):
        for name, region in has.items():
            new = _mask(region)
            if name in had:
                new &= ~_mask(had[name])
            total += region[1] * int(new.sum())
    return total


def _mask(region: Region) -> np.ndarray:
    shape, _, intervals = region
    mask = np.zeros(shape, bool)
    rows = [np.concatenate([np.arange(0), *(np.arange(*each) for each in dim)]) for dim in intervals]
    mask[np.ix_(*rows)] = True
    return mask


@contextmanager
def faults(name: str) -> Iterator[None]:
    """In the body a relayout goes wrong: as one of `FAULTS`, or "killed": rank 1 is, in the middle."""
    moved, go_on_from, restore = [], Loader.go_on_from, relayout.MovingState.restore

    class Shifted(Exchange):
        def finish(self) -> Tensor | None:
            result = super().finish()
            split = "q_proj.weight'" in str(self.label) and "exp" not in str(self.label)
            return result if result is None or not split else result.roll(1, 0)

    class Killed(Exchange):
        def finish(self) -> Tensor | None:
            moved.append(self)
            if len(moved) == 10 and self.world.rank == 1:
                kill(getpid(), signal.SIGKILL)
            return super().finish()

    def forget(moving: relayout.MovingState, optimizers: Any) -> None:
        moving.kept.clear()
        restore(moving, optimizers)

    def further(loader: Loader, other: Loader) -> None:
        go_on_from(loader, other)
        loader.step += 1

    with ExitStack() as stack:
        if name == "another offset":
            stack.enter_context(patch.object(relayout, "Exchange", Shifted))
        if name == "killed":
            stack.enter_context(patch.object(relayout, "Exchange", Killed))
        if name == "no optimizer state":
            stack.enter_context(patch.object(relayout.MovingState, "restore", forget))
        if name == "a batch further":
            stack.enter_context(patch.object(Loader, "go_on_from", further))
        yield


@dataclass(frozen=True)
class Figures:
    """Of the relayouts of a job.

    Attributes:
        error: largest relative difference of a loss from the uninterrupted run.
        sent, bound: bytes that all ranks received, and the fewest that they can.
        peak: most memory of a rank over the larger of its shares.
    """

    error: float
    sent: int
    bound: int
    peak: float


def figures(ridden: Sequence[Ridden], truth: Sequence[float]) -> Figures:
    """Of what all ranks did, `truth` being the losses of the uninterrupted run."""
    pairs = [pair for rank in ridden for pair in zip(rank.losses, truth, strict=True)]
    ways = zip(*(rank.held for rank in ridden), strict=True)  # of each, what every rank held
    return Figures(
        max(abs(loss - true) / abs(true) for loss, true in pairs),
        sum(sum(rank.logged) for rank in ridden),
        sum(lacking(*zip(*way, strict=True)) for way in ways),
        max(max(rank.peaks) for rank in ridden),
    )


def drawn(count: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Two layouts and what is trained, `count` times; every variant comes about equally often."""
    chance = random.Random(seed)
    for number in range(count):
        first, second = chance.sample(sorted(PLACES), 2)
        yield first, second, sorted(MODELS)[number % len(MODELS)]


def recipe_in(place: str, variant: str = "all trained", folder: object = "unused") -> Recipe:
    """The model in one of `PLACES`."""
    return layout_pairs.recipe(folder, PLACES[place], variant, MODELS)


def judge(
    pool: WorkerPool, recipes: Sequence[Recipe], counts: Sequence[int], fault: str = "", own: bool = False
) -> Figures:
    """`figures` of a job on four ranks that changes its layout, against one that does not."""
    truth = pool.run(ride, recipes[:1], [sum(counts)], "", own, timeout=120)[0].losses
    return figures(pool.run(ride, recipes, counts, fault, own, timeout=240), truth)
