"""Feed: from a drawn global batch and its plan to the tensors that this rank's modules read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetmesh.attention.packed_rows import with_tensors
from hetmesh.balance import BatchPlan
from hetmesh.boundary.watchdog import Watchdog
from hetmesh.data.drawn import DrawnBatch
from hetmesh.data.loader import Loader
from hetmesh.data.payloads import Unreadable, Wanted
from hetmesh.data.source import COSTS, Sample, abilities_of
from hetmesh.graph import ModuleSpec, SampleMeta, Stage
from hetmesh.graph.sample import LOSS_UNITS, kinds_of
from hetmesh.models.adapter import Adapter
from hetmesh.models.collate import target_values
from hetmesh.models.draws import Draws
from hetmesh.models.packing import lane_batch
from hetmesh.schedule import Kind, Schedule


@dataclass
class Loaded:
    """What one rank loaded in one step.

    Attributes:
        bytes_read: from files, counted where they were read.
        bytes_needed: the stored size of what its modules use of the samples of its lanes.
        load_s, frames_decoded, frames_needed: as of a `Sample`; several processes may load at the same time.
        wait_s: seconds that its modules waited for samples.
    """

    bytes_read: int = 0
    bytes_needed: int = 0
    load_s: float = 0.0
    frames_decoded: int = 0
    frames_needed: int = 0
    wait_s: float = 0.0


class Feed:
    """Loads the samples of this rank's lanes, once each, and collates them per module and microbatch. Of a sample only
    what the modules of this rank read is loaded: pixels where an encoder's first stage takes that sample, else tokens.

    Calling it is what `Runtime.run` takes as `load_batch`.
    """

    def __init__(
        self,
        loader: Loader,
        drawn: DrawnBatch,
        plan: BatchPlan,
        adapters: Mapping[str, Adapter],
        rank: int,
        draws: Draws,
    ) -> None:
        self.loader, self.drawn, self.plan, self.adapters, self.rank = loader, drawn, plan, adapters, rank
        self.draws = draws
        self.loaded = Loaded()
        self._samples: dict[int, Sample] = {}
        self._mine: set[int] = set()
        self._kinds = self._wanted()

    def __call__(self, stage: Stage, microbatch: int) -> Mapping[str, Any]:
        """The stage's own inputs on this rank; see `Adapter.collate` and `hetmesh.models.packing.lane_batch`. Where a
        loss does not count all rows, `counted` says which, bool `[rows]`."""
        batch, spec = self._batch(stage, microbatch), self.plan.graph[stage.module]
        if spec.loss is None or spec.loss.unit == "tokens" or stage.index != spec.num_stages - 1:
            return batch
        metas = [self.plan.samples[i] for i in self._indices(stage, microbatch)]
        counted = [meta.rows[spec.name + LOSS_UNITS] > 0 for meta in metas]
        if spec.name in self.plan.graph.topology.after_llm:
            rows = _target_rows(self.adapters[spec.name], _shapes(spec, metas))
        else:
            rows = [meta.rows[spec.name] for meta in metas]
        if all(count or not n for count, n in zip(counted, rows, strict=True)):
            return batch
        return with_tensors(batch, {**batch, "counted": torch.tensor(counted).repeat_interleave(torch.tensor(rows))})

    def _batch(self, stage: Stage, microbatch: int) -> Mapping[str, Any]:
        module, source = stage.module, self.loader.source
        spec = self.plan.graph[module]
        if not self._reads(spec, stage.index):
            of_shapes = self.adapters[module].abilities.stage_batch
            if spec.media is None or of_shapes is None:
                return {}  # rows or activations only
            return of_shapes([self.plan.samples[i] for i in self._indices(stage, microbatch)])
        indices = self._indices(stage, microbatch)
        self._load([i for i in indices if i not in self._samples])
        samples, metas = [self._samples[i] for i in indices], [self.plan.samples[i] for i in indices]
        adapter = self.adapters[module]
        batch = adapter.collate(samples, metas, placeholders=source.placeholders, pad_id=source.pad_id)
        if module == self.plan.graph.llm.name and (names := abilities_of(source).values):
            batch = {**batch, **target_values(samples, metas, names)}
        if spec.loss is not None and module in self.plan.graph.topology.after_llm:
            return {**batch, **of_loss(adapter, spec, metas, self.draws)}
        return lane_batch(adapter, batch, self.plan, stage, microbatch, self.rank)

    def _indices(self, stage: Stage, microbatch: int) -> Sequence[int]:
        lane = self.plan.graph[stage.module].lane_of(self.rank)
        assert lane is not None
        return self.plan.samples_of(stage.module, microbatch, lane)

    def announce(self, schedule: Schedule) -> None:
        """Say which samples the actions of `schedule` will ask for, in that order, so that they are loaded by then."""
        known: set[int] = set()
        requests: list[list[Wanted]] = []
        for action in schedule.of_rank(self.rank):
            stage = action.target
            if action.kind is not Kind.FORWARD or not isinstance(stage, Stage):
                continue
            spec = self.plan.graph[stage.module]
            lane = spec.lane_of(self.rank)
            if lane is None or not self._reads(spec, stage.index):
                continue
            new = [i for i in self.plan.samples_of(stage.module, action.microbatch, lane) if i not in known]
            if new:
                requests.append(self.loader.wanted([self.drawn[i] for i in new], self._kinds))
                known.update(new)
        self.loader.payloads.announce(requests)

    def _reads(self, spec: ModuleSpec, stage: int) -> bool:
        """Whether a stage reads samples itself: an encoder's first one, of units every one; every one of the LLM; of
        a module after it that has targets the first and the last."""
        graph = self.plan.graph
        if spec.name in graph.topology.after_llm:
            return spec.loss is not None and stage in (0, spec.num_stages - 1)
        reads = stage == 0 or bool(len(self.drawn.metas.runs))
        return spec.name == graph.llm.name or (reads and not graph.inputs(spec.name))

    def _wanted(self) -> dict[int, set[str]]:
        """The kinds of media that this rank's modules read, by source index of the samples of its lanes, whose
        indices in the batch are noted too."""
        wanted: dict[int, set[str]] = {}
        for name in self.plan.graph.order:
            spec = self.plan.graph[name]
            mine = [i for i in range(spec.num_stages) if self.rank in spec.stage_mesh(i) and self._reads(spec, i)]
            if not mine:
                continue
            lane = spec.lane_of(self.rank)
            assert lane is not None
            for lanes in self.plan.lanes[name]:
                self._mine.update(lanes[lane])
                for i in lanes[lane]:
                    kinds = wanted.setdefault(self.drawn.indices[i], set())
                    if spec.media is not None:
                        kinds.update(kinds_of(spec.media))
        return wanted

    def load_all(self, watchdog: Watchdog) -> dict[int, str]:
        """Load all that this rank will ask for. What cannot be read gets a blank payload of the planned shapes.
        `watchdog`: watches each sample. Returns why not, by index in the batch."""
        wrong: dict[int, str] = {}
        for i in sorted(self._mine):
            with watchdog.watching(f"loading sample {self.drawn.given.ids[i]!r} on rank {self.rank}"):
                wrong |= self._load([i], blanks=True)
        return wrong

    def _load(self, missing: Sequence[int], blanks: bool = False) -> dict[int, str]:
        started = time.perf_counter()
        wrong: dict[int, str] = {}
        load = self.loader.try_load if blanks else self.loader.load
        for i, found in zip(missing, load([self.drawn[i] for i in missing], self._kinds), strict=True):
            if isinstance(found, Unreadable):
                wrong[i] = found.message
                found = self.loader.blank(self.drawn[i], self._kinds[self.drawn.indices[i]])
            self._samples[i] = found
            for name in COSTS:
                setattr(self.loaded, name, getattr(self.loaded, name) + getattr(found, name))
        self.loaded.wait_s += time.perf_counter() - started
        return wrong


def of_loss(adapter: Adapter, spec: ModuleSpec, metas: Sequence[SampleMeta], draws: Draws) -> dict[str, Tensor]:
    """What the loss of a module after the LLM draws."""
    if not (features := adapter.abilities.draws):
        return {}
    shapes = _shapes(spec, metas)
    rows = _target_rows(adapter, shapes)
    found = draws.of(spec.name, [meta.id for meta in metas], list(map(len, shapes)), rows, features)
    return {key: value.to(spec.options.parameter_dtype) for key, value in found.items()}


def _shapes(spec: ModuleSpec, metas: Sequence[SampleMeta]) -> list[list[tuple[int, ...]]]:
    """Of the items of each sample that a module makes."""
    kinds = kinds_of(spec.media or "")
    return [[item.extent for item in meta.media if item.name in kinds] for meta in metas]


def _target_rows(adapter: Adapter, shapes: Sequence[Sequence[tuple[int, ...]]]) -> list[int]:
    return [sum(map(adapter.item_latents, each)) for each in shapes]
