"""ResolvedRecipe: what a recipe means before anything is built; `resolve` makes it, or names all that is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np

from hetmesh.balance import BalanceOptions, BatchPlan, plan_batch
from hetmesh.balance.co_located import check_shares, leaders, led_modules
from hetmesh.cost import Profile, load_machine
from hetmesh.cost.flops import SampleCosts, token_costs
from hetmesh.data.expand import Expander
from hetmesh.data.loader import Loader
from hetmesh.data.mixture import MixtureSource
from hetmesh.data.payloads import Payloads
from hetmesh.data.recipe_sources import recipe_source
from hetmesh.data.sample_order import GIVEN, SHUFFLED, TOKENS, EpochOrder, PhasedOrder, SampleOrder
from hetmesh.data.source import Source
from hetmesh.errors import GraphError, HetmeshError, RecipeError, Refusals
from hetmesh.formatting import listed
from hetmesh.graph import BoundarySpec, ModuleGraph, ModuleSpec, SampleMeta
from hetmesh.graph.sample import LOSS_UNITS, kinds_of
from hetmesh.models import (
    Adapter,
    make_adapters,
    module_rows,
    placeholder_rows,
    pretrained_of,
    sample_positions,
    with_side_outputs,
)
from hetmesh.recipe.hf_path import check_placeholders
from hetmesh.recipe.module_options import module_options, packs, token_assignment, token_axes
from hetmesh.recipe.recipe import Recipe
from hetmesh.recipe.sections import Balance
from hetmesh.resolve.deferral import DeferralChoice, choose_deferral
from hetmesh.resolve.directories import up_to_llm
from hetmesh.resolve.media import check_extents, check_placed, media_extents
from hetmesh.resolve.module_refusals import uncompared_plans, untrained
from hetmesh.resolve.modules import ModuleShapes, Shapes
from hetmesh.resolve.recipe_step_model import agreed_step_model, recipe_step_model
from hetmesh.resolve.refusals import check_recipe
from hetmesh.resolve.schedules import StepSchedules, check_schedule, schedule_options
from hetmesh.resolve.splits import Typical, module_splits, typical_work
from hetmesh.simulate import StepModel
from hetmesh.simulate.replay import StepReplay

_AT_ONCE = 4096  # samples whose metadata are read


@dataclass(frozen=True, eq=False)
class ResolvedRecipe:
    """What a recipe means. Made by `resolve`; no process group, no weights.

    Attributes:
        source: of the training samples.
        adapters: by module.
        shapes: sizes of each module; None of one that cannot be built on the meta device.
        typical: what a microbatch gives the modules.
        notes: what of users' modules could not be compared or tried, and why, a sentence each.
    """

    recipe: Recipe
    source: Source
    adapters: dict[str, Adapter]
    graph: ModuleGraph
    shapes: Shapes
    typical: Typical = field(default_factory=Typical)
    notes: tuple[str, ...] = ()

    @cached_property
    def expander(self) -> Expander:
        """What loaders do to the metadata of samples: rows per placeholder, `seq_len`, rows per module, positions."""
        return Expander(
            placeholder_rows(self.graph, self.adapters),
            seq_len=self.recipe.training.seq_len,
            module_rows=module_rows(self.graph, self.adapters),
            position_ids=sample_positions(self.graph, self.adapters),
            placed_rows={name: adapter.abilities.placed_rows for name, adapter in self.adapters.items()},
        )

    def loader(self, payloads: Payloads | None = None) -> Loader:
        """A new loader of the training samples: the same for whatever looks at batches, samples that it leaves out too.
        `payloads`: where samples are loaded; None: in this process, when they are needed."""
        return Loader(
            self.source,
            self.recipe.batch.global_batch_size,
            self.expander,
            seed=self.recipe.debug.seed,
            shuffle=self.recipe.data.order == SHUFFLED,
            order=self.order,
            payloads=payloads,
            skip=self.recipe.data.on_bad_sample == "skip",
        )

    @cached_property
    def profile_digest(self) -> str:
        """Of the contents of `[profiling] profile`; empty without one."""
        path = self.recipe.profiling.profile
        return Profile.load(path).digest if path else ""

    @cached_property
    def order(self) -> SampleOrder:
        """Of the training samples.

        Raises:
            SampleError: with a curriculum, the metadata of a sample cannot be read.
            RecipeError: with a curriculum, no sample has rows of the module.
        """
        keys, seed, size = self.recipe.data, self.recipe.debug.seed, self.recipe.batch.global_batch_size
        if keys.phases:
            assert isinstance(self.source, MixtureSource)
            phases = {phase.start_step: phase.weights for phase in keys.phases}
            return PhasedOrder(self.source, phases, size, seed, shuffle=keys.order == SHUFFLED)
        if keys.order in (SHUFFLED, GIVEN):
            return EpochOrder(len(self.source), seed, shuffle=keys.order == SHUFFLED)
        loader = Loader(self.source, 1, self.expander, skip=keys.on_bad_sample == "skip")
        runs = (range(i, min(i + _AT_ONCE, len(self.source))) for i in range(0, len(self.source), _AT_ONCE))
        each = [
            metas.tokens if keys.order in (TOKENS, self.recipe.llm) else metas.rows_of(keys.order)
            for metas in (loader.drawn(run).metas for run in runs)
        ]
        if not (key := np.concatenate(each)).any():
            valid = listed([SHUFFLED, GIVEN, TOKENS, *self.recipe.modules])
            raise RecipeError(f"data.order = {keys.order!r}: no sample gives it rows; valid are {valid}")
        return EpochOrder(len(self.source), seed, key=key, name=keys.order)

    @cached_property
    def costs(self) -> dict[str, SampleCosts]:
        """What samples cost each module: measured seconds, where `[profiling] profile` has them, else FLOPs. Raises
        RecipeError: the profile is of other modules."""
        graph, shapes = self.graph, self.shapes
        model = agreed_step_model(self.recipe, graph, shapes) if self.recipe.profiling.profile else None
        if model is not None:
            try:
                return {name: model.sample_costs(name, self.typical.of(name)) for name in graph.order}
            except HetmeshError as error:
                hint = "measure this recipe with `hetmesh profile`, or leave the key out"
                raise RecipeError(f"profiling.profile: {error}; {hint}") from error
        return {
            name: SampleCosts.of(
                shapes[name], self.typical.of(name), upstream=any(map(graph.needs_gradient, graph.inputs(name)))
            )
            for name in graph.order
        }

    @cached_property
    def balance(self) -> BalanceOptions:
        """How batches are balanced."""
        keys = self.recipe.balance
        if keys.policy == "none":  # which has no use for most keys
            return BalanceOptions(microbatch_sizes=keys.microbatch_sizes, microbatch_shares=keys.microbatch_shares)
        return self.balance_with(self.deferral.on)

    def balance_with(self, deferral: bool) -> BalanceOptions:
        """How the recipe's policy balances batches, where samples are deferred or not."""
        keys = self.recipe.balance
        return BalanceOptions(
            keys.policy,
            self.costs,
            keys.max_tokens,
            keys.microbatch_sizes,
            free=keys.microbatches == "free",
            deferral=deferral,
            split_deferred=keys.split_deferred_backward,
            microbatch_shares=keys.microbatch_shares,
            lengths=self.lengths,
        )

    @cached_property
    def lengths(self) -> StepReplay | None:
        """What steps take under the placement and schedule of the recipe, for balancers; None where that is 1F1B with
        each module on ranks of its own."""
        led = [self.graph[name].mesh.ranks for name in led_modules(self.graph)]
        alone = sum(map(len, led)) == len(set().union(*led))
        if alone and self.recipe.schedule == "1f1b":
            return None
        model = agreed_step_model(self.recipe, self.graph, self.shapes)
        cut = [name for name in self.graph.order if self.graph[name].num_stages > 1] if model is not None else []
        shares = tuple((name, model.stage_shares(name, self.typical.of(name))) for name in cut if model)
        return StepReplay(self.graph, self.recipe.schedule, schedule_options(self.recipe), shares)

    @cached_property
    def deferral(self) -> DeferralChoice:
        """Whether samples are deferred, for all of the run."""
        return choose_deferral(self.recipe, self.graph, self.shapes, self.loader(), self.balance_with(False))

    def keep_deferral(self, choice: DeferralChoice) -> None:
        """Defer as a run that goes on has done, whatever would be decided now; before its first batch is balanced."""
        self.__dict__["deferral"] = choice
        self.__dict__.pop("balance", None)  # `check_first_batch` may have asked for it

    def plan(self, samples: Sequence[SampleMeta]) -> BatchPlan:
        return plan_batch(self.graph, samples, self.recipe.batch.microbatch_size, self.balance)

    @cached_property
    def schedules(self) -> StepSchedules:
        """Makes the schedules of steps, the same on all ranks."""
        model = agreed_step_model(self.recipe, self.graph, self.shapes) if self.recipe.fills_bubbles else None
        return StepSchedules(self.recipe, self.graph, model, self.typical)

    def step_model(self, machine: str | None = None, profile: str | None = None) -> StepModel:
        """`recipe_step_model` with the machine and the profile that a command names.

        Args:
            machine: a name or TOML file; None: `[metrics] machine`, else a CPU.
            profile: a file of `hetmesh profile`; None: `[profiling] profile`.
        """
        fitted = profile or self.recipe.profiling.profile
        found = Profile.load(fitted) if fitted else None
        device = load_machine(machine) if machine else None
        return recipe_step_model(self.recipe, self.graph, self.shapes, device, found)


