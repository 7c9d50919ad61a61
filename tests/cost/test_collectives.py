"""Collectives: ring algorithms over the slowest link."""

from dataclasses import replace

import pytest

from hetmesh.cost import LayerOptions, LayerShape, WeightShape, Work, load_machine
from hetmesh.cost.collective_time import (
    all_gather,
    all_reduce,
    gradient_sum_time,
    link,
    tensor_parallel_time,
)

MACHINE = replace(
    load_machine("h100"), node_bandwidth=100.0, network_bandwidth=10.0, node_latency=1.0, network_latency=5.0
)


def test_rings():
    assert all_gather(400, range(4), MACHINE) == pytest.approx(3 * 1 + 300 / 100)
    assert all_reduce(400, range(4), MACHINE) == pytest.approx(2 * (3 + 3))
    assert all_reduce(400, [3], MACHINE) == all_gather(0, range(4), MACHINE) == 0


def test_links_across_nodes_share_the_ports_of_a_node():
    assert link(MACHINE, [0, 8]).bandwidth == 10
    assert link(MACHINE, [0, 1, 8, 9]).bandwidth == 20
    assert link(MACHINE, range(16)).bandwidth == 80
    assert link(MACHINE, range(8)).bandwidth == 100
    assert link(replace(MACHINE, ranks_per_node=0), [0, 800]).bandwidth == 100


def test_a_block_sums_twice_each_way():
    shapes = {"q": ((8, 8), 0), "o": ((8, 8), 1), "up": ((32, 8), 0), "down": ((8, 32), 1)}
    block = LayerShape("b", tuple(WeightShape(n, s, 1, True, d) for n, (s, d) in shapes.items()), 8)
    time = tensor_parallel_time(block, Work(10), LayerOptions("float32", False, group=(0, 1)), MACHINE)
    assert time.forward == time.backward == pytest.approx(2 * all_reduce(4 * 10 * 8, range(2), MACHINE))
    frozen = LayerShape("b", tuple(replace(w, trainable=False) for w in block.weights), 8)
    assert tensor_parallel_time(frozen, Work(10), LayerOptions("float32", False, group=(0, 1)), MACHINE).backward == 0
    assert tensor_parallel_time(block, Work(10), LayerOptions("float32", True, group=(0,)), MACHINE).forward == 0


def test_ranks_that_share_a_key_head_put_keys_and_values_together():
    shapes = {"q": ((8, 8), 0), "k": ((4, 8), 0), "v": ((4, 8), 0), "o": ((8, 8), 1)}
    weights = tuple(WeightShape(n, s, 1, True, d) for n, (s, d) in shapes.items())
    block = LayerShape("b", weights, 8, key_width=4, key_heads=2)  # heads of two features
    for ranks, sharing in ((2, 1), (4, 2)):
        more = 2 * all_gather(4 * 10 * 2, range(sharing), MACHINE)
        time = tensor_parallel_time(block, Work(10), LayerOptions("float32", True, group=tuple(range(ranks))), MACHINE)
        assert time.forward == time.backward == pytest.approx(all_reduce(4 * 10 * 8, range(ranks), MACHINE) + more)
    assert [block.keys_on(ranks) for ranks in (1, 2, 4)] == [4, 2, 2]


def test_a_first_linear_sums_in_the_backward_and_a_head_gathers():
    first = LayerShape("linear_1", (WeightShape("w", (32, 8), 1, True, 0),))
    time = tensor_parallel_time(first, Work(10), LayerOptions("float32", True, group=(0, 1)), MACHINE)
    assert (time.forward, time.backward) == (0, all_reduce(4 * 80, range(2), MACHINE))
    head = LayerShape("lm_head", first.weights, on_targets=True)
    time = tensor_parallel_time(head, Work(10, 0, 3), LayerOptions("float32", True, group=(0, 1)), MACHINE)
    assert time.forward == all_gather(4 * 3 * 32, range(2), MACHINE)


def test_gradients_of_sharded_and_replicated_lanes():
    scatter, reduce = gradient_sum_time(100, 4, [0, 1], [0, 8], MACHINE)
    assert scatter == all_gather(400, [0, 1], MACHINE)
    assert reduce == all_reduce(200, [0, 8], MACHINE)
