"""Predicted peak memory of a step against bytes of tensors that are alive in it, on real processes."""

import pytest
from measured_memory import ADAPTERS, ALONE, DRAWER, PIPELINE, STEP, both, measured, recipe

from hetmesh.cost import load_machine
from hetmesh.resolve.recipe_step_model import recipe_step_model
from hetmesh.resolve.resolved import resolve
from hetmesh.resolve.schedules import recipe_schedule
from hetmesh.simulate import simulate

pytestmark = pytest.mark.slow

TENSOR = both("vision") + both("llm", key="tensor_parallel_degree")
SEQUENCE = "enable_sequence_parallel = true\n"
CONTEXT = both("vision", "projector") + both("llm", key="context_parallel_degree")
SHARDED = both("vision", "llm", key="data_parallel_shard_degree")
WHOLE = SHARDED + 'fsdp_reshard_after_forward = "never"\n'
SPREAD = both("vision", "projector", "llm") + "expert_parallel_degree = 2\n"
SPREAD_SHARDED = (
    both("vision", "projector") + both("llm", key="data_parallel_shard_degree") + "expert_parallel_degree = 2\n"
)
APART = ALONE + "[parallelism.projector]\nranks = [1]\n[parallelism.llm]\nranks = [1]\n"
BEHIND = DRAWER + both("vision", "projector") + PIPELINE
UNEVEN = "[balance]\nmicrobatch_shares = { vision = [3, 1] }\n"
ATTENTION = '["aten.scaled_dot_product_attention"]'
exhaustive = pytest.mark.exhaustive

CASES = {
    "fully sharded, recomputed, bfloat16": recipe(SHARDED, recomputed="full", compute="bfloat16"),
    "generator beside a pipeline": recipe(BEHIND + both("drawer"), schedule="1f1b", batch=16),
}
MORE = {
    "pipeline, split backward": recipe(ALONE + PIPELINE, schedule="zero_bubble", batch=16),
    "sequence parallel, fewer key heads": recipe(TENSOR + SEQUENCE, key_heads=2),
    "whole during a step, bfloat16": recipe(WHOLE, batch=16, compute="bfloat16", reduced="bfloat16"),
    "generator tensor parallel": recipe(
        BEHIND + both("drawer", key="tensor_parallel_degree"), schedule="1f1b", batch=16
    ),
    "generator fully sharded, recomputed": recipe(
        DRAWER + SHARDED + both("drawer", key="data_parallel_shard_degree"), recomputed="full"
    ),
    "generator in stages, split backward": recipe(
        BEHIND + both("drawer", key="pipeline_parallel_degree"), schedule="zero_bubble", batch=16
    ),
    "generator in gaps": recipe(BEHIND + both("drawer"), schedule="bubble_fill", batch=16),
    "generator behind a frozen encoder in bfloat16": recipe(
        BEHIND + both("drawer"), schedule="1f1b", batch=16, encoder=False, compute="bfloat16"
    ),
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
    "pipeline, split backward, recomputed": recipe(
        ALONE + PIPELINE, schedule="zero_bubble", batch=16, recomputed="full"
    ),
    "pipeline, split backward, recomputed, bfloat16": recipe(
        ALONE + PIPELINE, schedule="zero_bubble", batch=16, recomputed="full", compute="bfloat16"
    ),
    "split backward, whole during a step, recomputed, bfloat16": recipe(
        WHOLE, schedule="zero_bubble", batch=16, recomputed="full", compute="bfloat16"
    ),
    "split backward, whole during a step": recipe(WHOLE, schedule="zero_bubble", batch=16),
    "sequence parallel, recomputed": recipe(TENSOR + SEQUENCE, recomputed="full"),
    "encoder sequence parallel": recipe(
        both("vision", key="tensor_parallel_degree") + "enable_sequence_parallel = true\n" + both("projector", "llm")
    ),
    "pipeline in 1F1B": recipe(ALONE + PIPELINE, schedule="1f1b", batch=16),
    "replicas in bfloat16": recipe(both("vision", "llm"), compute="bfloat16"),
    "fully sharded": recipe(SHARDED),
    "whole during a step": recipe(WHOLE, batch=16),
    "whole during a step, bfloat16, sums in float32": recipe(WHOLE, batch=16, compute="bfloat16"),
    "recomputed": recipe(both("vision", "llm"), recomputed="full"),
    "bf16 parameters on replicas": recipe(both("vision", "llm"), dtype="bfloat16"),
    "bf16 parameters, fully sharded": recipe(SHARDED, dtype="bfloat16"),
    "bf16 parameters behind adapters": recipe(APART + ADAPTERS, encoder=False, dtype="bfloat16"),
    "recomputed but for products and attention": recipe(both("vision", "llm"), recomputed="selective"),
    "recomputed but for attention": recipe(SHARDED, recomputed="selective", save_ops=ATTENTION),
    "recomputed but for products, experts": recipe(
        SPREAD, packed=True, experts=True, recomputed="selective", save_ops='["aten.mm"]'
    ),
    "recomputed but for products and norms, tensor parallel": recipe(
        TENSOR, recomputed="selective", save_ops='["aten.linear", "aten.native_layer_norm"]', compute="bfloat16"
    ),
    "disjoint": recipe(ALONE + "[parallelism.llm]\nranks = [1]\n", schedule="1f1b", batch=16),
    "three phases": recipe(both("vision", "projector") + PIPELINE, schedule="three_phase", batch=16),
    "interleaved": recipe(ALONE + PIPELINE, schedule="interleaved", batch=16),
    "slices in gaps": recipe(both("vision", "projector") + PIPELINE, schedule="bubble_fill", batch=16),
    "an uneven split in gaps": recipe(both("vision") + PIPELINE + UNEVEN, schedule="bubble_fill", batch=16),
}


TOO_MUCH = {
    "an uneven split in gaps": 1.2,
    "whole during a step": 1.15,
    "split backward, whole during a step": 1.15,
    "split backward, whole during a step, recomputed, bfloat16": 1.15,
    "pipeline, split backward, recomputed": 1.15,
}
"""All lanes of a stage are taken to hold what the fullest does: one that takes few microbatches holds less. What FSDP
keeps whole counts in full until the last action is over, which lets go of it block by block: in fp32 1.11 of what is
measured. Gradients that the first part of a backward leaves count in full while its last block is computed again."""


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
