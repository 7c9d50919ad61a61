"""Stores that the path of a recipe names: JSON or CSV; tables, read through Hugging Face datasets; tar shards."""

from __future__ import annotations

import csv
import glob
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from hetmesh.data.stores.columns import MEDIA, Columns
from hetmesh.data.stores.store import STALE, Blob, FileSpan, Record, RecordBlob, Store, data_url
from hetmesh.data.stores.tar_shards import TarShards
from hetmesh.data.turns import DATA_URL, is_file_name, media_of, turns_of
from hetmesh.errors import RecipeError, Refusals, SampleError
from hetmesh.files import MAX_TEXT_BYTES, from_json, hub_hint, open_file, place_in, read_file

TABLES = (".parquet", ".arrow")
"""Extensions of tables."""

COMPRESSED = {".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip"}
"""Extensions of files that cannot be read by offset."""

SEPARATED = {".csv": ",", ".tsv": "\t"}
"""Extensions of texts of columns, the first line of which names them, and what is between two."""


class Tables(Store):
    """One record per row (`Columns`). A row has one item of media or a list, as bytes, `{bytes, path}` or file names;
    those that a conversation does not name are taken in order."""

    in_order = True

    def __init__(self, files: Sequence[Path], folders: Sequence[Path], key: str, columns: Columns) -> None:
        import datasets

        self.files, self.folders, self.arrays = tuple(files), tuple(folders), {}
        try:
            for file in () if files[0].is_dir() else files:
                open_file(file).close()
            if files[0].is_dir():
                parts = [part["filename"] for part in from_json(read_file(files[0] / "state.json"))["_data_files"]]
                for name in ("dataset_info.json", *parts):
                    open_file(place_in([files[0]], name)).close()  # a pipe would never open
                table = datasets.load_from_disk(str(files[0]))
            elif files[0].suffix == ".arrow":
                table = datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files])
            else:
                table = datasets.Dataset.from_parquet([str(file) for file in files])
        except Exception as error:  # whatever pyarrow and datasets make of a broken file
            raise RecipeError(f"{key}: {files[0]}: {type(error).__name__}: {' '.join(str(error).split())}") from error
        if not isinstance(table, datasets.Dataset):
            raise RecipeError(f"{key}: {files[0]} holds the splits {list(table)}; name the folder of one")
        names = table.column_names
        try:
            found = columns.of(names)
        except ValueError as error:
            raise RecipeError(f"{key}: {files[0]} {error}") from error
        columns.note(names, found)
        self._columns = columns
        self._table = table.with_format("arrow")  # rows as they are stored: no image is decoded
        self._media = {kind: found.pop(kind) for kind in MEDIA if kind in found}
        self._cells = {kind: self._table.select_columns([name]) for kind, name in self._media.items()}
        kept = [*found.values(), *(name for name in columns.kept if name in names)]
        self._texts = self._table.select_columns(list(dict.fromkeys(kept)))

    def __len__(self) -> int:
        return len(self._table)

    def record(self, index: int) -> Record:
        row = self._row(self._texts, index)
        value = {key: _given(row.column(key)[0].as_py()) for key in row.column_names}
        value |= dict.fromkeys(self._media.values())
        inside = self.media_counts(index)
        return self._columns.record(f"{self.files[0].name}:{index}", value, row.nbytes, inside=inside)

    def media_counts(self, index: int) -> Mapping[str, int]:
        from pyarrow import ListScalar  # of large lists and lists of fixed size too

        cells = {kind: self._cell(index, kind) for kind in self._media}
        return {
            kind: sum(item.is_valid for item in cell) if isinstance(cell, ListScalar) else 1
            for kind, cell in cells.items()
            if cell.is_valid
        }

    def _cell(self, index: int, kind: str) -> Any:
        """The scalar of a row in the column of media of that kind, as arrow has it."""
        return self._row(self._cells[kind], index).column(0)[0]

    def _row(self, columns: Any, index: int) -> Any:
        """A row as arrow has it, once it is known to say of its parts what is so: pyarrow itself believes a file."""
        try:
            row = columns[index]
            row.validate(full=True)
        except Exception as error:  # whatever pyarrow makes of a damaged file
            reason = " ".join(str(error).split()) or type(error).__name__
            raise SampleError(f"sample '{self.files[0].name}:{index}': it cannot be read: {reason}") from error
        return row

    def media(self, index: int, kind: str, value: str | None, number: int) -> Blob:
        """Item `number` of the column of that kind."""
        if kind not in self._media:
            raise OSError(f"the table has no column for {kind!r}")
        cell = self._cell(index, kind).as_py()
        items = cell if isinstance(cell, list) else [cell]
        if number >= len(items) or items[number] is None:
            raise OSError(f"row {index} has {len([i for i in items if i])} of {kind!r}, its conversation needs more")
        item = items[number]
        data = (item.get("bytes") or item.get("path")) if isinstance(item, Mapping) else item
        if isinstance(data, bytes):
            return RecordBlob((isinstance(item, Mapping) and item.get("path")) or kind, len(data), lambda: data)
        if isinstance(data, str) and data.startswith(DATA_URL):
            return data_url(data, lambda: data)
        if not isinstance(data, str) or not is_file_name(data):
            raise OSError(f"row {index} has {data!r:.80} as {kind!r}: must be bytes, {{bytes, path}} or a file's name")
        return FileSpan(place_in(self.folders, data))


