"""Experts spread over four ranks against all of them in one process, whatever the routing; and what travels."""

import copy

import pytest
import torch
from test_experts import CHOSEN, EXPERTS, FEATURES, INNER, ours, theirs
from torch import nn

from hetmesh.boundary import World
from hetmesh.layout import MeshSpec
from hetmesh.models.named.qwen3_moe import two_halves
from hetmesh.parallel.experts import ExpertLayers, apply_expert_parallel
from hetmesh.parallel.experts.token_exchange import ExpertRanks, sum_choices

RANKS = 4
ROUTINGS = {
    "even": ((7, 6, 12, 3), lambda n: torch.rand(n, EXPERTS)),
    "a rank and most experts get none": ((7, 0, 12, 3), lambda n: torch.arange(EXPERTS) + 0.1 * torch.rand(n, EXPERTS)),
    "all to one rank": ((5, 5, 0, 9), lambda n: torch.arange(EXPERTS).expand(n, -1).float()),
    "the k-th expert takes a share like 1/k": (
        (20, 31, 0, 40),
        lambda n: (torch.arange(EXPERTS) + 1.0).reciprocal().log() - torch.rand(n, EXPERTS).log().neg().log(),
    ),
    "nothing": ((0, 0, 0, 0), lambda n: torch.rand(n, EXPERTS)),
}


class Table(nn.Module):
    """A router that gives what it was told to, with a gradient to its weights."""

    def __init__(self, logits):
        super().__init__()
        self.weight = nn.Parameter(logits)

    def forward(self, hidden):
        weights, experts = self.weight.softmax(-1).topk(CHOSEN, dim=-1)
        return self.weight, weights, experts


def tokens(name, dtype):
    lengths, logits = ROUTINGS[name]
    torch.manual_seed(7)
    return lengths, torch.randn(sum(lengths), FEATURES, dtype=dtype), logits(sum(lengths)).to(dtype)


def outcome(block, hidden):
    hidden = hidden.clone().requires_grad_()
    out = block(hidden[None])
    out.sin().sum().backward()
    gradients = [p.grad for p in (block.experts.gate_up_proj, block.experts.down_proj)]
    return out[0].detach(), hidden.grad, block.gate.weight.grad, *gradients


def on_this_rank(rank, name, dtype):
    world = World.current()
    mesh = world.device_mesh(MeshSpec.make(range(RANKS), ep=RANKS))
    lengths, hidden, logits = tokens(name, dtype)
    holder = nn.Module()
    holder.mlp = two_halves(copy.deepcopy(theirs(dtype, implementation="eager")))
    apply_expert_parallel(holder, ExpertLayers(("mlp",), EXPERTS, CHOSEN, INNER, FEATURES, 0.0), mesh)
    own = torch.tensor([lengths[rank]])
    of_token = torch.zeros(lengths[rank], dtype=torch.int64)
    holder.hetmesh_experts.note({"token_samples": of_token, "sample_tokens": own, "sample_weights": own.double()})
    holder.mlp.gate = Table(logits.split(lengths)[rank].clone())
    world.log.clear()
    out, to_hidden, to_logits, *weights = outcome(holder.mlp, hidden.split(lengths)[rank])
    sizes = {
        (what, way): world.log.bytes_received(f"experts of mlp {what}", way)
        for what in ("sizes", "tokens", "sums")
        for way in ("forward", "backward")
    }
    return out, to_hidden, to_logits, [w.full_tensor() for w in weights], sizes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ROUTINGS)
def test_any_routing_equals_all_experts_in_one_process(pool4, name, dtype):
    lengths, hidden, logits = tokens(name, dtype)
    block = ours(theirs(dtype, implementation="eager"), len(hidden))
    block.gate = Table(logits.clone())
    want = outcome(block, hidden)
    ranks = pool4.run(on_this_rank, name, dtype)
    rounding = 1e-12 if dtype == torch.float64 else 1e-5
    for i in range(3):
        assert torch.allclose(torch.cat([each[i] for each in ranks]), want[i], rtol=rounding, atol=rounding)
    for each in ranks:
        for weight, wanted in zip(each[3], want[3:], strict=True):
            assert torch.allclose(weight, wanted, rtol=rounding, atol=rounding)
    # What travels, against a brute force over tokens: each once to each other rank that holds one of its experts.
    chosen = logits.topk(CHOSEN).indices // (EXPERTS // RANKS)
    rows = [0] * RANKS
    back = [0] * RANKS
    for source, part in enumerate(chosen.split(lengths)):
        for token in part.tolist():
            for rank in set(token) - {source}:
                rows[rank] += 1
                back[source] += 1
    numbers = -(-2 * CHOSEN // dtype.itemsize)
    for rank, (*_, sizes) in enumerate(ranks):
        assert sizes == {
            ("sizes", "forward"): (RANKS - 1) * (1 + EXPERTS // RANKS) * 8,
            ("sizes", "backward"): 0,
            ("tokens", "forward"): rows[rank] * (FEATURES + CHOSEN + numbers) * dtype.itemsize,
            ("tokens", "backward"): back[rank] * (FEATURES + CHOSEN) * dtype.itemsize,
            ("sums", "forward"): back[rank] * FEATURES * dtype.itemsize,
            ("sums", "backward"): rows[rank] * FEATURES * dtype.itemsize,
        }


def summed(rank):
    world = World.current()
    peers = ExpertRanks(world, None, 1, 0, "experts of mlp")
    choices = torch.arange(6).view(2, 3) + rank
    world.log.clear()
    sum_choices(choices, world.group(range(RANKS)), peers, 0)
    return choices, world.log.bytes_received("experts of mlp balance", "forward")


@pytest.mark.slow
def test_the_sum_of_choices_has_a_name(pool4):
    for choices, received in pool4.run(summed):
        assert torch.equal(choices, RANKS * torch.arange(6).view(2, 3) + sum(range(RANKS)))
        assert received == 2 * 6 * 8 * (RANKS - 1) // RANKS