def resolve(recipe: Recipe, source: Source | None = None) -> ResolvedRecipe:
    """What `recipe` means: `hetmesh check`, `train` and every other verb come here first, so what one refuses, all do.
    `source`: of the training samples, if there is one already. Raises RecipeError: everything that is wrong with the
    recipe beyond its text, a line each."""
    refusals, known_source = Refusals(), source is not None
    for name, module in recipe.modules.items():
        with refusals.collect():
            pretrained_of(name, module)
    with refusals.collect():
        source = source or recipe_source(recipe.data)
    if source is None:  # models take sizes from it, but those of directories
        if recipe.model.hf_path is not None:
            with refusals.collect():
                adapters_of(up_to_llm(recipe), vocab_size=0)
        refusals.finish()
    assert source is not None
    adapters: dict[str, Adapter] | None = None
    extents: dict[str, tuple[int, ...] | None] = {}
    if not refusals.said:
        with refusals.collect():
            extents = media_extents(source, recipe.data.on_bad_sample == "skip")
            tensors = {kind: extent for kind, extent in extents.items() if extent is not None}
            made = (b.at for b in recipe.wiring.topology.outputs(recipe.llm) if b.at is not None)
            if all(set(source.placeholders).intersection(kinds_of(at)) for at in made):
                adapters = adapters_of(recipe, source.vocab_size, tensors)
                check_placed([kind for kind in extents if kind not in tensors], recipe, adapters)
            else:  # of the others, `check_recipe` says what is wrong
                adapters_of(up_to_llm(recipe), source.vocab_size, tensors)
    shapes = ModuleShapes(recipe, adapters or {})
    with refusals.collect():
        check_recipe(recipe, adapters, source.placeholders, shapes)
    if not known_source:
        with refusals.collect():
            check_placeholders(recipe, source.placeholders, source.vocab_size)
    graph, typical = None, Typical()
    notes: list[str] = []
    if adapters is not None:
        with refusals.collect():
            typical = _typical(recipe, adapters, source)
            graph = _graph(recipe, adapters, shapes, typical)
            if recipe.data.on_bad_sample != "skip":
                check_extents(tensors, graph, adapters)
            check_balance(recipe.balance, graph)
            check_schedule(recipe, graph)
    if adapters is not None and not refusals.said:
        with refusals.collect():
            notes = uncompared_plans(recipe.modules, recipe.wiring.meshes, adapters, source.vocab_size)
            notes += untrained(recipe)
    refusals.finish()
    assert adapters is not None
    assert graph is not None
    resolved = ResolvedRecipe(recipe, source, adapters, graph, shapes, typical, tuple(notes))
    if typical.profile is not None and recipe.balance.policy != "none":
        resolved.costs  # noqa: B018 - whether it is of these modules is said now
    return resolved


