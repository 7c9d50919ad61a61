"""Side outputs: features that a module emits besides its rows, which its consumer adds after some of its layers.

DeepStack (arXiv:2406.04334) in Qwen3-VL: layers inside the vision tower also emit features, one per image token, which
are added after the first layers of the LLM. Each is a boundary of its own, straight to the pipeline stage that holds
its layer and, within it, to the rank that keeps the token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetmesh.errors import RecipeError
from hetmesh.graph.topology import BoundarySpec
from hetmesh.models.adapter import Adapter


def with_side_outputs(boundaries: Sequence[BoundarySpec], adapters: Mapping[str, Adapter]) -> tuple[BoundarySpec, ...]:
    """The boundaries of a recipe, each followed by those of the side outputs of its source.

    Raises:
        RecipeError: the destination has no layer that takes an output.
    """
    found: list[BoundarySpec] = []
    for b in boundaries:
        found.append(b)
        for output in adapters[b.source].abilities.side_outputs:
            takes = adapters[b.destination].abilities.layer_of_output
            layer = takes(output) if takes is not None else None
            if layer is None:
                raise RecipeError(
                    f"boundary {b.name}: {b.source!r} also emits {output!r}, for which {b.destination!r} has no layer; "
                    "an LLM of model 'qwen3_vl_text' with enough layers takes it, straight from its encoder (or leave "
                    f"it out: modules.{b.source}.config.deepstack_visual_indexes)"
                )
            found.append(BoundarySpec(b.source, b.destination, b.at, output, layer))
    return tuple(found)
