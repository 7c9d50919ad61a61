"""The index of a source: what is known of its samples without their media, made once and kept beside the data."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hetmesh.data.source import metas_of
from hetmesh.data.stores.store import MALFORMED_FILE, npy_shape
from hetmesh.errors import RecipeError
from hetmesh.files import from_json, read_file, writing
from hetmesh.graph.meta_arrays import NO_DIM, MetaArrays

if TYPE_CHECKING:
    from hetmesh.data.conversations import ConversationsSource

SUFFIX = ".hetmesh-index.npz"
VERSION = 4
_ADVICE = "make it anew: hetmesh index RECIPE, or remove it"
_DAMAGED = (OSError, ValueError, AttributeError, zipfile.BadZipFile, *MALFORMED_FILE)
"""What reading a damaged index raises."""
_CHUNK_SAMPLES = 4096  # whose metadata are objects at a time, while an index is made
JOINED, ENDS = ("tokens", "targets", "runs", "names"), ("target_ends", "item_ends", "run_ends", "name_ends")
"""Attributes of `MetaArrays` by how those of several become those of all."""


def file_states(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Name, size in bytes and time of the last change in ns: what shows that a file has changed."""
    inside = [entry for file in files for entry in (sorted(file.iterdir()) if file.is_dir() else [file])]
    return [(file.name, (status := file.stat()).st_size, status.st_mtime_ns) for file in inside if file.is_file()]


def content_hash(files: Iterable[Path]) -> str:
    """Of small files, such as those of a tokenizer."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + read_file(file))
    return digest.hexdigest()


def build_index(source: ConversationsSource) -> Path:
    """Make the index of `source`, from texts and headers of media. Raises OutputError: it cannot be written."""
    everything = range(len(source))
    starts = everything[::_CHUNK_SAMPLES]
    metas = _joined([metas_of(source, everything[start : start + _CHUNK_SAMPLES]) for start in starts])
    texts = {"version": VERSION, "inputs": source.index_inputs, "kinds": metas.kinds}
    texts["unreadable"] = {str(i): reason for i, reason in metas.unreadable.items()}
    names = [field.name for field in fields(metas)]
    arrays: dict[str, Any] = {name: a for name in names if isinstance(a := getattr(metas, name), np.ndarray)}
    arrays |= {f"store_{name}": array for name, array in source.store_arrays.items()}
    path = source.index_path
    with writing(path):
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        with part.open("wb") as file:
            np.savez(file, texts=np.frombuffer(json.dumps(texts).encode(), np.uint8), **arrays)
        os.replace(part, path)
    return path


def load_index(path: Path, inputs: Mapping[str, Any]) -> tuple[MetaArrays, dict[str, np.ndarray]] | None:
    """The index at `path` and the offsets kept with it; None if there is none. Raises RecipeError: it is damaged, or
    was made from other files or options than `inputs`."""
    if not path.is_file():
        return None
    try:
        _check_claims(path)
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        texts = from_json(arrays.pop("texts").tobytes())
        version = texts["version"]
    except _DAMAGED as error:
        raise RecipeError(f"the index {path} is damaged ({error}); {_ADVICE}") from error
    if version != VERSION:
        raise RecipeError(f"the index {path} is stale: its format is {version!r}, not {VERSION}; {_ADVICE}")
    if not isinstance(texts.get("inputs"), dict):
        raise RecipeError(f"the index {path} is damaged (it does not say what it is of); {_ADVICE}")
    current = json.loads(json.dumps(inputs))  # tuples become lists
    if changed := sorted(name for name in current if texts["inputs"].get(name) != current[name]):
        raise RecipeError(f"the index {path} is stale: {', '.join(changed)} changed since it was made; {_ADVICE}")
    store = {name.removeprefix("store_"): arrays.pop(name) for name in list(arrays) if name.startswith("store_")}
    try:
        unreadable = {int(i): str(reason) for i, reason in texts["unreadable"].items()}
        metas = MetaArrays(**arrays, kinds=tuple(map(str, texts["kinds"])), unreadable=unreadable)
        metas.check()
    except _DAMAGED as error:
        raise RecipeError(f"the index {path} is damaged ({error}); {_ADVICE}") from error
    return metas, store


def _check_claims(path: Path) -> None:
    """Raise ValueError where arrays would be larger than the file: packed, or said to be in their headers."""
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > path.stat().st_size:
                raise ValueError(f"{info.filename} is packed")
            with archive.open(info) as member:
                npy_shape(member, info.file_size)  # type: ignore[arg-type]


def _joined(parts: list[MetaArrays]) -> MetaArrays:
    """The same samples in one."""
    kinds = tuple(sorted({kind for part in parts for kind in part.kinds}))
    width = max((part.items.shape[1] for part in parts), default=3)
    items = []
    for part in parts:
        padding = ((0, 0), (0, width - part.items.shape[1]))
        items.append(np.pad(part.items, padding, constant_values=NO_DIM))
        if part.kinds:
            items[-1][:, 0] = np.array([kinds.index(kind) for kind in part.kinds])[part.items[:, 0]]
    starts = itertools.accumulate(map(len, parts), initial=0)
    columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in JOINED}
    for name in ENDS:
        counts = np.concatenate([[0], *(np.diff(getattr(part, name)) for part in parts)])
        columns[name] = np.cumsum(counts, dtype=np.int64)
    unreadable = {at + i: why for at, part in zip(starts, parts, strict=False) for i, why in part.unreadable.items()}
    return MetaArrays(**columns, kinds=kinds, items=np.concatenate(items), unreadable=unreadable)
