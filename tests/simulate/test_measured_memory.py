"""Predicted peak memory of a step against bytes of tensors that are alive in it, on real processes."""

import pytest
from measured_memory import ADAPTERS, ALONE, PIPELINE, STEP, both, measured, recipe

from hetmesh.cost import load_machine
from hetmesh.resolve.recipe_step_model import recipe_step_model
from hetmesh.resolve.resolved import resolve
from hetmesh.resolve.schedules import recipe_schedule
from hetmesh.simulate import simulate

pytestmark = pytest.mark.slow

TENSOR = both("vision") + both("llm", key="tensor_parallel_degree")
CONTEXT = both("vision", "projector") + both("llm", key="context_parallel_degree")
SHARDED = both("vision", "llm", key="data_parallel_shard_degree")
WHOLE = SHARDED + 'fsdp_reshard_after_forward = "never"\n'
SPREAD = both("vision", "projector", "llm") + "expert_parallel_degree = 2\n"
SPREAD_SHARDED = (
    both("vision", "projector") + both("llm", key="data_parallel_shard_degree") + "expert_parallel_degree = 2\n"
)
APART = ALONE + "[parallelism.projector]\nranks = [1]\n[parallelism.llm]\nranks = [1]\n"
UNEVEN = "[balance]\nmicrobatch_shares = { vision = [3, 1] }\n"
exhaustive = pytest.mark.exhaustive

CASES = {
    "fully sharded, recomputed, bfloat16": recipe(SHARDED, recomputed="full", compute="bfloat16"),
    "whole during a step, bfloat16": recipe(WHOLE, batch=16, compute="bfloat16"),
    "pipeline, split backward": recipe(ALONE + PIPELINE, schedule="zero_bubble", batch=16),
}
MORE = {
    "context parallel, packed, fewer key heads": recipe(CONTEXT, packed=True, key_heads=2),
    "low-rank adapters behind a frozen encoder": recipe(APART + ADAPTERS, encoder=False),
    "experts on two ranks": recipe(SPREAD, packed=True, experts=True),
    "experts on two ranks, all else sharded, recomputed": recipe(
        SPREAD_SHARDED, packed=True, experts=True, recomputed="full", compute="bfloat16"
    ),
    "experts on two ranks in bfloat16": recipe(SPREAD, packed=True, experts=True, compute="bfloat16"),
    "experts in tensor parallel": recipe(
        both("vision") + both("llm", key="tensor_parallel_degree"), packed=True, experts=True
    ),
    "tensor parallel": recipe(TENSOR),
    "encoder sequence parallel": recipe(
        both("vision", key="tensor_parallel_degree") + "enable_sequence_parallel = true\n" + both("projector", "llm")
    ),
    "pipeline in 1F1B": recipe(ALONE + PIPELINE, schedule="1f1b", batch=16),
    "replicas in bfloat16": recipe(both("vision", "llm"), compute="bfloat16"),
    "fully sharded": recipe(SHARDED),
    "whole during a step": recipe(WHOLE, batch=16),
    "recomputed": recipe(both("vision", "llm"), recomputed="full"),
    "disjoint": recipe(ALONE + "[parallelism.llm]\nranks = [1]\n", schedule="1f1b", batch=16),
    "three phases": recipe(both("vision", "projector") + PIPELINE, schedule="three_phase", batch=16),
    "interleaved": recipe(ALONE + PIPELINE, schedule="interleaved", batch=16),
    "slices in gaps": recipe(both("vision", "projector") + PIPELINE, schedule="bubble_fill", batch=16),
    "an uneven split in gaps": recipe(both("vision") + PIPELINE + UNEVEN, schedule="bubble_fill", batch=16),
}


TOO_MUCH = {"an uneven split in gaps": 1.2, "whole during a step": 1.15}
"""All lanes of a stage are taken to hold what the fullest does: one that takes few microbatches holds less. What FSDP
keeps whole counts in full until the last action is over, which lets go of it block by block: in fp32 1.11 of what is
measured."""


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=exhaustive) for name in MORE)])
def test_peak_memory_is_predicted_within_a_tenth(pool, name):
    given = {**CASES, **MORE}[name]
    resolved = resolve(given)
    graph = resolved.graph
    drawn = resolved.loader().batch(STEP)
    plan = resolved.plan(drawn.metas)
    schedule = recipe_schedule(given, graph, plan.routes)
    costs = recipe_step_model(given, graph, resolved.shapes, machine=load_machine("h100")).costs(plan, schedule)
    timeline = simulate(schedule, costs)
    for rank, (after, peak, spans) in enumerate(pool(2).run(measured, given, timeout=120)):
        assert after == pytest.approx(costs.static_bytes[rank], rel=0.01), "parameters, gradients, optimizer state"
        assert max(most for _, most in spans) == peak, "no action holds as much as what comes behind the last"
        predicted = timeline.peak_bytes[timeline.track_of(rank)]
        assert 0.9 * peak <= predicted <= TOO_MUCH.get(name, 1.1) * peak
