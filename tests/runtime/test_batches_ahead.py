"""Batches are on the device one microbatch ahead, copied from pinned memory without a wait; and the clock of a step."""

import itertools
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetmesh.boundary.accelerator import Accelerator
from hetmesh.graph import Stage
from hetmesh.runtime.batches_ahead import BatchesAhead
from hetmesh.runtime.runtime import ActionClock
from hetmesh.schedule import Action, Kind
from support.streams import StreamedCpu

LLM, VISION = Stage("llm"), Stage("vision")
FORWARDS = [(VISION, 0), (LLM, 0), (LLM, 1)]


class Copies(TorchDispatchMode):
    """How tensors are copied to the meta device, which stands for another one."""

    def __init__(self):
        super().__init__()
        self.non_blocking = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.non_blocking.append(kwargs.get("non_blocking"))
        return func(*args, **(kwargs or {}))


def test_the_next_batch_is_loaded_pinned_and_copied_behind_the_one_before(monkeypatch):
    done = []
    meta, pinned = StreamedCpu(torch.device("meta")), StreamedCpu.pinned
    monkeypatch.setattr(StreamedCpu, "pinned", lambda self, t: done.append("pinned") or pinned(self, t))

    def load(stage, microbatch):
        done.append(f"{stage} {microbatch}")
        return {"tokens": torch.ones(3), "sizes": "as it is"}

    batches = BatchesAhead(load, meta, FORWARDS, meta.stream())
    with Copies() as copies:
        for stage, microbatch in FORWARDS:
            batch = batches.take(stage, microbatch)
            assert (batch["tokens"].device.type, batch["sizes"]) == ("meta", "as it is")
            done.append(f"F {stage} {microbatch}")
            batches.prepare()
    each = [f"{stage} {microbatch}" for stage, microbatch in FORWARDS]
    ahead = [each[0], "pinned", f"F {each[0]}", each[1], "pinned", f"F {each[1]}", each[2], "pinned", f"F {each[2]}"]
    assert done == ahead
    assert copies.non_blocking == [True] * 3
    assert meta.races.host_waits == 0


def test_what_goes_wrong_ahead_of_time_is_told_where_the_batch_is_needed():
    cpu = StreamedCpu()

    def load(stage, microbatch):
        if microbatch:
            raise OSError("no such file")
        return {}

    batches = BatchesAhead(load, cpu, FORWARDS, cpu.stream())
    for forward in FORWARDS[:2]:
        batches.take(*forward)
        batches.prepare()
    with pytest.raises(OSError, match="no such file"):
        batches.take(*FORWARDS[2])


def test_a_cpu_loads_what_is_asked_for_and_copies_nothing():
    rows = torch.ones(3)
    batches = BatchesAhead(lambda *_: {"rows": rows}, Accelerator(), FORWARDS, None)
    batches.prepare()
    assert batches.take(LLM, 7)["rows"] is rows


def test_actions_are_timed_by_events_that_are_read_behind_the_step():
    cpu = StreamedCpu()
    with cpu.races:
        clock, side = ActionClock(cpu), cpu.stream()
        first, second = (Action(Kind.FORWARD, LLM, m) for m in range(2))
        with clock.timing(first):
            torch.ones(3)
        waits = cpu.races.host_waits
        with cpu.on(side), clock.timing(second):
            torch.ones(3)
        assert cpu.races.host_waits == waits
        recording = clock.read()
    assert cpu.races.host_waits == waits + 1
    assert [action for action, _, _ in recording] == [first, second]
    assert recording[0][2] - recording[0][1] == pytest.approx(1e-3)  # one operation is a millisecond of this clock


def test_clocks_agree_when_an_event_was_wherever_the_host_was_interrupted(monkeypatch):
    """E1: or a layer began before the action that it belongs to, once a process lost its core at the wrong place."""
    seconds = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))  # it loses its core at every look
    clocks = ActionClock(Accelerator()), ActionClock(Accelerator())
    event = clocks[0].now()
    assert {clock.seconds(event) for clock in clocks} == {event.at}
