"""Parity of context parallelism and packing: every token once, wherever it lies."""

import pytest

from hetmesh.attention.in_transformers import counter
from hetmesh.balance import boundary_layouts
from hetmesh.boundary import World
from hetmesh.errors import RecipeError
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.parity import compare, reference, run
from hetmesh.training.job import Job
from support.parity_cases import cp, packed, recipe, table
from support.received_rows import received_rows


def on_this_rank(rank, recipe):
    """The outcome, and how often each layer's attention was hetmesh's own."""
    counter.clear()
    outcome = run(recipe, World.current(), steps=2)
    return outcome, dict(counter)


def check(pool, recipe):
    results = pool.run(on_this_rank, recipe, timeout=120)
    compare(reference(recipe, steps=2), [outcome for outcome, _ in results], 1e-10)
    return [calls for _, calls in results]


@pytest.mark.slow
def test_every_layer_attends_by_context(pool4):
    calls = check(pool4, recipe("1f1b", table("vision", "0-3"), cp("0-3", 2, pp=2), batch=4))
    assert {layer for rank_calls in calls for _, layer in rank_calls} == {0, 1, 2, 3}


@pytest.mark.exhaustive  # test_parity_matrix.py has encoders on other ranks
@pytest.mark.slow
def test_three_ranks_of_which_one_has_the_encoder(pool4):
    key = '\ncontext_parallel_assignment = "balanced"'
    check(pool4, recipe("sequential", table("vision", "0"), cp("1-3", 3) + key, batch=3))


@pytest.mark.slow
def test_packed_samples_equal_padded_ones(pool4):
    """Packing without context parallelism: the loss and all gradients stay."""
    given = recipe("sequential", table("vision", "0-1"), table("llm", "0-3", tp=2), batch=4)
    calls = check(pool4, packed(given))
    assert all(calls)


def rows_and_outcome(rank, recipe):
    """The outcome, and the elements of rows that reached this rank's LLM in each microbatch."""
    world = World.current()
    world.log.clear()
    outcome = run(recipe, world, steps=2)
    job = Job.assemble(resolve(recipe), world)
    plan = job.plan([d.meta for d in next(job.loader)])
    layouts = (boundary_layouts(plan, job.graph.inputs("llm")[0], m) for m in range(plan.num_microbatches))
    return outcome, [dst.local_shape(shape, rank)[0] for shape, _, dst in layouts]


@pytest.mark.slow
def test_u2_a_context_parallel_rank_without_images(pool4):
    """Ranks, and whole microbatches, without a row of any image: neither side hangs, nothing is lost."""
    given = recipe("sequential", table("vision", "0-3"), cp("0-3", 4), batch=8)
    data = given.data.model_copy(update={"options": {**given.data.options, "text_only": 0.6, "max_items": 1}})
    given = given.model_copy(update={"data": data})
    results = pool4.run(rows_and_outcome, given, timeout=120)
    compare(reference(given, steps=2), [outcome for outcome, _ in results], 1e-10)
    by_microbatch = list(zip(*(rows for _, rows in results), strict=True))
    assert any(not any(rows) for rows in by_microbatch)
    assert any(any(rows) and not all(rows) for rows in by_microbatch)


@pytest.mark.slow
def test_rows_go_straight_to_the_rank_that_owns_their_positions(pool4):
    """C9: bytes into each LLM rank are those of its own rows."""
    given = recipe("sequential", table("vision", "0-1"), table("projector", "0-1"), cp("2-3", 2), batch=4)
    results = pool4.run(received_rows, given, timeout=60)
    assert [bytes_ for bytes_, *_ in results] == [needed for _, needed, _ in results]
    assert sum(bytes_ for bytes_, *_ in results) > 0


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ((table("vision", "0-1", context_parallel_degree=2),), "of the modules only 'llm', which reads tokens"),
    ],
)
def test_what_cannot_share_tokens_is_refused(tables, says):
    with pytest.raises(RecipeError, match=says):
        resolve(recipe("sequential", *tables))
