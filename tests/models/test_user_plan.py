"""Users' tensor parallel plans that would silently compute something else: refused, on emulated ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

from hetmesh.errors import RecipeError
from hetmesh.models.user import plan_probe
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve

UP_DOWN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, inner), nn.Linear(inner, width), nn.LayerNorm(width)

    def forward(self, x):
        return x + self.down(self.inside(self.up(self.norm(x))))

    def inside(self, features):
        return gelu(features)


class Normed(Block):
    def inside(self, features):
        return features / features.pow(2).mean(-1, keepdim=True).sqrt()


class Softmax(Block):
    def inside(self, features):
        return features.softmax(-1)


class Gated(Block):
    """Gate and up in one linear: its first half is all gate."""

    def __init__(self, width, inner):
        super().__init__(width, inner)
        self.up = nn.Linear(width, 2 * inner)

    def inside(self, features):
        gate, up = features.chunk(2, -1)
        return gelu(gate) * up


class Biased(Block):
    """A parameter for all features, which no rank has all of."""

    def __init__(self, width, inner):
        super().__init__(width, inner)
        self.shift = nn.Parameter(torch.zeros(inner))

    def inside(self, features):
        return gelu(features + self.shift)


class Headed(Block):
    """Norms of single heads, whose weights all ranks share."""

    def __init__(self, width, inner):
        super().__init__(width, inner)
        self.head = nn.LayerNorm(4)

    def inside(self, features):
        return self.head(features.unflatten(-1, (-1, 4))).flatten(-2)


class Tower(nn.Module):
    tensor_parallel_plan = UP_DOWN
    rows_per_item, block, norm_last = 1, Block, False

    def __init__(self, media_shape, out_features=8, inner=16, depth=2):
        super().__init__()
        self.out_features = out_features
        self.embed = nn.Linear(media_shape[1] * media_shape[2], out_features)
        self.blocks = nn.ModuleList(self.block(out_features, inner) for _ in range(depth))

    def forward(self, images):
        x = self.embed(images.flatten(1)).unsqueeze(1)
        for block in self.blocks:
            x = block(x)
        return x


class NormedTower(Tower):
    block = Normed


class SoftmaxTower(Tower):
    block = Softmax


class GatedTower(Tower):
    block = Gated


class BiasedTower(Tower):
    block = Biased


class HeadedTower(Tower):
    block = Headed


class SummedTower(HeadedTower):
    tensor_parallel_plan = UP_DOWN | {"blocks.*.head": "replicated_with_grad_allreduce"}


class SummedTwice(SummedTower):
    tensor_parallel_plan = SummedTower.tensor_parallel_plan | {"blocks.*.norm": "replicated_with_grad_allreduce"}


class TiedTower(Tower):
    """Two blocks share a weight, of which each would get a share of its own."""

    def __init__(self, media_shape, out_features=8, inner=16, depth=2):
        super().__init__(media_shape, out_features, inner, depth)
        self.blocks[1].up.weight = self.blocks[0].up.weight


class Narrow(Block):
    def forward(self, x):
        features = self.up(self.norm(x))
        return x + self.down(gelu(features)) if features.shape[-1] > 8 else x


class NarrowTower(Tower):
    block = Narrow


class Recomputed(Tower):
    def forward(self, images):
        x = self.embed(images.flatten(1)).unsqueeze(1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class HalvedGradient(torch.autograd.Function):
    """Divides gradients by the number of features of a rank."""

    @staticmethod
    def forward(context, features):
        return features * 1.0

    @staticmethod
    def backward(context, gradient):
        return gradient / gradient.shape[-1]


class Halving(Block):
    def inside(self, features):
        return gelu(HalvedGradient.apply(features))


class HalvingTower(Tower):
    block = Halving


class HalfPlanned(Tower):
    """Its output stays shares of the features."""

    tensor_parallel_plan = {"blocks.*.up": "colwise", "blocks.*.down": "colwise"}  # noqa: RUF012


class Gathered(NormedTower):
    """All features are there again before the norm."""

    tensor_parallel_plan = {"blocks.*.up": "colwise_gather_output", "embed": "colwise_gather_output"}  # noqa: RUF012


class Torchs(Tower):
    tensor_parallel_plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}  # noqa: RUF012


class TorchsNormed(NormedTower):
    tensor_parallel_plan = Torchs.tensor_parallel_plan


class Strange(Tower):
    tensor_parallel_plan = UP_DOWN | {"blocks.*.norm": SequenceParallel()}


def recipe(model, **keys):
    llm = {
        "hidden_size": keys.get("config", {}).get("out_features", 8),
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 4,
    }
    degree = keys.pop("degree", 2)
    tables = {
        "modules": {
            "vision": {"model": f"test_user_plan:{model}"} | keys,
            "llm": {"model": "qwen3", "config": llm},
        },
        "boundaries": [{"from": "vision", "to": "llm", "at": "image"}],
        "parallelism": {
            "vision": {"ranks": list(range(degree)), "tensor_parallel_degree": degree},
            "llm": {"ranks": list(range(degree))},
        },
        "data": {"source": "digits"},
        "training": {"local_batch_size": 4},
    }
    return parse_recipe(tables)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "NormedTower",
            r"modules\.vision: its tensor_parallel_plan: on 2 tensor parallel ranks NormedTower computes something else"
            r" than whole: what rowwise 'blocks\.0\.down' gets differs by 0\.\d+\. Between colwise",
        ),
        ("SoftmaxTower", r"what rowwise 'blocks\.0\.down' gets differs by"),
        ("GatedTower", r"what rowwise 'blocks\.0\.down' gets differs by"),
        ("TorchsNormed", r"what rowwise 'blocks\.0\.down' gets differs by"),
        ("BiasedTower", r"BiasedTower fails, and whole it does not: RuntimeError: The size of tensor a \(8\)"),
        ("HalfPlanned", r"HalfPlanned fails, and whole it does not"),
        ("NarrowTower", r"NarrowTower fails, .* it calls its rowwise linears another number of times"),
        ("TiedTower", r"TiedTower splits \['blocks\.1\.up\.weight'\], which are tied to other parameters"),
        ("HalvingTower", r"HalvingTower has another gradient of blocks\.0\.up\.weight"),
        (
            "HeadedTower",
            r"another gradient of blocks\.0\.head\.weight, which differs by .* needs replicated_with_grad_allreduce",
        ),
        ("SummedTwice", r"another gradient of blocks\.\d\.norm\.weight, .* in full: leave it out of the plan"),
    ],
)
def test_what_takes_all_features_between_colwise_and_rowwise_is_refused(model, message):
    with pytest.raises(RecipeError, match=message):
        resolve(recipe(model))


@pytest.mark.parametrize("model", ["Tower", "SummedTower", "Gathered", "Torchs", "Recomputed"])
def test_a_plan_that_changes_nothing_is_compared_and_taken(model):
    given = recipe(model, degree=3 if model == "Gathered" else 2)
    resolved = resolve(given)
    assert resolved.notes == ()


def test_what_cannot_be_compared_is_said():
    given = recipe("Strange")
    resolved = resolve(given)
    (note,) = resolved.notes
    assert "was not compared with the whole module: its plan has another ParallelStyle" in note


def test_large_modules_are_compared_without_their_equal_layers(monkeypatch):
    sizes = {"out_features": 256, "inner": 4096, "depth": 12}
    monkeypatch.setattr(plan_probe, "_POOL", 1 << 16)  # so that rows overlap
    resolve(recipe("Tower", config=sizes))
    with pytest.raises(RecipeError, match=r"'blocks\.0\.down' gets differs"):
        resolve(recipe("NormedTower", config=sizes))
