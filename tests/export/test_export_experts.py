"""Mixtures of experts in and out: the forms that hubs have, and those that transformers saves, bit by bit."""

from __future__ import annotations

import pytest
import torch

from hetmesh.checkpoint.saved_run import saved_run
from hetmesh.export.export import export
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.testing.parity import compare, run_as
from support import tiny_vlms
from support.often import combinations
from support.tiny_exports import equal, logits, recipe, save_now, tensors, transposed
from support.whole_reference import whole_reference

pytestmark = pytest.mark.slow

FSDP = """
[parallelism.vision]
ranks = "0-3"
[parallelism.llm]
ranks = "0-3"
data_parallel_shard_degree = 4
"""
TP_AND_PP = """
[parallelism.vision]
ranks = [0, 1]
[parallelism.llm]
ranks = "0-3"
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "1f1b"
pipeline_parallel_microbatch_size = 2
"""


LAYOUTS = {"FSDP": FSDP, "TP and PP": TP_AND_PP}
OFTEN = {("TP and PP", "of the hub")}  # how shards are read is not how they are named


@pytest.mark.parametrize(("layout", "form"), combinations(OFTEN, LAYOUTS, ["of the hub", "of save_pretrained"]))
def test_no_steps_give_a_multimodal_directory_back(pool4, tmp_path, layout, form):
    path = tiny_vlms.save("qwen3_vl_moe", tmp_path)
    kind = type(tiny_vlms.build("qwen3_vl_moe"))
    if form == "of the hub":
        transposed(path)
    given = recipe(path, tmp_path / "run", LAYOUTS[layout])
    given = given.model_copy(update={"training": given.training.model_copy(update={"dtype": "float32"})})
    pool4.run(save_now, given, 0, timeout=120)
    done = export(saved_run(tmp_path / "run"), tmp_path / "out", largest=40_000)
    assert equal(path, tmp_path / "out")
    if form == "of the hub":
        assert ", 6 made of parts of the run's" in "".join(done).replace("(", ", ")
    else:
        kind.from_pretrained(path).save_pretrained(tmp_path / "theirs")
        assert equal(tmp_path / "theirs", tmp_path / "out")
    exported, told = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    assert torch.equal(logits(exported), logits(kind.from_pretrained(path)))


@pytest.mark.exhaustive
def test_what_was_trained_on_shards_is_what_one_process_trains_and_exports(pool4, pool, tmp_path):
    path = transposed(tiny_vlms.save("qwen3_vl_moe", tmp_path))
    pool(1).run(save_now, recipe(path, tmp_path / "one"), 2, timeout=120)
    pool4.run(save_now, recipe(path, tmp_path / "four", FSDP), 2, timeout=120)
    for run in ("one", "four"):
        export(saved_run(tmp_path / run), tmp_path / f"{run}-hf")
    one, four, before = tensors(tmp_path / "one-hf"), tensors(tmp_path / "four-hf"), tensors(path)
    assert one.keys() == four.keys() == before.keys()
    changed = [name for name in one if ".experts." in name and (one[name] - before[name]).abs().max() > 1e-5]
    assert len(changed) == 6
    assert all(torch.allclose(one[key], four[key], rtol=0, atol=1e-12) for key in one)


@pytest.mark.exhaustive  # training/test_expert_directories.py has experts on an axis of their own
@pytest.mark.parametrize(
    "layout", [FSDP, pytest.param(TP_AND_PP, marks=pytest.mark.exhaustive)], ids=["FSDP", "TP and PP"]
)
def test_experts_that_ranks_have_all_of_or_shards_train_as_transformers_does(pool4, tmp_path, layout):
    given = parse_recipe(tiny_vlms.recipe_text(transposed(tiny_vlms.save("qwen3_vl_moe", tmp_path)), layout))
    compare(whole_reference(given, 2), pool4.run(run_as, given, 2, None, None, timeout=120), 1e-10)
