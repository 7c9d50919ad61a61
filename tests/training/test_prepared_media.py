"""What a directory's own processor prepares, images of unlike sizes and videos, trains in layouts as transformers'
whole model does on what the processor makes of the messages."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hetmesh.data.payload_workers import InWorkers
from hetmesh.data.payloads import Payloads, Wanted
from hetmesh.data.recipe_sources import split_sources
from hetmesh.data.source import COSTS
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing import parity
from hetmesh.verify.processor_check import check_processor
from support import tiny_vlms
from support.media_files import write_video
from support.often import some
from support.whole_reference import whole_reference
from surveying.classes import image_text_classes
from surveying.tiny_processor import tiny_directory

pytestmark = pytest.mark.slow

IMAGES = ((64, 96), (150, 75), (90, 90))
FRAMES = (40, 20, 30)


def write_data(path: Path, asked, name: str = "data.jsonl", again: bool = True) -> None:
    """Conversations that ask about these files; `again`: every other one has a further question about an image."""
    draw = np.random.default_rng(0)
    for i, (height, width) in enumerate(IMAGES):
        Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(path / f"{i}.png")
    lines = []
    for i, files in enumerate(asked):
        parts = [{"type": kind, kind: file} for file in files for kind in ["video" if "mp4" in file else "image"]]
        turns = [("user", [*parts, {"type": "text", "text": f"what is {i}?"}]), ("assistant", f"it is {i}" + "." * i)]
        if again and i % 2:
            turns += [("user", [{"type": "image", "image": "2.png"}, {"type": "text", "text": "sure?"}])]
            turns += [("assistant", "yes")]
        lines.append(json.dumps({"id": str(i), "messages": [{"role": role, "content": said} for role, said in turns]}))
    (path / name).write_text("\n".join(lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prepared")
    tiny_vlms.save("qwen2_5_vl", path).rename(path / "model")
    for i, count in enumerate(FRAMES):
        write_video(path / f"{i}.mp4", count=count)
    asked = (["0.png", "0.mp4"], [], ["1.mp4"], ["1.png", "2.png"])
    write_data(path, (*asked, ["2.mp4", "0.png", "0.mp4"], [], ["2.png"], ["1.mp4"]))
    return path


def recipe(folder: Path, layout: str, modules: str = '[modules.vision]\nmedia = "image+video"', more: str = ""):
    return parse_recipe(recipe_text(folder, layout, modules, more))


def recipe_text(folder: Path, layout: str, modules: str, more: str = "") -> str:
    options = "processor_options = { fps = 2 }" if "video" in modules else ""
    return f"""
[model]
hf_path = "{folder / "model"}"
{modules}
[data.options]
path = "{folder / "data.jsonl"}"
{options}
[training]
dtype = "float64"
global_batch_size = 8
local_batch_size = 4
{more}
{layout}
"""


LAYOUTS = {
    "encoder DP 2 beside LLM TP 2": """
[parallelism.vision]
ranks = [0, 1]
[parallelism.llm]
ranks = [2, 3]
tensor_parallel_degree = 2
""",
    "encoder PP 2 beside LLM TP 2": """
[parallelism.vision]
ranks = [0, 1]
pipeline_parallel_degree = 2
[parallelism.llm]
ranks = [2, 3]
tensor_parallel_degree = 2
""",
    "encoder TP 2 under LLM CP 2 x TP 2": """
[parallelism.vision]
ranks = [0, 1]
tensor_parallel_degree = 2
[parallelism.llm]
ranks = [0, 1, 2, 3]
context_parallel_degree = 2
tensor_parallel_degree = 2
""",
    "encoder beside LLM FSDP 2": """
[parallelism.vision]
ranks = [0, 1]
[parallelism.llm]
ranks = [2, 3]
data_parallel_shard_degree = 2
""",
    "FSDP 4 under LLM PP 2 x CP 2": """
