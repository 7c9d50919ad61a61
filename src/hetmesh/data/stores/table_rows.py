"""Tables: records in parquet or arrow files, or in a folder that Hugging Face datasets saved; read through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetmesh.data.stores.store import Blob, Record, RecordBlob, Store
from hetmesh.errors import RecipeError, SampleError
from hetmesh.files import from_json, open_file, place_in, read_file

TABLES = (".parquet", ".arrow")
"""Extensions of tables."""

COLUMNS = ("messages", "conversations")
"""Columns that hold a conversation: a list of turns, or its JSON text; of these the first that a table has."""


class Tables(Store):
    """One record per row. Media lie in columns called after their kind (`image`, `images`, `audio`): a row has one item
    or a list, as bytes or as `{bytes, path}`; those that a conversation does not name are taken in order."""

    in_order = True

    def __init__(self, files: Sequence[Path], key: str) -> None:
        import datasets

        self.files, self.arrays = tuple(files), {}
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
        column = next((name for name in COLUMNS if name in names), None)
        if column is None:
            raise RecipeError(f"{key}: {files[0]} needs a column {' or '.join(COLUMNS)}, it has {names}")
        self._column = column
        self._table = table.with_format("arrow")  # rows as they are stored: no image is decoded
        self._texts = self._table.select_columns([name for name in (column, "id") if name in names])
        self._media = {kind: name for kind in ("image", "audio") for name in (f"{kind}s", kind) if name in names}

    def __len__(self) -> int:
        return len(self._table)

    def record(self, index: int) -> Record:
        """The conversation of row `index`."""
        row = self._row(self._texts, index)
        value: dict[str, Any] = {name: row.column(name)[0].as_py() for name in row.column_names}
        turns, name = value[self._column], f"{self.files[0].name}:{index}"
        if isinstance(turns, str):
            try:
                value[self._column] = from_json(turns)
            except ValueError as error:
                raise SampleError(f"sample {name!r}: its column {self._column!r} is no JSON: {error}") from error
        return Record(name, value, row.nbytes)

    def media_counts(self, index: int) -> Mapping[str, int]:
        """Items in the columns of media."""
        from pyarrow import ListScalar  # of large lists and lists of fixed size too

        cells = {kind: self._cell(index, kind) for kind in self._media}
        return {
            kind: sum(item.is_valid for item in cell) if isinstance(cell, ListScalar) else 1
            for kind, cell in cells.items()
            if cell.is_valid
        }

    def _cell(self, index: int, kind: str) -> Any:
        """The scalar of a row in the column of media of that kind, as arrow has it."""
        return self._row(self._table.select_columns([self._media[kind]]), index).column(0)[0]

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
        if not isinstance(item, bytes | Mapping):
            raise OSError(f"row {index} has a {type(item).__name__} as {kind!r}: must be bytes, or {{bytes, path}}")
        data = item if isinstance(item, bytes) else item.get("bytes")
        path = "" if isinstance(item, bytes) else item.get("path") or ""
        if data is None:
            raise OSError(f"row {index} has the {kind!r} {path!r} by name only: embed its bytes")
        return RecordBlob(path or kind, len(data), lambda: data)
