"""Local workers that fail, each way once: one error, a non-zero status, nobody left behind."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from support.often import some

ROOT = Path(__file__).parents[2]

SCRIPT = """
import os, sys, threading, time, types

os.register_at_fork(before=lambda: print(f"forked with {len(os.listdir('/proc/self/task'))} threads", flush=True))

def train(recipe):
    import torch, torch.distributed as dist
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    print(f"pid {os.getpid()} threads {torch.get_num_threads()}", flush=True)
    dist.all_reduce(torch.ones(1))  # everybody has printed
    HOW
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()

trainer = sys.modules["hetmesh.api"] = types.ModuleType("hetmesh.api")
trainer.run_recipe = train
from hetmesh.cli import main
sys.exit(main(["train", "recipes/digits.toml"]))
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")]


def run(how: str) -> int:
    os.environ.pop("OMP_NUM_THREADS")
    os.chdir(ROOT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also if we run in the background
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # or under nohup
    exec(SCRIPT.replace("HOW", how), {"__name__": "__main__"})
    return 0


@pytest.fixture(scope="module")
def start(start_forked):
    """`start(how)`: the command, whose ranks do that."""
    return lambda how: start_forked(run, how)


def assert_gone(out: str) -> None:
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", out)]
    assert len(pids) == 4
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"workers {alive} are still there"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        (
            "if rank == 2: from hetmesh.errors import SampleError; raise SampleError('sample d7: 3 images')",
            "error: rank 2: sample d7: 3 images\n",
        ),
        ("if rank == 3: os.kill(os.getpid(), 9)", "error: rank 3: ended by signal SIGKILL (out of memory?)\n"),
    ],
    ids=["bad sample", "killed"],
)
def test_a_failing_worker_is_one_line(start, how, error):
    process = start(how)
    out, err = process.communicate(timeout=120)
    assert err == error
    assert process.returncode == 1
    assert_gone(out)


def test_a_bug_shows_its_traceback_once(start):
    process = start("if rank == 1: {}['x']")
    out, err = process.communicate(timeout=120)
    assert err.count("Traceback") == 1
    assert err.endswith("KeyError: 'x'\nerror: rank 1: KeyError: 'x'\n")
    assert process.returncode == 1
    assert_gone(out)


@pytest.mark.parametrize(
    "kill", some((signal.SIGTERM, signal.SIGKILL), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL))
)
def test_ending_the_command_ends_its_workers(start, kill):
    process = start("time.sleep(600)")
    out = process.printed("pid ", 4)
    if kill != signal.SIGKILL:
        send = os.killpg if kill == signal.SIGINT else os.kill  # Ctrl-C in a terminal reaches the workers too
        send(process.pid, kill)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (128 + kill, "interrupted\n")
    else:
        os.kill(process.pid, kill)
        process.communicate(timeout=60)
    assert_gone(out)


def test_workers_are_forked_from_one_thread_and_end_cleanly(start):
    process = start("pass")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    cores = len(os.sched_getaffinity(0))
    assert re.findall(r"pid \d+ threads (\d+)", out) == [str(cores // 4 if cores > 4 else 1)] * 4
    assert_gone(out)
    assert set(re.findall(r"forked with (\d+) threads", out)) == {"1"}
