"""Conversations whose assistant draws and moves train in layouts as in one process, and in whole runs."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hetmesh.data.payload_workers import InWorkers
from hetmesh.data.payloads import Payloads, Wanted
from hetmesh.data.recipe_sources import split_sources
from hetmesh.errors import RecipeError, SampleError
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing import parity
from hetmesh.verify.processor_check import by_transformers
from support import tiny_vlms
from support.made_media import MADE, VECTOR, add_tokens

pytestmark = pytest.mark.slow

RECIPE = """
[model]
hf_path = "{model}"
[modules.drawer]
model = "flow"
config = {{ queries = 3, hidden_size = 8, num_hidden_layers = 2, num_attention_heads = 2, patch_size = 4 }}
loss = {{ kind = "flow_matching", weight = 0.5 }}
[modules.mover]
model = "mlp"
config = {{ out_features = 3 }}
loss = {{ kind = "mse", weight = 0.3 }}
[[boundaries]]
from = "vision"
to = "llm"
at = "image"
[[boundaries]]
from = "llm"
to = "drawer"
at = "image_out"
{moves}
[data.options]
path = "{data}"
generated = {{ image_out = {image}, tensor_out = {tensor} }}
[training]
dtype = "float64"
global_batch_size = 8
local_batch_size = 4
steps = 2
"""
MOVES = '[[boundaries]]\nfrom = "llm"\nto = "mover"\nat = "tensor_out"'
LAYOUT = """
[parallelism.llm]
ranks = [0]
pipeline_parallel_microbatch_size = 2
[parallelism.vision]
ranks = [1]
[parallelism.drawer]
ranks = [0, 1]
[parallelism.mover]
ranks = [1]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("made")
    tiny_vlms.save("qwen2_5_vl", path).rename(path / "model")
    add_tokens(path / "model")
    draw = np.random.default_rng(0)
    lines = []
    for i in range(8):
        size = (40 + 8 * i, 64, 3)
        Image.fromarray(draw.integers(0, 255, size, dtype=np.uint8)).save(path / f"{i}.png")
        np.save(path / f"{i}.npy", draw.normal(size=(2, 3)))
        seen = [{"type": "image", "image": f"{i}.png"}] * (i % 2)
        asked = [*seen, {"type": "text", "text": f"number {i}?"}]
        drawn = [{"type": "image", "image": f"{(i + 1) % 8}.png"}] * (i % 3)
        moved = [{"type": "tensor", "tensor": f"{i}.npy"}] * (i % 4 == 1)
        said = [{"type": "text", "text": "so "}, *drawn, *moved, {"type": "text", "text": "it is" + "." * i}]
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        lines.append(json.dumps({"id": str(i), "messages": turns}))
    (path / "data.jsonl").write_text("\n".join(lines))
    return path


def text(folder: Path, more: str = "", image: str = "[3, 8, 8]", tensor: str = "[2, 3]") -> str:
    tables = [f"{{ token = '{token}', shape = {shape} }}" for token, shape in ((MADE, image), (VECTOR, tensor))]
    data = folder / "data.jsonl"
    return RECIPE.format(model=folder / "model", data=data, image=tables[0], tensor=tables[1], moves=MOVES) + more


@pytest.mark.parametrize(
    "more",
    [pytest.param("", marks=pytest.mark.exhaustive), "pack_samples = true\n", "seq_len = 49\n"],
    ids=["padded", "packed", "cut"],
)
def test_what_an_assistant_makes_equals_one_process(pool, folder, more):
    if more and tomllib.loads(more).get("seq_len"):
        resolved = resolve(parse_recipe(text(folder, more)))
        given = [resolved.source.meta(i) for i in range(8)]
        left = resolved.loader().batch(0).metas
        assert 0 < sum(m.num_items("image_out") for m in left) < sum(m.num_items("image_out") for m in given)
    parity.check(pool(2), parse_recipe(text(folder, more + LAYOUT)), 2)


def test_texts_and_what_is_read_are_those_of_transformers_own_processor(folder):
    source = resolve(parse_recipe(text(folder))).source
    for index in range(8):
        made, sample = by_transformers(source, source.preparation, index), source.load(index)
        assert sample.tokens.tolist() == made["input_ids"][0].tolist()
        for key, values in sample.units.get("image", {}).items():
            assert torch.equal(values, made[key])


def test_worker_processes_load_what_is_made(folder):
    sources = split_sources(parse_recipe(text(folder)).data)
    wanted = [Wanted("train", index, ("image_out", "tensor_out")) for index in range(8)]
    here = Payloads(sources).get(wanted)
    with InWorkers(split_sources(parse_recipe(text(folder)).data), 1) as workers:
        there = workers.get(wanted)
    assert sum(len(sample.media.get("image_out", ())) for sample in here) > 4
    for a, b in zip(here, there, strict=True):
        assert a.media.keys() == b.media.keys()
        assert all(torch.equal(x, y) for kind in a.media for x, y in zip(a.media[kind], b.media[kind], strict=True))


def test_a_shape_that_the_generator_cannot_make_is_refused(folder):
    with pytest.raises(RecipeError, match="drawer"):
        resolve(parse_recipe(text(folder, image="[3, 9, 8]")))
    with pytest.raises((RecipeError, SampleError), match="tensor_out"):
        resolve(parse_recipe(text(folder, tensor="[2, 4]")))


def test_what_nobody_makes_is_refused(folder):
    mover, drawer = text(folder).split("[modules.mover]"), '[[boundaries]]\nfrom = "vision"'
    alone = mover[0] + mover[1][mover[1].index(drawer) :].replace(MOVES, "")
    with pytest.raises(
        SampleError, match=r"no module reads media of kind 'tensor_out'; kinds that are read: .'image', 'i"
    ):
        resolve(parse_recipe(alone)).loader().batch(0)
