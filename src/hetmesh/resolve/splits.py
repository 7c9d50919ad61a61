"""Pipeline stages of a recipe's modules: how many, and which layers each holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hetmesh.cost import ModuleShape, Profile, Rates, Work, module_times
from hetmesh.cost.stage_cuts import default_splits
from hetmesh.cost.work import samples_work
from hetmesh.data.expand import Expander
from hetmesh.data.loader import Loader
from hetmesh.data.source import Source
from hetmesh.errors import HetmeshError, RecipeError
from hetmesh.graph import Activation, ModuleGraph, ModuleSpec
from hetmesh.layout import MeshSpec
from hetmesh.models import module_rows, placeholder_rows
from hetmesh.models.adapter import Adapter
from hetmesh.models.user.adapters import UserAdapter
from hetmesh.recipe.module_options import layout_table, module_options
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.modules import Shapes

Runs = tuple[tuple[str, ...], ...]
"""Layers of each stage."""


@dataclass(frozen=True)
class Splits:
    """The stages of a module, as `ModuleSpec` has them (by default one): layers of each, what passes between them, and
    the layers without a trainable parameter, where others have one."""

    runs: Runs = ()
    activation: Activation | None = None
    frozen_layers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Typical:
    """By what modules are cut: the work of a typical microbatch, per module (empty: not known), and measured seconds of
    layers, for which FLOPs stand without a profile."""

    work: Callable[[], Mapping[str, Work]] = dict
    profile: Profile | None = None

    def of(self, name: str) -> Work:
        """What a microbatch gives one lane of module `name`."""
        return self.work().get(name, TYPICAL)

    def seconds(self, shape: ModuleShape, upstream: bool, tp: int, recompute: bool) -> tuple[float, ...]:
        """Of each named layer in a step; empty where nothing was measured. Raises RecipeError: not this layer."""
        if self.profile is None:
            return ()
        try:
            return self.profile.layer_seconds(shape, self.of(shape.name), upstream, tp, recompute)
        except HetmeshError as error:
            hint = "measure this recipe with `hetmesh profile`, or leave the key out"
            raise RecipeError(f"profiling.profile: {error}; {hint}") from error


MAX_TYPICAL_SAMPLES = 256
"""Samples, evenly from all of the source, whose mean is typical."""


def typical_work(recipe: Recipe, adapters: Mapping[str, Adapter], source: Source) -> dict[str, Work]:
    """Per module what a microbatch of mean samples gives one of its lanes, at least one row. Samples that cannot be
    read, or do not suit the modules, are left out; it is empty where all are."""
    plain, wiring = MeshSpec.make([0], dp_replicate=1), recipe.wiring
    facts = [(name, adapters[name].layers(), wiring.media[name], wiring.losses.get(name)) for name in recipe.modules]
    modules = [ModuleSpec(name, plain, layers, media, loss=loss) for name, layers, media, loss in facts]
    graph = ModuleGraph(tuple(modules), wiring.topology.boundaries)
    rows, length = placeholder_rows(graph, adapters), recipe.training.seq_len
    placed = {name: adapter.abilities.placed_rows for name, adapter in adapters.items()}
    expander = Expander(rows, seq_len=length, module_rows=module_rows(graph, adapters), placed_rows=placed)
    count = min(len(source), MAX_TYPICAL_SAMPLES)
    chosen = [i * len(source) // count for i in range(count)]
    drawn = Loader(source, count, expander, skip=True).drawn(chosen)
    metas = drawn.metas.take([i for i in range(count) if i not in drawn.unreadable])
    if not len(metas):
        return {}
    found = {}
    for name in graph.order:
        samples = recipe.batch.microbatch_size * recipe.lanes / wiring.lanes(name)
        means = samples_work(graph, name, metas).mean(0).tolist()
        found[name] = Work(*(max(round(mean * samples), 1) for mean in means))
    return found


def module_splits(recipe: Recipe, name: str, adapter: Adapter, shapes: Shapes, typical: Typical) -> Splits:
    """The stages of module `name`; under bubble_fill those of an encoder on the LLM's ranks are its slices. Raises
    RecipeError: it cannot be split, or not into that many stages, with the key."""
    owner, table, options = recipe.wiring.tables[name], layout_table(recipe, name), module_options(recipe, name)
    key, pp = f"parallelism.{owner}", recipe.wiring.meshes[name].axis_size("pp")
    if owner != name:  # it takes the mesh of its consumer's first stage, and is not split
        return Splits()
    given, layers = table.module_fqns_per_model_part, adapter.layers()
    cut = pp > 1 or given is not None or table.pipeline_parallel_layers_per_stage is not None
    whole = isinstance(adapter, UserAdapter) and options.sequence_parallel and name == recipe.llm
    if not cut and (not is_sliced(recipe, name) or whole):
        return Splits()
    abilities = adapter.abilities.with_stages()
    if not cut and abilities.activation is None:
        return Splits()
    if whole:
        raise RecipeError(
            f"{key}.enable_sequence_parallel: not together with the pipeline stages of a custom LLM, which would "
            "have to start and end within a share of the tokens; leave one of them out"
        )
    if abilities.activation is None:
        raise RecipeError(
            f"{key}.pipeline_parallel_degree = {pp}: a {recipe.modules[name].model} cannot be split into "
            f"stages{abilities.because('activation')}; give it 1 in a table of its own"
        )
    shape = shapes[name]
    frozen: frozenset[str] = frozenset()
    if shape is not None and recipe.modules[name].trainable:
        frozen = shape.frozen_layers
    if given is not None:
        runs = tuple(map(tuple, given))
    else:
        units = len(layers) - sum(max(len(ends) - 1, 0) for ends in (abilities.first_layers, abilities.last_layers))
        count = pp * _stages_per_rank(recipe, name, shapes, units, pp, typical)
        if count == 1:
            return Splits()
        if shape is None:
            raise RecipeError(
                f"{key}.pipeline_parallel_degree: the sizes of module {name!r} are not known; name the layers of "
                "each stage in module_fqns_per_model_part"
            )
        upstream = any(recipe.modules[n].trainable for n in recipe.wiring.topology.upstream(name))
        recomputed, tp = options.activation_checkpoint == "full", recipe.wiring.meshes[name].axis_size("tp")
        runs = default_splits(  # of nearly equal time, frozen layers counted as what they cost
            shape,
            count,
            upstream_trainable=upstream,
            recomputed=recomputed,
            together=abilities.first_layers,
            ending=abilities.last_layers,
            work=typical.of(name),
            seconds=typical.seconds(shape, upstream, tp, recomputed),
        )
    for which, ends, run in (("first", abilities.first_layers, 0), ("last", abilities.last_layers, -1)):
        if runs and not set(ends) <= set(runs[run]):
            raise RecipeError(f"{key}.module_fqns_per_model_part: the {which} stage must hold all of {list(ends)}")
    return Splits(runs, abilities.activation, frozen)


def is_sliced(recipe: Recipe, name: str) -> bool:
    """Whether bubble_fill cuts module `name` into slices: its own layout shares ranks with the LLM's."""
    wiring = recipe.wiring
    shared = set(wiring.meshes[name].ranks) & set(wiring.meshes[recipe.llm].ranks)
    return recipe.fills_bubbles and name != recipe.llm and wiring.tables[name] == name and bool(shared)


