"""Parity of bubble_fill: slices of encoders between the LLM's actions on the same ranks, at any speed of ranks."""

import pytest

from hetmesh.balance import plan_batch
from hetmesh.cost.machine import TYPICAL_PEAK
from hetmesh.data.loader import Loader
from hetmesh.errors import RecipeError
from hetmesh.graph import SampleMeta, Stage
from hetmesh.recipe.sections import Data
from hetmesh.resolve import schedules as recipe_schedule_module
from hetmesh.resolve.resolved import resolve
from hetmesh.resolve.schedules import StepSchedules, over_in_flight, recipe_schedule
from hetmesh.schedule import Kind
from hetmesh.testing.parity import ParityError, compare, reference
from support import faults
from support.assignments import Deferred, RandomAssignment
from support.parity_cases import INNER, OVER_BOTH_STAGES, SLICES, check, delayed_run, filled, recipe, table

CASES = {
    **{inner: filled(inner, *OVER_BOTH_STAGES, batch=8) for inner in INNER},
    "frozen encoder": filled("1f1b", *OVER_BOTH_STAGES, batch=8, trained="frozen encoder"),
    "FSDP encoder, LoRA, computed again": filled(
        "interleaved",
        table("vision", "0-3", fsdp=2),
        table("llm", "0-3", pp=2, fsdp=2),
        '[activation_checkpoint]\nmode = "full"',
        batch=8,
        llm="lora = { rank = 2 }",
    ),
    "an encoder pipeline on some of the ranks, a cap": filled(
        "zero_bubble",
        table("vision", "1-2", pp=2),
        table("llm", "0-3", pp=4),
        extra=f"{SLICES}\nbubble_fill_in_flight = 5",
        batch=6,
    ),
}


@pytest.mark.exhaustive  # the tests below have 1f1b, test_parity_gaps.py zero_bubble, test_parity_streams.py LoRA
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_o8_slices_in_gaps_equal_one_process(pool4, case):
    """Two steps in which ranks stop now and then."""
    given = CASES[case]
    resolved = resolve(given)
    graph = resolved.graph
    assert graph["vision"].num_stages >= 3
    schedule = recipe_schedule(given, graph, given.batch.num_microbatches)
    assert any(a.kind is Kind.BACKWARD_WEIGHT for a in schedule.actions) == (given.llm_schedule == "zero_bubble")
    check(pool4, given, [None])


def eight(inner, trained="all"):
    llm = table("llm", "0-7", pp=4, tp=2)
    return filled(inner, table("vision", "0-7", pp=2, tp=2), llm, batch=6, trained=trained)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [pytest.param(each, marks=pytest.mark.exhaustive) for each in INNER])
def test_o2_encoder_2_2_2_in_the_gaps_of_an_llm_1_4_2(pool8, inner):
    check(pool8, eight(inner), [None])


@pytest.mark.exhaustive  # test_parity_matrix.py has two encoders, and frozen ones
@pytest.mark.slow
def test_o9_two_encoders_share_the_gaps_one_of_them_frozen(pool4):
    tables = (table("vision", "0-3"), table("scanner", "2-3"), table("llm", "0-3", pp=2))
    check(pool4, recipe("bubble_fill", *tables, batch=6, extra=SLICES, encoders=2, scanner="trainable = false"), [None])


