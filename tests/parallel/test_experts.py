"""Mixture-of-experts blocks in one process: against transformers' own, to the last bit, and against plain loops."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hetmesh._torch_compat import fake_process_group
from hetmesh.errors import BoundaryError
from hetmesh.models.named.qwen3_moe import two_halves
from hetmesh.parallel.experts import apply_expert_sharding
from hetmesh.parallel.experts import block as block_module
from hetmesh.parallel.experts import token_exchange as exchange
from hetmesh.parallel.experts.block import ExpertLayers, grouped_linear, make_expert_block
from hetmesh.parallel.experts.load_balancing import balance_terms, choices_per_sample
from hetmesh.parallel.experts.routed_tokens import LaneSamples, RoutedTokens
from hetmesh.parallel.experts.token_exchange import ExpertRanks, count_choices, even_counts
from hetmesh.parallel.experts.token_routes import collect, route_to_experts, route_to_ranks, spread


@pytest.fixture(autouse=True)
def _one_thread():
    """Threads cut a product where its operands lie in memory, and so decide the last bit of its sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


TOKENS, EXPERTS, CHOSEN, FEATURES, INNER = 37, 8, 3, 16, 24


def theirs(dtype=torch.float32, balance=0.0, implementation="grouped_mm"):
    """transformers' own block with random weights, and its config."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=FEATURES,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        router_aux_loss_coef=balance,
    )
    config._experts_implementation = implementation
    torch.manual_seed(1)
    block = Qwen3MoeSparseMoeBlock(config)
    for p in block.parameters():
        nn.init.normal_(p, std=0.3)
    return block.to(dtype)


def ours(block, tokens=TOKENS, balance=0.0, lengths=None):
    """The same weights in hetmesh's block."""
    twin = two_halves(copy.deepcopy(block))
    layers = ExpertLayers(("mlp",), EXPERTS, CHOSEN, INNER, FEATURES, balance)
    shared = RoutedTokens()
    lengths = torch.tensor([tokens] if lengths is None else lengths)
    of_token = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    shared.note({"token_samples": of_token, "sample_tokens": lengths, "sample_weights": lengths.double()})
    make_expert_block(
        twin,
        layers=layers,
        number=0,
        peers=ExpertRanks(None, None, 1, 0, "experts"),
        tokens=shared,
        sharing=None,
        balances=True,
        enter=None,
        leave=None,
    )
    return twin


def run(block, hidden):
    hidden = hidden.clone().requires_grad_()
    out = block(hidden)
    out.sin().sum().backward()
    gradients = {name: p.grad.flatten() for name, p in block.named_parameters()}
    return out.detach(), hidden.grad, gradients


