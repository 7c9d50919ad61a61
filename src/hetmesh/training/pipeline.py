"""`Part` and `Pipeline`: modules that the user has parallelised, each on its own mesh, trained by a schedule, without
a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hetmesh.balance import BatchPlan, plan_batch
from hetmesh.boundary import World
from hetmesh.boundary.world import gather_objects, reduce_over_ranks
from hetmesh.errors import BoundaryError, GraphError, HetmeshError
from hetmesh.graph import (
    LANE_AXES,
    BoundarySpec,
    LossSpec,
    ModuleGraph,
    ModuleOptions,
    ModuleSpec,
    SampleMeta,
    Stage,
    stage_graph,
)
from hetmesh.layout import MeshSpec
from hetmesh.parallel import (
    AdaptedModule,
    ParallelModule,
    Reduction,
    SharedSums,
    check_replica_gradients,
    check_replicas,
    split_shared_sums,
    sum_gradients,
    user_parallel_module,
)
from hetmesh.parallel.fully_shard import sharded_modules
from hetmesh.parallel.gradient_axes import is_first
from hetmesh.recipe.section import schedule_name
from hetmesh.runtime import Runtime
from hetmesh.schedule import POLICIES, Schedule
from hetmesh.training.first_steps import check_gradients
from hetmesh.training.gradients import GlobalGradients, counted
from hetmesh.training.loss import CheckedSampleLoss
from hetmesh.training.part_checks import (
    check_equal_parameters,
    check_own_layers,
    checked_batch,
    described_parameters,
)

SCHEDULES = ("sequential", "1f1b", "zero_bubble")
"""Names of schedules that a Pipeline can have."""

Load = Callable[[str, tuple[int, ...]], Mapping[str, Tensor]]
"""(name of a part, numbers of samples in the batch) -> what the part reads of them itself, on the CPU or where it
computes, a row per sample in that order; `{}` for a part that reads nothing. Of no samples, tensors of no rows."""


@dataclass(frozen=True)
class Part:
    """A user's module, parallelised over its mesh.

    Parts with equal meshes may share parameters (a tied head) or be one module, without `fully_shard`. Tie them after
    `parallelize_module`, which makes new parameters. Parts on other ranks cannot share any: each rank has a copy, and
    nobody would sum the gradients.

    Attributes:
        module: as `parallelize_module` and `fully_shard` left it; None on ranks outside its mesh.
        mesh: its ranks. Axes are named `dp_replicate`, `dp_shard` (these make lanes, which take different samples) and
            `tp`, in that order; `hetmesh.device_mesh(mesh)` is what to parallelise over.
        output: the shape of what it returns for one sample; of the last part, which computes the loss, optional.
        dtype: of what it gets from other parts, and of what it returns to them.
        trainable: whether anything in it is trained; equal on all ranks.
        call: `call(module, batch, inputs)` runs it, `batch` being what `load` gave and `inputs` what the parts before
            returned, by name, `[samples, *output]`; returns `[samples, *output]`. By default a part with parts before
            it is called with their outputs, in the order of the boundaries, and one without as `module(**batch)`.
    """

    module: nn.Module | None
    mesh: MeshSpec
    output: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    trainable: bool = True
    call: Callable[[nn.Module, Mapping[str, Tensor], Mapping[str, Tensor]], Tensor] | None = None


SampleLoss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""(output of a part, what `load` gave for it) -> the summed loss of the samples of a lane and microbatch, a scalar."""


