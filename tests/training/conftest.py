"""A World of one rank; running `hetmesh train` as a user does, with `faulty_sources` importable by its workers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked_command import ForkedCommand

from hetmesh.boundary import World, init
from support.signal_points import SignalPoint


@pytest.fixture
def world() -> Iterator[World]:
    """This process alone, closed after the test."""
    world = init()
    yield world
    world.close()


@pytest.fixture(scope="module")
def start_training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ForkedCommand]]:
    """`start_training(recipe, *overrides, points=())`: the command, started; leads a process group of its own."""
    started: list[ForkedCommand] = []

    def start(recipe: Path | str, *overrides: str, points: tuple[SignalPoint, ...] = ()) -> ForkedCommand:
        started.append(ForkedCommand((str(recipe), *overrides), tmp_path_factory.mktemp("printed"), points))
        return started[-1]

    yield start
    for command in started:
        command.kill()
