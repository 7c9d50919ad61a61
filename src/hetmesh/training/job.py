"""Job: everything a recipe names, built on this rank: source, adapters, graph, modules on their meshes, runtime."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hetmesh.balance import BatchPlan
from hetmesh.boundary import World
from hetmesh.boundary.process_groups import ends_are_tied, stage_meshes, tied_pairs
from hetmesh.boundary.world import gather_objects
from hetmesh.checkpoint.relayout import MovingState, Relayout, check_same_run
from hetmesh.data.drawn import DrawnBatch
from hetmesh.data.loader import Loader
from hetmesh.data.payloads import Payloads
from hetmesh.errors import RecipeError
from hetmesh.graph import LANE_AXES, ModuleGraph, ModuleSpec, SampleMeta, Stage, stage_graph
from hetmesh.models import Adapter, lora_plan
from hetmesh.models.draws import Draws
from hetmesh.models.weights.fill_module import Sizes, materialize, move_buffers
from hetmesh.parallel import (
    ParallelModule,
    Reduction,
    TiedParameter,
    VocabularyShards,
    check_replicas,
    parallelize,
    sum_tied_parameters,
    tied_parameters,
)
from hetmesh.parallel.apply import Root
from hetmesh.parallel.compute_copies import ComputeCopies
from hetmesh.parallel.fsdp_log import log_collectives
from hetmesh.parallel.fully_shard import WholeInStep
from hetmesh.parallel.gradient_axes import fully_shard_axes, is_first
from hetmesh.recipe.recipe import Recipe, load_recipe, parse_recipe
from hetmesh.resolve.modules import deferred_module, fill_module
from hetmesh.resolve.refusals import check_device
from hetmesh.resolve.resolved import ResolvedRecipe, resolve
from hetmesh.runtime import Reducer, Runtime
from hetmesh.runtime.step_transfers import StepTransfers
from hetmesh.schedule import Schedule, ahead
from hetmesh.training.expert_placement import ExpertLoads, ExpertPlacement
from hetmesh.training.feed import Feed
from hetmesh.training.first_steps import FirstSteps
from hetmesh.training.gradients import counted
from hetmesh.training.loss import CustomLosses, losses_of_recipe, module_losses
from hetmesh.training.non_finite import NonFiniteSteps
from hetmesh.training.optimizers import keeping_options, make_optimizers
from hetmesh.training.step import StepResult, TrainingStep
from hetmesh.training.upcoming import AHEAD, PlannedStep, Upcoming


@dataclass(frozen=True, eq=False)
class Job:
    """One rank's part of a run, ready to step. Made by `Job.assemble` on every rank."""

    resolved: ResolvedRecipe
    world: World
    loader: Loader
    root: Root
    parallel: Mapping[str, ParallelModule]  # the modules of this rank on their meshes
    runtime: Runtime
    tied: tuple[TiedParameter, ...] = ()  # parameters of which another pipeline stage holds a copy
    loss: CustomLosses | None = None  # in place of those of the recipe

    @classmethod
    def assemble(
        cls,
        resolved: ResolvedRecipe,
        world: World,
        payloads: Payloads | None = None,
        loss: CustomLosses | None = None,
        later: Sizes | None = None,
    ) -> Job:
        """Build the modules of this rank, with the same weights on every layout, and everything around them.

        Args:
            payloads: where samples are loaded (`environment.open_payloads`); None: on this rank, when they are needed.
            loss: custom ones; None: those of the recipe.
            later: where given, parameters have no memory yet, and are here with the bytes that they need.

        Raises:
            RecipeError: the device cannot do what the recipe asks of it.
        """
        recipe, adapters, graph = resolved.recipe, resolved.adapters, resolved.graph
        check_device(recipe, asynchronous=world.accelerator.asynchronous)
        if world.device.type == "cuda" and recipe.schedule_key("bubble_fill_in_collectives"):
            os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # read by communicators, all of which follow
        for note in resolved.notes if world.rank == 0 else ():
            warnings.warn(note, stacklevel=2)
        if resolved.profile_digest:
            _check_profile(resolved, world)
        loader, stages = resolved.loader(payloads), stage_graph(graph)
        custom = losses_of_recipe(recipe, graph, loss)
        modules: dict[str, ParallelModule] = {}
        adapted: dict[Stage, nn.Module] = {}
        reducers: dict[Stage, Reducer] = {}
        whole: dict[Stage, WholeInStep | ComputeCopies] = {}
        tied: list[TiedParameter] = []
        accelerator, sums = world.accelerator, world.accelerator.stream()
        for name in graph.order:
            own, mesh, dense = _own_stages(world, graph[name])
            if mesh is None:
                continue
            deferred = deferred_module(recipe, adapters[name], name)
            module = deferred.module
            move_buffers(module, world.device)  # FSDP would, but cannot bring them to every device
            abilities = adapters[name].abilities
            abilities = abilities.with_stages() if graph[name].options.sequence_parallel else abilities
            if (graph[name].packed or graph[name].tokens_per_row) and abilities.use_packed is not None:
                abilities.use_packed(module)
            plan = lora_plan(module, {**adapters[name].tensor_parallel_plan(), **recipe.modules[name].plan})
            runs = [graph[name].stage_layers(stage.index) for stage in own] if graph[name].splits else None
            spec = graph[name].stage_mesh(own[0].index)
            parallel = parallelize(
                adapters[name],
                module,
                spec,
                mesh,
                plan,
                graph[name].options,
                runs,
                abilities.token_sharded,
                abilities.token_gathered,
                abilities.splits_tokens,
                abilities.head if name not in custom else "",  # a custom loss gets whole logits
                abilities.experts,
                dense,
                abilities.gathered_whole,
                adapters[name].layers()[-1:] if abilities.loss_by_chunks else (),
            )
            device = "cpu" if graph[name].options.cpu_offload and fully_shard_axes(spec) else world.device
            if world.accelerator.computes and later is None:
                fill_module(recipe, adapters[name], name, deferred, device, roots=parallel.stages)
            else:
                materialize(parallel.module, torch.device(device), parallel.stages, later)
            parallel = replace(parallel)  # which looks its parameters up: those on meta are others now
            modules[name] = parallel
            adapted |= zip(own, parallel.stages, strict=True)
            whole |= {own[i]: kept for i, kept in parallel.whole.items()}
            for stage in own:
                log_collectives(adapted[stage], str(stage), world.log)
        for name in graph.order:
            staged = graph[name].mesh.axis_size("pp") > 1
            shared_ends = staged and ends_are_tied(graph[name], resolved.shapes[name])  # by a weight that is trained
            groups = _tied_groups(world, graph[name]) if shared_ends else {}  # made on all ranks
            own = tuple(stage for stage in adapted if stage.module == name)
            if not own:
                continue
            shared = tied_parameters(graph[name], own, modules[name], groups)
            always = frozenset(id(copy.parameter) for copy in shared)
            for i, stage in enumerate(own):
                if stage in stages.trainable_stages:
                    reducers[stage] = Reduction(modules[name], i, accelerator=accelerator, stream=sums, always=always)
            tied += shared
        runtime = Runtime(
            world,
            graph,
            adapted,
            reducers=reducers,
            losses=module_losses(graph, modules, custom),
            seed=recipe.debug.seed,
            finish=partial(sum_tied_parameters, tied, world),
            whole=whole,
        )
        root = Root((name, each.module) for name, each in modules.items())
        if world.accelerator.computes and later is None:
            check_replicas(modules, tied, world, 0, buffers=True)
        return cls(resolved, world, loader, root, modules, runtime, tuple(tied), loss)

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe

    @property
    def graph(self) -> ModuleGraph:
        return self.resolved.graph

    @property
    def adapters(self) -> dict[str, Adapter]:
        """How its modules are called, by name."""
        return self.resolved.adapters

    def plan(self, samples: Sequence[SampleMeta]) -> BatchPlan:
        """The batch plan of a global batch; equal on every rank."""
        return self.resolved.plan(samples)

    def schedule(self, plan: BatchPlan, *, training: bool = True) -> Schedule:
        """The schedule of the step of `plan`, in the order in which this device is given its actions."""
        schedule = self.resolved.schedules.of(plan, training)
        return ahead(schedule) if self.world.accelerator.asynchronous else schedule

    def feed(self, drawn: DrawnBatch, plan: BatchPlan, step: int, loader: Loader | None = None) -> Feed:
        """What gives this rank's modules their inputs in a step over `drawn`, from `loader` or that of training.
        `step`: by which losses draw; `EVALUATION` outside steps."""
        draws = Draws(self.recipe.debug.seed, step)
        return Feed(loader or self.loader, drawn, plan, self.adapters, self.world.rank, draws)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank's modules: plain, or DTensors on the meshes of their modules. An optimizer of
        torch takes them with `foreach=False`, since they lie on several meshes."""
        return list(self.root.parameters())

    def forward_backward(self, max_norm: float = 0.0) -> StepResult:
        """One step but for the optimizer's: draw the next global batch, run all modules forward and backward, and leave
        the gradient of the loss per target in `.grad` of every parameter, in place of what is there. Collective.

        Args:
            max_norm: clips the gradient of all modules together; 0 does not.

        Raises:
            NonFiniteError: loss or gradient are not finite, and `[training] on_non_finite` says stop, or too many in a
                row were not; on all ranks.
            SampleError: a sample cannot be read, or no sample of the batch has a target.
        """
        return self.training_step.run(self.training_step.draw(), max_norm)

    @cached_property
    def optimizers(self) -> tuple[Any, Any] | None:
        """Those of the recipe, and their schedules, with `step()` each (torchtitan's containers); None on a rank that
        has nothing to train. A loop of your own may have another optimizer."""
        return make_optimizers(self.recipe, self.root)

    def relayout(
        self, recipe: Recipe | Path | str | Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None
    ) -> Relayout:
        """Go on in the layout of `recipe`, another one of the same run, between two steps: parameters, what optimizers
        keep, schedules and the place in the data move from rank to rank, and nothing is written. Collective over all
        ranks of the job, of which the new layout may leave some out. Gradients are dropped, and modules, `root` and
        `parameters()` are others afterwards.

        Args:
            recipe: or its file, or its tables.
            optimizer: of a loop of your own, on every rank; its groups then have the new parameters. None: `optimizers`
                move.

        Returns:
            What it took on this rank.

        Raises:
            RecipeError: more than the layout differs; the message names the key or the parameter. The job goes on as
                it was.
            TypeError: steps were taken, and there is no optimizer to move.
            BoundaryTimeout: a rank did not answer in time; the message names the tensor. The state is lost then: start
                again, from the newest checkpoint.
        """
        began, world, moves = time.perf_counter(), self.world, "optimizers" in vars(self) and optimizer is None
        if not isinstance(recipe, Recipe):
            recipe = parse_recipe(recipe) if isinstance(recipe, Mapping) else load_recipe(Path(recipe))
        given = gather_objects(recipe.model_dump_json(by_alias=True), world, "the recipe of a relayout")
        if others := [rank for rank, own in enumerate(given) if own != given[0]]:
            raise RecipeError(f"relayout: rank {others[0]} was given another recipe than rank 0")
        check_same_run(self.recipe, recipe, world)
        if self.loader.step and optimizer is None and not moves:
            raise TypeError("Job.relayout: give the optimizer of your loop, or take steps by `job.optimizers`")
        own = self.optimizers if moves else None if optimizer is None else ([optimizer], None)
        later: dict[nn.Parameter, int] = {}
        new = Job.assemble(resolve(recipe, self.loader.source), world, self.loader.payloads, self.loss, later)
        state = MovingState(world, (self.graph, self.parallel), (new.graph, new.parallel), own, later)
        self.upcoming.close()  # from here on there is this job or none
        experts = self.expert_placement.state()
        self.expert_placement.to_expert_order(own)
        self.root.zero_grad()
        for copies in self.runtime.whole.values():
            if isinstance(copies, ComputeCopies):
                copies.free()
        received = state.move()
        new.loader.go_on_from(self.loader)
        vars(new)["non_finite"] = self.non_finite
        if optimizer is not None:
            state.regroup(optimizer)
        elif moves:
            with keeping_options(new.optimizers):
                state.restore(new.optimizers)
        new.expert_placement.restore(experts, new.optimizers if moves else None)
        vars(self).clear()
        vars(self).update(vars(new))
        return Relayout(received, time.perf_counter() - began)

    @cached_property
    def training_step(self) -> TrainingStep:
        """Takes its steps."""
        return TrainingStep(self)

    def plan_step(self, number: int) -> PlannedStep:
        """Everything about step `number` (from 0) that needs no payload and no other rank. A pure function of the run.

        Raises:
            SampleError: a sample's metadata is malformed or does not suit the modules.
            GraphError: the batch cannot be balanced as the recipe says.
        """
        place, drawn = self.loader.place(number), self.loader.batch(number)
        plan = self.plan(drawn.metas)
        schedule = self.schedule(plan)
        transfers = StepTransfers(plan, schedule, self.world.rank, self.world.ranks_per_node)
        transfers.prepare()
        return PlannedStep(number, place, drawn, plan, schedule, transfers, self.feed(drawn, plan, number))

    @cached_property
    def upcoming(self) -> Upcoming:
        """The steps to come, planned while earlier ones run."""
        ahead = AHEAD[self.recipe.data.num_workers > 0]
        return Upcoming(self.loader, self.plan_step, self.recipe.training.steps, ahead)

    @cached_property
    def first_steps(self) -> FirstSteps:
        """The checks that only its first steps can make."""
        own = frozenset(name for name, module in self.recipe.modules.items() if ":" in module.model)
        return FirstSteps(self.parallel, own, self.world)

    @cached_property
    def non_finite(self) -> NonFiniteSteps:
        """Counts its steps whose loss or gradient was not finite."""
        return NonFiniteSteps(self.recipe.training)

    @cached_property
    def expert_placement(self) -> ExpertPlacement:
        """Where the experts of its modules lie."""
        intervals = {n: table.expert_placement_interval for n, table in self.recipe.parallelism.modules.items()}
        return ExpertPlacement(ExpertLoads(self.world, self.graph, self.adapters, self.parallel), intervals)

    @cached_property
    def counted(self) -> list[nn.Parameter]:
        """The parameters that this rank counts in the norm of all gradients."""
        elsewhere = {id(copy.parameter) for copy in self.tied if not copy.first}
        return counted(self.parallel.values(), self.world.rank, elsewhere)

    def check_replicas(self, step: int) -> None:
        """Raise ReplicaError on all ranks if replicas of a parameter are not equal after `step` steps. Collective."""
        check_replicas(self.parallel, self.tied, self.world, step)

    @property
    def llm_lane(self) -> int:
        """This rank's lane of the LLM; -1 outside it."""
        lane = self.graph.llm.lane_of(self.world.rank)
        return -1 if lane is None else lane

    @property
    def vocabulary(self) -> VocabularyShards | None:
        """How the logits of this rank lie over those that compute them with it; None: it has all of them."""
        llm = self.parallel.get(self.graph.llm.name)
        return None if llm is None else llm.vocabulary

    def counts_loss(self, name: str) -> bool:
        """Whether this rank stands for its targets of a module: it is the first of the replicas that compute the same
        loss."""
        return is_first(self.graph[name].stage_mesh(-1), self.world.rank, (*LANE_AXES, "cp"))


def _check_profile(resolved: ResolvedRecipe, world: World) -> None:
    """Raise RecipeError on all ranks unless all have read the same profile: balancers and cuts go by it. Collective."""
    digests = gather_objects(resolved.profile_digest, world, "what other ranks read as [profiling] profile")
    if other := next((rank for rank, digest in enumerate(digests) if digest != digests[0]), 0):
        path = resolved.recipe.profiling.profile
        raise RecipeError(
            f"profiling.profile = {path!r}: the file of rank {other} is not that of rank 0, and balancers and cuts go "
            "by it; copy one to all machines"
        )


def _own_stages(world: World, spec: ModuleSpec) -> tuple[tuple[Stage, ...], DeviceMesh | None, DeviceMesh | None]:
    """The stages of a module that this rank holds, their mesh, and that of their parameters that are no experts. On all
    ranks, members or not, in graph order."""
    meshes = [[world.device_mesh(each) for each in stage_meshes(spec, i)] for i in range(spec.mesh.axis_size("pp"))]
    own = [i for i in range(spec.num_stages) if world.rank in spec.stage_mesh(i)]
    found = meshes[own[0] % len(meshes)] if own else [None]
    return tuple(Stage(spec.name, i) for i in own), found[0], found[-1]


def _tied_groups(world: World, spec: ModuleSpec) -> dict[int, dist.ProcessGroup]:
    """Per rank of the first and last stage, the group of the two ranks that hold the same shard of what is tied."""
    groups: dict[int, dist.ProcessGroup] = {}
    for pair in tied_pairs(spec):
        group = world.group(pair)
        if group is not None:
            groups |= dict.fromkeys(pair, group)
    return groups
