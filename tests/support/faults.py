"""Faults to inject into a job, to see that an oracle fails. Each is a frozen value; call it with the assembled Job.

They are the silent errors that multimodal frameworks have shipped: a gradient scaled by a data-parallel size, rows of
one lane handed to another, a replica left out of a sum, rows in the wrong order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hetmesh.graph import Stage
from hetmesh.models.adapter import Adapter
from hetmesh.models.draws import Draws
from hetmesh.parallel import local_gradient
from hetmesh.runtime import Reducer
from hetmesh.training.gradients import scale
from hetmesh.training.job import Job


@dataclass(frozen=True)
class ScaleGradient:
    """Multiply the reduced gradients of `module` by `factor`."""

    module: str
    factor: float = 2.0

    def __call__(self, job: Job) -> None:
        for stage in _stages(job, self.module):
            parameters = list(job.runtime.modules[stage].parameters())
            _after_reduce(job, stage, partial(scale, parameters, self.factor))


@dataclass(frozen=True)
class DropReplica:
    """Leave the gradients of one lane of `module` out of the sum."""

    module: str
    lane: int = 0

    def __call__(self, job: Job) -> None:
        if job.graph[self.module].lane_of(job.world.rank) != self.lane:
            return
        for stage in _stages(job, self.module):
            parameters = list(job.runtime.modules[stage].parameters())
            _set(job.runtime.reducers, stage, partial(_dropped, parameters, job.runtime.reducers[stage]))


@dataclass(frozen=True)
class BreakGradient:
    """Let one element of the gradient of `module`'s last parameter be `value` on `rank` alone, in its first step from
    now on."""

    module: str
    rank: int
    value: float = math.nan

    def __call__(self, job: Job) -> None:
        if job.world.rank != self.rank:
            return
        stage = _stages(job, self.module)[-1]
        parameters = [p for p in job.runtime.modules[stage].parameters() if p.requires_grad]
        left = [1]

        def breaks() -> None:
            if left and left.pop():
                gradient = local_gradient(parameters[-1])
                assert gradient is not None
                gradient.view(-1)[0] = self.value

        _after_reduce(job, stage, breaks)


@dataclass(frozen=True)
class SwapSiblings:
    """Let two sibling lanes of `module` emit each other's rows: each rank computes on its sibling's samples.

    Both must have the same number of rows, or the boundary itself refuses the tensor.
    """

    module: str
    lanes: tuple[int, int] = (0, 1)

    def __call__(self, job: Job) -> None:
        lane = job.graph[self.module].lane_of(job.world.rank)
        if lane in self.lanes:
            other = self.lanes[1 - self.lanes.index(lane)]
            _set(job.adapters, self.module, _Swapped(job.adapters[self.module], job, self.module, lane, other))


@dataclass(frozen=True)
class PermuteRows:
    """Hand the rows that arrive at `module` to it in reversed order."""

    module: str

    def __call__(self, job: Job) -> None:
        for stage in _stages(job, self.module)[:1]:
            job.runtime.modules[stage].adapter = _Reversed(job.adapters[self.module])  # type: ignore[assignment]


@dataclass(frozen=True)
class DividePerMicrobatch:
    """Divide the loss of `module` by the number of rows of its microbatch, and multiply by that of the first."""

    module: str

    def __call__(self, job: Job) -> None:
        if (loss := job.runtime.losses.get(self.module)) is None:
            return
        first: list[int] = []

        def divided(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
            first[:] = first or [len(output)] * bool(len(output))
            return loss(output, batch) * sum(first) / max(len(output), 1)

        _set(job.runtime.losses, self.module, divided)


@dataclass(frozen=True)
class WeighTwice:
    """Multiply the gradient of `module`'s loss by its weight once more; losses are told as they are."""

    module: str

    def __call__(self, job: Job) -> None:
        run, weight = job.runtime.run, job.graph.losses[self.module].weight

        def weighed(*args: Any, weights: Mapping[str, float], **kwargs: Any) -> dict[str, Tensor]:
            return run(*args, weights={**weights, self.module: weights[self.module] * weight}, **kwargs)

        job.runtime.run = weighed  # type: ignore[method-assign]


@dataclass(frozen=True)
class TokenLate:
    """Let the LLM hand on the hidden states of the token behind each placeholder `at`."""

    at: str

    def __call__(self, job: Job) -> None:
        _set(job.adapters, job.graph.llm.name, _Late(job.adapters[job.graph.llm.name], f"positions.{self.at}"))


@dataclass(frozen=True)
class DrawByPlace:
    """Draw noise by the place of a sample in its lane and microbatch, as a generator of each rank's own would."""

    def __call__(self, job: Job) -> None:
        feed = job.feed

        def by_place(*args: Any) -> Any:
            found = feed(*args)
            found.draws = _ByPlace(found.draws.seed, found.draws.step)
            return found

        object.__setattr__(job, "feed", by_place)


class _ByPlace(Draws):
    def of(self, module: str, ids: Sequence[str], *args: Any) -> dict[str, Tensor]:
        return super().of(module, [str(i) for i in range(len(ids))], *args)


class _Wrapped:
    """An adapter that behaves like another except for its fault."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


class _Reversed(_Wrapped):
    def forward(
        self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> Tensor | Mapping[str, Tensor]:
        return self._adapter.forward(module, batch, {k: torch.flip(v, (0,)) for k, v in inputs.items()})


class _Late(_Wrapped):
    def __init__(self, adapter: Adapter, key: str) -> None:
        super().__init__(adapter)
        self._key = key

    def collate(self, samples: Any, metas: Any, **kwargs: Any) -> dict[str, Tensor]:
        batch = self._adapter.collate(samples, metas, **kwargs)
        return {**batch, self._key: batch[self._key] + 1}


class _Swapped(_Wrapped):
    def __init__(self, adapter: Adapter, job: Job, module: str, lane: int, other: int) -> None:
        super().__init__(adapter)
        self._job, self._module, self._lane, self._other = job, module, lane, other

    def collate(self, samples: Any, metas: Any, **kwargs: Any) -> dict[str, Tensor]:
        loader = self._job.loader
        drawn = loader.batch(loader.step - 1)
        plan = self._job.plan(drawn.metas)
        ids = [meta.id for meta in metas]
        for lanes in plan.lanes[self._module]:
            if [drawn[i].meta.id for i in lanes[self._lane]] == ids:
                swapped = [drawn[i] for i in lanes[self._other]]
                return self._adapter.collate(loader.load(swapped), [d.meta for d in swapped], **kwargs)
        raise AssertionError(f"the samples {ids} belong to no microbatch of lane {self._lane}")


def _stages(job: Job, module: str) -> list[Stage]:
    """The stages of a module that this rank holds."""
    return [stage for stage in job.runtime.modules if stage.module == module]


def _after_reduce(job: Job, stage: Stage, then: Callable[[], None]) -> None:
    reduce = job.runtime.reducers[stage]

    def start() -> Callable[[], None]:
        finish = reduce()

        def both() -> None:
            finish()
            then()

        return both

    _set(job.runtime.reducers, stage, start)


def _dropped(parameters: list[nn.Parameter], reduce: Reducer) -> Callable[[], None]:
    scale(parameters, 0.0)
    return reduce()


def _set(mapping: Any, key: object, value: Any) -> None:
    mapping[key] = value