def hidden(dtype=torch.float32, tokens=TOKENS):
    return torch.randn(1, tokens, FEATURES, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_block_equals_transformers_own_to_the_last_bit(dtype):
    block = theirs(dtype)
    out, to_hidden, gradients = run(ours(block), hidden(dtype))
    want, to_want, wanted = run(block, hidden(dtype))
    assert torch.equal(out, want)
    for got, expected in ((to_hidden, to_want), *((gradients[name], wanted[name]) for name in wanted)):
        rounding = 1e-6 if dtype == torch.float32 else 2e-2
        assert (got - expected).norm() <= rounding * expected.norm()


def test_sums_are_in_the_order_of_a_tokens_own_choice():
    """A cause of drift: sums in the order of the experts, as transformers' loop (`eager`) makes them."""
    by_expert = theirs(implementation="eager")
    by_token = theirs()
    out = ours(by_token)(hidden())
    assert torch.equal(out, by_token(hidden()))
    assert not torch.equal(out, by_expert(hidden()))


def test_choices_are_sorted():
    """A cause of drift: a top-k that is not sorted gives the same experts in another order of summation."""
    block = theirs()
    out = ours(block)(hidden())
    twin = ours(block)
    gate = twin.gate.forward

    def unsorted(x):
        logits, weights, experts = gate(x)
        return logits, weights.flip(1), experts.flip(1)

    twin.gate.forward = unsorted
    assert not torch.equal(out, twin(hidden()))
    assert torch.allclose(out, twin(hidden()), atol=1e-5)
    _, weights, _ = block.gate(hidden()[0])
    assert (weights.diff(dim=1) <= 0).all()


def test_half_precision_is_summed_in_fp32():
    """A cause of drift: accumulation in bf16."""
    copies = torch.tensor([[256.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)
    route, _ = route_to_experts(torch.tensor([[0, 1, 2, 3]]), 4)
    assert collect(copies, route).item() == 260.0  # 259 rounded once; 256 + 1 is 256 in bf16
    assert sum(copies).item() == 256.0


def test_the_host_waits_for_sizes_when_all_that_does_not_need_them_is_under_way(monkeypatch):
    """One exchange of sizes: begun when the router has chosen, waited for behind the load-balancing loss."""
    happened = []

    def start(*args):
        happened.append("begun")
        finish = exchange.start_counts(*args)
        return lambda: happened.append("waited") or finish()

    def terms(*args):
        happened.append("balanced")
        return balance_terms(*args)

    monkeypatch.setattr(block_module, "start_counts", start)
    monkeypatch.setattr(block_module, "balance_terms", terms)
    ours(theirs(balance=0.1), balance=0.1)(hidden())
    assert happened == ["begun", "balanced", "waited"]


@pytest.mark.parametrize("tokens", [0, 1, TOKENS])
def test_padding_is_not_routed_and_nothing_is_legal(tokens):
    block = ours(theirs(torch.float64, implementation="eager"), tokens)
    out, to_hidden, gradients = run(block, hidden(torch.float64))
    assert torch.count_nonzero(out[:, tokens:]) == 0
    assert torch.count_nonzero(to_hidden[:, tokens:]) == 0
    assert (torch.count_nonzero(gradients["experts.down_proj"]) > 0) == (tokens > 0)
    if tokens:
        want, _, wanted = run(theirs(torch.float64, implementation="eager"), hidden(torch.float64)[:, :tokens])
        assert torch.allclose(out[:, :tokens], want, atol=1e-12)
        for name, value in wanted.items():
            assert torch.allclose(gradients[name], value, atol=1e-12), name


def test_experts_without_tokens_have_zero_gradients():
    weight = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, (0, 4, 0, 2)), (rows, weight))
    grouped_linear(rows, weight, (0, 4, 0, 2)).sum().backward()
    assert torch.count_nonzero(weight.grad[[0, 2]]) == 0
    weight.grad = None
    grouped_linear(rows[:0], weight, (0, 0, 0, 0)).sum().backward()
    assert torch.count_nonzero(weight.grad) == 0


def test_a_token_goes_once_to_each_rank_that_holds_one_of_its_experts():
    experts = torch.tensor([[0, 1, 5], [7, 6, 4], [2, 4, 0], [3, 1, 2]])
    wanted, counts = count_choices(experts, ranks=4, count=8)
    assert wanted.int().tolist() == [[1, 0, 1, 0], [0, 0, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]]
    assert counts.tolist() == [[3, 2, 2], [2, 2, 1], [3, 2, 1], [1, 1, 1]]
    route = route_to_ranks(wanted, 9, 3)
    assert route.source.tolist() == [0, 2, 3, 2, 3, 0, 1, 2, 1]
    assert route.places.tolist() == [[0, 5, 9], [6, 8, 9], [1, 3, 7], [2, 4, 9]]
    rows = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(collect(spread(rows, route), route), rows * torch.tensor([[2.0], [2], [3], [2]]))
    torch.autograd.gradcheck(lambda x: spread(x, route), rows)
    torch.autograd.gradcheck(lambda y: collect(y, route), torch.randn(9, 2, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("counts", [(2, 1, 3, 2), (0, 3, 0, 2), (0, 0, 0, 0)])
def test_rows_of_two_ranks_lie_expert_by_expert(counts):
    """torchtitan's cases: 2 ranks x 2 experts, some of them or all without tokens. Rank by rank in, expert by expert
    out, and back where they were."""
    experts = torch.tensor([number % 2 for number, count in enumerate(counts) for _ in range(count)], dtype=torch.int64)
    route, _ = route_to_experts(experts[:, None], sum(counts))
    starts = [sum(counts[:i]) for i in range(4)]
    wanted = [row for i in (0, 2, 1, 3) for row in range(starts[i], starts[i] + counts[i])]
    assert route.source.tolist() == wanted
    rows = torch.randn(sum(counts), 2)
    assert torch.equal(collect(spread(rows, route), route), rows)


def test_pairs_lie_expert_by_expert():
    route, choice = route_to_experts(torch.tensor([[1, 2, 0], [2, 2, 1], [0, 1, 2]]), 5)  # 2: held elsewhere
    assert route.source.tolist() == [0, 2, 0, 1, 2]
    assert choice.tolist() == [2, 6, 0, 5, 7]
    assert route.places.tolist() == [[2, 5, 0], [5, 5, 3], [1, 4, 5]]


def test_the_balance_loss_of_one_sample_is_that_of_transformers():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(5))
    want = load_balancing_loss_func((logits,), EXPERTS, CHOSEN)
    probabilities = logits.softmax(-1)
    samples = LaneSamples(torch.zeros(TOKENS, dtype=torch.int64), torch.tensor([TOKENS]), torch.ones(1).double())
    choices = choices_per_sample(probabilities.topk(CHOSEN).indices, samples, EXPERTS)
    assert balance_terms(probabilities, choices, samples)[0].item() == pytest.approx(want.item(), rel=1e-6)


def test_the_balance_gradient_is_that_of_a_sum_over_samples():
    """Against autograd through a plain loop over samples; whoever meets in a lane does not matter."""
    lengths, coefficient = [5, 0, 20, 12], 0.3
    block = ours(theirs(torch.float64, implementation="eager"), balance=coefficient, lengths=lengths)
    twin = ours(theirs(torch.float64, implementation="eager"), balance=0.0, lengths=lengths)
    _, to_hidden, gradients = run(block, hidden(torch.float64))
    x = hidden(torch.float64).requires_grad_()
    total = twin(x).sin().sum()
    for part in x[0].split(lengths):
        if not len(part):
            continue
        probabilities = torch.nn.functional.linear(part, twin.gate.weight).softmax(-1)
        chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(CHOSEN).indices, 1.0)
        total = total + coefficient * len(part) * EXPERTS * (chosen.mean(0) * probabilities.mean(0)).sum()
    total.backward()
    # transformers' router computes in fp32, whose probabilities only the gradient's path has here
    assert torch.allclose(to_hidden, x.grad, atol=1e-6)
    assert torch.allclose(gradients["gate.weight"], twin.gate.weight.grad.flatten(), atol=1e-5)
    (loss, tokens) = block.tokens.loads()[0]
    assert tokens.sum().item() == TOKENS * CHOSEN
    assert loss.item() == pytest.approx((total - twin(x).sin().sum()).item() / coefficient, rel=1e-5)


def test_a_batch_that_is_not_packed_is_refused():
    with pytest.raises(BoundaryError, match="in one row"):
        RoutedTokens().note({"input_ids": torch.zeros(1, 1)})


def test_even_routing_is_what_random_choices_come_to():
    """What a dry run, in which no router computes, takes for granted."""
    torch.manual_seed(0)
    _, counts = count_choices(torch.rand(4000, 8).topk(3).indices, ranks=4, count=8)
    even = even_counts(4000, 3, ranks=4, each=2)
    assert counts[:, 0].tolist() == pytest.approx(even.sent, rel=0.05)
    assert (4 * counts[0, 1:]).tolist() == pytest.approx(even.experts, rel=0.05)  # of four ranks that route alike
    assert even_counts(5, 2, ranks=1, each=4).experts == (2, 2, 3, 3)
    assert even_counts(5, 2, ranks=1, each=4).sent == (5,)


def fully_sharded_dims(experts, ep, shards):
    """Along which dims FSDP over `shards` ranks cuts what a rank along `ep` holds of the experts."""
    with fake_process_group(ep * shards, 0):
        mesh = init_device_mesh("cpu", (shards, ep), mesh_dim_names=("dp_shard", "ep"))
        block = ours(theirs())
        block.layers = replace(block.layers, count=experts)
        for name, p in list(block.experts.named_parameters()):
            block.experts.register_parameter(name, nn.Parameter(torch.zeros(experts // ep, *p.shape[1:])))
        apply_expert_sharding(nn.ModuleList([block]), mesh, {})
        return {name: p.placements[-1].dim for name, p in block.experts.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "whole"),
    [(16, True), (32, True), (8, False)],
    ids=["an expert each", "two each", "8 > 4: half of each"],
)
def test_fsdp_cuts_within_experts_where_ranks_are_more_than_experts(apart, experts, whole):
    """torchtitan's table, with EP 2: along the experts where every one of 8 ranks gets one, else within each."""
    within = {"gate_up_proj": 2, "down_proj": 1}
    assert apart(fully_sharded_dims, experts, 2, 8) == (dict.fromkeys(within, 0) if whole else within)
