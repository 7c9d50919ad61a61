"""Plans of an encoder on an LLM's ranks, and splits of microbatches over its pipelines there."""

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.optimus.encoder_plans import encoder_plans
from hetmesh.balance import BalanceOptions, plan_batch
from hetmesh.cli import main
from hetmesh.cost import LayerShape, ModuleShape, WeightShape, load_machine
from hetmesh.graph import Activation, BoundarySpec, MediaItem, ModuleGraph, ModuleSpec, SampleMeta
from hetmesh.layout import MeshSpec
from hetmesh.planner import LayoutPlan, ModulePlan, Predictor, candidates
from hetmesh.planner.microbatch_splits import best_split, splits
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.resolve.planning import planned_text, recipe_problem
from hetmesh.resolve.predictions import simulate_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.schedule import PolicyOptions
from hetmesh.simulate import StepModel, simulate
from hetmesh.simulate.fill_bubbles import fill_bubbles

RECIPES = Path(__file__).parents[2] / "recipes"


def problem(ranks=8, recipe="digits", **kwargs):
    sizes = ["--training.global_batch_size=32", "--training.local_batch_size=1"] if recipe == "digits" else []
    return recipe_problem(
        resolve(load_recipe(RECIPES / f"{recipe}.toml", sizes)), machine="h100", ranks=ranks, **kwargs
    )


@pytest.mark.slow
def test_o4_encoders_have_pipelines_along_the_llm_s_or_on_ranks_of_their_own():
    for placement in ("homogeneous", "colocated", "disjoint"):
        plans = list(candidates(problem(), placement))
        found = {(plan.modules["vision"].degree("pp"), plan.modules["llm"].degree("pp")) for plan in plans}
        assert {(2, 2), (1, 2)} <= found, placement
        assert ((2, 1) in found) == (placement == "disjoint")
        for plan in plans if placement == "colocated" else ():
            vision, llm = plan.modules.values()
            assert llm.degree("pp") % vision.degree("pp") == 0
            assert llm.degree("pp") == 1 or llm.degree("tp") % vision.degree("tp") == 0
            pipeline = {"three_phase", "interleaved"} if vision.degree("pp") == llm.degree("pp") else {"three_phase"}
            assert plan.schedule in (pipeline if llm.degree("pp") > 1 else {"sequential"})
        turns = {plan.modules["llm"].stages_per_rank for plan in plans if plan.schedule == "interleaved"}
        assert turns, placement
        assert all(plan.schedule == "interleaved" or str(plan).count("stages per rank") == 0 for plan in plans)


def test_ranks_of_tensor_parallelism_share_tokens_wherever_the_model_can_unless_it_is_fixed():
    for given, shared in ((problem(), True), (problem(fixed={"llm.enable_sequence_parallel": False}), False)):
        for placement in ("homogeneous", "colocated", "disjoint"):
            for plan in itertools.islice(candidates(given, placement), 0, 4000, 7):
                for name, own in plan.modules.items():
                    assert own.sequence_parallel == (own.degree("tp") > 1 and (shared or name == "vision"))


@pytest.mark.slow
def test_a_pipeline_of_the_encoder_is_planned_written_checked_and_simulated_as_it_was_predicted(tmp_path, capsys):
    target = tmp_path / "planned.toml"
    keys = ["--ranks", "4", "--machine", "h100", "--fix", "vision.pipeline_parallel_degree=2", "--write", str(target)]
    keys += ["--fix", "llm.pipeline_parallel_degree=2", "--fix", "llm.enable_sequence_parallel=false"]
    assert (
        main(
            [
                "plan",
                str(RECIPES / "digits.toml"),
                *keys,
                "--training.global_batch_size=16",
                "--training.local_batch_size=1",
            ]
        )
        == 0
    )
    assert "vision     ranks" in capsys.readouterr().out
    assert main(["check", str(target)]) == 0
    written = load_recipe(target)
    assert written.parallelism.modules["vision"].pipeline_parallel_degree == 2
    assert not written.parallelism.modules["llm"].enable_sequence_parallel