class Pipeline:
    """Parts that feed each other, a step at a time. Built on every rank of the job, in the same way.

    Gradients are SUMS over the whole batch, whatever the meshes: `step` divides them once, by `divide_by`. Over the
    lanes of a part they are summed by FSDP where it has the parameter (`hetmesh.sum_over_shards` tells it to sum, which
    is checked), else here. In the first step those of replicas are compared with each other, and all of them with
    differences of the loss: that finds what else does not sum.

    Args:
        parts: by name. A pipeline stage is a part.
        boundaries: (from, to): the output of one part is an input of the other.
        loss: `loss(output, batch)` gets what the last part returned for the samples of a lane and microbatch, and what
            `load` gave for it: the SUM of the loss over these samples, a scalar. Where several parts have one, by the
            part's name: the loss of a step is their sum.
        schedule: one of `SCHEDULES`, or torch's name of it, as in a recipe.
        microbatch: samples per microbatch and lane of the last part.
        check: whether to compare gradients in the first step; it takes two more forwards per part.

    Attributes:
        checked: after the first step, per part the ratio of both, near 1; None where rounding hides it.

    Raises:
        GraphError: parts, boundaries, meshes and modules do not fit each other.
        GradientError: something in a part averages gradients; in the first step also: they are no sums.
        ReplicaError: lanes start from different weights. All of these on all ranks.
    """

    def __init__(
        self,
        parts: Mapping[str, Part],
        boundaries: Sequence[tuple[str, str]] = (),
        *,
        loss: SampleLoss | Mapping[str, SampleLoss],
        schedule: str = "sequential",
        microbatch: int = 1,
        seed: int = 0,
        check: bool = True,
    ) -> None:
        given, schedule = schedule, schedule_name(schedule)
        if schedule not in SCHEDULES:
            raise GraphError(f"schedule = {given!r}: valid are {', '.join(SCHEDULES)}")
        self.world, self.parts = World.current(), dict(parts)
        self.schedule, self.microbatch = schedule, microbatch
        losses = loss if isinstance(loss, Mapping) else None
        self.graph = _graph(self.parts, boundaries, () if losses is None else losses)
        self.checked: dict[str, float | None] | None = None if check else {}
        self.steps = 0
        self.parallel, self._shared = self._parallel_modules()
        if schedule == "zero_bubble" and any(
            each.in_backward for module in self.parallel.values() for each in module.axes.values()
        ):
            raise GraphError(
                "schedule = 'zero_bubble' splits the backward, of which fully_shard learns nothing: take 1f1b"
            )
        check_replicas(self.parallel, (), self.world, 0)
        trained = stage_graph(self.graph).trainable_stages
        self.runtime = Runtime(
            self.world,
            self.graph,
            {Stage(name): module.adapted for name, module in self.parallel.items()},
            reducers={
                Stage(name): Reduction(module, accelerator=self.world.accelerator)
                for name, module in self.parallel.items()
                if Stage(name) in trained
            },
            losses={
                name: CheckedSampleLoss(loss if not isinstance(loss, Mapping) else loss[name])
                for name in self.graph.losses
            },
            seed=seed,
        )
        counts = dict.fromkeys(counted(self.parallel.values(), self.world.rank))
        self.gradients = GlobalGradients(self.runtime, self.parameters(), counts)
        self.plan = lru_cache(maxsize=8)(self._plan)

    def parameters(self) -> list[nn.Parameter]:
        """Those of this rank's parts, each once; none on a rank outside all parts. An optimizer of torch takes them as
        `[{"params": pipeline.parameters()}]`, which may be empty, with `foreach=False`, as they lie on several meshes.
        """
        return list(dict.fromkeys(p for each in self.parallel.values() for p in each.module.parameters()))

    def step(self, load: Load, samples: int, *, divide_by: float = 1.0, max_norm: float = 0.0) -> float:
        """Forward and backward of a batch; leaves gradients in `.grad`, in place of those of before. Collective.

        Args:
            load: what parts read of which samples.
            samples: of the batch, over all lanes and microbatches.
            divide_by: what the summed loss and its gradients are divided by: the number of targets of the whole batch.
            max_norm: clips the gradient of all parts together; 0 does not. (`clip_grad_norm_` of torch would clip by
                the norm of what this rank happens to hold, another one on each.)

        Returns:
            The loss of the batch, equal on all ranks. Where it is not finite, do not take the optimizer's step.

        Raises:
            GraphError: `load` gives something else than a row per sample.
            LossError: the loss is no sum over samples, or does not depend on the output.
        """
        if samples < 1 or not divide_by > 0:
            raise GraphError(
                f"a step needs samples, and something positive to divide by, got {samples} and {divide_by}"
            )
        self.gradients.clear()
        (total,), norm, _ = self.gradients.settle([self._run(load, samples, training=True)])
        if self.checked is None:
            check_replica_gradients(self.parallel, self.world)
            self.checked = check_gradients(
                {name: self.parallel.get(name) for name in self.graph.order if self.parts[name].trainable},
                lambda: self.evaluate(load, samples),
                total,
                self.world,
            )
        self.gradients.normalise(divide_by, norm / divide_by, max_norm)
        self.steps += 1
        return total / divide_by

    def evaluate(self, load: Load, samples: int) -> float:
        """The summed loss of a batch, without gradients. Collective."""
        return reduce_over_ranks([self._run(load, samples, training=False)], self.world)[0]

    def grad_norm(self) -> float:
        """The norm of the gradients of all parts, replicas counted once. Collective."""
        return self.gradients.norm()

    def _run(self, load: Load, samples: int, *, training: bool) -> Tensor | float:
        """The summed losses of this rank, without those that another rank counts."""
        plan, schedule = self.plan(samples, training)
        rank = self.world.rank

        def load_batch(stage: Stage, microbatch: int) -> Mapping[str, Tensor]:
            lane = self.graph[stage.module].lane_of(rank)
            assert lane is not None
            samples = plan.samples_of(stage.module, microbatch, lane)
            return checked_batch(stage.module, samples, load(stage.module, samples))

        sums = self.runtime.run(schedule, plan, load_batch, step=self.steps, settled=False)
        if training:
            for shared, lanes in self._shared:
                sum_gradients(shared, lanes)
        for module in self.parallel.values():  # where no backward came, nothing else lets go of what was gathered
            for each in sharded_modules(module.module):
                each.reshard()
        own = (loss for name, loss in sums.items() if is_first(self.graph[name].mesh, rank, LANE_AXES))
        return sum(own, torch.zeros((), dtype=torch.float64, device=self.world.device))

    def _plan(self, samples: int, training: bool) -> tuple[BatchPlan, Schedule]:
        rows = {name: math.prod(part.output[:-1]) for name, part in self.parts.items()}
        metas = [SampleMeta(str(i), 2, targets=((1, 2),), rows=rows) for i in range(samples)]
        plan = plan_batch(self.graph, metas, self.microbatch)
        return plan, POLICIES[self.schedule](stage_graph(self.graph), plan.routes, training)

    def _parallel_modules(self) -> tuple[dict[str, ParallelModule], SharedSums]:
        meshes = {name: self.world.device_mesh(self.parts[name].mesh) for name in self.graph.order}
        found, sums, error = dict[str, ParallelModule](), SharedSums(), None
        try:
            found, sums = split_shared_sums(self._own_modules(meshes))
        except HetmeshError as own:
            error = own
        described = {name: described_parameters(each.module, sums) for name, each in found.items()}
        told = gather_objects((error, described), self.world, "whether every rank has its parts")
        if first := next((each for each, _ in told if each is not None), None):
            raise first
        check_equal_parameters([each for _, each in told])
        return found, sums

    def _own_modules(self, meshes: Mapping[str, DeviceMesh | None]) -> dict[str, ParallelModule]:
        found: dict[str, ParallelModule] = {}
        for name, mesh in meshes.items():
            part, member = self.parts[name], self.world.rank in self.parts[name].mesh
            if member != (part.module is not None):
                what = "needs its module" if member else "has a module"
                raise GraphError(f"part {name!r}: rank {self.world.rank} {what}, and {part.mesh} is its mesh")
            if part.module is None or mesh is None:
                continue
            check_own_layers(name, part.module)
            if part.trainable != any(p.requires_grad for p in part.module.parameters()):
                has = "no parameter" if part.trainable else "parameters"
                raise GraphError(f"part {name!r}: trainable = {part.trainable}, but it has {has} with requires_grad")
            caller = _Caller(name, part, {b.source: self.parts[b.source].output for b in self.graph.inputs(name)})
            stage = AdaptedModule(caller, part.module, part.dtype)
            found[name] = user_parallel_module(name, part.module, stage, part.mesh, mesh)
        return found


