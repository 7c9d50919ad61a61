"""Tensor parallelism over more ranks than key heads: which degrees suit, and what ranks that share a head exchange."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hetmesh.models import AdapterRequest
from hetmesh.models.named.llama import LlamaAdapter
from hetmesh.parallel.key_heads import KeyHeads, tensor_parallel_degrees, unfit_sizes, whole_head

PLAN = {"layers.*.self_attn": KeyHeads(4, 6), "layers.*.self_attn.k_proj": "colwise"}


def test_a_degree_divides_the_key_heads_or_is_a_multiple_that_cuts_each_evenly():
    sizes = {"num_attention_heads": 48, "num_key_value_heads": 4}
    assert tensor_parallel_degrees(sizes, PLAN) == [1, 2, 4, 8, 12, 24]  # heads of six: not in four, nor in twelve
    assert tensor_parallel_degrees(sizes, {}) == [1, 2, 4]
    assert unfit_sizes(sizes, PLAN, 16) == {"num_key_value_heads * head_dim": 24}
    assert unfit_sizes(sizes, PLAN, 3) == {"num_key_value_heads": 4}
    assert unfit_sizes(sizes, PLAN, 5) == sizes
    assert tensor_parallel_degrees({**sizes, "moe_intermediate_size": 8}, PLAN) == [1, 2, 4, 8]
    assert tensor_parallel_degrees({}, PLAN) == []


def test_published_models_take_eight_ranks():
    for heads, keys, width in ((16, 2, 2048), (32, 4, 4096), (28, 4, 3584)):
        config = {"num_attention_heads": heads, "num_key_value_heads": keys, "hidden_size": width}
        adapter = LlamaAdapter.make(AdapterRequest("llm", config | {"num_hidden_layers": 1}, vocab_size=90))
        degrees = tensor_parallel_degrees(adapter.tensor_parallel_sizes(), adapter.tensor_parallel_plan())
        assert (8 in degrees) == (heads % 8 == 0)


def exchanged(rank, sharing, shape):
    """A whole head out of parts, and the gradient of this rank's part where each rank multiplies the head by another
    number."""
    group = dist.group.WORLD
    torch.manual_seed(rank)
    part = torch.randn(*shape, dtype=torch.float64).transpose(0, 1).requires_grad_()
    whole = whole_head(part, sharing, group)
    factor = torch.full_like(whole, rank + 1.0)
    (whole * factor).transpose(0, 1).sum().backward()
    return part.detach(), whole.detach(), part.grad


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [2, 4])
@pytest.mark.parametrize("shape", [(3, 2, 5), (3, 0, 5)])
def test_parts_lie_in_the_order_of_ranks_and_gradients_are_sums_over_those_of_a_head(pool4, sharing, shape):
    ranks = pool4.run(exchanged, sharing, shape)
    for rank, (_, whole, gradient) in enumerate(ranks):
        first = rank // sharing * sharing
        row = range(first, first + sharing)
        assert torch.equal(whole, torch.cat([ranks[i][0] for i in row], -1))
        assert torch.equal(gradient, torch.full_like(gradient, sum(i + 1.0 for i in row)))
