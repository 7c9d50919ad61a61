"""What the collectives inside layers take, measured with a process for each rank of a tensor or context parallel group.

The modules run as they train, forward and backward, with the recipe's degrees of tensor, sequence and context
parallelism and nothing else. Layers say when they begin, so that each collective belongs to one; of a group's ranks the
one that waited least is what the message itself takes: the others also waited for a slower rank.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from hetmesh._processes import one_torch_thread
from hetmesh.balance import plan_batch
from hetmesh.balance.co_located import lane_ranks
from hetmesh.cost import LayerShape, Observation
from hetmesh.cost.fitted import layer_kind
from hetmesh.data.loader import TRAIN
from hetmesh.errors import HetmeshError
from hetmesh.files import from_json, read_file, write_json
from hetmesh.graph import Stage
from hetmesh.recipe import sections
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.runtime.runtime import ActionClock
from hetmesh.schedule import Kind
from hetmesh.simulate import rank_work
from hetmesh.training.environment import choose_kernels, open_payloads, world_for
from hetmesh.training.feed import Feed
from hetmesh.training.job import Job

_MICROBATCHES = 4  # of each size
_REPETITIONS = 6  # of each batch; the first warms up
_SIZES = 5  # of microbatches: the recipe's, half of it, and so on

_PARTS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward"}
_Place = tuple[str, str]
"""A kind of layer, and part of `_PARTS`."""


def group_recipe(recipe: Recipe) -> Recipe | None:
    """`recipe` on the ranks of its largest tensor and context parallel group, with those degrees alone; None where no
    module has any."""
    meshes = {name: recipe.wiring.meshes[name] for name in recipe.parallelism.modules}
    sizes = {name: mesh.axis_size("tp") * mesh.axis_size("cp") for name, mesh in meshes.items()}
    most = max(sizes.values(), default=1)
    if most == 1:
        return None
    modules = {}
    for name, mesh in meshes.items():
        together = most % sizes[name] == 0
        tp, cp = (mesh.axis_size(axis) if together else 1 for axis in ("tp", "cp"))
        sharded = tp > 1 and recipe.parallelism.modules[name].enable_sequence_parallel
        modules[name] = sections.ModuleParallelism(
            ranks=tuple(range(most)),
            data_parallel_replicate_degree=most // (tp * cp),
            tensor_parallel_degree=tp,
            context_parallel_degree=cp,
            enable_sequence_parallel=sharded,
        )
    tables = {name: getattr(recipe, name) for name in Recipe.model_fields}
    tables |= {"parallelism": sections.Parallelism(modules=modules), "balance": sections.Balance(policy="none")}
    tables |= {"activation_checkpoint": sections.ActivationCheckpoint(mode="none"), "compile": sections.Compile()}
    sizes_of_batch = {"local_batch_size": recipe.batch.microbatch_size, "global_batch_size": None}
    tables["training"] = recipe.training.model_copy(update=sizes_of_batch)
    tables["data"] = recipe.data.model_copy(update={"num_workers": 0})
    return Recipe.model_validate(tables)


def measure_collectives(recipe: Recipe, largest: int, path: str) -> None:
    """Run a `group_recipe` as one of its ranks; the first writes what was observed to `path`. Collective.

    Args:
        largest: samples of the largest microbatch.
    """
    with one_torch_thread(), open_payloads(recipe) as payloads, world_for(recipe) as world:
        choose_kernels(recipe.debug.deterministic, world.device)
        job = Job.assemble(resolve(recipe, payloads.sources[TRAIN]), world, payloads)
        observed = _observed(job, largest)
        if world.rank == 0:
            write_json(path, [[[o.kind, o.part, o.rows, o.pairs, o.seconds] for o in some] for some in observed])


def read_collectives(path: str | Path) -> tuple[list[Observation], list[Observation]]:
    """What `measure_collectives` wrote: to be fitted, and held out."""
    fitted, held_out = ([Observation(*each) for each in some] for some in from_json(read_file(path)))
    return fitted, held_out


def _observed(job: Job, largest: int) -> tuple[list[Observation], list[Observation]]:
    sizes = sorted({max(1, round(largest / 2**k)) for k in range(_SIZES)})
    found: tuple[list[Observation], list[Observation]] = [], []
    with _Marks(job) as marks:
        for i, size in enumerate(sizes):
            held_out = 0 < i < len(sizes) - 1 and (len(sizes) - 1 - i) % 2 == 1
            found[held_out].extend(_of_size(job, marks, size))
    return found


def _of_size(job: Job, marks: _Marks, size: int) -> Iterator[Observation]:
    """Of microbatches of `size` samples per lane of the sink."""
    count, step = _MICROBATCHES * size * job.graph.sink.num_lanes, 0
    indices: list[int] = []
    while len(indices) < count:
        indices += job.loader.indices(step)
        step += 1
    drawn = job.loader.drawn(indices[:count])
    plan = plan_batch(job.graph, drawn.metas, size)
    schedule = job.schedule(plan)
    repeated: dict[tuple[_Place, int], list[float]] = defaultdict(list)
    for repetition in range(_REPETITIONS):
        job.runtime.recording, job.runtime.collectives = [], []
        marks.clear()
        with job.world.waiting("the next repetition"):
            dist.barrier(group=job.world.group(range(job.world.size)))
        job.runtime.run(schedule, plan, Feed(job.loader, drawn, plan, job.adapters, job.world.rank), step=repetition)
        everyone: list[Any] = [None] * job.world.size
        dist.all_gather_object(everyone, marks.seconds(), group=job.world.group(range(job.world.size)))
        for key in everyone[0] if repetition else ():
            group = lane_ranks(job.graph[marks.module_of[key[0][0]]])[0]
            repeated[key].append(min(everyone[rank][key] for rank in group))
    job.root.zero_grad(set_to_none=True)
    for ((kind, part), m), seconds in repeated.items():
        name = marks.module_of[kind]
        work = rank_work(plan, name, m)[0].work
        layer = marks.layers[kind]
        rows = work.targets if layer.on_targets else work.rows
        if rows:
            pairs = work.pairs if layer.attention_width else 0
            yield Observation(kind, part, rows, pairs, statistics.median(seconds))


class _Marks:
    """Notes when layers begin, forward and backward, and which collectives are in which.

    Attributes:
        layers, module_of: a layer of each kind, and its module.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.layers: dict[str, LayerShape] = {}
        self.module_of: dict[str, str] = {}
        self.clock = ActionClock(job.world.accelerator)
        self.made: list[tuple[str, Any]] = []
        self.hooks: list[Any] = []

    def __enter__(self) -> _Marks:
        for name, parallel in self.job.parallel.items():
            spec, shape = self.job.graph[name], self.job.resolved.shapes[name]
            if shape is None:
                raise HetmeshError(
                    f"modules.{name}: it cannot be built on the meta device, so its layers are not known"
                )
            tp, cp = spec.mesh.axis_size("tp"), spec.mesh.axis_size("cp")
            for layer in shape.layers if tp * cp > 1 else ():
                if layer.name:
                    kind = layer_kind(layer, tp, cp, spec.options.sequence_parallel)
                    if self.module_of.setdefault(kind, name) != name:
                        continue  # the same layers, of another module
                    self.layers[kind] = layer
                    part = parallel.module.get_submodule(layer.name)
                    self.hooks += [
                        part.register_forward_pre_hook(self._begins(kind)),
                        part.register_forward_hook(self._ends(kind)),
                    ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def clear(self) -> None:
        self.made = []

    def _begins(self, kind: str) -> Callable[..., None]:
        return lambda *_: self.made.append((kind, self.clock.now()))

    def _ends(self, kind: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            rows = output if isinstance(output, Tensor) else output[0]
            if rows.requires_grad:
                rows.register_hook(self._begins(kind))

        return hook

    def seconds(self) -> dict[tuple[_Place, int], float]:
        """Per kind of layer, part and microbatch, the seconds of the collectives in one layer."""
        runtime = self.job.runtime
        recorded = runtime.recording or []
        runtime.recording = None
        marks = [(self.clock.seconds(event), kind) for kind, event in self.made]
        total: dict[tuple[_Place, int], list[float]] = {}
        for action, start, stop in recorded:
            if action.kind in _PARTS and isinstance(action.target, Stage):
                inside = [mark for mark in marks if start <= mark[0] <= stop]
                for i, (at, kind) in enumerate(inside):
                    until = inside[i + 1][0] if i + 1 < len(inside) else stop
                    spent = sum(b - a for _, a, b in runtime.collectives if at <= a < until)
                    key = (kind, f"collectives_{_PARTS[action.kind]}"), action.microbatch
                    total.setdefault(key, []).append(spent)
        return {key: sum(of_layers) / len(of_layers) for key, of_layers in total.items()}
