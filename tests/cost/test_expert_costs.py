"""What experts cost: products of a token's choices, and the exchange of tokens between ranks."""

import itertools
from dataclasses import replace

import pytest

from hetmesh.cost import (
    LayerOptions,
    LayerShape,
    ModuleShape,
    Rates,
    WeightShape,
    Work,
    layer_flops,
    layer_time,
    load_machine,
)
from hetmesh.cost.collective_time import all_to_all, tensor_parallel_time
from hetmesh.cost.expert_costs import exchange_time, reached_share
from hetmesh.cost.shapes import expert_share
from hetmesh.resolve.modules import notes_on_experts

EXPERTS, CHOSEN, FEATURES, INNER = 8, 3, 16, 24
MACHINE = replace(
    load_machine("h100"), node_bandwidth=100.0, network_bandwidth=10.0, node_latency=1.0, network_latency=5.0
)


def block(trainable=True, router=True):
    return LayerShape(
        "block",
        (
            WeightShape("up", (EXPERTS, 2, INNER, FEATURES), CHOSEN, trainable, 2, 2),
            WeightShape("down", (EXPERTS, FEATURES, INNER), CHOSEN, trainable, 2, 1),
            WeightShape("gate", (EXPERTS, FEATURES), 1, router),
        ),
    )


def test_a_row_multiplies_the_experts_that_it_chooses():
    flops = layer_flops(block(), Work(10), upstream=True)
    assert flops.forward == 10 * 2 * (CHOSEN * 3 * INNER * FEATURES + EXPERTS * FEATURES)
    assert flops.backward == 2 * flops.forward
    own = layer_flops(expert_share(block(), 4), Work(10), upstream=True)
    assert own.forward == flops.forward, "a rank with a quarter of the experts gets rows of the other ranks for them"


def test_tensor_parallel_ranks_share_each_expert():
    rates = Rates(1.0)
    one, two = (layer_time(block(), Work(10), rates, upstream=True, tp=tp).forward for tp in (1, 2))
    router = 10 * 2 * EXPERTS * FEATURES
    assert two - router == pytest.approx((one - router) / 2)
    sums = tensor_parallel_time(block(), Work(10), LayerOptions("float32", True, group=(0, 1)), MACHINE)
    narrow = LayerShape("mlp", (WeightShape("down", (FEATURES, 5), 1, tp_dim=1),))
    assert sums == tensor_parallel_time(narrow, Work(10), LayerOptions("float32", True, group=(0, 1)), MACHINE)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_tokens_reach_the_ranks_of_their_choices(ranks):
    """Against all choices, one by one."""
    each = EXPERTS // ranks
    choices = list(itertools.combinations(range(EXPERTS), CHOSEN))
    reached = sum(any(expert < each for expert in chosen) for chosen in choices)
    assert reached_share(EXPERTS, CHOSEN, ranks) == pytest.approx(reached / len(choices))


def test_the_exchange_brings_each_token_once_to_each_other_rank_of_its_experts():
    machine = replace(MACHINE, node_latency=0.0)
    rows = 100 * 3 * reached_share(EXPERTS, CHOSEN, 4)  # of the three others, all of which have as many
    weights, features = 4 * CHOSEN, 4 * FEATURES
    numbers = 3 * 8 * (1 + 2)
    time = exchange_time(block(), Work(100), LayerOptions("float32", True, experts=(0, 1, 2, 3)), machine)
    assert time.forward == pytest.approx((numbers + rows * (2 * features + weights + 2 * CHOSEN)) / 100)
    assert time.backward == pytest.approx(rows * (2 * features + weights) / 100)
    alone = exchange_time(block(), Work(100), LayerOptions("float32", True, experts=(0,)), machine)
    assert alone.forward == alone.backward == 0
    frozen = exchange_time(
        block(False, False), Work(100), LayerOptions("float32", False, experts=(0, 1, 2, 3)), machine
    )
    assert (frozen.forward, frozen.backward) == (time.forward, 0)
    no_inputs = exchange_time(
        block(True, False), Work(100), LayerOptions("float32", False, experts=(0, 1, 2, 3)), machine
    )
    assert no_inputs.backward == pytest.approx(rows * features / 100)


def test_experts_that_cannot_be_counted_are_named():
    stack = WeightShape("block.experts.gate_up_proj", (EXPERTS, 2 * INNER, FEATURES))
    known, unknown = ModuleShape("llm", (block(),)), ModuleShape("llm", (LayerShape("block", (stack,)),))
    assert not known.uncounted
    assert unknown.uncounted == (stack.name,)
    (even,), (missing,), none = map(notes_on_experts, ({"llm": known}, {"llm": unknown}, {"llm": None}))
    assert "experts of llm" in even
    assert "even" in even
    assert missing.startswith("not counted in FLOPs and seconds")
    assert stack.name in missing
    assert none == ()


def test_an_all_to_all_uses_every_port():
    assert all_to_all(300, range(4), MACHINE) == pytest.approx(3 * 1 + 300 / 100)
    assert all_to_all(300, [0, 1, 8, 9], MACHINE) == pytest.approx(2 * 5 + 200 / 10), "two of three are far away"
    assert all_to_all(300, [7], MACHINE) == 0
