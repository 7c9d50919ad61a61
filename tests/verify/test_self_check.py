"""The self-check: every family passes it, and everything that once was silently wrong does not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetmesh.cli import main
from hetmesh.data.preparation import Preparation
from hetmesh.errors import RecipeError, SelfCheckError
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.directories import why_not_compared
from hetmesh.resolve.resolved import resolve
from hetmesh.resolve.summary import summary
from hetmesh.verify.self_check import TOLERANCE, self_check
from hetmesh.verify.self_check_process import compare, compare_in_process, needs_self_check, record
from hetmesh.verify.self_check_samples import processed_samples
from support import tiny_vlms
from support.llava_by_hand import llava_by_hand

FAST = ("gemma3",)
REST = [name for name in tiny_vlms.MODELS if name not in (*FAST, "paligemma2")]


OFTEN = {*REST[::8]}


@pytest.mark.parametrize(
    "name",
    [
        *FAST,
        *(pytest.param(name, marks=pytest.mark.slow if name in OFTEN else pytest.mark.exhaustive) for name in REST),
    ],
)
def test_the_parts_compute_what_transformers_computes(directory, name):
    short = ("--training.steps", "5", "--lr_scheduler.total_steps", "9")  # of which nothing is compared
    assert self_check(parse_recipe(tiny_vlms.recipe_text(directory(name)), short)) < TOLERANCE


DRAWER = """
[modules.drawer]
model = "flow"
config = { queries = 4, hidden_size = 32, num_hidden_layers = 1, num_attention_heads = 4, patch_size = 2 }
loss = { kind = "flow_matching" }
[[boundaries]]
from = "vision"
to = "llm"
at = "image"
[[boundaries]]
from = "llm"
to = "drawer"
at = "drawing"
"""


@pytest.mark.slow
def test_what_comes_up_to_the_llm_is_compared_where_a_module_follows_it(directory):
    kinds = "kinds = { image = [3, 8, 8], drawing = [1, 8, 8] }"
    recipe = parse_recipe(tiny_vlms.recipe_text(directory("gemma3"), DRAWER, kinds))
    assert why_not_compared(recipe) == ""
    assert self_check(recipe) < TOLERANCE


@pytest.mark.slow
def test_a_directory_with_further_parts_is_compared_by_the_part_that_is_trained(tmp_path):
    path = tiny_vlms.save_inside("qwen2_5_omni", "thinker_config", tmp_path)
    assert self_check(parse_recipe(tiny_vlms.recipe_text(path))) < TOLERANCE


@pytest.mark.slow
def test_a_llava_that_is_wired_by_hand_passes_where_it_is_right(directory):
    assert self_check(parse_recipe(llava_by_hand(directory("llava")))) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tower", "vision", "says"),
    [
        ("llava", "clip", "", r"modules 'vision' and 'projector': its rows for one item differ"),
        ("llava_relu", "clip", "config = { feature_layer = -2 }", r"'vision' and 'projector': its rows"),
        ("llava_siglip", "siglip", "", r"'vision' and 'projector': its rows"),
        ("llava_full", "clip", "config = { feature_layer = -2 }", r"'vision' and 'projector': 16 rows.*makes 17 of it"),
    ],
    ids=["feature_layer left out", "projector_hidden_act relu", "SigLIP tower", "select strategy full"],
)
def test_what_was_silently_wrong_of_llava_is_found_and_right_by_hf_path(directory, name, tower, vision, says):
    with pytest.raises(SelfCheckError, match=says):
        self_check(parse_recipe(llava_by_hand(directory(name), tower, vision)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "override", "says"),
    [
        ("gemma3", 'attention_mask = "causal"', r"module 'llm': its decoder's output for one item differ"),
        ("paligemma", 'attention_mask = "causal"', r"module 'llm': its decoder's output for text alone differ"),
    ],
)
def test_a_mask_that_is_not_the_models_is_found(directory, name, override, says):
    with pytest.raises(SelfCheckError, match=says):
        self_check(parse_recipe(tiny_vlms.recipe_text(directory(name), f"[modules.llm]\n{override}")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attribute", "value", "says"),
    [
        ("llava_cohere2", "logits", lambda self, model, hidden: 2 * model.lm_head(hidden), "its head's logits"),
        ("llava", "collate", None, "its decoder's output"),
    ],
    ids=["behind the head", "positions"],
)
def test_faults_in_the_llm_are_found(directory, monkeypatch, name, attribute, value, says):
    from hetmesh.models.split.llm_half import HfLlmAdapter

    collate = HfLlmAdapter.collate

    def shifted(self, samples, metas, **given):
        batch = collate(self, samples, metas, **given)
        return {**batch, "position_ids": batch["position_ids"] * 2}

    monkeypatch.setattr(HfLlmAdapter, attribute, value or shifted)
    with pytest.raises(SelfCheckError, match=f"module 'llm': {says}"):
        self_check(parse_recipe(tiny_vlms.recipe_text(directory(name))))


def ovis2(t):
    tower = {**tiny_vlms.TOWER, "vocab_size": 20, "num_visual_indicator_tokens": 5, "hidden_stride": 1}
    ids = {"image_token_id": tiny_vlms.IMAGE, "visual_indicator_token_ids": [30, 31, 32, 33, 34]}
    sizes = {"hidden_size": 24, "vocab_size": tiny_vlms.VOCAB}
    return t.Ovis2ForConditionalGeneration(
        t.Ovis2Config(vision_config=tower, text_config=tiny_vlms._text("qwen2"), **sizes, **ids)
    )


@pytest.mark.slow
def test_a_family_whose_row_is_missing_is_found(tmp_path, monkeypatch):
    """Ovis 2 embeds tokens beside its rows, which nothing in its structure says."""
    import transformers

    from hetmesh.recipe import hf_families

    monkeypatch.setattr(hf_families, "FAMILIES", {})
    monkeypatch.setattr(tiny_vlms, "MODELS", {"ovis2": lambda: ovis2(transformers)})
    recipe = parse_recipe(tiny_vlms.recipe_text(tiny_vlms.save("ovis2", tmp_path)))
    with pytest.raises(SelfCheckError, match=r"module 'llm': its decoder's output for one item differ"):
        self_check(recipe)


@pytest.mark.slow
def test_a_model_without_sdpa_has_a_causal_mask(tmp_path, monkeypatch):
    """Eager attention of a decoder that takes finished masks once saw all tokens."""
    from transformers import InternVLForConditionalGeneration

    path = tiny_vlms.save("internvl", tmp_path)
    monkeypatch.setattr(InternVLForConditionalGeneration, "_supports_sdpa", False)
    assert self_check(parse_recipe(tiny_vlms.recipe_text(path))) < TOLERANCE


def test_processors_of_one_item_a_sample_make_a_batch_of_unlike_sizes_too(processors):
    """What pads one to the other would not be compared else."""
    source = processed_samples(Preparation(processors("qwen3_asr"), {}, None, "[data.options]"), ["audio"])
    assert len({item.rows for i in range(len(source)) for item in source.meta(i).media}) == 2


def test_recipes_that_come_from_no_whole_model_have_nothing_to_compare():
    recipe = parse_recipe((Path(__file__).parents[2] / "recipes" / "digits.toml").read_text())
    assert not needs_self_check(recipe)
    with pytest.raises(RecipeError, match=r"there is nothing to compare the weights with"):
        self_check(recipe)


def test_modules_of_several_directories_are_not_compared_which_is_said(tmp_path):
    path, other = tiny_vlms.save("llava", tmp_path), tmp_path / "other"
    shutil.copytree(path, other)
    text = tiny_vlms.recipe_text(path)
    assert why_not_compared(parse_recipe(text)) == ""
    recipe = parse_recipe(text, ("--modules.vision.initial_load_path", str(other)))
    assert not needs_self_check(recipe)
    (line,) = [line for line in summary(resolve(recipe)) if "not compared" in line]
    assert "note: its weights are not compared with transformers' own forward" in line
    assert f"modules.vision.initial_load_path = '{other}'" in line
    assert why_not_compared(parse_recipe((Path(__file__).parents[2] / "recipes" / "digits.toml").read_text())) == ""


def test_the_result_is_kept_for_the_directory_until_it_or_what_is_made_of_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tiny_vlms.save("llava", tmp_path)
    (path / "preprocessor_config.json").write_text("{}")
    text = tiny_vlms.recipe_text(path)
    recipe = parse_recipe(text, ("--job.dump_folder", f"{tmp_path}/out"))
    assert needs_self_check(recipe)
    assert record(recipe, 1e-7).is_relative_to(tmp_path / "cache" / "hetmesh")
    assert not needs_self_check(recipe)
    other = parse_recipe(text, ("--job.dump_folder", f"{tmp_path}/other"))
    assert not needs_self_check(other)
    prefix = parse_recipe(text, ("--modules.llm.attention_mask", "prefix"))
    assert needs_self_check(prefix)
    record(prefix, 1e-7)
    assert not needs_self_check(prefix)
    assert not needs_self_check(recipe)  # is still known
    for name in ("config.json", "preprocessor_config.json", "model.safetensors"):
        before = (path / name).stat().st_mtime_ns
        os.utime(path / name, ns=(1, 1))
        assert needs_self_check(recipe), name
        os.utime(path / name, ns=(before, before))
        assert not needs_self_check(recipe)
    (path / "tokenizer_config.json").write_text("{}")
    assert needs_self_check(recipe)
    record(recipe, 1e-7)
    monkeypatch.setattr("hetmesh.verify.self_check_process.distributions", lambda name: [SimpleNamespace(version="0")])
    assert needs_self_check(recipe)


def test_without_a_cache_the_result_is_kept_beside_the_dump_folder(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    text = tiny_vlms.recipe_text(tiny_vlms.save("llava", tmp_path), f"[job]\ndump_folder = '{tmp_path}/out'")
    recipe = parse_recipe(text, ("--data.options.template", 999 * "{# no path #}"))
    assert record(recipe, 1e-7) == tmp_path / "out.self_check.json"
    assert not needs_self_check(recipe)
    monkeypatch.setattr("hetmesh.verify.self_check_process.content_hash", lambda code: "changed")
    assert needs_self_check(recipe)


@pytest.mark.slow
def test_check_prints_what_the_directory_stands_for_and_who_owns_what(directory, tmp_path, capsys):
    file = tmp_path / "recipe.toml"
    file.write_text(tiny_vlms.recipe_text(directory("llava"), f"[job]\ndump_folder = '{tmp_path}/out'"))

    assert main(["check", str(file), "--weights", "--parameters"]) == 0
    said = capsys.readouterr().out
    assert "weights: logits differ from transformers' own by at most" in said
    kept = said.partition("weights: ")[2].partition("\n")[0].rpartition("(")[2].removesuffix(")")
    assert json.loads(Path(kept).read_text())["max_difference"] < TOLERANCE
    assert "\n  model.vision_tower.encoder.layers.*.self_attn.q_proj.weight  (3)\n" in said
    assert "\n  lm_head.weight\n" in said
    printed = said.partition("stands for:\n")[2].partition("vision owns ")[0]
    again = printed + "[training]\nlocal_batch_size = 2\nglobal_batch_size = 8\ndtype = 'float64'"
    given = parse_recipe(file.read_text())
    written = parse_recipe(again)
    assert (written.modules, written.boundaries, written.data) == (given.modules, given.boundaries, given.data)


@pytest.mark.slow
def test_the_process_that_compares_runs(tmp_path, monkeypatch):
    """What libraries write to stdout, as tokenizers do about options that they do not know, is no finding."""
    source = "import os\nfrom hetmesh.testing.sources import RandomMedia\nos.write(1, b'Ignored unknown option\\n')\n"
    (tmp_path / "noisy_source.py").write_text(source)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    path = tiny_vlms.save("llava_siglip", tmp_path)
    text = tiny_vlms.recipe_text(path, f"[job]\ndump_folder = '{tmp_path}/out'")
    recipe = parse_recipe(text.replace("hetmesh.testing.sources:", "noisy_source:"))
    assert needs_self_check(recipe)
    assert compare_in_process(recipe)[0].startswith("weights: logits differ from transformers' own by at most")
    assert not needs_self_check(recipe)


@pytest.mark.slow
def test_the_first_run_compares_and_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hetmesh.api.run_recipe", lambda recipe, resolved: None)
    monkeypatch.setattr("hetmesh.verify.self_check_process.compare_in_process", lambda recipe: compare(resolve(recipe)))
    file = tmp_path / "recipe.toml"
    path = tiny_vlms.save("llava_siglip", tmp_path)
    file.write_text(tiny_vlms.recipe_text(path, f"[job]\ndump_folder = '{tmp_path}/out'"))

    def said(*arguments):
        assert main(["train", str(file), *arguments]) == 0
        return capsys.readouterr().out

    assert "note: its weights were not compared" in said("--no-self-check")
    assert "own by at most" in said()
    assert "own by at most" not in said()
