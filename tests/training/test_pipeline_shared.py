"""Parameters that several parts of a Pipeline have: one gradient, one step of the optimizer."""

import itertools
import re
from random import Random

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hetmesh
from hetmesh import MeshSpec, Part, Pipeline
from hetmesh.errors import GraphError

SAMPLES, WIDTH, STEPS = 8, 4, 3
ONE = MeshSpec.make([0], dp_shard=1)


class Tied(nn.Module):
    """A layer whose weight may be another's."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, input):
        return torch.tanh(input @ self.weight) * self.scale


def layer():
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def wide():
    return nn.Sequential(nn.Linear(WIDTH, 6, dtype=torch.float64), nn.Tanh(), nn.Linear(6, WIDTH, dtype=torch.float64))


def loss(output, batch):
    return (output - batch["targets"]).square().sum()


def data():
    torch.manual_seed(1)
    return torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64)


def train(rank, parts, last, schedule, edges, own):
    """Losses, the norm of the last gradient and the weights of `own` after some steps."""
    inputs, targets = data()

    def load(name, samples):
        given = {"input": inputs[list(samples)]} if name == next(iter(parts)) else {}
        return given | ({"targets": targets[list(samples)]} if name == last else {})

    pipeline = Pipeline(parts, edges, loss=loss, schedule=schedule, microbatch=2)
    parameters = pipeline.parameters()
    assert len(parameters) == len({id(p) for p in parameters})
    optimizer = torch.optim.SGD([{"params": parameters}], lr=0.02, momentum=0.9, foreach=False)
    losses = []
    for _ in range(STEPS):
        losses.append(pipeline.step(load, SAMPLES, divide_by=SAMPLES))
        optimizer.step()
    assert all(ratio == pytest.approx(1, abs=1e-3) for ratio in pipeline.checked.values())
    norm = pipeline.grad_norm()
    return losses, norm, {name: full(p) for each in own for name, p in each.named_parameters()}


def full(parameter):
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()


def one_process(chain, own):
    """The same as a plain loop."""
    inputs, targets = data()
    parameters = list(dict.fromkeys(p for each in chain for p in each.parameters()))
    optimizer, losses = torch.optim.SGD(parameters, lr=0.02, momentum=0.9), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        hidden = inputs
        for each in chain:
            hidden = each(hidden)
        value = loss(hidden, {"targets": targets}) / SAMPLES
        value.backward()
        optimizer.step()
        losses.append(value.item())
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in parameters])).item()
    return losses, norm, {name: p.detach() for each in own for name, p in each.named_parameters()}


def test_a_parameter_that_two_parts_share_has_one_gradient_and_is_stepped_once(world):
    def chain():
        torch.manual_seed(0)
        weight, middle = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64)), layer()
        return [Tied(weight), middle, Tied(weight)]

    own, plain = chain(), chain()
    parts = {name: Part(m, ONE, (WIDTH,), dtype=torch.float64) for name, m in zip("abc", own, strict=True)}
    found = train(0, parts, "c", "1f1b", [("a", "b"), ("b", "c")], own)
    expected = one_process(plain, plain)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert found[1] == pytest.approx(expected[1], rel=1e-12)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-12, atol=1e-12)


def drawn(number):
    """Three or four layers on one mesh, of which some share a weight or are one, and how they are trained: the kinds
    of layers, the mesh's axes, the schedule and the parts that have the layers."""
    random = Random(f"shared/{number}")
    kinds = [random.choice(["tied", "same", "own"]) for _ in range(random.choice([3, 4]))]
    kinds[-2:] = random.choice([["tied", "tied"], ["same", "same"]]) if number % 2 else kinds[-2:]
    axes = random.choice([{"dp_replicate": 4}, {"dp_replicate": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}])
    return kinds, axes, random.choice(["sequential", "1f1b", "zero_bubble"])


