"""Side: a second flow of control of a rank, for what runs while the first one waits in a collective.

It has a thread of its own, and a baton changes hands: only one of the two ever runs. It halts at stops behind every
leaf module that holds a matrix, forward and backward: any code of a module can be halted there, and does not notice.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from hetmesh._torch_compat import dispatch_modes, push_dispatch_mode
from hetmesh.boundary.watchdog import Watchdog
from hetmesh.errors import BoundaryError, BoundaryTimeout
from hetmesh.parallel.activation_checkpoint import exchange_parts
from hetmesh.parallel.random_state import exchange_place
from hetmesh.schedule import Action


class Side:
    """Runs actions, first in, first out, while this rank lends itself. As a context: leaving it ends the thread, and
    abandons what has begun.

    Args:
        run: runs one action.
        rank, watchdog: of this process; until the next stop it may take as long as any other wait.
    """

    def __init__(self, run: Callable[[Action], None], rank: int, watchdog: Watchdog) -> None:
        self.run, self.rank, self.watchdog = run, rank, watchdog
        self._jobs: deque[Action] = deque()  # the first one may have begun
        self._begun: int | None = None  # in which thread it has
        self._done = self._due = 0  # of all there were, how many are over, and have to be
        self._over: Callable[[], bool] = lambda: True  # when the side gives the baton back
        self._ended = False
        self._error: BaseException | None = None
        self._state = _FlowState()
        self._modes = dispatch_modes()
        self._own_turn, self._main_turn = threading.Lock(), threading.Lock()
        self._own_turn.acquire()
        self._main_turn.acquire()
        self._thread = threading.Thread(target=self._work, name="hetmesh-side", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        if self._thread.ident is None:
            return
        self._state.exchange()  # what is abandoned leaves its contexts
        self._own_turn.release()
        self._thread.join(self.watchdog.timeout)
        self._state.exchange()

    def submit(self, action: Action) -> None:
        """It may begin from now on."""
        self._jobs.append(action)

    def lend(self, until: Callable[[], bool]) -> None:
        """Let it run until a stop at which `until` holds, or until it has nothing to do. Raises what an action raised,
        and BoundaryTimeout."""
        if self._begun == threading.get_ident():
            raise BoundaryError(f"{self}: a collective in what runs beside others")
        if self._jobs and not until():
            self._hand_over(until)

    def due(self) -> None:
        """Its next action, in order, must be over before the first flow goes on."""
        self._due += 1

    def finish(self) -> None:
        """All that is due is over when this returns: what has not begun runs in the first flow, which waits anyway.
        Raises what an action raised, and BoundaryTimeout."""
        if self._begun is not None and self._done < self._due:
            self._hand_over(lambda: self._begun is None)
        while self._done < self._due:
            self.watchdog.progress()
            self._run_first()

    def stop(self) -> None:
        """Called between two pieces of an action: the side halts here, if it is time."""
        if threading.get_ident() == self._thread.ident and (self._ended or self._over()):
            self._halt()

    def __str__(self) -> str:
        first = "".join(f"{job} in " for job in tuple(self._jobs)[:1])  # a copy: the other thread may take it away
        return f"{first}a gap of rank {self.rank}"

    def _run_first(self) -> None:
        self._begun = threading.get_ident()
        self.run(self._jobs[0])
        self._jobs.popleft()
        self._begun, self._done = None, self._done + 1

    def _hand_over(self, until: Callable[[], bool]) -> None:
        self._over = until
        if self._thread.ident is None:
            self._thread.start()
        self._state.exchange()
        self._own_turn.release()
        timeout = self.watchdog.timeout
        with self.watchdog.watching(self):
            if not self._main_turn.acquire(timeout=timeout):
                raise BoundaryTimeout(f"{self} did not come to a stop within {timeout:g} s: does it wait for a rank?")
        self._state.exchange()
        if (error := self._error) is not None:
            self._error = None
            raise error

    def _halt(self) -> None:
        """Give the baton back, and wait for it: as long as the first flow takes, whose waits have timeouts."""
        if not self._ended:
            self._main_turn.release()
            self._own_turn.acquire()
        if self._ended:
            raise _Abandoned

    def _work(self) -> None:
        for mode in self._modes:
            push_dispatch_mode(mode)
        torch.autograd.set_multithreading_enabled(False)  # or its backward would go through a thread that main's uses
        self._own_turn.acquire()
        try:
            while True:
                while self._jobs:
                    self._run_first()
                    if self._over():
                        break
                self._halt()
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = error
            self._main_turn.release()


class Stops:
    """Where a side may halt: behind each call of a leaf module that holds a matrix, and where its gradient passes.

    Attributes:
        side: whose they are at the time; None: nobody halts.
    """

    def __init__(self) -> None:
        self.side: Side | None = None
        self._watched: set[nn.Module] = set()

    def watch(self, module: nn.Module) -> None:
        """Let there be stops in `module` from now on: behind matrices, as behind a norm there is little to halt for."""
        new = set() if module in self._watched else {*module.modules()} - self._watched
        self._watched |= new
        for part in new:
            if next(part.children(), None) is None and any(p.dim() > 1 for p in part.parameters(recurse=False)):
                part.register_forward_hook(self._behind)

    @contextmanager
    def of(self, side: Side) -> Iterator[None]:
        """In the body they are those of `side`."""
        self.side = side
        try:
            yield
        finally:
            self.side = None

    def _behind(self, _: nn.Module, __: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self.side is None:
            return  # a compiled block is one piece
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self._passed)
        self.side.stop()

    def _passed(self, _: Tensor) -> None:
        if self.side is not None:
            self.side.stop()


class _Abandoned(BaseException):
    """The step of an action has ended in the middle. No code of a module catches it."""


class _FlowState:
    """What belongs to one of the two flows and is the process's: it changes hands with the baton. (Grad mode, autocast,
    hooks of saved tensors and dispatch modes are a thread's.)"""

    def __init__(self) -> None:
        self._generator, self._place, self._parts = torch.get_rng_state(), None, None

    def exchange(self) -> None:
        """Take what was left here, and leave what is."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._generator)
        self._generator = before
        self._place, self._parts = exchange_place(self._place), exchange_parts(self._parts)
