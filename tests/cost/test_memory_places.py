"""Static memory of every place of a mesh, against a module that is really cut: one process plays each rank in turn."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hetmesh.cost import static_memory
from hetmesh.layout import MeshSpec
from hetmesh.models.adapter import Abilities
from hetmesh.models.module_shape import module_shape
from hetmesh.parallel import local_part, parallelize

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
RUNS = (("embed", "blocks.0"), ("blocks.1", "blocks.2", "head"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)


class Model(nn.Module):
    """A head tied to the embedding, a frozen block, and a parameter that belongs to no layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in BLOCKS)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].requires_grad_(False)


class Adapter:
    out_features = None
    abilities = Abilities()

    def layers(self):
        return ("embed", *BLOCKS, "head")

    def tensor_parallel_plan(self):
        return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def forward(self, module, batch, inputs):
        raise NotImplementedError


def held(rank, spec):
    """Elements of this rank's parameters, and of the trainable ones."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=spec.size, store=FakeStore())
    try:
        place = (spec.coordinate(rank) or (0,))[0]
        stage = spec.slice("pp", place)
        mesh = DeviceMesh("cpu", stage.array.tolist(), mesh_dim_names=stage.axes)
        parallel = parallelize(Adapter(), Model(), stage, mesh, runs=RUNS[place::2])
        sizes = [(local_part(p).numel(), p.requires_grad) for p in parallel.module.parameters()]
        return sum(n for n, _ in sizes), sum(n for n, trainable in sizes if trainable)
    finally:
        dist.destroy_process_group()


def test_places_hold_what_was_computed_whatever_belongs_to_no_layer():
    shape = module_shape("m", Adapter(), Model())
    assert not shape.layers[0].name
    for sizes in ({"pp": 2}, {"pp": 2, "dp_shard": 3}, {"pp": 2, "tp": 2}, {"pp": 2, "dp_shard": 2, "tp": 2}):
        spec = MeshSpec.make(range(math.prod(sizes.values())), **sizes)
        memory = static_memory(shape, spec, 1, "SGD", RUNS)
        assert {r: (m.elements, m.gradients) for r, m in memory.items()} == {r: held(r, spec) for r in spec.ranks}


def test_the_ranks_of_a_mesh_hold_every_parameter_once_but_for_copies():
    shape = module_shape("m", Adapter(), Model())
    spec = MeshSpec.make(range(12), pp=2, dp_shard=3, tp=2)
    total = sum(memory.elements for memory in static_memory(shape, spec, 1, "SGD", RUNS).values())
    copies = 7 + 11 * 6  # the parameter without a layer and the tied one are in both places
    replicated = 7 + 11 * 6 + 3 * (6 + 6 + 6)  # over tp: those, norms, biases of row-parallel linears
    assert total == shape.parameters + replicated + 2 * copies
