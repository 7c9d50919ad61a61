"""Users' constructors that draw numbers outside torch, and what they do with parameters that no layout can keep."""

import random
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from test_user_apart import Encoder, Language
from torch import nn

import hetmesh
from hetmesh.errors import RecipeError, ReplicaError
from hetmesh.models import build_empty, build_module
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing import parity


class DrawsElsewhere(Encoder):
    """Draws from all global generators."""

    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        self.numpy = nn.Parameter(torch.from_numpy(np.random.randn(out_features)).float())
        self.python = nn.Parameter(torch.tensor([random.random() for _ in range(out_features)]))
        self.register_buffer("own", torch.rand(out_features))
        self.scale = random.random()

    def forward(self, images):
        return self.scale * super().forward(images) + self.numpy + self.python


class Unseeded(Encoder):
    """Draws from a generator that no seed reaches: a parameter, a buffer or a number."""

    def __init__(self, media_shape, out_features=8, kind="parameter"):
        super().__init__(media_shape, out_features)
        value = torch.from_numpy(np.random.default_rng().standard_normal(out_features)).float()
        if kind == "parameter":
            self.shift = nn.Parameter(value)
        elif kind == "buffer":
            self.register_buffer("shift", value)
        else:
            self.shift = float(value[0])

    def forward(self, images):
        return super().forward(images) + self.shift


class LargeUnseeded(Unseeded):
    """Too large to be tried by a check."""

    def __init__(self, media_shape, out_features=8, kind="parameter"):
        super().__init__(media_shape, out_features, kind)
        self.table = nn.Parameter(torch.zeros(20_000_001), requires_grad=False)


class Positive(nn.Module):
    """A row-wise module without parameters."""

    def __init__(self, in_features):
        super().__init__()
        self.out_features = in_features

    def forward(self, rows):
        return rows.abs()


class EmbeddingLanguage(Language):
    def __init__(self, vocab_size, in_features=8, **options):
        super().__init__(vocab_size, in_features)
        self.embed = nn.Embedding(vocab_size, in_features, **options)


class MaxNorm(EmbeddingLanguage):
    def __init__(self, vocab_size, in_features=8):
        super().__init__(vocab_size, in_features, max_norm=1.0)


class ByFrequency(EmbeddingLanguage):
    def __init__(self, vocab_size, in_features=8):
        super().__init__(vocab_size, in_features, scale_grad_by_freq=True)


class Sparse(EmbeddingLanguage):
    def __init__(self, vocab_size, in_features=8):
        super().__init__(vocab_size, in_features, sparse=True)


class Hook(Encoder):
    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        self.linear.weight.register_hook(lambda gradient: 0.1 * gradient)


class PostHook(Encoder):
    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        self.linear.bias.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.clamp_(-1, 1))


class Complex(Encoder):
    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        self.turn = nn.Parameter(torch.ones(out_features, dtype=torch.complex64))

    def forward(self, images):
        return torch.view_as_real(super().forward(images) * self.turn)[..., 0]


class ComplexBuffer(Encoder):
    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        self.register_buffer("turn", torch.polar(torch.ones(out_features), torch.arange(float(out_features))))

    def forward(self, images):
        return torch.view_as_real(super().forward(images) * self.turn)[..., 0]


class InList(Encoder):
    """Parameters that no registration sees."""

    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        self.shifts = [nn.Parameter(torch.zeros(out_features)) for _ in range(2)]

    def forward(self, images):
        return super().forward(images) + sum(self.shifts)


class ModulesInDict(Encoder):
    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        self.by_name = {"more": [nn.Linear(out_features, out_features)]}

    def forward(self, images):
        return self.by_name["more"][0](super().forward(images))


class InClosure(Encoder):
    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        shift = nn.Parameter(torch.zeros(out_features))
        self.add = lambda rows: rows + shift

    def forward(self, images):
        return self.add(super().forward(images))


class InPartial(Encoder):
    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        self.add = partial(torch.add, nn.Linear(1, out_features).bias)

    def forward(self, images):
        return self.add(super().forward(images))


class PlainTensor(Encoder):
    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        self.shift = torch.zeros(out_features, requires_grad=True)

    def forward(self, images):
        return super().forward(images) + self.shift


class SecondName(Encoder):
    """Keeps a registered parameter beside its name: it gets memory and gradients under its name alone."""

    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        self.all_weights = [self.linear.weight]

    def forward(self, images):
        return super().forward(images) * self.all_weights[0].norm()


OUTSIDE = nn.Parameter(torch.zeros(8))


class Global(Encoder):
    def forward(self, images):
        return super().forward(images) + OUTSIDE


class Holding(Encoder):
    """Keeps what it may: registered modules in lists, its parent, constants."""

    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        self.order = [self.linear, self.linear]
        self.table = {"scale": torch.ones(out_features)}
        self.itself = [self]
        self.twice = lambda rows: 2 * rows

    def forward(self, images):
        return self.twice(self.order[0](images.flatten(1)).unsqueeze(1)) * self.table["scale"].to(images)


class Recurrent(Encoder):
    """torch's RNNs keep a list of their parameters, and renew it."""

    def __init__(self, media_shape, out_features=8):
        super().__init__(media_shape, out_features)
        self.rnn = nn.LSTM(media_shape[2], out_features, batch_first=True)

    def forward(self, images):
        return super().forward(images) + self.rnn(images.flatten(1, 2))[0][:, -1:]


class WritesIntoRows(Language):
    def forward(self, batch, inputs):
        for rows in inputs.values():
            rows.mul_(2.0)
        return super().forward(batch, inputs)


class RowsInPlace(Positive):
    def forward(self, rows):
        return rows.abs_()


