"""Lengths: how large the samples of any data are, from a file with one JSON object per line."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetmesh.errors import RecipeError
from hetmesh.files import from_json, read_file
from hetmesh.recipe.keys import unknown

MAX_TOKENS = 2**24
"""Of a sample."""
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
    try:
        lines = read_file(path).decode().splitlines()
    except (OSError, ValueError) as error:  # no UTF-8, or a name that holds a null byte
        raise RecipeError(f"--lengths {str(path)!r}: cannot be read: {error}") from error
    samples = {n: _sample(f"{path}, line {n}", line, valid) for n, line in enumerate(lines, 1) if line.strip()}
    if not samples:
        raise RecipeError(f"{path}: no samples; each line must be one, as in {_EXAMPLE}")
    modules = tuple(dict.fromkeys(name for sample in samples.values() for name in sample))
    tokens = [[sample.get(name, 0) for name in modules] for sample in samples.values()]
    return Lengths(str(path), modules, np.array(tokens, np.int64), np.array([*samples], np.int64))


def _sample(where: str, line: str, valid: Collection[str] | None) -> dict[str, int]:
    try:
        sample = from_json(line)
    except ValueError as error:
        raise RecipeError(f"{where}: not JSON: {error}; valid is a sample as in {_EXAMPLE}") from error
    if not isinstance(sample, dict) or not sample:
        raise RecipeError(f"{where}: got {sample!r:.60}; valid are tokens per module, as in {_EXAMPLE}")
    for name, value in sample.items():
        if valid is not None and name not in valid:
            raise RecipeError(f"{where}, key {name!r}: {unknown('module', name, valid)}")
        if type(value) is not int or not 0 <= value <= MAX_TOKENS:
            raise RecipeError(
                f"{where}, key {name!r}: got {value!r:.60}; valid are whole numbers of tokens from 0 to {MAX_TOKENS}"
            )
    return sample
