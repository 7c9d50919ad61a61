"""The accelerator that finds races finds each kind of them, and nothing where all is in order."""

import torch

from support.streams import Races, StreamedCpu


def passed_on(waits: bool, told: bool) -> Races:
    """Rows are made on one stream, read on another and let go of."""
    cpu = StreamedCpu()
    with cpu.races:
        rows, side, ready = torch.ones(3), cpu.stream(), cpu.event()
        ready.record()
        with cpu.on(side):
            if waits:
                side.wait_event(ready)
            total = rows.view(3).sum()
        if told:
            cpu.used_by(rows, side)
        del rows
        torch.ones(3)
    assert float(total) == 3.0
    return cpu.races


def test_what_is_in_order_is_not_reported():
    races = passed_on(waits=True, told=True)
    assert races.found == []
    assert (races.used, races.host_waits) == ({0, 1}, 0)


def test_a_missing_wait_is_found():
    (found,) = passed_on(waits=False, told=True).found
    assert found == "aten.sum.default on stream 1 reads (3,) in use on stream 0"


def test_memory_that_is_given_back_too_early_is_found():
    (found,) = passed_on(waits=True, told=False).found
    assert found == "memory of stream 0 is taken again while stream 1 uses it"


def test_a_write_waits_for_readers_and_the_host_may_wait_for_all():
    cpu = StreamedCpu()
    with cpu.races:
        rows, side = torch.ones(3), cpu.stream()
        cpu.synchronize()
        with cpu.on(side):
            rows.sum()
        rows.add_(1)
        assert len(cpu.races.found) == 1
        cpu.synchronize()
        rows.add_(1)
    assert len(cpu.races.found) == 1
    assert cpu.races.host_waits == 2
