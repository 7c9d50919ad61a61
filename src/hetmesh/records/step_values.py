"""What is known and measured of a step: values, which metrics are written from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hetmesh.balance.imbalance import BatchLoad

Loads = Mapping[str, Mapping[str, float]]
"""By module: `balance_loss`, the mean over tokens and blocks, without its coefficient (`experts per token` where
routing is even); `max_over_mean`, the tokens of the busiest expert over the mean expert's, in the block where that is
largest; `ranks_max_over_mean`, the same of ranks along `ep`; `without_tokens`, experts of any block that got none."""


@dataclass(frozen=True)
class StepCost:
    """What every rank knows about a step from metadata.

    Attributes:
        flops: per module, forward and backward, over all its ranks; modules of unknown sizes are left out.
        module_mfu: the module's FLOPs over what its own ranks could have done in the time of the step at their peak in
            the dtype in which it computes.
        mfu: the time that all allocated ranks would have needed at their peak, over the time that they took.
        imbalance: per module: the busiest lane's rows over the mean lane's (`hetmesh.cost.imbalance`).
    """

    flops: Mapping[str, int] = field(default_factory=dict)
    module_mfu: Mapping[str, float] = field(default_factory=dict)
    mfu: float | None = None
    imbalance: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepLoad:
    """How even the microbatches and lanes of a step were.

    Attributes:
        drawn: had every sample stayed where it was drawn, in as many microbatches as the recipe asks for.
        balanced: as they were.
    """

    drawn: BatchLoad
    balanced: BatchLoad

    def record(self) -> dict[str, Any]:
        """What metrics.jsonl has of it: `load` by module, and `deferred_samples`."""
        load = {
            name: asdict(each) | {f"drawn_{key}": value for key, value in asdict(self.drawn.modules[name]).items()}
            for name, each in self.balanced.modules.items()
        }
        rounded = {name: {key: round(value, 4) for key, value in each.items()} for name, each in load.items()}
        return {"load": rounded, "deferred_samples": self.balanced.deferred}


@dataclass(frozen=True)
class Measured:
    """What the ranks measured in one step, gathered.

    Attributes:
        memory_bytes: the largest peak of any rank so far: allocated on CUDA, else resident.
        active_ranks: ranks that hold a module.
        allocated_ranks: ranks of the job.
        boundary_bytes: received over all ranks, by boundary and direction.
        wait_s: seconds that the rank which waited longest did nothing but wait for a boundary's messages.
        data: of the samples, `bytes_read` and `bytes_needed` over all ranks, `bytes_read_most` by any rank, and
            `wait_s`, the seconds that the rank which waited longest for them did.
        experts: how even routing was, by module.
    """

    memory_bytes: int
    active_ranks: int
    allocated_ranks: int
    boundary_bytes: Mapping[str, Mapping[str, int]]
    wait_s: Mapping[str, float]
    data: Mapping[str, float] = field(default_factory=dict)
    experts: Loads = field(default_factory=dict)
