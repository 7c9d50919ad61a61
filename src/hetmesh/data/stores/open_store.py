"""Stores that the path of a recipe names: JSON files, tar shards, tables."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hetmesh.data.stores.store import STALE, Blob, FileSpan, Record, Store
from hetmesh.data.stores.table_rows import TABLES, Tables
from hetmesh.data.stores.tar_shards import TarShards
from hetmesh.errors import RecipeError, Refusals, SampleError
from hetmesh.files import from_json, place_in, read_file


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
    """The files that `path` names. Raises RecipeError: there are none."""
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


class JsonFile(Store):
    """One record per line, or a JSON list of records; media are files in some folders, names start in the first."""

    def __init__(
        self, path: Path, folders: Sequence[Path], key: str, arrays: Mapping[str, np.ndarray] | None = None
    ) -> None:
        self.path, self.folders = path, tuple(folders)
        self.files = (path,)
        self._list: list[Any] | None = None
        with path.open("rb") as file:
            is_list = path.suffix == ".json" and file.read(64).lstrip().startswith(b"[")
        if is_list:
            try:
                self._list = from_json(read_file(path))
            except ValueError as error:
                raise RecipeError(f"{key} = '{path}': begins as a JSON list, but is none: {error}") from error
        if arrays is None:
            arrays = {"starts": np.zeros(0, np.int64) if is_list else _line_starts(path)}
        elif arrays["starts"].dtype != np.int64 or arrays["starts"].ndim != 1 or (arrays["starts"] < 0).any():
            raise RecipeError(f"{key}: {STALE}")
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays["starts"]) if self._list is None else len(self._list)

    def record(self, index: int) -> Record:
        """The record in line `index`; empty lines do not count."""
        name = f"{self.path.name}:{index}"
        if self._list is not None:
            return Record(name, self._list[index], len(json.dumps(self._list[index])))
        with self.path.open("rb") as file:
            file.seek(int(self.arrays["starts"][index]))
            line = file.readline()
        try:
            return Record(name, from_json(line), len(line))
        except ValueError as error:
            raise SampleError(
                f"sample {name!r}: must be an object with `messages`, but the line is no JSON: {error}"
            ) from error

    def media(self, index: int, kind: str, value: str | None, number: int) -> Blob:
        """The file of that name."""
        if value is None:
            raise OSError(f"the record names no file of its {kind!r} {number}")
        return FileSpan(place_in(self.folders, value))


def _line_starts(path: Path) -> np.ndarray:
    """Byte offsets of the lines that are not empty."""
    starts, offset = [], 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                starts.append(offset)
            offset += len(line)
    return np.array(starts, np.int64)
