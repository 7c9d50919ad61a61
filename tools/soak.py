"""Start hetmesh's workers again and again: what hangs one time in fifty is found here, and not by a user.

    python tools/soak.py launches --n 300          # whole commands: hetmesh train, four workers, one step
    python tools/soak.py pools --n 300             # worker pools of hetmesh.testing, to their first collective
    python tools/soak.py kills --n 200             # a run of four workers, killed anywhere and started again
    python tools/soak.py restarts --n 5            # workers of torchrun --max-restarts are killed
    python tools/soak.py elastic --n 20            # torchrun's agents are killed, and others come: 8, 6, 4, 8 ranks
    python tools/soak.py launches --n 300 --json   # one JSON object, and nothing else on standard output

`--output FILE` also keeps the JSON object; with `--add` the counts and seconds that FILE holds are added to. The exit
status is 0 if nothing hung or failed. A hanging command is ended with SIGABRT; its last words hold every stack.
Kills are drawn: `--add` goes on with the next draw, and `--seed S --first K --n 1` tries one again (soaking/kills.py).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kept import stamp

JUDGES = {
    "launches": ("src/hetmesh/boundary", "src/hetmesh/cli", "src/hetmesh/training", "tools/soak.py"),
    "pools": ("src/hetmesh/boundary", "src/hetmesh/testing/pool.py", "src/hetmesh/_processes.py", "tools/soak.py"),
    "kills": ("src/hetmesh/boundary", "src/hetmesh/cli", "src/hetmesh/data", "src/hetmesh/training", "tools/soaking"),
    "restarts": ("src/hetmesh/boundary", "src/hetmesh/cli", "src/hetmesh/training", "tools/soaking"),
    "elastic": ("src/hetmesh/boundary", "src/hetmesh/cli", "src/hetmesh/training", "tools/soaking"),
}
"""What an output of each judges (`kept.py`)."""

ROOT = Path(__file__).parents[1]
COMMAND = (
    *("-m", "hetmesh", "train", str(ROOT / "recipes" / "digits.toml"), "--training.steps", "1"),
    *("--training.local_batch_size", "8", "--validation.samples", "4", "--metrics.enable_tensorboard", "false"),
)
LAST_WORDS = 3000  # characters of what a launch printed that are kept if it hung or failed


def launch(seconds: float) -> str | None:
    """Run one `hetmesh train` to its end; what went wrong, if anything did."""
    with tempfile.TemporaryDirectory(prefix="hetmesh-soak-") as folder:
        process = subprocess.Popen(
            [sys.executable, *COMMAND, "--job.dump_folder", folder],
            cwd=ROOT,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)
            out, _ = process.communicate()
            return f"hang: no end within {seconds:g} s\n{out[-LAST_WORDS:]}"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
            return f"failure: it left processes behind\n{out[-LAST_WORDS:]}"
        if process.returncode:
            return f"failure: exit status {process.returncode}\n{out[-LAST_WORDS:]}"
    return None


def pool(seconds: float) -> str | None:
    """Start a pool of four workers and add numbers in it; what went wrong, if anything did."""
    from hetmesh.testing.pool import WorkerError, WorkerPool

    try:
        with WorkerPool(4, start_timeout=seconds) as workers:
            found = workers.run(sum_of_ranks, timeout=seconds)
    except WorkerError as error:
        return f"{'hang' if 'no answer within' in str(error) else 'failure'}: {error}"[:LAST_WORDS]
    return None if found == [6.0] * 4 else f"failure: the sums are {found}"


def sum_of_ranks(rank: int) -> float:
    """0 + 1 + 2 + 3, by all four workers."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return total.item()


KINDS: dict[str, Callable[[float], str | None]] = {"launches": launch, "pools": pool}

DRAWN = ("kills", "restarts", "elastic")  # modules of soaking/


def soak(kind: str, n: int, limit: float, before: dict[str, Any]) -> dict[str, Any]:
    """Repeat `n` times; the counts together with those of `before`."""
    seconds: list[float] = list(before.get("seconds", []))
    wrong: list[str] = list(before.get("wrong", []))
    for i in range(n):
        started = time.perf_counter()
        if problem := KINDS[kind](limit):
            wrong.append(problem)
        seconds.append(round(time.perf_counter() - started, 2))
        if sys.stderr.isatty():
            print(f"\r{i + 1}/{n}, {len(wrong)} wrong", end="", file=sys.stderr, flush=True)
    return {"n": len(seconds), "wrong": wrong, "seconds": seconds}


def counted(kind: str, found: dict[str, Any], limit: float) -> dict[str, Any]:
    """What was found, with the figures that follow from it."""
    return {
        "kind": kind,
        "n": found["n"],
        "hangs": sum(text.startswith("hang") for text in found["wrong"]),
        "failures": sum(text.startswith("failure") for text in found["wrong"]),
        "median_seconds": median(found["seconds"]),
        "max_seconds": max(found["seconds"]),
        "limit_seconds": limit,
        "cores": os.cpu_count(),
        **found,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run one soak test; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*KINDS, *DRAWN], help="what to start")
    parser.add_argument("--n", type=int, default=300, help="how often (default 300)")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds after which a start counts as a hang")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a line")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON object to FILE")
    parser.add_argument("--add", action="store_true", help="add to what FILE holds")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn for kills and restarts (default 0)")
    parser.add_argument("--first", type=int, metavar="K", help="the draw to begin with")
    args = parser.parse_args(argv)
    if args.n < 1:
        parser.error("--n must be at least 1")
    before = json.loads(args.output.read_text()) if args.add and args.output and args.output.exists() else {}
    of = stamp(JUDGES[args.kind], before=before.get("kept"))
    if args.kind in DRAWN:
        module = importlib.import_module(f"soaking.{args.kind}")
        found = module.soak(args.n, args.limit, before, args.seed, args.first)
    else:
        found = soak(args.kind, args.n, args.limit, before)
    result = counted(args.kind, found, args.limit) | {"kept": of}
    text = json.dumps(result)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text + "\n", encoding="utf-8")
    line = "{n} {kind}: {hangs} hangs, {failures} failures; {median_seconds} s each (median), {max_seconds} s at most"
    print(text if args.json else "\n".join([line.format(**result), *result["wrong"]]))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
