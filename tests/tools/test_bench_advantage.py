"""The benchmark of layouts of their own against common ones: its cases are what it says, its predictions are those of
`hetmesh simulate`, and a run of small ones has its keys."""

import argparse
import importlib
import json
from pathlib import Path

import pytest

from hetmesh.cost import load_machine
from hetmesh.resolve.predictions import simulate_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.simulate.rank_work import rank_work
from support.often import some

TOOLS = Path(__file__).parents[2] / "tools"
LLM = {"a": {"tp": 2}, "b": {"pp": 2}, "c": {"cp": 2}, "d": {"dp_replicate": 2}, "e": {"dp_replicate": 2}}


@pytest.fixture
def advantage(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("benchmarks.advantage")


@pytest.mark.parametrize("name", some(sorted(LLM)[::2], sorted(LLM)))
def test_both_sides_of_a_case_train_the_same_with_the_same_layout_of_the_llm(name, advantage):
    case = advantage.CASES[name].smaller(4)
    batches, shapes = set(), set()
    for layout in (*case.before, *case.after, *case.also):
        recipe = case.recipe(layout)
        resolved = resolve(recipe)
        mesh = resolved.graph["llm"].mesh
        assert {axis: size for axis, size in zip(mesh.axes, mesh.sizes, strict=True) if size > 1} == LLM[name]
        assert resolved.graph["vision"].options.activation_checkpoint == "none"
        metas = resolved.loader().batch(0).metas
        batches.add(tuple((meta.id, meta.tokens) for meta in metas))
        shapes.add(tuple(shape.parameters for shape in resolved.shapes.values()))
        assert recipe.batch.global_batch_size == case.samples
    assert len(batches) == len(shapes) == 1


def test_about_a_third_of_the_flops_are_the_encoders(advantage):
    for case in advantage.CASES.values():
        assert 0.25 < advantage.encoder_share(case.recipe(case.after[-1])) < 0.4


def test_an_encoder_on_every_rank_computes_all_images_on_each(advantage):
    case = advantage.CASES["c"].smaller(4)
    computed = {}
    for layouts in (case.before, case.after):
        resolved = resolve(case.recipe(layouts[-1]))
        plan = resolved.plan(resolved.loader().batch(0).metas)
        mesh = resolved.graph["vision"].mesh
        computed[layouts] = [[each.work.rows for each in rank_work(plan, "vision", 0)], mesh.ranks]
    rows = 256 * case.items * case.before[-1].microbatch
    assert computed[case.before] == [[rows], (0, 1)]  # of the one lane, which both ranks are
    assert computed[case.after] == [[rows // 2] * 2, (0, 1)]


def test_every_cut_of_the_chain_competes(advantage):
    case = advantage.CASES["b"].smaller(4)
    first = [len(resolve(case.recipe(layout)).graph["llm"].splits[0]) - 1 for layout in case.before]
    assert first == list(range(1, case.layers))


def test_predictions_are_those_of_the_simulator(advantage, tmp_path):
    case, machine = advantage.CASES["d"].smaller(4), tmp_path / "machine.toml"
    machine.write_text(
        'source = "test"\nbusy_slowdown = [1.0, 1.2]\nnode_bandwidth = 1e9\n[peak_flops]\nfloat32 = 1e10\n'
    )
    recipe = case.recipe(case.after[0], str(machine))
    first, second = advantage.predicted(recipe, [0, 1])
    assert first == simulate_recipe(resolve(recipe)).makespan != second


def test_a_machine_is_fitted_to_what_its_ranks_measured(advantage, tmp_path):
    measure = importlib.import_module("benchmarks.advantage.measure")
    latency, bandwidth = 2e-4, 5e8
    sums = {size: [2 * latency + size / bandwidth, 9.0, 0.0] for size in (1 << 12, 1 << 16, 1 << 20)}  # medians count
    busy = [1.0, 1.0], [1.25, 1.25]
    ranks = [measure.Machine(sums, [seconds] * 3, busy) for seconds in (0.05, 0.1)]
    path = tmp_path / "machine.toml"
    path.write_text(measure.machine_file(ranks))
    machine = load_machine(str(path))
    assert machine.node_latency == pytest.approx(latency)
    assert machine.node_bandwidth == pytest.approx(bandwidth)
    assert machine.busy_slowdown == (1.0, 1.25)
    # Alone, an update takes 0.08 s, of 32 bytes per parameter.
    assert machine.memory_bandwidth == pytest.approx(32 * measure._PARAMETERS / 0.08)


def test_lengths_that_differ_count_by_their_seconds(advantage):
    before, after = [2.0, 4.0, 30.0], [1.0, 1.0, 20.0]
    assert advantage.speedup(advantage.CASES["a"], before, after) == 2.0
    assert advantage.speedup(advantage.CASES["d"], before, after) == 36 / 22


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_small_run_has_the_keys(advantage):
    parser = argparse.ArgumentParser()
    advantage.add_arguments(parser)
    given = ["--smaller", "4", "--rounds", "2", "--profile-seconds", "0", "--seconds", "0"]
    result = advantage.run(parser.parse_args(given))
    assert set(result["speedup"]) == set(result["predicted"]) == {row["case"] for row in result["rows"]} == set("abcd")
    for row in result["rows"]:
        assert row["speedup"] > 0 < row["predicted"]
        assert row["loss_difference"] < 1e-5
        for side in row["sides"]:
            assert side["layout"] in row["candidates"]
            assert side["measured_s"] > 0 < side["predicted_s"]
            assert len(side["steps_s"]) == 2
    assert "speed-up" in advantage.table(result)
    json.dumps(result, allow_nan=False)
