"""The steps to come, planned in the background while earlier ones run."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from hetmesh.balance import BatchPlan
from hetmesh.data.drawn import DrawnBatch
from hetmesh.data.loader import Loader
from hetmesh.errors import BoundaryError
from hetmesh.runtime.step_transfers import StepTransfers
from hetmesh.schedule import Schedule
from hetmesh.training.feed import Feed

T = TypeVar("T")

AHEAD = {False: 1, True: 2}
"""Steps that are planned while one runs, without and with worker processes: the next, so that nobody waits for
it, and one more, whose samples workers may start with. The transfers of a step among 8,192 ranks are 300 MB."""


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """One step before it runs.

    Attributes:
        number: from 0.
        place: where its samples begin in the row of all samples.
        drawn: its global batch.
        plan: which lane and microbatch handles each sample.
        schedule: the order of its actions.
        transfers: what this rank moves.
        feed: gives the modules of this rank their inputs.
        unreadable: why samples of the batch cannot be read and are left out, by their index in it.
    """

    number: int
    place: int
    drawn: DrawnBatch
    plan: BatchPlan
    schedule: Schedule
    transfers: StepTransfers
    feed: Feed
    unreadable: Mapping[int, str] = field(default_factory=dict)

    @property
    def without_target(self) -> list[int]:
        """The samples, by their index in the batch, that can be read and have nothing that a loss counts."""
        counted = sum(map(self.plan.counted, self.plan.graph.losses))
        return [i for i in np.flatnonzero(counted == 0).tolist() if i not in self.unreadable]


class Upcoming:
    """The steps of a run in order, each planned in a background thread before it is needed.

    Args:
        loader: draws the batches; its `step` is the next one.
        plan_step: plans the step of a number.
        last: number of steps of the run; none beyond is planned.
        ahead: steps that are planned ahead (`AHEAD`).

    Attributes:
        wait_s: seconds that the last `take` took: what planning cost the training thread.
    """

    def __init__(self, loader: Loader, plan_step: Callable[[int], PlannedStep], last: int, ahead: int) -> None:
        self._loader, self._plan_step, self._last, self._ahead = loader, plan_step, last, ahead
        self._planned: dict[int, Future[PlannedStep]] = {}
        self._announced = loader.step  # the first step whose samples have not been asked for yet
        self._background = Background()
        self.wait_s = 0.0
        loader.payloads.when_idle(self._announce_next)

    @property
    def number(self) -> int:
        """Of the next step, from 0."""
        return self._loader.step

    def take(self) -> PlannedStep:
        """The step at which the loader is, which then advances.

        Raises:
            SampleError, GraphError: what planning the step raised.
            BoundaryError: the job is over.
        """
        if self._background.closed:
            raise BoundaryError("the job is over, and its process groups may be gone: step within `with open_job(...)`")
        started, loader = time.perf_counter(), self._loader
        number = loader.step
        self._plan_to(min(number + self._ahead, self._last - 1))
        if number not in self._planned:  # beyond the last step, by a custom loop
            self._plan(number)
        step = self._planned.pop(number).result()
        if step.place != loader.place(number):  # a custom loop has moved the loader
            self._planned.clear()
            self._plan(number)
            step, self._announced = self._planned.pop(number).result(), number
        if self._announced <= number:
            step.feed.announce(step.schedule)
            self._announced = number + 1
        loader.step += 1
        self._announce_next()
        self.wait_s = time.perf_counter() - started
        return step

    def _announce_next(self) -> None:
        """Ask for the samples of the next step, if it is planned by now."""
        ahead = self._planned.get(self._announced)
        if ahead is None or not ahead.done() or ahead.exception() is not None:  # what is wrong is said when it comes
            return
        step = ahead.result()
        step.feed.announce(step.schedule)
        self._announced += 1
        self._plan_to(min(self._announced + 1, self._last - 1))

    def _plan_to(self, last: int) -> None:
        for number in range(max([self._loader.step, *(n + 1 for n in self._planned)]), last + 1):
            self._plan(number)

    def _plan(self, number: int) -> None:
        self._planned[number] = self._background.submit(lambda: self._plan_step(number))

    def settle(self) -> None:
        """Wait until everything that was begun is planned."""
        self._background.submit(lambda: None).result()

    def close(self) -> None:
        """Plan nothing more."""
        self._background.close()


LEAVES_S = 2.0
"""Seconds for which the end of a run waits for its planning thread."""


class Background:
    """One thread that does one thing after the other. It never keeps a process from ending."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[tuple[Future, Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.closed = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Do it when all before is done."""
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._todo,), name="hetmesh-planning", daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._todo.put((future, call))
        return future

    def __del__(self) -> None:
        self._todo.put(None)  # a job that nobody closed: its thread ends with it

    def close(self) -> None:
        """Do nothing more once the current thing is done; wait for that, but not long.

        A thread that lets go of tensors while the interpreter ends would abort the process, whose run was complete.
        """
        self.closed = True
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join(LEAVES_S)


def _work(todo: queue.SimpleQueue[tuple[Future, Callable[[], object]] | None]) -> None:
    while (item := todo.get()) is not None:
        future, call = item
        try:
            future.set_result(call())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)
        del item, future, call  # while this waits, it keeps nothing of the job
