"""Tables on pages that a tool writes: between a comment that names the tool and one that says `end`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

END = "<!-- end -->"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join([line(head), "|---" * len(head) + "|", *map(line, rows)])


def line(cells: Sequence[str]) -> str:
    """One line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def written(text: str, tool: str) -> str:
    """The table of `tool` on a page; empty if it has none."""
    return text.partition(_begin(tool))[2].partition(END)[0].strip()


def write(page: Path, tool: str, table: str) -> None:
    """Put the table of `tool` into the place that `page` has for it.

    Raises:
        SystemExit: it has none.
    """
    text = page.read_text(encoding="utf-8")
    before, found, rest = text.partition(_begin(tool))
    if not found or END not in rest:
        raise SystemExit(f"{tool}.py: {page} has no place for the table, {_begin(tool)} and {END}")
    page.write_text(f"{before}{found}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def _begin(tool: str) -> str:
    return f"<!-- tools/{tool}.py -->"
