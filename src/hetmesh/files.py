"""Files that hetmesh writes: strict JSON, all of a file or nothing; those that it reads, which others have written, and
where these may lie; errors that name the path."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import tomli

from hetmesh.errors import HetmeshError, OutputError, RecipeError

MAX_LEVELS = 100
"""Levels of lists and objects in JSON that is read. Python's own limit depends on who calls."""
PATH_MAX = 4096
"""Characters of the longest name of a file on Linux."""
MAX_TEXT_BYTES = 1 << 24
"""Bytes of a text that a person names: a device may have no end."""


def to_json(value: Any, indent: int | None = None) -> str:
    """`value` as JSON that any parser reads: numbers that are not finite become null, which JSON has no other word for.

    Args:
        value: dicts, lists, tuples, texts, numbers, bools and None.
        indent: spaces per level; None writes one line.
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def write_json(path: str | Path, value: Any, indent: int | None = None) -> None:
    """Write `to_json(value)` to `path`; whoever reads meanwhile, or after a kill, finds the old file or the new one.
    Raises OutputError: it cannot be written."""
    path = Path(path)
    with writing(path):
        temporary = path.with_name(path.name + ".part")
        temporary.write_text(to_json(value, indent) + "\n", encoding="utf-8")
        os.replace(temporary, path)


def open_file(path: str | Path) -> BinaryIO:
    """A file to read. Raises OSError: it cannot be read, or is a pipe or device, which may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"{path} is not a regular file")
    return open(path, "rb")


def read_file(path: str | Path) -> bytes:
    """All of a file. Raises OSError: see `open_file`."""
    with open_file(path) as file:
        return file.read()


def read_object(path: str | Path) -> dict[str, Any]:
    """The JSON object of a file; empty where there is no such file, or something else in it."""
    try:
        value = from_json(read_file(path))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_lines(path: str | Path) -> list[tuple[str, Any]]:
    """The lines of a file, each with what it holds, or the ValueError where that is not JSON. Raises OSError."""
    lines: list[tuple[str, Any]] = []
    for line in read_file(path).decode("utf-8", errors="replace").splitlines():  # what a full disk leaves is no text
        try:
            lines.append((line, from_json(line)))
        except ValueError as error:
            lines.append((line, error))
    return lines


def read_text(path: str | Path) -> str:
    """A text of UTF-8 that a person names, who may give a pipe (`<(...)` of a shell).

    Raises:
        OSError: it cannot be read, or is longer than `MAX_TEXT_BYTES`.
        ValueError: it is not UTF-8, or the name holds a null byte.
    """
    with open(path, "rb") as file:
        data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise OSError(f"it is longer than {MAX_TEXT_BYTES} bytes")
    return data.decode("utf-8")


def from_toml(text: str) -> dict[str, Any]:
    """What a TOML text says. Raises ValueError: it is none, nested too deep, or has numbers of thousands of digits."""
    try:
        return tomli.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def from_json(data: str | bytes) -> Any:
    """What a JSON text says; of equal keys the last counts. Raises ValueError: it is none, is nested too deep, or holds
    half of a surrogate pair, which is no character."""
    text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if text.count("[") + text.count("{") > MAX_LEVELS:  # else it cannot be
        _check_depth(value)
    if "\\ud" in text or "\\uD" in text:  # else no text can hold any
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_LEVELS):
        inside = (node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list))
        level = [node for nodes in inside for node in nodes if isinstance(node, dict | list)]
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_LEVELS} levels deep")


def hub_hint(path: str, kind: str = "model") -> str:
    """How to get what `path` names, the end of an error, where it may be a repository of that kind on Hugging Face's
    hub; else empty."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) or Path(path).exists() or Path(path).suffix[1:].isalpha():
        return ""
    more = "" if kind == "model" else f" --repo-type {kind}"
    return f": hf download {path}{more} --local-dir {path.rpartition('/')[2]}"


def place_in(folders: Sequence[Path], name: str) -> Path:
    """The file that data call `name`, which may begin in the first of `folders` and must lie in one of them, links
    followed. (Files of a Hugging Face cache are links into the `blobs` beside their snapshot, which belong to it.)

    Raises:
        OSError: it lies elsewhere, links lead in circles, or no file can have such a name.
    """
    if len(name) > PATH_MAX:
        raise OSError(
            f"{name[:40]!r}... has {len(name)} characters, too many for a file's name; write bytes in base64 as a data "
            "URL (data:image/png;base64,...)"
        )
    path = folders[0] / name
    if os.path.islink(path) or ".." in path.parts:
        real = os.path.realpath(path)
    else:
        real = os.path.join(_real(os.path.abspath(path.parent)), path.name)
    if any(real.startswith(root) for folder in folders for root in _roots(os.path.abspath(folder))):
        return path
    raise OSError(f"{name!r} is {real}, which lies outside of {' and '.join(map(str, folders))}")


@lru_cache(maxsize=4096)
def _real(folder: str) -> str:
    return os.path.realpath(folder)


@lru_cache(maxsize=64)
def _roots(folder: str) -> tuple[str, ...]:
    real = Path(os.path.realpath(folder))
    cached = [parent.parent / "blobs" for parent in (real, *real.parents) if parent.name == "snapshots"]
    return tuple(os.path.join(root, "") for root in (real, *cached))


def json_object(file: Path, where: object) -> dict[str, Any]:
    """What the JSON file of a directory that a recipe names holds. `where`: `str(where)` says which directory, and
    begins errors. Raises RecipeError: it cannot be read, or holds something else than an object."""
    try:
        value = from_json(read_file(file))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{where}: {file.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise RecipeError(f"{where}: {file.name} must hold a JSON object")
    return value


@contextmanager
def writing(path: str | Path, hint: str = "") -> Iterator[None]:
    """Turn an OSError of the body, which writes `path`, into an OutputError. `hint`: what to do about it, the end of
    the message."""
    try:
        yield
    except HetmeshError:  # some are OSErrors too
        raise
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise OutputError(f"{path} cannot be written: {reason.lower()}" + (f"; {hint}" if hint else "")) from error


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
