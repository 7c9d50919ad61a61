"""Out again: what a run of any layout has learned is a directory that transformers loads, every key accounted for."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetmesh.api import run_recipe as train
from hetmesh.checkpoint.saved_run import SavedRun, saved_run
from hetmesh.cli import main
from hetmesh.data.digits import DigitsSource
from hetmesh.errors import CheckpointError, OutputError, RecipeError
from hetmesh.export import directory_files as export_files
from hetmesh.export import export as export_module
from hetmesh.export.directory_files import MADE_FROM
from hetmesh.export.export import export
from hetmesh.export.export_plan import export_plan
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.records import checksums
from hetmesh.resolve.refusals import check_run
from hetmesh.resolve.resolved import resolve
from support import tiny_vlms
from support.llava_by_hand import llava_by_hand
from support.tiny_exports import KEPT, recipe, save_now, tensors

RECIPES = tiny_vlms.Path(__file__).parents[2] / "recipes"
LAYOUT = """
[parallelism.vision]
ranks = [0, 1]
tensor_parallel_degree = 2
[parallelism.llm]
ranks = "0-3"
pipeline_parallel_degree = 2
tensor_parallel_degree = 2
pipeline_parallel_schedule = "1f1b"
pipeline_parallel_microbatch_size = 2
"""
SHARDED = """
[parallelism.vision]
ranks = "0-3"
data_parallel_shard_degree = 2
[parallelism.llm]
ranks = "0-3"
data_parallel_shard_degree = 2
context_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""
SHARED_HEADS = """
[parallelism.vision]
ranks = [0, 1]
[parallelism.llm]
ranks = "0-3"
tensor_parallel_degree = 4
"""


