"""On an asynchronous accelerator: the same numbers, streams in order, no wait of the host in a step."""

import pytest
from test_parity_bubble_fill import CASES as FILLED

from hetmesh.boundary import World
from hetmesh.runtime.batches_ahead import BatchesAhead
from hetmesh.runtime.stage_streams import StageStreams
from hetmesh.testing import parity
from support.parity_cases import recipe, table
from support.streams import streamed

CASES = {
    "an encoder pipeline in gaps of a split backward": FILLED["an encoder pipeline on some of the ranks, a cap"],
    "slices in gaps, FSDP, LoRA": FILLED["FSDP encoder, LoRA, computed again"],
    "apart": recipe("1f1b", table("vision", "0-1", fsdp=2), table("llm", "2-3", tp=2), batch=4),
}


def on_streams(rank, case, steps, fault=None):
    """The outcome, races, streams used and waits of the host."""
    world = World.current()
    with streamed(world) as races, pytest.MonkeyPatch.context() as patch:
        if fault == "no wait":
            patch.setattr(StageStreams, "receive", lambda *_: None)
        if fault == "no wait for batches":
            patch.setattr(BatchesAhead, "take", take_without_waiting)
        outcome = parity.run(CASES[case], world, steps)
    return outcome, sorted(set(races.found)), len(races.used), races.host_waits


def take_without_waiting(self, stage, microbatch):
    self.prepare()
    return self._copied.pop((stage, microbatch))[0]


@pytest.mark.exhaustive  # test_parity_gaps.py has streams, too
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_streams_change_nothing_and_are_in_order(pool4, case):
    results = pool4.run(on_streams, case, 2, timeout=240.0)
    for _, races, streams, waits in results:
        assert races[:8] == []
        assert streams >= 2
        assert waits == 0
    expected = parity.reference(CASES[case], 2)
    assert parity.compare(expected, [outcome for outcome, *_ in results], 1e-10) < 1e-10


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["no wait", "no wait for batches"])
def test_a_wait_that_is_left_out_is_found(pool4, fault):
    results = pool4.run(on_streams, "slices in gaps, FSDP, LoRA", 1, fault, timeout=120.0)
    assert any("in use on stream" in found for _, races, *_ in results for found in races)