LARGE = {
    "chain": LayoutPlan(
        "homogeneous",
        {
            "vision": ModulePlan((0, 3072), (16, 1, 48, 1, 4), sequence_parallel=True, stages_per_rank=2),
            "llm": ModulePlan((0, 3072), (16, 1, 48, 1, 4), sequence_parallel=True, stages_per_rank=6),
        },
        "interleaved",
        1,
        PolicyOptions(early=True),
    ),
    "along": LayoutPlan(
        "colocated",
        {
            "vision": ModulePlan((0, 3072), (12, 1, 128, 1, 2), "full", sequence_parallel=True, stages_per_rank=4),
            "llm": ModulePlan((0, 3072), (12, 1, 64, 1, 4), sequence_parallel=True, stages_per_rank=8),
        },
        "interleaved",
        1,
        PolicyOptions(early=True),
    ),
    "filled": LayoutPlan(
        "colocated",
        {
            "vision": ModulePlan((0, 3072), (8, 1, 96, 1, 4), "full", sequence_parallel=True, stages_per_rank=2),
            "llm": ModulePlan((0, 3072), (8, 1, 48, 1, 8), "full", sequence_parallel=True, stages_per_rank=12),
        },
        "bubble_fill",
        2,
        PolicyOptions(inner="interleaved"),
    ),
    "windows": LayoutPlan(
        "colocated",
        {
            "vision": ModulePlan((0, 3072), (4, 1, 96, 1, 8), "full", sequence_parallel=True),
            "llm": ModulePlan((0, 3072), (4, 1, 96, 1, 8), "full", sequence_parallel=True),
        },
        "three_phase",
        1,
        PolicyOptions(window=8),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.exhaustive) for name in LARGE])
def test_c2_what_is_planned_for_3072_ranks_is_what_its_recipe_simulates(name, tmp_path):
    """Of the winners of a search, and of what else a recipe can say."""
    given, plan = problem(3072, "mllm_22b_175b"), LARGE[name]
    path, target = RECIPES / "mllm_22b_175b.toml", tmp_path / "planned.toml"
    text = path.read_text(encoding="utf-8")
    target.write_text(planned_text(parse_recipe(text), text, (), given, plan), encoding="utf-8")
    assert main(["check", str(target)]) == 0
    predicted = Predictor(given, 1, 1).predict(plan)
    step = simulate_recipe(resolve(load_recipe(target)), machine="h100")
    assert step.makespan == pytest.approx(predicted.step_s, rel=1e-3)
    assert max(step.peak_bytes) == pytest.approx(predicted.peak_bytes, rel=0.01)


def test_o11_every_plan_divides_the_llm_s_degrees_and_shares_the_samples_evenly():
    plans = list(encoder_plans(8, 8, 32, 2, 48))
    assert len(set(plans)) == len(plans)
    for plan in plans:
        assert 8 % plan.pp == 8 % plan.tp == 48 % plan.pp == 0
        assert plan.pp * plan.tp * plan.lanes == 64
        assert 32 % (plan.lanes * plan.microbatch) == 0
    assert {(p.pp, p.tp) for p in plans} == {
        (pp, tp) for pp in (1, 2, 4, 8) for tp in (1, 2, 4, 8) if 64 // (pp * tp) <= 32
    }


def test_stages_take_turns_on_the_ranks_of_a_pipeline_as_often_as_layers_divide():
    plans = list(encoder_plans(4, 1, 8, 1, 24, virtual=4))
    assert {p.virtual for p in plans if p.pp == 4} == {1, 2, 3}
    assert {p.virtual for p in plans if p.pp == 2} == {1, 2, 3, 4}
    assert {p.virtual for p in plans if p.pp == 1} == {1}  # nothing to take turns with
    assert {p.virtual for p in encoder_plans(4, 1, 8, 1, 24)} == {1}


def test_layers_and_samples_that_do_not_divide_leave_plans_out():
    assert {p.pp for p in encoder_plans(4, 1, 8, 1, 6)} == {1, 2}
    assert {p.lanes for p in encoder_plans(4, 2, 6, 1, 4)} == {1, 2}


def every_split(microbatches, pipelines):
    """By trying all numbers."""
    some = itertools.product(range(1, microbatches + 1), repeat=pipelines)
    return [each for each in some if sum(each) == microbatches]


def test_o4_splits_are_enumerated():
    assert len(list(splits(8, 2))) == math.comb(7, 1) == 7
    for microbatches, pipelines in itertools.product(range(1, 9), range(1, 5)):
        found = list(splits(microbatches, pipelines))
        assert found == every_split(microbatches, pipelines)
        assert len(found) == math.comb(microbatches - 1, pipelines - 1)


