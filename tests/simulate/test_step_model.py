"""StepModel: packed and context-parallel work, transfers against their plans, one memory for all who ask."""

from dataclasses import replace
from pathlib import Path

import pytest

from hetmesh.attention.attention_plan import fetch_order, plan_attention
from hetmesh.balance import edge_layouts, plan_batch
from hetmesh.cost import LayerOptions, Machine, Profile, Rates, Work, activation_bytes, layer_time, load_machine
from hetmesh.cost.expert_costs import exchange_time
from hetmesh.data.loader import Loader
from hetmesh.errors import HetmeshError
from hetmesh.graph import Stage
from hetmesh.layout import plan_transfer
from hetmesh.layout.intervals import extent
from hetmesh.recipe.recipe import load_recipe
from hetmesh.report.explain import explain
from hetmesh.resolve.recipe_step_model import recipe_step_model
from hetmesh.resolve.resolved import resolve
from hetmesh.resolve.schedules import recipe_schedule
from hetmesh.simulate import LayerCosts, StepModel, rank_work
from hetmesh.simulate.layer_costs import PARTS

RECIPES = Path(__file__).parents[2] / "recipes"
MACHINE = Machine("test", "", {"float32": 1e9}, memory_bandwidth=1e10, node_bandwidth=1e9, efficiency=1.0)
LLM = Stage("llm")


def setup(name, *overrides):
    recipe = load_recipe(RECIPES / name, overrides)
    resolved = resolve(recipe)
    graph = resolved.graph
    loader = Loader(resolved.source, recipe.batch.global_batch_size, resolved.expander, seed=0)
    plan = plan_batch(graph, [d.meta for d in loader.batch(0)], recipe.batch.microbatch_size)
    return recipe, resolved.shapes, graph, plan, recipe_schedule(recipe, graph, plan.routes)


def costs_of(name, *overrides, machine=MACHINE):
    recipe, shapes, graph, plan, schedule = setup(name, *overrides)
    return recipe_step_model(recipe, graph, shapes, machine=machine).costs(plan, schedule)


