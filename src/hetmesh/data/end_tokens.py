"""Which tokens end an answer."""

from __future__ import annotations

from pathlib import Path

from hetmesh.data.mixture import MixtureSource
from hetmesh.data.source import Source
from hetmesh.files import json_object
from hetmesh.models import pretrained_of
from hetmesh.recipe.recipe import Recipe


def end_tokens(source: Source, recipe: Recipe) -> frozenset[int]:
    """Tokens that end an answer: those that the source knows, and those of generation_config.json in the directory of
    the LLM."""
    parts = source.parts.values() if isinstance(source, MixtureSource) else (source,)
    found = {token for part in parts for token in getattr(part, "end_ids", ())}
    pretrained = pretrained_of(recipe.sink, recipe.modules[recipe.sink])
    if pretrained is not None:
        found |= _configured(pretrained.path)
    return frozenset(found)


def _configured(folder: Path) -> set[int]:
    file = folder / "generation_config.json"
    value = json_object(file, folder).get("eos_token_id") if file.is_file() else None
    return {token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)}
