"""Job: everything a recipe names, built on this rank: source, adapters, graph, modules on their meshes, runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hetmesh.balance import BatchPlan, plan_batch
from hetmesh.boundary import World
from hetmesh.boundary.groups import ends_are_tied, tied_pairs
from hetmesh.data.expand import Expansion, expand
from hetmesh.data.loader import Loader
from hetmesh.data.registry import make_source
from hetmesh.data.source import Source
from hetmesh.errors import RecipeError
from hetmesh.graph import LANE_AXES, ModuleGraph, ModuleOptions, ModuleSpec, SampleMeta, Stage, StageGraph, stage_graph
from hetmesh.models import (
    Adapter,
    load_weights,
    lora_plan,
    make_adapters,
    module_rows,
    placeholder_rows,
    pretrained_of,
    sample_positions,
    with_further_boundaries,
)
from hetmesh.parallel import TiedParameter, parallelize, start_reduction, sum_tied_parameters, tied_parameters
from hetmesh.parallel.tokens import token_sharded
from hetmesh.recipe.recipe import Recipe
from hetmesh.runtime import Reducer, Runtime
from hetmesh.schedule import POLICIES, PolicyOptions, Schedule
from hetmesh.training.loss import sum_cross_entropy
from hetmesh.training.module_shapes import module_shape_of
from hetmesh.training.modules import full_module
from hetmesh.training.optimizers import Root
from hetmesh.training.splits import split_modules


def describe(recipe: Recipe) -> tuple[Source, dict[str, Adapter], ModuleGraph]:
    """What a recipe means before anything is built: its data source, adapters and module graph. No process group.

    Raises:
        RecipeError: a model or source that cannot be, with the key.
    """
    _check_directories(recipe)
    source = make_source(recipe.data.source, **recipe.data.options)
    adapters = make_adapters(recipe.modules, recipe.boundaries, source.vocab_size, _media_shapes(source))
    graph = recipe.graph_with({name: adapter.layers() for name, adapter in adapters.items()})
    for name, adapter in adapters.items():
        _check_options(recipe, name, adapter)
    modules = tuple(
        replace(m, features=adapters[m.name].out_features or 0, tokens_per_row=_tokens_per_row(m, adapters))
        for m in graph.modules
    )
    boundaries = with_further_boundaries(graph.boundaries, adapters)
    return source, adapters, split_modules(recipe, ModuleGraph(modules, boundaries), adapters)


def _tokens_per_row(module: ModuleSpec, adapters: Mapping[str, Adapter]) -> int:
    """`ModuleSpec.tokens_per_row`; 0 where the ranks of a lane do not share the tokens of its media."""
    shares = module.media is not None and "cp" in module.token_axes
    return getattr(adapters[module.name], "tokens_per_row", 0) if shares else 0


def _check_directories(recipe: Recipe) -> None:
    """Raise RecipeError if directories of weights are missing, for all of them and what the data source misses: a
    template's user fills them in together."""
    errors = []
    for name, module in recipe.modules.items():
        try:
            pretrained_of(name, module)
        except RecipeError as error:
            errors.append(str(error))
    if errors:
        try:
            make_source(recipe.data.source, **recipe.data.options)
        except RecipeError as error:
            errors.append(str(error))
        raise RecipeError("\n".join(errors))


def _check_options(recipe: Recipe, name: str, adapter: Adapter) -> None:
    """Raise RecipeError where a module cannot do what the recipe asks of it."""
    options = recipe.graph[name].options
    if options.sequence_parallel:
        key = f"parallelism.{name}.enable_sequence_parallel"
        if not token_sharded(adapter):
            hint = "" if name == recipe.sink else f"; write the key in [parallelism.{recipe.sink}]"
            raise RecipeError(f"{key}: this {recipe.modules[name].model} cannot split its tokens{hint}")
        if recipe.modules[name].lora is not None:
            raise RecipeError(f"{key}: not together with modules.{name}.lora")
    if recipe.graph[name].packed and not hasattr(adapter, "use_packed"):
        key = "training.pack_samples" if recipe.training.pack_samples else f"parallelism.{name}.context_parallel_degree"
        if recipe.modules[name].attention_mask != "causal":
            key = f"modules.{name}.attention_mask"
        raise RecipeError(f"{key}: this {recipe.modules[name].model} cannot take its samples in one row")
    shares = "cp" in recipe.graph[name].token_axes and (name == recipe.sink or hasattr(adapter, "tokens_per_row"))
    if recipe.graph[name].mesh.axis_size("cp") > 1 and not shares:
        raise RecipeError(
            f"parallelism.{name}.context_parallel_degree: of the modules only {recipe.sink!r}, which reads tokens, and "
            "encoders of model 'qwen3_vl_vision' can share theirs; make it 1 and give the module more data parallel "
            "ranks"
        )
    if recipe.schedule == "zero_bubble":
        _check_zero_bubble(recipe, name, options)
    config: Any = getattr(adapter, "config", None)
    if recipe.graph[name].mesh.axis_size("tp") > 1 and getattr(config, "attention_dropout", None):
        raise RecipeError(
            f"modules.{name}.config.attention_dropout = {config.attention_dropout}: with tensor parallelism every rank "
            "would drop the same positions of its heads; set it to 0, or tensor_parallel_degree to 1"
        )


