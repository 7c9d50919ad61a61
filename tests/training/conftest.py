"""A World of one rank; running `hetmesh train` as a user does, with `faulty_sources` importable by its workers."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetmesh.boundary import World, init

ROOT = Path(__file__).parents[2]


@pytest.fixture
def world() -> Iterator[World]:
    """This process alone, closed after the test."""
    world = init()
    yield world
    world.close()


@pytest.fixture(scope="module")
def start_training() -> Iterator[Callable[..., subprocess.Popen]]:
    """`start_training(recipe, *overrides)`: the command, started; leads a process group of its own."""
    started: list[subprocess.Popen] = []

    def start(recipe: Path | str, *overrides: str) -> subprocess.Popen:
        paths = (str(ROOT / "src"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        process = subprocess.Popen(
            [sys.executable, "-m", "hetmesh", "train", str(recipe), *overrides],
            env=env | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.communicate()
