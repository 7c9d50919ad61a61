"""How far a run came, and whether it still lives."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from hetmesh.formatting import counted
from hetmesh.records.events import FAILED, FINISHED, STOPPED
from hetmesh.records.metrics import duration
from hetmesh.records.run_lines import series
from hetmesh.records.run_view import RunView
from hetmesh.report.page_parts import State

SILENT_SECONDS, SILENT_STEPS = 60.0, 20  # median steps: without a line for longer than both, a run that lives is odd


def state(run: RunView, wanted: int | None) -> State:
    """How far the run came of the `wanted` steps (None: not known), and whether it still lives, as its folder tells."""
    story, done = run.story, run.last.get("step", 0)
    start = story.starts[-1] if story.starts else None
    of = f" of {wanted:,}" if wanted is not None else ""
    at = f"step {done:,}{of}" if done else "no step"
    past = f"{ago(story.read - story.seen)} ago" if story.seen and story.read else "at a time that is not known"
    if (done and run.summary.get("steps") == done) or (start and start.how == FINISHED):
        early = f"{of}, as on_step asked" if run.summary.get("stopped_by_on_step") else ""
        spent = time_text(sum(series(run.records, "time_s").values))
        return State(f"finished: {counted(done, 'step')}{early}, which took {spent}, {past}", "good")
    if start is None:
        return State(f"not finished: {at}; its last line was written {past}, and no end is recorded")
    if start.how == STOPPED:
        saved = "saved" if done in story.saved else "not saved"
        return State(f"stopped by {start.reason} after {at}, which is {saved}, {past}", "bad")
    if start.how == FAILED:
        return State(f"failed after {at}, {past}: {start.reason}", "bad")
    if story.writing:
        usual = series(run.usual, "time_s")
        silent = max(SILENT_SECONDS, SILENT_STEPS * usual.median if usual else 0.0) < story.read - story.seen
        odd = f"; that is long for steps of {time_text(usual.median)}: is it stuck?" if silent and usual else ""
        return State(f"still running: {at}, last sign of life {past}{odd}", "bad" if silent else "good")
    if story.writing is False and story.here:
        return State(f"killed, or crashed, after {at}: last sign of life {past}, and its process is gone", "bad")
    where = f" on {start.host}" if start.host else ""
    unseen = "whether it still runs cannot be seen from here"
    return State(f"no end is recorded: {at}, last sign of life {past}{where}; {unseen}")


def time_text(seconds: float) -> str:
    """`"12.3 ms"`, `"4.56 s"`, `"2:03"`."""
    if not math.isfinite(seconds):  # a sum of figures that nobody measured
        return "?"
    if seconds >= 100:
        return duration(seconds)
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def ago(seconds: float) -> str:
    """How long something is past, in the largest unit of which there are two: `ago(7300)` is `"2 h"`."""
    for unit, size, least in (("days", 86400, 2), ("h", 3600, 2), ("min", 60, 2)):
        if seconds >= least * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def when(timestamp: float) -> str:
    """A time as UTC has it: `"2026-11-23 09:10:57"`."""
    try:
        return f"{datetime.fromtimestamp(timestamp, UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, OSError, ValueError):
        return "?"
