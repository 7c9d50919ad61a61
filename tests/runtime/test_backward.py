"""The backward in two parts equals the whole one, also where a parameter is used twice; and what offloading keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, linear
from torch.utils.checkpoint import checkpoint

from hetmesh._torch_compat import split_backward
from hetmesh.boundary.accelerator import Accelerator
from hetmesh.parallel.activation_checkpoint import apply_activation_checkpoint, backward_in_two_parts
from hetmesh.runtime.backward import SplitBackward, backward
from hetmesh.runtime.live_bytes import LiveBytes
from hetmesh.runtime.step_runner import activations_on_host


class Plain(nn.Module):
    dtype = torch.float64

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))  # the input is used twice, no parameter is


class CalledTwice(Plain):
    def forward(self, x):
        return self.first(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Tied(Plain):
    """A head tied to the embedding, in one stage."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)

    def forward(self, x):
        return linear(super().forward(x + self.embedding(torch.tensor([1, 4, 1]))), self.embedding.weight)


class Expanded(Plain):
    """The gradients of an input and of a parameter are views, one number seen everywhere."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return super().forward(x).sum() + x.sum() + self.bias.sum()


class Reentrant(Plain):
    """Computes a layer again in the backward, as a backward of its own."""

    def forward(self, x):
        return checkpoint(super().forward, self.first(x), use_reentrant=True)


class Compiled(Plain):
    """One function of autograd computes it, for inputs and weights alike."""

    def forward(self, x):
        return torch.compile(super().forward, backend="aot_eager")(x)


class Dropped(Plain):
    """What is drawn is drawn again when it is computed again."""

    def forward(self, x):
        return super().forward(dropout(torch.tanh(x), 0.5))


class InShares(Plain):
    """Several layers read parts of one weight, one after another: the weights' part passes what lies between."""

    def forward(self, x):
        first, second = self.first.weight.tanh().chunk(2)
        return linear(torch.tanh(linear(x, first)), second.T)


def gradients(kind, split: bool, recomputed="none"):
    torch.manual_seed(0)
    module = kind().to(kind.dtype)
    apply_activation_checkpoint([module], recomputed)
    x = torch.randn(3, 4, dtype=kind.dtype, requires_grad=True)
    parts = []
    for scale in (1.0, 2.0):  # two microbatches, whose weights' parts come after both
        with backward_in_two_parts(split):
            output = module(x * scale if scale > 1 else x)
        gradient = torch.ones_like(output)
        if split:
            parts.append(SplitBackward(list(module.parameters())))
            parts[-1].input_part([output], [gradient], [x])
        else:
            backward([output], [gradient])
    in_between = [p.grad is None for p in module.parameters()]
    for part in parts:
        part.weight_part()
    return [x.grad, *(p.grad for p in module.parameters())], in_between


class CastOnce(CalledTwice):
    """Autocast casts the weights of the layer that is called twice once."""

    dtype = torch.float32

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class CastPlain(Plain):
    dtype = torch.float32

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Unread(Plain):
    """Does not read its input, as an LLM may that a microbatch without media enters."""

    def forward(self, x):
        return super().forward(torch.ones_like(x))


@pytest.mark.parametrize("kind", [Plain, CalledTwice, Tied, CastPlain, CastOnce, Expanded, Reentrant, Unread, Compiled])
def test_a_backward_in_two_parts_equals_the_whole_one(kind):
    (expected, _), (given, in_between) = gradients(kind, False), gradients(kind, True)
    assert all(in_between) is (
        kind in (Plain, CastPlain, Expanded)
    )  # the others' gradients all come with the inputs' part
    for one, other in zip(expected, given, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


@pytest.mark.parametrize("recomputed", ["full", "selective"])
@pytest.mark.parametrize("kind", [Plain, CalledTwice, Tied, CastPlain, Expanded, Unread, Dropped, InShares])
def test_a_block_is_computed_again_for_the_first_part_alone(kind, recomputed, monkeypatch):
    calls, forward = [], kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: (calls.append(1), forward(self, x))[1])
    (expected, _), (given, _) = gradients(kind, False), gradients(kind, True, recomputed)
    assert len(calls) == 2 + 2 * 2  # two microbatches, twice where they are computed again
    for one, other in zip(expected, given, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


class Deep(Plain):
    def forward(self, x):
        return self.second(torch.tanh(torch.cos(torch.sin(self.first(x)))))


@pytest.mark.parametrize(("recomputed", "kept"), [("none", 5), ("full", 3), ("selective", 3)])
def test_between_both_parts_what_the_second_reads_is_kept(recomputed, kept):
    """Of a block that is computed again: the input of its second product, the gradient of the first one's output, and
    that of its own input. Otherwise also what functions in between read."""
    module, x, gradient = Deep(), torch.randn(3, 4, requires_grad=True), torch.ones(3, 4)
    apply_activation_checkpoint([module], recomputed)
    part = SplitBackward(list(module.parameters()))
    split_backward()  # whose import makes a tensor
    with LiveBytes([*module.parameters(), x, gradient]) as live:
        before = live.live
        with backward_in_two_parts(True):
            output = module(x)
        part.input_part([output], [gradient], [x])
        del output
        assert live.live - before == kept * x.nbytes
        part.weight_part()
        assert live.live - before == x.nbytes + sum(p.nbytes for p in module.parameters())


def test_offloading_moves_activations_and_no_weights(monkeypatch):
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6).requires_grad_(False), nn.LayerNorm(6))
    moved = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: (moved.append(tuple(self.shape)), cpu(self))[1])
    with activations_on_host(module.parameters(), Accelerator()):
        output = module(torch.ones(3, 6, requires_grad=True))
    assert (6, 6) not in moved
    assert (6,) not in moved
    assert (3, 6) in moved
    output.sum().backward()
    assert module[0].weight.grad is not None
