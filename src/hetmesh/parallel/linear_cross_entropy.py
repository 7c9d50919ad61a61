"""Head and cross-entropy of an LLM by chunks of targets, so that no rank ever holds the logits of all.

The gradients of a chunk are computed with its loss, in the forward, and multiplied by that of the loss in the backward,
as in Liger Kernel (Hsu et al., arXiv 2410.10989) and in torch's own `torch.nn.functional.linear_cross_entropy` (2.13):
no product is computed twice. Cut Cross-Entropy (Wijmans et al., arXiv 2411.09009) keeps nothing instead, and computes
logits again, a third more of the head's FLOPs. torch's own has whole vocabularies and linear heads alone, and gives the
sum of bf16 rows in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy

from hetmesh._torch_compat import graph_nodes
from hetmesh.cost.head import CHUNK_BYTES
from hetmesh.parallel.gradient_sums import local_part
from hetmesh.parallel.linear import ColwiseLinear, local
from hetmesh.parallel.vocabulary import VocabularyShards, cross_entropy_with_gradient, raised

LOSS = "loss"
"""Name of an output: the summed loss."""

Logits = Callable[[Tensor], Tensor]
"""Hidden states `[targets, features]` -> logits `[targets, vocab]`, or this rank's share of them."""

Observe = Callable[[Tensor, Mapping[str, Tensor]], None]
"""(detached logits of some targets, valid during the call; the batch of the LLM, in which `targets` and `target_index`
are those of these)."""


