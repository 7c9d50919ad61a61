"""What is drawn depends on the place in the step and on nothing else that happens in the process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout

from hetmesh.graph import ModuleSpec
from hetmesh.layout.mesh import MeshSpec
from hetmesh.parallel.activation_checkpoint import apply_activation_checkpoint
from hetmesh.parallel.random_state import RandomPlace, draws, entering, random_place, seed_by_place

HERE = RandomPlace(seed=1, step=2, module="llm", microbatch=3, lane=4)


class Block(nn.Module):
    """Dropout on what tensor parallelism splits (between the linears), and on what it does not."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.5)
        self.drawn: list[torch.Tensor] = []

    def forward(self, x):
        whole = self.drop(x)
        split = dropout(self.up(whole), 0.5, self.training)
        after = dropout(self.down(split), 0.5, self.training)
        self.drawn = [each.detach() == 0 for each in (whole, split, after)]
        return x + after


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.drawn: list[list[torch.Tensor]] = []

    def forward(self, x):
        self.drawn = []
        for _ in range(2):
            x = self.block(x)
            self.drawn.append(self.block.drawn)
        return x


def made(kind=Block, checkpoint="none"):
    torch.manual_seed(0)
    module = nn.Sequential(kind(), kind())
    seed_by_place(module, ("0", "1"), {"*.up": "colwise", "*.down": "rowwise"})
    apply_activation_checkpoint(module, checkpoint)
    return module


def drawn(place: RandomPlace) -> list[list[torch.Tensor]]:
    module = made()
    torch.rand(place.step + 7 * place.lane)  # what else happened in this process
    with entering(place):
        module(torch.ones(8, 16))
    return [block.drawn for block in module]


def equal(one, other) -> list[list[bool]]:
    return [[torch.equal(a, b) for a, b in zip(x, y, strict=True)] for x, y in zip(one, other, strict=True)]


@pytest.mark.parametrize("changed", [{"step": 3}, {"microbatch": 4}, {"lane": 5}, {"share": 1}, {"seed": 2}])
def test_another_place_draws_something_else(changed):
    assert equal(drawn(HERE), drawn(replace(HERE, **changed))) == [[False] * 3] * 2


def test_only_what_is_split_depends_on_the_shard_and_the_rest_agrees():
    assert equal(drawn(HERE), drawn(replace(HERE, shard=1))) == [[True, False, True]] * 2


def test_a_layer_draws_the_same_without_the_layers_of_other_stages():
    module = made()
    module[0] = nn.Identity()
    with entering(HERE):
        module(torch.ones(8, 16))
    assert equal([module[1].drawn], [drawn(HERE)[1]]) == [[True] * 3]


def test_two_layers_and_two_calls_of_one_draw_different_numbers():
    first, second = drawn(HERE)
    assert equal([first], [second]) == [[False] * 3]
    module = nn.Sequential(Twice())
    seed_by_place(module, ("0.block",), {"0.block.up": "colwise", "0.block.down": "rowwise"})
    with entering(HERE):
        module(torch.ones(8, 16))
    assert equal([module[0].drawn[0]], [module[0].drawn[1]]) == [[False] * 3]


def gradients(kind, checkpoint) -> list[torch.Tensor]:
    """Of two microbatches whose backwards come later, and in another place."""
    module = made(kind, checkpoint)
    outputs = []
    for m in range(2):
        with entering(replace(HERE, microbatch=m)):
            outputs.append(module(torch.ones(8, 16)))
    with entering(replace(HERE, module="vision")):
        for output in outputs:
            torch.rand(5)
            output.square().sum().backward()
    return [p.grad for p in module.parameters()]


@pytest.mark.parametrize("kind", [Block, Twice])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_draws_the_same_again(kind, mode):
    for one, other in zip(gradients(kind, "none"), gradients(kind, mode), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


class CountingDevice:
    """A device module that keeps the seeds it is given."""

    def __init__(self):
        self.seeds: list[int] = []

    def manual_seed(self, seed: int) -> None:
        self.seeds.append(seed)


def test_the_devices_generator_is_seeded_wherever_the_cpus_is_and_again_in_recomputation():
    device, module = CountingDevice(), made(checkpoint="full")
    with entering(HERE, device):
        output = module(torch.ones(8, 16, requires_grad=True))
    forward = list(device.seeds)
    assert len(forward) == len(set(forward)) == 1 + 2 * 4  # the stage; per block its two ends and two linears
    output.sum().backward()
    assert set(device.seeds[len(forward) :]) <= set(forward)
    assert len(device.seeds) >= len(forward) + 2  # at least the first linear of each block, again
    with entering(HERE, device):
        pass
    assert device.seeds[-1] == forward[0]
    assert torch.initial_seed() == forward[0]


def test_sequence_parallelism_makes_all_that_a_layer_draws_that_of_its_share():
    def drawn_at(shard):
        module = nn.Sequential(Block(), Block())
        seed_by_place(module, ("0", "1"), {"*.up": "colwise", "*.down": "rowwise"}, shared=("0",))
        with entering(replace(HERE, shard=shard)):
            module(torch.ones(8, 16))
        return [block.drawn for block in module]

    assert equal(drawn_at(0), drawn_at(1)) == [[False] * 3, [True, False, True]]


def test_a_rank_is_at_its_coordinates():
    mesh = MeshSpec.make([3, 1, 0, 2, 7, 6, 5, 4], dp_replicate=2, cp=2, tp=2)
    spec = ModuleSpec("llm", mesh, ("layer",))
    assert random_place(spec, 0, 2, 7) == RandomPlace(7, "llm", lane=0, share=1, shard=1)
    assert random_place(spec, 0, 6, 7) == RandomPlace(7, "llm", lane=1, share=0, shard=1)


def test_modules_that_draw_nothing_are_left_alone():
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0), nn.LayerNorm(2))
    assert not draws(module)
    seed_by_place(module, ("0",), {})
    assert not module[0]._forward_hooks
    assert draws(nn.Sequential(nn.Dropout(0.1)))
    assert draws(nn.MultiheadAttention(4, 2, dropout=0.1))
    assert draws(Block())  # a class of somebody's own may draw in any way
