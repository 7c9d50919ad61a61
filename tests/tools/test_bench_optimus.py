"""The Optimus benchmark at one of its sizes, and that its kept run has what it promises."""

import importlib
import json
import time
from pathlib import Path

import pytest

from hetmesh.cli.check import checked
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.schedules import schedule_options

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def load(monkeypatch):
    """`load("benchmarks.optimus")`: a module of tools/."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


LARGER = (2048, (8, 8, 1, 2, 3)), (3072, (1, 4, 16, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "shape"),
    [(1536, (8, 4, 2, 1, 2)), *(pytest.param(n, shape, marks=pytest.mark.exhaustive) for n, shape in LARGER)],
    ids=str,
)
def test_a_plan_is_the_recipe_that_check_takes(load, gpus, shape):
    """Its stages, lanes and microbatches, and the key."""
    models, runs = load("benchmarks.optimus.models"), load("benchmarks.optimus.runs")
    plan, dp = load("benchmarks.optimus.encoder_plans").EncoderPlan(*shape), models.PUBLISHED[gpus]["dp"]
    given = load_recipe(runs.ROOT / runs.RECIPE, runs.overrides(dp, plan, 32))
    resolved, lines = checked(given)
    graph = resolved.graph
    assert (graph["vision"].num_stages, graph["llm"].num_stages) == (plan.pp * plan.virtual, 96)
    assert (graph["vision"].num_lanes, graph["llm"].num_lanes) == (plan.lanes * dp, dp)
    assert graph["vision"].options.sequence_parallel
    options = schedule_options(given)
    assert (options.in_collectives, options.in_flight, options.inner) == (True, 32, "interleaved")
    assert given.balance.microbatch_sizes == {"vision": plan.microbatch}
    assert any("which needs GPUs" in line for line in lines)


RIVALS = ("three_phase", "coarse", "own_order")


@pytest.mark.exhaustive
@pytest.mark.parametrize("gpus", [1536, 2048, 3072])
def test_o10_order_and_bounds(load, gpus):
    models, layouts, filled = (load(f"benchmarks.optimus.{name}") for name in ("models", "layouts", "filled"))
    constants, dp = models.CALIBRATION, models.PUBLISHED[gpus]["dp"]
    balanced = layouts.chain_seconds("mllm", dp, layouts.balanced_counts("even"), constants)
    assert balanced == pytest.approx(models.PUBLISHED[gpus]["balanced_s"], rel=0.05)
    llm = layouts.chain_seconds("llm", dp, (1,) * 96, constants)
    assert load("benchmarks.optimus.bound").llm_alone(dp, constants).seconds == llm
    plan = next(p for p in filled.plans(dp) if (p.pp, p.tp, p.microbatch, p.virtual) == (8, 4, 1, 2))
    beside, coarse = (filled.fill(dp, plan, constants, gaps=gaps, refine=gaps) for gaps in (True, False))
    megatron = [layouts.chain_seconds("mllm", dp, counts, constants) for _, counts in layouts.megatron_counts()]
    assert min(megatron) >= balanced > coarse.seconds > beside.seconds > llm + beside.traffic
    least = filled.bound_of(dp, plan, constants).seconds
    assert least <= beside.seconds * (1 + 1e-9)
    assert beside.seconds < 1.005 * least
    assert 0 < beside.hidden < beside.work
    assert max(beside.peak, coarse.peak) <= filled.MEMORY


@pytest.mark.slow
@pytest.mark.exhaustive
def test_o10_the_coarse_placement_hides_more_with_fewer_microbatches(load):
    """32, 24 and 16 of them."""
    models, layouts, filled = (load(f"benchmarks.optimus.{name}") for name in ("models", "layouts", "filled"))
    shares = []
    for published in models.PUBLISHED.values():
        dp = published["dp"]
        llm = layouts.chain_seconds("llm", dp, (1,) * 96, models.CALIBRATION)
        plan = next(p for p in filled.plans(dp) if (p.pp, p.tp, p.microbatch) == (8, 4, 1))
        coarse = filled.fill(dp, plan, models.CALIBRATION, gaps=False, refine=False)
        shares.append(1 - (coarse.seconds - llm - coarse.traffic) / coarse.work)
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[1] < shares[2] < 1


@pytest.mark.slow
@pytest.mark.exhaustive
def test_o11_a_search_over_plans_for_3072_ranks_takes_a_minute_at_most(load):
    """On one core; published are 15 to 322 s. What it finds is the best of the plans one by one."""
    models, filled = (load(f"benchmarks.optimus.{name}") for name in ("models", "filled"))
    constants, dp = models.CALIBRATION, models.PUBLISHED[3072]["dp"]
    began = time.process_time()
    found = filled.best(dp, constants, gaps=False)
    assert time.process_time() - began < 60
    each = [filled.fill(dp, plan, constants, gaps=False) for plan in filled.plans(dp)]
    fitting = [one.seconds for one in each if one is not None]
    assert len(fitting) > 1
    assert found.seconds == min(fitting)


def test_baselines_hold_all_layers_and_the_kept_run_has_every_key(load):
    optimus, layouts = load("benchmarks.optimus"), load("benchmarks.optimus.layouts")
    for ties in optimus.TIES:
        counts = layouts.balanced_counts(ties)
        assert (len(counts), sum(counts)) == (96, 144)
    literal, rebalanced = (counts for _, counts in layouts.megatron_counts())
    assert literal == (60, *(12,) * 7)
    assert sum(rebalanced) == 144
    assert rebalanced[0] >= 48
    kept = json.loads((TOOLS / "results" / "optimus.json").read_text(encoding="utf-8"))
    assert {
        *("balanced_worst_error", "speedup_over_balanced", "speedup_bound", "share_of_bound", "hidden_share_16"),
        *("drift_worst", "rows", "speedup_reachable", "over_bound", "hidden_share_16_reachable"),
    } <= set(kept)
    assert all(row["over_bound"] >= -1e-9 for row in kept["rows"])
    assert kept["share_of_bound_unfilled"] > 0.8  # what share_of_bound is where nothing is hidden
    for row in kept["rows"]:
        assert 0 < kept["share_of_saving"][str(row["gpus"])] < row["share_of_bound"]
        assert row["run"]["microbatches"] == row["microbatches"]
    assert kept["drift_worst_over_rivals"] == max(max(kept["drift"][f"over_{rival}"]) for rival in RIVALS)
    assert "over balanced" in optimus.table(kept)
    assert kept["ordered"]
    assert kept["coarse_grows"]
    assert [row["gpus"] for row in kept["rows"]] == list(load("benchmarks.optimus.models").PUBLISHED)
    assert all(row["search_s"] < 60 for row in kept["rows"])
