"""What recurrences add to a step where ranks that share tokens cut samples."""

from dataclasses import replace

import pytest

from hetmesh.cost import Machine, Work
from hetmesh.cost.collective_time import carry_time
from hetmesh.cost.recurrence import RankCuts
from hetmesh.graph import Stage
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.simulate.layer_costs import LayerCosts
from hetmesh.simulate.rank_work import RankWork, rank_work
from hetmesh.simulate.stage_costs import ModuleCosts, StageCosts
from support import tiny_vlms

MACHINE = Machine(
    "test", "", {"float64": 1e12}, efficiency=1.0, node_bandwidth=1e9, node_latency=1e-6, memory_bandwidth=1e12
)
CP = '[parallelism.vision]\nranks = "0-1"\n[parallelism.llm]\nranks = "0-1"\ncontext_parallel_degree = {}\n'


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of Qwen3.5 with context parallelism of two degrees."""
    path = tiny_vlms.save("qwen3_5", tmp_path_factory.mktemp("directory"))
    return {cp: resolve(parse_recipe(tiny_vlms.recipe_text(path, CP.format(cp)))) for cp in (1, 2)}


def stage_cost(run, work, recompute=False):
    module = ModuleCosts(run.graph["llm"], run.shapes["llm"], True, LayerCosts(MACHINE))
    costs = StageCosts(module, Stage("llm", 0), fed=True, backward=True, recompute=recompute)
    return costs.costs([[work]])[0]


def test_ranks_that_share_tokens_weigh_rows_and_cuts(runs):
    assert runs[1].graph["llm"].token_costs == (0, 0)
    row, cut = runs[2].graph["llm"].token_costs
    assert row > 0
    assert cut > 0


def test_what_cuts_send_does_not_depend_on_lengths(runs):
    layers = [layer for layer in runs[2].shapes["llm"].layers if layer.recurrences]
    cuts = RankCuts(3, 2, 1, 0)
    own = carry_time(layers[0].recurrences[0].cut_bytes(8), cuts, (0, 1), MACHINE)
    for rows in (4096, 65_536):
        plain, cut = (stage_cost(runs[2], RankWork(Work(rows, rows**2, 10), cuts=c)) for c in (RankCuts(), cuts))
        assert cut.collectives_forward - plain.collectives_forward == pytest.approx(len(layers) * own.forward)
        assert cut.collectives_backward - plain.collectives_backward == pytest.approx(len(layers) * own.backward)
        assert cut.forward - cut.collectives_forward == pytest.approx(plain.forward - plain.collectives_forward)


def test_maps_of_pieces_before_cuts_take_time_and_memory(runs):
    work = RankWork(Work(4096, 4096**2, 10), cuts=RankCuts(1, 1, 0, 1000))
    plain, mapped = (stage_cost(runs[2], replace(work, cuts=replace(work.cuts, rows=n))) for n in (0, 1000))
    assert mapped.forward > plain.forward
    assert mapped.backward_input - plain.backward_input == pytest.approx(2 * (mapped.forward - plain.forward))
    (recurrence,) = next(layer.recurrences for layer in runs[2].shapes["llm"].layers if layer.recurrences)
    assert mapped.activation_bytes - plain.activation_bytes == pytest.approx(2 * 1000 * recurrence.map_bytes(8), abs=1)
    # computed again, they are kept for no longer than their layer's backward
    plain, mapped = (stage_cost(runs[2], replace(work, cuts=replace(work.cuts, rows=n)), True) for n in (0, 1000))
    assert mapped.activation_bytes == plain.activation_bytes


def test_ranks_count_the_cuts_of_their_pieces(runs):
    run = runs[2]
    plan = run.plan(run.loader().batch(0).metas)
    for m in range(plan.routes.count("llm")):
        first, second = (rank.cuts for rank in rank_work(plan, "llm", m))
        assert first.all == second.all == first.before + second.before == first.behind + second.behind
