"""ModuleGraph: which modules exist, on which meshes, and the boundaries between them. Static values, no nn.Module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from hetmesh.errors import GraphError
from hetmesh.graph.sample import UNIT_ITEMS, UNIT_ROWS, SampleMeta
from hetmesh.graph.topology import BoundarySpec, Topology
from hetmesh.layout.mesh import MeshSpec

Reshard = Literal["default", "always", "never"]
CheckpointMode = Literal["none", "selective", "full"]
SAVE_OPS = tuple(map("aten.{}".format, ("linear", "bmm", "baddbmm", "convolution", "scaled_dot_product_attention")))
"""What selective checkpointing keeps unless a recipe says: products and attention."""


@dataclass(frozen=True)
class ModuleOptions:
    """What may be asked of one module beyond its mesh. The defaults change nothing.

    Attributes:
        reshard_after_forward: of modules with a `dp_shard` axis: whether a layer's gathered parameters are let go after
            its forward and gathered again for its backward. `default`: those of blocks are, the root's (embeddings,
            final norm, head) are kept; `always`: both; `never`: neither, and parameters stay whole until the last
            backward of the step, which sums the gradients of all microbatches (ZeRO-1).
        activation_checkpoint: what a block's backward computes again: nothing, all but `save_ops`, or all of it.
        save_ops: operations of torch (`hetmesh.cost.saved_operations`).
        parameter_dtype: of the parameters, their gradients, the sums of those over ranks and the optimizer's state.
        compute_dtype: of the computation and of the rows that the module emits; None is `parameter_dtype`.
        compute_copies: whether the module, where FSDP does not shard it, computes with copies of its parameters in
            `compute_dtype`, and not under torch.autocast. Frozen parameters are in that dtype themselves.
        reduce_dtype: in which FSDP adds up gradients, where it keeps them whole, and sums them over ranks; None is
            `parameter_dtype`.
        sequence_parallel: whether activations between attention and MLP are split over `tp` along the tokens.
        cpu_offload: of modules with a `dp_shard` axis: whether shards, gradients and optimizer state live on the CPU.
        compile_backend: of torch.compile, for each block; None does not compile.
    """

    reshard_after_forward: Reshard = "default"
    activation_checkpoint: CheckpointMode = "none"
    save_ops: tuple[str, ...] = SAVE_OPS
    parameter_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype | None = None
    compute_copies: bool = False
    reduce_dtype: torch.dtype | None = None
    sequence_parallel: bool = False
    cpu_offload: bool = False
    compile_backend: str | None = None

    @property
    def row_dtype(self) -> torch.dtype:
        """In what the module computes, and in what its rows and their gradients travel."""
        return self.compute_dtype or self.parameter_dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        """In what FSDP sums gradients."""
        return self.reduce_dtype or self.parameter_dtype

    @property
    def whole_in_step(self) -> bool:
        """Whether FSDP, where it shards the module, gathers parameters and sums gradients once per step."""
        return self.reshard_after_forward == "never"


DEFAULT = ModuleOptions()


def reshard_in_pipeline(reshard: Reshard, pipeline_ranks: int) -> Reshard:
    """What a policy means in a module on that many pipeline ranks: there "default" is "never", as in torchtitan, or
    every microbatch would wait for gathers and sums that nothing hides."""
    return "never" if reshard == "default" and pipeline_ranks > 1 else reshard


Unit = Literal["tokens", "latents", "frames", "items"]


@dataclass(frozen=True)
class LossSpec:
    """The loss of one module: its sum over a global batch is divided by its count there, and weighed.

    Attributes:
        kind: `cross_entropy`, `mse`, `flow_matching`, or the name of a custom one.
        weight: in the total.
        unit: what is counted: target tokens of the LLM; or, of the media items that a module is about, the rows of
            their targets (`latents`), their first dims (`frames`), or the items.
    """

    kind: str = "cross_entropy"
    weight: float = 1.0
    unit: Unit = "tokens"


NEXT_TOKEN = LossSpec()
"""The loss of an LLM that says nothing else."""

LANE_AXES = ("dp_replicate", "dp_shard", "ep")
"""Mesh axes along which a module processes different samples; one coordinate of them together is a lane."""


@dataclass(frozen=True)
class Activation:
    """What passes between two layers of a module: a tensor `[rows, features]` per lane and microbatch.

    Attributes:
        features: its width.
        padded: the rows are all tokens of the lane's samples, padded to the longest of them (at least one token).
            Otherwise they are counted from the rows that the module emits:
        per_row: rows for each of those, or for each `of_rows` of them, and
        per_item: rows more for each media item (a class token).
    """

    features: int
    padded: bool = False
    per_row: int = 1
    per_item: int = 0
    of_rows: int = 1


@dataclass(frozen=True)
class ModuleSpec:
    """One module of the graph.

    Attributes:
        name: the recipe's name for it, e.g. `"vision"`.
        mesh: its ranks. Axes are a subset of `pp, dp_replicate, dp_shard, ep, cp, tp`, in that order. Along `ep` ranks
            hold different experts; all other parameters are sharded over it where there is a `dp_shard` axis (of size 1
            if `ep` takes all of it), else replicated.
        layers: names of its layers in execution order; pipeline stages are contiguous runs of them.
        media: the kind of media an encoder reads (`"image"`), or that a module after the LLM has its targets from; None
            for a module that reads rows or tokens only.
        trainable: False freezes every parameter of the module.
        features: width of the rows that it emits; of an LLM that of its hidden states; 0 for one without consumers.
        token_axes: mesh axes over which the ranks of a lane share its tokens (`context.token_owners`), of `cp` and
            `tp`; rows that replace placeholders then go to the rank that keeps their token, and to no other. An encoder
            that shares its media emits the rows of a token's rank there.
        tokens_per_row: of an encoder that can share the tokens of its media (patches), how many make one row.
        packed: the samples of a lane lie in one row, one after another, without padding.
        attention_mask: what tokens see of each other; a name of `hetmesh.context.masks.MASKS`.
        assignment: which tokens each rank along `cp` keeps: a policy of `hetmesh.context`.
        token_costs: of an LLM with recurrences whose ranks share its tokens: what a row takes in all layers, in (query,
            key) pairs, and what a cut of a sample sends, in rows of keys; `hetmesh.cost.flops.token_costs`.
        splits: the layers of each pipeline stage, in order; empty: one stage with all of them. Stage i lives at
            coordinate i modulo the size of the `pp` axis.
        activation: what passes between its stages; None for a module that is not split.
        frozen_layers: layers without a trainable parameter in a module that is trainable (LoRA adapts blocks only).
        options: how it runs on its mesh.
        loss: what its last stage computes of its output, besides handing it on; None: nothing, of the LLM `NEXT_TOKEN`.
    """

    name: str
    mesh: MeshSpec
    layers: tuple[str, ...] = ()
    media: str | None = None
    trainable: bool = True
    features: int = 0
    token_axes: tuple[str, ...] = ()
    tokens_per_row: int = 0
    packed: bool = False
    attention_mask: str = "causal"
    assignment: str = "balanced"
    token_costs: tuple[int, int] = (0, 0)
    splits: tuple[tuple[str, ...], ...] = ()
    activation: Activation | None = None
    frozen_layers: frozenset[str] = frozenset()
    options: ModuleOptions = DEFAULT
    loss: LossSpec | None = None

    def __post_init__(self) -> None:
        pp = self.mesh.axis_size("pp")
        if len(self.splits) % pp and (self.splits or pp > 1):
            raise GraphError(
                f"module {self.name!r}: {len(self.splits)} stages for {pp} pipeline ranks; need a multiple of them"
            )
        if self.splits and tuple(layer for run in self.splits for layer in run) != self.layers:
            raise GraphError(f"module {self.name!r}: its stages must hold its layers in order, got {self.splits}")
        if not all(self.splits):
            raise GraphError(f"module {self.name!r}: every stage must hold a layer, got {self.splits}")
        if self.num_stages > 1 and self.activation is None:
            raise GraphError(f"module {self.name!r} cannot be split: what passes between its layers is not known")

    @property
    def num_stages(self) -> int:
        return max(len(self.splits), 1)

    def stage_mesh(self, index: int) -> MeshSpec:
        """The slice of the mesh that holds stage `index`, without its `pp` axis; negative ones count from the end."""
        return self.mesh.slice("pp", (index % self.num_stages) % self.mesh.axis_size("pp"))

    def stage_layers(self, index: int) -> tuple[str, ...]:
        return self.splits[index] if self.splits else self.layers

    def activation_rows(self, samples: Sequence[SampleMeta]) -> int:
        """Rows of what passes between its stages, for the samples of one lane and microbatch (expanded metadata)."""
        assert self.activation is not None
        if self.activation.padded:
            longest = max((sample.tokens for sample in samples), default=1)
            return max(1, sum(sample.tokens for sample in samples) if self.packed else len(samples) * longest)
        emitted = sum(sample.rows.get(self.name + UNIT_ROWS, sample.rows.get(self.name, 0)) for sample in samples)
        items = sum(sample.rows.get(self.name + UNIT_ITEMS, sample.num_items(self.media or "")) for sample in samples)
        return self.activation.per_row * emitted // self.activation.of_rows + self.activation.per_item * items

    @cached_property
    def lane_mesh(self) -> MeshSpec:
        """The mesh with its data-parallel axes merged into one axis `lane`."""
        return self.mesh.merge(LANE_AXES, "lane")

    @property
    def num_lanes(self) -> int:
        """Data-parallel coordinates: how many different sets of samples the module processes at a time."""
        return self.lane_mesh.axis_size("lane")

    @property
    def lanes_together(self) -> int:
        """How many lanes wait for each other in every microbatch: those that hold different experts, and those that
        gather their parameters from each other then, and not once per step."""
        shards = 1 if self.options.whole_in_step else self.mesh.axis_size("dp_shard")
        return shards * self.mesh.axis_size("ep")

    @property
    def splits_backward(self) -> bool:
        """Whether the backward of its stages may come in two parts: FSDP does not let go of parameters before the
        second, and torch.compile makes no single function of it."""
        keeps = self.options.whole_in_step or dense_mesh(self.mesh).axis_size("dp_shard") == 1
        return keeps and self.options.compile_backend is None

    def lane_of(self, rank: int) -> int | None:
        """The lane that `rank` belongs to, or None if it is not a member."""
        coordinate = self.lane_mesh.coordinate(rank)
        return None if coordinate is None else coordinate[self.lane_mesh.axes.index("lane")]


@dataclass(frozen=True)
class ModuleGraph:
    """A DAG of modules with one llm (the module that computes the loss). Raises GraphError: unknown or repeated names,
    a cycle, or not exactly one llm."""

    modules: tuple[ModuleSpec, ...]
    boundaries: tuple[BoundarySpec, ...] = ()

    def __post_init__(self) -> None:
        for b in self.topology.boundaries:
            end = b.source if self.out_of_llm(b) else b.destination
            if b.layer is not None and b.layer not in self[end].layers:
                raise GraphError(f"boundary {b.name}: {end!r} has no layer {b.layer!r}")

    @cached_property
    def topology(self) -> Topology:
        """Who feeds whom, by name."""
        others = frozenset(m.name for m in self.modules if m.loss is not None and m.loss.unit != "tokens")
        return Topology(tuple(m.name for m in self.modules), self.boundaries, others)

    @cached_property
    def _by_name(self) -> dict[str, ModuleSpec]:
        return {m.name: m for m in self.modules}

    def __getitem__(self, name: str) -> ModuleSpec:
        return self._by_name[name]

    @property
    def order(self) -> tuple[str, ...]:
        """Module names, producers before consumers; ties in the order given."""
        return self.topology.order

    @cached_property
    def llm(self) -> ModuleSpec:
        """The module that reads tokens (`Topology.llm`)."""
        return self[self.topology.llm]

    @cached_property
    def losses(self) -> Mapping[str, LossSpec]:
        """The loss of each module that has one, in their order."""
        of_llm = {self.llm.name: NEXT_TOKEN}
        found = {name: self[name].loss or of_llm.get(name) for name in self.order}
        return {name: loss for name, loss in found.items() if loss is not None}

    def out_of_llm(self, boundary: BoundarySpec) -> bool:
        """Whether hidden states of the LLM go over a boundary."""
        return boundary.source == self.topology.llm

    def boundary(self, source: str, destination: str, output: str = "") -> BoundarySpec:
        """The boundary between two modules that carries one of the outputs of the first."""
        return next(b for b in self.boundaries if (b.source, b.destination, b.output) == (source, destination, output))

    def destination_stage(self, boundary: BoundarySpec) -> int:
        """The stage of its destination that a boundary ends at: the first, or the one that holds its layer."""
        layer = None if self.out_of_llm(boundary) else boundary.layer
        return 0 if layer is None else self._stage_of(boundary.destination, layer)

    def source_stage(self, boundary: BoundarySpec) -> int:
        """The stage of its source that a boundary begins at: the last, or the one that holds its layer."""
        layer = boundary.layer if self.out_of_llm(boundary) else None
        return self[boundary.source].num_stages - 1 if layer is None else self._stage_of(boundary.source, layer)

    def _stage_of(self, name: str, layer: str) -> int:
        module = self[name]
        return next((i for i in range(module.num_stages) if layer in module.stage_layers(i)), 0)

    def inputs(self, name: str) -> tuple[BoundarySpec, ...]:
        """Boundaries into module `name`, in the order given."""
        return self.topology.inputs(name)

    def outputs(self, name: str) -> tuple[BoundarySpec, ...]:
        """Boundaries out of module `name`, in the order given."""
        return self.topology.outputs(name)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of all modules, ascending."""
        return tuple(sorted({r for m in self.modules for r in m.mesh.ranks}))

    def backward_reaches(self, name: str) -> bool:
        """Whether module `name` needs a backward: it or anything upstream of it is trainable."""
        return self[name].trainable or any(self.backward_reaches(b.source) for b in self.inputs(name))

    def needs_gradient(self, boundary: BoundarySpec) -> bool:
        """Whether a gradient flows back through `boundary`: something upstream of it is trainable."""
        return self.backward_reaches(boundary.source)


