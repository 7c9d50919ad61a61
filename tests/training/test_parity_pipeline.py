"""Parity of pipelines: what pairs of features (`test_parity_matrix.py`) do not show."""

import pytest

from hetmesh.testing.parity import ParityError, compare, reference, run_as
from support import faults
from support.often import some
from support.parity_cases import recipe, table

pytestmark = pytest.mark.slow


def check(pool, recipe, fault=None):
    results = pool.run(run_as, recipe, 2, fault, timeout=120)
    return compare(reference(recipe, steps=2), results, 1e-10)


def test_layers_by_name(pool4):
    llm = (
        table("llm", "1-2", pp=2)
        + '\nmodule_fqns_per_model_part = [["model.embed_tokens"], ["model.layers.0", "model.layers.1", '
        '"model.layers.2", "model.layers.3", "model.norm", "lm_head"]]'
    )
    check(pool4, recipe("1f1b", llm, batch=4))


def test_a_backward_in_two_parts_where_a_stage_uses_a_parameter_twice(pool4):
    """The whole LLM is one stage, its head tied to its embedding."""
    check(pool4, recipe("zero_bubble", table("vision", "0-1", pp=2), table("llm", "2-3", tp=2), tied=True))


def test_a_tied_head_far_from_its_embedding(pool4):
    given = recipe("zero_bubble", table("vision", "0"), table("llm", "0-3", pp=2, tp=2), tied=True, batch=3)
    check(pool4, given)
    with pytest.raises(ParityError):
        check(pool4, given, faults.ScaleGradient("llm"))


def test_what_sequence_parallelism_gathers_again_serves_both_parts_of_a_backward(pool4):
    llm = table("llm", "0-3", pp=2, tp=2) + "\nenable_sequence_parallel = true"
    check(pool4, recipe("zero_bubble", table("vision", "0"), llm, batch=3))


@pytest.mark.exhaustive
@pytest.mark.parametrize("recomputed", ["none", "full"])
@pytest.mark.parametrize("degrees", [{"data_parallel_replicate_degree": 2}, {"tp": 2}], ids=["HSDP", "FSDP x TP"])
def test_a_backward_in_two_parts_sharded_on_eight_processes(pool8, degrees, recomputed):
    tables = table("vision", "0-1", fsdp=2), table("llm", "0-7", pp=2, fsdp=2, **degrees)
    check(pool8, recipe("zero_bubble", *tables, f'[activation_checkpoint]\nmode = "{recomputed}"', batch=3))


@pytest.mark.parametrize(
    "options",
    some(
        ("three_phase_window = 2\nthree_phase_offload = true",),
        ("three_phase_window = 2\nthree_phase_offload = true", "three_phase_recompute = true"),
    ),
)
def test_the_options_of_three_phases(pool4, options):
    check(pool4, recipe("three_phase", table("vision", "0-3"), table("llm", "0-3", pp=4), extra=options))


def test_two_encoders_of_unequal_depth_on_eight_processes(pool8):
    tables = (table("vision", "0-2", pp=3), table("scanner", "3"), table("llm", "4-7", pp=2, tp=2))
    check(pool8, recipe("1f1b", *tables, encoders=2))
