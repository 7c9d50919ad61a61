"""What the collectives inside layers take, measured with a process for each rank of a tensor or context parallel group.

The modules run forward and backward with the recipe's degrees of tensor, sequence and context parallelism and nothing
else. Layers say when they begin, so that each collective belongs to one. Of a group's ranks the one that waited least
shows what the message takes: the others also waited for a slower rank.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hetmesh._processes import one_torch_thread
from hetmesh.balance import plan_batch
from hetmesh.balance.co_located import lane_ranks
from hetmesh.boundary.world import gather_objects
from hetmesh.cost import LayerShape, Observation, layer_kind
from hetmesh.cost.fitted import COLLECTIVES, fit
from hetmesh.data.loader import TRAIN
from hetmesh.errors import RecipeError
from hetmesh.recipe import sections
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.runtime.runtime import ActionClock
from hetmesh.schedule import Kind
from hetmesh.simulate import rank_work
from hetmesh.training.environment import choose_kernels, open_payloads, world_for
from hetmesh.training.job import Job
from hetmesh.training.profile import sample_sizes

_MICROBATCHES = 4  # of each size
_REPETITIONS = 12  # of each batch; the first warms up
_PARTS = dict(zip((Kind.FORWARD, Kind.BACKWARD), COLLECTIVES, strict=True))


def group_recipe(recipe: Recipe) -> Recipe | None:
    """`recipe` on the ranks of its largest tensor and context parallel group, with those degrees alone; None where no
    module has any."""
    tables, meshes = recipe.parallelism.modules, recipe.wiring.meshes
    degrees = {name: (meshes[name].axis_size("tp"), meshes[name].axis_size("cp")) for name in tables}
    ranks = max((tp * cp for tp, cp in degrees.values()), default=1)
    if ranks == 1:
        return None
    modules = {}
    for name, (tp, cp) in degrees.items():
        tp, cp = (tp, cp) if ranks % (tp * cp) == 0 else (1, 1)
        keys: dict[str, Any] = {"tensor_parallel_degree": tp, "context_parallel_degree": cp}
        keys |= {"data_parallel_replicate_degree": ranks // (tp * cp), "ranks": tuple(range(ranks))}
        keys |= {"enable_sequence_parallel": tp > 1 and tables[name].enable_sequence_parallel}
        modules[name] = sections.ModuleParallelism(**keys)
    changed: dict[str, Any] = {name: getattr(recipe, name) for name in Recipe.model_fields}
    changed |= {"parallelism": sections.Parallelism(modules=modules), "balance": sections.Balance(policy="none")}
    changed |= {"activation_checkpoint": sections.ActivationCheckpoint(mode="none"), "compile": sections.Compile()}
    sizes = {"local_batch_size": recipe.batch.microbatch_size, "global_batch_size": None}
    changed |= {"training": recipe.training.model_copy(update=sizes)}
    changed |= {"data": recipe.data.model_copy(update={"num_workers": 0})}
    return Recipe.model_validate(changed)


def measure_collectives(recipe: Recipe, path: str) -> None:
    """Run a `group_recipe` as one of its ranks; the first writes a Profile of collectives alone to `path`. Collective.
    Raises RecipeError: the sizes of a module are not known."""
    observed: tuple[list[Observation], list[Observation]] = [], []
    with one_torch_thread(), open_payloads(recipe) as payloads, world_for(recipe) as world:
        choose_kernels(recipe.debug.deterministic, world.device)
        job = Job.assemble(resolve(recipe, payloads.sources[TRAIN]), world, payloads)
        marks = _Marks(job)
        for size, held_out in sample_sizes(recipe.batch.microbatch_size):
            observed[held_out].extend(_observations(job, marks, size))
        if world.rank == 0:
            fit((), collectives=observed).save(path)


def _observations(job: Job, marks: _Marks, size: int) -> Iterator[Observation]:
    """Of microbatches of `size` samples per lane of the LLM."""
    world, count = job.world, _MICROBATCHES * size * job.graph.llm.num_lanes
    stream = itertools.chain.from_iterable(job.loader.indices(step) for step in itertools.count())
    drawn = job.loader.drawn(list(itertools.islice(stream, count)))
    plan = plan_batch(job.graph, drawn.metas, size)
    schedule, group = job.schedule(plan), world.group(range(world.size))
    repeated: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for repetition in range(_REPETITIONS):
        feed = job.feed(drawn, plan, repetition)
        with world.waiting("the next step of other ranks"):
            dist.barrier(group=group)
        marks.begin()
        job.runtime.run(schedule, plan, feed, step=repetition)
        everyone = gather_objects(marks.seconds(), world, "collectives of other ranks")
        for key in everyone[0] if repetition else ():
            ranks = lane_ranks(job.graph[marks.layers[key[0]][0]])[0]
            repeated[key].append(min(everyone[rank][key] for rank in ranks))
    job.root.zero_grad(set_to_none=True)
    for (kind, part, m), seconds in repeated.items():
        module, layer = marks.layers[kind]
        work = rank_work(plan, module, m)[0].work
        if rows := work.targets if layer.on_targets else work.rows:
            pairs = work.pairs if layer.attention_width else 0
            yield Observation(kind, part, rows, pairs, statistics.median(seconds))


class _Marks:
    """Notes when layers begin, forward and backward; `layers` has a module and a layer of each kind."""

    def __init__(self, job: Job) -> None:
        self.runtime = job.runtime
        self.layers: dict[str, tuple[str, LayerShape]] = {}
        self.made: list[tuple[str, Any]] = []
        for name, parallel in job.parallel.items():
            spec, shape = job.graph[name], job.resolved.shapes[name]
            if shape is None:
                raise RecipeError(f"modules.{name}: its sizes are not known, as it cannot be built on the meta device")
            tp, cp = spec.mesh.axis_size("tp"), spec.mesh.axis_size("cp")
            for layer in shape.layers if tp * cp > 1 else ():
                kind = layer_kind(layer, tp, cp, spec.options.sequence_parallel)
                if layer.name and self.layers.setdefault(kind, (name, layer))[0] == name:
                    part = parallel.module.get_submodule(layer.name)
                    part.register_forward_pre_hook(self._mark(kind))
                    part.register_forward_hook(self._mark_backward(kind))

    def begin(self) -> None:
        """A step begins."""
        self.made, self.runtime.recording, self.runtime.collectives = [], [], []

    @property
    def _clock(self) -> ActionClock:
        """The step's own, so that a mark lies between its action's start and stop."""
        assert self.runtime.clock is not None
        return self.runtime.clock

    def _mark(self, kind: str) -> Callable[..., None]:
        return lambda *_: self.made.append((kind, self._clock.now()))

    def _mark_backward(self, kind: str) -> Callable[..., None]:
        def hook(_: object, __: object, output: Any) -> None:
            rows = output if isinstance(output, Tensor) else output[0]
            if rows.requires_grad:
                rows.register_hook(self._mark(kind))

        return hook

    def seconds(self) -> dict[tuple[str, str, int], float]:
        """Per kind of layer, part and microbatch of the step, the seconds of the collectives in one layer."""
        recorded, self.runtime.recording = self.runtime.recording or [], None
        marks = [(self._clock.seconds(event), kind) for kind, event in self.made]
        found: dict[tuple[str, str, int], list[float]] = defaultdict(list)
        for action, start, stop in recorded:
            if action.kind in _PARTS:
                inside = [*(mark for mark in marks if start <= mark[0] <= stop), (stop, "")]
                for (begin, kind), (end, _) in itertools.pairwise(inside):
                    spent = sum(b - a for _, a, b in self.runtime.collectives if begin <= a < end)
                    found[kind, _PARTS[action.kind], action.microbatch].append(spent)
        return {key: statistics.mean(of_layers) for key, of_layers in found.items()}
