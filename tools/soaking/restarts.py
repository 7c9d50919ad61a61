"""`soak.py restarts`: workers of `torchrun --max-restarts` are killed, and the same command goes on to the end.

After a drawn number of steps a drawn worker is killed, or all of them, twice in each command. torchrun starts all
workers again, which resume from the newest checkpoint. The losses, norms and summary are those of the run that nobody
killed, and no process is left. In the last of several commands torchrun itself is killed: its workers must end too.
"""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from os import kill
from pathlib import Path
from typing import Any

from soaking.kills import LAST_WORDS, Usual
from soaking.runs import STEPS, Results, Start, warm_up

KILLS = 2
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--max-restarts", str(KILLS))
KEYS = ("--checkpoint.enable", "true", "--checkpoint.interval", "1", "--checkpoint.async_mode", "async")


def command(folder: Path, usual: Usual, rng: random.Random, limit: float, end: bool) -> str | None:
    """One command, its workers killed twice, or with `end` torchrun once; what went wrong, if anything did."""
    results = Results(folder / "run")
    start = Start((*KEYS, "--job.dump_folder", str(results.asked)), folder / "printed.txt", TORCHRUN)
    told = []
    try:
        for number in range(1 if end else KILLS):
            step = rng.randrange(1, STEPS - 1)
            start.wait(limit, lambda at=step: results.step() >= at)
            if not (workers := start.children()):
                break
            pids = [start.pid] if end else rng.choice([workers, [rng.choice(workers)]])
            told.append(f"kill {number + 1} of {len(pids)} at step {step}")
            for pid in pids:
                with suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
            start.wait(limit, lambda old=workers: bool(found := start.children()) and not {*found} & {*old})
        if not start.wait(limit):
            start.kill(signal.SIGABRT)
            return f"hang: no end within {limit:g} s; {told}\n{start.words[-LAST_WORDS:]}"
        if left := start.left_behind():
            return f"failure: it left the processes {left} behind; {told}"
        if end and told:
            return None
        if (
            len(told) < KILLS
            or start.status
            or start.words.count("resuming at step") < 1
            or results.curve() != usual.curve
        ):
            curve = results.curve() if start.status == 0 else ""
            return f"failure: exit status {start.status}; {told} {curve}\n{start.words[-LAST_WORDS:]}"
        return None if results.summary() == usual.summary else f"failure: the summary is {results.summary()}"
    finally:
        start.kill()


def soak(n: int, limit: float, before: dict[str, Any], seed: int, first: int | None) -> dict[str, Any]:
    """`n` commands; the counts together with those of `before`."""
    seconds, wrong = list(before.get("seconds", [])), list(before.get("wrong", []))
    begin = before.get("next_draw", 0) if first is None else first
    warm_up()
    top = Path(tempfile.mkdtemp(prefix="hetmesh-soak-"))
    try:
        usual = Usual.measure(top, limit)
        for number in range(begin, begin + n):
            started, folder = time.perf_counter(), top / f"command-{number}"
            folder.mkdir()
            problem = command(
                folder, usual, random.Random(f"{seed}/{number}/restart"), limit, number == begin + n - 1 > begin
            )
            wrong += [f"{problem} (draw {number} of seed {seed})"] if problem else []
            seconds.append(round(time.perf_counter() - started, 2))
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(top, ignore_errors=True)
    return {"n": len(seconds), "next_draw": begin + n, "seed": seed, "wrong": wrong, "seconds": seconds}
