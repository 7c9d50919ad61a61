"""From blocks to an assignment: each module splits its blocks on its own, and caps are kept."""

from __future__ import annotations

import itertools

import numpy as np

from hetmesh.balance.assignment import Assignment
from hetmesh.balance.blocks import BatchBlocks
from hetmesh.balance.caps import NO_CAP, within_caps
from hetmesh.balance.fill import least_loaded, normalised
from hetmesh.balance.loads import BatchLoads, Slots
from hetmesh.balance.resplit import resplit
from hetmesh.balance.tables import as_table, from_table
from hetmesh.errors import GraphError


def from_blocks(
    loads: BatchLoads, slots: Slots, block: np.ndarray, deferred: np.ndarray | None = None, *, policy: str = ""
) -> Assignment:
    """The assignment of samples whose block is known.

    Args:
        block: int64 `[samples]`; where samples are deferred, within caps already (`fitted`).
        deferred: bool `[samples]`: those that the last module takes one window later.

    Raises:
        GraphError: no way was found to keep a cap.
    """
    blocks = BatchBlocks(slots)
    if deferred is None:
        deferred = np.zeros(len(loads), bool)
        block = fitted(loads, blocks, block)
    microbatch, lane = np.empty_like(loads.work), np.empty_like(loads.work)
    for i in range(len(slots.lanes)):
        own = block + deferred * blocks.groups if i == len(slots.lanes) - 1 else block
        bins = _fitted_split(loads, blocks, i, own)
        microbatch[:, i], lane[:, i] = np.divmod(bins, slots.lanes[i])
    return Assignment(slots.lanes, slots.microbatches, microbatch, lane, deferred, policy)


def fitted(loads: BatchLoads, blocks: BatchBlocks, block: np.ndarray) -> np.ndarray:
    """The block of each sample, changed where one holds more than its microbatches and lanes may.

    Raises:
        GraphError: no way was found.
    """
    slots = blocks.slots
    if not slots.capped and not slots.equal_counts:
        return block
    caps = np.array([NO_CAP if cap is None else cap for cap in slots.max_tokens]) * np.minimum(blocks.parts.T, 1 << 20)
    caps = np.where(np.array([cap is None for cap in slots.max_tokens]), NO_CAP, caps)
    tokens = loads.tokens
    if slots.equal_counts:
        caps = np.concatenate([caps, np.full((blocks.count, 1), -(-len(loads) // blocks.count))], 1)
        tokens = np.concatenate([tokens, np.ones((len(loads), 1), np.int64)], 1)
    found = within_caps(block, tokens, caps, blocks.normalised(loads).max(1, initial=0))
    if found is None:
        raise _infeasible(loads, slots)
    return found


def _infeasible(loads: BatchLoads, slots: Slots) -> GraphError:
    totals = [int(total) for total in loads.tokens.sum(0)]
    parts = [
        f"{name!r}: {total} tokens in {count} microbatches of {lanes} lanes, max_tokens {cap}"
        for name, total, count, lanes, cap in zip(
            loads.modules, totals, slots.microbatches, slots.lanes, slots.max_tokens, strict=True
        )
        if cap is not None
    ]
    return GraphError(
        f"balance: the batch does not fit into its microbatches ({'; '.join(parts)}); raise max_tokens, or the number "
        "of microbatches"
    )


def _fitted_split(loads: BatchLoads, blocks: BatchBlocks, module: int, block: np.ndarray) -> np.ndarray:
    """The microbatch and lane of each sample in one module, as microbatch * lanes + lane."""
    slots, lanes = blocks.slots, blocks.slots.lanes[module]
    windows, groups = blocks.window_of[module], blocks.group_of[module]
    of_bin = (windows[:, None] * blocks.groups + groups[None, :]).ravel()
    bins = _split(loads.work[:, module], blocks, of_bin, block)
    cap = slots.max_tokens[module]
    if cap is None:
        return bins
    tokens, caps = loads.tokens[:, module : module + 1], np.full((len(of_bin), 1), cap)
    for allowed in (of_bin, windows[np.arange(len(of_bin)) // lanes]):  # inside its block, or else in its window
        found = within_caps(bins, tokens, caps, loads.work[:, module], allowed)
        if found is not None:
            return found
    raise GraphError(
        f"balance: samples of one microbatch do not fit into the lanes of module {loads.modules[module]!r} with "
        f"max_tokens {cap}; raise it, or the number of microbatches"
    )


def _split(work: np.ndarray, blocks: BatchBlocks, of_bin: np.ndarray, block: np.ndarray) -> np.ndarray:
    """The bin of each sample. `of_bin`: the block of each bin."""
    ordered = np.argsort(of_bin, kind="stable")
    if len(of_bin) == blocks.count:
        return ordered[block]
    starts = np.searchsorted(of_bin[ordered], np.arange(blocks.count + 1)).tolist()
    choices = [ordered[a:b].tolist() for a, b in itertools.pairwise(starts)]
    order = np.argsort(-work, kind="stable")
    if blocks.slots.equal_counts:
        return _in_turn(order, block, choices)
    bins = least_loaded(order, work, choices, group=block)
    table = as_table(bins, len(of_bin), spare=1)
    load = normalised(work[:, None], len(of_bin))
    return from_table(resplit(load, table, 12, group=of_bin), len(work))


def _in_turn(order: np.ndarray, block: np.ndarray, choices: list[list[int]]) -> np.ndarray:
    """Equal counts: the samples of a block, weightiest first, to its bins and back (a snake)."""
    out, seen, blocks = np.empty(len(block), np.int64), [0] * len(choices), block.tolist()
    for sample in order.tolist():
        bins = choices[blocks[sample]]
        turn, place = divmod(seen[blocks[sample]], len(bins))
        out[sample] = bins[-1 - place if turn % 2 else place]
        seen[blocks[sample]] += 1
    return out
