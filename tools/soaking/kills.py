"""`soak.py kills`: SIGKILL at drawn moments of a run of four workers, which is started again until it ends.

A chain is one run: its starts are killed, each at a moment of its own, until one ends by itself, or after six kills.
Whom a kill meets and when is drawn from the seed and the number of the draw: one worker, one of the processes that load
samples, all workers, the command, or its whole process group (the command too where there is no such process yet); half
of the kills at a moment of the time that is left, half of them inside a save. Chains differ in how they save and load.
After every kill nobody may be left behind, a command that was not killed itself must say what happened in one line, and
the next start must go on from the newest checkpoint.
At its end a chain has the losses, norms and summary of the run that nobody killed, bit by bit, and no stray files.
"""

from __future__ import annotations

import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from os import kill, killpg
from pathlib import Path
from typing import Any

from soaking.runs import STEPS, Results, Start, warm_up

TARGETS = ("worker 0", "worker 1", "worker 2", "worker 3", *("loader",) * 4, "all workers", "command", "group")
LOADERS = "0122"  # processes per worker that load samples
DRAWN_FROM = {"targets": list(TARGETS), "loaders": LOADERS}
EARLIER = {"targets": list(dict.fromkeys(TARGETS)), "loaders": "01"}  # of files that do not say
MOST_KILLS = 6  # of a chain
LAST_WORDS = 3000


@dataclass(frozen=True)
class Kill:
    """Who is killed, and when: after `share` of the time that a start has left, or of a save. Of several that load
    samples `which`, a share of their number, tells one."""

    number: int
    target: str
    inside_save: bool
    share: float
    which: float

    @classmethod
    def draw(cls, seed: int, number: int) -> Kill:
        """The same for the same arguments."""
        rng = random.Random(f"{seed}/{number}")
        return cls(number, rng.choice(TARGETS), rng.random() < 0.5, rng.random(), rng.random())


def variant(seed: int, number: int) -> tuple[str, ...]:
    """How the chain that begins with draw `number` saves and loads."""
    rng = random.Random(f"{seed}/{number}/variant")
    mode, interval, loaders = rng.choice(("async", "disabled")), rng.choice("12"), rng.choice(LOADERS)
    return (
        *("--checkpoint.enable", "true", "--checkpoint.async_mode", mode, "--checkpoint.interval", interval),
        *("--data.num_workers", loaders),
    )


@dataclass(frozen=True)
class Usual:
    """The run that nobody kills: what it left, and its seconds until the first step, in all, and of a save."""

    curve: list[tuple[Any, ...]]
    summary: dict[str, Any]
    starting: float
    whole: float
    save: float

    @classmethod
    def measure(cls, folder: Path, limit: float) -> Usual:
        """One run without checkpoints for the curve, one that saves every step for the times.

        Raises:
            RuntimeError: they fail, or differ.
        """
        runs = []
        for name, more in (("plain", ("--checkpoint.enable", "false")), ("saving", ("--checkpoint.interval", "1"))):
            results = Results(folder / name)
            start = Start((*more, "--job.dump_folder", str(results.asked)), folder / f"{name}.txt")
            metrics = results.folder / "metrics.jsonl"
            times = [start.when(lambda m=metrics: m.exists() and m.stat().st_size > 0, limit)]
            if name == "saving":
                times += [start.when(results.saving, limit), start.when(lambda r=results: not r.saving(), limit)]
            times.append(start.when(lambda: False, limit))
            if start.status != 0:
                start.kill(signal.SIGABRT)
                raise RuntimeError(f"the run that nobody kills fails\n{start.words[-LAST_WORDS:]}")
            runs.append((results.curve(), results.summary()))
        if runs[0] != runs[1]:
            raise RuntimeError(f"saving changes the run: {runs}")
        starting, began, ended, whole = times
        return cls(*runs[0], starting, whole, ended - began)


