"""Parity of routes: every module by itself in any number of microbatches, every sample in any of them, rows wherever
they are wanted. What one process gives does not change, whatever the speed of ranks."""

import pytest

from hetmesh.balance import plan_batch
from hetmesh.data.loader import Loader
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.parity import ParityError, compare, reference
from support import faults
from support.assignments import Deferred, RandomAssignment
from support.parity_cases import check, cp, delayed_run, packed, recipe, table

pytestmark = pytest.mark.slow

LAYOUTS = {
    "two pipelines": ("1f1b", table("vision", "0-1", pp=2), table("llm", "2-3", pp=2)),
    "two pipelines, the backward in two parts": (
        "zero_bubble",
        table("vision", "0-1", pp=2),
        table("llm", "2-3", pp=2),
    ),
    "three stages on two ranks": ("interleaved", table("vision", "0-1", pp=2), table("llm", "2-3", pp=2)),
    "FSDP and TP": ("1f1b", table("vision", "0-2", fsdp=3), table("llm", "0-3", fsdp=2, tp=2)),
    "context parallel": ("sequential", table("vision", "0-1"), cp("1-3", 3)),
    "context parallel and sequence parallel": (
        "1f1b",
        table("vision", "0-1"),
        cp("0-3", 2, tp=2) + "\nenable_sequence_parallel = true",
    ),
    "context parallel pipeline": ("1f1b", table("vision", "0-3"), cp("0-3", 2, pp=2)),
    "colocated": ("three_phase", table("vision", "0-3"), table("llm", "0-3", pp=2, tp=2)),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_assignments_equal_one_process(pool4, layout):
    policy, *tables = LAYOUTS[layout]
    check(pool4, recipe(policy, *tables, batch=8), [RandomAssignment(seed) for seed in range(1, 11)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["1f1b", "interleaved"])
def test_two_encoders_with_microbatches_of_their_own_on_eight_processes(pool8, policy):
    tables = (table("vision", "0-2", pp=3), table("scanner", "3"), cp("0,4-6", 2, pp=2))
    check(pool8, packed(recipe(policy, *tables, batch=9, encoders=2)), [RandomAssignment(0, most=3)])


DEFERRAL = {
    "PP": ("1f1b", table("vision", "0-1"), table("llm", "2-3", pp=2)),
    "PP, the backward in two parts": ("zero_bubble", table("vision", "0-1"), table("llm", "2-3", pp=2)),
    "PP, three phases": ("three_phase", table("vision", "0-3"), table("llm", "0-3", pp=2)),
    "FSDP and TP": ("1f1b", table("vision", "0-1", fsdp=2), table("llm", "0-3", fsdp=2, tp=2)),
    "CP and PP": ("1f1b", table("vision", "0-1"), cp("0-3", 2, pp=2)),
}


@pytest.mark.parametrize(
    "llm", [name if "two parts" in name else pytest.param(name, marks=pytest.mark.exhaustive) for name in DEFERRAL]
)
def test_deferral_equals_one_process_in_both_backward_modes(pool4, llm):
    """The latter half of a microbatch of the encoder goes through the LLM one microbatch later, and its gradient comes
    back as late: to a backward of the whole microbatch, or of each half."""
    policy, *tables = DEFERRAL[llm]
    check(pool4, recipe(policy, *tables, batch=6), [Deferred(2), Deferred(2, split=True)])


def first_routes(recipe):
    """Of the first batch."""
    resolved = resolve(recipe)
    drawn = Loader(resolved.source, recipe.batch.global_batch_size, resolved.expander, seed=0).batch(0)
    options = resolved.balance
    return plan_batch(resolved.graph, [d.meta for d in drawn], recipe.batch.microbatch_size, options).routes


@pytest.mark.parametrize("split", ["", pytest.param("\nsplit_deferred_backward = true", id="split")])
def test_e6_entrain_defers_and_equals_one_process_in_both_backward_modes(pool4, split):
    balance = f'[balance]\npolicy = "entrain"\ndeferral = true{split}'
    given = recipe("1f1b", table("vision", "0-1"), table("llm", "2-3", fsdp=2), balance, batch=36, microbatch=6)
    routes = first_routes(given)
    assert routes.pairs
    assert routes.count("vision") == routes.count("llm") * (2 if split else 1)
    check(pool4, given, [None])


def test_the_oracle_sees_rows_in_another_order(pool4):
    given = recipe("1f1b", table("vision", "0-1"), table("llm", "2-3", pp=2), batch=4)
    results = pool4.run(delayed_run, given, RandomAssignment(1), faults.PermuteRows("projector"), timeout=120)
    with pytest.raises(ParityError):
        compare(reference(given, steps=2), results, 1e-10)
