"""Directories that the modules of a recipe come from: the one of a whole multimodal model, and those of frozen modules
to which a checkpoint refers, with what was in their files."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hetmesh.boundary import World
from hetmesh.boundary.world import gather_objects
from hetmesh.errors import CheckpointError, HetmeshError
from hetmesh.files import open_file
from hetmesh.models import pretrained_of
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.recipe.hf_families import class_of
from hetmesh.recipe.recipe import Recipe
from hetmesh.recipe.sections import Balance

References = Mapping[str, Mapping[str, Any]]
"""Module -> `path` of its directory, and `files`: name -> CRC-32."""

_CHUNK = 8 << 20  # bytes read at once


def directory_of(recipe: Recipe) -> Pretrained | None:
    """The one directory of a whole multimodal model from which all modules of `recipe` come, None if there is none."""
    directories = {name: pretrained_of(name, module) for name, module in recipe.modules.items()}
    paths = {None if directory is None else directory.path.resolve() for directory in directories.values()}
    whole = directories[recipe.llm]
    return whole if len(paths) == 1 and len(directories) > 1 and _is_whole(whole) else None


def up_to_llm(recipe: Recipe) -> Recipe:
    """`recipe` without the modules after the LLM and what feeds these alone, none of which a directory's model has, and
    without the losses of the others: the LLM's may have weight 0 only because of a loss that is left out."""
    topology = recipe.wiring.topology
    kept = {recipe.llm, *topology.upstream(recipe.llm)}
    if len(kept) == len(recipe.modules):
        return recipe
    tables = {name: getattr(recipe, name) for name in Recipe.model_fields}
    tables["modules"] = {
        name: m.model_copy(update={"loss": None}) for name, m in recipe.modules.items() if name in kept
    }
    tables["boundaries"] = tuple(b for b in recipe.boundaries if b.destination in kept)
    own = {name: table for name, table in recipe.parallelism.modules.items() if name in kept}
    tables["parallelism"] = recipe.parallelism.model_copy(update={"modules": own})
    tables["balance"] = Balance()
    return Recipe.model_validate(tables)


def why_not_compared(recipe: Recipe) -> str:
    """Why modules of a whole multimodal model's directory are not compared with it; empty where they are, or where none
    of them comes from such a directory."""
    recipe = up_to_llm(recipe)
    directories = {name: pretrained_of(name, module) for name, module in recipe.modules.items()}
    if directory_of(recipe) is not None or not any(map(_is_whole, directories.values())):
        return ""
    if len(directories) < 2:
        return f"modules.{recipe.llm} is the recipe's only module"
    keys = (
        f"modules.{name}" + (" has no initial_load_path" if d is None else f".initial_load_path = '{d.path}'")
        for name, d in directories.items()
    )
    return f"its modules do not all come from one directory ({', '.join(keys)})"


def _is_whole(pretrained: Pretrained | None) -> bool:
    """Whether a directory is that of a multimodal model of transformers."""
    return pretrained is not None and class_of(pretrained.config).endswith("ForConditionalGeneration")


def referenced(recipe: Recipe) -> tuple[str, ...]:
    """The modules of `recipe` that its checkpoints only refer to: frozen whole, with weights from a directory."""
    if recipe.checkpoint.frozen != "reference":
        return ()
    found = recipe.modules.items()
    return tuple(n for n, m in found if not m.trainable and m.lora is None and m.initial_load_path is not None)


def references(recipe: Recipe, modules: Iterable[str], world: World | None = None) -> References:
    """What the directories of `modules` hold now. `world`: of a job, whose ranks share the files between them;
    collective then. None: in this process alone. Raises CheckpointError: a directory or a file cannot be read, or a
    module has none; on every rank."""
    files: list[tuple[str, Path]] = []
    sums: dict[Path, int] = {}
    modules, error = tuple(modules), ""
    if not modules:
        return {}
    try:
        files = _files(recipe, modules)
        sums = {file: _checksum(file) for _, file in (files if world is None else files[world.rank :: world.size])}
    except (HetmeshError, OSError) as problem:
        error = str(problem)
    if world is not None:
        everybody = gather_objects((error, sums), world, "checksums of the directories of frozen modules")
        error = next((text for text, _ in everybody if text), "")
        sums = {file: crc for _, theirs in everybody for file, crc in theirs.items()}
    if error:
        raise CheckpointError(f"checkpoints refer to the directories of {', '.join(modules)}: {error}")
    found: dict[str, dict[str, Any]] = {}
    for name, file in files:
        entry = found.setdefault(name, {"path": str(file.parent), "files": {}})
        entry["files"][file.name] = sums[file]
    return found


def _files(recipe: Recipe, modules: Iterable[str]) -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    for name in modules:
        pretrained = pretrained_of(name, recipe.modules[name]) if name in recipe.modules else None
        if pretrained is None:
            raise CheckpointError(f"modules.{name}.initial_load_path is missing")
        found += [(name, file) for file in (pretrained.path / "config.json", *pretrained.files)]
    return found


def _checksum(file: Path) -> int:
    crc = 0
    with open_file(file) as stream:
        while data := stream.read(_CHUNK):
            crc = zlib.crc32(data, crc)
    return crc


def check_references(checkpoint: Path, saved: References, now: References) -> None:
    """Raise CheckpointError where a file that a checkpoint refers to has changed, is missing, or is new."""
    for name, entry in saved.items():
        before, after = entry["files"], now[name]["files"]
        changed = sorted(file for file in before.keys() | after.keys() if before.get(file) != after.get(file))
        if changed:
            raise CheckpointError(
                f"checkpoint {checkpoint} refers to the frozen modules.{name} in {entry['path']}, and "
                f"{now[name]['path']}/{changed[0]} is not what was there; restore it, or name the directory that has "
                f"it in modules.{name}.initial_load_path"
            )