def reason_not_sliced(recipe: Recipe, name: str, adapter: Adapter, shapes: Shapes) -> str:
    """Why module `name`, which is not the LLM, is not cut by `bubble_fill_layers_per_slice`; empty where it is."""
    table = layout_table(recipe, name)
    if recipe.wiring.tables[name] != name:
        return "it has no table in [parallelism]"
    if not is_sliced(recipe, name):
        return f"it shares no ranks with {recipe.llm!r}"
    if (abilities := adapter.abilities.with_stages()).activation is None:
        return f"a {recipe.modules[name].model} cannot be cut{abilities.because('activation')}"
    for key in ("module_fqns_per_model_part", "pipeline_parallel_layers_per_stage"):
        if getattr(table, key) is not None:
            return f"parallelism.{name}.{key} cuts it"
    if None in (shapes[name], shapes[recipe.llm]):
        return "sizes of layers are not known"
    return ""


def _stages_per_rank(recipe: Recipe, name: str, shapes: Shapes, layers: int, pp: int, typical: Typical) -> int:
    size = layout_table(recipe, name).pipeline_parallel_layers_per_stage
    if size is not None:
        return max(min(-(-layers // (size * pp)), layers // pp), 1)
    if not is_sliced(recipe, name):
        turns = recipe.llm_schedule == "interleaved" and (name == recipe.llm or not recipe.fills_bubbles)
        return 2 if turns and pp > 1 and layers >= 2 * pp else 1
    # Slices of as many blocks as the recipe says. Otherwise such that each takes at most half as long as a forward of
    # one of the LLM's stages, the smallest gap of a pipeline; at least a block each. Embeddings and norms go with a
    # block.
    encoder, decoder, meshes = shapes[name], shapes[recipe.llm], recipe.wiring.meshes
    if encoder is None or decoder is None:
        return 1
    own, llm = (
        [time.forward for time in module_times(shape, typical.of(shape.name), Rates(1.0), upstream=True).values()]
        for shape in (encoder, decoder)
    )
    blocks = sum(seconds > 0.1 * max(own) for seconds in own)
    if (size := recipe.schedule_key("bubble_fill_layers_per_slice")) is not None:
        slices = -(-blocks // (size * pp))
    else:
        microbatch = sum(own) * recipe.wiring.lanes(name) / meshes[name].size
        stage = sum(llm) * recipe.lanes / meshes[recipe.llm].size
        slices = min(math.ceil(2 * microbatch / stage), blocks // pp)
    return max(min(slices, layers // pp), 1)


TYPICAL = Work(rows=2048, pairs=2048 * 512, targets=512)
"""Of data that are not known: four samples of 512 tokens, a quarter of which is predicted."""
