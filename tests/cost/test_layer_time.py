"""Seconds of a layer: the rule of what is frozen, on shapes and against what torch runs (FLOPs, exactly)."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from analysis.stage_counts import frozen_blind
from hetmesh.cost import (
    LayerOptions,
    LayerShape,
    LayerTime,
    Machine,
    ModuleShape,
    Rates,
    WeightShape,
    Work,
    activation_bytes,
    layer_time,
    load_machine,
    module_times,
)
from hetmesh.cost.collective_time import tensor_parallel_time
from hetmesh.errors import HetmeshError

RATES = Rates(flops=1e9, bandwidth=1e9, overhead=1e-4)
WORK = Work(rows=32, pairs=32**2, targets=8)


def linear(trainable=True, tp_dim=None, **kwargs):
    return LayerShape("linear", (WeightShape("w", (48, 24), 1, trainable, tp_dim),), **kwargs)


@pytest.mark.parametrize(("t", "g", "again"), list(itertools.product((False, True), repeat=3)))
def test_backward_is_forward_times_t_plus_g(t, g, again):
    time = layer_time(linear(t), WORK, RATES, upstream=g, recompute=again)
    f = time.forward
    assert f == pytest.approx((2 * 48 * 24 * 32) / 1e9 + 4 * (48 * 24 + 32 * 72) / 1e9 + 1e-4)
    assert (time.backward_input, time.backward_weight) == pytest.approx((f * g, f * t))
    assert time.recompute == f * (again and max(t, g))
    assert time.backward == pytest.approx(f * (t + g) + f * (again and max(t, g)))


def test_attention_needs_both_factors_gradients_if_anything_in_or_before_the_layer_is_trained():
    layer = LayerShape("attention", (), attention_width=64)
    whole = layer_time(layer, WORK, Rates(1e9), upstream=True)
    assert whole.backward_input == 2.5 * whole.forward == 2.5 * 4 * 64 * 32**2 / 1e9  # the scores are computed again
    hidden = layer_time(LayerShape("attention", (), 64, causal=True), WORK, Rates(1e9), upstream=True)
    assert (hidden.forward, hidden.backward_input) == (whole.forward / 2, whole.backward_input / 2)
    assert layer_time(layer, WORK, Rates(1e9), upstream=False).backward == 0
    trained = LayerShape("block", linear().weights, attention_width=64)
    assert layer_time(trained, WORK, Rates(1e9), upstream=False).backward_input == whole.backward_input


def test_tensor_parallelism_splits_what_it_splits():
    whole, shard, copy = (
        layer_time(linear(tp_dim=dim), WORK, Rates(1e9), upstream=True, tp=tp).forward
        for dim, tp in ((0, 1), (0, 4), (None, 4))
    )
    assert (shard, copy) == (whole / 4, whole)
    for dim, share in ((0, 4), (None, 1)):  # attention is split as what makes its queries
        block, alone = (LayerShape("block", linear(tp_dim=dim).weights, width) for width in (64, 0))
        times = [layer_time(each, WORK, Rates(1e9), upstream=True, tp=4).forward for each in (block, alone)]
        assert times[0] - times[1] == pytest.approx(4 * 64 * WORK.pairs / 1e9 / share)
    slow = Rates(float("inf"), bandwidth=1e9)  # what is not split is read or written by every rank
    for dim, elements in ((0, 48 * 24 / 4 + 32 * (48 / 4 + 24)), (1, 48 * 24 / 4 + 32 * (48 + 24 / 4))):
        assert layer_time(linear(tp_dim=dim), WORK, slow, upstream=False, tp=4).forward == 4 * elements / 1e9


def test_sequence_parallelism_splits_norms_and_what_lies_between():
    weights = (
        WeightShape("l.norm.weight", (24,)),
        WeightShape("l.up.w", (48, 24), 1, tp_dim=0),
        WeightShape("l.down.w", (24, 48), 1, tp_dim=1),
    )
    block = LayerShape("l", weights)
    flags = {"upstream": True, "tp": 4}
    one, split = (layer_time(block, WORK, RATES, **flags, sequence_parallel=each).forward for each in (False, True))
    assert one - split == pytest.approx(4 * 2 * 32 * 24 * 3 / 4 / 1e9)
    how = LayerOptions("float32", True, group=(0, 1, 2, 3))
    shares = replace(how, sequence_parallel=True)
    kept, less = (activation_bytes(block, WORK, each) for each in (how, shares))
    # what the norm keeps of its input, what was gathered of its result, and the MLP's sum
    assert kept - less == 4 * 32 * 3 * 24 * 3 / 4
    assert activation_bytes(block, WORK, replace(shares, recompute=True)) == 4 * 32 * 24 / 4


def test_an_attention_that_is_not_split_keeps_and_gathers_all_rows_under_sequence_parallelism():
    weights = (
        WeightShape("l.attn.qkv.weight", (72, 24), 1),
        WeightShape("l.attn.proj.weight", (24, 24), 1),
        WeightShape("l.mlp.up.weight", (48, 24), 1, tp_dim=0),
        WeightShape("l.mlp.down.weight", (24, 48), 1, tp_dim=1),
    )
    block, how = LayerShape("l", weights, 24), LayerOptions("float32", True, group=(0, 1, 2, 3))
    shares = replace(how, sequence_parallel=True)
    kept, less = (activation_bytes(block, WORK, each) for each in (how, shares))
    assert kept - less == 4 * 32 * (24 + 24 + 24) * 3 / 4  # what the two sums make, and what the MLP gathers
    machine = Machine("m", "", node_bandwidth=1e9)
    one, split = (tensor_parallel_time(block, WORK, each, machine) for each in (how, shares))
    assert split.forward / one.forward == split.backward / one.backward == 1.5


def test_a_head_runs_on_targets_alone():
    times = [layer_time(linear(on_targets=True), Work(rows, 0, 8), Rates(1e9), upstream=False) for rows in (8, 80)]
    assert times[0] == times[1]


def test_a_machine_without_a_peak_for_the_dtype_says_what_it_has():
    assert Rates.of(load_machine("h100"), "bfloat16").flops == pytest.approx(0.83 * 989.4e12)
    assert Rates.of(load_machine("cpu"), "float32", peak=1e10).flops == pytest.approx(0.6e10)
    with pytest.raises(HetmeshError, match=r"machine 'cpu' has no peak_flops.float32; it has none"):
        Rates.of(load_machine("cpu"), "float32")


def test_frozen_blind_sees_twice_the_forward():
    assert frozen_blind(LayerTime(3.0, 0, 0)) == LayerTime(3.0, 3.0, 3.0)


WIDTH, ROWS = 16, 8


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("frozen", [(), range(4), range(2, 4), range(8), (1, 3, 5)], ids=str)
@pytest.mark.parametrize("upstream", [False, True])
def test_the_rule_counts_what_torch_runs(frozen, upstream, recompute):
    """8 blocks of two linears, some frozen, with and without something trainable before them."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(8)]
    for i in frozen:
        blocks[i].requires_grad_(False)
    x = torch.randn(ROWS, WIDTH, requires_grad=upstream)
    with FlopCounterMode(display=False) as counter:
        y = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=False) if recompute else block(y)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        if y.requires_grad:
            y.sum().backward()
    # One layer per linear: inside a block the first linear is before the second one.
    layers = tuple(
        LayerShape(f"{i}.{j}", (WeightShape(f"{i}.{j}", (WIDTH, WIDTH), 1, i not in frozen),))
        for i in range(8)
        for j in range(2)
    )
    named = [layer.name for layer in layers] if recompute else []
    times = module_times(ModuleShape("m", layers), Work(ROWS), Rates(1.0), upstream=upstream, recompute=named)
    assert sum(time.forward for time in times.values()) == forward
    total = sum(time.backward for time in times.values())
    # torch stops recomputing where it has all that the backward reads: a block's last product is not run again.
    early = forward // 16 * sum(i not in frozen or upstream or any(j not in frozen for j in range(i)) for i in range(8))
    assert counter.get_total_flops() == total - (early if recompute else 0)
