"""Modules that one has parallelised oneself, through a schedule: gradients equal one process, or are refused."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hetmesh
from hetmesh import MeshSpec, Part, Pipeline
from hetmesh.boundary import World
from hetmesh.errors import BoundaryError, GradientError, GraphError, LossError, ReplicaError
from hetmesh.training.loss import CheckedLoss, CheckedSampleLoss

SAMPLES, TARGETS = 16, 16 * 3
MESHES = {
    "encoder": MeshSpec.make([0, 1], dp_shard=2),
    "middle": MeshSpec.make([1, 2], dp_replicate=2),
    "decoder": MeshSpec.make([2, 3], tp=2),
}
COLOCATED = {
    "encoder": MeshSpec.make(range(4), dp_replicate=2, dp_shard=2),
    "middle": MeshSpec.make(range(4), dp_shard=4),
    "decoder": MeshSpec.make(range(4), dp_replicate=2, tp=2),
}
EDGES = [("encoder", "middle"), ("middle", "decoder")]


class Rows(nn.Module):
    """Four rows of six for each image."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(8, 12), nn.Linear(12, 24)

    def forward(self, images):
        return self.out(torch.tanh(self.into(images.to(self.into.bias.dtype)))).unflatten(1, (4, 6))


def modules(dtype=torch.float64):
    torch.manual_seed(0)
    decoder = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    return {name: m.to(dtype) for name, m in {"encoder": Rows(), "middle": nn.Linear(6, 6), "decoder": decoder}.items()}


def data():
    torch.manual_seed(1)
    return torch.randn(SAMPLES, 8).double(), torch.randn(SAMPLES, 3).double()


def decode(module, batch, inputs):
    return module(inputs["middle"].mean(1))


def loss(output, batch):
    return (output.double() - batch["targets"]).square().sum()


def load(name, samples):
    images, targets = data()
    at = list(samples)
    return {"encoder": {"images": images[at]}, "middle": {}, "decoder": {"targets": targets[at]}}[name]


def one_process():
    """Losses, and parameters after three steps."""
    own, (images, targets) = modules(), data()
    parameters = {f"{n}.{k}": p for n, m in own.items() for k, p in m.named_parameters()}
    optimizer, losses = torch.optim.SGD(parameters.values(), lr=0.5), []
    for _ in range(3):
        optimizer.zero_grad()
        output = decode(own["decoder"], {}, {"middle": own["middle"](own["encoder"](images))})
        value = loss(output, {"targets": targets}) / TARGETS
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, {name: p.detach() for name, p in parameters.items()}


def make(rank, meshes, *, summed=True, spoil=None, **more):
    """The pipeline, sharded as its meshes say."""
    world = World.current()
    own, parts = modules(more.pop("dtype", torch.float64)), {}
    for name, spec in meshes.items():
        mesh = hetmesh.device_mesh(spec)
        module = own[name] if mesh is not None else None
        if mesh is not None and "tp" in spec.axes:
            parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}, src_data_rank=None)
        if mesh is not None and "dp_shard" in spec.axes:
            fully_shard(module, mesh=mesh[tuple(a for a in spec.axes if a != "tp")])
            if summed:
                hetmesh.sum_over_shards(module)
        if module is not None and spoil is not None:
            spoil(name, module)
        parts[name] = Part(module, spec, (4, 6), dtype=next(own[name].parameters()).dtype)
    parts["decoder"] = Part(parts["decoder"].module, meshes["decoder"], dtype=parts["decoder"].dtype, call=decode)
    return world, Pipeline(parts, EDGES, **{"loss": loss, "microbatch": 4} | more)


def train(rank, meshes, schedule):
    _, pipeline = make(rank, meshes, schedule=schedule)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5, foreach=False)
    losses = []
    for _ in range(3):
        losses.append(pipeline.step(load, SAMPLES, divide_by=TARGETS))
        optimizer.step()
    found = {f"{n}.{k}": p for n, each in pipeline.parallel.items() for k, p in each.module.named_parameters()}
    full = {k: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for k, p in found.items()}
    norm = pipeline.grad_norm()
    pipeline.step(load, SAMPLES, divide_by=TARGETS, max_norm=norm / 4)
    assert pipeline.grad_norm() == pytest.approx(norm / 4, rel=1e-3)
    return losses, full, pipeline.checked, pipeline.evaluate(load, SAMPLES) / TARGETS


