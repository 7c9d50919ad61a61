"""Activation checkpointing of blocks: keep a block's input instead of what its forward computes, and compute it again
in the backward. Names of modules and parameters stay as they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hetmesh._torch_compat import PROFILER_OPS
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


class _Recomputed:
    """A forward that draws the same when it is computed again: torch restores the generators as they were when it
    began, this restores the place that they are seeded from within."""

    def __init__(self, forward: Any) -> None:
        self.forward = forward
        self.remembered: Remembered | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.remembered is None:
            self.remembered = Remembered()
            return self.forward(*args, **kwargs)
        with self.remembered.restored():
            return self.forward(*args, **kwargs)


def _keep(saved: Collection[str], _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().partition(".")[0].replace("::", ".") if isinstance(op, torch._ops.OpOverload) else ""
    saving = (ATTENTION if name.startswith(_ATTENTION) else name) in saved
    return CheckpointPolicy.MUST_SAVE if saving else CheckpointPolicy.PREFER_RECOMPUTE
