"""Digits that a run draws: on any layout those of one process; a drawing is no question, nor without a target."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import tomli
import torch
from PIL import Image

from hetmesh.boundary import World, init
from hetmesh.checkpoint.checkpointer import Checkpointer
from hetmesh.checkpoint.saved_run import SavedRun
from hetmesh.cli import generate
from hetmesh.data.digits import DigitsSource, images_of
from hetmesh.errors import UsageError
from hetmesh.inference.drawn import drawn_item, write_image
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.records.reporter import Reporter
from hetmesh.resolve.resolved import resolve
from hetmesh.training.drawing import draw_items, drawers
from hetmesh.training.evaluate import evaluate
from hetmesh.training.job import Job
from hetmesh.training.one_process import OneProcess
from hetmesh.training.validation import RunValidation, free_running
from support.often import some

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_draw.toml"
HELD_OUT = 11  # no multiple of the batch size


def small(draw=0.5, **parallelism):
    """The recipe with tiny modules, in float64."""
    tables = tomli.loads(RECIPE.read_text()) | {"parallelism": parallelism}
    for name, width, heads in (("vision", 8, 2), ("llm", 16, 4), ("drawer", 8, 2)):
        sizes = {"hidden_size": width, "intermediate_size": width, "num_attention_heads": heads, "num_hidden_layers": 2}
        tables["modules"][name]["config"] |= sizes
    tables["modules"]["drawer"]["config"]["sampling_steps"] = 3
    tables["modules"]["llm"]["config"] |= {"head_dim": 4}
    tables["training"] |= {"dtype": "float64", "local_batch_size": 4}
    tables["data"]["options"]["draw"] = draw
    tables["validation"] = {"samples": HELD_OUT}
    tables["checkpoint"] = {"enable": False}
    return parse_recipe(tables)


def held_out(draw=0.5):
    return DigitsSource("validation", draw=draw)


LAYOUTS = {
    "tensor parallel, then data parallel": {
        "llm": {"ranks": [0, 1], "tensor_parallel_degree": 2},
        "drawer": {"ranks": [2, 3], "data_parallel_replicate_degree": 2},
    },
    "sharded, then a pipeline that overlaps": {
        "llm": {"ranks": [0, 1], "data_parallel_shard_degree": 2},
        "drawer": {"ranks": [1, 2], "pipeline_parallel_degree": 2},
    },
    "a pipeline, then tensor parallel on the same ranks": {
        "llm": {"ranks": [0, 1], "pipeline_parallel_degree": 2},
        "drawer": {"ranks": [0, 1], "tensor_parallel_degree": 2},
    },
}


def drawings(rank, recipe, folder):
    world = World.current()
    job = Job.assemble(resolve(recipe), world)
    Checkpointer(world, folder).save(0, job.root, None, {})
    assert drawers(job) == ["drawer"]
    return draw_items(job, held_out(), "drawer", HELD_OUT)


@pytest.mark.slow
@pytest.mark.parametrize("layout", some([*LAYOUTS][1:], LAYOUTS))
def test_every_layout_draws_what_one_process_draws(pool4, tmp_path, layout):
    recipe = small(**LAYOUTS[layout])
    found = pool4.run(drawings, recipe, tmp_path, timeout=120)
    source = held_out()
    assert list(found[0]) == [i for i in range(HELD_OUT) if source.kind(i) == "draw"]
    model = OneProcess.load(recipe, SavedRun(recipe, tmp_path / "step-0"))
    for index, (item,) in found[0].items():
        assert all(torch.equal(each[index][0], item) for each in found)
        alone = drawn_item(model, source, index)
        assert item.shape == (1, 8, 8)
        assert torch.allclose(item, alone, rtol=0, atol=1e-10)
        assert not torch.allclose(item, drawn_item(model, source, index, seed=1), atol=0.1)


@pytest.fixture
def job():
    world = init(device="cpu")
    yield Job.assemble(resolve(small()), world)
    world.close()


def test_a_drawing_counts_as_no_question(job):
    source = held_out()
    found, questions = evaluate(job, source, HELD_OUT), [source.kind(i) != "draw" for i in range(HELD_OUT)]
    assert found.asked.tolist() == questions
    assert set(found.losses) == {"llm", "drawer"}
    assert found.accuracy == float(found.right.sum()) / sum(questions)
    assert "draw" not in found.accuracy_by_kind
    free = free_running(job, source, HELD_OUT, 2, source.end_ids)
    assert list(free.asked) == questions
    assert all(bool(answer) == asked for answer, asked in zip(free.answers, questions, strict=True))
    assert free.unended <= sum(questions)


def test_nor_has_it_nothing_to_learn(job):
    planned = job.training_step.draw()
    assert 0 in planned.drawn.metas.num_targets
    assert planned.without_target == []


class Summary(Reporter):
    """What an evaluation reports."""

    def __init__(self):
        self.scores = {}

    def evaluation(self, step, scores, *_, **__):
        self.scores = dict(scores)


@pytest.mark.parametrize("draw", [0.5, 1.0])
def test_drawings_are_judged_on_what_was_drawn(job, monkeypatch, draw):
    """Here on images that are of the digit, or are not."""
    source, reporter = held_out(draw), Summary()
    drawn = [i for i in range(HELD_OUT) if source.kind(i) == "draw"]
    right = {i: source.load(i).media["image_out"][0][None] for i in drawn}
    wrong = next(i for i in drawn if source.question(i) != source.question(drawn[0]))
    monkeypatch.setattr("hetmesh.training.validation.draw_items", lambda *_: {**right, drawn[0]: right[wrong]})
    validation = RunValidation(job, source, reporter)
    validation.run(1)
    summary = validation.summary()
    assert summary["drawn_accuracy"] == reporter.scores["drawn_accuracy"] == (len(drawn) - 1) / len(drawn)
    assert summary["drawn"] == len(drawn)
    assert summary.get("questions", 0) == HELD_OUT - len(drawn)
    assert ("answer_accuracy" in summary) == ("answer_accuracy" in reporter.scores) == (draw < 1)


def test_no_held_out_digit_is_ever_a_target_of_training():
    source = DigitsSource("train", draw=1.0)
    assert not {source.ask(i).drawn[0] for i in range(5000)} & set(images_of("validation"))


@pytest.fixture
def saved(job, tmp_path):
    Checkpointer(job.world, tmp_path).save(0, job.root, None, {})
    return OneProcess.load(job.recipe, SavedRun(job.recipe, tmp_path / "step-0"))


def asked(question, out, sample=None):
    keys = {"media": None, "max_new_tokens": 3, "temperature": 0.0, "seed": 0}
    return Namespace(question=question, out=out, sample=sample, **keys)


def test_an_image_is_written_and_read_back(saved, tmp_path):
    path = tmp_path / "seven.png"
    assert list(generate._asked(saved, asked("draw a seven", path))) == [f"written to {path}"]
    first = np.asarray(Image.open(path))
    assert first.shape == (8, 8)
    source, index = held_out(), next(i for i in range(HELD_OUT) if held_out().question(i) == "draw a seven=")
    assert list(generate._held_out(saved, asked(None, path, index))) == [f"written to {path}"]
    assert not np.array_equal(first, np.asarray(Image.open(path)))  # of another noise
    item = drawn_item(saved, source, index)
    levels = torch.from_numpy(np.asarray(Image.open(path)).copy())
    assert torch.allclose(levels / 127.5 - 1, item[0].clamp(-1, 1).float(), atol=1 / 255 + 1e-6)
    write_image(torch.tensor([1.0, 0, -1])[:, None, None].expand(3, 2, 4), path)
    assert np.asarray(Image.open(path))[0, 0].tolist() == [255, 128, 0]


def test_an_image_where_none_is_made_is_an_error(saved, tmp_path, monkeypatch):
    path = tmp_path / "seven.png"
    with pytest.raises(
        UsageError, match=r"the answer to 'draw a seven' is an image; say where to write it: --out FILE"
    ):
        list(generate._asked(saved, asked("draw a seven", None)))
    index = next(i for i in range(HELD_OUT) if held_out().question(i) == "draw a seven=")
    with pytest.raises(UsageError, match=rf"the answer of sample {index} is an image; say where to write it: --out"):
        list(generate._held_out(saved, asked(None, None, index)))
    with pytest.raises(UsageError, match=r"--out: the question asks for none of what the model makes \(image_out\)"):
        list(generate._asked(saved, asked("add 3+4", path)))
    with pytest.raises(UsageError, match=r"--out .*seven.xyz: unknown file extension"):
        list(generate._asked(saved, asked("draw a seven", path.with_suffix(".xyz"))))
    with pytest.raises(UsageError, match=r"a tensor of shape \(2, 3\); what is written is an image"):
        write_image(torch.zeros(2, 3), path)
    monkeypatch.setattr("hetmesh.inference.drawn.generators", lambda _: {})
    with pytest.raises(UsageError, match=r"--out: no module of vision, projector, llm, drawer makes media"):
        list(generate._asked(saved, asked("draw a seven", path)))
