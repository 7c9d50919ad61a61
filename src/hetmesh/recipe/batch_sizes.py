"""Batch arithmetic: how the samples of one optimizer step divide into LLM lanes and microbatches."""

from __future__ import annotations

from dataclasses import dataclass

from hetmesh.errors import RecipeError


def divisors(n: int) -> list[int]:
    """The positive divisors of `n`, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of one optimizer step, all in samples except the last two.

    Attributes:
        global_batch_size: samples per optimizer step.
        microbatch_size: samples per LLM lane and microbatch.
        lanes: data-parallel coordinates of the LLM (the module that computes the loss).
        num_microbatches: microbatches per optimizer step, over all accumulation rounds.
    """

    global_batch_size: int
    microbatch_size: int
    lanes: int
    num_microbatches: int


def batch_sizes(
    *, local_batch_size: int, global_batch_size: int | None, microbatch_size: int | None, lanes: int
) -> BatchSizes:
    """Fill in what is None (global = local x lanes, microbatch = local) and check that everything divides.
    Raises RecipeError: a size does not divide another; the message lists valid values."""
    if microbatch_size is None:
        microbatch_size = local_batch_size
    if local_batch_size % microbatch_size:
        raise RecipeError(
            f"pipeline_parallel_microbatch_size = {microbatch_size} must divide training.local_batch_size = "
            f"{local_batch_size}; valid are {divisors(local_batch_size)}"
        )
    per_round = local_batch_size * lanes
    if global_batch_size is None:
        global_batch_size = per_round
    if global_batch_size % per_round:
        below = global_batch_size // per_round * per_round
        nearest = [size for size in (below, below + per_round) if size]
        local = [d for d in range(1, global_batch_size // lanes + 1) if global_batch_size % (lanes * d) == 0]
        raise RecipeError(
            f"training.global_batch_size = {global_batch_size} must be a multiple of training.local_batch_size x LLM "
            f"lanes = {local_batch_size} x {lanes} = {per_round}; nearest are {nearest}"
            + (f", or a local_batch_size of {local}" if local else "")
        )
    num_microbatches = global_batch_size // (lanes * microbatch_size)
    return BatchSizes(global_batch_size, microbatch_size, lanes, num_microbatches)