def adapters_of(
    recipe: Recipe, vocab_size: int, extents: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, Adapter]:
    """The adapters of the modules of `recipe`; arguments and errors are those of `make_adapters`."""
    packed, wiring = [name for name in recipe.modules if packs(recipe, name)], recipe.wiring
    boundaries = wiring.topology.boundaries
    return make_adapters(recipe.modules, boundaries, wiring.media, vocab_size, extents, packed, wiring.losses)


def check_first_batch(resolved: ResolvedRecipe) -> list[str]:
    """What is to be said of the first batch: losses that count nothing in it. Raises RecipeError for caps
    (`balance.max_tokens`) that it cannot keep, SampleError for samples that end the run."""
    metas, losses = resolved.loader().batch(0).metas, resolved.graph.losses
    if resolved.recipe.balance.max_tokens:
        try:
            resolved.plan(metas)
        except GraphError as error:
            raise RecipeError(f"balance.max_tokens: the first batch cannot keep it: {error}") from error
    counts = {name: metas.rows.get(name + LOSS_UNITS, metas.num_targets).sum() for name in losses}
    return [
        f"modules.{name}.loss: the first batch has none of the {losses[name].unit} that it counts; training.seq_len = "
        f"{resolved.recipe.training.seq_len} may cut them"
        for name, count in counts.items()
        if not count
    ]