UNEVEN = {
    "in gaps": filled("1f1b", *OVER_BOTH_STAGES, "[balance]\nmicrobatch_shares = { vision = [3, 1] }", batch=8),
    "interleaved": filled(
        "interleaved", *OVER_BOTH_STAGES, "[balance]\nmicrobatch_shares = { vision = [1, 3] }", batch=8
    ),
    "before and after": recipe(
        "three_phase",
        *OVER_BOTH_STAGES,
        '[balance]\npolicy = "none"\nmicrobatch_shares = { vision = [5, 2] }',
        batch=6,  # not the sum of the shares
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [each if each == "in gaps" else pytest.param(each, marks=pytest.mark.exhaustive) for each in UNEVEN]
)
def test_o4_an_uneven_split_equals_one_process(pool4, case):
    """Lanes of the encoder that take more microbatches than others, on ranks that stop now and then."""
    given = UNEVEN[case]
    resolved = resolve(given)
    loader = Loader(resolved.source, given.batch.global_batch_size, resolved.expander, seed=0)
    plan = plan_batch(resolved.graph, loader.batch(0).metas, 1, resolved.balance)
    taken = [sum(bool(lanes[lane]) for lanes in plan.lanes["vision"]) for lane in range(4)]
    assert max(taken) > min(taken)
    check(pool4, given, [None])


@pytest.mark.exhaustive  # test_parity_matrix.py has deferral
@pytest.mark.slow
@pytest.mark.parametrize("inner", ["1f1b", pytest.param("zero_bubble", marks=pytest.mark.exhaustive)])
def test_deferral_and_microbatches_of_ones_own(pool4, inner):
    policies = [Deferred(2, split=True), RandomAssignment(0, most=3)]
    check(pool4, filled(inner, *OVER_BOTH_STAGES, batch=6), policies)


def by_step(job):
    """Schedules by what each step's microbatches cost, as of long steps."""
    job.resolved.schedules.each_step = True


@pytest.mark.slow
def test_o7_microbatches_in_the_order_in_which_the_encoder_ends(pool4):
    """Where the first microbatch has many images the LLM begins with another one, in each step with one of its own."""
    given = filled("1f1b", *OVER_BOTH_STAGES, '[balance]\npolicy = "none"', "[debug]\nseed = 3", batch=6)
    resolved = resolve(given)
    loader = Loader(resolved.source, given.batch.global_batch_size, resolved.expander, seed=3)
    schedules = resolved.schedules
    assert not schedules.each_step
    schedules.each_step = True
    orders = []
    for step in range(2):
        plan = plan_batch(resolved.graph, [drawn.meta for drawn in loader.batch(step)], given.batch.microbatch_size)
        first = [a for a in schedules.of(plan).actions if a.kind is Kind.FORWARD and a.target == Stage("llm")]
        orders.append([action.microbatch for action in first])
    assert all(order[0] for order in orders)
    assert orders[0] != orders[1]
    compare(reference(given, steps=2), pool4.run(delayed_run, given, None, by_step, timeout=120), 1e-10)


def test_each_step_has_the_schedule_of_its_routes_and_evaluation_one_without_backwards(monkeypatch):
    given = filled("zero_bubble", *OVER_BOTH_STAGES, batch=4)
    resolved = resolve(given)
    graph = resolved.graph
    schedules = resolved.schedules
    samples = [SampleMeta(f"s{i}", 9, targets=((4, 9),), rows={"vision": 0, "projector": 0}) for i in range(8)]
    plans = [plan_batch(graph, samples, size) for size in (1, 2, 4)]
    monkeypatch.setattr(recipe_schedule_module, "MAX_TYPICAL", 2)
    kept = [schedules.of(plan) for plan in plans]
    for plan, schedule in zip(plans, kept, strict=True):
        assert (schedule.routes, schedule.training) == (plan.routes, True)
        assert schedules.of(plan) == schedule
        assert any(action.kind is Kind.BACKWARD_WEIGHT for action in schedule.actions)
        evaluated = schedules.of(plan, training=False)
        assert (evaluated.routes, evaluated.training) == (plan.routes, False)
        assert {a.kind for a in evaluated.actions} == {Kind.FORWARD, Kind.SEND, Kind.RECV}
    assert len(schedules._typical) == 2
    work = 6 * sum(schedules.model.shape(name).parameters for name in graph.order) * 8 * given.training.seq_len
    seconds = work / (4 * TYPICAL_PEAK)  # on each of four ranks
    for factor in (0.9, 1.1):
        monkeypatch.setattr(recipe_schedule_module, "LONG_STEP_S", factor * seconds)
        assert StepSchedules(given, graph, schedules.model).each_step == (factor < 1)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_oracle_sees_rows_in_another_order(pool4):
    given = filled("1f1b", *OVER_BOTH_STAGES, batch=8)
    results = pool4.run(delayed_run, given, None, faults.PermuteRows("projector"), timeout=120)
    with pytest.raises(ParityError):
        compare(reference(given, steps=2), results, 1e-10)


def refusal(given):
    with pytest.raises(RecipeError) as caught:
        resolve(given)
    return str(caught.value)


def test_what_cannot_be_is_refused_with_its_keys():
    says = "'bubble_fill': no encoder, nor a module after the LLM, shares ranks with 'llm' (2,3), whose gaps it would"
    assert says in refusal(filled("1f1b", table("vision", "0-1"), table("llm", "2-3", pp=2)))
    says = "parallelism.bubble_fill_in_flight = 1: bubble_fill: stage vision.0 may hold 1 microbatches at a time, but"
    assert says in refusal(filled("1f1b", *OVER_BOTH_STAGES, extra="bubble_fill_in_flight = 1"))
    alone, many = table("vision", "0"), "[balance]\nmicrobatch_sizes = { vision = 1 }"
    own = table("llm", "0-3", pp=2) + "\nbubble_fill_in_flight = 3"  # two lanes take from two of the encoder's
    says = "parallelism.llm.bubble_fill_in_flight = 3: bubble_fill: stage vision.0 may hold 3 microbatches at a time"
    assert f"{says}, but the order of the LLM needs 4" in refusal(filled("1f1b", alone, own, many, batch=8))
    always = '\nfsdp_reshard_after_forward = "always"'
    both = table("vision", "0-3", pp=2, fsdp=2) + always, table("llm", "0-3", pp=2, fsdp=2) + always
    says = 'fsdp_reshard_after_forward = "always": bubble_fill_schedule = "zero_bubble" puts off gradients'
    said = refusal(filled("zero_bubble", *both, batch=4))
    assert f"parallelism.llm.{says}" in said
    assert "parallelism.vision" not in said  # whose backward stays whole


@pytest.mark.parametrize(
    ("policy", "extra", "said"),
    {
        "of bubble_fill": ("1f1b", SLICES, "layers_per_slice = 1: it is a key of the schedule 'bubble_fill', and this"),
        "the inner schedule": ("zero_bubble", 'bubble_fill_schedule = "1f1b"', "schedule = '1f1b': it is a key of the"),
        "a window": ("bubble_fill", "three_phase_window = 2", "window = 2: it is a key of the schedule 'three_phase'"),
        "recomputation": ("sequential", "three_phase_recompute = true", "and this one is 'sequential'; leave it out,"),
        "refused offload": ("1f1b", "three_phase_offload = false", "three_phase_offload = False: it is a key of"),
        "early": ("1f1b", "interleaved_early_warmup = true", "True: it is a key of the schedule 'interleaved', and"),
        "early, filled": ("bubble_fill", "interleaved_early_warmup = true", "this one is 'bubble_fill' over '1f1b'; l"),
        "tokens": ("1f1b", 'context_parallel_assignment = "lpt"', "assignment = 'lpt': no ranks share the tokens of a"),
    }.values(),
)
@pytest.mark.parametrize("own", [False, True], ids=["flat", "of the LLM"])
def test_keys_without_effect_are_refused_where_they_are_given(policy, extra, said, own):
    flat, table = ("", f"\n{extra}") if own else (extra, "")
    found = refusal(recipe(policy, OVER_BOTH_STAGES[0], OVER_BOTH_STAGES[1] + table, batch=4, extra=flat))
    assert found.startswith("parallelism.llm." if own else f"parallelism.{extra.split()[0]} = ")
    assert said in found


def test_slices_of_which_none_is_cut_are_refused():
    ends = "vision", "0-3"
    for table_, why in {
        table(
            *ends, pipeline_parallel_layers_per_stage=1
        ): "parallelism.vision.pipeline_parallel_layers_per_stage cuts",
        "": "'vision': it has no table in [parallelism]; 'projector': it has no table in [parallelism]",
    }.items():
        said = refusal(filled("1f1b", table_, table("llm", "0-3", pp=2), batch=4))
        assert said.startswith("parallelism.bubble_fill_layers_per_slice = 1: it cuts no module (")
        assert why in said
        resolve(filled("1f1b", table_, table("llm", "0-3", pp=2), batch=4, extra=""))


def test_keys_that_have_an_effect_are_taken():
    early = "interleaved_early_warmup = true"
    for given in (
        recipe("interleaved", *OVER_BOTH_STAGES, batch=4, extra=early),
        filled("interleaved", *OVER_BOTH_STAGES, batch=4, extra=early),
        recipe("three_phase", *OVER_BOTH_STAGES, batch=4, extra="three_phase_window = 2"),
        recipe(
            "1f1b",
            OVER_BOTH_STAGES[0],
            table("llm", "0-3", pp=2, context_parallel_degree=2) + '\ncontext_parallel_assignment = "lpt"',
            batch=4,
        ),
    ):
        resolve(given)


def test_a_cap_gives_way_to_what_the_routes_of_a_batch_need():
    """Some batches of samples that differ need three microbatches of the encoder at a time, those of equal ones two."""
    own = table("llm", "0-3", pp=2) + "\nbubble_fill_in_flight = 2"
    tables = own, "[balance]\ndeferral = true\nmicrobatch_sizes = { vision = 1 }"
    given = filled("1f1b", OVER_BOTH_STAGES[0], *tables, batch=8, extra="")
    resolved = resolve(given)
    loader = Loader(resolved.source, given.batch.global_batch_size, resolved.expander, seed=0)
    schedules, balance = resolved.schedules, resolved.balance
    plans = [plan_batch(resolved.graph, loader.batch(step).metas, 1, balance) for step in range(4)]
    assert {over_in_flight(given, schedules.of(plan)) for plan in plans} == {0, 1}


def test_an_encoder_is_cut_by_what_its_layers_cost():
    """On one rank a microbatch takes four times as long as on four."""

    def slices(ranks):
        given = filled("1f1b", table("vision", ranks), table("llm", "0-3", pp=2), extra="")
        options = given.data.options | {"items": 12, "text_only": 0.0}
        data = Data(source=given.data.source, options=options)
        return resolve(given.model_copy(update={"data": data})).graph["vision"].num_stages

    assert slices("0-3") < slices("0")
