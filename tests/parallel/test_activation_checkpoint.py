"""Activation checkpointing in one process: what is computed again, and that nothing else changes."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hetmesh.graph.module_graph import SAVE_OPS
from hetmesh.parallel.activation_checkpoint import apply_activation_checkpoint
from hetmesh.parallel.apply import blocks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 32), nn.Linear(32, 8), nn.LayerNorm(8)

    def forward(self, x):
        heads = self.norm(x).unflatten(-1, (2, 4)).transpose(0, 1)[None]
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)[0].transpose(0, 1).flatten(-2)
        return x + self.down(nn.functional.gelu(self.up(mixed)))


def run(mode, *save_ops):
    torch.manual_seed(0)
    module = nn.Sequential(Block(), Block()).double()
    names = [name for name, _ in module.named_parameters()]
    apply_activation_checkpoint(module, mode, save_ops or SAVE_OPS)
    assert [name for name, _ in module.named_parameters()] == names
    assert list(module.state_dict()) == names
    kept = []
    with (
        FlopCounterMode(display=False) as flops,
        torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t),
    ):
        loss = module(torch.arange(40, dtype=torch.float64).reshape(5, 8) / 40).square().sum()
        loss.backward()
    return flops.get_total_flops(), sum(kept), [p.grad for p in module.parameters()]


def test_full_computes_products_again_and_selective_does_not():
    flops, kept, gradients = run("none")
    again, kept_by_full, _ = run("full")
    selective, kept_by_selective, _ = run("selective")
    assert selective == flops
    assert again > 1.15 * flops  # not the last product: nothing needs its output again
    assert max(kept_by_full, kept_by_selective) < kept / 2
    for mode in ("selective", "full"):
        for one, other in zip(gradients, run(mode)[2], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("op", ["aten.linear", "aten.scaled_dot_product_attention", "aten.native_layer_norm"])
def test_what_a_list_names_is_not_computed_again_and_all_else_is(op):
    flops, gradients = run("none")[::2]
    again = {op: run("selective", op)[0] - flops for op in ("aten.linear", "aten.scaled_dot_product_attention")}
    products = 2 * 2 * 5 * 8 * 32  # of each block the first one; nothing needs the second one's output
    assert run("full")[0] - flops == sum(again.values())
    assert again["aten.scaled_dot_product_attention"] == products
    for one, other in zip(gradients, run("selective", op)[2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_nothing_is_kept_without_gradients():
    module = nn.Sequential(Block())
    apply_activation_checkpoint(module, "full")
    with torch.no_grad():
        assert not module(torch.ones(1, 8)).requires_grad


def test_blocks_have_parts_and_share_no_parameter():
    tied = nn.ModuleDict({"embed": nn.Embedding(3, 8), "first": Block(), "second": Block(), "head": nn.Linear(8, 3)})
    layers = list(tied.values())
    assert blocks(tied, layers) == [tied["first"], tied["second"]]
    tied["second"].up.weight = tied["first"].up.weight
    assert blocks(tied, layers) == []
