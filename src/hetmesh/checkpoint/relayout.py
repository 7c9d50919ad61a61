"""The state of a run in another layout, without a file: parameters, buffers and what optimizers keep of them go from
rank to rank as the rows of boundaries do. Each rank receives what it will hold and does not hold yet."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from hetmesh._torch_compat import drop_data
from hetmesh.boundary import Exchange, Label, World
from hetmesh.boundary.world import gather_objects
from hetmesh.checkpoint.reading import first_of
from hetmesh.checkpoint.resume import FREE, changes
from hetmesh.errors import RecipeError
from hetmesh.graph import ModuleGraph, dense_mesh
from hetmesh.layout import Layout, MeshSpec, plan_transfer
from hetmesh.layout.move_order import move_order
from hetmesh.models.weights.load import saved_tensors
from hetmesh.parallel import ParallelModule, local_part
from hetmesh.recipe.recipe import Recipe

Key = tuple[str, str]
"""Of a tensor: the name of a parameter or buffer, and what an optimizer calls what it keeps of that; empty for the
parameter or buffer itself."""

Optimizers = tuple[Iterable[torch.optim.Optimizer], Any] | None
"""With their schedules; None instead of these where a custom loop has them."""

LAYOUT_KEY = re.compile(
    r"parallelism\.(?!.*expert_placement_interval)|balance\.|activation_checkpoint\.|compile\."
    r"|training\.(local_batch_size|global_batch_size|enable_cpu_offload)$|modules\.\w+\.(activation_checkpoint$|plan\.)"
)
"""Keys that a relayout may change, besides tables that do not affect what is trained."""

_N_DIFFERENCES = 3  # that an error names


@dataclass(frozen=True)
class Relayout:
    """What a relayout took: bytes that this rank received from others, and seconds."""

    bytes_received: int
    seconds: float


def check_same_run(before: Recipe, after: Recipe, world: World) -> None:
    """Raise RecipeError unless only the layout of `after` differs from that of `before`; the message names the key."""
    for key, (old, new) in changes(before.model_dump(mode="json", by_alias=True), after).items():
        if not LAYOUT_KEY.match(key) and key.partition(".")[0] not in FREE:
            raise RecipeError(f"{key} = {new!r}: the job has {old!r}, and a relayout changes nothing but the layout")
    old, new = before.batch.global_batch_size, after.batch.global_batch_size
    if old != new:
        raise RecipeError(f"training.global_batch_size: the new layout makes it {new}; set it to {old}, which it is")
    if after.world_size > world.size:
        raise RecipeError(f"parallelism: the layout needs {after.world_size} ranks, this job has {world.size}")


@dataclass(frozen=True)
class HeldTensor:
    """How the ranks of a job hold a tensor.

    Attributes:
        shape: of the whole tensor.
        as_parameter: of what an optimizer keeps, whether it lies as its parameter does; else its ranks hold it whole.
        frozen: whether it has no gradient.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    as_parameter: bool = True
    frozen: bool = False

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}{', frozen' * self.frozen}".removeprefix("torch.")


