"""Files that hetmesh writes: strict JSON, all of a file or nothing; JSON that it reads; errors that name the path."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetmesh.errors import HetmeshError, OutputError, RecipeError


def to_json(value: Any, indent: int | None = None) -> str:
    """`value` as JSON that any parser reads: numbers that are not finite become null, which JSON has no other word for.

    Args:
        value: dicts, lists, tuples, texts, numbers, bools and None.
        indent: spaces per level; None writes one line.
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def write_json(path: str | Path, value: Any, indent: int | None = None) -> None:
    """Write `to_json(value)` to `path`; whoever reads meanwhile, or after a kill, finds the old file or the new one.

    Raises:
        OutputError: it cannot be written.
    """
    path = Path(path)
    with writing(path):
        temporary = path.with_name(path.name + ".part")
        temporary.write_text(to_json(value, indent) + "\n", encoding="utf-8")
        os.replace(temporary, path)


def parsed_json(text: str) -> Any:
    """What `text` holds.

    Raises:
        ValueError: it is no JSON, its values are too deep in each other, or a string of it is no text (half a pair).
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("its values lie too deep in each other") from None
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def json_object(file: Path, where: object) -> dict[str, Any]:
    """What the JSON file of a directory that a recipe names holds.

    Args:
        where: `str(where)` says which directory, and begins errors.

    Raises:
        RecipeError: it cannot be read, or holds something else than an object.
    """
    try:
        value = parsed_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{where}: {file.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise RecipeError(f"{where}: {file.name} must hold a JSON object")
    return value


@contextmanager
def writing(path: str | Path, hint: str = "") -> Iterator[None]:
    """Turn an OSError of the body, which writes `path`, into an OutputError.

    Args:
        hint: what to do about it, the end of the message.
    """
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
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