def _given(value: Any) -> Any:
    """A value without the keys that are null: a table gives all of its objects every key that one of them has."""
    if isinstance(value, Mapping):
        return {key: _given(item) for key, item in value.items() if item is not None}
    return [_given(item) for item in value] if isinstance(value, list) else value


def open_store(
    path: str,
    folders: Sequence[Path],
    key: str,
    arrays: Mapping[str, np.ndarray] | None = None,
    columns: Columns | None = None,
) -> Store:
    """The store that `path` names: a file, or a pattern (`*`) of tar shards or tables.

    Args:
        folders: where file names in records start, and others in which they may lie; none: that of `path`.
        key: the recipe key of `path`; errors begin with it.
        arrays: what `arrays` of such a store gave before, if it still holds: saves looking through the files.
        columns: what the columns of records hold; None: what they usually hold.

    Raises:
        RecipeError: there is no such file, or it holds no records.
    """
    files, columns = find_files(path, key), columns or Columns()
    folders = folders or [files[0].parent]
    kinds = {file.suffix for file in files}
    if len(kinds) > 1:
        raise RecipeError(f"{key} = {path!r}: files of one kind, got {sorted(kinds)}")
    if packed := sorted(kinds & COMPRESSED):
        raise RecipeError(f"{key} = {path!r}: {packed[0]} is compressed; unpack it, since records are read by offset")
    if kinds == {".tar"}:
        return TarShards(files, key, columns, arrays)
    if kinds <= set(TABLES) or files[0].is_dir():
        return Tables(files, folders, key, columns)
    if len(files) > 1:
        raise RecipeError(f"{key} = {path!r}: of JSON or CSV files give one, or make tar shards or tables of them")
    return JsonFile(files[0], folders, key, columns, arrays)


def media_blob(store: Store, index: int, at: int, kind: str, value: str | None, before: int) -> Blob:
    """Media item `at` of record `index`, the one after `before` of its kind: a file, or in the record itself. Raises
    OSError if there is none."""
    if value is None or is_file_name(value):
        return store.media(index, kind, value, before)
    if value.startswith(DATA_URL):
        return data_url(value, lambda: list(media_of(turns_of(store.record(index).value)))[at][1])
    if value.startswith("file://"):
        return store.media(index, kind, unquote(urlsplit(value).path), before)
    raise OSError(f"{value!r} is an address, and nothing is downloaded: save it, and name the file")


def find_files(path: str, key: str) -> tuple[Path, ...]:
    """The files that `path` names. Raises RecipeError: there are none."""
    files = tuple(Path(name) for name in sorted(glob.glob(path))) if glob.has_magic(path) else (Path(path),)
    if not files or not all(file.is_file() or (file / "dataset_info.json").is_file() for file in files):
        raise RecipeError(f"{key} = {path!r}: there is no such file{hub_hint(path, 'dataset')}")
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
            refusals.add(f"{key} {option} = {value!r}: there is no such directory{hub_hint(value)}")
    refusals.finish()


class JsonFile(Store):
    """A record per line, a JSON list of records, or CSV; media are files in some folders, names start in the first."""

    def __init__(
        self,
        path: Path,
        folders: Sequence[Path],
        key: str,
        columns: Columns,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.path, self.folders, self._columns = path, tuple(folders), columns
        self.files = (path,)
        self._list: list[Any] | None = None
        with path.open("rb") as file:
            is_list = path.suffix == ".json" and file.read(64).lstrip().startswith(b"[")
        if is_list:
            try:
                self._list = from_json(read_file(path))
            except ValueError as error:
                raise RecipeError(f"{key} = '{path}': begins as a JSON list, but is none: {error}") from error
        elif path.suffix in SEPARATED:
            self._list = _rows(path, key)
        if arrays is None:
            arrays = {"starts": np.zeros(0, np.int64) if self._list is not None else _line_starts(path)}
        elif arrays["starts"].dtype != np.int64 or arrays["starts"].ndim != 1 or (arrays["starts"] < 0).any():
            raise RecipeError(f"{key}: {STALE}")
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays["starts"]) if self._list is None else len(self._list)

    def record(self, index: int) -> Record:
        """The record in line `index`; empty lines do not count."""
        name = f"{self.path.name}:{index}"
        if self._list is not None:
            return self._columns.record(name, self._list[index], len(json.dumps(self._list[index])))
        with self.path.open("rb") as file:
            file.seek(int(self.arrays["starts"][index]))
            line = file.readline()
        try:
            value = from_json(line)
        except ValueError as error:
            raise SampleError(
                f"sample {name!r}: must be an object with `messages`, but the line is no JSON: {error}"
            ) from error
        return self._columns.record(name, value, len(line))

    def media(self, index: int, kind: str, value: str | None, number: int) -> Blob:
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


def _rows(path: Path, key: str) -> list[dict[str, Any]]:
    """The rows of a CSV file, by the names in its first line; all of them are texts."""
    try:
        csv.field_size_limit(MAX_TEXT_BYTES)  # a cell may hold an image as a data URL
        text = io.StringIO(read_file(path).decode("utf-8-sig"))
        names, *rows = [row for row in csv.reader(text, delimiter=SEPARATED[path.suffix]) if row] or [[]]
        if len({*names}) < len(names) or any(len(row) != len(names) for row in rows):
            raise ValueError(f"each row must have one text for each of the columns {names}, no two of one name")
    except (ValueError, csv.Error) as error:
        raise RecipeError(f"{key} = '{path}': cannot be read as {path.suffix} of UTF-8: {error}") from error
    return [dict(zip(names, row, strict=True)) for row in rows]