@dataclass(eq=False)
class HeldState:
    """What one rank holds of a run, or what all of them do.

    Attributes:
        tensors: of this rank.
        held: of the tensors whose mesh begins at this rank; of all ranks together, of all tensors.
        values: what optimizers keep that is no tensor, or one of a single element (on the host, and whether it lies
            there beside its parameter); as `held`.
        groups: by name of a parameter, the place of its group in its optimizer; as `held`.
        refused: what cannot be moved, in words.
    """

    tensors: dict[Key, Tensor] = field(default_factory=dict)
    held: dict[Key, HeldTensor] = field(default_factory=dict)
    values: dict[Key, Any] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, parallel: Mapping[str, ParallelModule], rank: int, optimizers: Optimizers = None) -> HeldState:
        """Of this rank, which has the modules `parallel` on their meshes."""
        mine, kept = cls(), dict[int, Mapping[str, Any]]()
        groups: dict[int, int] = {}
        for optimizer in (optimizers or ((),))[0]:
            kept |= {id(parameter): state for parameter, state in optimizer.state.items()}
            groups |= {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        left = groups.keys() - {id(tensor) for part in parallel.values() for _, tensor in saved_tensors(part.module)}
        if left:
            mine.refused.append(f"the optimizer of rank {rank} has {len(left)} parameters that are none of the job's")
        for module, part in parallel.items():
            reports, known = part.spec.ranks[0] == rank, set[int]()
            for fqn, tensor in saved_tensors(part.module):
                if id(tensor) in known:  # tied: it counts by its first name
                    continue
                known.add(id(tensor))
                name = f"{module}.{fqn}"
                if reports and id(tensor) in groups:
                    mine.groups[name] = groups[id(tensor)]
                elif optimizers is not None and tensor.requires_grad and id(tensor) not in groups:
                    mine.refused.append(f"the optimizer lacks {name}, which is trained (one optimizer has all)")
                for key, value in {"": tensor, **kept.get(id(tensor), {})}.items():
                    mine._add((name, key), value, tensor, part.spec if reports else None)
        return mine

    def _add(self, key: Key, value: Any, parameter: Tensor, spec: MeshSpec | None) -> None:
        if key[1] and not (isinstance(value, DTensor) or (isinstance(value, Tensor) and value.numel() > 1)):
            if spec is not None:
                self.values[key] = (value.cpu(), value.is_cpu) if isinstance(value, Tensor) else value
            return
        self.tensors[key] = value
        if spec is not None:
            layout, (mesh, placements) = full_layout(parameter, spec), _lies(value)
            alike = value.shape == parameter.shape and (mesh, placements) == _lies(parameter)
            if mesh is not None and not alike:
                self.refused.append(f"{'.'.join(key)} lies as {placements}, and its parameter otherwise")
            layout = layout if alike else _over(layout.mesh, (), ())
            self.held[key] = HeldTensor(tuple(value.shape), value.dtype, layout, alike, not parameter.requires_grad)

    def of_all(self, world: World, graph: ModuleGraph, what: str) -> HeldState:
        """What all ranks hold of it, the modules of `graph`. Collective. Raises RecipeError: some of it cannot be
        moved; on every rank."""
        if wrong := [*chain.from_iterable(gather_objects(self.refused, world, what))]:
            raise RecipeError(f"a relayout cannot move what optimizers keep: {first_of(wrong, _N_DIFFERENCES)}")
        everything, group = HeldState(), world.group(range(world.size))
        modules = [graph[name] for name in graph.order]
        meshes = [spec.stage_mesh(i) for spec in modules for i in range(spec.mesh.axis_size("pp"))]
        for first in dict.fromkeys(mesh.ranks[0] for mesh in meshes):
            table = [replace(self, tensors={}) if world.rank == first else None]
            with world.waiting(what, f"rank {first}"):
                dist.broadcast_object_list(table, src=first, group=group, device=world.device)
            (told,) = table
            assert told is not None
            everything.values |= told.values
            everything.groups |= told.groups
            for key, held in told.held.items():
                everything.held[key] = _with_copy(everything.held.get(key), held)
        return everything

    def in_layout(self, parameters: Mapping[Key, HeldTensor]) -> dict[Key, HeldTensor]:
        """Where `held` will lie with `parameters`, what optimizers keep beside them. Raises RecipeError: these are
        other parameters or buffers."""
        names = {key for key in self.held if not key[1]}
        wrong = [f"it lacks {name}" for name, _ in sorted(names - parameters.keys())]
        wrong += [f"it also has {name}" for name, _ in sorted(parameters.keys() - names)]
        pairs = ((key[0], str(self.held[key]), str(parameters[key])) for key in sorted(names & parameters.keys()))
        wrong += [f"{name} was {was} and is {now}" for name, was, now in pairs if was != now]
        if wrong:
            raise RecipeError(f"a relayout needs the same model: {first_of(wrong, _N_DIFFERENCES)}")
        after = {}
        for (name, key), held in self.held.items():
            layout = parameters[name, ""].layout
            after[name, key] = replace(held, layout=layout if held.as_parameter else _over(layout.mesh, (), ()))
        return after


def _lies(tensor: Tensor) -> tuple[Any, Any]:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else (None, None)


def full_layout(tensor: Tensor, spec: MeshSpec) -> Layout:
    """How all ranks of the mesh `spec` of a pipeline stage hold a tensor of it, which on each of them is plain, or a
    DTensor over some axes of its mesh."""
    if not isinstance(tensor, DTensor):
        return _over(spec, (), ())
    own = MeshSpec.of(tensor.device_mesh)
    sizes = dict(zip(own.axes, own.sizes, strict=True))
    meshes = (spec, dense_mesh(spec))
    whole = next(mesh for mesh in meshes if sizes.items() <= dict(zip(mesh.axes, mesh.sizes, strict=True)).items())
    return _over(whole, own.axes, tuple(tensor.placements))


@lru_cache(maxsize=4096)  # layers are alike, and one object is sent once
def _over(mesh: MeshSpec, axes: tuple[str, ...], placements: tuple[Any, ...]) -> Layout:
    """`placements` on `axes` of `mesh`, in that order, in which they cut; replicas along all others."""
    others = [axis for axis in mesh.axes if axis not in axes]
    ordered = mesh.reordered([mesh.axes.index(axis) for axis in (*others, *axes)])
    return Layout(ordered, (*(Replicate() for _ in others), *placements))


def _with_copy(held: HeldTensor | None, other: HeldTensor) -> HeldTensor:
    """A tensor that pipeline stages hold, each on its mesh (tied weights)."""
    if held is None or set(other.layout.mesh.ranks) <= set(held.layout.mesh.ranks):
        return other if held is None else held
    mesh, ranks = other.layout.mesh, (*held.layout.mesh.ranks, *other.layout.mesh.ranks)
    copies = MeshSpec(ranks, ("copy", *mesh.axes), (len(ranks) // mesh.size, *mesh.sizes))
    return replace(held, layout=Layout(copies, (Replicate(), *other.layout.placements)))


class MovingState:
    """The state of a job on its way into another one, whose parameters have no memory yet. Collective.

    Args:
        old, new: the graphs of both layouts, and the modules of this rank in them.
        optimizers: of the old job.
        later: the bytes that each parameter of the new layout needs.

    Raises:
        RecipeError: the new job has other parameters or buffers, or something cannot be moved; on every rank, and
            nothing has moved.
    """

    def __init__(
        self,
        world: World,
        old: tuple[ModuleGraph, Mapping[str, ParallelModule]],
        new: tuple[ModuleGraph, Mapping[str, ParallelModule]],
        optimizers: Optimizers,
        later: Mapping[nn.Parameter, int],
    ) -> None:
        self.world, self.later = world, later
        mine, theirs = HeldState.of(old[1], world.rank, optimizers), HeldState.of(new[1], world.rank)
        if optimizers is not None and optimizers[1] is not None:
            mine.values["", "schedules"] = optimizers[1].state_dict()
        if optimizers is not None and optimizers[1] is None:
            mine.refused += _other_options(world, optimizers[0])
        self.before = mine.of_all(world, old[0], "what ranks hold before a relayout")
        groups = 1 + max(self.before.groups.values(), default=-1)
        if optimizers is not None and optimizers[1] is None:
            given = max(len(optimizer.param_groups) for optimizer in optimizers[0])
            if given < groups:
                theirs.refused.append(f"the optimizer of rank {world.rank} has {given} groups, others have {groups}")
        self.after = self.before.in_layout(theirs.of_all(world, new[0], "what ranks hold after a relayout").held)
        self.old, self.new = mine.tensors, theirs.tensors
        self.kept: dict[str, dict[str, Any]] = {}

    def move(self) -> int:
        """Bring tensors from how they lie to how they will, one after another, as `move_order` says; what has moved
        has no memory in the old job. Returns bytes that this rank received.

        Raises:
            BoundaryTimeout: a rank did not answer in time; the message names the tensor and the rank.
        """
        world, before, after, received = self.world, self.before.held, self.after, 0
        names: dict[str, list[Key]] = {}
        for key in before:
            names.setdefault(key[0], []).append(key)
        units = list(names.values())
        order, _ = move_order(_bytes(units, before, world.size), _bytes(units, after, world.size))
        world.connect()
        with torch.no_grad(), world.backend.step():
            for key in chain.from_iterable(units[i] for i in order):
                tag = world.next_tag()
                if world.rank in before[key].layout.mesh or world.rank in after[key].layout.mesh:
                    received += self._move(key, before[key], after[key], tag)
        for (name, kept), value in self.before.values.items():
            if (name, "") in self.new:
                if isinstance(value, tuple):
                    value = value[0].to("cpu" if value[1] else local_part(self.new[name, ""]).device, copy=True)
                self.kept.setdefault(name, {})[kept] = value
        return received

    def _move(self, key: Key, before: HeldTensor, after: HeldTensor, tag: int) -> int:
        world, own = self.world, self.old.get(key)
        plan = plan_transfer(before.shape, before.layout, after.layout, ranks_per_node=world.ranks_per_node)
        local = None if own is None else local_part(own).to(world.device)
        label = Label(f"relayout of {'.'.join(filter(None, key))}")
        exchange = Exchange(world, plan, local, before.dtype, label, transport="p2p", tag=tag)
        del local
        result = exchange.start().finish()
        if own is not None and not plan.is_identity:  # then the result is what there was
            drop_data(own)
        if result is not None:
            local_part(self._place(key, after)).copy_(result)
        if own is not None and plan.is_identity:
            drop_data(own)
        return plan.bytes_received(world.rank, before.dtype.itemsize)

    def _place(self, key: Key, held: HeldTensor) -> Tensor:
        """Memory for a tensor of the new layout."""
        parameter = self.new[key[0], ""]
        if not key[1]:
            if isinstance(parameter, nn.Parameter) and parameter in self.later:
                storage = local_part(parameter).untyped_storage()
                storage.resize_(self.later[parameter])
                if storage.nbytes() > local_part(parameter).nbytes:
                    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()  # what FSDP pads
            return parameter
        made = torch.empty_like(parameter.detach(), dtype=held.dtype)
        if not held.as_parameter:
            made = torch.empty(held.shape, dtype=held.dtype, device=local_part(parameter).device)
        self.kept.setdefault(key[0], {})[key[1]] = made
        return made

    def restore(self, optimizers: Optimizers) -> None:
        """Give the optimizers of the new job, and their schedules, what those of the old one kept."""
        names = {id(tensor): name for (name, _), tensor in self.new.items()}
        for optimizer in (optimizers or ((),))[0]:
            for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
                if kept := self.kept.get(names[id(parameter)]):
                    optimizer.state[parameter] = kept
        if optimizers is not None:
            optimizers[1].load_state_dict(self.before.values["", "schedules"])

    def regroup(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the groups of an optimizer the parameters of the new job, and it what it kept of them."""
        optimizer.state.clear()
        for number, group in enumerate(optimizer.param_groups):
            names = [name for name, of in self.before.groups.items() if of == number and (name, "") in self.new]
            group["params"] = [self.new[name, ""] for name in names]
            if "param_names" in group:
                group["param_names"] = names
            optimizer.state.update({self.new[name, ""]: self.kept[name] for name in names if name in self.kept})


def _other_options(world: World, optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
    """On the ranks where they are others than on rank 0, the options of groups: parameters keep the number of theirs.
    Collective."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    mine = [{k: repr(v) for k, v in group.items() if k not in ("params", "param_names")} for group in groups]
    (first, *_) = gather_objects(mine, world, "options of the optimizer on all ranks")
    return [
        f"group {number} of the optimizer has {key} {value} on rank {world.rank} and {own.get(key)} on rank 0"
        for number, (group, own) in enumerate(zip(mine, first, strict=False))
        for key, value in group.items()
        if own.get(key) != value
    ]


def _bytes(units: Sequence[Sequence[Key]], held: Mapping[Key, HeldTensor], ranks: int) -> np.ndarray:
    """`[units, ranks]`: what each rank holds of each."""
    each = [sum(_bytes_of(held[key], ranks) for key in unit) for unit in units]
    return np.array(each).reshape(len(units), ranks)


@lru_cache(maxsize=4096)
def _bytes_of(held: HeldTensor, ranks: int) -> np.ndarray:
    found = np.zeros(ranks, np.int64)
    for rank in held.layout.mesh.ranks:
        found[rank] = held.dtype.itemsize * np.prod(held.layout.local_shape(held.shape, rank), dtype=np.int64)
    return found
