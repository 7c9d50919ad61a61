"""Answers token by token: those of transformers' own greedy generate, from prompts that training would make."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from hetmesh.cli import generate
from hetmesh.data.answers import Continued, answer_start, end_tokens
from hetmesh.data.digits import DigitsSource, data_set, read_digit
from hetmesh.data.source import PromptSource
from hetmesh.errors import SampleError, UsageError
from hetmesh.graph import MediaItem, SampleMeta
from hetmesh.inference.generate import answer_tokens
from hetmesh.models.split.rope_index import media_tokens
from hetmesh.models.split.whole_forward import load_whole
from hetmesh.models.split.whole_model import whole_model
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.resolve.directories import directory_of
from hetmesh.resolve.refusals import check_recipe
from hetmesh.testing.sources import RandomMedia
from hetmesh.training.one_process import OneProcess, on_one_rank
from support import tiny_vlms
from support.often import some

RECIPES = tiny_vlms.Path(__file__).parents[2] / "recipes"
LONG = 9


def by_transformers(model, index):
    """The answer of transformers' generate to what comes before a sample's targets, and the logits of its tokens."""
    whole = whole_model(directory_of(model.resolved.recipe))
    reference = load_whole(whole).eval()
    loader = model.loader(Continued(model.resolved.source, [index], [[]]))
    drawn = loader.batch(0)
    (sample,), meta = loader.load(drawn), drawn[0].meta
    arguments = dict(sample.units.get("image", {}))
    if items := sample.media.get("image", ()):
        arguments["pixel_values"] = torch.stack(list(items))
    kinds = media_tokens(meta)[:, :-1]
    if any("grid_thw" in name for name in arguments):
        arguments["mm_token_type_ids"] = kinds
    if whole.family.mask == "bidirectional_runs":
        arguments["token_type_ids"] = kinds
    ids = sample.tokens[None, :-1]  # without the place of the next token
    out = reference.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=LONG,
        eos_token_id=-1,
        suppress_tokens=[tiny_vlms.IMAGE],
        output_logits=True,
        return_dict_in_generate=True,
        **arguments,
    )
    return out.sequences[0, ids.shape[1] :].tolist(), torch.cat(out.logits)


ASKED = ("llava", "qwen3_vl", "gemma3", "paligemma", "mistral3", "qwen2_5_vl")


@pytest.mark.slow
@pytest.mark.parametrize("name", some(("llava", "qwen2_5_vl"), ASKED))
def test_greedy_answers_are_those_of_transformers_generate(tmp_path, name):
    given = parse_recipe(tiny_vlms.recipe_text(tiny_vlms.save(name, tmp_path)).replace("float64", "float32"))
    model = OneProcess.load(given)
    samples = [model.resolved.source.meta(i) for i in range(40)]
    several = next(i for i, meta in enumerate(samples) if meta.num_items("image") > 1)
    without = next(i for i, meta in enumerate(samples) if not meta.media)
    for index in (several, without):
        answer = list(answer_tokens(model, model.resolved.source, index, max_tokens=LONG))
        theirs, logits = by_transformers(model, index)
        assert answer == theirs
        # Untrained models repeat themselves, so tokens alone say little.
        ours = [model.logits(Continued(model.resolved.source, [index], [answer[:i]]))[-1] for i in range(LONG)]
        assert torch.allclose(torch.stack(ours), logits, rtol=1e-4, atol=1e-4)
        if (cache := model.cache()) is not None:
            rows: dict = {}
            kept = [
                model.logits(Continued(model.resolved.source, [index], [answer[:i]]), rows, cache)[-1]
                for i in range(LONG)
            ]
            assert torch.allclose(torch.stack(kept), torch.stack(ours), rtol=1e-4, atol=1e-4)
    assert (model.cache() is None) == (name in ("gemma3", "paligemma"))


def test_a_continued_sample_is_cut_at_its_last_answer():
    source = RandomMedia({"image": (1, 8, 8)}, length=20)
    index = next(i for i in range(20) if source.meta(i).media and source.meta(i).targets)
    given = source.meta(index)
    start = answer_start(given)
    longer = Continued(source, [index], [[3, 4]])
    meta, sample = longer.meta(0), longer.load(0)
    assert (meta.tokens, meta.targets[-1]) == (start + 3, (start, start + 3))
    assert sample.tokens.tolist() == [*source.load(index).tokens[:start].tolist(), 3, 4, source.pad_id]
    assert [len(items) for items in sample.media.values()] == [meta.num_items("image")]


def test_a_run_with_a_schedule_of_its_own_length_can_be_asked():
    """[training] is another one then, and its steps are the recipe's."""
    keys = ("--training.steps", "5", "--lr_scheduler.total_steps", "9", "--training.pack_samples", "true")
    alone = on_one_rank(load_recipe(RECIPES / "digits_single.toml", keys))
    check_recipe(alone)
    assert (alone.training.local_batch_size, alone.training.pack_samples) == (1, False)


