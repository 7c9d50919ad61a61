"""Where a folder has its conversations, and where the files that they name start: what `hetmesh init` asks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetmesh.data.stores.open_store import SEPARATED, TABLES, JsonFile, open_store
from hetmesh.data.stores.store import Store
from hetmesh.data.stores.tar_shards import IMAGES, TarShards
from hetmesh.data.turns import is_file_name, media_of, turns_of
from hetmesh.errors import HetmeshError, RecipeError

HELD_OUT = ("val", "valid", "validation", "test", "eval", "dev", "holdout", "heldout")
"""Words in the name of a file that holds the samples for evaluation."""

FORMS = (
    "one conversation per line of a .jsonl or in the list of a .json, as {messages: [{role, content}]}, as {image, "
    "conversations: [{from, value}]}, or with the columns question and answer, texts or text; or .tar shards, .csv "
    "files, or .parquet or .arrow tables of them"
)
_TRIED_RECORDS = 20  # for the folder where media files start


@dataclass(frozen=True)
class Conversations:
    """What a recipe's `[data.options]` say of where data are; empty: no held-out ones, or the folder of `path`."""

    path: str
    validation_path: str = ""
    media_folder: str = ""


def find_conversations(path: str, media_folder: str | None = None, key: str = "--data") -> Conversations:
    """The conversations that `path` names: a file, a pattern of files, or a folder that has them. `media_folder`: where
    relative names of media start, if it is known. Raises RecipeError: there are none, or several; none in a form that
    is read; media files that they name are not there."""
    root = Path(path).expanduser()
    if not root.is_dir() or (root / "dataset_info.json").is_file():
        store = open_store(str(root), (), key)
        start = Path(store.files[0]).parent
        return Conversations(str(root), "", media_folder or _media_folder(store, start, [start], key))
    others: list[str] = []
    groups = dict(_groups(root, key, others))
    held_out = [name for name in groups if _held_out(os.path.relpath(name, root))]
    train = [name for name in groups if name not in held_out]
    if train and len(held_out) > 1:  # a test split, too
        held_out = [name for name in held_out if _held_out(os.path.relpath(name, root)) & {*HELD_OUT[:3]}]
    if len(train) > 1 or (not train and len(held_out) > 1):
        raise RecipeError(f"{key} = {path!r}: several files hold conversations: {', '.join(sorted(groups))}; name one")
    if not groups:
        if any(file.suffix[1:].lower() in IMAGES for folder in (root, *_folders(root)) for file in folder.iterdir()):
            others.append("images need texts: a metadata.csv or .jsonl with file_name and text; folders name none")
        raise RecipeError("; ".join([f"{key} = {path!r}: no conversations in it: {FORMS}", *others[:3]]))
    name = (train or held_out)[0]
    validation = held_out[0] if train and len(held_out) == 1 else ""
    store = groups[name]
    start = Path(name).parent
    folder = media_folder or _media_folder(store, start, [start, root, *_folders(root)], key)
    return Conversations(name, validation, folder)


def _groups(root: Path, key: str, others: list[str]) -> Iterator[tuple[str, Store]]:
    """Files, or patterns of alike ones, in a folder and those right in it, that hold conversations; why others do not
    is added to `others`, but for JSON, which may be of any kind."""
    for folder in (root, *_folders(root)):
        files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
        for file in files:
            said = [] if file.suffix == ".json" else others
            if file.suffix in (".json", ".jsonl", *SEPARATED) and (store := _opened(str(file), key, said)) is not None:
                yield str(file), store
        shards = {file.stem for file in files if file.suffix == ".tar"}
        for suffix in (".tar", *TABLES):  # img2dataset has tables of addresses beside its shards, under their names
            alike = [file for file in files if file.suffix == suffix and (suffix == ".tar" or file.stem not in shards)]
            for words in dict.fromkeys(_held_out(file.name) for file in alike):
                name = _pattern([file for file in alike if _held_out(file.name) == words], alike, key)
                if name and (store := _opened(name, key, others)) is not None:
                    yield name, store


def _pattern(files: list[Path], alike: list[Path], key: str) -> str:
    """What names `files` and none of the others that are alike."""
    if len(files) < 2:
        return str(files[0]) if files else ""
    start = os.path.commonprefix([file.name for file in files])  # noqa: RUF071  (of characters, not of folders)
    pattern = f"{start}*{files[0].suffix}"
    if any(file.match(pattern) for file in alike if file not in files):
        raise RecipeError(
            f"{key} = '{files[0].parent}': no pattern names {files[0].name}, {files[1].name} ... and leaves out the "
            "held-out ones beside them; put these into a folder of their own, and name the pattern of the others"
        )
    return str(files[0].parent / pattern)


def _opened(path: str, key: str, others: list[str]) -> Store | None:
    """A store whose first record is a conversation; None if it is something else, and why in `others`."""
    try:
        store = open_store(path, (), key)
        if not len(store):
            return None
        if isinstance(store, TarShards):
            return store
        store.record(0)
        return store
    except HetmeshError as error:  # a config.json, say
        others.append(str(error))
        return None


def _folders(root: Path) -> Iterator[Path]:
    return (entry for entry in sorted(root.iterdir()) if entry.is_dir() and not entry.name.startswith("."))


def _held_out(name: str) -> frozenset[str]:
    return frozenset(HELD_OUT).intersection(re.split(r"[^a-z]+", name.lower()))


def _media_folder(store: Store, start: Path, candidates: Iterable[Path], key: str) -> str:
    """The first of `candidates` under which the media files of some conversations are; empty for `start`."""
    if not isinstance(store, JsonFile):
        return ""  # a table of file names has them in its own folder
    records = [store.record(i).value for i in range(min(len(store), _TRIED_RECORDS))]
    relative = [name for record in records for name in _media_names(record) if not Path(name).is_absolute()]
    missing = {folder: [name for name in relative if not os.path.isfile(folder / name)] for folder in candidates}
    folder, fewest = min(missing.items(), key=lambda item: len(item[1]))
    if not fewest:
        return "" if folder == start else str(folder)
    where = "neither beside it nor in a folder there" if fewest == relative else f"not in {folder}, as others are"
    raise RecipeError(
        f"{key}: {store.path} names {fewest[0]!r}, which is {where}; keep media "
        "files in the folder that it names, or say where names start: --data.options.media_folder FOLDER"
    )


def _media_names(record: Any) -> Iterator[str]:
    """The files that a record names; nothing of a record that cannot be read, which the data source reports better."""
    try:
        turns = turns_of(record)
    except (ValueError, KeyError, TypeError, AttributeError):
        return
    for _, value in media_of(turns):
        if isinstance(value, str) and is_file_name(value):
            yield value
