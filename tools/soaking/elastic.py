"""`soak.py elastic`: four of torchrun's agents, of two ranks each, lose two of them and get two back: 8, 6, 4, 8 ranks.

Agents are killed (SIGKILL) at drawn moments: some steps after the run went on, or while it starts. The others start
their workers again, which take the layout of the ranks that are left from `[elastic]`; then two new agents come, and
torchrun ends the workers, which save. At last all agents get a SIGTERM. Each agent may be killed, so the store of the
rendezvous is in a process of its own. Of each run must be true: a start goes on from the newest checkpoint that was
complete when agents were killed, or from a later one; each start says in one line what has changed; the losses and
norms of each start are, to the last bit, those of a run of that layout alone from its checkpoint; the SIGTERM has saved
the last step; and no process is left.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetmesh.recipe.rewrite import rewritten
from soaking.kills import LAST_WORDS
from soaking.runs import ROOT, Results, Start, warm_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

AGENTS, EACH = 4, 2  # and ranks of each
WORDS = {8: "eight", 6: "six", 4: "four"}
LAYOUTS = {  # ranks: of the encoder, and of an LLM with tensor parallelism 2
    8: ("0-3", 4, "4-7", 2, 4),
    6: ("0-1", 2, "2-5", 2, 2),
    4: ("0-1", 2, "2-3", 1, 8),
}
TINY = {
    ("training", "global_batch_size"): 8,
    ("training", "steps"): 100_000,  # it is ended
    ("lr_scheduler", "total_steps"): 100_000,
    ("lr_scheduler", "warmup_steps"): 2,
    ("modules", "vision", "config", "num_hidden_layers"): 1,
    ("modules", "llm", "config", "num_hidden_layers"): 1,
    ("modules", "vision", "config", "attention_dropout"): 0.2,  # so that random state matters
    ("validation", "enable"): False,
    ("metrics", "enable_tensorboard"): False,
    ("profiling", "timeline"): False,
    ("checkpoint", "interval"): 3,
    ("checkpoint", "keep_latest_k"): 0,
}
RENDEZVOUS = {"is_host": 0, "last_call_timeout": 15, "keep_alive_interval": 3, "keep_alive_max_attempt": 6}
STORE = (
    "import sys, time; from torch.distributed import TCPStore\n"
    "store = TCPStore('127.0.0.1', int(sys.argv[1]), is_master=True, wait_for_workers=False, multi_tenant=True)\n"
    "print('ready', flush=True); time.sleep(1e6)"
)
START_S = 8.0  # in which a kill while a run starts comes


class Cluster:
    """Agents and what they have started.

    Args:
        folder: for recipes, results and what is printed.
        limit: seconds that anything may take.
    """

    def __init__(self, folder: Path, port: int, limit: float) -> None:
        self.folder, self.port, self.limit = folder, port, limit
        self.results = Results(folder / "run")
        self.agents: list[Start] = []
        self.started = 0
        write_recipes(folder)

    def add(self) -> None:
        """Start an agent."""
        conf = ",".join(f"{name}={value}" for name, value in RENDEZVOUS.items())
        command = (
            *("-m", "torch.distributed.run", "--nnodes", f"2:{AGENTS}", "--nproc-per-node", str(EACH)),
            *("--max-restarts", "50", "--rdzv-id", "soak", "--rdzv-backend", "c10d", "--local-addr", "127.0.0.1"),
            *("--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-conf", conf),
        )
        printed = self.folder / f"agent-{self.started}.txt"
        self.agents.append(Start((), printed, command, recipe=self.folder / "eight.toml", keys=()))
        self.started += 1

    def kill(self, which: int) -> str | None:
        """SIGKILL an agent, whose workers must end too; what went wrong, if anything did."""
        agent = self.agents.pop(which)
        with suppress(ProcessLookupError):
            os.kill(agent.pid, signal.SIGKILL)
        agent.wait(self.limit)
        left = agent.left_behind()
        return f"failure: a killed agent left the processes {left} behind" if left else None

    def starts(self) -> list[dict[str, Any]]:
        """The starts of the run: `step` and `ranks` of each."""
        return [event for event in lines(self.results.folder / "events.jsonl") if event.get("event") == "started"]

    def last_step(self) -> int:
        """That metrics.jsonl has."""
        return max((line["step"] for line in lines(self.results.folder / "metrics.jsonl")), default=0)

    def wait(self, there: Callable[[], bool]) -> bool:
        """Wait until something is true; False: it was not within the limit, or an agent has ended."""
        deadline = time.monotonic() + self.limit
        while not there():
            if time.monotonic() > deadline or any(agent.wait(0) for agent in self.agents):
                return False
            time.sleep(0.02)
        return True

    def wait_for(self, ranks: int, steps: int) -> bool:
        """Wait until the run has made so many steps on so many ranks."""

        def there() -> bool:
            starts = self.starts()
            return bool(starts) and starts[-1]["ranks"] == ranks and self.last_step() >= starts[-1]["step"] + steps

        return self.wait(there)

    def stuck(self, ranks: int) -> str:
        """Why waiting for steps on so many ranks has ended."""
        ended = [agent.status for agent in self.agents if agent.status is not None]
        return f"failure: agents ended with {ended}" if ended else f"hang: not on {ranks} ranks"

    def words(self) -> str:
        """The last ones of every agent."""
        files = sorted(self.folder.glob("agent-*.txt"))
        return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-LAST_WORDS:]}" for file in files)

    def end(self) -> str | None:
        """SIGTERM to all agents, as schedulers send it; what went wrong, if anything did."""
        for agent in self.agents:
            with suppress(ProcessLookupError):
                os.kill(agent.pid, signal.SIGTERM)
        for agent in self.agents:
            if not agent.wait(self.limit):
                return f"hang: an agent does not end within {self.limit:g} s of its SIGTERM"
            if left := agent.left_behind():
                return f"failure: an agent left the processes {left} behind"
        if self.results.step() != self.last_step():
            return f"failure: SIGTERM came after step {self.last_step()}, and step {self.results.step()} was saved"
        return None


def write_recipes(folder: Path) -> None:
    """The run of 8 ranks, and its layouts of 6 and 4."""
    text = rewritten((ROOT / "recipes" / "digits.toml").read_text(), TINY | {("job", "dump_folder"): f"{folder}/run"})
    for ranks, (vision, encoders, llm, lanes, local) in LAYOUTS.items():
        table = {
            "vision": {"ranks": vision, "data_parallel_replicate_degree": encoders},
            "llm": {"ranks": llm, "data_parallel_replicate_degree": lanes, "tensor_parallel_degree": 2},
        }
        values: dict[tuple[str, ...], Any] = {("parallelism",): table, ("training", "local_batch_size"): local}
        if ranks == max(LAYOUTS):
            values["elastic", "layouts"] = [f"{WORDS[each]}.toml" for each in (6, 4)]
        (folder / f"{WORDS[ranks]}.toml").write_text(rewritten(text, values))


def lines(path: Path) -> list[dict[str, Any]]:
    """Of a file of JSON lines, those that are complete."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def run(cluster: Cluster, rng: random.Random) -> tuple[str | None, list[str]]:
    """Lose two agents and get two back; what went wrong, if anything did, and what was done."""
    told: list[str] = []
    saved: list[tuple[int, int]] = []  # of each kill, how many starts there had been, and the newest checkpoint
    for _ in range(AGENTS):
        cluster.add()
    ranks = AGENTS * EACH
    for number in range(2):
        if number and rng.random() < 0.25:
            time.sleep(pause := rng.random() * START_S)
            when = f"{pause:.1f} s after the first, while it starts"
        else:
            if not cluster.wait_for(ranks, rng.randrange(4, 10)):
                return cluster.stuck(ranks), told
            time.sleep(rng.random() * 0.5)
            when = f"after step {cluster.last_step()}"
        saved.append((len(cluster.starts()), cluster.results.step()))
        which = rng.randrange(len(cluster.agents))
        told.append(f"agent {which} of {len(cluster.agents)} killed {when}, checkpoint of step {saved[-1][1]}")
        if problem := cluster.kill(which):
            return problem, told
        ranks -= EACH
    if not cluster.wait_for(ranks, rng.randrange(1, 8)):
        return cluster.stuck(ranks), told
    told.append(f"two agents come after step {cluster.last_step()}")
    for _ in range(2):
        cluster.add()
    if not cluster.wait_for(ranks := AGENTS * EACH, rng.randrange(2, 6)):
        return cluster.stuck(ranks), told
    starts = cluster.starts()
    for seen, newest in saved:
        if lost := [start["step"] for start in starts[seen:] if start["step"] < newest]:
            return f"failure: it went on after step {lost[0]}, and step {newest} was saved", told
    return cluster.end(), told


