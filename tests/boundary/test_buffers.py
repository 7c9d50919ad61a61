"""Kept memory for packed messages."""

import torch

from hetmesh.boundary.accelerator import Buffers


def test_memory_made_in_inference_mode_serves_outside_of_it():
    buffers = Buffers(torch.device("cpu"))
    with torch.inference_mode():  # an evaluation between two steps
        first = buffers.take(40_000, torch.float32)
        first.fill_(1.0)
        buffers.give(first)
    again = buffers.take(50_000, torch.float32)
    again.fill_(2.0)
    assert again is first


def test_memory_that_is_in_use_is_not_given_again():
    buffers = Buffers(torch.device("cpu"))
    taken = [buffers.take(40_000, torch.float32) for _ in range(3)]
    buffers.give(taken[1])
    given = [buffers.take(40_000, torch.float32), buffers.take(40_000, torch.float32)]
    assert given[0] is taken[1]
    assert given[1].data_ptr() not in {t.data_ptr() for t in taken}
    assert buffers.take(40_000, torch.int32).dtype is torch.int32
