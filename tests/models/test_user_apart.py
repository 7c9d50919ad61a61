"""Users' modules that compute samples together: what differs from layout to layout is refused, whatever it is."""

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import hetmesh
from hetmesh.cli.check import checked
from hetmesh.errors import GradientError, RecipeError
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from support import user_models


class Encoder(nn.Module):
    rows_per_item = 1

    def __init__(self, media_shape, out_features=8):
        super().__init__()
        self.out_features = out_features
        self.linear = nn.Linear(media_shape[1] * media_shape[2], out_features)

    def forward(self, images):
        return self.linear(images.flatten(1)).unsqueeze(1)


class Centred(Encoder):
    def forward(self, images):
        rows = super().forward(images)
        return rows - rows.mean(0)


class CentredItems(Encoder):
    rows_per_item = None

    def item_rows(self, shape):
        return 1

    def forward(self, images):
        rows = self.linear(torch.stack([image.flatten() for image in images]))
        return rows - rows.mean(0)


class Noisy(Encoder):
    """Random whatever is beside it: as dropout is."""

    def forward(self, images):
        return super().forward(images) + torch.randn(len(images), 1, 1).to(images)


class CentredInTraining(Encoder):
    """Drops, and takes a mean over the batch where it trains alone."""

    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        self.drop = nn.Dropout(0.5)

    def forward(self, images):
        rows = functional.dropout(self.drop(super().forward(images)), 0.3, self.training)
        return rows - rows.mean(0) if self.training else rows


class NormalisedInTraining(Encoder):
    """Of one sample alone it cannot be computed."""

    def forward(self, images):
        rows = super().forward(images).squeeze(1)
        return functional.batch_norm(rows, None, None, training=True).unsqueeze(1) if self.training else rows


class Mixup(Encoder):
    def forward(self, images):
        rows = super().forward(images)
        return rows + 0.1 * rows[torch.randperm(len(rows))] if self.training else rows


class Pools(Encoder):
    """Has fewer features than it says."""

    def forward(self, images):
        return super().forward(images)[..., :-1]


class SeesBatch(Encoder):
    """Has no eval()."""

    def forward(self, images):
        if not self.training:
            raise NotImplementedError("for training alone")
        rows = super().forward(images)
        return rows - rows.mean(0)


class NormalisesGradient(Encoder):
    def forward(self, images):
        rows = super().forward(images)
        if rows.requires_grad:
            rows.register_hook(lambda gradient: gradient / gradient.norm())
        return rows


class Averaged(torch.autograd.Function):
    @staticmethod
    def forward(context, rows):
        return rows * 2.0

    @staticmethod
    def backward(context, gradient):
        return gradient / len(gradient)


class AveragesGradient(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.out_features = out_features
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, rows):
        return self.linear(Averaged.apply(rows))


class CentredWithGradients(Encoder):
    def forward(self, images):
        rows = super().forward(images)
        return rows - rows.mean(0) if torch.is_grad_enabled() else rows


class CentresThree(Encoder):
    def forward(self, images):
        rows = super().forward(images)
        return rows - rows.mean(0) if len(rows) > 2 else rows


class HooksInForward(Encoder):
    def forward(self, images):
        if not self.linear.weight._backward_hooks:
            self.linear.weight.register_hook(lambda gradient: gradient * 2.0)
        return super().forward(images)


class DropsInTraining(Encoder):
    """Everything that draws for each sample by itself."""

    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        self.drop, self.leaky = nn.Dropout(0.5), nn.AlphaDropout(0.2)

    def forward(self, images):
        rows = self.leaky(self.drop(super().forward(images)))
        if self.training:
            rows = rows * (0.9 + torch.rand(len(rows), 1, 1)).floor().to(rows) / 0.9
            rows = rows + torch.randn_like(rows) + torch.bernoulli(torch.full_like(rows, 0.5))
            rows = functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.1)
        return rows


class Numbers(Encoder):
    """Reads whole numbers."""

    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        self.embed = nn.Embedding(17, out_features)

    def forward(self, images):
        if images.is_floating_point() and bool((images != images.round()).any()):
            raise ValueError("not whole numbers")
        return self.embed(images.long().flatten(1)[:, :1])