def recipe(vision="Encoder", llm="Language", middle=None, parallelism=None, trainable=True, **training):
    own = {"vision": vision, "middle": middle, "llm": llm}
    names = [name for name, model in own.items() if model]
    place = {"Encoder": "test_user_apart", "Language": "test_user_apart"}
    modules = {name: {"model": f"{place.get(own[name], 'test_user_constructors')}:{own[name]}"} for name in names}
    modules["vision"] |= {"config": {"out_features": 8}} | ({} if trainable else {"trainable": False})
    if middle:
        modules["middle"] |= {"trainable": False}
    edges = [{"from": a, "to": b} for a, b in pairwise(names)]
    edges[-1]["at"] = "image"
    layout = parallelism or {"ranks": [0, 1]}
    tables = {"modules": modules, "boundaries": edges, "data": {"source": "digits"}, "parallelism": layout}
    return parse_recipe(tables | {"training": {"local_batch_size": 4, **training}})


REFUSED = [
    ({"llm": "MaxNorm"}, r"modules\.llm.*'embed'.*max_norm"),
    ({"llm": "ByFrequency"}, r"modules\.llm.*'embed'.*scale_grad_by_freq"),
    ({"llm": "Sparse"}, r"modules\.llm.*'embed'.*sparse"),
    ({"vision": "Hook"}, r"modules\.vision: parameter linear\.weight has a gradient hook"),
    ({"vision": "PostHook"}, r"modules\.vision: parameter linear\.bias has a gradient hook"),
    ({"vision": "Complex"}, r"modules\.vision: parameter turn is complex"),
    ({"vision": "ComplexBuffer"}, r"modules\.vision: buffer turn is complex"),
    ({"vision": "InList"}, r"modules\.vision: InList\.shifts holds a parameter that is not registered"),
    ({"vision": "ModulesInDict"}, r"modules\.vision: ModulesInDict\.by_name holds .*Linear.* that is not registered"),
    ({"vision": "InClosure"}, r"modules\.vision: InClosure\.add holds a parameter that is not registered"),
    ({"vision": "InPartial"}, r"modules\.vision: InPartial\.add holds a parameter that is not registered"),
    ({"vision": "PlainTensor"}, r"modules\.vision: PlainTensor\.shift .*tensor with requires_grad"),
    ({"vision": "SecondName"}, r"modules\.vision: SecondName\.all_weights holds parameter linear\.weight"),
    ({"vision": "Global"}, r"modules\.vision: Global\.forward .*holds a parameter that is not registered"),
    ({"llm": "WritesIntoRows"}, r"modules\.llm: WritesIntoRows writes into its input rows"),
    ({"middle": "RowsInPlace"}, r"modules\.middle: RowsInPlace writes into its input rows"),
    ({"vision": "Unseeded"}, r"modules\.vision: Unseeded, constructed twice with the same seeds"),
]


@pytest.mark.parametrize(("own", "message"), REFUSED)
def test_what_no_layout_keeps_of_a_constructor_is_refused(own, message):
    with pytest.raises(RecipeError, match=message):
        resolve(recipe(**own))


@pytest.mark.parametrize("kind", ["parameter", "buffer", "number"])
def test_draws_that_no_seed_reaches_are_refused(kind):
    tables = recipe(vision="Unseeded")
    module = tables.modules["vision"]
    module.config["kind"] = kind
    with pytest.raises(RecipeError, match="Unseeded, constructed twice with the same seeds, computes something else"):
        resolve(tables)


@pytest.mark.parametrize("vision", ["Holding", "Recurrent"])
def test_what_a_constructor_may_keep_is_taken(vision):
    resolved = resolve(recipe(vision=vision))
    assert resolved.adapters["vision"].reason_not_probed == ""


def test_all_global_generators_are_seeded_by_place_and_left_as_they_were():
    made = recipe(vision="DrawsElsewhere")
    resolved = resolve(made)
    adapters = resolved.adapters
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state()
    first = build_module(adapters["vision"], "vision", 0)
    assert before[0] == random.getstate()
    assert before[1] == np.random.get_state()[1].tolist()
    assert torch.equal(before[2], torch.random.get_rng_state())
    random.random(), np.random.rand(), torch.rand(1)
    again, other = (build_module(adapters["vision"], "vision", seed) for seed in (0, 1))
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
        assert not torch.equal(value, other.state_dict()[name]), name
    assert first.scale == again.scale != other.scale
    empty = [build_empty(adapters["vision"]) for _ in range(2)]  # as where a directory has the weights
    assert torch.equal(empty[0].own, empty[1].own)


def begun(rank, made):
    try:
        with hetmesh.open_job(made) as job:
            return [job.forward_backward().step for _ in range(2)]
    except ReplicaError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_replicas_that_begin_with_other_values_end_the_start_on_all_ranks(pool, kind):
    made = recipe(vision="LargeUnseeded")
    made.modules["vision"].config["kind"] = kind
    for found in pool(2).run(begun, made):
        assert found.startswith("before the first step replicas of 1 ")
        assert "vision.shift (module 'vision', dp_replicate: ranks [1] differ from ranks [0])" in found


@pytest.mark.slow
def test_draws_outside_torch_equal_one_process(pool):
    parity.check(pool(2), recipe(vision="DrawsElsewhere", dtype="float64"))


@pytest.mark.slow
@pytest.mark.parametrize("middle", ["Positive"])
def test_a_module_without_parameters_computes_in_the_dtype_of_the_recipe(pool, middle):
    layout = {"vision": {"ranks": [0]}, "middle": {"ranks": [1]}, "llm": {"ranks": [0, 1]}}
    parity.check(pool(2), recipe(middle=middle, parallelism=layout, dtype="float64"))
