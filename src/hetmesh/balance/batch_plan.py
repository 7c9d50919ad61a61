"""BatchPlan: which samples each lane and microbatch of each module handles. A pure function of sample metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hetmesh.context import Mask
from hetmesh.context.share_tokens import share_tokens
from hetmesh.context.token_owners import LaneTokens
from hetmesh.errors import GraphError
from hetmesh.graph import ModuleGraph, SampleMeta

Lanes = tuple[tuple[int, ...], ...]
"""Sample indices per lane, in the order in which the lane processes them."""


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The assignment of one global batch.

    Attributes:
        graph: the modules it is for.
        samples: the global batch, expanded metadata, in order; everything refers to samples by their index here.
        lanes: per module name and microbatch, the samples of each lane.

    Raises:
        GraphError: a sample is missing or handled twice by some module.
    """

    graph: ModuleGraph
    samples: tuple[SampleMeta, ...]
    lanes: Mapping[str, tuple[Lanes, ...]]

    def __post_init__(self) -> None:
        everything = list(range(len(self.samples)))
        for name in self.graph.order:
            microbatches = self.lanes[name]
            given = sorted(i for lanes in microbatches for lane in lanes for i in lane)
            if given != everything:
                wrong = sorted({i for i in given if given.count(i) > 1} | set(everything) - set(given))
                raise GraphError(f"batch plan: module {name!r} must handle every sample once; wrong are {wrong[:8]}")
            if len(microbatches) != self.num_microbatches or any(
                len(lanes) != self.graph[name].num_lanes for lanes in microbatches
            ):
                raise GraphError(
                    f"batch plan: module {name!r} needs {self.num_microbatches} microbatches of "
                    f"{self.graph[name].num_lanes} lanes"
                )

    @property
    def num_microbatches(self) -> int:
        """Microbatches in the step, equal for all modules."""
        return len(self.lanes[self.graph.sink.name])

    @property
    def num_targets(self) -> int:
        """Valid target tokens of the whole global batch: the loss is normalised by this number, once."""
        return sum(sample.num_targets for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole global batch, placeholders included, padding excluded."""
        return sum(sample.tokens for sample in self.samples)

    def samples_of(self, module: str, microbatch: int, lane: int) -> tuple[int, ...]:
        """Indices of the samples that one lane handles in one microbatch."""
        return self.lanes[module][microbatch][lane]

    @cached_property
    def _shared_tokens(self) -> dict[tuple[str, int, int], tuple[LaneTokens, Mask | None]]:
        return {}

    def _tokens(self, module: str, microbatch: int, lane: int) -> tuple[LaneTokens, Mask | None]:
        key = (module, microbatch, lane)
        if key not in self._shared_tokens:
            samples = [self.samples[i] for i in self.samples_of(*key)]
            self._shared_tokens[key] = share_tokens(self.graph[module], samples)
        return self._shared_tokens[key]

    def lane_tokens(self, module: str, microbatch: int, lane: int) -> LaneTokens:
        """Which rank keeps which tokens of one lane in one microbatch of a module that reads tokens, or media whose
        tokens its ranks share."""
        return self._tokens(module, microbatch, lane)[0]

    def lane_mask(self, module: str, microbatch: int, lane: int) -> Mask:
        """What the packed tokens of that lane see of each other."""
        mask = self._tokens(module, microbatch, lane)[1]
        assert mask is not None
        return mask
