"""One global norm and one clip over modules on different meshes (U6): as torch computes them in one process."""

from pathlib import Path

import pytest
import torch
from torch import nn

from hetmesh.boundary import World
from hetmesh.recipe.recipe import load_recipe
from hetmesh.testing.parity import reference
from hetmesh.training.feed import Feed
from hetmesh.training.gradients import clip_factor, counted, reduce_over_ranks, scale, squared_norm
from hetmesh.training.job import Job

RECIPES = Path(__file__).parents[2] / "recipes"


def norm_and_clip(rank, recipe, max_norm):
    """Global norm before and after clipping, and a clipped gradient that this rank has in full."""
    world = World.current()
    job = Job.assemble(recipe, world)
    drawn = next(job.loader)
    plan = job.plan([d.meta for d in drawn])
    job.runtime.run(job.schedule(plan), plan, Feed(job.loader, drawn, plan, job.adapters, rank))
    parameters = list(job.root.parameters())
    scale(parameters, 1 / plan.num_targets)
    modules = [(module, job.graph[name].mesh) for name, module in job.root.named_children()]
    norms = []
    for _ in range(2):
        (squares,) = reduce_over_ranks([squared_norm(counted(modules, rank))], world)
        norms.append(squares**0.5)
        scale(parameters, clip_factor(norms[-1], max_norm))
    return norms


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("digits", ()),
        ("digits_colocated", ()),
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