@pytest.mark.slow
@pytest.mark.parametrize(("meshes", "schedule"), [(MESHES, "1f1b"), (COLOCATED, "1F1B"), (COLOCATED, "sequential")])
def test_parts_of_ones_own_equal_one_process(pool4, meshes, schedule):
    losses, parameters = one_process()
    ranks = pool4.run(train, meshes, schedule)
    for found, full, checked, after in ranks:
        assert found == pytest.approx(losses, rel=1e-12)
        assert after < losses[-1]
        assert set(checked) == set(meshes)
        assert all(ratio == pytest.approx(1, abs=1e-3) for ratio in checked.values())
        for name, value in full.items():
            torch.testing.assert_close(value, parameters[name], rtol=1e-12, atol=1e-12)
    assert {name for _, full, _, _ in ranks for name in full} == set(parameters)


HEAD = MeshSpec.make([1, 3], dp_replicate=2)
"""Where a second part lies that reads what the middle one emits."""


def of_head(output, batch):
    return output.double().square().sum()


def two_losses(rank, schedule, wrong=""):
    """Losses and parameters where the decoder, the middle and a head that reads it have a loss."""
    _, pipeline = make(rank, MESHES)
    head = head_module() if hetmesh.device_mesh(HEAD) is not None else None
    parts = {**pipeline.parts, "head": Part(head, HEAD, dtype=torch.float64)}
    losses = {"decoder": loss, "head": of_head, "middle": of_head}
    if wrong:
        losses[wrong] = lambda output, batch: output.square().mean()
    both = Pipeline(parts, [*EDGES, ("middle", "head")], loss=losses, schedule=schedule, microbatch=4)
    optimizer = torch.optim.SGD([{"params": both.parameters()}], lr=0.5, foreach=False)
    found = []

    def own(name, samples):
        return {} if name == "head" else load(name, samples)

    for _ in range(3):
        found.append(both.step(own, SAMPLES, divide_by=TARGETS))
        optimizer.step()
    named = {f"{n}.{k}": p for n, each in both.parallel.items() for k, p in each.module.named_parameters()}
    return found, {k: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for k, p in named.items()}


def head_module():
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(24, 2)).double()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("sequential", marks=pytest.mark.exhaustive)])
def test_several_parts_with_a_loss_equal_one_process(pool4, schedule):
    own, (images, targets) = {**modules(), "head": head_module()}, data()
    parameters = {f"{n}.{k}": p for n, m in own.items() for k, p in m.named_parameters()}
    optimizer, losses = torch.optim.SGD(parameters.values(), lr=0.5), []
    for _ in range(3):
        optimizer.zero_grad()
        rows = own["middle"](own["encoder"](images))
        total = loss(decode(own["decoder"], {}, {"middle": rows}), {"targets": targets})
        total = (total + of_head(own["head"](rows), {}) + of_head(rows, {})) / TARGETS
        total.backward()
        optimizer.step()
        losses.append(total.item())
    for found, full in pool4.run(two_losses, schedule):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, value in full.items():
            torch.testing.assert_close(value, parameters[name], rtol=1e-12, atol=1e-12)
    with pytest.raises(LossError, match=r"loss .*<lambda>: must be a sum over its samples"):
        pool4.run(two_losses, schedule, "head")


ONE_NUMBER = {"encoder": MeshSpec.make(range(4), dp_replicate=4), "llm": MeshSpec.make([2, 3], dp_replicate=2)}


def gradient_of_one_number(rank, samples, valid, text_only):
    """What gradients a weight of the encoder on four lanes and one of the LLM on two have: the loss is 4 x their
    product, summed over the `valid` first samples; of the `text_only` first ones the encoder gets zeros."""
    weights, parts = {}, {}
    for name, spec in ONE_NUMBER.items():
        if hetmesh.device_mesh(spec) is not None:
            weights[name] = nn.Linear(1, 1, bias=False, dtype=torch.float64)
            nn.init.ones_(weights[name].weight)
        parts[name] = Part(weights.get(name), spec, (1,), dtype=torch.float64)

    def load(name, at):
        numbers = torch.tensor(at, dtype=torch.float64)[:, None]
        return (
            {"input": 4 * (numbers >= text_only).double()}
            if name == "encoder"
            else {"valid": (numbers < valid).double()}
        )

    pipeline = Pipeline(
        parts, [("encoder", "llm")], loss=lambda out, batch: (out * batch["valid"]).sum(), microbatch=samples // 2
    )
    pipeline.step(load, samples, divide_by=valid)
    return [float(weight.weight.grad) for weight in weights.values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("samples", "valid", "text_only", "gradient"),
    [
        (100, 100, 0, 4.0),  # Megatron-Bridge's PR #5555: a sum of 400 over 100 tokens, LLM on 2 lanes, encoder on 4
        (8, 4, 0, 4.0),  # Megatron-LM's test_mimo_grad_sync.py: 4 tokens are a factor of 0.25
        (8, 8, 4, 2.0),  # half of the samples, so of the encoder's ranks, have no image: no factor makes up for it
    ],
)
def test_sums_are_divided_by_targets_and_by_no_number_of_lanes(pool4, samples, valid, text_only, gradient):
    for found in pool4.run(gradient_of_one_number, samples, valid, text_only):
        assert found == pytest.approx([gradient] * len(found), rel=1e-15)


