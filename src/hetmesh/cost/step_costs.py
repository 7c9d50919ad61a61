"""StepCosts: what every stage, transfer and collective of one step takes. The input of the simulator and of policies.

A plain value: the analytic model and the fitted one both make it, and so does whoever wants to play with numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hetmesh.graph import Route, Stage


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage and microbatch, on the rank of the stage that is busy longest.

    Attributes:
        forward: seconds.
        backward_input: seconds of the part of the backward that makes the gradient of the stage's input (with what full
            recomputation adds); 0 where nothing before the stage is trainable.
        backward_weight: seconds of the part that makes the gradients of its parameters; 0 where they are frozen.
        collectives_forward, collectives_backward: of these the collectives inside layers (tensor parallelism).
        activation_bytes: kept from forward to backward on each rank; 0 where no backward follows.
        forward_bytes, backward_bytes: the most that each holds beyond that at a time.
        split_bytes: kept between the two parts of a split backward beyond that.
        input_bytes: the most that the first of these parts holds beyond both at a time, at its end.
    """

    forward: float
    backward_input: float = 0.0
    backward_weight: float = 0.0
    collectives_forward: float = 0.0
    collectives_backward: float = 0.0
    activation_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    split_bytes: int = 0
    input_bytes: int = 0

    @property
    def backward(self) -> float:
        """Seconds of the whole backward."""
        return self.backward_input + self.backward_weight


COLLECTIVE, EXCHANGE = "collective", "exchange"
"""Kinds of parts that are no computation: collectives of tensor parallelism inside layers, and waits for what FSDP
gathers or context parallelism fetches."""

Parts = tuple[tuple[str, float], ...]
"""What an action consists of, in order: (kind, seconds). Kinds are `attention` and `mlp`, a layer's computation up to
the sum that ends it, `COLLECTIVE` and `EXCHANGE`."""


@dataclass(frozen=True, slots=True)
class StageParts:
    """The parts of a stage and microbatch, in its forward and in both parts of its backward (whole, it is one after the
    other): they add up to the seconds of its `StageCost`."""

    forward: Parts
    backward_input: Parts = ()
    backward_weight: Parts = ()


@dataclass(frozen=True, slots=True)
class StageBytes:
    """What a stage holds that does not depend on microbatches, on the rank that holds most; beside its parameters.

    Attributes:
        gradients: from its first backward on; in `StepCosts.static_bytes`, too.
        gathered: parameters that FSDP gathers for a forward and keeps for the backward, while one is to come.
        summed: copies of gradients that are packed to be summed over ranks after the last backward.
        gathering: of the bytes that an action holds for a moment, those of parameters that FSDP gathers for it alone.
        scattered: whole gradients of what FSDP gathers for a whole forward, while they are summed to shards.
        whole: whether `gathered` stays from its first action of a step to the last, whose end the sums are at, and
            `gradients` are there from then on.
        whole_gradients: what adds up meanwhile, from the first backward on.
    """

    gradients: int = 0
    gathered: int = 0
    summed: int = 0
    gathering: int = 0
    scattered: int = 0
    whole: bool = False
    whole_gradients: int = 0


@dataclass(frozen=True, slots=True)
class TransferCost:
    """What travels along one route, rows or (reversed) their gradients: seconds from the first byte sent to the last
    one in place, and the bytes of the rank that receives most."""

    seconds: float = 0.0
    bytes: int = 0


@dataclass(frozen=True)
class Lanes:
    """Which ranks of a stage start together, where not all of them do, and who waits for whom.

    Attributes:
        groups: per stage, sets of its ranks: the ranks of a set start an action together, other sets when they are free
            (data-parallel lanes that no collective joins). A stage that is left out is one set.
        flows: per forward route between modules, pairs (set of the source's stage, set of the destination's): rows go
            from one to the other. A route that is left out joins everything; between two stages of one module, with
            equally many sets, each goes on to the set of its number.
        costs: per stage and microbatch the cost of each set, where they differ.
    """

    groups: Mapping[Stage, tuple[tuple[int, ...], ...]]
    flows: Mapping[Route, tuple[tuple[int, int], ...]] = field(default_factory=lambda: MappingProxyType({}))
    costs: Mapping[tuple[Stage, int], tuple[StageCost, ...]] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class StepCosts:
    """One optimizer step.

    Attributes:
        stages: per stage and microbatch.
        transfers: per route, forward or reversed; what is left out takes no time.
        gather: per stage, seconds of gathering its sharded parameters before its first forward.
        reduce: per stage, seconds of summing its gradients over its lanes once per step, after its last backward.
        optimizer: per rank, seconds of normalising, clipping and the optimizer step.
        static_bytes: per rank, parameters, gradients and optimizer state.
        action_overhead: seconds that the runtime itself spends on each action, in which nothing is computed.
        hand_over: see `Machine`.
        lanes: which ranks of a stage act apart; None: all ranks of a stage act as one.
        parts: per stage and microbatch what its actions consist of, where that was asked for.
        busy_slowdown, ranks_per_node: see `Machine`. All other seconds are of ranks that have their node to themselves.
        stage_bytes: per stage, what it holds whatever the microbatches.
        update_bytes: per rank, what the optimizer's step holds for a moment beyond `static_bytes`.
    """

    stages: Mapping[tuple[Stage, int], StageCost]
    transfers: Mapping[Route, TransferCost] = field(default_factory=lambda: MappingProxyType({}))
    gather: Mapping[Stage, float] = field(default_factory=lambda: MappingProxyType({}))
    reduce: Mapping[Stage, float] = field(default_factory=lambda: MappingProxyType({}))
    optimizer: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    static_bytes: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    action_overhead: float = 0.0
    hand_over: float = 0.0
    busy_slowdown: tuple[float, ...] = ()
    ranks_per_node: int = 0
    lanes: Lanes | None = None
    stage_bytes: Mapping[Stage, StageBytes] = field(default_factory=lambda: MappingProxyType({}))
    parts: Mapping[tuple[Stage, int], StageParts] = field(default_factory=lambda: MappingProxyType({}))
    update_bytes: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
