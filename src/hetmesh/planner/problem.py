"""What the planner works on: modules by their sizes, a machine, samples, and what the user has fixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np

from hetmesh.balance import BalanceOptions
from hetmesh.balance.plan_batch import UNBALANCED
from hetmesh.cost import Machine, ModuleShape, Profile, Work
from hetmesh.cost.expert_costs import ExpertSizes
from hetmesh.cost.work import samples_work
from hetmesh.graph import Activation, MetaArrays, ModuleGraph


@dataclass(frozen=True)
class ModuleFacts:
    """What of a module bounds its layouts.

    Attributes:
        shape: its layers and their sizes.
        activation: what passes between its layers; None: it cannot be a pipeline.
        first_layers: layers that stay together in the first stage.
        tensor_degrees: the degrees of tensor parallelism that it can have; none: any.
        context_parallel: whether its ranks can share the tokens of a sample, or of an encoder's media.
        tokens_per_row: of an encoder whose ranks can, how many tokens of its media make one row.
        sequence_parallel: whether its ranks along `tp` can share the tokens between products: all that can do.
        alone: whether it has a mesh of its own; a module without one takes that of a neighbour's stage.
        frozen_layers: layers that train nothing, where others of the module do.
        experts: of its mixture-of-experts blocks, where ranks can hold different ones.
    """

    shape: ModuleShape
    activation: Activation | None = None
    first_layers: tuple[str, ...] = ()
    tensor_degrees: tuple[int, ...] = ()
    context_parallel: bool = False
    tokens_per_row: int = 0
    sequence_parallel: bool = False
    alone: bool = True
    frozen_layers: frozenset[str] = frozenset()
    experts: ExpertSizes | None = None

    @cached_property
    def most_stages(self) -> int:
        """Pipeline stages that it can have."""
        layers = sum(bool(layer.name) for layer in self.shape.layers)
        return 1 if self.activation is None else max(layers - max(len(self.first_layers) - 1, 0), 1)


@dataclass(frozen=True, eq=False)
class Problem:
    """A search.

    Attributes:
        graph: the modules and boundaries; the meshes and stages of its modules count for nothing. Where the LLM does
            not pack samples, a layout whose ranks share tokens does.
        facts: of every module.
        machine: its peaks, links and memory.
        ranks: how many there are; the first `machine.ranks_per_node` share a node, and so on.
        samples: expanded metadata, global batches from all of the run in its order, for the largest too.
        global_batch_size: samples per step.
        optimizer: its name in a recipe.
        balance: how batches are balanced.
        fixed: what candidates must agree with, as (module, what) -> value: a mesh axis, `activation_checkpoint` or
            `enable_sequence_parallel`; of the module `""` `placement`, `schedule` or `microbatch_size`.
        profile: measured seconds of layers, which take the place of the analytic ones.
        memory_bytes: the most that a rank may hold; None: nine tenths of the machine's. The rest is for what is not
            predicted: workspaces of kernels, fragments.
        communicators: how many each rank of a layout uses; None: they count for nothing.
        window: batches, evenly from `samples`, of which means are taken and some are laid out; None: all.
    """

    graph: ModuleGraph
    facts: Mapping[str, ModuleFacts]
    machine: Machine
    ranks: int
    samples: MetaArrays
    global_batch_size: int
    optimizer: str = "AdamW"
    balance: BalanceOptions = UNBALANCED
    fixed: Mapping[tuple[str, str], object] = field(default_factory=lambda: MappingProxyType({}))
    memory_bytes: int | None = None
    profile: Profile | None = None
    communicators: Callable[[ModuleGraph], Mapping[int, int]] | None = None
    window: int | None = None

    @property
    def limit(self) -> int:
        """Bytes that a rank may hold; 0: no limit is known."""
        return self.memory_bytes if self.memory_bytes is not None else self.machine.memory_bytes * 9 // 10

    @property
    def tensor_limit(self) -> int:
        """Bytes of tensors that a rank may hold beside the fewest communicators of many ranks; 0: no limit is known."""
        few = self.machine.context_bytes + 4 * self.machine.communicator_bytes
        return max(self.limit - few, 1) if self.limit and self.communicators and self.ranks > 1 else self.limit

    def reserved(self, graph: ModuleGraph) -> int:
        """Bytes on the rank with most communicators that are no tensors, under a layout."""
        most = max(self.communicators(graph).values(), default=0) if self.communicators else 0
        return self.machine.context_bytes + most * self.machine.communicator_bytes

    @cached_property
    def typical(self) -> MetaArrays:
        """The samples of the window."""
        size, count = self.global_batch_size, len(self.samples) // self.global_batch_size
        if self.window is None or self.window >= count:
            return self.samples
        firsts = [k * count // self.window * size for k in range(self.window)]
        return self.samples.take([i for first in firsts for i in range(first, first + size)])

    @cached_property
    def mean_work(self) -> Mapping[str, np.ndarray]:
        """Per module the rows, pairs and targets of the mean sample."""
        return {name: samples_work(self.graph, name, self.typical).mean(0) for name in self.graph.order}

    @cached_property
    def alike(self) -> bool:
        """Whether all samples cost the same."""
        work = [samples_work(self.graph, name, self.samples) for name in self.graph.order]
        return all(bool((each == each[:1]).all()) for each in (*work, self.samples.tokens))

    def typical_work(self, name: str, samples: float) -> Work:
        """What a typical microbatch of that many samples gives one lane of a module: the mean, at least one row."""
        return Work(*(max(round(float(mean * samples)), 1) for mean in self.mean_work[name]))

    @cached_property
    def own(self) -> tuple[str, ...]:
        """The modules with meshes of their own; the LLM is the last."""
        own, llm = [name for name in self.graph.order if self.facts[name].alone], self.graph.llm.name
        return (*(name for name in own if name != llm), llm)

    @cached_property
    def after(self) -> frozenset[str]:
        """The modules after the LLM."""
        return self.graph.topology.after_llm
