"""Random state belongs to a place in the step, not to the process: what is drawn does not depend on what else ran here.

The generators (the CPU's and the device's) are seeded from a place when a stage begins, when a layer begins and ends,
and where tensor parallelism begins and ends. Values that tensor-parallel ranks hold alike are drawn alike; for shards
(heads, inputs of row-wise linears, shares of the tokens) the coordinate along `tp` is added, and along `cp` always.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from hetmesh._torch_compat import not_compiled
from hetmesh.graph import ModuleSpec
from hetmesh.parallel.tensor_parallel import matching, within

_LIBRARIES = ("torch", "transformers", "peft", "hetmesh")
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""Layers that draw."""

_WRAPPED = "base_layer"  # what peft calls the linear layer inside one of its own


@dataclass(frozen=True)
class RandomPlace:
    """Where something random is drawn: a stage's module on one rank, in one microbatch of one step.

    Attributes:
        lane: whose samples these are.
        share: the coordinate along `cp`, whose ranks share the tokens of a lane.
        shard: the coordinate along `tp`; only draws on sharded values depend on it.
    """

    seed: int
    module: str
    step: int = 0
    microbatch: int = 0
    lane: int = 0
    share: int = 0
    shard: int = 0


def random_place(spec: ModuleSpec, stage: int, rank: int, seed: int) -> RandomPlace:
    """Where `rank` draws for a stage of a module: in the first microbatch of the first step."""
    mesh, lane = spec.stage_mesh(stage), spec.lane_of(rank)
    coordinate = dict(zip(mesh.axes, mesh.coordinate(rank) or (), strict=True))
    return RandomPlace(seed, spec.name, lane=lane or 0, share=coordinate.get("cp", 0), shard=coordinate.get("tp", 0))


class _Visit:
    """One run of a stage at a place; how often each event has occurred, so that a layer that is called twice draws
    something else the second time."""

    def __init__(self, place: RandomPlace, device: Any, counts: Mapping[str, int]) -> None:
        self.place, self.device, self.counts = place, device, dict(counts)
        key = f"{place.seed} {place.step} {place.module} {place.microbatch} {place.lane} {place.share}"
        self.key = blake2b(key.encode(), digest_size=16).digest()

    def seed(self, event: str, sharded: bool) -> None:
        count = self.counts[event] = self.counts.get(event, -1) + 1
        what = f"{event} {count} {self.place.shard if sharded else ''}"
        number = int.from_bytes(blake2b(what.encode(), digest_size=8, key=self.key).digest(), "little")
        # The CPU's generator uses the lower 32 bits. (torch.manual_seed takes a hundred times as long.)
        torch.default_generator.manual_seed(number)
        if self.device is not None:
            self.device.manual_seed(number)


# Not a context variable: on CUDA a backward, and with it recomputation, runs in a thread of autograd.
_current: _Visit | None = None


@contextmanager
def entering(place: RandomPlace, device: Any = None) -> Iterator[None]:
    """Everything random inside is drawn as `place` says. `device`: `torch.cuda`, or the module of another kind of
    device on which it computes; None for the CPU."""
    global _current
    before, _current = _current, _Visit(place, device, {})
    _current.seed("", sharded=False)
    try:
        yield
    finally:
        _current = before


def exchange_place(place: Any) -> Any:
    """Be at `place`, which this returned before (None: outside of any), and return the place where this was called: for
    two computations that take turns in one process."""
    global _current
    before, _current = _current, place
    return before


def current_microbatch() -> int:
    """The microbatch that is computed, or computed again, in this thread; 0 outside of any place."""
    return 0 if _current is None else _current.place.microbatch


def current_step() -> int:
    """The step that is computed; 0 outside of any place."""
    return 0 if _current is None else _current.place.step


class Remembered:
    """Where the caller is now, for a computation that is repeated later (activation checkpointing, which restores the
    generators themselves but does not know in which place it is)."""

    def __init__(self) -> None:
        self.visit = _current
        self.counts = {} if _current is None else dict(_current.counts)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The body runs where this was made."""
        global _current
        before = _current
        if self.visit is not None:
            _current = _Visit(self.visit.place, self.visit.device, self.counts)
        try:
            yield
        finally:
            _current = before


def draws(module: nn.Module) -> bool:
    """Whether a forward of `module` may draw random numbers: it has dropout, as a layer, as a number or in its config,
    or a custom class, of which nothing is known."""
    return any(_may_draw(part) for part in module.modules())


def seed_by_place(
    module: nn.Module,
    layers: Sequence[str],
    plan: Mapping[str, str | ParallelStyle],
    shared: Sequence[str] = (),
    *,
    split: bool = False,
) -> None:
    """Seed the generators where the layers of `module` begin and end, and where values become sharded and whole again.
    In every layout alike, also without tensor parallelism, so that all draw the same. Nothing where nothing is random.

    Args:
        layers: FQNs of layers in execution order; those of other pipeline stages may be missing.
        shared: FQNs of the parts whose tokens ranks along `tp` share (sequence parallelism).
        split: whether there are several ranks along `tp`. If not, torch.compile makes one graph of a layer, which then
            draws on from where the layer began: something else than without torch.compile.
    """
    if not draws(module):
        return
    named = dict(module.named_modules())
    for name in layers:
        if name in named:
            shares = within(name, *shared)
            named[name].register_forward_pre_hook(_Event(name, shares))
            named[name].register_forward_hook(_Event(f"{name} end", shares))
    for pattern, style in plan.items():
        kind = _kind(style)
        for name in matching(module, pattern) if kind is not None else ():
            shares = within(name, *shared)
            wrapper = name.removesuffix(f".{_WRAPPED}")  # is the linear layer itself, unless peft has wrapped it
            event = _Event(f"{wrapper} end", shares or kind == "colwise", traced=not split)
            named[wrapper].register_forward_hook(event)
            for fqn, part in named[wrapper].named_modules(prefix=wrapper):
                if isinstance(part, DROPOUT):
                    part.register_forward_pre_hook(_Event(fqn, kind == "rowwise", traced=not split))


class _Event:
    """A hook that seeds the generators from the place where it occurs. `traced`: whether torch.compile may trace past
    it; the code then draws on from where its layer began."""

    def __init__(self, name: str, sharded: bool, traced: bool = False) -> None:
        self.name, self.sharded, self.traced = name, sharded, traced

    def __call__(self, *_: Any) -> None:
        if not (self.traced and torch.compiler.is_compiling()):
            _seed(self.name, self.sharded)


@not_compiled
def _seed(event: str, sharded: bool) -> None:
    if _current is not None:
        _current.seed(event, sharded)


def _kind(style: str | ParallelStyle | None) -> str | None:
    if isinstance(style, RowwiseParallel):
        return "rowwise"
    if isinstance(style, ColwiseParallel):
        return "colwise"
    return style if style in ("colwise", "rowwise") else None


def _may_draw(part: nn.Module) -> bool:
    if type(part).__module__.split(".")[0] not in _LIBRARIES:
        return True
    numbers = {**vars(part), **(vars(part.config) if hasattr(part, "config") else {})}
    named = any("drop" in key and isinstance(value, float) and value > 0 for key, value in numbers.items())
    return named or (isinstance(part, DROPOUT) and part.p > 0)