class NumpyNoise(Encoder):
    def forward(self, images):
        return super().forward(images) + float(np.random.rand())


class Large(Encoder):
    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        self.table = nn.Parameter(torch.zeros(20_000_001), requires_grad=False)


class Lazy(Encoder):
    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        self.linear = nn.LazyLinear(out_features)


class CentredRows(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.out_features = out_features
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, rows):
        return self.linear(rows - rows.mean(0))


class Language(nn.Module):
    def __init__(self, vocab_size, in_features=8):
        super().__init__()
        self.in_features = in_features
        self.embed, self.head = nn.Embedding(vocab_size, in_features), nn.Linear(in_features, vocab_size)

    def forward(self, batch, inputs):
        hidden = self.embed(batch["input_ids"])
        for rows in inputs.values():
            hidden = hidden.flatten(0, 1).index_copy(0, batch["positions.image"], rows).view_as(hidden)
        return self.head(self.mixed(hidden).flatten(0, 1)[batch["target_positions"]])

    def mixed(self, hidden):
        return hidden


class SeesPadding(Language):
    def mixed(self, hidden):
        return hidden + hidden.mean(1, keepdim=True)


class Causal(Language):
    def mixed(self, hidden):
        return hidden + hidden.cumsum(1)


class Averaging(Encoder):
    """Keeps a running mean of its rows."""

    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        self.register_buffer("mean", torch.zeros(out_features))

    def forward(self, images):
        rows = super().forward(images)
        if self.training:
            self.mean.lerp_(rows.detach().mean((0, 1)), 0.1)
        return rows - self.mean


class Caching(Encoder):
    """Fills a buffer in its first forward."""

    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        self.register_buffer("shift", torch.zeros(out_features))

    def forward(self, images):
        self.shift.fill_(1.0)
        return super().forward(images) + self.shift


class Heads(Language):
    """Tensor parallel; each rank scales its share of the features by weights that all ranks hold."""

    tensor_parallel_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012

    def __init__(self, vocab_size, in_features=8):
        super().__init__(vocab_size, in_features)
        self.up, self.down = nn.Linear(in_features, 16), nn.Linear(16, in_features)
        self.scale = nn.LayerNorm(4)

    def mixed(self, hidden):
        heads = self.scale(self.up(hidden).unflatten(-1, (-1, 4)))
        return hidden + self.down(heads.flatten(-2))


class SummedHeads(Heads):
    tensor_parallel_plan = Heads.tensor_parallel_plan | {"scale": "replicated_with_grad_allreduce"}


