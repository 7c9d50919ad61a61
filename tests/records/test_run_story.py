"""What became of a run: whether it lives, and how it ended."""

import json
import re
import socket
import time

from hetmesh.cli import main
from hetmesh.records.events import RunEvents, is_writing
from hetmesh.records.run_lines import series
from hetmesh.records.run_view import read_run
from hetmesh.report.page_story import ago, state, when
from support.written_runs import write_lines

HOUR = 3615.0  # and a bit: the clock of a line is rounded


def written(folder, *events, steps=3, age=HOUR, here=True):
    """A run whose last step was `age` seconds ago, on this host or elsewhere."""
    last = time.time() - age
    lines = [{"step": i, "loss": 1.0, "time_s": 2.0, "timestamp": last - 2 * (steps - i)} for i in range(1, steps + 1)]
    write_lines(folder / "metrics.jsonl", lines)
    host = socket.gethostname() if here else "elsewhere"
    start = {"event": "started", "step": 0, "steps": 9, "timestamp": last - 10, "host": host}
    write_lines(folder / "events.jsonl", [start, *({"step": steps, "timestamp": last} | each for each in events)])
    return folder


def told(folder):
    found = state(read_run(folder), 9)
    return found.text, found.mood


def test_how_a_run_ended_or_that_it_lives_is_told(tmp_path):
    assert told(written(tmp_path)) == (
        "killed, or crashed, after step 3 of 9: last sign of life 60 min ago, and its process is gone",
        "bad",
    )
    assert told(written(tmp_path, here=False)) == (
        "no end is recorded: step 3 of 9, last sign of life 60 min ago on elsewhere; whether it still runs cannot be "
        "seen from here",
        "",
    )
    stopped = {"event": "ended", "how": "stopped", "reason": "SIGTERM"}
    assert told(written(tmp_path, stopped))[0] == "stopped by SIGTERM after step 3 of 9, which is not saved, 60 min ago"
    saved = {"event": "checkpoint", "held_s": 1, "time_s": 1}
    assert "which is saved" in told(written(tmp_path, saved, stopped))[0]
    failed = {"event": "ended", "how": "failed", "reason": "step 4: the loss is not finite"}
    assert told(written(tmp_path, failed)) == (
        "failed after step 3 of 9, 60 min ago: step 4: the loss is not finite",
        "bad",
    )
    finished = {"event": "ended", "how": "finished"}
    assert told(written(tmp_path, finished, steps=9)) == ("finished: 9 steps, which took 18 s, 60 min ago", "good")
    (tmp_path / "events.jsonl").unlink()
    assert (
        told(tmp_path)[0] == "not finished: step 9 of 9; its last line was written 60 min ago, and no end is recorded"
    )


def test_a_run_that_lives_holds_its_events(tmp_path):
    written(tmp_path, age=5)
    running = RunEvents(tmp_path, anew=False)
    running.started(3, steps=9)
    text, mood = told(tmp_path)
    assert re.match(r"still running: step 3 of 9, last sign of life \d+ s ago", text)
    assert mood == "good"
    written(tmp_path)  # the same file, still locked
    text, mood = told(tmp_path)
    assert text.endswith("last sign of life 60 min ago; that is long for steps of 2 s: is it stuck?")
    assert mood == "bad"
    running.ended(4, "failed", "x" * 9999)
    running.ended(4, "finished")  # only the first counts
    running.close()
    assert is_writing(tmp_path) is False
    *_, last = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (last["how"], len(last["reason"])) == ("failed", 2000)


def test_a_lost_process_is_not_blamed_for_the_end(tmp_path):
    """Rank 0 knows which connection broke, not who ended first: rank 3 was killed, and rank 2 went after it."""
    events = RunEvents(tmp_path, anew=True)
    events.ended(4, "failed", "vision->llm: rank 0 lost rank 2: Connection closed by peer")
    events.close()
    (last,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert last["reason"].startswith("a process was gone, and it may be another one than rank 0 names: vision->llm: ")


def test_a_run_that_went_on_counts_each_step_once(tmp_path):
    """Killed after step 5, resumed at step 3: no line of metrics.jsonl tells of the first steps 4 and 5 any more."""
    step = {"loss": 1.0, "time_s": 2.0}
    first = [step | {"step": i, "timestamp": 104.0 + 2 * i} for i in (1, 2, 3)]
    second = [step | {"step": i, "time_s": 1.0, "timestamp": 204.0 + i} for i in (4, 5, 6)]
    evaluated = {"step": 6, "timestamp": 211.0, "validation": {"loss": 0.5, "time_s": 1.0}}
    write_lines(tmp_path / "metrics.jsonl", [*first, *second, evaluated])
    write_lines(
        tmp_path / "events.jsonl",
        [
            {"event": "started", "step": 0, "timestamp": 103.0, "steps": 6, "ranks": 4},
            {"event": "checkpoint", "step": 3, "timestamp": 110.0, "held_s": 0.5, "time_s": 0.5},
            {"event": "started", "step": 3, "timestamp": 203.0, "steps": 6},
            {"event": "ended", "step": 6, "timestamp": 212.0, "how": "finished"},
            {"event": "other", "step": 6},
        ],
    )
    run = read_run(tmp_path)
    assert run.notes == (
        "1 line of events.jsonl cannot be read and are left out, first line 5: it must hold a JSON object with an "
        """event, a step and a timestamp, got '{"event": "other", "step": 6}'""",
    )
    assert [(each.step, each.how) for each in run.story.starts] == [(0, ""), (3, "finished")]
    assert run.story.saved == run.story.resumed == (3,)
    assert series(run.usual, "time_s").steps == (5, 6)  # since the last start, without its first
    assert state(run, None).text.startswith("finished: 6 steps, which took 9 s")


def test_a_run_without_a_step_says_how_it_ended(tmp_path, capsys):
    written(tmp_path, {"event": "ended", "how": "failed", "reason": "step 1: out of memory"}, steps=0)
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no step yet; there is nothing to show: failed after no step, 60 min ago: step 1: out of memory" in (
        capsys.readouterr().err
    )


def test_times():
    assert [ago(seconds) for seconds in (-3, 119, 120, 7300, 2e5)] == ["0 s", "119 s", "2 min", "2 h", "2 days"]
    assert when(1e300) == "?"
    assert when(0) == "1970-01-01 00:00:00"
