"""Parameters that FSDP keeps whole during a step (ZeRO-1): what is sent, and what a step leaves behind, also one that
fails. That it equals one process is in `test_parity_matrix.py`."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hetmesh.boundary import World
from hetmesh.graph import Stage
from hetmesh.graph.module_graph import ModuleOptions
from hetmesh.layout import MeshSpec
from hetmesh.parallel import local_gradient
from hetmesh.parallel.fully_shard import apply_fully_shard
from hetmesh.resolve.resolved import resolve
from hetmesh.training.job import Job
from support.parity_cases import SLICES, recipe, table

pytestmark = pytest.mark.slow

MICROBATCHES, STEPS = 3, 2


def layout(vision, llm, policy="sequential", reshard="default", **options):
    """Tables of encoder and LLM; with a policy on when FSDP lets go."""
    key = f'\nfsdp_reshard_after_forward = "{reshard}"'
    return recipe(policy, vision + key, llm + key, batch=MICROBATCHES, **options)


TWO = partial(layout, table("vision", "0,1", fsdp=2), table("llm", "0,1", fsdp=2))


def with_training(given, **keys):
    return given.model_copy(update={"training": given.training.model_copy(update=keys)})


def received_of(parameter):
    """Bytes that a rank gets of a gathered parameter, or of a summed gradient: all shards but its own, each of as many
    rows as the largest."""
    (axis,) = [i for i, name in enumerate(parameter.device_mesh.mesh_dim_names) if name == "dp_shard"]
    shards, (rows, *rest) = parameter.device_mesh.size(axis), parameter.shape
    return (shards - 1) * -(-rows // shards) * torch.Size(rest).numel() * parameter.element_size()


def traffic(rank, given):
    """Per stage of this rank: bytes received of parameters and of gradients in `STEPS` steps, and the least for one."""
    world = World.current()
    job = Job.assemble(resolve(given), world)
    world.log.clear()
    for _ in range(STEPS):
        assert job.forward_backward().finite
    found = {}
    for name, each in job.parallel.items():
        own = [stage for stage in job.runtime.modules if stage.module == name]
        for i, stage in enumerate(own):
            parameters = [p for p in each.parameters_of(i).values() if isinstance(p, DTensor)]
            received = (world.log.bytes_received(f"{what} of {stage}") for what in ("parameters", "gradients"))
            least = (
                sum(received_of(p) for p in parameters),
                sum(received_of(p) for p in parameters if p.requires_grad),
            )
            found[stage] = (*received, *least)
    return found


PIPELINE = table("vision", "0,1", fsdp=2), table("llm", "0-3", pp=2, fsdp=2)


@pytest.mark.parametrize(
    "policy",
    [
        "zero_bubble",
        *(pytest.param(p, marks=pytest.mark.exhaustive) for p in ("1f1b", "interleaved", "three_phase", "bubble_fill")),
    ],
)
def test_in_a_pipeline_each_parameter_and_gradient_is_sent_once_per_step(pool4, policy):
    given = layout(*PIPELINE, policy, extra=SLICES if policy == "bubble_fill" else "")
    stages = set()
    for found in pool4.run(traffic, given, timeout=120):
        for stage, (gathered, summed, parameters, gradients) in found.items():
            if stage.module == "llm":
                assert (gathered, summed) == (STEPS * parameters, STEPS * gradients)
                assert gathered > 0
                stages.add(stage)
    assert len(stages) == (4 if policy == "interleaved" else 2)


@pytest.mark.parametrize("reshard", ["never", "always"])
@pytest.mark.parametrize("trained", ["all", "frozen encoder"])
def test_what_is_sent_depends_on_microbatches_only_where_parameters_are_let_go(pool, reshard, trained):
    for found in pool(2).run(traffic, TWO(reshard=reshard, trained=trained), timeout=120):
        assert set(found) == {Stage("vision"), Stage("projector"), Stage("llm")}
        for stage, (gathered, summed, parameters, gradients) in found.items():
            frozen = trained == "frozen encoder" and stage.module == "vision"
            times = 1 if reshard == "never" else MICROBATCHES
            assert summed == STEPS * times * gradients
            assert gathered == STEPS * times * parameters * (1 if reshard == "never" or frozen else 2)
            assert (gradients == 0) == frozen


def test_gradients_that_are_summed_in_bfloat16_are_half_as_many_bytes(pool):
    given = with_training(TWO(reshard="never"), dtype="float32", mixed_precision_param="bfloat16")
    wide, narrow = (
        pool(2).run(traffic, with_training(given, mixed_precision_reduce=dtype), timeout=120)
        for dtype in ("float32", "bfloat16")
    )
    for one, half in zip(wide, narrow, strict=True):
        assert [2 * summed for _, summed, *_ in half.values()] == [summed for _, summed, *_ in one.values()]
        assert all(summed > 0 for _, summed, *_ in one.values())


def test_replicas_of_shards_are_summed_once_per_step(pool4):
    tables = [table(name, "0-3", fsdp=2, data_parallel_replicate_degree=2) for name in ("vision", "llm")]
    for found in pool4.run(traffic, layout(*tables, reshard="never"), timeout=120):
        for gathered, summed, parameters, gradients in found.values():
            assert gathered == STEPS * parameters
            assert summed == STEPS * 2 * gradients  # a half of each, and the same of what two replicas make of it


class Broken(RuntimeError):
    pass


def broken(*_):
    raise Broken


def break_second_microbatch(job, where):
    """The second microbatch fails in the middle of the LLM, on every rank."""
    layer, calls = job.parallel["llm"].adapted.module.get_submodule("model.layers.1"), []

    def hook(_, __, output):
        calls.append(output)
        if len(calls) == 2:
            if where == "forward":
                raise Broken
            (output if isinstance(output, torch.Tensor) else output[0]).register_hook(broken)

    return layer.register_forward_hook(hook)


def second_gradients(rank, given, where):
    """Gradients of the second step, after a whole first one or one that fails."""
    job = Job.assemble(resolve(given), World.current())
    if where:
        handle = break_second_microbatch(job, where)
        split = given.llm_schedule == "zero_bubble" and where == "backward"
        with pytest.raises(RuntimeError if split else Broken) as caught:
            job.forward_backward()
        assert type(caught.value.__cause__ if split else caught.value) is Broken  # torch wraps that of a split backward
        handle.remove()
    else:
        job.forward_backward()
    assert all(isinstance(p, DTensor) for p in job.parameters() if p.ndim)
    job.forward_backward()
    return {name: local_gradient(p) for name, p in job.root.named_parameters()}


HALF = {"dtype": "float32", "mixed_precision_param": "bfloat16"}
"""Whole gradients add up in another dtype than that in which they are computed, and so in other tensors."""


@pytest.mark.parametrize(
    ("policy", "reshard", "keys"),
    [
        pytest.param("sequential", "never", {}, marks=pytest.mark.exhaustive),
        pytest.param("sequential", "never", HALF, marks=pytest.mark.exhaustive),
        pytest.param("sequential", "default", {}, marks=pytest.mark.exhaustive),
        ("zero_bubble", "never", HALF),
    ],
)
def test_a_step_that_fails_leaves_nothing_to_the_next(pool, policy, reshard, keys):
    given = with_training(TWO(policy, reshard=reshard), **keys)
    if policy == "zero_bubble":
        again = given.activation_checkpoint.model_copy(update={"mode": "full"})
        given = given.model_copy(update={"activation_checkpoint": again})
    expected, *others = (
        pool(2).run(second_gradients, given, where, timeout=120) for where in ("", "forward", "backward")
    )
    for found in others:
        for there, here in zip(expected, found, strict=True):
            for name, gradient in there.items():
                torch.testing.assert_close(here[name], gradient, rtol=1e-12, atol=1e-14)


def gradients_after(rank, given, evaluate=False):
    """Gradients of a first step, with or without an evaluation before; and what that gathers."""
    world = World.current()
    job = Job.assemble(resolve(given), world)
    gathered = 0
    if evaluate:
        drawn = job.loader.batch(0)
        plan = job.plan(drawn.metas)
        world.log.clear()
        feed = job.feed(drawn, plan, 0)
        job.runtime.run(job.schedule(plan, training=False), plan, feed, step=0)
        assert all(isinstance(p, DTensor) for p in job.parameters() if p.ndim)
        gathered = world.log.bytes_received("parameters of llm.0")
    job.forward_backward()
    assert all(isinstance(p, DTensor) for p in job.parameters() if p.ndim)
    least = sum(received_of(p) for p in job.parallel["llm"].module.parameters() if isinstance(p, DTensor))
    return {name: local_gradient(p) for name, p in job.root.named_parameters()}, gathered, least


def test_an_evaluation_gathers_once_and_leaves_shards(pool):
    given = TWO(reshard="never", trained="frozen encoder")
    without, after = (pool(2).run(gradients_after, given, evaluate, timeout=120) for evaluate in (False, True))
    for (expected, *_), (found, gathered, least) in zip(without, after, strict=True):
        assert gathered == least > 0
        for name, gradient in expected.items():
            assert (found[name] is None) == (gradient is None)
            assert gradient is None or torch.equal(found[name], gradient)


@pytest.mark.parametrize("keys", [{"mixed_precision_param": "bfloat16"}, {"enable_cpu_offload": True}])
def test_half_precision_adds_up_in_that_of_the_sums_and_shards_may_lie_on_the_host(pool, keys):
    """Each microbatch's gradient is rounded to bfloat16 once, as where each is summed by itself; also where the
    backward comes in two parts."""
    each, *wholes = (
        pool(2).run(gradients_after, with_training(TWO(policy, reshard=reshard), dtype="float32", **keys), timeout=120)
        for policy, reshard in (("sequential", "always"), ("sequential", "never"), ("zero_bubble", "never"))
    )
    for whole in wholes:
        for (found, *_), (expected, *_) in zip(whole, each, strict=True):
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def one_unit():
    """A module that is one unit of FSDP on two ranks, which a step keeps whole."""
    torch.manual_seed(0)
    root = torch.nn.Linear(3, 4, bias=False, dtype=torch.float64)
    mesh = World.current().device_mesh(MeshSpec.make([0, 1], dp_shard=2))
    return root, apply_fully_shard(root, [], mesh, ModuleOptions(reshard_after_forward="never"))


def last_action_without_backward(rank, weights):
    root, whole = one_unit()
    whole.begin(3)
    with whole.action():
        output = root(torch.full((1, 3), rank + 1.0, dtype=torch.float64))
    with whole.action():
        output.sum().backward()
    assert not isinstance(root.weight, DTensor)
    with whole.action(weights):
        assert not isinstance(root.weight, DTensor)
    assert isinstance(root.weight, DTensor)
    return root.weight.grad.to_local()


@pytest.mark.parametrize("weights", [False, True])
def test_gradients_are_summed_where_the_last_backward_enters_nothing(pool, weights):
    for gradient in pool(2).run(last_action_without_backward, weights):
        assert torch.equal(gradient, torch.full((2, 3), 3.0, dtype=torch.float64))


def forward_after_half_a_step(rank):
    root, whole = one_unit()
    x = torch.ones(1, 3, dtype=torch.float64)
    whole.begin(3)
    with whole.action():
        root(x)
    whole.abandon()
    with torch.no_grad():
        root(x)
    return isinstance(root.weight, DTensor)


def test_what_runs_after_half_a_step_leaves_shards(pool):
    assert pool(2).run(forward_after_half_a_step) == [True, True]


class Late(nn.Module):
    """Reaches one of its two parts only in some microbatches."""

    def __init__(self):
        super().__init__()
        self.always, self.late = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, rows, late):
        return self.late(self.always(rows)) if late else self.always(rows)


def late_gradients(rank):
    """Gradients of a part that is first reached in the last microbatch, and of one that always is, beside those of a
    plain loop that adds them up in fp32; both ranks have the same rows."""
    torch.manual_seed(0)
    module, rows = Late(), [torch.randn(3, 4).bfloat16() for _ in range(MICROBATCHES)]
    plain = copy.deepcopy(module).bfloat16()
    total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in plain.named_parameters()}
    for m in range(MICROBATCHES):
        plain.zero_grad()
        plain(rows[m], m == MICROBATCHES - 1).float().sum().backward()
        for name, p in plain.named_parameters():
            total[name] += 0 if p.grad is None else p.grad.float()
    options = ModuleOptions(reshard_after_forward="never", compute_dtype=torch.bfloat16)
    whole = apply_fully_shard(module, [], World.current().device_mesh(MeshSpec.make([0, 1], dp_shard=2)), options)
    for _ in range(STEPS):
        module.zero_grad()
        whole.begin(2 * MICROBATCHES)
        for m in range(MICROBATCHES):
            with whole.action():
                output = module(rows[m], m == MICROBATCHES - 1)
            with whole.action():
                output.float().sum().backward()
    return [(p.grad.full_tensor(), 2 * total[name]) for name, p in module.named_parameters()]


def test_a_first_gradient_in_the_last_microbatch_is_summed_with_those_before(pool):
    """FSDP lets the others add up in fp32, takes this one as it comes, and asserts that all are of one dtype."""
    for found in pool(2).run(late_gradients):
        assert all(torch.equal(gradient, expected) for gradient, expected in found)
