"""One global norm and one clip over modules on different meshes (U6): as torch computes them in one process."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from hetmesh.boundary import World
from hetmesh.boundary.world import reduce_over_ranks
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.parity import reference
from hetmesh.training.gradients import clip_factor, counted, scale, squared_norm
from hetmesh.training.job import Job

RECIPES = Path(__file__).parents[2] / "recipes"


def norm_and_clip(rank, recipe, max_norm):
    """Global norm before and after clipping, and a clipped gradient that this rank has in full."""
    world = World.current()
    job = Job.assemble(resolve(recipe), world)
    drawn = next(job.loader)
    plan = job.plan([d.meta for d in drawn])
    job.runtime.run(job.schedule(plan), plan, job.feed(drawn, plan, 0), step=0)
    parameters = list(job.root.parameters())
    scale(parameters, 1 / plan.num_targets)
    norms = []
    for _ in range(2):
        (squares,) = reduce_over_ranks([squared_norm(counted(job.parallel.values(), rank))], world)
        norms.append(squares**0.5)
        scale(parameters, clip_factor(norms[-1], max_norm))
    return norms


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        pytest.param("digits", (), marks=pytest.mark.exhaustive),
        pytest.param("digits_colocated", (), marks=pytest.mark.exhaustive),
        ("digits_overlapping", ()),
        ("digits_fsdp", ()),
        ("digits", ("--modules.vision.trainable=false",)),
    ],
)
def test_the_norm_over_all_meshes_is_that_of_one_process(pool4, name, overrides):
    recipe = load_recipe(
        RECIPES / f"{name}.toml", ("--training.local_batch_size=4", "--training.dtype=float64", *overrides)
    )
    gradients = [g for g in reference(recipe, steps=1).gradients.values() if g is not None]
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, 0.25))
    clipped = float(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
    assert norm > 0.25
    for before, after in pool4.run(norm_and_clip, recipe, 0.25):
        # exact_dtypes is not on here, so transformers' casts to fp32 bound what can be told apart
        assert before == pytest.approx(norm, rel=1e-5)
        assert after == pytest.approx(clipped, rel=1e-5)


def test_no_clipping_below_the_norm_nor_of_infinite_gradients():
    for norm, max_norm in ((5.0, 0.0), (5.0, 6.0), (float("inf"), 1.0), (float("nan"), 1.0)):
        assert clip_factor(norm, max_norm) == 1.0
    assert clip_factor(5.0, 1.0) == pytest.approx(0.2, rel=1e-5)


def gradients_that_come_and_go(rank, recipe, missing):
    """Per step the norm that a job gives, that of the gradients as they are, and which ranks have a certain one.

    Args:
        missing: per step, ranks whose lanes have no gradient of it.
    """
    world, found = World.current(), []
    job = Job.assemble(resolve(recipe), world)
    parameter = dict(job.root.named_parameters()).get("llm.model.norm.weight")
    reducers = job.runtime.reducers
    for stage in [stage for stage in reducers if stage.module == "llm"]:
        reducers[stage] = partial(without, reducers[stage], parameter, missing, rank, found)
    for _ in missing:
        for p in job.parameters():
            p.grad = None
        result = job.forward_backward()
        (squares,) = reduce_over_ranks([squared_norm(job.counted)], world)
        found.append((result.grad_norm, squares**0.5, parameter is not None and parameter.grad is not None))
    return found


def without(reducer, parameter, missing, rank, found):
    if rank in missing[len(found)]:
        parameter.grad = None
    return reducer()


@pytest.mark.slow
def test_a_gradient_of_some_steps_is_in_the_norm_and_none_where_no_rank_has_it(pool4):
    recipe = load_recipe(RECIPES / "digits_colocated.toml", ("--training.local_batch_size=4",))
    missing = [(), (0, 1, 2, 3), (0, 1, 2, 3), (0, 1), ()]  # ranks 0 and 1 are a lane
    for steps in pool4.run(gradients_that_come_and_go, recipe, missing, timeout=120.0):
        assert [has for *_, has in steps] == [len(ranks) < 4 for ranks in missing]
        for norm, as_it_is, _ in steps:
            assert norm == pytest.approx(as_it_is, rel=1e-5)


def gradients_of_a_run(rank, recipe, missing):
    """As above, of the runtime alone, which settles gradients itself where it is not told to leave it."""
    job, found = Job.assemble(resolve(recipe), World.current()), []
    parameter = dict(job.root.named_parameters()).get("llm.model.norm.weight")
    reducers = job.runtime.reducers
    for stage in [stage for stage in reducers if stage.module == "llm"]:
        reducers[stage] = partial(without, reducers[stage], parameter, missing, rank, found)
    drawn = next(job.loader)
    plan = job.plan([d.meta for d in drawn])
    for _ in missing:
        for p in job.parameters():
            p.grad = None
        job.runtime.run(job.schedule(plan), plan, job.feed(drawn, plan, 0), step=0)
        found.append(parameter is not None and parameter.grad is not None)
    return found


@pytest.mark.slow
def test_a_run_alone_settles_gradients(pool4):
    recipe = load_recipe(RECIPES / "digits_colocated.toml", ("--training.local_batch_size=4",))
    missing = [(), (0, 1, 2, 3), (0, 1), (0, 1, 2, 3)]
    for has in pool4.run(gradients_of_a_run, recipe, missing, timeout=120.0):
        assert has == [len(ranks) < 4 for ranks in missing]


def squares_with_a_bad_gradient(rank, recipe, name, where, value):
    """The squared norm over all ranks where rank `where` has one gradient that is not finite."""
    world = World.current()
    job = Job.assemble(resolve(recipe), world)
    for key, parameter in job.root.named_parameters():
        parameter.grad = torch.ones_like(parameter)
        if key == name and rank == where:
            parameter.grad[0] = value
    mine = job.counted
    others = [p for p in job.root.parameters() if all(p is not each for each in mine)]
    (squares,) = reduce_over_ranks([squared_norm(mine, others)], world)
    (without,) = reduce_over_ranks([squared_norm(mine)], world)
    return squares, without


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_u25_one_gradient_that_is_not_finite_on_any_rank_is_seen_by_all(pool4, value):
    recipe = load_recipe(RECIPES / "digits_overlapping.toml", ("--training.local_batch_size=4",))
    for where in range(2, 4):  # both hold a replica, and one of them counts it
        for squares, _ in pool4.run(squares_with_a_bad_gradient, recipe, "llm.model.norm.weight", where, value):
            assert not math.isfinite(squares)
    finite = pool4.run(squares_with_a_bad_gradient, recipe, "llm.model.norm.weight", 9, value)
    assert all(squares == without > 0 for squares, without in finite)


def test_norms_of_gradients_on_several_devices_are_taken_device_by_device(monkeypatch):
    """Of offloaded modules and others. The meta device stands for a second one: torch cannot stack what lies apart."""
    calls = []
    norm = torch._foreach_norm

    def norms(gradients, order):
        calls.append({gradient.device.type for gradient in gradients})
        return norm([torch.full_like(gradient, 2.0, device="cpu") for gradient in gradients], order)

    monkeypatch.setattr(torch, "_foreach_norm", norms)
    parameters = [nn.Parameter(torch.zeros(3, device=device)) for device in ("cpu", "meta", "cpu")]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    assert squared_norm(parameters) == pytest.approx(3 + 12 + 3)
    assert calls == [{"meta"}]  # a CPU has a way of its own


def test_the_norm_of_large_gradients_is_not_lost_to_rounding():
    """Torch adds up the squares of a whole tensor in fp32, one after the other: 2e-4 off in what is squared."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((2048, 2048), (0, 3), (3, 0), ())]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    exact = sum(float(parameter.grad.double().square().sum()) for parameter in parameters)
    assert float(squared_norm(parameters)) == pytest.approx(exact, rel=1e-7)