def sum_cross_entropy(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Summed cross-entropy of logits `[num_targets, vocab]` against `batch["targets"]`; a connected 0 without any.

    Half-precision logits are raised to fp32; fp64 stays fp64.
    """
    return cross_entropy(logits.to(raised(logits.dtype)), batch["targets"], reduction="sum")


@dataclass(frozen=True)
class CrossEntropy:
    """The summed cross-entropy of the targets of an LLM, as its loss: of logits, or by chunks of targets, where the
    LLM's forward can. `vocabulary`: of which ranks have shares; None: each has all logits."""

    vocabulary: VocabularyShards | None = None

    def __call__(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Of logits, `[targets, vocab]` or this rank's share."""
        if self.vocabulary is None:
            return sum_cross_entropy(logits, batch)
        gradient = torch.empty_like(logits) if logits.requires_grad and torch.is_grad_enabled() else None
        value = cross_entropy_with_gradient(logits, batch["targets"], self.vocabulary, gradient)
        return value if gradient is None else _Known.apply([gradient], value, logits)

    def by_chunks(self, rows: _Linear | _Traced, batch: Mapping[str, Tensor], observe: Observe | None = None) -> Tensor:
        """Of what gives logits. Each chunk has as many targets on all ranks that share the vocabulary."""
        targets, width = batch["targets"], self.vocabulary.widths[0] if self.vocabulary else rows.width
        size = max(CHUNK_BYTES // max(width * rows.bytes_of_logit, 1), 1)
        losses = []
        for first in range(0, max(len(targets), 1), size):  # without targets gradients are zeros
            span = slice(first, first + size)
            logits = rows.logits(span)
            if observe is not None:
                index = batch.get("target_index", torch.arange(len(targets)))
                observe(logits.detach(), {**batch, "targets": targets[span], "target_index": index[span]})
            back = None if not rows.inputs else logits if rows.in_place else torch.empty_like(logits)
            losses.append(cross_entropy_with_gradient(logits, targets[span], self.vocabulary, back))
            if back is not None:
                rows.backward(back)
        value = torch.stack(losses).sum()
        # Two nodes: a split backward runs that of the hidden states in one part and that of parameters in the other.
        known = rows.gradients()
        for part in (slice(rows.of_hidden), slice(rows.of_hidden, None)):
            if rows.inputs[part]:
                value = value + _Known.apply(known[part], value.new_zeros(()), *rows.inputs[part])
        return value


_asked: ContextVar[tuple[CrossEntropy, Observe | None] | None] = ContextVar("asked", default=None)


@contextmanager
def asking_for_loss(loss: object, observe: Observe | None) -> Iterator[None]:
    """In the body an LLM's forward gives, if it can, its `loss` in place of logits where that is a `CrossEntropy`."""
    before = _asked.set((loss, observe) if isinstance(loss, CrossEntropy) else None)
    try:
        yield
    finally:
        _asked.reset(before)


def logits_or_loss(
    head: nn.Module, logits: Logits, hidden: Tensor, batch: Mapping[str, Tensor], *, plain: bool = False
) -> dict[str, Tensor]:
    """What the forward of an LLM returns for the hidden states of its targets, `[targets, features]`: as `""` their
    logits, or, where the caller has asked for it (`asking_for_loss`), as `"loss"` their summed cross-entropy, a scalar.

    Args:
        head: the layer that makes logits. If it has dropout, each chunk draws numbers of its own.
        logits: treats each target by itself.
        plain: whether it only calls the head.
    """
    asked = _asked.get()
    if asked is None:
        return {"": logits(hidden)}
    rows: _Linear | _Traced
    if plain and isinstance(head, ColwiseLinear) and head.widths is None:
        hidden = head.enter(hidden)  # once, so that the gradients of all chunks are summed over ranks at once
        rows = _Linear(hidden, head)
    else:
        rows = _Linear(hidden, head) if plain and type(head) is nn.Linear else _Traced(hidden, logits)
    loss, observe = asked
    return {LOSS: loss.by_chunks(rows, batch, observe)}


class _Linear:
    """Logits that are a product with the weight of a linear layer, maybe a share of it. They are made in one buffer,
    in which their gradient replaces them."""

    in_place = True

    def __init__(self, hidden: Tensor, head: nn.Linear) -> None:
        bias = () if head.bias is None else (local(head.bias),)
        factors = hidden, local(head.weight), *bias
        trained = [i for i, x in enumerate(factors) if x.requires_grad and torch.is_grad_enabled()]
        self.inputs = [factors[i] for i in trained]
        self.of_hidden = int(0 in trained)  # how many of these, the first, are hidden states
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
        self.hidden, self.weight, *self.bias = (x.detach().to(dtype) for x in factors)
        self.found = {i: torch.empty_like(factors[i], dtype=dtype) for i in trained}
        self.width, self.bytes_of_logit = len(self.weight), dtype.itemsize
        self.buffer = self.rows = hidden.new_empty(0)

    def logits(self, span: slice) -> Tensor:
        """Of some targets, until those of the next are made."""
        self.span, self.rows = span, self.hidden[span]
        if not len(self.buffer):
            self.buffer = self.rows.new_empty(len(self.rows), self.width)
        made = torch.mm(self.rows, self.weight.t(), out=self.buffer[: len(self.rows)])
        for bias in self.bias:
            made += bias
        return made

    def backward(self, back: Tensor) -> None:
        """Add the gradients of the loss of these targets. `back`: of their logits."""
        for i, total in self.found.items():
            if i == 0:
                torch.mm(back, self.weight, out=total[self.span])
            elif i == 1 and not self.span.start:
                torch.mm(back.t(), self.rows, out=total)
            elif i == 1:
                torch.addmm(total, back.t(), self.rows, out=total)
            else:
                total.copy_(back.sum(0) + (total if self.span.start else 0))

    def gradients(self) -> list[Tensor]:
        """Of `inputs`."""
        return [total.to(x.dtype) for total, x in zip(self.found.values(), self.inputs, strict=True)]


class _Traced:
    """Logits that are whatever is computed of hidden states and parameters; gradients by autograd."""

    in_place = False

    def __init__(self, hidden: Tensor, make: Logits) -> None:
        self.hidden, self.make = hidden, make
        empty = make(hidden.detach()[:0])  # tells which parameters are used
        used = [getattr(node, "variable", None) for node in graph_nodes([empty.grad_fn])]
        self.of_hidden = int(hidden.requires_grad and torch.is_grad_enabled())
        self.inputs = [*[hidden][: self.of_hidden], *(p for p in used if p is not None)]
        self.width, self.bytes_of_logit = empty.shape[-1], 2 * empty.dtype.itemsize
        self.found = [torch.empty_like(hidden)][: self.of_hidden]
        self.totals: list[Tensor] = []

    def logits(self, span: slice) -> Tensor:
        """Of some targets."""
        self.span, self.leaf = span, self.hidden.detach()[span].requires_grad_(self.of_hidden > 0)
        self.made = self.make(self.leaf)
        return self.made

    def backward(self, back: Tensor) -> None:
        """Add the gradients of the loss of these targets. `back`: of their logits."""
        first = self.of_hidden
        each = torch.autograd.grad(self.made, [*[self.leaf][:first], *self.inputs[first:]], back)
        for total, part in zip(self.found, each[:first], strict=True):
            total[self.span] = part
        if not self.totals:
            self.totals = list(each[first:])
            return
        for total, part in zip(self.totals, each[first:], strict=True):
            local_part(total).add_(local_part(part))

    def gradients(self) -> list[Tensor]:
        """Of `inputs`."""
        return [*self.found, *self.totals]


class _Known(torch.autograd.Function):
    """`value`, of which the gradients by `inputs` are known."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], value: Tensor, *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        if (gradients := ctx.gradients) is None:
            raise RuntimeError("a loss by chunks has one backward, which multiplies its gradients in place")
        ctx.gradients = None
        for gradient in gradients:
            local_part(gradient).mul_(outer[0])
        return None, None, *gradients
