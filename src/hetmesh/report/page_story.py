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
from hetmesh.report.page_values import PageSection, PageTable, State
from hetmesh.report.run_folder import RunView
from hetmesh.report.run_series import number, series
from hetmesh.report.run_story import RunStory, Start

NO_EVENTS = "no events.jsonl is in the folder: when the run started, saved and ended is not known"
MOST_ROWS = 12  # of starts, and of checkpoints: the last ones
SILENT = 60.0  # seconds, and
SILENT_STEPS = 20  # median steps: without a word for longer than both, a run that lives is odd


def state(run: RunView, wanted: int | None) -> State:
    """How far the run came, and whether it still lives, as far as its folder tells.

    Args:
        wanted: steps of the whole run; None: not known.
    """
    story, done = run.story, run.last.get("step", 0)
    start = story.starts[-1] if story.starts else None
    of = f" of {wanted:,}" if wanted is not None else ""
    at = f"step {done:,}{of}" if done else "no step"
    past = f"{ago(story.read - story.seen)} ago" if story.seen and story.read else "at a time that is not known"
    if (done and run.summary.get("steps") == done) or (start and start.how == FINISHED):
        early = f"{of}, as on_step asked" if run.summary.get("stopped_by_on_step") else ""
        return State(f"finished: {counted(done, 'step')}{early} in {_spent(run)}, {past}", "good")
    if start is None:
        return State(f"not finished: {at}; its last line was written {past}, and no end is recorded")
    if start.how == STOPPED:
        saved = "saved" if any(each.step == done for each in story.saved) else "not saved"
        return State(f"stopped by {start.reason} after {at}, which is {saved}, {past}", "bad")
    if start.how == FAILED:
        return State(f"failed after {at}, {past}: {start.reason}", "bad")
    if story.writing:
        usual = series(run.usual, "time_s")
        silent = max(SILENT, SILENT_STEPS * usual.median if usual else 0.0) < story.read - story.seen
        odd = f"; that is long for steps of {time_text(usual.median)}: is it stuck?" if silent and usual else ""
        return State(f"still running: {at}, last sign of life {past}{odd}", "bad" if silent else "good")
    if story.writing is False and story.here:
        return State(f"killed, or crashed, after {at}: last sign of life {past}, and its process is gone", "bad")
    where = f" on {start.host}" if start.host else ""
    return State(
        f"no end is recorded: {at}, last sign of life {past}{where}; whether it still runs cannot be seen from here"
    )


def _spent(run: RunView) -> str:
    starts = run.story.starts
    if starts:
        return time_text(sum(start.until - start.began for start in starts))
    return f"{time_text(sum(series(run.records, 'time_s').values))} of steps"


def story_section(run: RunView) -> PageSection:
    """Starts and ends, where the wall time went, and checkpoints."""
    story = run.story
    if not story.starts:
        return PageSection("The run", missing=(NO_EVENTS,))
    parts = [PageTable("starts and ends, times in UTC", [*_start_rows(story.starts)], numbers=False)]
    if rows := wall_time(run):
        parts.append(PageTable("wall time, from the first start to the last sign of life", rows))
    lead = f"Started {_times(len(story.starts))}, first {when(story.starts[0].began)}."
    if story.saved:
        parts.append(PageTable(_checkpoint_caption(story), _checkpoint_rows(story)))
    missing = () if story.saved else ("no checkpoint was saved; [checkpoint] enable = true",)
    return PageSection("The run", lead, tuple(parts), missing)


def _start_rows(starts: Sequence[Start]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("start", "on", "ranks", "steps", "lasted", "end", "changed for it")]
    for start in starts[-MOST_ROWS:]:
        device = f" ({start.device})" if start.device else ""
        redone = f", {start.redone} of them done again later" if start.redone else ""
        last = f"{start.step + 1:,} to {start.last:,}{redone}" if start.last > start.step else "none"
        end = " ".join(filter(None, (start.how, f"({start.reason})" if start.reason else ""))) or "none recorded"
        rows.append(
            (
                when(start.began),
                f"{start.host}{device}",
                str(start.ranks or "?"),
                last,
                time_text(start.until - start.began),
                end,
                start.changed or "-",
            )
        )
    return rows


def wall_time(run: RunView) -> list[Sequence[str]]:
    """What the time since the first start was spent on: words, seconds and shares, a head before them."""
    starts = run.story.starts
    if not starts or (whole := max(start.until for start in starts) - starts[0].began) <= 0:
        return []
    first = starts[0].began
    counted_lines = [each for each in run.records if (number(each.get("timestamp")) or 0.0) >= first]
    spent = {
        "steps that count": sum(series(counted_lines, "time_s").values),
        "steps that were done again": sum(start.redone_s for start in starts),
        "starting, until the first step began": sum(start.first_s or 0.0 for start in starts),
        "training held by checkpoints": sum(each.held_s for each in run.story.saved),
        "validation": sum(series(run.evaluations, "validation", "time_s").values),
        "between an end and the next start": sum(
            max(0.0, after.began - before.until) for before, after in itertools.pairwise(starts)
        ),
    }
    spent["all else"] = max(0.0, whole - sum(spent.values()))
    rows = [(name, time_text(seconds), f"{seconds / whole:.1%}") for name, seconds in spent.items() if seconds]
    return [("", "time", "share"), *rows, ("all", time_text(whole), "100%")]


def _checkpoint_caption(story: RunStory) -> str:
    many = counted(len(story.saved), "checkpoint")
    held = median(each.held_s for each in story.saved)
    shown = f"; the last {MOST_ROWS}" if len(story.saved) > MOST_ROWS else ""
    return f"{many} became complete, for each of which training stood still {time_text(held)} (median){shown}"


def _checkpoint_rows(story: RunStory) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("after step", "UTC", "training held", "written within", "beside training")]
    rows += [
        (
            f"{each.step:,}",
            when(each.timestamp),
            time_text(each.held_s),
            time_text(each.time_s),
            "yes" if each.asynchronous else "no",
        )
        for each in story.saved[-MOST_ROWS:]
    ]
    return rows


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


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
