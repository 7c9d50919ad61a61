"""hetmesh.redistribute on real processes and random layouts: content, exact adjoint, and bytes counted by the log."""

import copy

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.distributed.tensor import DTensor

from hetmesh.boundary import World, backward, redistribute
from hetmesh.testing import bounds, executor, strategies

ITEMSIZE = 8
HOSTS = st.sampled_from([(4, 8), (2,), (1,)])  # ranks per host: messages within one go through shared memory
TRANSPORTS = st.sampled_from(["auto", "auto", "p2p", "all_to_all"])


def cross(rank, pair, transport, per_host):
    """One boundary there and back, as if each host had that number of ranks; returns what this rank saw."""
    world = World.current()
    world.connect()
    world.log.clear()
    local_peers = world.local_peers
    if world.size not in per_host:
        world.local_peers = copy.copy(local_peers)
        near = {r: peer for r, peer in local_peers.peers.items() if r // per_host[0] == rank // per_host[0]}
        world.local_peers.peers, world.local_peers.everyone = near, False
    try:
        return there_and_back(rank, world, pair, transport)
    finally:
        world.local_peers = local_peers


def there_and_back(rank, world, pair, transport):
    x = y_expected = None
    if rank in pair.src.mesh:
        x = executor.draw(pair.src, pair.shape, seed=1)[rank].requires_grad_()
    y = redistribute(x, pair.dst, src=pair.src, shape=pair.shape, dtype=torch.float64, transport=transport)
    local = y.to_local() if isinstance(y, DTensor) else y
    if rank in pair.dst.mesh:
        y_expected = executor.draw(pair.dst.gradient(), pair.shape, seed=2)[rank]
        backward((local * y_expected).sum())
    else:
        assert (y is None) == (rank not in pair.src.mesh)
        backward(y)
    if x is not None:
        assert x.grad is not None, "a source rank has no gradient"
    return (
        None if rank not in pair.dst.mesh else local.detach(),
        None if x is None else x.grad,
        world.log.bytes_received(direction="forward"),
        world.log.bytes_received(direction="backward"),
    )


def check(pair, results):
    """Compare what all ranks saw with oracles that share no code with the planner."""
    x = executor.draw(pair.src, pair.shape, seed=1)
    y = executor.draw(pair.dst.gradient(), pair.shape, seed=2)
    whole = executor.gather(x, pair.src, pair.shape).reshape(-1)
    out = {rank: results[rank][0] for rank in pair.dst.mesh.ranks}
    grad = {rank: results[rank][1] for rank in pair.src.mesh.ranks}
    for rank, local in out.items():
        expected = torch.zeros_like(local)
        kept = bounds.kept_ids(pair.shape, pair.dst, rank)
        if kept.size:
            expected = whole[torch.from_numpy(kept)]
        assert torch.equal(local, expected), f"rank {rank} of {pair}"
    assert executor.inner(out, y, pair.dst) == executor.inner(x, grad, pair.src), pair
    assert sum(result[2] for result in results) == bounds.minimal_bytes(pair.shape, pair.src, pair.dst, ITEMSIZE), pair
    held = _held_once(pair)
    if len(np.unique(held)) == len(held):  # gradients that are summed cost more than a move
        wanted = 0
        for rank in pair.src.mesh.ranks:
            own = bounds.element_ids(pair.shape, pair.dst, rank).ravel() if rank in pair.dst.mesh else []
            keeps = bounds.element_ids(pair.shape, pair.src.gradient(), rank)
            wanted += len(np.setdiff1d(np.intersect1d(keeps, held), own))
        assert sum(result[3] for result in results) == wanted * ITEMSIZE, pair


def _held_once(pair):
    """Elements of the destination's gradient, replicas counted once (twice only where coordinates overlap)."""
    layout = pair.dst.gradient()
    ranks = executor._one_per_replica(layout)
    return np.concatenate([bounds.element_ids(pair.shape, layout, rank).ravel() for rank in ranks])


@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases=st.lists(st.tuples(strategies.layout_pairs(4), TRANSPORTS, HOSTS), min_size=8, max_size=8))
def test_random_layouts_on_four_processes(pool4, cases):
    """160 pairs (20 x 8) on real processes."""
    for (pair, *_), results in zip(cases, pool4.run_many(cross, cases), strict=True):
        check(pair, results)


@pytest.mark.slow
@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases=st.lists(st.tuples(strategies.layout_pairs(8), TRANSPORTS, HOSTS), min_size=8, max_size=8))
def test_random_layouts_on_eight_processes(pool8, cases):
    """32 pairs (4 x 8) on real processes."""
    for (pair, *_), results in zip(cases, pool8.run_many(cross, cases), strict=True):
        check(pair, results)