def halve_middle(name, module):
    """A part that takes the mean over its two lanes by itself."""
    if name == "middle":
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient / 2)


def other_weights(name, module):
    if name == "middle" and World.current().rank == 2:
        nn.init.zeros_(module.bias)


def frozen_on_one_rank(name, module):
    if name == "middle" and World.current().rank == 2:
        module.bias.requires_grad_(False)


def missing_on_one_rank(name, module):
    if name == "middle" and World.current().rank == 2:
        module.register_parameter("bias", None)


def partial_gradients(name, module):
    """A part with tensor parallelism whose ranks each compute a share of a parameter's gradient."""
    if name == "decoder":
        module.append(Share())


class Share(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, output):
        own = torch.zeros(3, dtype=torch.float64)
        own[World.current().rank % 2 :: 2] = 1
        return output * (own * self.scale + (1 - own) * self.scale.detach())


def says(rank, steps, meshes, more):
    try:
        _, pipeline = make(rank, meshes, **more)
        for _ in range(steps):
            pipeline.step(load, SAMPLES)
    except (BoundaryError, GradientError, GraphError, LossError, ReplicaError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("meshes", "more", "message"),
    [
        (MESHES, {"summed": False}, r"GradientError: part 'encoder': fully_shard of the whole module divides"),
        (MESHES, {"spoil": halve_middle}, r"those of 'middle' are 0\.5 times what they should be"),
        (MESHES, {"spoil": halve_middle, "dtype": torch.float32}, r"those of 'middle' are 0\.5 times"),
        (MESHES, {"spoil": partial_gradients}, r"GradientError: ranks .*: decoder\.3\.scale \(along tp\)"),
        (MESHES, {"spoil": other_weights}, r"ReplicaError: .*middle\.bias"),
        (
            MESHES,
            {"spoil": frozen_on_one_rank},
            r"GraphError: part 'middle': .*: bias is .*requires_grad = False on rank 2, and .* = True on 1",
        ),
        (MESHES, {"spoil": missing_on_one_rank}, r"GraphError: part 'middle': .*: bias is missing on rank 2, and"),
        (COLOCATED, {"schedule": "zero_bubble"}, r"GraphError: schedule = 'zero_bubble' splits the back"),
        (MESHES, {"schedule": "gpipe"}, r"GraphError: schedule = 'gpipe': valid are sequential, 1f1b"),
    ],
)
def test_what_would_not_be_a_sum_is_refused(pool4, meshes, more, message):
    for found in pool4.run(says, 1, meshes, more):
        assert re.search(message, found), found


ONE = MeshSpec.make([0], dp_shard=1)


@pytest.mark.parametrize(
    ("parts", "edges", "more", "message"),
    [
        (
            {"a": Part(nn.Linear(8, 3), MeshSpec.make([0], dp=1))},
            [],
            {},
            r"'a': the axes of its mesh are \['dp'\]; valid",
        ),
        (
            {"a": Part(None, ONE)},
            [],
            {},
            r"'a': rank 0 needs its module, and \(dp_shard=1\) on ranks \[0\] is its mesh",
        ),
        (
            {"a": Part(nn.Linear(8, 3), ONE), "b": Part(nn.Linear(3, 3), ONE)},
            [("a", "b")],
            {},
            r"give the shape of its out",
        ),
        (
            {"a": Part(nn.Linear(8, 3), ONE, trainable=False)},
            [],
            {},
            r"trainable = False, but it has parameters with req",
        ),
        ({"a": Part(nn.Linear(8, 3), ONE, (4,))}, [], {}, r"'a': must return shape \('samples', 4,\), got \(16, 3\)"),
        (
            {"a": Part(nn.Linear(8, 3), ONE)},
            [],
            {"loss": lambda o, b: o},
            r"must return a scalar tensor, the sum over its s",
        ),
        (
            {"a": Part(nn.Linear(8, 3), ONE)},
            [],
            {"loss": lambda o, b: (o + b["input"][:, :3]).square().mean()},
            r"must be a sum over its samples, but gives .* for 16 of them, .*; for a mean divide once, by divide_by",
        ),
        (
            {"a": Part(nn.Linear(8, 3), ONE)},
            [],
            {"loss": lambda o, b: o.detach().square().sum()},
            r"does not depend on the output",
        ),
        (
            {"a": Part(nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3)), ONE)},
            [],
            {},
            r"part 'a': its layers \['1'\] are BatchNorm1d, whose result depends on the samples that",
        ),
        ({"a": Part(nn.parallel.DistributedDataParallel, ONE)}, [], {}, "is a DistributedDataParallel, which averages"),
    ],
)
def test_parts_that_do_not_fit_are_refused(world, parts, edges, more, message):
    first = parts["a"]
    if first.module is nn.parallel.DistributedDataParallel:
        parts = {"a": Part(first.module(nn.Linear(8, 3)), ONE)}
    options = {"loss": lambda output, batch: output.square().sum(), "microbatch": 16} | more
    with pytest.raises((GraphError, BoundaryError, GradientError, LossError), match=message):
        Pipeline(parts, edges, **options).step(lambda name, samples: {"input": torch.ones(len(samples), 8)}, SAMPLES)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"load\('a', samples\) of 4 samples must return tensors by name, .* got None"),
        (
            {"input": torch.ones(1, 8)},
            r"load\('a', samples\) of 4 samples: 'input' must have a row per sample, got shape \(1, 8",
        ),
        ({"input": torch.ones(())}, r"'input' must have a row per sample, got shape \(\)"),
    ],
)
def test_batches_that_have_no_row_per_sample_are_refused(world, given, message):
    """One row would be broadcast against the output, in silence."""
    pipeline = Pipeline({"a": Part(nn.Linear(8, 3), ONE)}, loss=lambda o, b: o.square().sum(), microbatch=4)
    with pytest.raises(GraphError, match=message):
        pipeline.step(lambda name, samples: given, 4)


