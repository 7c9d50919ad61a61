"""Evaluation says which answers are right on any layout, disturbs nothing, and is shown readably."""

from pathlib import Path

import pytest
import torch
from torch import nn

from hetmesh.boundary import World, init
from hetmesh.data.digits import DigitsSource
from hetmesh.data.loader import Loader
from hetmesh.errors import SampleError
from hetmesh.parallel import linear_cross_entropy
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.modules import loaded_module
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.precision import exact_dtypes
from hetmesh.testing.sources import RandomMedia
from hetmesh.training.evaluate import Evaluation, evaluate, show
from hetmesh.training.job import Job
from support.often import some

RECIPES = Path(__file__).parents[2] / "recipes"
SAMPLES = 37  # no multiple of the batch size


def small(name, *overrides):
    local = {"digits_colocated": 4, "digits_overlapping": 4}.get(name, 8)
    given = ("--training.dtype", "float64", "--training.local_batch_size", str(local), *overrides)
    return load_recipe(RECIPES / f"{name}.toml", given)


def random_media(recipe_name):
    """One or two random tokens to guess among 12: an untrained model is sometimes right."""
    options = ("--data.options.kinds", "{image = [1, 8, 8]}")
    return small(recipe_name, "--data.source", "hetmesh.testing.sources:RandomMedia", *options)


def held_out():
    return RandomMedia({"image": (1, 8, 8)}, length=SAMPLES, seed=1)


def one_by_one(recipe):
    """The truth: each sample alone through plain modules. Mean loss, right, predicted tokens."""
    resolved = resolve(recipe)
    adapters, graph = resolved.adapters, resolved.graph
    modules = {name: loaded_module(recipe, adapters[name], name).eval() for name in graph.order}
    source = held_out()
    loader = Loader(source, 1, resolved.expander, shuffle=False)
    losses, right, predicted = [], [], []
    with torch.no_grad(), exact_dtypes(*modules.values()):
        for i in range(SAMPLES):
            drawn = loader.drawn([i])[0]
            samples = loader.load([drawn])
            batch, rows = {}, {}
            for name in graph.order:
                batch = adapters[name].collate(
                    samples, [drawn.meta], placeholders=source.placeholders, pad_id=source.pad_id
                )
                rows[name] = adapters[name].forward(
                    modules[name], batch, {b.source: rows[b.source] for b in graph.inputs(name)}
                )
            logits = rows[graph.llm.name]
            losses += nn.functional.cross_entropy(logits, batch["targets"], reduction="none").tolist()
            predicted.append(logits.argmax(-1).tolist())
            right.append(predicted[-1] == batch["targets"].tolist())
    return sum(losses) / len(losses), right, predicted


def on_this_rank(rank, recipe, limits):
    world = World.current()
    job = Job.assemble(resolve(recipe), world)
    with exact_dtypes(job.root), pytest.MonkeyPatch.context() as patched:
        patched.setattr(linear_cross_entropy, "CHUNK_BYTES", 1)  # a chunk of logits for each target
        found = [evaluate(job, held_out(), limit) for limit in limits]
    return [(e.loss, e.right.tolist(), e.predicted.tolist()) for e in found]


EVALUATED = ("digits", "digits_colocated", "digits_overlapping", "digits_single")


@pytest.mark.slow
@pytest.mark.parametrize("name", some(("digits_overlapping", "digits_single"), EVALUATED))
def test_it_finds_on_any_layout_what_plain_modules_give_sample_by_sample(pool4, name):
    loss, right, predicted = one_by_one(random_media("digits_single"))
    assert 0 < sum(right) < SAMPLES
    for (all_loss, all_right, all_predicted), limited in pool4.run(on_this_rank, random_media(name), (None, 5)):
        assert all_loss == pytest.approx(loss, rel=1e-12)
        assert all_right == right
        assert [[t for t in row if t >= 0] for row in all_predicted] == predicted
        assert limited[1] == right[:5]


@pytest.fixture
def job():
    world = init()
    yield lambda recipe: Job.assemble(resolve(recipe), world)
    world.close()


