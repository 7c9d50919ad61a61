"""Experts that change places in a run: never the result, in any layout; what is wrong with a move is found."""

from random import Random

import pytest
import torch

import hetmesh
from hetmesh.boundary import World
from hetmesh.errors import RecipeError
from hetmesh.parallel.experts import ExpertBlock
from hetmesh.parallel.experts import placement as moves
from hetmesh.records.metrics import StepMetrics, flat
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.parity import ParityError, compare, reference, run
from hetmesh.training import expert_placement
from hetmesh.training.expert_placement import Moved
from support.expert_cases import CASES, experts, recipe
from support.often import some
from support.parity_cases import table

STEPS = 3
SPREAD = sorted(case for case, (tables, _) in CASES.items() if "expert_parallel_degree" in "".join(tables))


def moving(case, interval=1, changes=()):
    """The recipe of a case of `expert_cases`, with experts that move."""
    tables, keys = CASES[case]
    every = f"expert_placement_interval = {interval}\nexpert_parallel_degree"
    tables = [text.replace("expert_parallel_degree", every) for text in tables]
    return recipe(*tables, **{**keys, "changes": [*keys.get("changes", ()), *changes]})


def moved(rank, given, fault=None, seed=None, steps=STEPS):
    """What a run gave, and what was told of moves; with a seed experts go anywhere, whatever they got."""
    told = []

    def watch(job):
        if fault is not None:
            fault(job)
        after_step = job.expert_placement.after_step

        def tell(*arguments):
            out = after_step(*arguments)
            told.append({name: each.record() for name, each in out.items()})
            job.check_replicas(arguments[0])
            return out

        job.expert_placement.after_step = tell

    def anywhere(loads, ranks, current):
        return tuple(random.sample(range(len(loads)), len(loads)))

    random, by_loads = Random(seed), expert_placement.place_experts
    if seed is not None:
        expert_placement.place_experts = anywhere
    try:
        return run(given, World.current(), steps, fault=watch), told
    finally:
        expert_placement.place_experts = by_loads


def check(pool, given, fault=None, seed=None):
    outcomes, told = zip(*pool.run(moved, given, fault, seed, timeout=180), strict=True)
    assert all(each == told[0] for each in told)
    compare(reference(given, STEPS), list(outcomes), 1e-10)
    return told[0]


DEFAULT = ("EP 2, TP 2, sequence",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [each if each in DEFAULT else pytest.param(each, marks=pytest.mark.exhaustive) for each in SPREAD]
)
def test_moving_experts_changes_no_result(pool4, case):
    told = check(pool4, moving(case))
    assert len(told) == STEPS - 1
    for each in told:
        numbers = each["llm"]
        assert numbers["ranks_max_over_mean_after"] <= numbers["ranks_max_over_mean_before"]
    assert any(each["llm"]["moved"] for each in told) or case == "fewer experts than shards"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 24))])
def test_experts_may_go_anywhere(pool4, seed):
    """Drawn: layout, experts, choices and placements; a place anywhere on any rank."""
    random = Random(seed)
    case = random.choice([each for each in SPREAD if each not in ("fewer experts than shards", "compiled")])
    count, chosen = random.choice([8, 16]), random.randint(1, 4)
    sizes = [] if "num_experts" in str(CASES[case][1]) else [("num_experts = 8", f"num_experts = {count}")]
    given = moving(case, changes=[*sizes, ("per_tok = 3", f"per_tok = {chosen}")])
    assert sum(each["llm"]["moved"] for each in check(pool4, given, seed=seed))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_sums_of_two_experts_are_the_same_to_the_last_bit(pool4):
    """Of three, which two meet on a rank and are summed first depends on places."""
    changes = [("per_tok = 3", "per_tok = 2")]
    still, moves = (pool4.run(moved, moving("FSDP 2, EP 2", n, changes), timeout=180) for n in (0, 1))
    assert any(each["llm"]["moved"] for each in moves[0][1])
    for (before, _), (after, _) in zip(still, moves, strict=True):
        assert before.losses == after.losses
        assert all(torch.equal(value, after.parameters[name]) for name, value in before.parameters.items())


