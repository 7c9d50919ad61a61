"""Balancers as published: Entrain's hierarchical assignment, with deferral (Jang and Chowdhury, arXiv 2605.27918), and
DistTrain's reordering (Zhang et al., SIGCOMM 2025, arXiv 2408.04275): lanes are balanced, microbatches ordered."""

from __future__ import annotations

import numpy as np

from hetmesh.balance.assignment import Assignment, BatchLoads, Slots
from hetmesh.balance.batch_blocks import BatchBlocks, fitted, from_blocks
from hetmesh.balance.deferral import defer
from hetmesh.balance.lpt import least_loaded


def entrain(loads: BatchLoads, slots: Slots) -> Assignment:
    """Lanes by encoder work, in turn to the one with least LLM work; in each lane K_eff microbatches, samples with much
    LLM work first, each to the microbatch with least encoder work; then deferral, where `slots` allows it (section 4).

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


def disttrain(loads: BatchLoads, slots: Slots) -> Assignment:
    """Lanes by longest processing time first with equal counts; each lane's samples, in the order of their keys, cut
    into microbatches; of these the smallest first, the next smallest last, in between whichever keeps the running sum
    of encoder work nearest to the mean. What a microbatch of a lane holds stays as the data order has it, which is why
    its work varies as that of random ones."""
    blocks = BatchBlocks(slots)
    key = loads.work.sum(1)
    order = np.lexsort((-loads.work[:, -1], -key))
    limit = -(-len(loads) // blocks.groups)
    group = least_loaded(order, key, [list(range(blocks.groups))], limit=limit)
    window = np.zeros(len(loads), np.int64)
    for g in range(blocks.groups):
        mine = np.flatnonzero(group == g)
        cut = np.arange(len(mine)) * blocks.windows // max(len(mine), 1)
        work = np.zeros((blocks.windows, loads.work.shape[1]), np.int64)
        np.add.at(work, cut, loads.work[mine])
        place = np.empty(blocks.windows, np.int64)
        place[_reordered(work, sum(slots.stages))] = np.arange(blocks.windows)
        window[mine] = place[cut]
    return from_blocks(loads, slots, window * blocks.groups + group, policy="disttrain")


def _reordered(work: np.ndarray, stages: int) -> np.ndarray:
    """The order of one lane's microbatches (section 5.3): the smallest first, so that all stages start soon; the
    `stages - 1` next ones last, where nothing hides their drain; each gap between is given to the microbatch that fits
    it best, the gap being what was left open so far of the mean encoder work per microbatch."""
    encoder, total = work[:, :-1].sum(1), work.sum(1)
    rising = np.argsort(total, kind="stable").tolist()
    kept = max(min(stages - 1, len(rising) - 1), 0)
    order, tail = rising[:1], rising[1 : 1 + kept][::-1]
    left = rising[1 + kept :]
    mean, count = int(encoder.sum()) // max(len(rising), 1), 1
    done = int(encoder[order].sum())
    while left:
        count += 1
        gap = mean * count - done
        best = min(left, key=lambda m: (abs(int(encoder[m]) - gap), m))
        left.remove(best)
        order.append(best)
        done += int(encoder[best])
    return np.array(order + tail, np.int64)
