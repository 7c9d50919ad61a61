"""Activation checkpointing of blocks: keep a block's input instead of what its forward computes, and compute it again
in the backward. Names of modules and parameters stay as they are."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hetmesh._torch_compat import PROFILER_OPS, current_autograd_node
from hetmesh.cost.saved_operations import ATTENTION, saved_names
from hetmesh.graph.module_graph import SAVE_OPS, CheckpointMode
from hetmesh.parallel.linear import RowwiseLinear
from hetmesh.parallel.random_state import Remembered

_ATTENTION = "aten._scaled_dot_product_"  # how its kernels' names begin

# FSDP names its phases for the profiler, and around experts inside a block it has others when that is computed again.
SAC_IGNORED_OPS.update(PROFILER_OPS)


def apply_activation_checkpoint(
    blocks: Iterable[nn.Module], mode: CheckpointMode, save_ops: Iterable[str] = SAVE_OPS
) -> None:
    """Checkpoint each block, in place. Apply it before FSDP, whose gathers then surround the computation and its
    repetition alike. `mode`: `full` computes the whole block again, its tensor-parallel sums included. `selective`
    keeps the outputs of `save_ops`, and computes again what lies between them and the sums."""
    if mode == "none":
        return
    saved = saved_names(save_ops)
    for block in blocks:
        block.forward = _recomputing(block.forward, mode, saved)
        for module in block.modules():
            if mode == "selective" and "aten.mm" in saved and isinstance(module, RowwiseLinear):
                module.sum_a_copy = True  # what selective checkpointing keeps must not change


def _recomputing(forward: Any, mode: CheckpointMode, saved: Collection[str]) -> Any:
    arguments: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_keep, saved))

    # A function of this file, which torch.compile traces into; a partial of torch's own it passes by.
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what is random is then computed again as torch.compile sees to it
            return checkpoint(forward, *args, **arguments, **kwargs)
        return checkpoint(_Recomputed(forward), *args, **arguments, **kwargs)

    return checkpointed


# Not context variables: on CUDA a backward runs in a thread of autograd.
_split = False
_kept: Container[Any] = ()


@contextmanager
def backward_in_two_parts(split: bool) -> Iterator[None]:
    """Whether the backward of forwards in the body comes in two parts. A block is then computed again in the first one
    only, and keeps for the second what that needs; torch would compute it again for every weight."""
    global _split
    before, _split = _split, split
    try:
        yield
    finally:
        _split = before


@contextmanager
def keeping(nodes: Container[Any]) -> Iterator[None]:
    """The body is the first part. `nodes` of autograd's graph, of all that run in it, run in the second again."""
    global _kept
    before, _kept = _kept, nodes
    try:
        yield
    finally:
        _kept = before


def exchange_parts(parts: Any) -> Any:
    """Set what this returned before (None: as outside of the two above), and return what was set: for two computations
    that take turns in one process."""
    global _split, _kept
    before, (_split, _kept) = (_split, _kept), parts or (False, ())
    return before


class _Recomputed:
    """A forward that draws the same when it is computed again: torch restores the generators as they were when it
    began, this restores the place that they are seeded from within."""

    def __init__(self, forward: Any) -> None:
        self.forward = forward
        self.remembered: Remembered | None = None
        self.slots: list[ref[_Slot]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.remembered is None:
            self.remembered = Remembered()
            return (self._first if _split else self.forward)(*args, **kwargs)
        with self.remembered.restored():
            if self.slots is None:
                return self.forward(*args, **kwargs)
            slots = iter(self.slots)

            def fill(saved: Tensor) -> Tensor:
                saved = saved.detach()  # or what was saved of an output would hold the graph that it is saved in
                if (slot := next(slots)()) is not None:
                    slot.tensor = saved
                return saved

            with saved_tensors_hooks(fill, lambda saved: saved):
                self.forward(*args, **kwargs)
            return _Mark.apply(torch.empty(0, requires_grad=True))

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        """Autograd saves slots, which are filled when the first of them is read. A mark is all that torch's checkpoint
        sees saved: to read it is to have the block computed again."""
        slots = self.slots = list[ref[_Slot]]()  # weak, as what holds `self` must not hold the graph
        mark: Any = None

        def pack(_: Tensor) -> _Slot:
            slots.append(ref(slot := _Slot()))
            return slot

        def unpack(slot: _Slot) -> Tensor:
            if slot.tensor is None:
                _ = mark.saved_tensors
            tensor = slot.tensor
            assert tensor is not None, "a block saved less when it was computed again"
            if current_autograd_node() not in _kept:
                slot.tensor = None
            return tensor

        with saved_tensors_hooks(pack, unpack):
            outputs = self.forward(*args, **kwargs)
        mark = _Mark.apply(torch.empty(0, requires_grad=True)).grad_fn
        return outputs


class _Slot:
    """What autograd saved, from when its block has been computed again until nobody needs it any more."""

    tensor: Tensor | None = None


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)


def _keep(saved: Collection[str], _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().partition(".")[0].replace("::", ".") if isinstance(op, torch._ops.OpOverload) else ""
    saving = (ATTENTION if name.startswith(_ATTENTION) else name) in saved
    return CheckpointPolicy.MUST_SAVE if saving else CheckpointPolicy.PREFER_RECOMPUTE