def dense_mesh(mesh: MeshSpec) -> MeshSpec:
    """The mesh of parameters that are no experts: `ep` merged into the axis that it was taken out of."""
    if "ep" not in mesh.axes:
        return mesh
    into = expert_axis(mesh)
    return mesh.merge((into, "ep"), into)


def experts_mesh(mesh: MeshSpec, degree: int) -> MeshSpec:
    """`mesh` with an axis `ep` of size `degree`, taken out of `dp_shard`, else of `dp_replicate`: `dense_mesh`'s
    inverse. A `dp_shard` axis stays, also of size 1: what is no expert is sharded over it and `ep` together. `degree`:
    divides the size of that axis."""
    if degree == 1:
        return mesh
    taken = expert_axis(mesh)
    sizes: dict[str, int] = {}
    for axis, whole in zip(mesh.axes, mesh.sizes, strict=True):
        if axis != taken:
            sizes[axis] = whole
            continue
        if axis == "dp_shard" or whole > degree:
            sizes[axis] = whole // degree
        sizes["ep"] = degree
    return MeshSpec(mesh.ranks, tuple(sizes), tuple(sizes.values()))


def expert_axis(mesh: MeshSpec) -> str:
    """The axis that `ep` is taken out of."""
    return "dp_shard" if "dp_shard" in mesh.axes else "dp_replicate"