class Chain:
    """One run, started until it ends.

    Args:
        folder: for all that it leaves.
        first: its first draw.
    """

    def __init__(self, folder: Path, usual: Usual, seed: int, first: int, limit: float) -> None:
        self.usual, self.seed, self.limit, self.next = usual, seed, limit, first
        self.results, self.arguments = Results(folder / "run"), variant(seed, first)
        self.told = f"chain from draw {first} of seed {seed} ({' '.join(self.arguments[3:])})"
        self.kills: list[str] = []
        self.starts = 0
        self._printed = folder / "printed.txt"

    def run(self, most: int) -> str | None:
        """Kill it, at most `most` times; what went wrong, if anything did."""
        while True:
            planned = Kill.draw(self.seed, self.next) if len(self.kills) < min(most, MOST_KILLS) else None
            problem, ended = self._start(planned)
            if problem:
                told = "".join(f"\n  {text}" for text in self.kills)
                return f"{problem}\nin start {self.starts} of the {self.told}{told}\n{self._words()}"
            if ended:
                return None

    def _words(self) -> str:
        return self._printed.read_text(errors="replace")[-LAST_WORDS:]

    def _start(self, planned: Kill | None) -> tuple[str | None, bool]:
        """One start; what went wrong, and whether the run has ended."""
        step, began = self.results.step(), time.time()
        start = Start((*self.arguments, "--job.dump_folder", str(self.results.asked)), self._printed)
        self.starts += 1
        try:
            killed = planned is not None and self._strike(start, planned, step, began)
            self.next += planned is not None
            if not start.wait(self.limit):
                start.kill(signal.SIGABRT)
                return f"hang: no end within {self.limit:g} s", False
            if left := start.left_behind():
                return f"failure: it left the processes {left} behind", False
            return self._judge(start, step, killed), not killed or start.status == 0
        finally:
            start.kill()

    def _strike(self, start: Start, planned: Kill, step: int, began: float) -> bool:
        """Wait for the moment and kill; False: the run had ended."""
        usual = self.usual
        if planned.inside_save:
            start.wait(self.limit, lambda: self.results.saving(began))
            start.wait(planned.share * usual.save)
        else:
            left = usual.starting + (usual.whole - usual.starting) * (STEPS - step) / STEPS
            start.wait(planned.share * left)
        if start.status is not None:
            return False
        phase, workers = self.results.phase(began), start.children()
        found = {f"worker {rank}": [pid] for rank, pid in enumerate(workers)}
        loaders = [pid for worker in workers for pid in start.children(worker)]
        found |= {"loader": loaders[int(planned.which * len(loaders)) :][:1], "all workers": workers}
        pids = found.get(planned.target, [])
        if planned.target == "group":
            killpg(start.pid, signal.SIGKILL)
        for pid in pids or [start.pid] * (planned.target != "group"):
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        target = planned.target if pids or planned.target == "group" else "command"
        after = time.monotonic() - start.began
        self.kills.append(f"{target}, {phase}: draw {planned.number}, {after:.3f} s after start {self.starts}")
        return True

    def _judge(self, start: Start, step: int, killed: bool) -> str | None:
        """What is wrong with a start that has ended and went on from the checkpoint of `step`."""
        words = start.words
        if "Traceback" in words:
            return "failure: a traceback"
        if killed and start.status:
            aloud = [line for line in words.splitlines() if line.startswith("error: ")]
            if start.status > 0 and len(aloud) != 1:
                return f"failure: exit status {start.status} with {len(aloud)} lines of errors"
            return None if start.status in (1, -signal.SIGKILL) else f"failure: exit status {start.status}"
        if start.status:
            return f"failure: exit status {start.status}"
        if step and f"resuming at step {step} of" not in words and "is finished" not in words:
            return f"failure: it did not resume at step {step}"
        if self.results.curve() != self.usual.curve:
            return f"failure: the curve is {self.results.curve()}, not {self.usual.curve}"
        if self.results.summary() != self.usual.summary:
            return f"failure: the summary is {self.results.summary()}, not {self.usual.summary}"
        strays = self.results.strays()
        return f"failure: left in the folder of checkpoints: {strays}" if strays else None


def soak(n: int, limit: float, before: dict[str, Any], seed: int, first: int | None) -> dict[str, Any]:
    """Kill `n` times; the counts together with those of `before`.

    Args:
        limit: seconds after which a start counts as a hang.
        first: the draw to begin with; None: the one after those of `before`.
    """
    number = before.get("next_draw", 0) if first is None else first
    seconds, wrong = list(before.get("seconds", [])), list(before.get("wrong", []))
    met, chains, made = Counter(before.get("met", {})), before.get("chains", 0), 0
    versions = before.get("drawn_from") or ([{"kills": before["n"], **EARLIER}] if before.get("n") else [])
    if not versions or {k: v for k, v in versions[-1].items() if k != "kills"} != DRAWN_FROM:
        versions = [*versions, {"kills": 0, **DRAWN_FROM}]
    kills_before = versions[-1]["kills"]
    warm_up()
    top = Path(tempfile.mkdtemp(prefix="hetmesh-soak-"))
    try:
        usual = Usual.measure(top, limit)
        while made < n:
            folder, started = top / f"chain-{number}", time.perf_counter()
            folder.mkdir()
            chain = Chain(folder, usual, seed, number, limit)
            problem = chain.run(n - made)
            number, chains, made = chain.next, chains + 1, made + len(chain.kills)
            met.update(text.partition(":")[0] for text in chain.kills)
            seconds += [round((time.perf_counter() - started) / max(1, len(chain.kills)), 2)] * len(chain.kills)
            wrong += [problem] * bool(problem)
            if problem or sys.stderr.isatty():
                print(f"{made}/{n} kills, {len(wrong)} wrong {problem or ''}", file=sys.stderr, flush=True)
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(top, ignore_errors=True)
    return {
        "n": len(seconds),
        "chains": chains,
        "next_draw": number,
        "seed": seed,
        "drawn_from": [*versions[:-1], {**versions[-1], "kills": kills_before + made}],
        "met": dict(sorted(met.items())),
        "wrong": wrong,
        "seconds": seconds,
    }
