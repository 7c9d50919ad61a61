"""Between a recipe and the planner: what it works on, and what a layout means in a recipe's keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from hetmesh.boundary.process_groups import job_communicators
from hetmesh.cost.expert_costs import ExpertSizes
from hetmesh.errors import RecipeError, UsageError
from hetmesh.graph import LANE_AXES, ModuleGraph
from hetmesh.layout import MeshSpec
from hetmesh.models import Adapter
from hetmesh.models.user.adapters import UserAdapter
from hetmesh.parallel.key_heads import tensor_parallel_degrees
from hetmesh.planner import PLACEMENTS, LayoutPlan, MacroBatch, ModuleFacts, Problem, certify, laid_out, sample_flops
from hetmesh.planner.search import BATCHES as SIMULATED
from hetmesh.recipe.module_options import packs_anyway
from hetmesh.recipe.overrides import parse_overrides
from hetmesh.recipe.recipe import Recipe, parse_recipe
from hetmesh.recipe.rewrite import rewritten
from hetmesh.recipe.section import schedule_name, schedule_spelling
from hetmesh.recipe.wiring import DEGREE_OF_AXIS, EXPERT_DEGREE
from hetmesh.resolve.resolved import ResolvedRecipe, resolve
from hetmesh.schedule import POLICIES

BATCHES = 4
"""Global batches of which the planner takes means, at least."""

MAX_SAMPLES = 4096
"""Samples, from all of the run, among which a stable split, drift and the largest samples are looked for: more seldom
say more, and their metadata may have to be read from as many files. Of larger global batches `BATCHES` are."""

MAX_SIMULATED = 8
"""Batches of the simulation that decides, of at most `MAX_SAMPLES` samples together: a search simulates some fifty
layouts, each on all of them, and what a mean of eight still errs by is less than predictions do."""


def recipe_problem(
    resolved: ResolvedRecipe,
    *,
    machine: str | None = None,
    ranks: int | None = None,
    fixed: Mapping[str, Any] | None = None,
    memory_bytes: int | None = None,
    profile: str | None = None,
    steps: range | None = None,
) -> Problem:
    """What the planner searches for a recipe; its own layout counts for nothing, its global batch size stays.

    Args:
        machine: a name or TOML file; None: `[metrics] machine`, else this CPU.
        ranks: None: those of the recipe.
        fixed: `"llm.tensor_parallel_degree"` -> 8 and the like; also `placement`, `schedule` and `microbatch_size`.
        profile: a file of `hetmesh profile`; None: `[profiling] profile`, and without one the analytic costs.
        steps: of the run, whose samples count; None: all.

    Raises:
        RecipeError: sizes of a module or a machine that are not known.
        UsageError: a key of `fixed` that there is not, or a value that is not valid.
    """
    recipe, adapters = resolved.recipe, resolved.adapters
    for name, adapter in adapters.items():
        # Experts get no padding; what context parallelism or a single sample spares the recipe, no other layout would.
        if adapter.abilities.experts is not None and not packs_anyway(recipe, name):
            raise RecipeError(
                f"modules.{name}: most layouts of a {recipe.modules[name].model} need its samples in one row; set "
                "training.pack_samples = true"
            )
    plain = replace(resolved, graph=_without_layout(recipe, resolved.graph))
    graph, model, loader = plain.graph, plain.step_model(machine, profile), resolved.loader()
    steps, size = steps or range(recipe.training.steps), recipe.batch.global_batch_size
    count = min(max(-(-MAX_SAMPLES // size), BATCHES), len(steps))
    samples = loader.drawn([i for k in range(count) for i in loader.indices(steps[k * len(steps) // count])]).metas
    facts = {name: _facts(recipe, name, adapters[name], model.shape(name), graph.llm.name) for name in graph.order}
    return Problem(
        graph,
        facts,
        model.machine,
        recipe.world_size if ranks is None else ranks,
        samples,
        recipe.batch.global_batch_size,
        recipe.optimizer.name,
        replace(plain.balance, lengths=None),  # those of the recipe's own layout
        _fixed(fixed or {}, facts),
        memory_bytes,
        model.profile,
        communicators=lambda graph: job_communicators(graph, 1 + max(graph.ranks), lambda spec: facts[spec.name].shape),
    )


def recipe_macro_batch(problem: Problem) -> MacroBatch | None:
    """What a problem's samples say about how ranks are divided by module; None where nothing is to be divided."""
    if not 2 <= len(problem.own) <= problem.ranks:
        return None
    return certify(sample_flops(problem, problem.samples), problem.own, problem.ranks)


