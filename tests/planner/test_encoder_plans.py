"""Plans of an encoder on an LLM's ranks."""

from hetmesh.planner.encoder_plans import encoder_plans


def test_o11_every_plan_divides_the_llm_s_degrees_and_shares_the_samples_evenly():
    plans = list(encoder_plans(8, 8, 32, 2, 48))
    assert len(set(plans)) == len(plans)
    for plan in plans:
        assert 8 % plan.pp == 8 % plan.tp == 48 % plan.pp == 0
        assert plan.pp * plan.tp * plan.lanes == 64
        assert 32 % (plan.lanes * plan.microbatch) == 0
    assert {(p.pp, p.tp) for p in plans} == {
        (pp, tp) for pp in (1, 2, 4, 8) for tp in (1, 2, 4, 8) if 64 // (pp * tp) <= 32
    }


def test_layers_and_samples_that_do_not_divide_leave_plans_out():
    assert {p.pp for p in encoder_plans(4, 1, 8, 1, 6)} == {1, 2}
    assert {p.lanes for p in encoder_plans(4, 2, 6, 1, 4)} == {1, 2}
