"""The fake device: shapes without values, indices with theirs, where the host waits, what is alive."""

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from hetmesh._torch_compat import FakeTensorMode
from hetmesh.dryrun.device_work import BEFORE, DeviceWork
from hetmesh.dryrun.host_waits import HostWaits
from support.on_fake_device import attended, by_values, copies, entered, lists, planted, sharded, trained


def test_a_planted_item_is_found_with_its_source_line(apart):
    line, waits = apart(entered, planted)
    assert waits == [("device_to_host", "item", line, 1)]


def test_indices_of_the_host_keep_their_values_through_what_is_computed_of_them(apart):
    (lengths, chosen, places, offsets), waits = apart(entered, lists)
    assert lengths == [3, 1, 2]
    assert chosen == [2, 5]
    assert places == [[2]]
    assert offsets == [0, 0, 0, 0], "a value that the device computes was written among them"
    counts = [count for direction, _, _, count in waits if direction == "device_to_host"]
    assert sum(counts) == 5  # a list is one copy, a mask is one, nonzero is one


def test_a_shape_that_values_of_the_device_decide_is_an_error_that_names_the_line(apart):
    with pytest.raises(RuntimeError, match=r"a mask decides its shape.*on_fake_device\.py:\d+"):
        apart(entered, by_values)


def test_copies_wait_unless_they_are_pinned_and_say_that_they_need_not(apart):
    _, waits = apart(entered, copies)
    assert [(direction, count) for direction, _, _, count in waits] == [("host_to_device", 1)]


def test_a_step_leaves_weights_and_moments(apart):
    found, waits = apart(entered, trained)
    weights = 4 * 64 * 32
    assert found["dtype"] == "torch.bfloat16"
    assert found["weights"] == weights
    assert found["flops"] == (2 * 8 * 64 * 32, 2 * 8 * 64 * 32)  # the input needs no gradient
    assert found["behind"] == 3 * weights + 4  # and the number of steps
    assert not waits


def test_attention_takes_the_memory_of_the_kernel_that_cuda_would_choose(apart):
    (causal, masked), _ = apart(entered, attended)
    bias = 1024 * 1024 * 2  # of one head
    assert causal < bias  # flash: no scores
    assert bias <= masked < 2 * bias  # the mask as a bias, which heads share, and no scores beside it


def test_whole_tensors_by_which_dtensor_works_out_shapes_are_not_alive(apart):
    most, _ = apart(entered, sharded)
    assert most == 4 * 2 * 1024


def test_flops_of_grouped_queries_need_no_formula_that_knows_them(monkeypatch):
    """torch 2.11's formula refuses fewer key heads than query heads."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention

    def formula(query, key, value, *_, out_val):
        assert query.shape[1] == key.shape[1] == value.shape[1]
        return 4 * query.numel() * key.shape[2]

    monkeypatch.setitem(flop_registry, attention, formula)
    work = DeviceWork(HostWaits(), FakeTensorMode())
    shapes = ((2, 8, 16, 4), (2, 2, 16, 4), (2, 2, 16, 4))
    work.note(attention.default, [torch.empty(shape, device="meta") for shape in shapes], {}, None)
    assert work.by_action[BEFORE].flops == 4 * 2 * 8 * 16 * 4 * 16
