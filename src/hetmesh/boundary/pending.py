"""What `hetmesh.backward` has yet to run: the boundaries crossed so far, in one chain that a token threads.

A backward that was forgotten, or run by `loss.backward()`, would send gradients of one step into the next, or hang. So
what is pending is named: at the next `redistribute`, at `World.close`, and in timeouts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from hetmesh.boundary.log import Label
from hetmesh.errors import BoundaryError

REMEDY = (
    "call hetmesh.backward(loss) on every rank before the optimizer's step (hetmesh.backward(None) where there is no "
    "loss), not loss.backward(); where no gradient is wanted cross under torch.no_grad(), and after a step that failed "
    "call hetmesh.abandon() on every rank"
)


@dataclass
class _Pending:
    """One per process. `token` ends the chain; `crossed` are its boundaries, oldest first."""

    token: Tensor | None = None
    crossed: list[tuple[Label, bool]] = field(default_factory=list)  # and whether the caller gave the name
    stepped: bool = False  # an optimizer has made a step since
    running: bool = False  # hetmesh.backward is at work
    hooked: bool = False

    def __str__(self) -> str:
        names = list(dict.fromkeys(repr(label.boundary) for label, _ in self.crossed))
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        return f"boundar{'y' if len(names) == 1 else 'ies'} {', '.join(names[:4])}{more}"


_pending = _Pending()


def check(label: Label, named: bool, requires_grad: bool) -> None:
    """Called before a boundary is crossed. Raises BoundaryError: `hetmesh.backward` was forgotten: an optimizer has
    made a step since a boundary was crossed, or the same name and microbatch is crossed again. Nothing is pending
    then."""
    repeated = requires_grad and named and any(known and crossed == label for crossed, known in _pending.crossed)
    if not (repeated or _pending.stepped):
        return
    what = str(_pending)
    why = "an optimizer has made a step since" if _pending.stepped else f"{label} comes again"
    which = "" if _pending.stepped else "; several microbatches before one backward take microbatch=0, 1, ..."
    drop()
    raise BoundaryError(f"hetmesh.backward has not run since {what} was crossed, and {why}: {REMEDY}{which}")


def cross(label: Label, named: bool, device: torch.device) -> Tensor:
    """The token that the next boundary takes; it must hand back the one after itself to `crossed`."""
    if not _pending.hooked:
        _pending.hooked = True
        register_optimizer_step_post_hook(_on_optimizer_step)
    _pending.crossed.append((label, named))
    if _pending.token is None:
        return torch.zeros((), device=device, requires_grad=True)
    return _pending.token


def crossed(token: Tensor) -> None:
    """The token that the newest boundary returned."""
    _pending.token = token


def take() -> Tensor | None:
    """The end of the chain, for `hetmesh.backward`. Nothing is pending any more."""
    token = _pending.token
    drop()
    return token


def drop() -> str:
    """Forget all that is pending; says what it was, or nothing if there was none."""
    forgotten = bool(_pending.crossed)
    message = f"hetmesh.backward has not run since {_pending} was crossed: {REMEDY}" if forgotten else ""
    _pending.token, _pending.crossed, _pending.stepped = None, [], False
    return message


def hint() -> str:
    """For errors of a wait: what else may be the reason."""
    if not _pending.crossed or _pending.running:
        return ""
    return f" (hetmesh.backward has not run since {_pending} was crossed; has it on the other ranks?)"


@contextlib.contextmanager
def running() -> Iterator[None]:
    """While `hetmesh.backward` is at work."""
    _pending.running = True
    try:
        yield
    finally:
        _pending.running = False


def check_running(label: Label) -> None:
    """Called by the backward of a boundary, before anything is sent. Raises BoundaryError: it was not
    `hetmesh.backward` that started it. Nothing is pending then."""
    if not _pending.running:
        drop()
        raise BoundaryError(
            f"{label}: its gradient comes from loss.backward() or torch.autograd, of which no other rank knows: "
            f"{REMEDY}"
        )


def _on_optimizer_step(*_: Any) -> None:
    _pending.stepped = bool(_pending.crossed)
