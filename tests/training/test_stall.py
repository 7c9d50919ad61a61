"""A rank that stalls ends the job within the timeout, with one error that says who waited for what."""

import re
import time
from pathlib import Path

import pytest

from hetmesh.boundary.watchdog import EXIT_CODE
from hetmesh.data.digits import DigitsSource
from hetmesh.data.loader import Loader

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("stall")]  # one process has both jobs, and so waits once

RECIPES = Path(__file__).parents[2] / "recipes"
BATCH, TIMEOUT = 8, 5
GRACE = 20  # s for the launcher to find and end the other ranks; long, since test machines are busy
FIRST, *_, LAST = Loader(DigitsSource(), BATCH).indices(2)  # of step 3


@pytest.fixture(scope="module")
def stalled(start_training, tmp_path_factory):
    """A job of four ranks of which rank 1 stalls in step 3, and one of a single rank; started at the same time.

    Each is a process and its dump folder.
    """

    def start(name, *overrides):
        folder = tmp_path_factory.mktemp(name)
        process = start_training(
            RECIPES / f"{name}.toml",
            *("--data.source", "support.faulty_sources:FaultyDigits", "--data.options.fault", "stall"),
            *("--training.local_batch_size", str(BATCH), "--metrics.enable_tensorboard", "false"),
            *("--job.dump_folder", str(folder), *overrides),
        )
        return process, folder

    at = ("--data.options.at", str(LAST), "--data.options.rank", "1")
    four = start("digits", *at, "--comm.train_timeout_seconds", str(TIMEOUT))
    alone = start("digits_single", "--data.options.at", str(FIRST), "--comm.train_timeout_seconds", str(TIMEOUT))
    return four, alone


def test_ranks_that_wait_for_a_stalled_one_name_the_boundary(stalled):
    (process, folder), _ = stalled
    _, err = process.communicate(timeout=300)
    seconds = time.time() - (folder / "metrics.jsonl").stat().st_mtime  # since step 2
    assert process.returncode == 1, err
    # Rank 1 is the second lane of the encoder: both LLM ranks lack its rows, and so rank 0 its gradients.
    says = (
        r"boundary 'vision->projector', microbatch 0, (forward|backward): rank \1 waited 5 s for (rank \d|a collective)"
    )
    assert re.fullmatch(rf"error: rank (\d): {says}\n", err), err
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert TIMEOUT < seconds < TIMEOUT + GRACE


def test_the_watchdog_ends_a_process_that_stalls_with_nobody_waiting(stalled):
    _, (process, folder) = stalled
    _, err = process.communicate(timeout=300)
    assert process.returncode == EXIT_CODE, err
    first, *stacks = err.splitlines()
    assert first == f"watchdog: vision.0 F0 on rank 0 did not finish within {TIMEOUT} s"
    assert any("faulty_sources.py" in line and "load" in line for line in stacks)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