def test_of_many_splits_an_even_one_is_moved_from():
    """On a sum of convex functions single moves reach the optimum; an even one is the start, and `most` holds."""
    for seed in range(20):
        rng = random.Random(seed)
        weights, asked = [rng.uniform(0.5, 3) for _ in range(4)], []

        def seconds(split, weights=weights, asked=asked):
            asked.append(split)
            return sum(w * n * n for w, n in zip(weights, split, strict=True))

        found = best_split(14, 4, seconds, 200)
        assert asked[0] == (4, 4, 3, 3)
        assert len(asked) == len(set(asked)) < len(every_split(14, 4))
        assert seconds(found) == min(map(seconds, every_split(14, 4)))
        asked.clear()
        best_split(14, 4, seconds, 7)
        assert len(asked) == 7
    assert best_split(3, 4, seconds, 9) is None
    assert best_split(8, 2, lambda split: math.inf, 9) is None
    assert best_split(8, 2, lambda split: math.inf if split[0] < 7 else 1.0, 9) == (7, 1)


def an_llm_and_an_encoder(stages, layers, width, pipelines):
    """An LLM of a lane with so many layers per stage, and an encoder in slices of a layer on its ranks."""
    ranks = range(len(stages))
    names, own = tuple(f"l{i}" for i in range(sum(stages))), tuple(f"e{i}" for i in range(layers))
    cuts = list(itertools.accumulate(stages, initial=0))
    mesh = MeshSpec.make(ranks, pp=len(stages) // pipelines, dp_replicate=pipelines)
    slices = tuple((each,) for each in own)
    vision = ModuleSpec("vision", mesh, own, "image", features=64, splits=slices, activation=Activation(64, True))
    cut = tuple(names[a:b] for a, b in itertools.pairwise(cuts))
    llm = ModuleSpec("llm", MeshSpec.make(ranks, pp=len(stages)), names, splits=cut, activation=Activation(128, True))
    shapes = {
        spec.name: ModuleShape(
            spec.name, tuple(LayerShape(x, (WeightShape(f"{x}.w", (n, n), 1),)) for x in spec.layers)
        )
        for spec, n in ((vision, width), (llm, 1280))
    }
    machine = replace(load_machine("h100"), peak_flops={"float32": 1e12}, launch_overhead=0.0, ranks_per_node=8)
    return StepModel(ModuleGraph((vision, llm), (BoundarySpec("vision", "llm", "image"),)), shapes, machine)


def seconds_of(model, samples, split=None, size=1):
    """Of the simulated step, so many samples per microbatch: with a split, or where all lanes take part in each."""
    balance = BalanceOptions(microbatch_shares={"vision": split} if split else {})
    plan = plan_batch(model.graph, samples, size, balance)
    schedule = fill_bubbles(model, plan, True, PolicyOptions())
    return simulate(schedule, model.costs(plan, schedule)).makespan


def images(rows):
    samples = [
        SampleMeta(f"s{i}", 90 + n, (MediaItem("image", (3, 1, 1), 0, n),), ((60, 80),)) for i, n in enumerate(rows)
    ]
    return [replace(sample, rows={"vision": sample.media[0].rows}) for sample in samples]


CASES = [0, 1, 2, *(pytest.param(i, marks=pytest.mark.exhaustive) for i in range(3, 30))]


@pytest.mark.parametrize("seed", CASES)
def test_o4_the_chosen_split_is_the_best_of_all_by_simulation(seed):
    """Random LLMs of two or four stages of unequal size, two or four pipelines, images of unequal size."""
    rng = random.Random(seed)
    pipelines, microbatches = rng.choice([(2, 6), (2, 8), (4, 6)])
    stages = [rng.randint(1, 6) for _ in range(rng.choice([pipelines, 4]))]
    model = an_llm_and_an_encoder(stages, rng.choice([2, 4]), rng.choice([640, 1000, 1280]), pipelines)
    samples = images([rng.randint(40, 90) for _ in range(microbatches)])
    known = {split: seconds_of(model, samples, split) for split in every_split(microbatches, pipelines)}
    best = min(known.values())
    assert known[best_split(microbatches, pipelines, known.__getitem__, len(known))] == best
    few = best_split(microbatches, pipelines, known.__getitem__, len(known) - 1)
    assert known[few] <= 1.05 * best


def test_o4_a_pipeline_on_stages_with_more_gaps_takes_more():
    """The rank of a smaller stage is idle under even shares, and has time for the encoder."""
    samples = images([64] * 16)
    for stages, side in (((2, 6), 0), ((5, 3), 1)):
        model = an_llm_and_an_encoder(stages, 4, 1280, 2)
        known = {split: seconds_of(model, samples, split, 2) for split in splits(8, 2)}
        chosen = best_split(8, 2, known.__getitem__, 7)
        assert chosen[side] > 4
        assert known[chosen] < 0.96 * min(known[4, 4], seconds_of(model, samples, size=2))
