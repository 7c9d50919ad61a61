"""FSDP of users' own modules: whatever they do with their layers, a layout equals one process."""

import pytest
import tomli
import torch
from torch import nn
from torch.nn.functional import linear

from hetmesh.cost import LayerShape, ModuleShape, WeightShape
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.predictions import simulate_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.simulate.stage_contents import stage_contents
from hetmesh.testing import parity
from support.often import some


def layer(width):
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))


class PerItem(nn.Module):
    """An encoder of images of any size: a row per patch of 4 x 4, each image by itself through all layers."""

    def __init__(self, out_features=8):
        super().__init__()
        self.out_features = out_features
        self.embed = nn.Linear(16, out_features)
        self.blocks = nn.ModuleList(layer(out_features) for _ in range(3))

    def item_rows(self, shape):
        return shape[1] * shape[2] // 16

    def forward(self, images):
        return torch.cat([self.one(image.unfold(1, 4, 4).unfold(2, 4, 4).reshape(-1, 16)) for image in images])

    def one(self, patches):
        hidden = self.embed(patches)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


class BySize(PerItem):
    """Images of many patches pass through more layers."""

    def __init__(self, out_features=8, many=2):
        super().__init__(out_features)
        self.many = many

    def one(self, patches):
        hidden = self.embed(patches)
        for block in self.blocks if len(patches) >= self.many else self.blocks[:2]:
            hidden = hidden + block(hidden)
        return hidden


class BlanksEnterMore(PerItem):
    """Its last layer and a scalar, which FSDP leaves whole, are for blank items alone."""

    def __init__(self, out_features=8):
        super().__init__(out_features)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def one(self, patches):
        hidden, blank = self.embed(patches), not patches.any()
        for block in self.blocks if blank else self.blocks[:2]:
            hidden = hidden + block(hidden)
        return hidden * self.scale if blank else hidden


class OneShape(nn.Module):
    rows_per_item = 1

    def __init__(self, out_features=8):
        super().__init__()
        self.out_features = out_features
        self.embed = nn.Linear(16, out_features)
        self.blocks = nn.ModuleList(layer(out_features) for _ in range(3))

    def forward(self, images):
        hidden = self.embed(images.flatten(1))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


class Scaled(OneShape):
    def __init__(self, out_features=8):
        super().__init__(out_features)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images):
        return super().forward(images) * self.scale


class ScaledLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer, self.scale = layer(width), nn.Parameter(torch.tensor(2.0))

    def forward(self, hidden):
        return self.layer(hidden) * self.scale


class ScaledInside(OneShape):
    def __init__(self, out_features=8):
        super().__init__(out_features)
        self.blocks[1] = ScaledLayer(out_features)


class Twice(OneShape):
    """The second block is the third too."""

    def __init__(self, out_features=8):
        super().__init__(out_features)
        self.blocks[2] = self.blocks[1]


class Borrows(OneShape):
    """Uses the weight of a block outside it."""

    def forward(self, images):
        return linear(super().forward(images), self.blocks[1][2].weight.T[: self.out_features, : self.out_features])


class SkipsBlanks(OneShape):
    """As models do that drop padding images; a lane without images gets one of zeros."""

    def forward(self, images):
        blank = (images == 0).flatten(1).all(1)
        return super().forward(images) if not blank.all() else self.embed(images.flatten(1)) * 0.0


class Compiled(OneShape):
    def __init__(self, out_features=8):
        super().__init__(out_features)
        self.embed = torch.compile(self.embed, backend="eager")


RECIPE = """
[modules.llm]
model = "qwen3"
config = { hidden_size = 8, num_hidden_layers = 1, num_attention_heads = 2, head_dim = 4 }
[[boundaries]]
from = "vision"
to = "llm"
at = "image"
[parallelism.vision]
ranks = [0, 1]
data_parallel_shard_degree = 2
[parallelism.llm]
ranks = [2, 3]
[data]
source = "hetmesh.testing.sources:RandomMedia"
options = { kinds = { image = [1, 4, 4] }, largest = { image = LARGEST }, text_only = 0.4 }
[training]
local_batch_size = 4
dtype = "float64"
"""


def recipe(model, largest=4, parallelism=None, **config):
    tables = tomli.loads(RECIPE.replace("LARGEST", str([1, largest, largest])))
    tables["parallelism"] |= parallelism or {}
    tables["modules"]["vision"] = {"model": f"test_user_sharded:{model}", "config": config}
    return parse_recipe(tables)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("PerItem", {}),
        ("BySize", {}),
        ("BySize", {"many": 4}),  # which some steps have on one rank, and some on none
        ("BySize", {"many": 99}),
    ],
)
def test_an_encoder_that_calls_its_layers_per_item(pool4, model, config):
    parity.check(pool4, recipe(model, largest=8, **config))


REPLICAS = {"vision": {"ranks": [0, 1], "data_parallel_replicate_degree": 2}}
IN_GAPS = {"pipeline_parallel_schedule": "bubble_fill", "bubble_fill_schedule": "zero_bubble"}
IN_GAPS |= {"vision": {"ranks": [2, 3], "data_parallel_replicate_degree": 2}}


@pytest.mark.parametrize("parallelism", [{}, REPLICAS, IN_GAPS], ids=["FSDP", "replicas", "zero_bubble"])
def test_layers_that_only_a_blank_item_enters_have_no_gradient(pool4, parallelism):
    parity.check(pool4, recipe("BlanksEnterMore", 8, parallelism))


def test_samples_of_one_lane_pass_by_all_that_is_trained(pool4):
    """Small images do not enter the last block, and nothing else of the encoder is trained."""
    given = recipe("BySize", largest=8, many=4)
    vision = given.modules["vision"].model_copy(update={"trainable": ("blocks.2",)})
    parity.check(pool4, given.model_copy(update={"modules": {**given.modules, "vision": vision}}))


WHOLE = ("Scaled", "ScaledInside", "Twice", "Borrows", "SkipsBlanks", "Compiled")


@pytest.mark.parametrize("model", some(("ScaledInside", "Borrows", "SkipsBlanks"), WHOLE))
def test_what_fsdp_cannot_shard_by_layers(pool4, model):
    parity.check(pool4, recipe(model))


def test_a_step_with_a_scalar_is_simulated():
    assert simulate_recipe(resolve(recipe("Scaled")), machine="h100").makespan > 0


def test_what_is_gathered_whole_is_predicted_to_be():
    def layer(name):
        weights = tuple(WeightShape(f"{name}.{i}", (4, 4), 1, True, None, None) for i in range(3))
        return LayerShape(name, weights)

    layers = tuple(map(layer, ("blocks.0", "blocks.1", "blocks.2")))
    by_block, whole = (
        stage_contents(ModuleShape("m", layers, at_once), False, None, True, True, 1) for at_once in (False, True)
    )
    assert whole.held == {"": 144}
    assert max(by_block.held.values()) == 48
