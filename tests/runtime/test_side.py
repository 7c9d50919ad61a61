"""The second flow of control of a rank: who runs when, what changes hands, and how it ends."""

import threading

import pytest
import torch
from torch import nn

from hetmesh.boundary.watchdog import Watchdog
from hetmesh.errors import BoundaryError, BoundaryTimeout
from hetmesh.graph import Stage
from hetmesh.parallel.gaps import collective, lending
from hetmesh.parallel.random_state import RandomPlace, current_microbatch, entering
from hetmesh.runtime.side import Side, Stops
from hetmesh.schedule import Action, Kind

JOBS = [Action(Kind.FORWARD, Stage("vision"), m) for m in range(3)]


def side(run):
    return Side(run, 0, Watchdog(30.0))


def counted(pieces):
    """A condition that lets so many pieces pass."""
    left = iter(range(pieces))
    return lambda: next(left, None) is None


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "hetmesh-side"]


def test_actions_run_piece_by_piece_in_order_and_are_over_when_they_have_to_be():
    seen = []

    def run(action):
        for piece in range(3):
            seen.append((action.microbatch, piece))
            beside.stop()

    with side(run) as beside:
        beside.lend(lambda: False)
        assert seen == []
        for job in JOBS:
            beside.submit(job)
        beside.lend(lambda: True)
        assert seen == []
        beside.lend(counted(2))
        assert seen == [(0, 0), (0, 1)]
        beside.lend(counted(3))
        assert seen == [(0, 0), (0, 1), (0, 2), (1, 0)]
        beside.due()
        beside.finish()
        assert len(seen) == 4  # the first was over
        beside.due()
        beside.finish()
        assert seen[-1] == (1, 2)
        beside.lend(lambda: False)
        assert seen == [(m, piece) for m in range(3) for piece in range(3)]
        beside.finish()
        assert threads()
    assert not threads()


def test_what_has_not_begun_at_its_place_runs_there_without_a_thread():
    seen = []

    def run(action):
        seen.append((action, threading.get_ident()))
        beside.stop()

    with side(run) as beside:
        for job in JOBS:
            beside.submit(job)
            beside.lend(lambda: True)  # a collective that was over at once
            beside.due()
        beside.finish()
        assert not threads()
    assert seen == [(job, threading.get_ident()) for job in JOBS]


def test_each_flow_draws_and_is_where_it_was():
    """Two streams of random numbers in two places, whatever interrupts them."""

    def draw(microbatch, stop):
        torch.manual_seed(microbatch)
        numbers = []
        with entering(RandomPlace(0, "llm", microbatch=microbatch)):
            for _ in range(4):
                assert current_microbatch() == microbatch
                numbers.append(torch.rand(2))
                stop()
        return numbers

    expected = [draw(m, lambda: None) for m in (7, 8)]
    found = {}
    with side(lambda action: found.update({8: draw(8, beside.stop)})) as beside:
        beside.submit(JOBS[0])
        found[7] = draw(7, lambda: beside.lend(counted(1)))
        beside.due()
        beside.finish()
    for numbers, m in zip(expected, (7, 8), strict=True):
        assert all(map(torch.equal, numbers, found[m]))


def test_an_error_is_raised_where_the_rank_lends_itself():
    def run(action):
        beside.stop()
        raise ValueError(f"{action} is wrong")

    with side(run) as beside:
        beside.submit(JOBS[0])
        beside.lend(counted(1))
        with pytest.raises(ValueError, match=r"vision\.0 F0 is wrong"):
            beside.lend(lambda: False)
    assert not threads()


def test_what_has_begun_is_abandoned_with_its_step():
    seen = []

    def run(action):
        torch.manual_seed(1)
        try:
            beside.stop()
            seen.append("went on")
        finally:
            seen.append("left")

    generator = torch.manual_seed(3).get_state()
    with side(run) as beside:
        beside.submit(JOBS[0])
        beside.lend(counted(1))
    assert seen == ["left"]
    assert torch.equal(torch.get_rng_state(), generator)
    assert not threads()


def test_an_action_that_does_not_come_to_a_stop_is_named():
    over, watchdog = threading.Event(), Watchdog(0.2, lambda message: None)  # which would end a late process
    with Side(lambda action: over.wait(), 0, watchdog) as beside:
        beside.submit(JOBS[2])
        with pytest.raises(
            BoundaryTimeout, match=r"vision\.0 F2 in a gap of rank 0 did not come to a stop within 0.2 s"
        ):
            beside.lend(lambda: False)
        watchdog.timeout = 30.0  # for its thread to end
        over.set()
    assert not threads()


@pytest.mark.parametrize("lent", [True, False])
def test_a_collective_of_what_runs_beside_others_is_an_error(lent):
    def run(action):
        with lending(beside.lend):
            collective(lambda async_op: Done())

    with side(run) as beside:
        beside.submit(JOBS[1])
        beside.due()
        with pytest.raises(BoundaryError, match=r"vision\.0 F1 in a gap of rank 0: a collective in what runs beside"):
            beside.lend(lambda: False) if lent else beside.finish()


class Done:
    def is_completed(self):
        return True

    def wait(self):
        pass


def test_a_collective_lends_until_it_is_over_and_is_waited_for_as_always_without_a_side():
    said = []

    class Work(Done):
        def wait(self):
            said.append("waited")

    def begin(*args, async_op=False, **kwargs):
        said.append((args, kwargs, async_op))
        return Work() if async_op else None

    collective(begin, 1, group=2)
    assert said == [((1,), {"group": 2}, False)]
    with lending(lambda until: said.append(until())) as spent:
        collective(begin, 1, group=2)
    assert said[1:] == [((1,), {"group": 2}, True), True, "waited"]
    assert 0.0 < spent.lent_s < spent.gap_s


def test_stops_lie_behind_every_matrix_forward_and_backward():
    """A backward of the other flow goes on in between: each gradient is what it is alone."""
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4), nn.Dropout(0.0), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3).double()
    tower(x).square().sum().backward()
    expected = [p.grad.clone() for p in tower.parameters()]
    tower.zero_grad()
    stops, names = Stops(), []
    stops.watch(tower)
    stops.watch(tower)

    def run(action):
        out = tower(x).square().sum()
        names.append("forward")
        out.backward()
        names.append("backward")

    other = nn.Linear(2, 2).double()
    with side(run) as beside, stops.of(beside):
        beside.submit(JOBS[0])
        halts = 0
        y = torch.ones(2).double()
        while "backward" not in names:
            beside.lend(counted(1))
            y = other(y)
            y.sum().backward(retain_graph=True)
            halts += 1
        beside.due()
        beside.finish()
    assert halts == 2 + 2 + 1
    assert all(map(torch.equal, expected, (p.grad for p in tower.parameters())))
    tower(x).sum().backward()  # without a side nothing halts
