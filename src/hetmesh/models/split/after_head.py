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
    """Whether `model` hands hidden states to its head as they are, and returns logits as this makes them, or in fp32.
    Found out as in `keeps_logits_apart`."""
    logits, hidden = _random(vocab_size), _random(features)
    if (after := _after_head(model, inner, head, [logits], hidden)) is None:
        return False
    (result, read), *_ = after
    return torch.equal(read, hidden[None]) and result.shape == logits.shape and bool((result == logits).all())


def keeps_logits_apart(model: Any, inner: str, head: str, vocab_size: int, features: int) -> bool:
    """Whether what `model` does after its head gives for a part of the vocabulary what it gives there for all of it:
    scaling and soft-capping do, a bias or what leaves tokens out does not. Found out by trying, with logits of the full
    vocabulary and of two parts of it; a model that cannot be tried is taken to mix them. `model`: without weights; only
    what follows the head is computed."""
    logits, middle = _random(vocab_size), vocab_size // 3
    after = _after_head(model, inner, head, [logits, logits[:, :middle], logits[:, middle:]], _random(features))
    if after is None:
        return False
    whole, *parts = (result for result, _ in after)
    return whole.shape == logits.shape and torch.equal(torch.cat(parts, -1), whole)


def _random(width: int) -> Tensor:
    return _LARGE * torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(0))


def _after_head(
    model: Any, inner: str, head: str, each: list[Tensor], hidden: Tensor
) -> list[tuple[Tensor, Tensor]] | None:
    """What `model` makes of logits of its head, and what this has read for them; None where it cannot be tried."""
    if "." in head or head not in getattr(model, "_modules", {}):
        return None
    given = [_Given(logits[None]) for logits in each]
    try:
        with torch.no_grad():
            return [(whole_head(model, inner, hidden, **{head: part}), part.read) for part in given]
    except Exception:  # whatever a model computes there
        return None


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
