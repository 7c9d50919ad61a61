"""Lengths: how large the samples of any data are, from a file with one JSON object per line."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetmesh.errors import RecipeError
from hetmesh.files import from_json

MAX_TOKENS = 2**24
"""Of a sample."""
_MAX_LINE = 1 << 20  # characters: a device may have no end
_EXAMPLE = '{"vision": 1024, "llm": 700}'


@dataclass(frozen=True, eq=False)
class Lengths:
    """How many tokens each sample of a file has.

    Attributes:
        modules: every name that occurs, in that order.
        tokens: int64 `[samples, modules]`; what a line leaves out is 0.
        lines: int64 `[samples]`: where each was read, 1 for the first line.
    """

    path: str
    modules: tuple[str, ...]
    tokens: np.ndarray
    lines: np.ndarray

    def __len__(self) -> int:
        return len(self.lines)

    def of(self, module: str) -> np.ndarray:
        """Tokens of every sample for one module, int64 `[samples]`; 0 for one that does not occur."""
        at = self.modules.index(module) if module in self.modules else None
        return np.zeros(len(self), np.int64) if at is None else self.tokens[:, at]


def read_lengths(path: str | Path, valid: Collection[str] | None = None) -> Lengths:
    """Read a file of lengths: a sample on each line, `{"vision": 1024, "audio": 0, "llm": 700}`, tokens per module, of
    which `valid` has the names (None: any). Raises RecipeError: it cannot be read, has no samples, or another line."""
    columns: dict[str, list[int]] = {}
    lines: list[int] = []
    for number, sample in _samples(path):
        for name, value in sample.items():
            if name not in columns:
                if valid is not None and name not in valid:
                    close = difflib.get_close_matches(name, valid, n=1)
                    hint = f"did you mean {close[0]!r}? " if close else ""
                    raise RecipeError(
                        f"{path}, line {number}, key {name!r}: no such module; {hint}valid are {', '.join(valid)}"
                    )
                columns[name] = [0] * len(lines)
            if type(value) is not int or not 0 <= value <= MAX_TOKENS:
                raise RecipeError(
                    f"{path}, line {number}, key {name!r}: got {_shown(value)}; valid are whole numbers of tokens from "
                    f"0 to {MAX_TOKENS}"
                )
            columns[name].append(value)
        lines.append(number)
        for column in columns.values():
            if len(column) < len(lines):
                column.append(0)
    if not lines:
        raise RecipeError(f"{path}: no samples; each line must be one, as in {_EXAMPLE}")
    table = np.array([*columns.values()], np.int64).T
    return Lengths(str(path), tuple(columns), table, np.array(lines, np.int64))


def _samples(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number and the object of every line that is not blank."""
    number = 0
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), ""), 1):
                if len(line) == _MAX_LINE:
                    raise RecipeError(f"{path}, line {number}: longer than {_MAX_LINE} characters; give a sample each")
                if line.strip():
                    yield number, _object(f"{path}, line {number}", line)
    except RecipeError:
        raise
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}, after line {number}: not UTF-8: {error}") from error
    except (OSError, ValueError) as error:  # a name may hold a null byte
        raise RecipeError(f"--lengths {str(path)!r}: cannot be read: {error}") from error


def _object(where: str, line: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
            raise RecipeError(f"{where}, key {twice!r}: given twice")
        return dict(pairs)

    try:
        value = from_json(line, once)
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(f"{where}: not JSON: {error}; valid is a sample as in {_EXAMPLE}") from error
    if not isinstance(value, dict) or not value:
        raise RecipeError(f"{where}: got {_shown(value)}; valid are tokens per module, as in {_EXAMPLE}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