def test_training_goes_on_as_if_nothing_had_been(job):
    recipe = small("digits_single", "--modules.llm.config.attention_dropout", "0.5")
    made = job(recipe)
    frozen = made.root.get_submodule("vision")
    frozen.eval()  # what was in evaluation mode stays in it
    modes = [module.training for module in made.root.modules()]
    assert {True, False} == set(modes)
    state = torch.get_rng_state()
    first, second = (evaluate(made, DigitsSource("validation"), 9) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in made.root.modules()] == modes
    assert first.loss == second.loss  # no dropout
    assert all(parameter.grad is None for parameter in made.root.parameters())


class AlwaysFive(nn.Module):
    """A sink that answers the token 5, always."""

    def __init__(self, vocab_size=9):
        super().__init__()
        self.vocab_size = vocab_size
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, batch, inputs):
        logits = torch.zeros(len(batch["targets"]), self.vocab_size)
        logits[:, 5] = 1
        return logits + self.weight


class Fives:
    """Text samples of 6 tokens, the last two of which are to be answered."""

    vocab_size, pad_id, placeholders = 9, 0, {}

    def __init__(self, split="train"):
        pass

    def __len__(self):
        return 4

    def meta(self, index):
        from hetmesh.graph.sample import SampleMeta

        return SampleMeta(f"s{index}", 6, (), ((4, 6),))

    def load(self, index, kinds=None):
        from hetmesh.data.source import Sample

        return Sample(f"s{index}", torch.tensor([1, 2, 3, 4, 5, 6 if index == 3 else 5]))


@pytest.mark.parametrize(("seq_len", "right"), [(6, [True, True, True, False]), (5, [False] * 4), (3, None)])
def test_an_answer_that_was_cut_is_not_right(job, tmp_path, seq_len, right):
    path = tmp_path / "recipe.toml"
    path.write_text(f"""
        [modules.llm]
        model = "{__name__}:AlwaysFive"
        [data]
        source = "{__name__}:Fives"
        [training]
        local_batch_size = 2
        seq_len = {seq_len}
    """)
    if right is None:
        with pytest.raises(SampleError, match="no held-out sample has a target token: samples 's0', 's1'"):
            evaluate(job(load_recipe(path)), Fives())
        return
    evaluation = evaluate(job(load_recipe(path)), Fives())
    assert evaluation.right.tolist() == right
    assert evaluation.accuracy == sum(right) / 4
    assert evaluation.predicted.tolist() == [[5] * max(0, seq_len - 4)] * 4


def test_accuracy_by_kind():
    kinds = ("read", "add", "read", "read")
    evaluation = Evaluation(
        1.0, torch.tensor([True, True, False, False]), torch.zeros(4, 1), torch.ones(4).bool(), kinds
    )
    assert evaluation.accuracy == 0.5
    assert evaluation.accuracy_by_kind == {"add": 1.0, "read": pytest.approx(1 / 3)}


def test_all_kinds_of_questions_are_shown_and_fit_a_terminal():
    source = DigitsSource("validation")
    kinds = tuple(source.kind(i) for i in range(60))
    predicted = torch.full((60, 7), -1)
    predicted[:, :2] = source.load(0).tokens[-2:]
    right = torch.arange(60) % 2 == 0
    shown = show(source, Evaluation(1.0, right, predicted, torch.ones_like(right), kinds))
    assert len(shown) == 5
    assert len(set(shown)) == 5
    questions = [text.splitlines()[-2] for text in shown]
    assert [question.split()[1] for question in questions[:3]] != [kinds[0]] * 3
    assert {question.split()[1] for question in questions} == set(kinds) == {"read", "sum", "add"}
    for text in shown:
        *picture, question, answer, end = text.split("\n")
        assert end == ""
        assert len(picture) == (0 if "add" in question else 8)
        assert all(len(line) <= 80 for line in picture)
        assert answer.startswith("A: ")
        assert answer.endswith(")")
    first = next(i for i in range(60) if kinds[i] == kinds[0])
    guess = source.decode(predicted[first, :2].tolist())
    assert shown[0].split("\n")[-2] == f"A: {guess}   (right)"


def test_sources_without_questions_have_nothing_to_show():
    assert show(held_out(), Evaluation(1.0, torch.tensor([True]), torch.zeros(1, 1), torch.tensor([True]), ())) == []