class _Caller:
    """How a part is run: rows `[samples x rows, features]` are shaped as its neighbours have them."""

    def __init__(self, name: str, part: Part, inputs: Mapping[str, tuple[int, ...]]) -> None:
        self.name, self.part, self.inputs = name, part, inputs

    def layers(self) -> tuple[str, ...]:
        return ()

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        return {}

    def forward(self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        given = {
            name: rows.reshape(_samples(rows, self.inputs[name]), *self.inputs[name]) for name, rows in inputs.items()
        }
        if self.part.call is not None:
            output = self.part.call(module, batch, given)
        else:
            output = module(*given.values()) if self.inputs else module(**batch)
        shape = self.part.output
        if not shape:  # the last: its output is for the loss alone
            return output
        if not isinstance(output, Tensor) or output.shape[1:] != shape:
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise BoundaryError(f"part {self.name!r}: must return shape ('samples', {str(shape)[1:-1]}), got {got}")
        return output.reshape(-1, shape[-1])


def _samples(rows: Tensor, shape: tuple[int, ...]) -> int:
    return len(rows) // math.prod(shape[:-1])


def _graph(parts: Mapping[str, Part], boundaries: Sequence[tuple[str, str]], losses: Collection[str]) -> ModuleGraph:
    """`losses`: the parts that have one, where several do; none: the last has it."""
    if wrong := sorted(set(losses) - set(parts)):
        raise GraphError(f"loss of {wrong[0]!r}: there is no such part; parts are {', '.join(parts)}")
    ends = [name for name in parts if all(name != source for source, _ in boundaries)]
    if losses and (missing := [name for name in ends if name not in losses]):
        raise GraphError(f"part {missing[0]!r}: no part reads its output, so it needs a loss")
    valid = ("dp_replicate", "dp_shard", "tp")
    modules = []
    for name, part in parts.items():
        if list(part.mesh.axes) != [axis for axis in valid if axis in part.mesh.axes]:
            raise GraphError(
                f"part {name!r}: the axes of its mesh are {list(part.mesh.axes)}; valid are {', '.join(valid)}, in "
                "this order: dp_replicate and dp_shard have different samples, tp the same"
            )
        if any(name == source for source, _ in boundaries) and not part.output:
            raise GraphError(f"part {name!r}: give the shape of its output for one sample, Part(..., output=(64,))")
        options = ModuleOptions(parameter_dtype=part.dtype)
        features = part.output[-1] if part.output else 0
        loss = LossSpec("custom", unit="items") if name in losses else None
        spec = ModuleSpec(name, part.mesh, trainable=part.trainable, features=features, options=options, loss=loss)
        modules.append(spec)
    return ModuleGraph(tuple(modules), tuple(BoundarySpec(*ends) for ends in boundaries))
