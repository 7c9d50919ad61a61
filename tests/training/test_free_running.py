"""Answers that a run gives by itself: on any layout those of one process, and right where teacher forcing is."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetmesh.boundary import World
from hetmesh.checkpoint.checkpointer import Checkpointer
from hetmesh.checkpoint.saved_run import SavedRun
from hetmesh.data.digits import DigitsSource
from hetmesh.errors import RecipeError, SampleError
from hetmesh.inference.generate import answer_tokens
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.resolve.samples import held_out_source
from hetmesh.testing.sources import RandomMedia
from hetmesh.training.evaluate import evaluate
from hetmesh.training.job import Job
from hetmesh.training.one_process import OneProcess
from hetmesh.training.validation import free_running
from support.often import some

RECIPES = Path(__file__).parents[2] / "recipes"
SAMPLES = 30
LONGEST = 48  # tokens of a sequence


def small(name, *more):
    local = {"digits_colocated": "4", "digits_cp_pp": "16"}.get(name, "8")
    keys = ("--training.dtype", "float64", "--training.local_batch_size", local, "--training.seq_len", str(LONGEST))
    media = ("--data.source", "hetmesh.testing.sources:RandomMedia", "--data.options.kinds", "{image = [1, 8, 8]}")
    return load_recipe(RECIPES / f"{name}.toml", (*keys, *media, *more))


def held_out():
    return RandomMedia({"image": (1, 8, 8)}, length=SAMPLES, seed=1)


def answers(rank, recipe, folder):
    """By itself: as many tokens as the data have, and up to an end token or six; and by teacher forcing."""
    world = World.current()
    job = Job.assemble(resolve(recipe), world)
    Checkpointer(world, folder).save(0, job.root, None, {})
    as_long = free_running(job, held_out(), SAMPLES, 6, ())
    ended = free_running(job, held_out(), 5, 6, {3, 9})
    silent = tuple(held_out().placeholders.values())  # which no answer has
    return as_long, ended, evaluate(job, held_out(), silent=silent).right.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", some(("digits_cp_pp",), ("digits_colocated", "digits_cp_pp")))
def test_every_layout_answers_as_one_process_does_and_right_where_teacher_forcing_is(pool4, tmp_path, name):
    recipe = small(name)
    found = pool4.run(answers, recipe, tmp_path, timeout=120)
    as_long, ended, right = found[0]
    assert all(each == found[0] for each in found)
    assert 0 < sum(right) < SAMPLES  # one or two tokens to guess among twelve
    assert list(as_long.right) == right

    model = OneProcess.load(recipe, SavedRun(recipe, tmp_path / "step-0"))
    for index in range(5):
        alone = answer_tokens(model, held_out(), index, max_tokens=6, ends={3, 9})
        assert list(ended.answers[index]) == list(alone)
    unended = sum(len(answer) == 6 and answer[-1] not in (3, 9) for answer in ended.answers)
    assert ended.unended == unended


def test_more_questions_than_there_are_held_out_are_refused():
    keys = ("--validation.free_running", "999")
    with pytest.raises(RecipeError, match=r"validation.free_running = 999: the validation split has 384 samples"):
        held_out_source(load_recipe(RECIPES / "digits.toml", keys))
    assert isinstance(held_out_source(load_recipe(RECIPES / "digits.toml")), DigitsSource)


class Broken(RandomMedia):
    """The metadata of two samples cannot be read by rank `rank`."""

    def __init__(self, rank):
        super().__init__({"image": (1, 8, 8)}, length=SAMPLES, seed=1)
        self.rank = rank

    def meta(self, index):
        meta = super().meta(index)
        if index in (1, 4) and World.current().rank == self.rank:
            raise SampleError(f"sample {meta.id!r}: its header is broken")
        return meta


def answered(rank, recipe, bad_rank):
    job = Job.assemble(resolve(recipe), World.current())
    return [free_running(job, source, 6, 3, ends) for source in (held_out(), Broken(bad_rank)) for ends in ((), {3, 9})]


def test_held_out_samples_that_cannot_be_read_count_as_wrong_or_end_the_run(world):
    keys = ("--data.on_bad_sample", "skip")
    found = answered(0, small("digits_single", *keys), bad_rank=0)
    for whole, broken in zip(found[:2], found[2:], strict=True):
        assert [a for i, a in enumerate(whole.answers) if i not in (1, 4)] == [a for a in broken.answers if a]
        assert broken.answers[1] == broken.answers[4] == ()
        assert broken.right[1] is broken.right[4] is False
        assert broken.unended >= 2
    with pytest.raises(SampleError, match="its header is broken"):
        answered(0, small("digits_single"), bad_rank=0)


@pytest.mark.slow
def test_what_one_rank_cannot_read_is_wrong_for_all(pool4):
    found = pool4.run(answered, small("digits", "--data.on_bad_sample", "skip"), 1, timeout=120)
    assert all(each == found[0] for each in found)
    assert found[0][2].answers[1] == found[0][2].answers[4] == () != found[0][2].answers[0]