def experts_fit(mesh: MeshSpec, count: int, inner: int, features: int) -> bool:
    """Whether the ranks of `mesh`, which has an axis `ep`, can hold equal parts of `count` experts: FSDP splits each of
    them where a rank would get none whole, and then into equal parts.

    Args:
        inner: features between an expert's two products.
        features: of the tokens.
    """
    ep, shards = mesh.axis_size("ep"), mesh.axis_size("dp_shard")
    if count % ep:
        return False
    within = ep > 1 and count // ep < shards
    return not within or (inner // mesh.axis_size("tp") % shards == 0 and features % shards == 0)


def stage_mesh_alone(mesh: MeshSpec, stage: int) -> MeshSpec:
    """Where a module lies that takes the mesh of a module with several stages: on the ranks of the one that its rows go
    to, or come from (-1: the last). Those that share a lane's tokens are lanes of their own to it, which has none."""
    mesh = dense_mesh(mesh.slice("pp", stage % mesh.axis_size("pp")))
    if "cp" in mesh.axes:
        lanes = "dp_shard" if "dp_shard" in mesh.axes else "dp_replicate"
        mesh = mesh.merge((lanes, "cp"), lanes)
    return MeshSpec(mesh.ranks, ("dp_replicate",), (1,)) if mesh.axes == ("pp",) else mesh


def with_neighbours_meshes(topology: Topology, meshes: Mapping[str, MeshSpec]) -> dict[str, MeshSpec]:
    """`meshes`, and of modules without that of their neighbour's first stage, of those after the LLM its last stage.
    `meshes`: at least those of modules without a neighbour."""
    found = dict(meshes)

    def mesh(name: str) -> MeshSpec:
        if name not in found:
            neighbour = topology.neighbour(name)
            assert neighbour is not None
            found[name] = stage_mesh_alone(mesh(neighbour), -1 if name in topology.after_llm else 0)
        return found[name]

    return {name: mesh(name) for name in topology.names}
