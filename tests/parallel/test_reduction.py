"""The REDUCE action: which gradients there are is agreed once and taken for granted, and the result is always that of
sums which ask anew in every step."""

import random

import pytest
import torch
from torch import nn

from hetmesh.boundary import World
from hetmesh.layout import MeshSpec
from hetmesh.parallel import ParallelModule, Reduction, gradient_sums, sum_gradients
from hetmesh.parallel.gradient_axes import ParameterAxes
from support.streams import streamed

AXES = {"both": ("dp_replicate", "cp"), "cp": ("cp",), "none": (), "tied": ("dp_replicate", "cp")}
STEPS = 7


def have(step, name, rank):
    """Whether a rank has a gradient in a step: the same in the first two, then at random, often none on all ranks."""
    if name == "tied":
        return rank == 0
    draw = random.Random(f"{max(step, 1)} {name}")
    chosen = draw.choice([(), (), (1,), (0, 3), (0, 1, 2, 3)])
    return rank in chosen


def made(world):
    """A module of two parameters of each kind, in a mesh of two lanes of two ranks that share tokens."""
    spec = MeshSpec.make(range(4), dp_replicate=2, cp=2)
    mesh = world.device_mesh(spec)
    module = nn.ParameterDict({name: nn.Parameter(torch.ones(3, dtype=torch.float64)) for name in AXES})
    return ParallelModule(module, (module,), spec, mesh, {name: ParameterAxes(axes) for name, axes in AXES.items()})


def give_gradients(module, step, rank):
    for name, parameter in module.items():
        value = 10.0**rank * (1 + step)
        parameter.grad = torch.full_like(parameter, value) if have(step, name, rank) else None


def found(module):
    return {name: None if p.grad is None else p.grad.tolist() for name, p in module.items()}


def stepwise(rank):
    """Per step the gradients, those of sums that ask anew, on how many ranks something had changed, and reads."""
    world = World.current()
    parallel, plain = made(world), made(world).module
    always = {id(parallel.module["tied"])}
    reduction = Reduction(parallel, accelerator=world.accelerator, always=always)
    groups = {axis: parallel.device_mesh.get_group(axis) for axis in ("dp_replicate", "cp")}
    results, asked = [], []
    ask = gradient_sums.have_gradients
    for step in range(STEPS):
        give_gradients(parallel.module, step, rank)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hetmesh.parallel.reduction.have_gradients", lambda *a: asked.append(1) or ask(*a))
            reduction()()
            changed = torch.tensor(float(reduction.changed))
            torch.distributed.all_reduce(changed)
            if changed:
                reduction.settle()
        give_gradients(plain, step, rank)
        for name, axes in AXES.items():
            sum_gradients([plain[name]], [groups[axis] for axis in axes])
        results.append((found(parallel.module), found(plain), float(changed), len(asked)))
    return results


def aside(rank):
    with streamed(World.current()) as races:
        return stepwise(rank), races.found, races.host_waits


@pytest.mark.slow
def test_gradients_of_some_steps_on_some_ranks_are_sums_or_none_as_if_ranks_asked_in_every_step(pool4):
    ranks = pool4.run(stepwise)
    for steps in ranks:
        for given, expected, *_ in steps:
            assert given == expected
    changed, asked = zip(*[(changed, asked) for *_, changed, asked in ranks[0]], strict=True)
    assert changed[0] == changed[1] == 0  # the first step agrees, and the second has what the first had
    assert any(changed)
    assert asked == tuple(1 + sum(map(bool, changed[: i + 1])) for i in range(STEPS))
    assert any(given["both"] is None for given, *_ in ranks[0])
    assert len({str(given["both"]) for given, *_ in ranks[0]}) > 2
    assert pool4.run(aside) == [(steps, [], 0) for steps in ranks]


def of_another_stage(rank):
    """No rank of this stage has a gradient of what is tied: the other stage may, and gives its sum to all of them."""
    world = World.current()
    parallel = made(world)
    reduction = Reduction(parallel, always={id(parallel.module["tied"])})
    reduction()()
    return found(parallel.module), reduction.changed


def test_what_is_tied_to_another_stage_has_a_gradient_whatever_happens_here(pool4):
    gradients = {"both": None, "cp": None, "none": None, "tied": [0.0] * 3}
    assert pool4.run(of_another_stage) == [(gradients, False)] * 4


def one_at_a_time(rank):
    """The most messages under way, of 9."""
    group = World.current().group(range(4))
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(9)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, float(rank))
    alive, most = set(), [0]

    class Bucket(gradient_sums._Bucket):
        def __init__(self, *args):
            super().__init__(*args)
            alive.add(id(self))
            most[0] = max(most[0], len(alive))

        def __del__(self):
            alive.discard(id(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_sums, "BUCKET_BYTES", 16)
        patch.setattr(gradient_sums, "_Bucket", Bucket)
        gradient_sums.start_sum(parameters, group)()
    return most[0], [p.grad.tolist() for p in parameters]


@pytest.mark.slow
def test_few_copies_of_gradients_are_under_way_at_a_time(pool4):
    assert pool4.run(one_at_a_time) == [(gradient_sums.IN_FLIGHT, [[6.0] * 4] * 9)] * 4