def layers(kinds, tp=None):
    torch.manual_seed(0)
    weight, same = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64)), wide()
    if tp is not None:
        parallelize_module(same, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()}, src_data_rank=None)
    make = {"tied": lambda: Tied(weight), "same": lambda: same, "own": layer}
    return [make[kind]() for kind in kinds]


def train_drawn(rank, kinds, axes, schedule):
    mesh = MeshSpec.make(range(4), **axes)
    device_mesh = hetmesh.device_mesh(mesh)
    own = layers(kinds, device_mesh["tp"] if "tp" in axes else None)
    names = [f"part {i}" for i in range(len(own))]
    parts = {n: Part(m, mesh, (WIDTH,), dtype=torch.float64) for n, m in zip(names, own, strict=True)}
    return train(rank, parts, names[-1], schedule, [*itertools.pairwise(names)], own)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [i if i in (1, 3) else pytest.param(i, marks=pytest.mark.exhaustive) for i in range(24)]
)
def test_drawn_chains_with_shared_parameters_equal_one_process(pool4, number):
    kinds, axes, schedule = drawn(number)
    expected = one_process(own := layers(kinds), own)
    for found in pool4.run(train_drawn, kinds, axes, schedule):
        assert found[0] == pytest.approx(expected[0], rel=1e-12), (kinds, axes, schedule)
        assert found[1] == pytest.approx(expected[1], rel=1e-12), (kinds, axes, schedule)
        torch.testing.assert_close(found[2], expected[2], rtol=1e-11, atol=1e-11)


def refused(rank, how):
    """What a Pipeline of two parts that share a weight says."""
    meshes = [MeshSpec.make([0, 1], dp_replicate=2), MeshSpec.make([0, 1], dp_replicate=2)]
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
    own = [Tied(weight), Tied(weight)]
    if how == "other mesh":
        meshes[1] = MeshSpec.make([1, 2], dp_replicate=2)
    if how == "one rank" and rank == 1:
        own[1].weight = nn.Parameter(weight.detach().clone())
    if how == "FSDP":
        meshes = [MeshSpec.make([0, 1], dp_shard=2)] * 2
        own[1] = own[0]
        if (mesh := hetmesh.device_mesh(meshes[0])) is not None:
            fully_shard(own[0], mesh=mesh)
            hetmesh.sum_over_shards(own[0])
    parts = {
        name: Part(module if hetmesh.device_mesh(mesh) is not None else None, mesh, (WIDTH,), dtype=torch.float64)
        for name, module, mesh in zip("ab", own, meshes, strict=True)
    }
    try:
        Pipeline(parts, [("a", "b")], loss=loss, microbatch=2)
    except GraphError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("other mesh", r"part 'b': weight is a parameter of part 'a' too, whose mesh is .*\[0, 1\], not .*\[1, 2\]"),
        ("FSDP", r"part 'b': weight is a parameter of part 'a' too, and fully_shard sums its gradient for one part"),
        (
            "one rank",
            r"part 'a': .* weight is .*float64, requires_grad.* on rank 1, and .*, shared with another",
        ),
    ],
)
def test_what_only_some_ranks_could_sum_is_refused_on_all_of_them(pool4, how, message):
    for found in pool4.run(refused, how):
        assert re.search(message, found), found


def train_outside(rank):
    mesh = MeshSpec.make([0, 2], dp_replicate=2)
    own = layers(["own", "tied"]) if rank in mesh else [None, None]
    parts = {name: Part(m, mesh, (WIDTH,), dtype=torch.float64) for name, m in zip("ab", own, strict=True)}
    return train(rank, parts, "b", "1f1b", [("a", "b")], [m for m in own if m is not None])


def test_a_rank_outside_all_parts_has_an_optimizer_of_nothing(pool4):
    inside, outside, *_ = pool4.run(train_outside)
    assert (outside[0], outside[1], outside[2]) == (inside[0], inside[1], {})