def compare(cluster: Cluster) -> str | None:
    """Whether each start made the steps of a run of its layout from its checkpoint, and said what changed."""
    starts, curve = cluster.starts(), cluster.results.curve()
    words = "".join(file.read_text(errors="replace") for file in cluster.folder.glob("agent-*.txt")).splitlines()
    for number, start in enumerate(starts):
        ranks, step = start["ranks"], start["step"]
        stop = min((later["step"] for later in starts[number + 1 :]), default=curve[-1][0])
        if number and ranks != (before := starts[number - 1]["ranks"]):
            parts = (
                f"elastic: {ranks} ranks ({WORDS[ranks]}.toml, step pred",
                f" in place of {before} (",
                f" step {step}",
            )
            if not any(all(part in line for part in parts) for line in words):
                return f"failure: no line says that it went from {before} to {ranks} ranks after step {step}"
        if stop <= step:
            continue
        folder = cluster.folder / f"reference-{number}"
        if step:
            shutil.copytree(cluster.results.checkpoints / f"step-{step}", folder / "checkpoint" / f"step-{step}")
        keys = ("--job.dump_folder", str(folder), "--training.steps", str(stop), "--checkpoint.interval", "100000")
        recipe = cluster.folder / f"{WORDS[ranks]}.toml"
        reference = Start(keys, cluster.folder / "reference.txt", recipe=recipe, keys=())
        if not reference.wait(cluster.limit) or reference.status:
            reference.kill()
            return f"failure: {recipe.name} alone from step {step}: status {reference.status}\n{reference.words}"
        found = [line for line in curve if step < line[0] <= stop]
        if (truth := Results(folder).curve()) != found:
            pairs = zip(found, truth, strict=False)
            first = next((pair for pair in pairs if pair[0] != pair[1]), (len(found), len(truth)))
            return f"failure: {ranks} ranks from step {step} on: {first[0]}, and a run in that layout {first[1]}"
        shutil.rmtree(folder)
    return None


