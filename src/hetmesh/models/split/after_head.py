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


def keeps_logits(model: Any, inner: str, head: str, vocab_size: int, features: int) -> bool:
    """Whether `model` returns logits as its head makes them, or in fp32. Found out as in `keeps_logits_apart`."""
    logits = _logits(vocab_size)
    after = _after_head(model, inner, head, [logits], features)
    return after is not None and after[0].shape == logits.shape and bool((after[0] == logits).all())


def keeps_logits_apart(model: Any, inner: str, head: str, vocab_size: int, features: int) -> bool:
    """Whether what `model` does after its head gives for a part of the vocabulary what it gives there for all of it:
    scaling and soft-capping do, a bias or what leaves tokens out does not. Found out by trying, with logits of the full
    vocabulary and of two parts of it; a model that cannot be tried is taken to mix them. `model`: without weights; only
    what follows the head is computed."""
    logits, middle = _logits(vocab_size), vocab_size // 3
    after = _after_head(model, inner, head, [logits, logits[:, :middle], logits[:, middle:]], features)
    if after is None:
        return False
    whole, *parts = after
    return whole.shape == logits.shape and torch.equal(torch.cat(parts, -1), whole)


def _logits(vocab_size: int) -> Tensor:
    return _LARGE * torch.randn(_ROWS, vocab_size, generator=torch.Generator().manual_seed(0))


def _after_head(model: Any, inner: str, head: str, each: list[Tensor], features: int) -> list[Tensor] | None:
    """What `model` makes of logits of its head; None where it cannot be tried."""
    if "." in head or head not in getattr(model, "_modules", {}):
        return None
    hidden = torch.zeros(_ROWS, features)
    try:
        with torch.no_grad():
            return [whole_head(model, inner, hidden, **{head: _Given(logits[None])}) for logits in each]
    except Exception:  # whatever a model computes there
        return None


class _Given(nn.Module):
    """Stands for a child: its output is known."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_: Any, **__: Any) -> Any:
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
