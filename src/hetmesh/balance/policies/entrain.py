"""Entrain's hierarchical assignment as published (Jang and Chowdhury, arXiv 2605.27918, section 4), with deferral."""

from __future__ import annotations

import numpy as np

from hetmesh.balance.assignment import Assignment, BatchLoads, Slots
from hetmesh.balance.batch_blocks import BatchBlocks, fitted, from_blocks
from hetmesh.balance.deferral import defer
from hetmesh.balance.lpt import least_loaded


def entrain(loads: BatchLoads, slots: Slots) -> Assignment:
    """Lanes by encoder work, in turn to the one with least LLM work; in each lane K_eff microbatches, samples with much
    LLM work first, each to the microbatch with least encoder work; then deferral, where `slots` allows it.

    Encoder work is that of all modules but the last. One change: ties, as samples without media make them, go to the
    microbatch with least LLM work; as published they all end in one.
    """
    blocks = BatchBlocks(slots)
    encoder, llm = loads.work[:, :-1].sum(1), loads.work[:, -1]
    order = np.lexsort((-llm, -encoder))
    group = least_loaded(order, llm, [list(range(blocks.groups))])
    window = np.zeros(len(loads), np.int64)
    used = []
    for g in range(blocks.groups):
        mine = np.flatnonzero(group == g)
        used.append(effective_microbatches(encoder[mine], blocks.windows))
        window[mine] = _placed(encoder[mine], llm[mine], used[-1])
    block = fitted(loads, blocks, window * blocks.groups + group)
    if not slots.deferral:
        return from_blocks(loads, slots, block, policy="entrain")
    window, group = np.divmod(block, blocks.groups)
    deferred = np.zeros(len(loads), bool)
    cap = slots.max_tokens[-1]
    cap = None if cap is None else cap * int(blocks.parts[-1].min())
    for g in range(blocks.groups):
        mine = np.flatnonzero(group == g)
        count = max(used[g], int(window[mine].max(initial=0)) + 1)  # a repair may have opened another
        members = [mine[window[mine] == w].tolist() for w in range(count)]
        pairing = defer(members, llm, loads.tokens[:, -1], cap)
        place = np.empty(count, np.int64)
        place[list(pairing.order)] = np.arange(count)
        window[mine] = place[window[mine]]
        deferred[list(pairing.deferred)] = True
    return from_blocks(loads, slots, window * blocks.groups + group, deferred, policy="entrain")


def effective_microbatches(encoder: np.ndarray, microbatches: int) -> int:
    """K_eff: how many microbatches can hold as much encoder work as the largest sample; no more than there are."""
    largest = int(encoder.max(initial=0))
    return max(1, min(microbatches, int(encoder.sum()) // largest)) if largest else microbatches


def _placed(encoder: np.ndarray, llm: np.ndarray, microbatches: int) -> np.ndarray:
    """The microbatch of each sample of one lane: the half with more LLM work first, by falling encoder work."""
    heavy = np.zeros(len(llm), bool)
    heavy[np.argsort(-llm, kind="stable")[: (len(llm) + 1) // 2]] = True
    order = np.lexsort((-llm, -encoder, ~heavy))
    return least_loaded(order, encoder, [list(range(microbatches))], ties=llm)