@contextmanager
def store() -> Iterator[int]:
    """Host a rendezvous; its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, "-c", STORE, str(port)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield port
        finally:
            process.kill()


def soak(n: int, limit: float, before: dict[str, Any], seed: int, first: int | None) -> dict[str, Any]:
    """`n` runs; the counts together with those of `before`."""
    seconds, wrong = list(before.get("seconds", [])), list(before.get("wrong", []))
    ranks: list[Sequence[int]] = list(before.get("ranks", []))
    begin = before.get("next_draw", 0) if first is None else first
    warm_up()
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see cli/README.md
    for number in range(begin, begin + n):
        started, top = time.perf_counter(), Path(tempfile.mkdtemp(prefix="hetmesh-soak-"))
        try:
            with store() as port:
                cluster = Cluster(top, port, limit)
                try:
                    problem, told = run(cluster, random.Random(f"{seed}/{number}/elastic"))
                    problem = problem or compare(cluster)
                finally:
                    for agent in cluster.agents:
                        agent.kill()
            ranks.append([start["ranks"] for start in cluster.starts()])
            if problem:
                steps = [(start["ranks"], start["step"]) for start in cluster.starts()]
                wrong.append(f"{problem} (draw {number} of seed {seed}); {told}; starts {steps}\n{cluster.words()}")
            seconds.append(round(time.perf_counter() - started, 2))
            print(f"{number}: {ranks[-1]} {seconds[-1]} s {problem or ''}", file=sys.stderr, flush=True)
        finally:
            shutil.rmtree(top, ignore_errors=True)
    return {"n": len(seconds), "next_draw": begin + n, "seed": seed, "ranks": ranks, "wrong": wrong, "seconds": seconds}
