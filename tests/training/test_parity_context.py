"""Parity of context parallelism and packing: every token once, wherever it lies."""

import pytest
from test_parity_pipeline import recipe, table

from hetmesh.boundary import World
from hetmesh.errors import RecipeError
from hetmesh.parallel.context_registry import counter
from hetmesh.testing.bounds import minimal_elements
from hetmesh.testing.parity import compare, reference, run
from hetmesh.training.job import Job, describe


def on_this_rank(rank, recipe):
    """The outcome, and how often each layer's attention was hetmesh's own."""
    counter.clear()
    outcome = run(recipe, World.current(), steps=2)
    return outcome, dict(counter)


def check(pool, recipe):
    results = pool.run(on_this_rank, recipe, timeout=120)
    compare(reference(recipe, steps=2), [outcome for outcome, _ in results], 1e-10)
    return [calls for _, calls in results]


def cp(ranks, size, **degrees):
    return table("llm", ranks, context_parallel_degree=size, **degrees)


CASES = {
    "disjoint": (table("vision", "0-1"), cp("2-3", 2)),
    "colocated": (table("vision", "0-3"), cp("0-3", 4)),
    "with lanes": (table("vision", "0-3"), cp("0-3", 2)),
    "tensor parallel": (table("vision", "0-3"), cp("0-3", 2, tp=2)),
    "sequence parallel": (table("vision", "0-1"), cp("0-3", 2, tp=2) + "\nenable_sequence_parallel = true"),
    "FSDP": (table("vision", "0-1", fsdp=2), cp("0-3", 2, fsdp=2)),
    "pipeline": (table("vision", "0-3"), cp("0-3", 2, pp=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_context_parallel_training_equals_one_process(pool4, case):
    policy = "1f1b" if case == "pipeline" else "sequential"
    calls = check(pool4, recipe(policy, *CASES[case], batch=4))
    layers = {layer for each in calls for _, layer in each}
    assert layers == {0, 1, 2, 3}  # in every layer it was called


@pytest.mark.slow
@pytest.mark.parametrize("assignment", ["contiguous", "zigzag", "lpt", "balanced"])
def test_any_assignment_gives_the_same(pool4, assignment):
    key = f'\ncontext_parallel_assignment = "{assignment}"'
    check(pool4, recipe("sequential", table("vision", "0"), cp("1-3", 3) + key, batch=3))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_blocks_attend_again(pool4, mode):
    check(pool4, recipe("sequential", cp("0-3", 2), f'[activation_checkpoint]\nmode = "{mode}"', batch=2))


@pytest.mark.slow
def test_packed_samples_equal_padded_ones(pool4):
    """Packing without context parallelism: the loss and all gradients stay."""
    given = recipe("sequential", table("vision", "0-1"), table("llm", "0-3", tp=2), batch=4)
    packed = given.model_copy(update={"training": given.training.model_copy(update={"pack_samples": True})})
    calls = check(pool4, packed)
    assert all(calls)


def received(rank, recipe):
    """Bytes of rows that reached this rank's LLM, and the fewest that could."""
    world = World.current()
    world.log.clear()
    run(recipe, world, steps=1)
    job = Job.assemble(recipe, world)
    plan = job.plan([d.meta for d in next(job.loader)])
    boundary = job.graph.inputs("llm")[0]
    layouts = [plan.layouts(boundary, m) for m in range(plan.num_microbatches)]
    needed = sum(minimal_elements(*each).get(rank, 0) for each in layouts)
    return world.log.bytes_received(boundary.name, "forward"), 8 * needed


@pytest.mark.slow
def test_rows_go_straight_to_the_rank_that_owns_their_positions(pool4):
    """C9: bytes into each LLM rank are those of its own rows."""
    given = recipe("sequential", table("vision", "0-1"), table("projector", "0-1"), cp("2-3", 2), batch=4)
    results = pool4.run(received, given, timeout=60)
    assert [bytes_ for bytes_, _ in results] == [needed for _, needed in results]
    assert sum(bytes_ for bytes_, _ in results) > 0


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ((table("vision", "0-1", context_parallel_degree=2),), "of the modules only 'llm', which reads tokens"),
    ],
)
def test_what_cannot_share_tokens_is_refused(tables, says):
    with pytest.raises(RecipeError, match=says):
        describe(recipe("sequential", *tables))