def _check_zero_bubble(recipe: Recipe, name: str, options: ModuleOptions) -> None:
    """Raise RecipeError for what a backward in two parts cannot be combined with."""
    key = 'parallelism.pipeline_parallel_schedule = "zero_bubble" splits the backward'
    if recipe.graph[name].mesh.axis_size("dp_shard") > 1:
        raise RecipeError(
            f"{key}, of which FSDP learns nothing: module {name!r} has a data_parallel_shard_degree of "
            f"{recipe.graph[name].mesh.axis_size('dp_shard')}; make it 1, or take the schedule 1f1b or interleaved"
        )
    if options.activation_checkpoint != "none":
        raise RecipeError(
            f"{key}, and module {name!r} would be computed again for each part: set its activation_checkpoint to "
            "'none', or take the schedule 1f1b or interleaved"
        )


def _media_shapes(source: Source) -> dict[str, tuple[int, ...]]:
    """Raw shape per kind of media, from the first samples that have some."""
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(min(len(source), 64)):
        for item in source.meta(index).media:
            shapes.setdefault(item.name, item.shape)
    return shapes


def make_prepare(
    recipe: Recipe, graph: ModuleGraph, adapters: Mapping[str, Adapter]
) -> Callable[[SampleMeta], Expansion]:
    """What the loader does to each sample's metadata: rows per placeholder, `seq_len`, rows per module, positions."""
    return partial(
        expand,
        item_rows=placeholder_rows(graph, adapters),
        seq_len=recipe.training.seq_len,
        module_rows=module_rows(graph, adapters),
        position_ids=sample_positions(graph, adapters),
    )