def certified(problem: Problem, macro: MacroBatch | None) -> tuple[Problem, int]:
    """What a certificate decides: the window of batches that means are taken of, and how many batches are simulated.

    Both hold a certified macro batch; where nothing is certified, the window is all that was looked at. A window has at
    least `BATCHES` batches and no more than there are, a simulation `BATCHES` of `search` to `MAX_SIMULATED`.
    """
    size = problem.global_batch_size
    there = max(len(problem.samples) // size, 1)
    holds = there if macro is None or not macro.samples else -(-macro.samples // size)
    most = max(min(MAX_SIMULATED, MAX_SAMPLES // size), SIMULATED)
    batches = SIMULATED if macro is None else min(max(holds, SIMULATED), most)
    return replace(problem, window=min(max(holds, BATCHES), there)), batches


def _without_layout(recipe: Recipe, graph: ModuleGraph) -> ModuleGraph:
    """All modules on one rank: nothing of the recipe's own layout is left, also not what comes with one."""
    plain = MeshSpec((0,), (LANE_AXES[0],), (1,))
    modules = [
        replace(
            spec,
            mesh=plain,
            splits=(),
            activation=None,
            frozen_layers=frozenset(),
            token_axes=(),
            tokens_per_row=0,
            packed=packs_anyway(recipe, spec.name),
            assignment="balanced",
            token_costs=(0, 0),
            options=replace(spec.options, reshard_after_forward="default", sequence_parallel=False),
        )
        for spec in graph.modules
    ]
    return ModuleGraph(tuple(modules), graph.boundaries)


def _facts(recipe: Recipe, name: str, adapter: Adapter, shape: Any, llm: str) -> ModuleFacts:
    abilities, sizes, plan = adapter.abilities, adapter.tensor_parallel_sizes(), adapter.tensor_parallel_plan()
    packs = abilities.use_packed is not None and "context_parallel" not in abilities.reasons
    splits, topology = abilities.with_stages(), recipe.wiring.topology
    own, encoder = abilities.experts, not topology.inputs(name) and name != llm
    return ModuleFacts(
        shape,
        splits.activation,
        splits.first_layers,
        tuple(tensor_parallel_degrees(sizes, plan)),
        context_parallel=packs if name == llm else encoder and abilities.tokens_per_row > 0,
        tokens_per_row=abilities.tokens_per_row if encoder else 0,
        # With its tokens in shares a custom LLM cannot be a pipeline.
        sequence_parallel=bool(splits.token_sharded) and not (name == llm and isinstance(adapter, UserAdapter)),
        alone=recipe.wiring.tables[name] == name or name == llm or encoder or not topology.outputs(name),
        frozen_layers=shape.frozen_layers if recipe.modules[name].trainable else frozenset(),
        experts=None if own is None else ExpertSizes(own.count, own.chosen, own.features, own.inner),
    )


def _fixed(given: Mapping[str, Any], facts: Mapping[str, ModuleFacts]) -> dict[tuple[str, str], object]:
    again, shares = "activation_checkpoint", "enable_sequence_parallel"
    keys = [*DEGREE_OF_AXIS.values(), EXPERT_DEGREE, shares, again]
    axis_of = {key: axis for axis, key in DEGREE_OF_AXIS.items()} | {EXPERT_DEGREE: "ep"}
    values = {"placement": PLACEMENTS, "schedule": POLICIES, "microbatch_size": None}  # None: a whole number from 1 on
    modules = [module for module, fact in facts.items() if fact.alone]
    out: dict[tuple[str, str], object] = {}
    for key, value in given.items():
        module, dot, name = key.rpartition(".")
        value = schedule_name(value) if key == "schedule" else value
        if not ((not dot and key in values) or (module in modules and name in keys)):
            raise UsageError(
                f"--fix {key}: valid are {', '.join(values)}, and for MODULE of {modules} MODULE.KEY with KEY of {keys}"
            )
        valid = values[key] if not dot else {again: ("none", "full"), shares: (False, True)}.get(name)
        known = type(value) is int and value >= 1 if valid is None else value in valid
        if not known or (name == shares and type(value) is not bool):
            raise UsageError(f"--fix {key}: {value!r} is not valid")
        out[module, axis_of.get(name, name)] = value
    return out


PER_STAGE = "pipeline_parallel_layers_per_stage"
"""The recipe key of stages that take turns."""


def plan_keys(recipe: Recipe, problem: Problem, plan: LayoutPlan) -> dict[tuple[str, ...], Any]:
    """The recipe's keys that say `plan`."""
    keys: dict[tuple[str, ...], Any] = {
        ("training", "global_batch_size"): problem.global_batch_size,
        ("training", "local_batch_size"): plan.microbatch_size,
    }
    if plan.encoder_sizes or recipe.balance.microbatch_sizes:
        keys["balance", "microbatch_sizes"] = plan.encoder_sizes
    if plan.shares or recipe.balance.microbatch_shares:
        keys["balance", "microbatch_shares"] = {name: list(own) for name, own in plan.shares.items()}
    tables: dict[str, dict[str, Any]] = {}
    for name, own in plan.modules.items():
        first, last = own.ranks[0], own.ranks[1] - 1
        table: dict[str, Any] = {"ranks": f"{first}-{last}" if first < last else str(first)}
        for axis, key in DEGREE_OF_AXIS.items():
            if own.degree(axis) > 1 or (axis == "dp_replicate" and own.degree("dp_shard") == 1):
                table[key] = own.degree(axis)
        if own.expert_parallel > 1:
            table[EXPERT_DEGREE] = own.expert_parallel
        if own.reshard != "default":
            table["fsdp_reshard_after_forward"] = own.reshard
        if own.sequence_parallel:
            table["enable_sequence_parallel"] = True
        if own.stages_per_rank > 1:
            table[PER_STAGE] = -(-problem.facts[name].most_stages // (own.degree("pp") * own.stages_per_rank))
        tables[name] = table
        keys["modules", name, "activation_checkpoint"] = own.activation_checkpoint
    schedule: dict[str, Any] = {"pipeline_parallel_schedule": schedule_spelling(plan.schedule)}
    if plan.options.window is not None:
        schedule["three_phase_window"] = plan.options.window
    if plan.options.early:
        schedule["interleaved_early_warmup"] = True
    if plan.schedule == "bubble_fill" and plan.options.inner != "1f1b":
        schedule["bubble_fill_schedule"] = schedule_spelling(plan.options.inner)
    keys["parallelism",] = schedule | tables
    return keys


_PLANNED = {"ranks", *DEGREE_OF_AXIS.values(), EXPERT_DEGREE, "fsdp_reshard_after_forward", "enable_sequence_parallel"}
_PLANNED |= {PER_STAGE, "module_fqns_per_model_part", "pipeline_parallel_microbatch_size"}
_PLANNED |= {"pipeline_parallel_schedule", "three_phase_window", "interleaved_early_warmup", "bubble_fill_schedule"}


def not_kept(recipe: Recipe) -> list[str]:
    """Keys of the recipe's layout beside those that a plan says, none of which is in the recipe that is written: they
    are of a layout that is no more."""
    flat = recipe.parallelism.model_fields_set - {"modules", "experts_of_all"} - _PLANNED
    tables = recipe.parallelism.modules.items()
    own = [f"parallelism.{name}.{key}" for name, table in tables for key in table.model_fields_set - _PLANNED]
    return sorted([*(f"parallelism.{key}" for key in flat), *own])


def planned_text(recipe: Recipe, text: str, overrides: Sequence[str], problem: Problem, plan: LayoutPlan) -> str:
    """The recipe's text with the layout of `plan`: what was given on the command line is in it, and stages are named
    where the recipe would be cut into others by itself. `text`, `overrides`: what `recipe` was read from. Raises
    RecipeError: it would not be what was planned."""
    keys = {path: value for path, value in parse_overrides(overrides) if path[0] != "parallelism"}
    keys |= plan_keys(recipe, problem, plan)
    if recipe.job.description:  # of another layout
        keys["job", "description"] = str(plan)
    planned = laid_out(problem, plan)
    graph = resolve(parse_recipe(rewritten(text, keys))).graph
    for name in plan.modules:
        if graph[name].splits != planned[name].splits:
            table, stages = keys["parallelism",][name], [list(layers) for layers in planned[name].splits]
            table.pop(PER_STAGE, None)
            if stages:
                table["module_fqns_per_model_part"] = stages
            else:  # the recipe would cut it into slices or turns
                table[PER_STAGE] = len(planned[name].layers)
    text = rewritten(text, keys)
    graph = resolve(parse_recipe(text)).graph
    for name in graph.order:
        for field in fields(graph[name]):
            one, other = (getattr(g[name], field.name) for g in (graph, planned))
            if one != other:
                raise RecipeError(f"the recipe that was planned gives {name!r} {field.name} {one}, not {other}")
    if (after := _said(parse_recipe(text), plan)) != (before := _said(recipe, plan)):
        changed = [key for key in before if before[key] != after[key]]
        raise RecipeError(f"the recipe cannot be rewritten without changing {changed}")
    return text


def _said(recipe: Recipe, plan: LayoutPlan) -> dict[str, Any]:
    """All but the layout."""
    given = recipe.model_dump(exclude={"parallelism": True, "training": {"local_batch_size", "global_batch_size"}})
    del given["balance"]["microbatch_sizes"], given["balance"]["microbatch_shares"], given["job"]["description"]
    for name in plan.modules:
        del given["modules"][name]["activation_checkpoint"]
    return given
