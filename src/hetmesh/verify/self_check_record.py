"""Which directories were compared with transformers' own forward already: kept beside the dump folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hetmesh.errors import OutputError
from hetmesh.files import from_json, read_file
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.directories import directory_of

FORM = (
    *("processor_config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "chat_template.json"),
)
"""Files from which the samples of conversations are made."""


def record_file(recipe: Recipe) -> Path:
    """Where results are kept."""
    return Path(f"{recipe.job.dump_folder.rstrip('/')}.self_check.json")


def recorded(recipe: Recipe) -> float | None:
    """The largest difference that was found for the recipe's modules and the files that its directory has now; None if
    they were not compared."""
    entry = _read(record_file(recipe)).get(_key(recipe))
    if not isinstance(entry, dict) or entry.get("of") != _compared(recipe):
        return None
    found = entry.get("max_difference")
    return found if isinstance(found, float) else None


def record(recipe: Recipe, difference: float) -> None:
    """Keep a result.

    Raises:
        OutputError: the file cannot be written.
    """
    file = record_file(recipe)
    results = _read(file) | {_key(recipe): {"max_difference": difference, "of": _compared(recipe)}}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{file}: the result of the self-check cannot be kept: {error}") from error


def needs_self_check(recipe: Recipe) -> bool:
    """Whether the modules come from one directory of a multimodal model, and were not compared with it yet."""
    return directory_of(recipe) is not None and recorded(recipe) is None


def _key(recipe: Recipe) -> str:
    pretrained = directory_of(recipe)
    return "" if pretrained is None else str(pretrained.path.resolve())


def _compared(recipe: Recipe) -> dict[str, Any]:
    """What the result depends on."""
    import transformers

    pretrained = directory_of(recipe)
    files = [] if pretrained is None else [pretrained.path / "config.json", *pretrained.files]
    if pretrained is not None:  # from which the samples of the data are made
        files += sorted(file for file in pretrained.path.iterdir() if file.name in FORM)
    modules = {name: module.model_dump(mode="json", by_alias=True) for name, module in recipe.modules.items()}
    kept = ("model", "config", "media", "attention_mask", "lora")
    return {
        "files": {f.name: [f.stat().st_size, f.stat().st_mtime_ns] for f in files},
        "modules": {name: {key: table[key] for key in kept} for name, table in modules.items()},
        "boundaries": [[b.source, b.destination, b.at] for b in recipe.boundaries],
        "packed": recipe.training.pack_samples,
        "data": [[each.source, each.options] for each in recipe.data.mixture or (recipe.data,)],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def _read(file: Path) -> dict[str, Any]:
    try:
        value = from_json(read_file(file))
    except (OSError, ValueError):  # there is none, or it is none: then it is compared again
        return {}
    return value if isinstance(value, dict) else {}
