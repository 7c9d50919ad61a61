"""Steps are planned ahead by another thread: the same steps in order; what is wrong is said when its step comes."""

import threading
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hetmesh import boundary, layout
from hetmesh.boundary.accelerator import Accelerator
from hetmesh.data import Loader
from hetmesh.data.digits import DigitsSource
from hetmesh.data.payloads import Payloads, SplitSources
from hetmesh.errors import SampleError
from hetmesh.graph import Edge
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.runtime import step_transfers
from hetmesh.training.job import Job
from hetmesh.training.upcoming import AHEAD, Background, Upcoming

RECIPES = Path(__file__).parents[2] / "recipes"
BATCH = 16


class Broken(DigitsSource):
    """The metadata of sample `at` cannot be read; notes which threads ask."""

    def __init__(self, at=-1):
        super().__init__("train")
        self.at, self.threads = at, set()

    def meta(self, index):
        self.threads.add(threading.current_thread())
        if index == self.at:
            raise SampleError(f"sample {self._id(index)!r}: its header is broken")
        return super().meta(index)


class Noted(Payloads):
    """Payloads that are loaded here, and keep what was announced."""

    def __init__(self, sources):
        super().__init__(sources)
        self.announced, self.more = [], None

    def announce(self, requests):
        self.announced.append([wanted.index for request in requests for wanted in request])

    def when_idle(self, more):
        self.more = more


def job_of(recipe="digits_overlapping", source=None, rank=1, workers=0):
    """The part of a job that plans."""
    source = source or Broken()
    size = "16" if recipe == "digits_cp_pp" else "8"
    keys = ["--training.local_batch_size", size, "--data.num_workers", str(workers)]
    resolved = resolve(load_recipe(RECIPES / f"{recipe}.toml", keys), source)
    payloads = Noted(SplitSources({"train": lambda: source}))
    loader = Loader(source, BATCH, resolved.expander, payloads=payloads)
    world = SimpleNamespace(rank=rank, ranks_per_node=None, device=torch.device("cpu"), accelerator=Accelerator())
    return Job(resolved, world, loader, None, {}, None)


def upcoming_of(job, last):
    return Upcoming(job.loader, job.plan_step, last, AHEAD[job.recipe.data.num_workers > 0])


def plain(step):
    return step.drawn.indices, step.plan.lanes, list(step.schedule.of_rank(1))


@pytest.mark.parametrize("workers", [0, 1])
def test_steps_begin_where_the_loader_was_brought(workers):
    """By somebody's own loop, when later steps were planned already."""
    job, other = job_of(workers=workers), job_of()
    position = Loader(job.loader.source, 5).state_dict() | {"step": 1, "sample": 5}
    upcoming = upcoming_of(job, 9)
    try:
        upcoming.take()
        upcoming.settle()
        for loader in (job.loader, other.loader):
            loader.load_state_dict(position)
        assert [plain(upcoming.take()) for _ in range(3)] == [plain(other.plan_step(number)) for number in (1, 2, 3)]
    finally:
        upcoming.close()


def test_steps_come_in_order_and_are_planned_by_another_thread():
    job = job_of()
    expected = [plain(job.plan_step(number)) for number in range(4)]
    job.loader.source.threads.clear()
    upcoming = upcoming_of(job, 4)
    try:
        assert [plain(upcoming.take()) for _ in range(4)] == expected
        upcoming.settle()
        assert threading.current_thread() not in job.loader.source.threads
        assert job.loader.step == 4
        assert not upcoming._planned  # nothing beyond the last step
    finally:
        upcoming.close()


def test_a_step_that_cannot_be_planned_says_so_when_it_comes():
    at = Loader(DigitsSource(), BATCH).indices(1)[3]
    upcoming = upcoming_of(job_of(source=Broken(at)), 4)
    try:
        upcoming.take()
        upcoming.settle()
        with pytest.raises(SampleError, match=f"'digits/train/{at}': its header is broken"):
            upcoming.take()
    finally:
        upcoming.close()


def test_workers_hear_of_samples_step_by_step_as_early_as_they_are_planned():
    job = job_of(workers=1)
    upcoming = upcoming_of(job, 6)
    try:
        upcoming.take()
        for _ in range(3):  # workers have nothing to do
            upcoming.settle()
            job.loader.payloads.more()
        upcoming.take()
        mine = [job.plan_step(number) for number in range(6)]
        announced = job.loader.payloads.announced
        for number, indices in enumerate(announced):
            assert sorted(indices) == sorted({mine[number].drawn.indices[i] for i in mine[number].feed._mine})
        assert len(announced) >= 1 + AHEAD[True]
    finally:
        upcoming.close()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["digits_overlapping", "digits_balanced", "digits_cp_pp"])
def test_a_prepared_step_leaves_nothing_to_work_out(recipe, monkeypatch):
    """What the runtime asks for in the step is there: no layout, plan or run is made by the training thread."""
    for rank in range(4):
        step = job_of(recipe, rank=rank).plan_step(0)
        for name in ("edge_layouts", "plan_transfer", "route_runs"):
            monkeypatch.setattr(step_transfers, name, None)
        monkeypatch.setattr(layout.TransferPlan, "transpose", kept(layout.TransferPlan.transpose))
        monkeypatch.setattr(boundary.rank_step, "_make", None)
        schedule, transfers = step.schedule, step.transfers
        asked = 0
        for action in schedule.of_rank(rank):
            if isinstance(action.target, Edge):
                forward = action.target in schedule.stages.edges
                along = action.route if forward else action.route.reversed
                for part in transfers.transfer(along, forward).steps:
                    boundary.rank_step.rank_step(part, rank)
                asked += 1
        assert asked
        monkeypatch.undo()


def kept(transpose):
    """`transpose`, which is kept by a cache: a plan that is not there yet would be made, and counted here."""

    def same(plan):
        before = layout.transfer.plan_gradient.cache_info().misses
        found = transpose(plan)
        assert layout.transfer.plan_gradient.cache_info().misses == before
        return found

    return same


def test_the_end_of_a_run_waits_for_the_planning_thread():
    """One that lets go of tensors while the interpreter ends aborts the process."""
    background, let_go = Background(), threading.Event()
    background.submit(lambda: let_go.wait(60))
    let_go.set()
    background.close()
    assert not background._thread.is_alive()


def test_what_was_planned_is_let_go_of_and_the_thread_ends_with_its_owner():
    background, held = Background(), threading.Event()
    thread, gone = background.submit(threading.current_thread).result(), weakref.ref(held)
    background.submit(partial(id, held)).result()
    background.submit(int).result()  # the one before is over
    del held
    assert gone() is None
    del background
    thread.join(60)
    assert not thread.is_alive()
