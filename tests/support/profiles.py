"""Profiles that nobody measured: seconds that follow no FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hetmesh.cost import Coefficients, Profile, layer_kind
from hetmesh.cost.fitted import PARTS
from hetmesh.resolve.resolved import ResolvedRecipe

SECONDS = {"forward": 1.0, "backward_input": 1.2, "backward_weight": 0.9, "backward": 2.1}


def write_profile(
    path: Path, resolved: ResolvedRecipe, slower: Mapping[str, float] | None = None, dtype: str = "float32"
) -> Profile:
    """A profile of all layers of a recipe: microseconds by the number of their kind.

    Args:
        slower: times as much for the layers of a module.
    """
    layers: dict[str, dict[str, Coefficients]] = {}
    for module, shape in resolved.shapes.items():
        assert shape is not None
        tp = resolved.graph[module].mesh.axis_size("tp")
        for layer in shape.layers:
            if layer.name:
                products = any(weight.per_row for weight in layer.weights)
                unit = (1e-6 if products else 1e-8) * (1 + len(layers)) * (slower or {}).get(module, 1)
                pairs = unit / 64 if layer.attention_width else 0.0
                of_part = {part: Coefficients(*(SECONDS[part] * x for x in (3 * unit, unit, pairs))) for part in PARTS}
                layers.setdefault(layer_kind(layer, tp), of_part)
    profile = Profile(layers, dtype=dtype)
    profile.save(path)
    return profile
