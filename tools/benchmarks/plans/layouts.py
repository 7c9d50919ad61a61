"""Twelve plans of one small VLM and one batch on two ranks: placements, kinds of parallelism, schedules, recomputation
and microbatch sizes. Two have a generator behind the LLM."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.schedule.recipes import Configuration
from hetmesh.recipe.recipe import Recipe

_RANKS = "[parallelism.{}]\nranks = {}\n"
_VISION_ON_0, _LLM_ON_1 = _RANKS.format("vision", [0]), _RANKS.format("llm", [1])
_PIPELINE = _RANKS.format("llm", [0, 1]) + "pipeline_parallel_degree = 2\n"


def _both(name: str, key: str = "data_parallel_replicate_degree") -> str:
    return _RANKS.format(name, [0, 1]) + f"{key} = 2\n"


_REPLICAS = _both("vision") + _both("llm")
_SHARDED = _both("vision", "data_parallel_shard_degree") + _both("llm", "data_parallel_shard_degree")
_TENSOR = _both("vision") + _both("llm", "tensor_parallel_degree")
_SPREAD = _both("vision") + _both("projector")


@dataclass(frozen=True)
class Plan:
    """One layout, schedule and microbatch size.

    Attributes:
        tables: of `[parallelism]`.
        microbatch: samples per microbatch and lane of the LLM.
        lanes: of the LLM.
        recomputed: whether blocks are computed again in the backward.
        draws: whether a generator follows the LLM.
    """

    name: str
    schedule: str
    tables: str
    microbatch: int
    lanes: int = 1
    recomputed: bool = False
    draws: bool = False

    def recipe(self, *, width: int, layers: int, samples: int) -> Recipe:
        """The recipe, with `samples` per step."""
        again = '[activation_checkpoint]\nmode = "full"\n' if self.recomputed else ""
        made = Configuration(self.name, self.schedule, self.tables + again, vision_layers=2, draws=self.draws)
        count = samples // (self.lanes * self.microbatch)
        return made.recipe(width=width, llm_layers=layers, microbatch=self.microbatch, microbatches=count)

    @property
    def fitted(self) -> tuple[int, ...]:
        """Samples per microbatch at which its stages are measured, none of them its own."""
        return max(self.microbatch // 2, 1), 3 * self.microbatch // 2, 2 * self.microbatch


PLANS = (
    Plan("replicas", "sequential", _REPLICAS, 4, lanes=2),
    Plan("replicas, small microbatches", "sequential", _REPLICAS, 2, lanes=2),
    Plan("replicas, recomputed", "sequential", _REPLICAS, 4, lanes=2, recomputed=True),
    Plan("fully sharded", "sequential", _SHARDED, 4, lanes=2),
    Plan("tensor parallel", "sequential", _TENSOR, 4),
    Plan("pipeline, 1f1b", "1f1b", _VISION_ON_0 + _PIPELINE, 2),
    Plan("pipeline, interleaved", "interleaved", _VISION_ON_0 + _PIPELINE, 4),
    Plan("pipeline, three_phase", "three_phase", _SPREAD + _PIPELINE, 4),
    Plan("disjoint", "1f1b", _VISION_ON_0 + _LLM_ON_1, 4),
    Plan("disjoint, recomputed", "1f1b", _VISION_ON_0 + _LLM_ON_1, 2, recomputed=True),
    Plan("generator on the other rank", "1f1b", _VISION_ON_0 + _LLM_ON_1 + _RANKS.format("drawer", [0]), 4, draws=True),
    Plan("generator beside a pipeline", "1f1b", _SPREAD + _PIPELINE + _both("drawer"), 4, draws=True),
)
