"""U14: samples without a target are named and counted; a batch, or a validation split, of nothing else is an error."""

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hetmesh.cli import main
from hetmesh.errors import RecipeError, SampleError
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.resolve.samples import held_out_source
from hetmesh.testing.sources import RandomMedia
from hetmesh.training.evaluate import evaluate
from hetmesh.training.job import Job
from hetmesh.training.trainer import Trainer

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_single.toml"
SOURCE = ("--data.source", "hetmesh.testing.sources:RandomMedia", "--data.options.kinds", "{image = [1, 8, 8]}")


@pytest.fixture
def text(tmp_path):
    """The recipe without [validation]."""
    path = tmp_path / "recipe.toml"
    whole = RECIPE.read_text()
    start = whole.index("[validation]")
    path.write_text(whole[:start] + whole[whole.index("[metrics]", start) :])
    return path


def small(text, *overrides):
    keys = ("--training.local_batch_size", "6", "--training.steps", "2", "--metrics.enable_tensorboard", "false")
    return load_recipe(text, (*keys, "--job.dump_folder", str(text.parent / "run"), *SOURCE, *overrides))


@pytest.mark.slow
def test_samples_without_a_target_are_named_once_and_counted(world, text, capsys):
    Trainer(resolve(small(text, "--data.options.without_targets", "0.5")), world).run()
    lines = [json.loads(line) for line in (text.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    counts = [line["samples_without_target"] for line in lines if "loss" in line]
    assert all(0 < count < 6 for count in counts)
    out = capsys.readouterr().out
    assert f"step 1: {counts[0]} of 6 samples add nothing to the loss: sample" in out
    assert "'random-0-" in out
    assert out.count("add nothing to the loss") == 1
    more = ("--data.options.without_targets", "0.5", "--data.on_no_target", "stop", "--job.dump_folder", f"{text}-2")
    with pytest.raises(
        SampleError, match=r"step 1: . of 6 samples add nothing to the loss: .*on_no_target = \"count\""
    ):
        Trainer(resolve(small(text, *more)), world).run()


@pytest.mark.slow
def test_a_batch_without_any_target_is_an_error_that_names_samples(world, text):
    trainer = Trainer(resolve(small(text, "--data.options.without_targets", "1.0")), world)
    before = [p.clone() for p in trainer.job.parameters()]
    message = (
        r"step 1: no sample of the global batch has a target token: samples 'random-0-\d+', .* and 3 more \(the data"
    )
    with pytest.raises(SampleError, match=message):
        trainer.run()
    assert all((a == b).all() for a, b in zip(before, trainer.job.parameters(), strict=True))


@pytest.mark.slow
def test_targets_that_seq_len_cuts_are_told_with_the_key(world, text):
    source = ("--data.options.max_text", "30", "--data.options.text_only", "1.0", "--training.seq_len", "1")
    with pytest.raises(SampleError, match=r"\(training\.seq_len = 1 cuts the targets of 6\)"):
        Trainer(resolve(small(text, *source)), world).run()


class LongAnswers(RandomMedia):
    """The same, and all but the first token are the answer."""

    def meta(self, index):
        meta = super().meta(index)
        return replace(meta, targets=((1, meta.tokens),))


@pytest.mark.slow
def test_answers_that_seq_len_cuts_in_part_are_told_once(world, text, capsys):
    keys = ("--data.options.text_only", "1.0", "--data.options.max_text", "30", "--training.seq_len", "9")
    Trainer(resolve(small(text, *keys, "--data.source", "test_no_targets:LongAnswers")), world).run()
    out = capsys.readouterr().out
    assert re.search(r"step 1: training\.seq_len = 9 cuts [2-6] of 6 samples by \d+ tokens: samples 'random-0-", out)
    assert out.count(" lose the end of an answer; from here on only counted") == 1


@pytest.mark.slow
def test_an_evaluation_without_any_target_is_an_error(world, text):
    trainer = Trainer(resolve(small(text)), world)
    trainer.reporter.close()
    with pytest.raises(SampleError, match="evaluation: no held-out sample has a target token: samples 'random-0-0', "):
        evaluate(trainer.job, RandomMedia({"image": (1, 8, 8)}, length=5, without_targets=1.0))


class Unreadable(RandomMedia):
    """Samples from `first` on have no metadata; none of the others has a target."""

    def __init__(self, *args, first=0, **options):
        super().__init__(*args, without_targets=1.0, **options)
        self.first = first

    def meta(self, index):
        meta = super().meta(index)
        if index >= self.first:
            raise SampleError(f"sample {meta.id!r}: its header is broken.")
        return meta


def test_a_step_or_an_evaluation_of_which_nothing_can_be_read_says_so_and_what_to_do(world, text):
    recipe = small(text, "--data.source", "test_no_targets:Unreadable", "--data.on_bad_sample", "skip")
    named = r"(sample 'random-\d+-\d+': its header is broken; ){3}and \d more; fix or remove such samples"
    message = f"step 1: no sample of the global batch can be read: {named}, or take a larger batch: "
    with pytest.raises(SampleError, match=message + r"training\.global_batch_size is 6$"):
        Trainer(resolve(recipe), world).run()
    job = Job.assemble(resolve(recipe), world)
    with pytest.raises(SampleError, match=message), contextlib.closing(job.upcoming):
        job.forward_backward()
    with pytest.raises(SampleError, match=f"^evaluation: no held-out sample can be read: {named}$"):
        evaluate(job, Unreadable({"image": (1, 8, 8)}, length=8))
    told = r"has a target token: samples .* and 3 more \(the data source gives them none\); nor have the other 1; 2 "
    told += r"cannot be read, the first: sample 'random-\d-7': its header is broken\."
    with pytest.raises(SampleError, match=told):
        evaluate(job, Unreadable({"image": (1, 8, 8)}, length=9, first=7))


@pytest.mark.parametrize("key", [("--validation.freq", "2"), ("--validation.samples", "2")])
def test_validation_without_a_validation_split_is_refused(text, capsys, key):
    message = r"validation\.\w+ = 2: the data source has no validation split \(.*split.*\); give it one, or leave"
    with pytest.raises(RecipeError, match=message):
        held_out_source(small(text, *key))
    assert main(["check", str(text), *SOURCE, *key]) == 2
    assert "has no validation split" in capsys.readouterr().err
    assert held_out_source(small(text)) is None  # nobody asked
    assert main(["check", str(text), *SOURCE]) == 0
    assert held_out_source(small(text, *key, "--validation.enable", "false")) is None


def test_u14_what_seq_len_cuts_is_counted_in_whole_media_items(text, world):
    keys = ("--data.options.max_items", "5", "--data.options.text_only", "0.0", "--training.seq_len", "12")
    recipe = small(text, *keys, "--training.steps", "1")
    trainer = Trainer(resolve(recipe), world)
    given = [
        RandomMedia({"image": (1, 8, 8)}, max_items=5, text_only=0.0).meta(i) for i in trainer.job.loader.indices(0)
    ]
    metrics = trainer.train_step()
    trainer.reporter.close()
    rows = 4  # of an 8x8 image
    kept = dropped = 0
    for meta in given:
        ends = [item.position + rows + (rows - 1) * i for i, item in enumerate(meta.media)]
        kept += sum(end <= 12 for end in ends)
        dropped += sum(end > 12 for end in ends)
    assert dropped > 0 < kept
    assert metrics.media_dropped == metrics.record()["media_dropped"] == dropped
    assert metrics.tokens_dropped == metrics.record()["tokens_dropped"] > dropped * rows
