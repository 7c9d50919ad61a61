"""Which store the path of a recipe names."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from hetmesh.data.stores import JsonFile, Store, TarShards
from hetmesh.data.tables import TABLES, Tables
from hetmesh.errors import RecipeError, Refusals


def open_store(path: str, folders: Sequence[Path], key: str, arrays: Mapping[str, np.ndarray] | None = None) -> Store:
    """The store that `path` names: a file, or a pattern (`*`) of tar shards or tables.

    Args:
        folders: where file names in records of JSON start, and others in which they may lie; none: that of `path`.
        key: the recipe key of `path`; errors begin with it.
        arrays: what `arrays` of such a store gave before, if it still holds: saves looking through the files.

    Raises:
        RecipeError: there is no such file, or it holds no records.
    """
    files = find_files(path, key)
    kinds = {file.suffix for file in files}
    if len(kinds) > 1:
        raise RecipeError(f"{key} = {path!r}: files of one kind, got {sorted(kinds)}")
    if kinds == {".tar"}:
        return TarShards(files, key, arrays)
    if kinds <= set(TABLES) or files[0].is_dir():
        return Tables(files, key)
    if len(files) > 1:
        raise RecipeError(f"{key} = {path!r}: of JSON files give one, or make tar shards or tables of them")
    return JsonFile(files[0], folders or [files[0].parent], key, arrays)


def find_files(path: str, key: str) -> tuple[Path, ...]:
    """The files that `path` names.

    Raises:
        RecipeError: there are none.
    """
    files = tuple(Path(name) for name in sorted(glob.glob(path))) if glob.has_magic(path) else (Path(path),)
    if not files or not all(file.is_file() or (file / "dataset_info.json").is_file() for file in files):
        raise RecipeError(f"{key} = {path!r}: there is no such file")
    return files


def check_exist(files: Mapping[str, str | None], folders: Iterable[tuple[str, str | None]], key: str) -> None:
    """Raise RecipeError for what options name and is not there, a line each; None names nothing."""
    refusals = Refusals()
    for option, value in files.items():
        if value is not None:
            with refusals.collect():
                find_files(str(Path(value).expanduser()), f"{key} {option}")
    for option, value in folders:
        if value is not None and not Path(value).expanduser().is_dir():
            refusals.add(f"{key} {option} = {value!r}: there is no such directory")
    refusals.finish()