@pytest.mark.parametrize("checked", [CheckedSampleLoss, CheckedLoss])
def test_a_sum_in_half_precision_is_no_mean(checked):
    given = torch.tensor([4.90625, 6.5625], dtype=torch.bfloat16)  # its sum is rounded by 0.3 %
    assert checked(lambda output, batch: output.sum())(given, {}) == 11.5
    with pytest.raises(LossError, match="must be a sum over"):
        checked(lambda output, batch: output.mean())(given, {})


def test_layers_that_keep_statistics_may_be_there_in_eval(world):
    part = Part(nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3).eval()), ONE)
    pipeline = Pipeline({"a": part}, loss=lambda o, b: o.square().sum(), microbatch=2)
    torch.manual_seed(0)
    given = torch.randn(4, 8)
    assert pipeline.step(lambda name, samples: {"input": given[list(samples)]}, 4) > 0


def test_a_frozen_part_and_a_flat_loss(world):
    """Nothing is told about gradients that are zero."""
    frozen = nn.Linear(8, 6).requires_grad_(False)
    parts = {"a": Part(frozen, ONE, (6,), trainable=False), "b": Part(nn.Linear(6, 2), ONE)}
    pipeline = Pipeline(parts, [("a", "b")], loss=lambda output, batch: 0 * output.sum() + 1)
    assert pipeline.step(lambda name, samples: {"input": torch.ones(len(samples), 8)}, 4, divide_by=4) == 1
    assert pipeline.checked == {"b": None}
    assert pipeline.grad_norm() == 0


class Sometimes(nn.Module):
    """A layer that only samples above 0 use."""

    def __init__(self):
        super().__init__()
        self.always, self.rare = nn.Linear(2, 1).double(), nn.Linear(2, 1).double()

    def forward(self, x):
        output = self.always(x)
        return output + self.rare(x) if (x > 0).any() else output


USED = [(), (2,), (0, 1, 2, 3), (), (1, 3)]
"""Per step the samples, of which each lane has one, that use it."""


def rarely_used(step, samples):
    return torch.tensor([[1.0, 2 + step] if i in USED[step] else [-1.0, -step] for i in samples], dtype=torch.float64)


def gradients_of_some_steps(rank):
    torch.manual_seed(0)
    module, mesh = Sometimes(), MeshSpec.make(range(4), dp_replicate=4)
    pipeline = Pipeline({"a": Part(module, mesh)}, loss=lambda output, batch: output.square().sum())
    found = []
    for step in range(len(USED)):
        pipeline.step(lambda name, samples, step=step: {"x": rarely_used(step, samples)}, 4)
        found.append([None if p.grad is None else p.grad.flatten().tolist() for p in module.parameters()])
    return found


def test_a_layer_that_lanes_use_in_some_steps(pool4):
    torch.manual_seed(0)
    module, expected = Sometimes(), []
    for step in range(len(USED)):
        module.zero_grad()
        sum(module(rarely_used(step, (i,))).square().sum() for i in range(4)).backward()
        expected.append([p.grad if p.grad is None else p.grad.flatten().tolist() for p in module.parameters()])
    assert [each[2] is None for each in expected] == [not used for used in USED]
    for found in pool4.run(gradients_of_some_steps):
        for step, wanted in zip(found, expected, strict=True):
            for own, one in zip(step, wanted, strict=True):
                assert own == (None if one is None else pytest.approx(one))