def test_packed_lanes_compute_their_tokens_and_padded_ones_the_longest():
    *_, padded, _ = setup("digits_single.toml")
    *_, packed, _ = setup("digits_single.toml", "--training.pack_samples", "true")
    (a,), (b,) = rank_work(padded, "llm", 0), rank_work(packed, "llm", 0)
    lengths = [s.tokens for s in (packed.samples[i] for i in packed.samples_of("llm", 0, 0))]
    assert b.work.rows == sum(lengths) < a.work.rows == len(lengths) * max(lengths)
    assert b.work.targets == a.work.targets
    assert 2 * sum(n * (n + 1) // 2 for n in lengths) <= b.work.pairs


def test_context_parallel_ranks_share_tokens_targets_and_entries():
    *_, plan, _ = setup("digits_long.toml")
    for m in range(plan.num_microbatches):
        found = rank_work(plan, "llm", m)
        assert len(found) == 4  # two lanes of two ranks
        for lane in range(2):
            ranks = found[2 * lane : 2 * lane + 2]
            samples = [plan.samples[i] for i in plan.samples_of("llm", m, lane)]
            assert sum(r.work.rows for r in ranks) == sum(s.tokens for s in samples)
            assert sum(r.work.targets for r in ranks) == sum(s.num_targets for s in samples)
            shares, mask = plan.lane_tokens("llm", m, lane).shares, plan.lane_mask("llm", m, lane)
            taken = fetch_order(mask, shares, None, 256)
            assert [r.fetched for r in ranks] == [sum(extent(chunk[i]) for chunk in taken) for i in range(2)]
            for i, rank in enumerate(ranks):
                attention = plan_attention(mask, shares, i, None, 256)
                calls = [c for work in (attention.own, *(each for _, each in attention.chunks)) for c in work.calls]
                computed = sum((c.rows[1] - c.rows[0]) * extent(c.keys) for c in calls)
                assert rank.work.pairs == 2 * computed
            assert sum(r.served for r in ranks) == sum(r.fetched for r in ranks)


def test_an_encoder_shares_rows_along_cp():
    tables = ("--parallelism.vision.context_parallel_degree", "2")
    tables += ("--parallelism.vision.data_parallel_replicate_degree", "1")
    *_, plan, _ = setup("digits_qwen3vl.toml", *tables)
    ranks = rank_work(plan, "vision", 0)
    assert len(ranks) == 2
    assert sum(r.work.rows for r in ranks) == sum(
        plan.samples[i].rows["vision"] for i in plan.samples_of("vision", 0, 0)
    )
    assert all(r.work.rows for r in ranks)


def test_keys_are_fetched_and_gradients_summed_over_cp():
    slow = replace(MACHINE, peak_flops={"float32": 1e12}, node_bandwidth=1e7)
    costs = costs_of("digits_long.toml", machine=slow)
    cost = costs.stages[LLM, 0]
    free = costs_of("digits_long.toml", machine=replace(slow, node_bandwidth=0.0)).stages[LLM, 0]
    assert cost.collectives_forward > free.collectives_forward == 0
    assert cost.collectives_backward > cost.collectives_forward  # the keys again, and their gradients
    one_lane = costs_of(
        "digits_long.toml",
        *("--parallelism.llm.data_parallel_replicate_degree", "1"),
        *("--parallelism.llm.ranks", "0-1"),
        machine=slow,
    )
    assert 0 < one_lane.reduce[LLM] < costs.reduce[LLM]  # over cp alone, over both


@pytest.mark.parametrize(("name", "units"), [("digits_fsdp.toml", 3), ("digits_single.toml", 0)])
def test_hooks_of_fsdp_come_with_every_forward_and_backward(name, units):
    """Of two blocks and the rest."""
    plain, hooked = (costs_of(name, machine=replace(MACHINE, shard_overhead=s)).stages for s in (0.0, 0.5))
    for (stage, m), cost in plain.items():
        if stage == LLM:
            assert hooked[stage, m].forward - cost.forward == pytest.approx(0.5 * units)
            assert hooked[stage, m].backward - cost.backward == pytest.approx(0.5 * units)


def test_fetches_hide_behind_attention():
    fast = replace(MACHINE, peak_flops={"float32": 1e7}, node_bandwidth=1e12)
    cost = costs_of("digits_long.toml", machine=fast).stages[LLM, 0]
    assert cost.collectives_forward < 0.3 * cost.forward  # only the last chunk is computed after it came


def test_a_rank_in_front_of_replicas_sends_to_each_of_them():
    tables = ("--parallelism.vision.data_parallel_replicate_degree", "1", "--parallelism.vision.ranks", "[0]")
    tables += ("--parallelism.llm.tensor_parallel_degree", "2", "--parallelism.llm.ranks", "2-3")
    recipe, shapes, graph, plan, schedule = setup("digits.toml", *tables)
    machine = replace(MACHINE, node_bandwidth=1e6, node_latency=0.0)
    costs = recipe_step_model(recipe, graph, shapes, machine=machine).costs(plan, schedule)
    edge = next(e for e in schedule.stages.edges if plan.graph[e.source.module].mesh.size == 1 and not e.internal)
    shape, src, dst = edge_layouts(plan, edge, 0)
    (step,) = plan_transfer(shape, src, dst).steps
    sent = 4 * sum(piece.numel for piece in step.sent(0))
    assert sent == 2 * costs.transfers[edge, 0, 0].bytes > 0
    assert costs.transfers[edge, 0, 0].seconds == pytest.approx(sent / 1e6)
    assert costs.transfers[edge.reversed, 0, 0].seconds == pytest.approx(sent / 2 / 1e6)


def assert_bytes_are_those_of_plans(costs, plan, schedule):
    """On the rank that receives most, there and back; 4 bytes an element. Returns the rows of each edge."""
    rows = dict.fromkeys(schedule.stages.edges, 0)
    for edge in rows:
        for route in schedule.routes.along(edge):
            way = plan_transfer(*edge_layouts(plan, *route))
            for each, there in ((route, way), (route.reversed, way.transpose())):
                if each in costs.transfers:
                    most = max(there.bytes_received(rank, 4) for rank in there.dst.mesh.ranks)
                    assert costs.transfers[each].bytes == most
            rows[edge] += way.shape[0]
    return rows


@pytest.mark.parametrize(
    "name", ["digits_cp_pp.toml", "digits_overlapping.toml", "digits_fsdp.toml", "digits_long.toml"]
)
def test_bytes_of_transfers_are_those_of_their_plans(name):
    recipe, shapes, graph, plan, schedule = setup(name)
    costs = recipe_step_model(recipe, graph, shapes, machine=MACHINE).costs(plan, schedule)
    assert_bytes_are_those_of_plans(costs, plan, schedule)


def test_explain_and_simulation_know_one_memory():
    recipe, shapes, graph, plan, schedule = setup("digits_cp_pp.toml")
    costs = recipe_step_model(recipe, graph, shapes, machine=MACHINE).costs(plan, schedule)
    view = explain(resolve(recipe))
    assert {rank: view.memory(rank) for rank in graph.ranks} == dict(costs.static_bytes)


def test_coefficients_are_what_layers_cost():
    _, shapes, *_ = setup("digits.toml")
    machine = load_machine("h100")
    known, work = LayerCosts(machine), Work(700, 90_000, 33)
    for layer in shapes["llm"].layers:
        for upstream, again in ((False, False), (True, False), (True, True)):
            how = LayerOptions("float32", upstream, again, (0, 1))
            made = dict(zip(PARTS, (1, work.rows, work.pairs, work.targets) @ known.of(layer, how), strict=True))
            time = layer_time(layer, work, Rates.of(machine, "float32"), upstream=upstream, tp=2, recompute=again)
            for part in ("forward", "backward_input", "backward_weight", "recompute"):
                assert made[part] == pytest.approx(getattr(time, part), rel=1e-6, abs=1e-12)
            kept = activation_bytes(layer, work, how)
            assert made["kept"] == pytest.approx(kept, abs=3)


def test_tokens_travel_between_ranks_with_different_experts():
    _, shapes, _, plan, _ = setup("digits_moe.toml")
    spread_costs = costs_of("digits_moe.toml")
    alone_costs = costs_of("digits_moe.toml", "--parallelism.llm.expert_parallel_degree", "1")
    alone, spread = (costs.stages[LLM, 0] for costs in (alone_costs, spread_costs))
    assert alone.collectives_forward == 0
    blocks = [layer for layer in shapes["llm"].layers if layer.expert_weights]
    assert len(blocks) == 3
    rows = max(rank.work.rows for rank in rank_work(plan, "llm", 0))
    each = exchange_time(blocks[0], Work(rows), LayerOptions("float32", True, experts=(2, 3)), MACHINE)
    assert spread.collectives_forward == pytest.approx(3 * each.forward, rel=1e-6)
    assert spread.collectives_backward == pytest.approx(3 * each.backward, rel=1e-6)
    assert spread_costs.reduce[LLM] < alone_costs.reduce[LLM], "no gradients of experts are summed over replicas"


def test_a_profile_of_another_dtype_is_refused():
    _, shapes, graph, *_ = setup("digits.toml")
    with pytest.raises(HetmeshError, match=r"measured in bfloat16, and 'llm' computes in float32"):
        StepModel(graph, shapes, MACHINE, profile=Profile({}, dtype="bfloat16"))


def test_an_action_takes_at_least_as_long_as_the_host_launches_it():
    """Embedding, three layers of 12 operations, norm and head; the first norm's input has no gradient there."""
    without, some, many = (
        costs_of("digits_single.toml", machine=replace(MACHINE, launch_overhead=each)) for each in (0.0, 1e-9, 1.0)
    )
    assert some == without
    (llm,) = (cost for (stage, _), cost in many.stages.items() if stage == LLM)
    assert llm.forward == pytest.approx(1 + 3 * 12 + 4)
    assert llm.backward > 1.8 * llm.forward
    compiled = costs_of("digits_single.toml", "--compile.enable=true", machine=replace(MACHINE, launch_overhead=1.0))
    (fused,) = (cost for (stage, _), cost in compiled.stages.items() if stage == LLM)
    assert fused.forward < 6


def test_launching_counts_what_routes_tokens_to_experts():
    keys = [f"--parallelism.llm.{key}" for key in ("ranks=2-3", "data_parallel_replicate_degree=2")]
    launching = replace(MACHINE, launch_overhead=1.0)
    seconds = {
        degree: next(
            (cost.forward, cost.backward)
            for (stage, _), cost in costs_of(
                "digits_moe.toml", *keys, f"--parallelism.llm.expert_parallel_degree={degree}", machine=launching
            ).stages.items()
            if stage == LLM
        )
        for degree in (1, 2)
    }
    forward, backward = (b - a for a, b in zip(seconds[1], seconds[2], strict=True))
    assert (forward, backward) == pytest.approx((3 * (17 - 9), 3 * (7 - 3)))
