"""What is shown of a recipe, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hetmesh.cost import Flops, StaticMemory, Work
from hetmesh.records.metrics import amount
from hetmesh.simulate import MemoryFit


@dataclass(frozen=True)
class HeldView:
    """What a stage holds at most of its module's microbatches, between their forward and the end of their backward, and
    of all those on the lane that holds most: rows that the module emits, or the tokens of the LLM."""

    microbatches: int
    rows: int


@dataclass(frozen=True)
class ModuleView:
    """One module on its mesh. What is None could not be known without building the module.

    Attributes:
        ranks: in mesh order.
        axes: mesh axes and their sizes, outermost first.
        lanes: data-parallel coordinates.
        cells: rank -> its coordinates, e.g. `"dp0 tp1"`.
        training: `"trained"`, `"frozen"` or `"partly"` (LoRA).
        dtype: in which it computes, and in which its rows travel.
        parameters, trainable_parameters: elements before sharding.
        memory: rank -> what it holds of the module for the whole run.
        work: in one step over the first global batch.
        flops: the same work over all ranks.
        imbalance: busiest lane over mean lane in that step, by rows.
        stages: the layers of each pipeline stage, stage i at coordinate i modulo the size of `pp`; none: not split.
        microbatches: of that step; modules may have different numbers.
        once_per_step: whether FSDP gathers its parameters and sums its gradients once per step, or else in every
            microbatch; None where it shards nothing.
    """

    name: str
    model: str
    ranks: tuple[int, ...]
    axes: Mapping[str, int]
    lanes: int
    cells: Mapping[int, str]
    training: str
    dtype: str
    parameters: int | None
    trainable_parameters: int | None
    memory: Mapping[int, StaticMemory]
    work: Work
    flops: Flops | None
    imbalance: float
    stages: tuple[tuple[str, ...], ...] = ()
    microbatches: int = 0
    held: tuple[HeldView, ...] = ()
    once_per_step: bool | None = None

    @property
    def summary(self) -> str:
        """`"siglip 413 M, frozen"`."""
        size = "" if self.parameters is None else f" {amount(self.parameters).strip()}"
        return f"{self.model}{size}{'' if self.training == 'trained' else ', ' + self.training}"


@dataclass(frozen=True)
class Traffic:
    """One direction of a boundary in one microbatch: bytes that the plan moves between ranks; the fewest that any plan
    could (what each rank must end up with and does not hold, by the layouts alone); their way, by what
    may carry them (`memory` where all ranks are on the CPUs of one host, else a backend)."""

    bytes: int
    bound: int
    transport: Mapping[str, str]


@dataclass(frozen=True)
class BoundaryView:
    """One boundary in the first global batch, along the first of its routes.

    Attributes:
        microbatches: of source and destination that this route joins; routes: how many there are.
        at: the placeholder whose tokens the rows replace; out of the LLM, whose hidden states they are.
        layer: the layer after which a side output of the source is added to those tokens, or which they come from.
        shape: rows and features.
        source_layout, destination_layout: in words.
        forward, backward: what moves; no backward where nothing upstream is trainable.
    """

    source: str
    destination: str
    at: str | None
    shape: tuple[int, int]
    source_layout: str
    destination_layout: str
    forward: Traffic
    backward: Traffic | None
    layer: str | None = None
    microbatches: tuple[int, int] = (0, 0)
    routes: int = 1

    @property
    def name(self) -> str:
        """As logs call it."""
        return f"{self.source}->{self.destination}"


@dataclass(frozen=True)
class RecipeView:
    """What a recipe means.

    Attributes:
        ranks: processes; idle_ranks: those without a module.
        global_batch_size, microbatch_size: samples per step, and per lane of the LLM and microbatch.
        tokens: of the first global batch, without padding.
        dtype: of parameters, gradients and optimizer state.
        modules, boundaries: in the recipe's order.
        process_groups, process_groups_per_rank: that a run on NCCL makes besides torch's default one; at most on one
            rank. Gloo needs none for messages.
        fit: what ranks hold at their fullest, on the largest batch, and whether the machine has as much; None where the
            sizes of a module are not known.
        deferral: whether the LLM may take samples one microbatch late, and why.
        llm: the module that reads tokens.
        notes: what the figures assume or leave out.
    """

    description: str
    ranks: int
    idle_ranks: tuple[int, ...]
    steps: int
    schedule: str
    global_batch_size: int
    microbatch_size: int
    microbatches: int
    tokens: int
    dtype: str
    optimizer: str
    modules: tuple[ModuleView, ...]
    boundaries: tuple[BoundaryView, ...]
    process_groups: int
    process_groups_per_rank: int
    fit: MemoryFit | None = None
    deferral: str = ""
    llm: str = ""
    notes: tuple[str, ...] = ()

    def memory(self, rank: int) -> int:
        """Bytes that `rank` holds for the whole run, all modules together."""
        return sum(module.memory[rank].total for module in self.modules if rank in module.memory)

    def as_json(self) -> dict[str, Any]:
        """The same in what JSON knows."""
        if (fit := self.fit) is None:
            return asdict(self)
        keys = ("machine", "memory_bytes", "fits", "fullest", "peak_bytes", "spare_bytes", "samples", "drawn")
        plain = {key: getattr(fit, key) for key in keys} | ({} if fit.memory_bytes else {"spare_bytes": None})
        return asdict(self) | {"fit": plain | {"ranks": {rank: asdict(memory) for rank, memory in fit.ranks.items()}}}