@dataclass(frozen=True, eq=False)
class Job:
    """One rank's part of a run, ready to step. Made by `Job.assemble` on every rank."""

    recipe: Recipe
    world: World
    graph: ModuleGraph
    adapters: dict[str, Adapter]
    loader: Loader
    root: Root
    runtime: Runtime
    counted_elsewhere: frozenset[int] = frozenset()  # ids of parameters that are copies of another stage's

    @classmethod
    def assemble(cls, recipe: Recipe, world: World) -> Job:
        """Build the modules of this rank, with the same weights on every layout, and everything around them."""
        source, adapters, graph = describe(recipe)
        stages = stage_graph(graph)
        modules: dict[str, nn.Module] = {}
        adapted: dict[Stage, nn.Module] = {}
        reducers: dict[Stage, Reducer] = {}
        tied: list[TiedParameter] = []
        for name in graph.order:
            own, mesh = _own_stages(world, graph[name])
            tied_groups = _tied_groups(world, graph[name]) if shares_ends(recipe, adapters[name], graph[name]) else {}
            if mesh is None:
                continue
            pretrained = pretrained_of(name, recipe.modules[name])
            module = full_module(recipe, adapters[name], name)
            if pretrained is None:
                module = module.to(world.device)
            if graph[name].packed or graph[name].tokens_per_row:
                adapters[name].use_packed(module)  # type: ignore[attr-defined]
            plan = lora_plan(module, {**adapters[name].tensor_parallel_plan(), **recipe.modules[name].plan})
            runs = [graph[name].stage_layers(stage.index) for stage in own] if graph[name].splits else None
            spec = graph[name].stage_mesh(own[0].index)
            parallel = parallelize(adapters[name], module, spec, mesh, plan, graph[name].options, runs)
            if pretrained is not None:
                device = "cpu" if graph[name].options.cpu_offload and parallel.summed_over_lanes else world.device
                load_weights(adapters[name], parallel.module, pretrained, device, roots=parallel.stages)
            modules[name] = parallel.module
            adapted |= zip(own, parallel.stages, strict=True)
            trained = ((i, stage) for i, stage in enumerate(own) if stage in stages.trainable_stages)
            reducers |= {stage: partial(start_reduction, parallel, i) for i, stage in trained}
            tied += tied_parameters(graph[name], own, parallel, tied_groups)
        runtime = Runtime(
            world,
            graph,
            adapted,
            reducers=reducers,
            loss=sum_cross_entropy,
            finish=partial(sum_tied_parameters, tied, world),
        )
        prepare = make_prepare(recipe, graph, adapters)
        loader = Loader(source, recipe.batch.global_batch_size, prepare, seed=recipe.debug.seed)
        elsewhere = frozenset(id(copy.parameter) for copy in tied if not copy.first)
        return cls(recipe, world, graph, adapters, loader, Root(modules.items()), runtime, elsewhere)

    def plan(self, samples: Sequence[SampleMeta]) -> BatchPlan:
        """The batch plan of a global batch; equal on every rank."""
        return plan_batch(self.graph, samples, self.recipe.batch.microbatch_size)

    def schedule(self, plan: BatchPlan, *, training: bool = True) -> Schedule:
        """The schedule of a step."""
        return recipe_schedule(self.recipe, self.graph, plan.num_microbatches, training)

    @property
    def sink_lane(self) -> int:
        """This rank's lane of the module that computes the loss; -1 outside it."""
        lane = self.graph.sink.lane_of(self.world.rank)
        return -1 if lane is None else lane

    @property
    def counts_loss(self) -> bool:
        """Whether this rank stands for its targets: it is the first of the replicas that compute the same loss."""
        mesh = self.graph.sink.stage_mesh(-1).merge(LANE_AXES, "lane")
        coordinate = mesh.coordinate(self.world.rank)
        return coordinate is not None and all(
            c == 0 for axis, c in zip(mesh.axes, coordinate, strict=True) if axis not in ("lane", "cp")
        )


def recipe_schedule(recipe: Recipe, graph: ModuleGraph, microbatches: int, training: bool = True) -> Schedule:
    """The schedule that `recipe` asks for, of a step of so many microbatches."""
    options = PolicyOptions(
        window=recipe.schedule_key("three_phase_window"),
        recompute=bool(recipe.schedule_key("three_phase_recompute")),
        offload=bool(recipe.schedule_key("three_phase_offload")),
        early=bool(recipe.schedule_key("interleaved_early_warmup")),
    )
    return POLICIES[recipe.schedule](cached_stage_graph(graph), microbatches, training, options)


@lru_cache(maxsize=64)
def cached_stage_graph(graph: ModuleGraph) -> StageGraph:
    """`stage_graph`, once per graph: policies cache by it."""
    return stage_graph(graph)


def _own_stages(world: World, spec: ModuleSpec) -> tuple[tuple[Stage, ...], DeviceMesh | None]:
    """The stages of a module that this rank holds, and their mesh. On all ranks, members or not, in graph order."""
    meshes = {i: world.device_mesh(spec.stage_mesh(i)) for i in range(spec.mesh.axis_size("pp"))}
    own = [i for i in range(spec.num_stages) if world.rank in spec.stage_mesh(i)]
    mesh = meshes[own[0] % len(meshes)] if own else None
    return tuple(Stage(spec.name, i) for i in own), mesh


def shares_ends(recipe: Recipe, adapter: Adapter, spec: ModuleSpec) -> bool:
    """Whether the first and the last stage of a module share a weight that is trained. Equal on all ranks."""
    if spec.mesh.axis_size("pp") == 1:
        return False
    return ends_are_tied(spec, module_shape_of(recipe, adapter, spec.name))


def _tied_groups(world: World, spec: ModuleSpec) -> dict[int, dist.ProcessGroup]:
    """Per rank of the first and last stage, the group of the two ranks that hold the same shard of what is tied."""
    groups: dict[int, dist.ProcessGroup] = {}
    for pair in tied_pairs(spec):
        group = world.group(pair)
        if group is not None:
            groups |= dict.fromkeys(pair, group)
    return groups
