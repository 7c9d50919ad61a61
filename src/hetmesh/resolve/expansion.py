"""What `[model] hf_path` stands for, as TOML that could be written in its place, and who owns which parameter."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from hetmesh.models import Adapter
from hetmesh.models.weights.build import build_on_meta
from hetmesh.models.weights.load import saved_tensors
from hetmesh.recipe.recipe import Recipe


def expansion(recipe: Recipe, adapters: Mapping[str, Adapter]) -> Iterator[str]:
    """Lines of TOML; as comments, every parameter of each module. Layers that differ in their number are one line."""
    for name, module in recipe.modules.items():
        yield f"[modules.{name}]"
        yield f"model = {_toml(module.model)}"
        if module.initial_load_path is not None:
            yield f"initial_load_path = {_toml(module.initial_load_path)}"
        if module.config:
            yield f"config = {_toml(module.config)}"
        if module.media is not None:
            yield f"media = {_toml(module.media)}"
        if name == recipe.sink:
            yield f"attention_mask = {_toml(module.attention_mask)}"
        yield from _owned(adapters[name])
    for boundary in recipe.boundaries:
        yield "[[boundaries]]"
        yield f"from = {_toml(boundary.source)}"
        yield f"to = {_toml(boundary.destination)}"
        if boundary.at is not None:
            yield f"at = {_toml(boundary.at)}"
    yield "[data]"
    yield f"source = {_toml(recipe.data.source)}"
    if recipe.data.options:
        yield "[data.options]"
        yield from (f"{key} = {_toml(value)}" for key, value in recipe.data.options.items())


def _owned(adapter: Adapter) -> Iterator[str]:
    module = build_on_meta(adapter)
    if module is None:
        return
    names = dict(saved_tensors(module))
    yield f"# owns {len(names)} tensors of {sum(t.numel() for t in names.values()):,} numbers:"
    alike = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    yield from (f"#   {name}" + (f"  ({count})" if "*" in name else "") for name, count in alike.items())


def _toml(value: object) -> str:
    """A value on one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(str(key))} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)  # texts, numbers and truth values are written alike
