"""What a parameter begins with is the same whoever draws it, in whatever parts."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from hetmesh._torch_compat import StridedShard, seeded_generator
from hetmesh.errors import RecipeError
from hetmesh.layout import Layout, MeshSpec
from hetmesh.models import build_deferred
from hetmesh.models.weights.fill_module import copy_part
from hetmesh.models.weights.initial import BLOCK, Elements, Identity, Initial, Operation

WIDTH = 700
ROWS = 2 * (BLOCK // WIDTH) + 101
"""Three blocks of rows, the last a shorter one."""


class Parts(nn.Module):
    """Initialised in every way that is repeated row by row."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, padding_idx=BLOCK // WIDTH)  # a row of zeros in the second block
        self.fused = nn.Linear(WIDTH, ROWS)  # uniform, then a third of it, some columns, and a table
        nn.init.trunc_normal_(self.fused.weight[301:705], std=0.02, a=-0.03, b=0.03)
        with torch.no_grad():
            self.fused.weight[:, 5:9] *= 3
            self.fused.weight[1::2, 3] = 0.25
            self.fused.weight[:, 20:40].copy_(torch.arange(ROWS).unsqueeze(1).expand(-1, 20))
            self.fused.weight.t()[100:110].normal_(std=7)
            self.fused.bias.view(-1, 1).log_normal_()
        self.scale = nn.Parameter(torch.linspace(0, 1, ROWS))
        self.kernel = nn.Conv2d(3, 1021, (19, 23))
        self.single = nn.Parameter(torch.tensor(0.5))


LAYOUTS = {
    "replicated": (MeshSpec.make(range(3), dp_replicate=3), [Replicate()]),
    "uneven rows": (MeshSpec.make(range(4), dp_shard=4), [Shard(0)]),
    "columns": (MeshSpec.make(range(3), tp=3), [Shard(1)]),
    "rows and columns": (MeshSpec.make(range(6), dp_shard=2, tp=3), [Shard(0), Shard(1)]),
    "rows of rows": (MeshSpec.make(range(6), dp_shard=2, tp=3), [StridedShard(0, split_factor=3), Shard(0)]),
    "more ranks than rows": (MeshSpec.make(range(2048), dp_shard=2048), [Shard(0)]),
}


@pytest.fixture(scope="module")
def whole():
    deferred = build_deferred(Built, "m", 3)
    assert deferred.reason_built_whole is None
    initial = dict(deferred.initial)
    return initial, {name: p.detach() for name, p in deferred.materialized().named_parameters()}


class Built:
    build = Parts


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_layout_gets_the_same_values(whole, kind):
    spec, placements = LAYOUTS[kind]
    initial, values = whole
    for name, value in values.items():
        if any(isinstance(p, Shard) and p.dim >= value.dim() for p in placements):
            continue
        shape = tuple(value.shape)
        layout = Layout(spec, tuple(placements) if shape else (Replicate(),) * len(placements))
        ranks = spec.ranks if spec.size < 10 else (0, 17, ROWS - 1, 2047)
        for rank in ranks:
            regions = layout.intervals(shape, rank)
            local = torch.full(layout.local_shape(shape, rank), math.nan, dtype=torch.float64)
            copy_part(local, regions, initial[name], initial[name].rows_per_block)
            expected = value.double()
            for dim, intervals in enumerate(regions):
                rows = [torch.arange(*each) for each in intervals]
                expected = expected.index_select(dim, torch.cat(rows) if rows else torch.zeros(0, dtype=torch.long))
            assert torch.equal(local, expected), (name, rank)


def test_the_parts_are_what_the_constructor_says(whole):
    _, values = whole
    table, fused = values["table.weight"], values["fused.weight"]
    assert (table == 0).sum() == WIDTH
    assert not table[BLOCK // WIDTH].any()
    assert torch.equal(fused[:, 3] == 0.25, torch.arange(ROWS) % 2 == 1)
    assert torch.equal(fused[:, 33], torch.arange(ROWS).float())
    bound = WIDTH**-0.5
    assert bound < fused[:301, 5:9].abs().max() <= 3 * bound
    assert 6 < fused[:, 100:110].std() < 8
    assert 0.0295 < fused[301:705, 200:].abs().max() <= 0.03
    assert 0.03 < fused[705:, 200:].abs().max() <= bound
    assert (values["fused.bias"] > 0).all()
    assert values["single"] == 0.5
    blocks = [table[i * (BLOCK // WIDTH) :][:50] for i in range(3)]
    assert not torch.equal(blocks[0][1:], blocks[1][1:])
    assert not torch.equal(blocks[0], blocks[2])


def test_seed_module_and_name_make_the_difference():
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    class Given:
        build = Twins

    def drawn(name, seed):
        return [p.detach() for p in build_deferred(Given, name, seed).materialized().parameters()]

    first = drawn("m", 0)
    assert not torch.equal(first[0], first[2])
    for other in (drawn("n", 0), drawn("m", 1)):
        assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(first, drawn("m", 0), strict=True))
    assert torch.equal(before, torch.get_rng_state())


def test_elements_without_values_are_an_error():
    step = Operation(torch.Tensor.fill_, Elements((3, 2), (4, 1), 0), (1.0,))
    some = Initial("modules.m: parameter w", (3, 4), torch.float32, (step,))
    with pytest.raises(RecipeError, match=r"modules.m: parameter w: nothing initialises some of its elements"):
        some[0:1, 0:2]


def test_only_blocks_that_are_needed_are_drawn():
    seen = []

    def note(rows, generator):
        seen.append(len(rows))
        rows.zero_()

    identity = Identity("0:m", "w")
    step = Operation(note, Elements((ROWS, WIDTH), (WIDTH, 1), 0), draws=(identity, 0))
    initial = Initial("w", (ROWS, WIDTH), torch.float32, (step,))
    full = BLOCK // WIDTH
    assert initial[full : full + 3, 10:20].shape == (3, 10)
    assert seen == [full]
    initial[full - 1 : full + 1]
    assert seen == [full] * 3
    initial[ROWS - 1 :]
    assert seen == [*[full] * 3, 101]


def test_all_bits_of_a_seed_count():
    """`manual_seed` takes 32, and the blocks of a large model are enough for two of them to be equal."""
    torch.manual_seed(11)
    state = torch.get_rng_state()
    seeds = [0, 1, *(1 << bit for bit in (31, 32, 63, 64, 127))]
    drawn = [torch.randn(1000, generator=seeded_generator(seed)) for seed in seeds]
    assert len({tuple(each.tolist()) for each in drawn}) == len(seeds)
    assert max(abs(float(a @ b)) for i, a in enumerate(drawn) for b in drawn[:i]) < 5 * 1000**0.5  # unlike each other
    assert torch.equal(drawn[3], torch.randn(1000, generator=seeded_generator(1 << 32)))
    assert torch.equal(state, torch.get_rng_state())
    seeds = {Identity("0:m", "weight").seed(number, block) for number in range(10) for block in range(1000)}
    assert len(seeds) == 10_000
    assert max(seeds) >> 64
