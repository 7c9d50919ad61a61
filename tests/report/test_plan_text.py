"""What a search for layouts says of them: when a layout per module pays, and what tells two plans apart."""

from dataclasses import replace

import pytest

from hetmesh.planner import Found, LayoutPlan, ModulePlan, Prediction
from hetmesh.report.plan_text import advice, difference

SHARED = ModulePlan((0, 8), (1, 1, 8, 1, 1))
PLAN = LayoutPlan("homogeneous", {"vision": SHARED, "llm": SHARED}, "sequential", 4)
OWN = replace(PLAN, placement="colocated", modules={"vision": ModulePlan((0, 8), (1, 8, 1, 1, 1)), "llm": SHARED})


def found(**seconds):
    plans = {"homogeneous": PLAN, "colocated": OWN, "disjoint": replace(OWN, placement="disjoint")}
    return Found({name: (Prediction(plans[name], each, 1.0, None, 1, True),) for name, each in seconds.items()})


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (
            {"homogeneous": 1.0, "colocated": 0.8, "disjoint": 0.9},
            "pays here: colocated is predicted to take 20.0% less",
        ),
        ({"homogeneous": 1.0, "colocated": 0.995}, "hardly pays here: colocated is predicted to take 0.5% less time"),
        (
            {"homogeneous": 1.0, "colocated": 1.2, "disjoint": 1.07},
            "does not pay here: disjoint is predicted to take 7.0%",
        ),
        ({"homogeneous": 1.0}, None),
        ({"colocated": 1.0, "disjoint": 1.0}, None),
    ],
)
def test_a_search_says_whether_a_layout_per_module_pays(seconds, said):
    if said is None:
        assert advice(found(**seconds)) == ""
    else:
        assert advice(found(**seconds)).startswith(f"A layout per module {said}")


def test_two_plans_are_told_apart():
    smaller = replace(PLAN, microbatch_size=2)
    assert difference(smaller, PLAN) == "microbatches of 2 instead of microbatches of 4"
    again = replace(PLAN, modules={"vision": SHARED, "llm": replace(SHARED, activation_checkpoint="full")})
    assert difference(again, PLAN) == "llm: FSDP 8, recomputed on 0-7 instead of llm: FSDP 8 on 0-7"
    filled = replace(OWN, schedule="bubble_fill")
    assert difference(replace(filled, shares={"vision": (3, 1)}), filled) == "3+1 for the lanes of vision"
    assert difference(filled, replace(filled, shares={"vision": (3, 1)})) == "without 3+1 for the lanes of vision"
