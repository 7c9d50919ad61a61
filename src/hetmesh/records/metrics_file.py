"""metrics.jsonl, where a run goes on: what is kept of it, and what will come again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetmesh.errors import OutputError
from hetmesh.files import from_json, read_file, writing


def trim_metrics(path: Path, step: int, *, evaluates: bool = False) -> dict[str, Any] | None:
    """Drop the lines of metrics.jsonl after `step`, which will come again (where it `evaluates`, the evaluation after
    `step` too), and a last one that a kill cut short. Returns of the steps that are dropped the `last`, its
    `timestamp`, and the `seconds` that they took; None: none is. Raises OutputError: the file holds anything but a
    run's lines, or cannot be written."""
    if not path.exists():
        return None
    kept, later = kept_lines(path, step)
    with writing(path):
        temporary = path.with_suffix(".part")
        lines = (line for line, record in kept if not (evaluates and is_evaluation(record, step)))
        temporary.write_text("".join(lines), encoding="utf-8")
        temporary.replace(path)  # a kill right here loses nothing
    if not later:
        return None
    seconds = sum(record.get("time_s") or 0.0 for record in later)
    return {"last": later[-1]["step"], "timestamp": later[-1].get("timestamp"), "seconds": round(seconds, 3)}


def kept_lines(path: Path, step: int) -> tuple[list[tuple[str, dict[str, Any]]], list[dict[str, Any]]]:
    """The lines up to `step` and what they hold, and what later ones hold; without a last one that a kill cut short.
    Raises OutputError: see `trim_metrics`."""
    kept: list[tuple[str, dict[str, Any]]] = []
    later: list[dict[str, Any]] = []
    if not path.exists():
        return kept, later
    with writing(path):
        lines = read_file(path).decode("utf-8", errors="replace").splitlines()
        for number, line in enumerate(lines, 1):
            found = _record(line)
            if found is None and number == len(lines):
                break  # what a kill cut short
            if found is None:
                hint = "move the file away, or give another job.dump_folder"
                raise OutputError(f"{path}, line {number}: {line[:60]!r} is not a step of a run; {hint}")
            if found["step"] <= step:
                kept.append((line + "\n", found))
            else:
                later.append(found)
    return kept, later


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = from_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def is_evaluation(record: Mapping[str, Any], step: int) -> bool:
    """Whether a line is of an evaluation after `step`."""
    return record["step"] == step and "validation" in record
