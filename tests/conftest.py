"""What all tests share: the worker pools, tiny models in directories, and a deterministic hypothesis."""

from __future__ import annotations

import gc
import os
import runpy
import tempfile
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:  # fixtures import what they need: the process that only hands out tests would take 4 s for it
    from hetmesh.boundary import World
    from hetmesh.testing.pool import WorkerPool
    from support.forked import Forked

# The same examples on every run and machine; timings of a shared machine are no reason to fail.
settings.register_profile(
    "hetmesh", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("hetmesh")

SHIM = Path(__file__).parent / "support" / "torchvision_shim"
"""For this process, and for workers and commands that tests start."""
runpy.run_path(str(SHIM / "sitecustomize.py"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SHIM), os.environ.get("PYTHONPATH"))))

_CACHE = tempfile.TemporaryDirectory(prefix="hetmesh-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name  # nothing is kept for the user's own runs


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--emulate-nccl`: workers send over emulated NCCL. For tests of parity; those of gloo's own ways would fail."""
    parser.addoption("--emulate-nccl", action="store_true", help="workers of the pools send over emulated NCCL")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the garbage collector, which would look through all that is imported again and again: 5 s of 14."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the two processes that run tests, one runs all that need a worker pool: they share it, and are slow. What is
    `exhaustive` runs only where `-m` names it (as a default of `-m` it would be lost with every other `-m`). Slow tests
    come first."""
    import torch

    # Threads of one process that wait for each other take the cores from the other processes: tiny models then compute
    # ten times as long.
    torch.set_num_threads(1)
    if "exhaustive" not in config.option.markexpr:
        left_out = {item for item in items if item.get_closest_marker("exhaustive")}
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        group = next((name for name in ("pool", "apart") if name in getattr(item, "fixturenames", ())), None)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # long ones first


@pytest.fixture(scope="session")
def apart() -> Iterator[Callable[..., Any]]:
    """`apart(function, *arguments)`: what it returns or raises in a process of its own, started by the first call: the
    fake device stays a device of its process to the end of it."""
    import torch

    from support.forked import PRELOAD

    context = get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD])
    with ProcessPoolExecutor(1, context, torch.set_num_threads, (1,)) as process:
        yield lambda function, *arguments: process.submit(function, *arguments).result()


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[Callable[[int], WorkerPool]]:
    """`pool(n)`: the session's pool of n workers. Started by its first `run`, kept to the end of the session."""
    from hetmesh.testing.emulated_nccl import emulate
    from hetmesh.testing.pool import WorkerPool
    from support.forked import PRELOAD

    pools: dict[int, WorkerPool] = {}
    begin = emulate if request.config.getoption("--emulate-nccl") else None

    def get(size: int) -> WorkerPool:
        return pools.setdefault(size, WorkerPool(size, preload=PRELOAD, begin=begin))

    yield get
    for each in pools.values():
        each.close()


@pytest.fixture(scope="session")
def pool4(pool: Callable[[int], WorkerPool]) -> WorkerPool:
    """The session's pool of 4 workers."""
    return pool(4)


@pytest.fixture(scope="session")
def pool8(pool: Callable[[int], WorkerPool]) -> WorkerPool:
    """The session's pool of 8 workers."""
    return pool(8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`directory(name)`: the model of `tiny_vlms` of that name as a directory, saved once per module."""
    from support import tiny_vlms

    folder = tmp_path_factory.mktemp("tiny")

    def saved(name: str) -> Path:
        return folder / name if (folder / name).exists() else tiny_vlms.save(name, folder)

    return saved


@pytest.fixture(scope="session")
def processors(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`processors(model_type)`: a directory with the processor of that type (`tiny_processors`), made once. Not for
    changing."""
    from support import tiny_processors

    folder = tmp_path_factory.mktemp("processors")

    def saved(name: str) -> Path:
        return folder / name if (folder / name).exists() else tiny_processors.save(name, folder / name)

    return saved


@pytest.fixture
def world() -> Iterator[World]:
    """This process alone, closed after the test."""
    import hetmesh

    world = hetmesh.init()
    yield world
    world.close()


@pytest.fixture(scope="module")
def start_forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Forked]]:
    """`start_forked(function, *arguments)`: a process of `support/forked.py`, started; ends with the module's tests."""
    from support.forked import Forked

    started: list[Forked] = []

    def start(function: Callable[..., int], *arguments: Any, **how: Any) -> Forked:
        started.append(Forked(function, arguments, tmp_path_factory.mktemp("printed"), **how))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture(scope="module")
def start_training(start_forked: Callable[..., Forked]) -> Callable[..., Forked]:
    """`start_training(recipe, *overrides, points=())`: `hetmesh train`, started; leads a process group of its own."""
    from support.forked import train

    return lambda recipe, *overrides, **how: start_forked(train, str(recipe), *overrides, **how)
