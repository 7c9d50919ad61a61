"""Counts, ranks, tables and values of TOML as text for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence


def counted(n: int, one: str, many: str | None = None) -> str:
    """`"1 rank"`, `"2 ranks"`; `many` where the plural is not one with an s."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def listed(texts: Sequence[str], shown: int = 8) -> str:
    """The first `shown` of `texts`, and how many more there are."""
    return ", ".join(texts[:shown]) + (f" and {len(texts) - shown} more" if len(texts) > shown else "")


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks as a recipe may write them: `(0, 1, 2, 5)` -> `"0-2,5"`."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in rank_runs(ranks))


def rank_runs(ranks: Iterable[int]) -> list[list[int]]:
    """First and last of each run of consecutive ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return runs


def toml(value: object) -> str:
    """A value of TOML on one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(str(key))} = {toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)  # texts, numbers and truth values are written alike


def table(lines: Sequence[Sequence[str]], *, numbers: bool = False) -> Iterator[str]:
    """Lines of cells in columns that are as wide as their widest cell. `numbers`: all columns but the first hold
    numbers and are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for cells in lines:
        padded = (
            cell.rjust(width) if numbers and i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        yield "  ".join(padded).rstrip()