def wrong_map(job):
    """On one rank tokens go where experts lay before."""
    if job.world.rank == 3:
        moves.places_of = lambda placement, device: None


def half_moved(job):
    """One parameter of the experts stays behind on all ranks."""
    exchange = moves.Exchange

    def stays(world, plan, local, dtype, label, **options):
        if "down_proj" in label.boundary:
            plan = moves.plan_transfer(plan.shape, plan.src, plan.src)
        return exchange(world, plan, local, dtype, label, **options)

    moves.Exchange = stays


def faulty(rank, given, fault):
    kept = {name: getattr(moves, name) for name in ("places_of", "Exchange")}
    try:
        return moved(rank, given, fault)
    finally:
        for name, value in kept.items():
            setattr(moves, name, value)


@pytest.mark.slow
@pytest.mark.parametrize("fault", some((half_moved,), (wrong_map, half_moved)))
def test_a_wrong_move_is_found_by_parity(pool4, fault):
    given = moving("EP 2, disjoint")
    outcomes = [outcome for outcome, _ in pool4.run(faulty, given, fault, timeout=180)]
    with pytest.raises(ParityError):
        compare(reference(given, STEPS), outcomes, 1e-10)


def skewed(job):
    """Routers that prefer some experts: the larger its row, the more often an expert is among the first."""
    for block in job.root.modules():
        if isinstance(block, ExpertBlock):
            order = torch.randperm(block.layers.count, generator=torch.Generator().manual_seed(block.number))
            with torch.no_grad():
                block.gate.weight.mul_(0.3 + 3 / order.add(1)[:, None])


@pytest.mark.slow
def test_skewed_routing_is_evened_out(pool4):
    changes = [("num_experts = 8", "num_experts = 32"), ("local_batch_size = 2", "local_batch_size = 32")]
    given = moving("EP 4, colocated", changes=[*changes, ("microbatch_size = 1", "microbatch_size = 32")])
    (_, told), *_ = pool4.run(moved, given, skewed, timeout=180)
    first, second = (each["llm"] for each in told)
    assert first["ranks_max_over_mean_before"] > 1.3
    assert first["ranks_max_over_mean_after"] <= 1.15
    assert second["ranks_max_over_mean_before"] < first["ranks_max_over_mean_before"]  # on samples not seen before


def test_what_is_told_of_a_move():
    moved = Moved(moved=6, experts=24, before=1.35801, after=1.0131, tokens=[[5, 0], [2, 3]])
    assert str(moved) == "6 of 24 moved to other ranks, tokens of ranks max/mean 1.36 -> 1.01"
    assert str(Moved(0, 24, 1.02, 1.02)) == "none of 24 moved, tokens of ranks max/mean 1.02"
    line = StepMetrics(4, 1.0, 1.0, 0.1, 1.0, 1.0, 1.0, expert_placement={"llm": moved.record()}).record()
    assert line["expert_placement"]["llm"]["tokens"] == [[5, 0], [2, 3]]
    assert flat(line)["expert_placement/llm/ranks_max_over_mean_before"] == 1.358
    assert "expert_placement/llm/tokens" not in flat(line)  # loggers draw numbers


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        (
            (table("llm", "0-1") + "\nexpert_placement_interval = 5",),
            r"parallelism.llm.expert_placement_interval = 5: every rank holds all experts.*degree above 1",
        ),
        (
            (experts("0-1", 2, 2), table("vision", "0-1") + "\nexpert_placement_interval = 5"),
            r"parallelism.vision.expert_placement_interval = 5: this siglip has no experts to move",
        ),
    ],
)
def test_moves_of_nothing_are_refused(tables, says):
    with pytest.raises(RecipeError, match=says):
        resolve(recipe(*tables))


def test_a_loop_of_ones_own_has_no_moves():
    with (
        pytest.raises(RecipeError, match=r"expert_placement_interval = 1: .* leave it out in a custom loop"),
        hetmesh.open_job(moving("EP 2, disjoint")),
    ):
        pass
