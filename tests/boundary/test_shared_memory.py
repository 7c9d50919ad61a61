"""Slots: what one process writes another reads, and nothing is written to before its reader is done."""

import os

import pytest
import torch

from hetmesh.boundary.shared_memory import SlotReader, SlotWriter


@pytest.fixture
def ends():
    """What one process writes and another reads; both are this one."""
    sender, reader = SlotWriter(), SlotReader(os.getpid())
    yield sender, reader
    sender.close()


def write(sender, values, dtype=torch.float32):
    start, message = sender.take(len(values), dtype)
    message.copy_(torch.tensor(values))
    return start


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_the_reader_sees_what_was_written(ends, dtype):
    sender, reader = ends
    starts = [write(sender, [k % 2, 1, 0], dtype) for k in range(700)]
    for k, start in enumerate(starts):
        assert torch.equal(reader.read(sender.fd, start, 3, dtype), torch.tensor([k % 2, 1, 0], dtype=dtype))


def test_a_slot_is_written_to_again_only_when_its_reader_is_done(ends):
    sender, reader = ends
    first = write(sender, [1.0, 2.0])
    kept = reader.read(sender.fd, first, 2, torch.float32)
    second = write(sender, [3.0, 4.0])
    assert second != first
    assert kept.tolist() == [1.0, 2.0]
    assert sender.unread == 2
    reader.release(first)
    assert write(sender, [5.0, 6.0]) == first
    assert reader.read(sender.fd, second, 2, torch.float32).tolist() == [3.0, 4.0]


@pytest.mark.slow
def test_memory_grows_only_with_what_is_unread(ends):
    sender, reader = ends
    for _ in range(50):
        start = write(sender, [0.0] * 1000)
        reader.read(sender.fd, start, 1000, torch.float32)
        reader.release(start)
    before = sender.bytes
    assert before == 2**12
    large = {write(sender, [0.0] * 3_000_000) for _ in range(2)}
    assert len(large) == 2
    assert sender.bytes > before + 2 * 12_000_000