[parallelism.vision]
ranks = [0, 1, 2, 3]
data_parallel_shard_degree = 4
[parallelism.llm]
ranks = [0, 1, 2, 3]
pipeline_parallel_degree = 2
context_parallel_degree = 2
""",
}


VIDEOS = (
    "encoder DP 2 beside LLM TP 2",
    "FSDP 4 under LLM PP 2 x CP 2",
)


@pytest.mark.parametrize("layout", some(VIDEOS[1:], VIDEOS))
def test_images_and_videos_train_as_in_transformers(pool4, folder, layout):
    truth = whole_reference(recipe(folder, ""), 2, processed=True)
    assert (
        parity.compare(truth, pool4.run(parity.run_as, recipe(folder, LAYOUTS[layout]), 2, timeout=120), 1e-10) < 1e-10
    )


def test_a_global_batch_without_media_passes_the_stages_of_an_encoder(pool4, folder):
    """The second one has some."""
    write_data(folder, ([], [], ["0.png"], ["1.png", "2.png"]), "few.jsonl", again=False)
    keys = "--data.order=given", "--training.global_batch_size=2", "--training.local_batch_size=2"

    def given(layout: str):
        return parse_recipe(recipe_text(folder, layout, "").replace("data.jsonl", "few.jsonl"), keys)

    truth = parity.reference(given(""), 2)
    ranks = pool4.run(parity.run_as, given(LAYOUTS["encoder PP 2 beside LLM TP 2"]), 2, timeout=60)
    assert parity.compare(truth, ranks, 1e-10) < 1e-10


def test_stages_that_could_not_pass_on_an_unreadable_sample_are_refused(folder):
    text = recipe_text(folder, LAYOUTS["encoder PP 2 beside LLM TP 2"], "")
    resolve(parse_recipe(text))
    with pytest.raises(RecipeError, match=r"data.on_bad_sample = 'skip': not with parallelism.vision.pipeline"):
        resolve(parse_recipe(text, ("--data.on_bad_sample", "skip")))


def test_frames_that_are_decoded_are_counted_by_workers_too_and_few_are_superfluous(folder):
    sources = split_sources(recipe(folder, "").data)
    wanted = [Wanted("train", index) for index in range(8)]
    here = Payloads(sources).get(wanted)
    with InWorkers(split_sources(recipe(folder, "").data), 1) as payloads:
        there = payloads.get(wanted)
    costs = [
        [[getattr(sample, name) for name in COSTS if name != "load_s"] for sample in each] for each in (here, there)
    ]
    assert costs[0] == costs[1]
    assert all(sample.load_s > 0 for sample in (*here, *there))
    decoded, needed = (sum(getattr(sample, f"frames_{what}") for sample in here) for what in ("decoded", "needed"))
    assert 0 < needed <= decoded <= 1.05 * needed
    assert not any(sample.frames_decoded for sample in here if "video" not in sample.units)


def test_they_are_what_transformers_decodes(folder):
    (line,) = check_processor(resolve(recipe(folder, "")))
    assert line == "data: tokens and tensors of 4 of the first 4 samples equal those of transformers' own processor"


def test_stages_of_a_tower_that_is_called_for_each_kind_are_refused(folder):
    with pytest.raises(RecipeError, match=r"parallelism\.vision.*it is called for each kind of media"):
        resolve(recipe(folder, LAYOUTS["encoder PP 2 beside LLM TP 2"]))


FAMILIES = (
    ("llava", "encoder PP 2 beside LLM TP 2", ""),
    ("llava", "encoder PP 2 beside LLM TP 2", "[modules.projector]"),
    ("llava", "encoder beside LLM FSDP 2", "cut"),
    ("idefics3", "encoder PP 2 beside LLM TP 2", ""),
    ("idefics3", "encoder PP 2 beside LLM TP 2", "cut"),
    ("qwen2_5_vl", "encoder PP 2 beside LLM TP 2", ""),
    ("qwen3_vl", "encoder TP 2 under LLM CP 2 x TP 2", ""),
    ("internvl", "encoder TP 2 under LLM CP 2 x TP 2", "[modules.projector]"),
    ("internvl", "encoder beside LLM FSDP 2", "cut"),
    ("llava_onevision", "encoder beside LLM FSDP 2", ""),
    ("gemma3", "encoder TP 2 under LLM CP 2 x TP 2", ""),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "layout", "change"), FAMILIES)
def test_families_train_as_in_transformers(pool4, tmp_path, family, layout, change):
    """Or, where `seq_len` cuts images off the ends of samples, as in one process."""
    tiny_directory(family, image_text_classes()[family], tmp_path / "model")
    asked = (
        ["0.png"],
        [],
        ["1.png"],
        ["1.png", "2.png"],
        ["2.png", "0.png", "1.png"],
        [],
        ["2.png"],
        ["1.png", "0.png"],
    )
    write_data(tmp_path, asked)
    cut = change == "cut"
    given = {"modules": "" if cut else change, "more": "seq_len = 110" if cut else ""}
    alone = recipe(tmp_path, "", **given)
    truth = parity.reference(alone, 2) if cut else whole_reference(alone, 2, processed=True)
    ranks = pool4.run(parity.run_as, recipe(tmp_path, LAYOUTS[layout], **given), 2, timeout=120)
    assert parity.compare(truth, ranks, 1e-10) < 1e-10
