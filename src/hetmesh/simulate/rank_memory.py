"""What each rank holds at the moment of a step at which it holds most, and what that is full of: pure values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from hetmesh.cost import StaticMemory, StepCosts
from hetmesh.schedule import Schedule
from hetmesh.simulate.memory import ACTIVATIONS, GATHERED, ROWS, STATIC, SUMS, TEMPORARIES, UPDATE, Peak, peaks
from hetmesh.simulate.program import program
from hetmesh.simulate.step_model import StepModel


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank's device at its fullest moment of a step.

    Attributes:
        parameters, gradients, optimizer: what stays from step to step; gradients, as far as they are there by then.
        activations: kept from forwards to their backwards; where they are recomputed, inputs of layers.
        gathered: parameters that FSDP has gathered.
        temporaries: what the action at hand holds beyond that: logits and their gradients, gradients of activations,
            what is computed again, whole gradients before they are sharded, an optimizer's intermediate tensors.
        sums: gradients packed to be summed over ranks.
        rows: of boundaries, and their gradients.
        communicators: of all process groups of the rank.
        context: what a process holds before its first tensor.
        at: the moment: an action (`"llm.0 B3"`) or `"optimizer"`.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    gathered: int = 0
    temporaries: int = 0
    sums: int = 0
    rows: int = 0
    communicators: int = 0
    context: int = 0
    at: str = ""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by what they are."""
        return {name: size for name, size in asdict(self).items() if name != "at"}

    @property
    def tensors(self) -> int:
        """Bytes of all tensors: what torch has allocated."""
        return self.total - self.communicators - self.context

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryFit:
    """Whether what ranks hold fits a machine.

    Attributes:
        machine: its name.
        memory_bytes: of one of its devices; 0: unknown.
        ranks: what each holds at most, on the largest batch.
        samples: how many were looked at for that batch.
        drawn: how many the run draws.
    """

    machine: str
    memory_bytes: int
    ranks: Mapping[int, RankMemory]
    samples: int = 0
    drawn: int = 0

    @property
    def fullest(self) -> int:
        """The rank that holds most; of equal ones the first."""
        return max(self.ranks, key=lambda rank: (self.ranks[rank].total, -rank))

    @property
    def peak_bytes(self) -> int:
        """What that rank holds."""
        return self.ranks[self.fullest].total

    @property
    def spare_bytes(self) -> int:
        """What is left on the fullest rank; below 0, what it lacks."""
        return self.memory_bytes - self.peak_bytes

    @property
    def fits(self) -> bool | None:
        """Whether every rank has room; None where the machine's memory is not known."""
        return self.spare_bytes >= 0 if self.memory_bytes else None


def worst(each: Iterable[Mapping[int, RankMemory]]) -> dict[int, RankMemory]:
    """Per rank the largest of several predictions."""
    found: dict[int, RankMemory] = {}
    for ranks in each:
        for rank, memory in ranks.items():
            if rank not in found or memory.total > found[rank].total:
                found[rank] = memory
    return found


def rank_memory(
    model: StepModel, schedule: Schedule, costs: StepCosts, communicators: Mapping[int, int] | None = None
) -> dict[int, RankMemory]:
    """Per rank that runs a stage of `schedule`, in order, what its device holds when it holds most.

    What a kernel allocates inside and what an allocator loses in fragments is not in it.

    Args:
        model: whose machine says what a context and a communicator take.
        costs: of `schedule`, from `model.costs`.
        communicators: how many each rank is a member of; none: 0.

    Raises:
        GraphError: there is no cost for a stage and microbatch.
    """
    columns = program(schedule, costs)
    found: dict[int, RankMemory] = {}
    actions = schedule.actions
    for ranks, static, peak in zip(columns.tracks, columns.static_bytes, peaks(schedule, costs, columns), strict=True):
        at = "optimizer" if peak.at == UPDATE else str(actions[peak.at]) if actions else ""
        for rank in ranks:
            found[rank] = replace(
                _tensors(peak, static, _on_device(model, rank)),
                communicators=(communicators or {}).get(rank, 0) * model.machine.communicator_bytes,
                context=model.machine.context_bytes,
                at=at,
            )
    return dict(sorted(found.items()))


def _tensors(peak: Peak, static: int, own: StaticMemory) -> RankMemory:
    """Args:
    static: of the rank of the track that holds most.
    own: of this rank.
    """
    missing = static - peak.bytes[STATIC]  # gradients of stages whose first backward is yet to come
    return RankMemory(
        own.parameters,
        max(own.gradients - missing, 0),
        own.optimizer,
        peak.bytes[ACTIVATIONS],
        peak.bytes[GATHERED],
        peak.bytes[TEMPORARIES],
        peak.bytes[SUMS],
        peak.bytes[ROWS],
    )


def _on_device(model: StepModel, rank: int) -> StaticMemory:
    """What stays on the device of a rank: nothing of modules whose parameters are offloaded to the host."""
    held = StaticMemory()
    for name, ranks in model.memory.items():
        if rank in ranks and not model.graph[name].options.cpu_offload:
            held = held.beside(ranks[rank])
    return held
