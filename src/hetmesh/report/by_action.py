"""Predicted beside measured seconds of a step that was recorded, per module and kind of action."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hetmesh.formatting import table
from hetmesh.simulate import Timeline

KINDS: Mapping[str, str] = {
    "GATHER": "gather parameters",
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
    "REDUCE": "sum gradients",
    "SEND": "transfer",
    "OPTIMIZER": "optimizer",
}
"""Kinds of spans, in the order of a table, and what they are called in it."""


@dataclass(frozen=True)
class ActionTime:
    """One kind of action of one module.

    Attributes:
        module: its name; of a transfer both, `"vision->llm"`; empty for the optimizer, whose work is of all.
        kind: a key of `KINDS`.
        predicted, measured: seconds in the step, mean over the ranks that did any; None where there was none.
        predicted_count, measured_count: how many there were, on the mean rank.
    """

    module: str
    kind: str
    predicted: float | None
    measured: float | None
    predicted_count: float = 0.0
    measured_count: float = 0.0

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1."""
        return None if self.predicted is None or not self.measured else self.predicted / self.measured - 1


def action_times(timelines: Mapping[str, Timeline]) -> tuple[ActionTime, ...]:
    """Of the timelines `predicted` and `measured`, as far as they are there; modules in their order.

    A measured transfer lasts from the first SEND of its sources to its arrival at who waits for it, so that it is the
    longer the later that rank looks; a predicted one ends when it is there. What FSDP gathers is measured as part of
    forwards, but for the predicted first gather.
    """
    sums = {name: _sums(timeline) for name, timeline in timelines.items()}
    predicted, measured = (sums.get(name, {}) for name in ("predicted", "measured"))
    modules = dict.fromkeys(module for module, _ in (*predicted, *measured))
    order = list(KINDS)
    keys = sorted({*predicted, *measured}, key=lambda key: (_place(key, list(modules)), order.index(key[1])))
    none: tuple[float | None, float] = (None, 0.0)
    found = []
    for key in keys:
        (before, expected), (seconds, count) = predicted.get(key, none), measured.get(key, none)
        found.append(ActionTime(*key, before, seconds, expected, count))
    return tuple(found)


def _place(key: tuple[str, str], modules: list[str]) -> tuple[int, int]:
    """Modules, then transfers, then the optimizer."""
    module, kind = key
    return (2 if kind == "OPTIMIZER" else 1 if kind == "SEND" else 0), modules.index(module)


def _sums(timeline: Timeline) -> dict[tuple[str, str], tuple[float | None, float]]:
    """(module, kind) -> seconds and number of actions, on the mean rank of those that have any."""
    total: dict[tuple[str, str], list[float]] = {}
    tracks: dict[tuple[str, str], set[int]] = {}
    for transfers in (False, True):
        for span in timeline.spans(transfers=transfers):
            key = _module(span.target), span.kind
            ranks = len(timeline.tracks[span.track])
            seconds, count = total.setdefault(key, [0.0, 0.0])
            total[key] = [seconds + ranks * (span.stop - span.start), count + ranks]
            tracks.setdefault(key, set()).add(span.track)
    return {
        key: (seconds / ranks, count / ranks)
        for key, (seconds, count) in total.items()
        if (ranks := sum(len(timeline.tracks[track]) for track in tracks[key]))
    }


def _module(target: str) -> str:
    """`"llm.0"` -> `"llm"`; of an edge both ends, or one where they are stages of one module."""
    ends = [end.rpartition(".")[0] for end in target.split("->")] if target else [""]
    return ends[0] if len(set(ends)) == 1 else "->".join(ends)


def action_table(timelines: Mapping[str, Timeline]) -> str:
    """The same as lines of text: milliseconds of a step on the mean rank."""
    return "\n".join(table(list(action_rows(timelines)), numbers=True))


def action_rows(timelines: Mapping[str, Timeline]) -> Iterator[tuple[str, ...]]:
    """The cells of that table, its head first."""
    yield ("ms on the mean rank", "predicted", "measured", "error", "actions")
    for each in action_times(timelines):
        name = f"{each.module} {KINDS[each.kind]}".strip()
        values = ("-" if x is None else f"{1e3 * x:.2f}" for x in (each.predicted, each.measured))
        error = "-" if each.error is None else f"{100 * each.error:+.0f}%"
        count = each.measured_count if each.measured is not None else each.predicted_count
        yield (name, *values, error, f"{count:g}")
    steps = [timelines[name].makespan if name in timelines else None for name in ("predicted", "measured")]
    error = f"{100 * (steps[0] / steps[1] - 1):+.0f}%" if steps[0] is not None and steps[1] else "-"
    yield ("step", *("-" if x is None else f"{1e3 * x:.2f}" for x in steps), error, "")


def action_json(timelines: Mapping[str, Timeline]) -> list[dict[str, Any]]:
    """The same as plain values."""
    return [asdict(each) | {"error": each.error} for each in action_times(timelines)]