def recipe(vision="Encoder", projector=None, llm="Language"):
    own = {"vision": vision, "projector": projector, "llm": llm}
    names = [name for name, model in own.items() if model]
    edges = [{"from": a, "to": b} for a, b in pairwise(names)]
    edges[-1]["at"] = "image"
    modules = {name: {"model": f"test_user_apart:{own[name]}"} for name in names}
    layouts = {"llm": {"ranks": [2, 3], "tensor_parallel_degree": 2}} if "Heads" in llm else {"llm": {"ranks": [2, 3]}}
    parallelism = {name: {"ranks": [0, 1]} for name in names} | layouts
    tables = {"modules": modules, "boundaries": edges, "data": {"source": "digits"}, "parallelism": parallelism}
    return parse_recipe(tables | {"training": {"local_batch_size": 4}})


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {"vision": "Centred"},
            r"modules\.vision: Centred mixes samples in training: the rows of an item differ by [\d.]+ when",
        ),
        (
            {"vision": "CentredItems"},
            r"modules\.vision: CentredItems mixes samples in training: the rows of an item differ by",
        ),
        (
            {"projector": "CentredRows"},
            r"modules\.projector: CentredRows mixes samples in training: the rows of an item differ by",
        ),
        (
            {"llm": "SeesPadding"},
            r"modules\.llm: SeesPadding mixes samples in training: .* differ by [\d.]+ when a longer sample, or pad",
        ),
        (
            {"llm": "Heads"},
            r"another gradient of scale\.weight, .* in the plan it needs replicated_with_grad_allreduce",
        ),
        (
            {"vision": "CentredInTraining"},
            r"modules\.vision: CentredInTraining mixes samples in training: .* differ",
        ),
        ({"vision": "NormalisedInTraining"}, r"modules\.vision: NormalisedInTraining fails on one sample, in training"),
        ({"vision": "Pools"}, r"modules\.vision: Pools: module 'vision' must return shape .*, got"),
        ({"vision": "Mixup"}, r"modules\.vision: Mixup mixes samples in training: .* differ by"),
        (
            {"vision": "NormalisesGradient"},
            r"NormalisesGradient mixes samples in training: the gradient of linear\.weight differs",
        ),
        (
            {"projector": "AveragesGradient"},
            r"AveragesGradient mixes samples .*: the gradient of its input 'rows' differs",
        ),
        (
            {"vision": "CentredWithGradients"},
            r"CentredWithGradients mixes samples .*: the rows of an item differ by",
        ),
        ({"vision": "CentresThree"}, r"CentresThree mixes samples in training: .* differ by"),
        ({"vision": "HooksInForward"}, r"HooksInForward sets a gradient hook on its parameter linear\.weight"),
        ({"vision": "SeesBatch"}, r"modules\.vision: SeesBatch mixes samples in training: .* differ by"),
        ({"vision": "Lazy"}, r"modules\.vision: Lazy makes its parameters \['linear\.weight', 'linear\.bias'\] lazily"),
    ],
)
def test_what_other_layouts_would_change_is_refused(own, message):
    with pytest.raises(RecipeError, match=message):
        resolve(recipe(**own))


@pytest.mark.parametrize("own", [{}, {"llm": "Causal"}, {"vision": "Noisy"}, {"vision": "DropsInTraining"}])
def test_what_each_sample_alone_decides_is_taken(own):
    assert not [line for line in checked(recipe(**own))[1] if "was not tried" in line]


@pytest.mark.parametrize("branch", user_models.BRANCHES)
def test_a_branch_of_training_is_refused_where_it_mixes_samples(branch):
    made = recipe()
    place = {"projector": {"model": "support.user_models:Widen", "config": {"branch": branch}}}
    edges = [{"from": "vision", "to": "projector"}, {"from": "projector", "to": "llm", "at": "image"}]
    modules = {name: {"model": each.model} for name, each in made.modules.items()} | place
    text = {"modules": modules, "boundaries": edges, "data": {"source": "digits"}}
    found = parse_recipe(text | {"parallelism": {"ranks": [0]}, "training": {"local_batch_size": 4}})
    if branch in user_models.MIXING:
        with pytest.raises(RecipeError, match=r"modules\.projector: Widen (mixes|fails)"):
            resolve(found)
    else:
        resolve(found)


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ("Numbers", r"in training its forward of random inputs failed: ValueError: not whole numbers"),
        ("NumpyNoise", r"in training two forwards of the same input differ: it draws"),
        ("Large", r"it has more than 20,000,000 parameters; try a small one of the class"),
    ],
)
def test_what_could_not_be_tried_is_said(vision, message):
    lines = [line for line in checked(recipe(vision=vision))[1] if "was not tried" in line]
    assert len(lines) == 1
    assert re.search(rf"note: modules\.vision: whether it mixes samples was not tried: {message}", lines[0])


def two_steps(rank, own):
    try:
        with hetmesh.open_job(recipe(**own)) as job:
            return [job.forward_backward().step for _ in range(3)]
    except GradientError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"vision": "Averaging"}, r"forward changes buffers in every step: vision\.mean\. Lanes and microbatches"),
        ({"vision": "Caching", "llm": "SummedHeads"}, None),
    ],
)
def test_what_only_training_shows_ends_it_on_all_ranks(pool4, own, message):
    for found in pool4.run(two_steps, own):
        assert found == [1, 2, 3] if message is None else re.search(message, found), found
