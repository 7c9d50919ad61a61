"""Whether a recipe fits a machine, before any is booked."""

import json
from pathlib import Path

import pytest

from hetmesh.balance import largest_batches
from hetmesh.boundary.process_groups import ends_are_tied, groups_of_ranks, job_communicators, job_groups
from hetmesh.cli import main
from hetmesh.cost import StaticMemory, load_machine
from hetmesh.cost.static_memory import update_bytes
from hetmesh.planner import search
from hetmesh.planner.predict import plan_fit
from hetmesh.recipe.recipe import load_recipe
from hetmesh.report import as_text, explain
from hetmesh.resolve.planning import recipe_problem
from hetmesh.resolve.predictions import memory_fit, step_memory
from hetmesh.resolve.recipe_step_model import agreed_step_model
from hetmesh.resolve.resolved import resolve
from hetmesh.simulate import MemoryFit, RankMemory

RECIPES = Path(__file__).parents[2] / "recipes"
H100 = load_machine("h100")


def facts(name, *overrides):
    """A recipe, and what predicts its steps."""
    resolved = resolve(load_recipe(RECIPES / f"{name}.toml", overrides))
    return resolved, agreed_step_model(resolved.recipe, resolved.graph, resolved.shapes, "h100")


@pytest.fixture(scope="module")
def large():
    return facts("siglip_qwen3_8b", "--training.steps", "20")


def test_u20_the_predicted_peak_bounds_every_batch_of_the_run(large):
    resolved, model = large
    fit = memory_fit(*large)
    assert (fit.samples, fit.drawn) == (20 * 64, 20 * 64)
    assert set(fit.ranks) == set(range(8))
    loader = resolved.loader()
    for step in range(0, 20, 5):
        for rank, memory in step_memory(resolved, model, resolved.plan(loader.batch(step).metas)).items():
            assert memory.total <= fit.ranks[rank].total
    assert fit == memory_fit(*large)


def test_u20_what_fills_the_fullest_rank_adds_up(large):
    resolved, model = large
    graph = resolved.graph
    fit = memory_fit(*large)
    memory = fit.ranks[fit.fullest]
    held = model.held[fit.fullest]
    assert memory.parameters == held.parameters
    assert memory.gradients == held.gradients
    assert memory.optimizer == held.optimizer
    assert memory.context == H100.context_bytes
    groups = groups_of_ranks(job_groups(graph, 8, lambda spec: ends_are_tied(spec, model.shape(spec.name))))
    assert (
        job_communicators(graph, 8, lambda spec: model.shape(spec.name))[fit.fullest] == groups[fit.fullest] + 1
    )  # and torch's default one
    assert memory.communicators == (groups[fit.fullest] + 1) * H100.communicator_bytes
    assert memory.total == memory.tensors + memory.communicators + memory.context == fit.peak_bytes
    assert fit.spare_bytes == H100.memory_bytes - fit.peak_bytes


@pytest.mark.slow
def test_u20_recomputation_is_per_module_and_covers_the_vision_tower():
    layouts = {
        "none": ("none", "none"),
        "vision": ("none", "full"),
        "both": ("full", "full"),
    }
    held = {}
    for name, (mode, own) in layouts.items():
        keys = ["--activation_checkpoint.mode", mode, "--modules.vision.activation_checkpoint", own]
        resolved, model = facts("siglip_qwen3_8b", "--training.steps", "1", *keys)
        plan = resolved.plan(resolved.loader().batch(0).metas)
        costs = model.costs(plan, resolved.schedules.of(plan))
        held[name] = {stage.module: cost.activation_bytes for (stage, _), cost in costs.stages.items()}
    assert 5 * held["vision"]["vision"] < held["none"]["vision"]
    assert held["vision"]["llm"] == held["none"]["llm"] > 3 * held["both"]["llm"]


@pytest.mark.slow
def test_u20_explain_says_by_how_much_a_recipe_fits_or_not(tmp_path, capsys):
    path = str(RECIPES / "digits_fsdp.toml")
    small = tmp_path / "small.toml"
    small.write_text('source = "a test"\nmemory_bytes = 10_000_000\n')
    assert main(["explain", path, "--machine", "h100", "--json"]) == 0
    fit = json.loads(capsys.readouterr().out)["fit"]
    assert fit["fits"] is True
    assert fit["spare_bytes"] == H100.memory_bytes - fit["peak_bytes"]
    assert set(fit["ranks"]) == {"0", "1", "2", "3"}
    assert main(["explain", path, "--machine", str(small)]) == 0
    out = capsys.readouterr().out
    assert "memory: does not fit small: " in out
    assert " of 10 MB on the fullest rank, " in out
    assert "too much\n  rank " in out
    assert "activations " in out
    view = explain(resolve(load_recipe(path)))
    assert view.fit is not None
    assert view.fit.fits is None
    assert "the memory of machine cpu is not known" in as_text(view)


@pytest.mark.slow
def test_u20_plan_knows_it_of_every_layout():
    resolved = resolve(load_recipe(RECIPES / "digits.toml"))
    problem = recipe_problem(resolved, machine="h100", ranks=2, fixed={"placement": "colocated"})
    memory = plan_fit(problem, search(problem, shown=1).fastest.plan)
    assert memory.fits is True
    most = memory.ranks[memory.fullest]
    assert most.communicators > 0
    assert memory.peak_bytes == most.total


def test_the_largest_batch_is_of_the_largest_samples(large):
    resolved, _ = large
    graph, loader = resolved.graph, resolved.loader()
    samples = loader.drawn([i for step in range(4) for i in loader.indices(step)]).metas
    most = sorted(samples.tokens.tolist())[-64:]
    batches = largest_batches(graph, samples, 64)
    assert sorted(most) in [sorted(batch.tokens.tolist()) for batch in batches]
    few = samples.take([0, 1, 2])
    assert all(len(batch) == 64 for batch in largest_batches(graph, few, 64))


def test_what_an_optimizers_step_holds():
    held = [StaticMemory(10, 40, 40, 80, 24), StaticMemory(5, 20, 20, 40, 16)]
    cases = {
        ("AdamW", "fused", True): 0,
        ("AdamW", "foreach", True): 40,  # the root of the second moments of one module's parameters
        ("Adam", "foreach", True): 80,
        ("AdamW", "for-loop", True): 48,
        ("SGD", "fused", True): 40,
        ("SGD", "fused", False): 0,
        ("SGD", "for-loop", True): 24,
    }
    assert {case: update_bytes(held, *case) for case in cases} == cases
    assert update_bytes([], "AdamW", "for-loop", True) == 0


def test_the_fullest_rank_decides():
    fit = MemoryFit("m", 100, {0: RankMemory(parameters=60), 1: RankMemory(parameters=70, context=40)})
    assert (fit.fullest, fit.peak_bytes, fit.spare_bytes, fit.fits) == (1, 110, -10, False)
