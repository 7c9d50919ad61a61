"""How far a run came, and its starts, checkpoints and ends, as the page of a run says them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import median

from hetmesh.formatting import counted
from hetmesh.records.events import FAILED, FINISHED, STOPPED
from hetmesh.records.metrics import duration
from hetmesh.records.run_lines import number, series
from hetmesh.records.run_view import CheckpointEvent, RunView, Start
from hetmesh.report.page_parts import PageSection, PageTable, State

NO_EVENTS = "no events.jsonl is in the folder: when the run started, saved and ended is not known"
MAX_ROWS = 12  # of starts, and of checkpoints: the last ones
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
        lasted = time_text(sum(start.until - start.began for start in story.starts))
        spent = lasted if start else f"{time_text(sum(series(run.records, 'time_s').values))} of steps"
        return State(f"finished: {counted(done, 'step')}{early} in {spent}, {past}", "good")
    if start is None:
        return State(f"not finished: {at}; its last line was written {past}, and no end is recorded")
    if start.how == STOPPED:
        saved = "saved" if any(checkpoint.step == done for checkpoint in story.saved) else "not saved"
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


def story_section(run: RunView) -> PageSection:
    """Starts and ends, where the wall time went, and checkpoints."""
    story = run.story
    if not story.starts:
        return PageSection("The run", missing=(NO_EVENTS,))
    parts = [PageTable("starts and ends, times in UTC", [*_start_rows(story.starts)], numbers=False)]
    if rows := wall_time(run):
        parts.append(PageTable("wall time, from the first start to the last sign of life", rows))
    times = "once" if len(story.starts) == 1 else f"{len(story.starts)} times"
    lead = f"Started {times}, first {when(story.starts[0].began)}."
    if deferral := story.starts[-1].deferral:
        lead += f" Deferral is {deferral}."
    if story.saved:
        held = time_text(median(checkpoint.held_s for checkpoint in story.saved))
        count = f"{counted(len(story.saved), 'checkpoint')} became complete"
        shown = f"; the last {MAX_ROWS}" if len(story.saved) > MAX_ROWS else ""
        caption = f"{count}, for each of which training stood still {held} (median){shown}"
        parts.append(PageTable(caption, _checkpoint_rows(story.saved[-MAX_ROWS:])))
    missing = () if story.saved else ("no checkpoint was saved; [checkpoint] enable = true",)
    return PageSection("The run", lead, tuple(parts), missing)


def _start_rows(starts: Sequence[Start]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("start", "on", "ranks", "steps", "lasted", "end", "changed for it")]
    for start in starts[-MAX_ROWS:]:
        on = f"{start.host} ({start.device})" if start.device else start.host
        redone = f", {start.redone} of them done again later" if start.redone else ""
        last = f"{start.step + 1:,} to {start.last:,}{redone}" if start.last > start.step else "none"
        end = " ".join(filter(None, (start.how, f"({start.reason})" if start.reason else ""))) or "none recorded"
        lasted = time_text(start.until - start.began)
        rows.append((when(start.began), on, str(start.ranks or "?"), last, lasted, end, start.changed or "-"))
    return rows


def wall_time(run: RunView) -> list[Sequence[str]]:
    """What the time since the first start was spent on: words, seconds and shares, a head before them."""
    starts = run.story.starts
    if not starts or (total := max(start.until for start in starts) - starts[0].began) <= 0:
        return []
    lines = [line for line in run.records if (number(line.get("timestamp")) or 0.0) >= starts[0].began]
    pauses = (max(0.0, after.began - before.until) for before, after in itertools.pairwise(starts))
    spent = {
        "steps that count": sum(series(lines, "time_s").values),
        "steps that were done again": sum(start.redone_s for start in starts),
        "starting, until the first step began": sum(start.first_s or 0.0 for start in starts),
        "training held by checkpoints": sum(checkpoint.held_s for checkpoint in run.story.saved),
        "validation": sum(series(run.evaluations, "validation", "time_s").values),
        "between an end and the next start": sum(pauses),
    }
    spent["all else"] = max(0.0, total - sum(spent.values()))
    rows = [(name, time_text(seconds), f"{seconds / total:.1%}") for name, seconds in spent.items() if seconds]
    return [("", "time", "share"), *rows, ("all", time_text(total), "100%")]


def _checkpoint_rows(saved: Sequence[CheckpointEvent]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("after step", "UTC", "training held", "written within", "beside training")]
    for checkpoint in saved:
        times = when(checkpoint.timestamp), time_text(checkpoint.held_s), time_text(checkpoint.time_s)
        rows.append((f"{checkpoint.step:,}", *times, "yes" if checkpoint.asynchronous else "no"))
    return rows


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