def _typical(recipe: Recipe, adapters: Mapping[str, Adapter], source: Source) -> Typical:
    work, profile = cache(lambda: typical_work(recipe, adapters, source)), None
    if recipe.profiling.profile:
        with suppress(HetmeshError):  # `check_run` says it
            profile = Profile.load(recipe.profiling.profile)
    return Typical(work, profile)


def _graph(recipe: Recipe, adapters: Mapping[str, Adapter], shapes: Shapes, typical: Typical) -> ModuleGraph:
    """The graph of the recipe's modules on their meshes, with layers, stages and side outputs. Raises RecipeError: of
    every module that cannot be split, or not so, and of every side output that nobody takes, with the key."""
    refusals = Refusals()
    boundaries: tuple[BoundarySpec, ...] = ()
    with refusals.collect():
        boundaries = with_side_outputs(recipe.wiring.topology.boundaries, adapters)
    modules: list[ModuleSpec] = []
    emits = {b.source for b in boundaries}
    for name, module in recipe.modules.items():
        with refusals.collect():
            axes, layers, media = token_axes(recipe, name), adapters[name].layers(), recipe.wiring.media[name]
            splits = module_splits(recipe, name, adapters[name], shapes, typical)
            options, costs = module_options(recipe, name), (0, 0)
            if "cp" in axes and adapters[name].abilities.token_gathered and (shape := shapes[name]) is not None:
                costs = token_costs(shape, options.row_dtype.itemsize)
            try:
                spec = ModuleSpec(
                    name,
                    recipe.wiring.meshes[name],
                    layers,
                    media,
                    bool(module.trainable),
                    features=adapters[name].out_features or (adapters[name].in_features or 0 if name in emits else 0),
                    token_axes=axes,
                    tokens_per_row=adapters[name].abilities.tokens_per_row if media is not None and "cp" in axes else 0,
                    packed=packs(recipe, name),
                    attention_mask=module.attention_mask,
                    assignment=token_assignment(recipe, name),
                    token_costs=costs,
                    splits=splits.runs,
                    activation=splits.activation,
                    frozen_layers=splits.frozen_layers,
                    options=options,
                    loss=recipe.wiring.losses.get(name),
                )
            except GraphError as error:
                raise RecipeError(
                    f"parallelism.{name}.module_fqns_per_model_part: {error}; layers are {list(layers)}"
                ) from error
            modules.append(spec)
    layers = adapters[recipe.llm].layers()[1:-1]
    for i, b in enumerate(recipe.boundaries):
        if layers and b.layer is not None and b.layer not in layers:
            refusals.add(
                f"boundaries[{i}].layer = {b.layer!r}: of {recipe.llm!r} hidden states behind {layers[0]} to "
                f"{layers[-1]} can be read; leave it out for those that its head reads"
            )
    refusals.finish()
    try:
        return ModuleGraph(tuple(modules), boundaries)
    except GraphError as error:
        raise RecipeError(f"boundaries: {error}") from error


def check_balance(keys: Balance, graph: ModuleGraph) -> None:
    """Raise RecipeError for caps and microbatches of modules that go along with another one."""
    led_by = leaders(graph)
    wrong = []
    for key in ("max_tokens", "microbatch_sizes", "microbatch_shares"):
        for name in getattr(keys, key):
            if key != "max_tokens" and name in graph.topology.after_llm:
                wrong.append(
                    f"balance.{key}.{name}: a module after the LLM has its microbatches, since it reads what "
                    f"{graph.llm.name!r} computes in each; leave it out"
                )
            elif (leader := led_by[name]) != name:
                instead = f"balance.{key}.{leader}"
                if key != "max_tokens" and leader in {graph.llm.name, *graph.topology.after_llm}:
                    instead = "it ranks or degrees of its own, or leave it out"
                wrong.append(
                    f"balance.{key}.{name}: it lies on the ranks of {leader!r} and takes the same samples; "
                    f"give {instead}"
                )
    for name, shares in keys.microbatch_shares.items():
        if led_by[name] == name and name not in graph.topology.after_llm:
            try:
                check_shares(graph, name, shares)
            except GraphError as error:
                wrong.append(f"balance.microbatch_shares.{name}: {error}")
    if wrong:
        raise RecipeError("\n".join(wrong))
