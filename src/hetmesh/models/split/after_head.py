"""Logits through the forward of a whole model, whose inner model's output is known: what follows the head is its own,
and whether that treats each logit by itself."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

_ROWS = 2
_LARGE = 100.0  # logits reach beyond where soft-capping bends them


def whole_head(model: Any, inner: str, hidden: Tensor, **others: nn.Module) -> Tensor:
    """The logits `[n, vocab]` of `hidden`, `[n, features]`, as the forward of `model` makes them.

    Args:
        inner: its child that would give `hidden`.
        others: by name, what takes the place of other children.
    """
    shell = copy.copy(model)
    shell._modules = {**model._modules, inner: _Given(_Output(hidden[None])), **others}
    ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
    return shell.forward(input_ids=ids).logits[0]


def tried_head(model: Any, inner: str, head: str, vocab_size: int, features: int) -> tuple[bool, bool]:
    """Whether `model` hands hidden states to its head as they are, and returns logits as this makes them, or in fp32;
    and whether what it does after its head gives for a part of the vocabulary what it gives there for all of it:
    scaling and soft-capping do, a bias or what leaves tokens out does not.

    Found out by trying, with logits of the full vocabulary and of two parts of it; a model that cannot be tried is
    taken to do neither. `model`: without weights; only what follows the head is computed.
    """
    if "." in head or head not in getattr(model, "_modules", {}):
        return False, False
    logits, hidden = (
        _LARGE * torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(0))
        for width in (vocab_size, features)
    )
    middle = vocab_size // 3
    given = [_Given(some[None]) for some in (logits, logits[:, :middle], logits[:, middle:])]
    try:
        with torch.no_grad():
            whole, *parts = (whole_head(model, inner, hidden, **{head: part}) for part in given)
    except Exception:  # whatever a model computes there
        return False, False
    complete = whole.shape == logits.shape
    plain = complete and torch.equal(given[0].read, hidden[None]) and bool((whole == logits).all())
    return plain, complete and torch.equal(torch.cat(parts, -1), whole)


class _Given(nn.Module):
    """Stands for a child: its output is known. `read`: its first argument."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output, self.read = output, torch.empty(0)

    def forward(self, *given: Any, **_: Any) -> Any:
        self.read = given[0] if given else self.read
        return self.output


class _Output:
    """An output of transformers of which only the hidden states are known."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        assert index == 0
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None