FAMILIES = ("llava_onevision", "gemma3")  # with layouts: test_export_families.py
REST = [name for name in tiny_vlms.MODELS if name not in (*FAMILIES, "paligemma2")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps of a tiny LLaVA, and its directory."""
    top = tmp_path_factory.mktemp("trained")
    path = tiny_vlms.save("llava", top)
    train(recipe(path, top / "run"))
    return path, saved_run(top / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in REST)])
def test_no_steps_give_the_directory_back_bit_by_bit_and_transformers_loads_it(pool, tmp_path, name):
    path = tiny_vlms.save(name, tmp_path)  # gemma3's head is its embedding
    (path / "tokenizer.model").write_text("words")
    given = recipe(path, tmp_path / "run").model_copy(update={"training": recipe(path, "x").training})
    pool(1).run(save_now, given, 0, timeout=120)
    run = saved_run(tmp_path / "run")
    assert run.recipe == given
    export(run, tmp_path / "out", dtype=torch.float32, largest=40_000)

    before, after = tensors(path), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    assert (tmp_path / "out" / "tokenizer.model").read_text() == "words"
    model = type(tiny_vlms.build(name))
    exported, told = model.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    original = model.from_pretrained(path).state_dict()
    assert all(torch.equal(original[key], value) for key, value in exported.state_dict().items())


@pytest.mark.slow
def test_a_part_of_a_model_goes_back_between_the_other_parts(pool, tmp_path):
    path = tiny_vlms.save_inside("qwen2_5_omni", "thinker_config", tmp_path)
    pool(1).run(save_now, recipe(path, tmp_path / "run"), 1, timeout=120)
    lines = export(saved_run(tmp_path / "run"), tmp_path / "out", dtype=torch.float32)

    assert "  loads with transformers.Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained" in lines
    before, after = tensors(path), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert torch.equal(before["other.weight"], after["other.weight"])
    assert not torch.equal(before["thinker.lm_head.weight"], after["thinker.lm_head.weight"])
    model = type(tiny_vlms.build("qwen2_5_omni"))
    _, told = model.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [*(pytest.param(layout, marks=pytest.mark.exhaustive) for layout in (LAYOUT, SHARDED)), SHARED_HEADS],
    ids=["TP and PP", "FSDP and CP", "TP 4 of 2 key heads"],
)
def test_a_checkpoint_of_any_layout_is_exported_as_that_of_one_process(pool4, pool, tmp_path, layout):
    path = tiny_vlms.save("llava", tmp_path)
    pool(1).run(save_now, recipe(path, tmp_path / "one"), 2, timeout=120)
    pool4.run(save_now, recipe(path, tmp_path / "four", layout), 2, timeout=120)
    for run in ("one", "four"):
        export(saved_run(tmp_path / run), tmp_path / f"{run}-hf")
    one, four = tensors(tmp_path / "one-hf"), tensors(tmp_path / "four-hf")
    assert one.keys() == four.keys() == tensors(path).keys()
    head = "language_model.lm_head.weight"
    assert (one[head] - tensors(path)[head]).abs().max() > 1e-4
    assert all(torch.allclose(one[key], four[key], rtol=0, atol=1e-12) for key in one)


def logits(model):
    ids = torch.tensor([[5, *[tiny_vlms.IMAGE] * 16, 7, 9]])
    pixels = torch.linspace(-1, 1, 3 * 8 * 8, dtype=model.dtype).view(1, 3, 8, 8)
    with torch.no_grad():
        return model(input_ids=ids, pixel_values=pixels).logits


@pytest.mark.slow
def test_logits_of_the_export_are_those_of_what_was_trained(trained, tmp_path):
    from hetmesh.resolve.modules import empty_module

    path, run = trained
    export(run, tmp_path / "out")
    model = type(tiny_vlms.build("llava"))
    exported = model.from_pretrained(tmp_path / "out")
    assert exported.dtype == torch.float64
    by_hand = model.from_pretrained(path, dtype=torch.float64)
    resolved = resolve(run.recipe)
    values = {}
    for name in run.recipe.modules:
        keys = [f"{name}.{key}" for key in empty_module(run.recipe, resolved.adapters[name], name).state_dict()]
        values |= {key.removeprefix(f"{name}."): value for key, value in run.read(keys).items()}
    assert not torch.equal(logits(exported), logits(by_hand))
    by_hand.load_state_dict(values)
    assert torch.equal(logits(exported), logits(by_hand))

    export(run, tmp_path / "half", dtype=torch.bfloat16)
    half = model.from_pretrained(tmp_path / "half")
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.lm_head.weight, exported.lm_head.weight.bfloat16())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
def test_values_that_a_dtype_does_not_hold_are_not_written(pool, tmp_path):
    path = tiny_vlms.save("llava", tmp_path)
    given = load_file(path / "model.safetensors")
    given["language_model.model.norm.weight"][3] = -70_000.0
    save_file(given, path / "model.safetensors", metadata={"format": "pt"})
    pool(1).run(save_now, recipe(path, tmp_path / "run"), 0, timeout=120)
    run = saved_run(tmp_path / "run")
    with pytest.raises(OutputError, match=r"model\.norm\.weight has values up to 7e\+04, which torch.float16 does not"):
        export(run, tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()
    export(run, tmp_path / "out", dtype=torch.bfloat16)


@pytest.mark.slow
def test_adapters_are_merged_or_a_directory_for_peft(tmp_path):
    from peft import PeftModel

    path = tiny_vlms.save("llava", tmp_path)
    more = "[modules.vision.lora]\nrank = 3\nalpha = 5\n[modules.llm.lora]\nrank = 2\n"
    train(recipe(path, tmp_path / "run", more))
    run, model = saved_run(tmp_path / "run"), type(tiny_vlms.build("llava"))
    export(run, tmp_path / "merged")
    export(run, tmp_path / "apart", merge=False)

    merged, base = model.from_pretrained(tmp_path / "merged"), model.from_pretrained(tmp_path / "apart")
    original = model.from_pretrained(path, dtype=torch.float64).state_dict()
    assert all(torch.equal(original[key], value) for key, value in base.state_dict().items())
    by_peft = PeftModel.from_pretrained(base, tmp_path / "apart" / "adapter").merge_and_unload().state_dict()
    changed = 0
    for key, value in merged.state_dict().items():
        assert torch.allclose(value, by_peft[key], rtol=0, atol=1e-15), key
        changed += not torch.equal(value, original[key])
    assert changed == 3 * 7 + 2 * 6 + 2  # linear layers of blocks, without the last one of the tower, and projector


@pytest.mark.slow
def test_modules_of_no_one_directory_are_directories_of_their_own_and_can_be_asked(tmp_path, capsys):
    from transformers import Qwen3ForCausalLM, SiglipVisionModel

    small = ("--training.steps", "1", "--training.local_batch_size", "4", "--validation.samples", "4")
    few = ("--validation.freq", "0", "--checkpoint.enable", "true", "--metrics.enable_tensorboard", "false")
    few = (*few, "--modules.projector.config.hidden_features", "40")  # LLaVA's is as wide as the LLM
    train(load_recipe(RECIPES / "digits_single.toml", (*small, *few, "--job.dump_folder", str(tmp_path / "run"))))
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "directory"]) == 2
    assert "the run's modules do not all come from one directory; name a dtype" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "loads with transformers.SiglipVisionModel.from_pretrained" in said
    assert "plain safetensors: transformers has no class for this module alone" in said
    run = saved_run(tmp_path / "run")
    for name, kind in (("vision", SiglipVisionModel), ("llm", Qwen3ForCausalLM)):
        found, told = kind.from_pretrained(tmp_path / "out" / name, output_loading_info=True)
        assert not any(told.values())
        saved = run.read(key for key in run.names if key.startswith(f"{name}."))
        assert all(torch.equal(value, saved[f"{name}.{key}"]) for key, value in found.state_dict().items())
    names = {f"linear_{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")}
    assert set(tensors(tmp_path / "out" / "projector")) == names

    source = DigitsSource("validation")
    assert main(["generate", str(tmp_path / "run"), "--sample", "7", "--max-new-tokens", "9"]) == 0
    said = capsys.readouterr().out
    assert f"Q: {source.question(7)}\nA: " in said
    assert source.picture(7) in said
    assert main(["generate", str(tmp_path / "run"), "--sample", "999"]) == 2
    assert "there are held-out samples 0 to 383" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "run"), "who are you?"]) == 1
    assert "no question has the character" in capsys.readouterr().err


@pytest.mark.slow
def test_an_export_that_is_stopped_in_the_middle_leaves_nothing(trained, tmp_path, monkeypatch):
    _, run = trained

    def full(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(export_module, "write_config", full)
    with pytest.raises(KeyboardInterrupt):
        export(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    (tmp_path / "out.partial").mkdir()  # what a kill leaves
    (tmp_path / "out.partial" / "model.safetensors").write_bytes(b"half")
    export(run, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    with pytest.raises(OutputError, match="already exists"):
        export(run, tmp_path / "out")


@pytest.mark.slow
def test_missing_and_extra_keys_and_changed_bytes_are_errors(trained, tmp_path, monkeypatch):
    _, run = trained
    names = run.names
    more = (*(name for name in names if name != "llm.lm_head.weight"), "llm.model.more.weight")
    monkeypatch.setattr(SavedRun, "names", property(lambda self: more))
    said = r"1 missing: llm.lm_head.weight. 1 of no module: llm.model.more.weight"
    with pytest.raises(CheckpointError, match=said):
        export_plan(run, merge=True)
    monkeypatch.undo()

    copy = tmp_path / "run"
    shutil.copytree(run.path.parents[1], copy)
    broken = saved_run(copy)
    part = next(p for p in checksums.read_manifest(broken.path) if p.name == "model.llm.lm_head.weight")
    with open(broken.path / part.file, "r+b") as stream:
        stream.seek(part.offset + part.length - 3)
        stream.write(b"\x55")
    with pytest.raises(CheckpointError, match=r"is damaged: model.llm.lm_head.weight in .* has changed"):
        export(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_cannot_be_exported_is_said(trained, tmp_path, capsys):
    _, run = trained
    top = run.path.parents[1]
    assert main(["export", str(top), str(tmp_path / "out"), "--step", "7"]) == 2
    assert "has no complete checkpoint of step 7; there are [2]" in capsys.readouterr().err
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "there is no run in it (recipe.json cannot be read" in capsys.readouterr().err
    assert main(["export", str(run.path), str(tmp_path / "out")]) == 2
    assert f"it is a checkpoint of the run {top}: give that, and --step 2" in capsys.readouterr().err
    shutil.copytree(top, tmp_path / "renamed")
    (tmp_path / "renamed" / "checkpoint" / "step-2").rename(tmp_path / "renamed" / "checkpoint" / "step-3")
    assert main(["export", str(tmp_path / "renamed"), str(tmp_path / "out")]) == 1
    assert "step-3 holds the state after step 2: somebody has renamed it" in capsys.readouterr().err
    assert main(["export", str(top), str(tmp_path / "out"), "--lora", "adapters"]) == 2
    assert "none of the run's modules has LoRA adapters" in capsys.readouterr().err
    (tmp_path / "recipe.json").write_bytes((top / "recipe.json").read_bytes())
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "kept no checkpoint, so its weights are gone; train again with [checkpoint] enable = true" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_directory_that_describes_another_model_now_is_refused(trained, tmp_path, capsys):
    path, run = trained
    config, top = path / "config.json", run.path.parents[1]
    before = config.read_text()
    told = "text_config.rms_norm_eps = 0.5 in its config.json; the checkpoint "
    try:
        value = json.loads(before)
        value["text_config"]["rms_norm_eps"] = 0.5
        config.write_text(json.dumps(value))
        assert main(["export", str(top), str(tmp_path / "out")]) == 2
        assert told in capsys.readouterr().err
        again = tmp_path / "again"
        shutil.copytree(top, again)
        with pytest.raises(RecipeError, match=told):
            train(recipe(path, again, steps=3))
    finally:
        config.write_text(before)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_exports_its_last_checkpoint_if_the_recipe_says_so(tmp_path, monkeypatch):
    """Also one whose export was interrupted: it is not finished before."""
    path = tiny_vlms.save("llava", tmp_path)
    given = recipe(path, tmp_path / "run", steps=1)
    keys = given.checkpoint.model_copy(update={"last_save_in_hf": True, "export_dtype": "bfloat16"})

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hetmesh.api.export_last", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(given.model_copy(update={"checkpoint": keys}))
    train(given.model_copy(update={"checkpoint": keys}))
    found = tensors(tmp_path / "run" / "checkpoint" / "step-1-hf")
    assert found.keys() == tensors(path).keys()
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    alone = given.model_copy(update={"checkpoint": keys.model_copy(update={"last_save_in_hf": False})})
    with pytest.raises(RecipeError, match=r"checkpoint.export_dtype = 'bfloat16'.*set checkpoint.last_save_in_hf"):
        check_run(alone)


@pytest.mark.exhaustive  # takes three runs
@pytest.mark.slow
def test_an_export_of_another_checkpoint_is_put_aside_and_not_taken_for_this_one(tmp_path, capsys, monkeypatch):
    """A run that is finished, taken back a step and trained on otherwise has other weights under the same names."""
    given = recipe(tiny_vlms.save("llava", tmp_path), tmp_path / "run")
    keys = given.checkpoint.model_copy(update={"last_save_in_hf": True, "interval": 1})
    given = given.model_copy(update={"checkpoint": keys})
    train(given)
    step = tmp_path / "run" / "checkpoint" / "step-2"
    exported, aside = step.with_name("step-2-hf"), step.with_name("step-2-hf.old-1")
    first = tensors(exported)
    (told,) = export_module.export_last(resolve(given), step)
    assert told == f"{exported} is there already, of this checkpoint, and stays as it is"

    shutil.rmtree(step)
    capsys.readouterr()
    train(given.model_copy(update={"optimizer": given.optimizer.model_copy(update={"lr": 1.0})}))
    assert f"made from another checkpoint, or otherwise; it is {aside} now" in capsys.readouterr().out.replace("\n", "")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    second, by_hand, kept = tensors(exported), tensors(tmp_path / "out"), tensors(aside)
    assert all(torch.equal(second[name], by_hand[name]) and torch.equal(kept[name], first[name]) for name in first)
    assert any(not torch.equal(second[name], first[name]) for name in first)
    assert (exported / MADE_FROM).read_bytes() == (tmp_path / "out" / MADE_FROM).read_bytes()

    (exported / MADE_FROM).unlink()  # as an older version left it; and the disk is full
    monkeypatch.setattr(export_module, "write_config", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_module.export_last(resolve(given), step)
    assert sorted(each.name for each in step.parent.glob("*-hf*")) == [exported.name, aside.name]


@pytest.mark.slow
def test_tied_and_unused_tensors_of_a_directory_are_accounted_for(pool, tmp_path):
    path = tiny_vlms.save("gemma3", tmp_path)
    given = load_file(path / "model.safetensors")
    embedding = next(name for name in given if name.endswith("embed_tokens.weight"))
    head, unused = "language_model.lm_head.weight", "language_model.model.layers.0.self_attn.rotary_emb.inv_freq"
    given[head], given[unused] = given[embedding].clone(), torch.arange(3.0)  # as older versions saved them
    save_file(given, path / "model.safetensors", metadata={"format": "pt"})
    pool(1).run(save_now, recipe(path, tmp_path / "run"), 1, timeout=120)
    export(saved_run(tmp_path / "run"), tmp_path / "out")

    after = tensors(tmp_path / "out")
    assert after.keys() == given.keys()
    assert torch.equal(after[head], after[embedding])
    assert not torch.equal(after[head], given[head].double())
    assert torch.equal(after[unused], given[unused])


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_modules_that_are_named_by_hand_take_what_they_have_no_use_for_from_their_directory(pool, tmp_path, whole):
    from transformers import CLIPVisionModel

    path = tiny_vlms.save("llava", tmp_path)
    text = llava_by_hand(path, whole=whole) + "[training]\nlocal_batch_size = 2\n"
    text += KEPT.format(steps=1, folder=tmp_path / "run", more="")
    pool(1).run(save_now, parse_recipe(text), 1, timeout=120)
    lines = export(saved_run(tmp_path / "run"), tmp_path / "out")

    before = tensors(path)
    if whole:  # the whole directory comes out again
        after = tensors(tmp_path / "out")
        assert after.keys() == before.keys()
        behind = [key for key in before if ".encoder.layers.2." in key or ".post_layernorm." in key]
        assert f"({len(behind)} that no module has" in lines[0]
        assert all(torch.equal(after[key], before[key]) for key in behind)
        assert not torch.equal(after["language_model.lm_head.weight"], before["language_model.lm_head.weight"])
    else:
        tower, told = CLIPVisionModel.from_pretrained(tmp_path / "out" / "vision", output_loading_info=True)
        assert not any(told.values())
        assert tower.config.num_hidden_layers == 2  # what the run has of it
        norm = next(key for key in before if key.endswith("post_layernorm.weight"))
        assert torch.equal(tower.post_layernorm.weight, before[norm])


OWN = """
from torch import nn

class Own(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.out_features = out_features
        self.only = nn.Linear(in_features, out_features)

    def forward(self, rows):
        return self.only(rows)
"""


@pytest.mark.slow
def test_a_run_remembers_where_code_beside_its_recipe_lies(tmp_path, capsys):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own_projector_of_a_test.py").write_text(OWN)
    text = (RECIPES / "digits_single.toml").read_text()
    text = text.replace('model = "mlp"', 'model = "own_projector_of_a_test:Own"\nconfig = { out_features = 96 }')
    (tmp_path / "code" / "recipe.toml").write_text(text)
    small = ("--training.steps", "1", "--training.local_batch_size", "4", "--validation.samples", "4")
    few = ("--validation.freq", "0", "--checkpoint.enable", "true", "--metrics.enable_tensorboard", "false")
    keys = (*small, *few, "--job.dump_folder", str(tmp_path / "run"))
    train(load_recipe(tmp_path / "code" / "recipe.toml", keys))
    assert saved_run(tmp_path / "run").recipe.code_folder == str(tmp_path / "code")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert set(tensors(tmp_path / "out" / "projector")) == {"only.weight", "only.bias"}
    assert main(["generate", str(tmp_path / "run"), "add 1+2", "--max-new-tokens", "3"]) == 0


def test_files_that_the_run_did_not_go_by_are_told(tmp_path):
    def told(options, whole=True):
        text = (
            f'[modules.llm]\nmodel = "qwen3"\n[data]\nsource = "conversations"\noptions = {{ path = "x", {options} }}'
        )
        return list(export_files.prepared_otherwise(parse_recipe(text), tmp_path, whole=whole))

    here, other = f"tokenizer = '{tmp_path}/.'", "tokenizer = '/other', image_processor = '/more'"
    assert told(here) == told(other, whole=False) == []
    assert [line.partition(" = ")[0].rpartition(".")[2] for line in told(other)] == ["tokenizer", "image_processor"]
    assert "in the form of its own data.options.chat_template" in told('chat_template = "a"', whole=False)[0]
