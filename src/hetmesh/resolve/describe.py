"""What a recipe means before anything is built: its data source, adapters and graph, or all that is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping

from hetmesh.balance import plan_batch
from hetmesh.data.expand_arrays import Expander
from hetmesh.data.loader import Loader
from hetmesh.data.payloads import Payloads
from hetmesh.data.registry import recipe_source
from hetmesh.data.source import Source
from hetmesh.errors import GraphError, RecipeError, Refusals, SampleError
from hetmesh.graph import ModuleGraph
from hetmesh.models import Adapter, make_adapters, module_rows, placeholder_rows, pretrained_of, sample_positions
from hetmesh.recipe.hf_path import check_placeholders
from hetmesh.recipe.module_options import packs
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.balance_options import check_balance, recipe_balance
from hetmesh.resolve.build_graph import build_graph
from hetmesh.resolve.refusals import check_recipe
from hetmesh.resolve.schedules import check_schedule
from hetmesh.resolve.user_plans import uncompared_plans


def describe(recipe: Recipe, made: Source | None = None) -> tuple[Source, dict[str, Adapter], ModuleGraph]:
    """Data source, adapters and module graph of `recipe`. No process group, no weights.

    `hetmesh check`, `train` and every other verb come here first: what one refuses, all do.

    Args:
        made: the data source, if there is one already.

    Raises:
        RecipeError: everything that is wrong with the recipe beyond its text, a line each.
    """
    refusals = Refusals()
    for name, module in recipe.modules.items():
        with refusals.collect():
            pretrained_of(name, module)
    source = made
    with refusals.collect():
        source = source or recipe_source(recipe.data)
    if source is None:  # models take sizes from it
        refusals.finish()
    assert source is not None
    adapters: dict[str, Adapter] | None = None
    shapes: dict[str, tuple[int, ...]] = {}
    if not refusals.said:
        with refusals.collect():
            shapes = _media_shapes(source, recipe.data.on_bad_sample == "skip")
            adapters = adapters_of(recipe, source.vocab_size, shapes)
    with refusals.collect():
        check_recipe(recipe, adapters, source.placeholders)
    if made is None:
        with refusals.collect():
            check_placeholders(recipe, source.placeholders, source.vocab_size)
    graph: ModuleGraph | None = None
    if adapters is not None:
        with refusals.collect():
            graph = build_graph(recipe, adapters)
            if recipe.data.on_bad_sample != "skip":
                _check_shapes(shapes, graph, adapters)
            check_balance(recipe, graph)
            check_schedule(recipe, graph)
    if adapters is not None and not refusals.said:
        with refusals.collect():
            uncompared_plans(recipe, adapters, source.vocab_size)
    refusals.finish()
    assert adapters is not None
    assert graph is not None
    return source, adapters, graph


def adapters_of(
    recipe: Recipe, vocab_size: int, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, Adapter]:
    """The adapters of the modules of `recipe`; arguments and errors are those of `make_adapters`."""
    packed = [name for name in recipe.modules if packs(recipe, name)]
    return make_adapters(recipe.modules, recipe.boundaries, recipe.wiring.media, vocab_size, shapes, packed)


def _media_shapes(source: Source, skip: bool) -> dict[str, tuple[int, ...]]:
    """Extent per kind of media, from the first samples that have some; with `skip` not of those that cannot be read,
    which the run leaves out too."""
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(min(len(source), 64)):
        try:
            for item in source.meta(index).media:
                shapes.setdefault(item.name, item.extent)
        except SampleError:
            if not skip:
                raise
    return shapes


def _check_shapes(shapes: Mapping[str, tuple[int, ...]], graph: ModuleGraph, adapters: Mapping[str, Adapter]) -> None:
    """Raise RecipeError for media that a processor makes of a shape that their encoder does not take."""
    for at, rows in placeholder_rows(graph, adapters).items():
        if at in shapes:
            try:
                rows(shapes[at])
            except SampleError as error:
                raise RecipeError(
                    f"data: its items of kind {at!r} do not suit the module that reads them: {error}; does the "
                    "processor belong to the model?"
                ) from error


def make_prepare(recipe: Recipe, graph: ModuleGraph, adapters: Mapping[str, Adapter]) -> Expander:
    """What the loader does to the metadata of samples: rows per placeholder, `seq_len`, rows per module, positions."""
    return Expander(
        placeholder_rows(graph, adapters),
        seq_len=recipe.training.seq_len,
        module_rows=module_rows(graph, adapters),
        position_ids=sample_positions(graph, adapters),
    )


def make_loader(
    recipe: Recipe,
    source: Source,
    graph: ModuleGraph,
    adapters: Mapping[str, Adapter],
    payloads: Payloads | None = None,
) -> Loader:
    """What draws the samples of the run: the same for whatever looks at its batches, samples that it leaves out too."""
    return Loader(
        source,
        recipe.batch.global_batch_size,
        make_prepare(recipe, graph, adapters),
        seed=recipe.debug.seed,
        payloads=payloads,
        skip=recipe.data.on_bad_sample == "skip",
    )


def check_first_batch(recipe: Recipe, source: Source, graph: ModuleGraph, adapters: Mapping[str, Adapter]) -> None:
    """Raise RecipeError for caps (`balance.max_tokens`) that the first batch cannot keep."""
    if recipe.balance.max_tokens:
        metas = make_loader(recipe, source, graph, adapters).batch(0).metas
        try:
            plan_batch(graph, metas, recipe.batch.microbatch_size, recipe_balance(recipe, graph, adapters))
        except GraphError as error:
            raise RecipeError(f"balance.max_tokens: the first batch cannot keep it: {error}") from error
