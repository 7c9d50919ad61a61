"""H7: schedules do not depend on the relative speed of ranks."""

import random
import time

import pytest
import torch

from hetmesh.boundary import World
from hetmesh.parallel import local_gradient
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.runtime.step_runner import StepRunner
from hetmesh.training.job import Job
from support.often import some

RECIPE = """
[modules.vision]
model = "siglip"
config = {{ hidden_size = 8, num_hidden_layers = 2, num_attention_heads = 2, patch_size = 4, intermediate_size = 8 }}
[modules.projector]
model = "mlp"
[modules.llm]
model = "qwen3"
config = {{ hidden_size = 8, num_hidden_layers = 2, num_attention_heads = 2, head_dim = 4, intermediate_size = 8 }}
[[boundaries]]
from = "vision"
to = "projector"
[[boundaries]]
from = "projector"
to = "llm"
at = "image"
[parallelism]
pipeline_parallel_schedule = "{policy}"
pipeline_parallel_microbatch_size = 1
[parallelism.vision]
{vision}
[parallelism.llm]
{llm}
[data]
source = "hetmesh.testing.sources:RandomMedia"
[data.options]
kinds = {{ image = [1, 8, 8] }}
text_only = 0.3
[training]
local_batch_size = 5
"""
DISJOINT = {
    "vision": "ranks = [0, 1]\npipeline_parallel_degree = 2",
    "llm": "ranks = [2, 3]\npipeline_parallel_degree = 2",
}
COLOCATED = {
    "vision": 'ranks = "0-3"',
    "llm": 'ranks = "0-3"\npipeline_parallel_degree = 2\ntensor_parallel_degree = 2',
}
CASES = {
    "1f1b": DISJOINT,
    "interleaved": DISJOINT,
    "zero_bubble": DISJOINT,
    "three_phase": COLOCATED,
    "bubble_fill": COLOCATED,
}


def delayed_steps(rank, recipe, runs):
    """Gradients of a step without delays, and whether those of `runs` steps with random delays are the same bits."""
    torch.manual_seed(0)
    world = World.current()
    job = Job.assemble(resolve(recipe), world)
    drawn = next(job.loader)
    plan = job.plan([d.meta for d in drawn])
    schedule, execute = job.schedule(plan), StepRunner.execute
    parameters = list(job.root.parameters())

    def gradients():
        for parameter in parameters:
            parameter.grad = None
        job.runtime.run(schedule, plan, job.feed(drawn, plan, 0), step=0)
        return [None if (own := local_gradient(p)) is None else own.clone() for p in parameters]

    def slow(step, action):
        if chance.random() < 0.3:
            time.sleep(chance.random() * slowness)
        execute(step, action)

    truth, equal = gradients(), []
    StepRunner.execute = slow
    try:
        for i in range(runs):
            chance = random.Random(1000 * i + rank)
            slowness = chance.choice([0.0, 0.002, 0.006])
            others = gradients()
            equal.append(all(a is b or torch.equal(a, b) for a, b in zip(truth, others, strict=True)))
    finally:
        StepRunner.execute = execute
    return equal


@pytest.mark.slow
@pytest.mark.parametrize("case", some(("bubble_fill",), CASES))
def test_random_delays_never_deadlock_and_never_change_gradients(pool4, case):
    recipe = parse_recipe(RECIPE.format(policy=case.split()[0], **CASES[case]))
    for equal in pool4.run(delayed_steps, recipe, 8, timeout=120):
        assert equal == [True] * 8


def sent_and_kept(rank, recipe):
    """Forward transfers that this rank sent, and those of them whose messages it still holds when the step ends."""
    job = Job.assemble(resolve(recipe), World.current())
    drawn = next(job.loader)
    plan = job.plan([d.meta for d in drawn])
    schedule, drain = job.schedule(plan), StepRunner.drain
    found = []

    def counting(step):
        edges = {e for e in schedule.stages.gradient_edges if e.source in job.runtime.modules}
        found.append(tuple(sum(edge in edges for edge, *_ in some) for some in (step.sent, step.exchanges)))
        drain(step)

    StepRunner.drain = counting
    try:
        job.runtime.run(schedule, plan, job.feed(drawn, plan, 0), step=0)
    finally:
        StepRunner.drain = drain
    return found[0]


@pytest.mark.slow
def test_messages_are_let_go_when_their_gradient_has_come_back(pool4):
    sent, kept = zip(*pool4.run(sent_and_kept, parse_recipe(RECIPE.format(policy="1f1b", **DISJOINT))), strict=True)
    assert sent == (5, 5, 10, 0)  # rank 2 has the projector too
    assert kept == (0, 0, 0, 0)
