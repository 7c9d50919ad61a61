"""The media of the first samples, and whether the modules that read them take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetmesh.data.source import LEAVE_OUT, Source, abilities_of
from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph import ModuleGraph
from hetmesh.graph.sample import kinds_of
from hetmesh.models import Adapter, placeholder_rows
from hetmesh.recipe.recipe import Recipe


def media_extents(source: Source, skip: bool) -> dict[str, tuple[int, ...] | None]:
    """Extent per kind of media, as the source says or from the first samples that have some, None of a kind that a
    processor has placed; with `skip` not of those that cannot be read, which the run leaves out too."""
    extents: dict[str, tuple[int, ...] | None] = {**abilities_of(source).media_shapes}
    for index in range(min(len(source), 64)):
        try:
            for item in source.meta(index).media:
                extents.setdefault(item.name, None if item.runs else item.extent)
        except SampleError as error:
            if not skip:
                raise SampleError(f"{error}; {LEAVE_OUT}") from error
    return extents


def check_placed(kinds: Sequence[str], recipe: Recipe, adapters: Mapping[str, Adapter]) -> None:
    """Raise RecipeError for media that a processor has prepared and whose encoder takes tensors of items, or has stages
    that could not tell what is missing of samples that are left out."""
    for name, media in recipe.wiring.media.items():
        for kind in kinds_of(media or ""):
            if kind in kinds and kind not in adapters[name].abilities.unit_kinds:
                raise RecipeError(
                    f"modules.{name}.model = {recipe.modules[name].model!r} takes tensors of items, and the data's "
                    f"{kind!r} are what a directory's own processor makes ([data.options] processor); give "
                    "'hf_encoder' of that directory, or data.options tokenizer and image_processor or audio_processor"
                )
            stages, skips = recipe.wiring.meshes[name].axis_size("pp"), recipe.data.on_bad_sample == "skip"
            if kind in kinds and skips and stages > 1:
                raise RecipeError(
                    f"data.on_bad_sample = 'skip': not with parallelism.{name}.pipeline_parallel_degree = {stages} "
                    "where a directory's own processor prepares media: a sample that cannot be read would pass nothing "
                    "from stage to stage; set it to 'stop', or give the encoder no stages"
                )


def check_extents(extents: Mapping[str, tuple[int, ...]], graph: ModuleGraph, adapters: Mapping[str, Adapter]) -> None:
    """Raise RecipeError for media that a processor makes of a shape that their encoder does not take."""
    made = {graph[name].media for name in graph.topology.after_llm}
    for at, rows in placeholder_rows(graph, adapters).items():
        if at in extents:
            try:
                rows(extents[at])
            except SampleError as error:
                hint = "" if at in made else "; does the processor belong to the model?"
                raise RecipeError(
                    f"data: its items of kind {at!r} do not suit the module that reads them: {error}{hint}"
                ) from error