@pytest.mark.slow
def test_temperature_draws_by_seed_and_an_end_token_ends_the_answer(tmp_path):
    given = parse_recipe(tiny_vlms.recipe_text(tiny_vlms.save("llava", tmp_path)))
    model = OneProcess.load(given)
    draw = lambda seed: list(answer_tokens(model, model.resolved.source, 0, max_tokens=6, temperature=2.0, seed=seed))  # noqa: E731
    assert draw(1) == draw(1) != draw(2)
    greedy = list(answer_tokens(model, model.resolved.source, 0, max_tokens=6))
    assert (
        list(answer_tokens(model, model.resolved.source, 0, max_tokens=6, ends={greedy[1]}))
        == greedy[: greedy.index(greedy[1]) + 1]
    )
    (tmp_path / "llava" / "generation_config.json").write_text('{"eos_token_id": [42, 7]}')
    assert end_tokens(model.resolved.source, model.resolved.recipe) == {42, 7}


def test_a_digit_from_a_file_is_that_of_the_source(tmp_path):
    source = DigitsSource("validation")
    assert isinstance(source, PromptSource)
    pixels = data_set()[0][5]
    paper = 255 - pixels.repeat(4, 0).repeat(4, 1) * 15  # black on white, four times as large
    Image.fromarray(paper.astype(np.uint8)).save(tmp_path / "five.png")
    small = read_digit(tmp_path / "five.png")
    assert torch.allclose(small, torch.from_numpy(pixels / pixels.max() * 2 - 1)[None].float(), atol=1e-5)

    meta, sample = source.prompt("read", [("image", tmp_path / "five.png")] * 2)
    asked = next(i for i in range(384) if source.question(i) == "read <image><image>=")
    like = source.meta(asked)
    assert sample.tokens.tolist() == source.load(asked).tokens[: answer_start(like)].tolist()
    assert meta == SampleMeta("question", answer_start(like), like.media)
    assert like.media[0] == MediaItem("image", (1, 8, 8), 5)
    Image.new("L", (8, 8), 30).save(tmp_path / "blank.png")
    (tmp_path / "none.png").write_text("no image")
    for file, says in (("blank.png", "has one colour"), ("none.png", "cannot be read as an image")):
        with pytest.raises(SampleError, match=says):
            read_digit(tmp_path / file)
    with pytest.raises(SampleError, match="2 places for images, given are 1"):
        source.prompt("sum <image><image>", [("image", tmp_path / "five.png")])
    with pytest.raises(SampleError, match=r"digits: 'sum' is about images, and none is given: --image FILE"):
        source.prompt("sum", [])


def test_an_empty_answer_to_a_question_without_its_image_is_an_error(monkeypatch):
    asked = Namespace(question="add 1+1", media=None, out=None)
    model = SimpleNamespace(resolved=SimpleNamespace(source=DigitsSource("validation", draw=0.5), recipe=None))
    monkeypatch.setattr(generate, "_tokens", lambda *_: model.resolved.source.end_ids)
    with pytest.raises(UsageError, match=r"the answer to 'add 1\+1' is empty; .*: --image FILE$"):
        list(generate._asked(model, asked))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in tiny_vlms.MODELS if name not in ("paligemma2", "qwen2_audio")])
def test_keys_and_values_that_are_kept_change_nothing_in_any_family(tmp_path, name):
    model = OneProcess.load(parse_recipe(tiny_vlms.recipe_text(tiny_vlms.save(name, tmp_path))))
    index = next(i for i in range(50) if model.resolved.source.meta(i).num_items("image") > 1)
    answer = list(answer_tokens(model, model.resolved.source, index, max_tokens=20))
    rows: dict = {}
    if (cache := model.cache()) is None:
        assert name in ("gemma3", "paligemma", "qwen3_5")
        return
    for i in range(20):
        source = Continued(model.resolved.source, [index], [answer[:i]])
        kept, again = model.logits(source, rows, cache)[-1], model.logits(source)[-1]
        assert torch.allclose(kept, again, rtol=0, atol=1e-12)
