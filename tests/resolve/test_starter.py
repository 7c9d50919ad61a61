"""`hetmesh init`: a commented recipe from a directory and a folder of conversations, which passes check and trains."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import tomli
import torch
from PIL import Image

import hetmesh
from hetmesh.cli import main
from hetmesh.data.recipe_sources import recipe_source
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.report.starter_text import COMMENTS
from support.data_forms import ANSWERS, ASKED, CAPTIONS, FORMS
from support.tiny_directory import save_directory
from support.tiny_vlms import VOCAB

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SMALL = """
source = "a machine whose ranks hold little"
peak_flops = { bfloat16 = 1e12, float32 = 1e11 }
memory_bytes = 500_000
memory_bandwidth = 1e10
node_bandwidth = 1e9
network_bandwidth = 1e9
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory `qwen3_vl`, and a folder `pets` of images with LLaVA's JSON."""
    root = tmp_path_factory.mktemp("init")
    save_directory("qwen3_vl", root)
    (root / "pets" / "images").mkdir(parents=True)
    draw = np.random.default_rng(0)
    talks = []
    for i in range(8):
        Image.fromarray(draw.integers(0, 256, (9 + i, 14, 3), dtype=np.uint8)).save(root / f"pets/images/{i}.png")
        turns = [{"from": "human", "value": "<image>\nwhat is this"}, {"from": "gpt", "value": "a cat"}]
        talks.append({"id": str(i), "image": f"{i}.png", "conversations": turns[: 1 if i == 3 else 2]})
    (root / "pets" / "train.json").write_text(json.dumps(talks[:6]))
    (root / "pets" / "val.json").write_text(json.dumps(talks[6:]))
    (root / "pets" / "notes.json").write_text('{"by": "nobody"}')
    (root / "small.toml").write_text(SMALL)
    return root


@pytest.fixture
def written(root, capsys, monkeypatch):
    """What `hetmesh init` prints for the folder, with more arguments."""
    monkeypatch.chdir(root)

    def run(*more, status=0):
        assert main(["init", "qwen3_vl", *more]) == status
        streams = capsys.readouterr()
        return streams.out if status == 0 else streams.err

    return run


@pytest.mark.slow
def test_it_prints_a_commented_recipe_that_passes_check(root, written, capsys):
    text = written("--data", "pets", "--ranks", "2", "--optimizer.lr", "1e-4")
    recipe = parse_recipe(text)
    assert recipe.world_size == 2
    assert recipe.optimizer.lr == 1e-4
    options = recipe.data.options
    assert (options["path"], options["validation_path"]) == ("pets/train.json", "pets/val.json")
    assert options["media_folder"] == "pets/images"
    assert recipe.training.seq_len == 32  # 21 tokens and rows in the longest sample
    assert (recipe.batch.global_batch_size, recipe.training.steps, recipe.validation.freq) == (6, 3, 100)
    assert "# 1 of 6 samples looked at add nothing to the loss; or stop" in text
    assert "# Layout: the fastest of " in text
    for placement in ("homogeneous", "colocated", "disjoint"):
        assert any(line.startswith("#") and f" {placement} " in line for line in text.splitlines())
    tables = tomli.loads(text)
    for key in ("job.dump_folder", "model.hf_path", "training.global_batch_size", "checkpoint.interval"):
        section, name = key.split(".")
        assert name in tables[section]
        assert any(line.startswith(f"{name} = ") and line.endswith(f"# {COMMENTS[key]}") for line in text.splitlines())
    file = root / "recipe.toml"
    file.write_text(text)
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr().out.endswith("ok\n")


def test_what_it_will_leave_out_is_said(root, capsys, monkeypatch):
    monkeypatch.chdir(root)
    talks = json.loads((root / "pets" / "train.json").read_text())
    talks[1]["conversations"][1]["from"] = "nobody"
    (root / "one_bad.json").write_text(json.dumps(talks))
    options = ("--data.options.media_folder", "pets/images", "--data.on_bad_sample", "skip")
    assert main(["init", "qwen3_vl", "--data", "one_bad.json", "--ranks", "1", *options]) == 0
    printed = capsys.readouterr()
    assert "note: 1 of 6 samples cannot be read: sample '1': `from` is 'nobody'" in printed.err
    assert "default:\n  activation_checkpoint.mode = 'none'" in printed.err  # all lines of a note
    assert '"skip" # 1 of 6 samples looked at cannot be read: left out, and counted\n' in printed.out
    assert "# 1 of 6 samples looked at add nothing to the loss; or stop\n" in printed.out
    assert main(["init", "qwen3_vl", "--data", "one_bad.json", "--ranks", "1", *options[:2]]) == 2
    assert "'nobody', must be one of" in (said := capsys.readouterr().err)
    assert said.endswith('; data.on_bad_sample = "skip" leaves out, and counts, what cannot be read\n')
    for talk in talks:
        talk["conversations"][0]["from"] = "nobody"
    (root / "all_bad.json").write_text(json.dumps(talks))
    assert main(["init", "qwen3_vl", "--data", "all_bad.json", "--ranks", "1", *options]) == 2
    assert "none of 6 samples of the data that were looked at can be read: sample '0': " in capsys.readouterr().err


@pytest.fixture(scope="module")
def prepared(directory):
    """A directory with a processor of one token per byte."""
    return str(directory("qwen2_5_vl"))


FIRST = ("img2dataset",)  # the others read on covered paths: tests/data/test_data_columns.py


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [pytest.param(name, marks=() if name in FIRST else pytest.mark.exhaustive) for name in FORMS]
)
def test_each_form_of_data_trains_at_the_first_try(prepared, capsys, tmp_path, monkeypatch, form):
    monkeypatch.setattr(pytest.importorskip("datasets").config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    FORMS[form](tmp_path / "data")
    options = ("--job.dump_folder", str(tmp_path / "out"), "--data.num_workers", "0")
    data = ("--data", str(tmp_path / "data"), "--ranks", "1", "--write", f"{tmp_path}/r.toml")
    assert main(["init", prepared, *data, *options]) == 0
    assert main(["check", f"{tmp_path}/r.toml"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("ok")
    recipe = load_recipe(tmp_path / "r.toml")
    source = recipe_source(recipe.data)
    asked = "" if form in CAPTIONS else ASKED
    for i in range(len(source)):
        meta, sample = source.meta(i), source.load(i)
        said = source.decode([token for a, b in meta.targets for token in sample.tokens[a:b].tolist()])
        assert (said, meta.num_items("image")) == (ANSWERS[i], 1)
        assert source.decode(sample.tokens.tolist()).split() == ["user", *asked.split()]  # up to where the turn ends
    assert bool(recipe.data.options.get("validation_path")) == (form in ("VQA", "imagefolder"))
    with hetmesh.open_job(recipe, self_check=False) as job:
        assert job.forward_backward().finite


@pytest.mark.exhaustive  # the planner has tests of what fits
@pytest.mark.slow
def test_another_machine_gets_as_many_ranks_as_hold_the_model(root, written):
    assert written("--data", "pets", "--machine", "small.toml", "--write", "few.toml") == ""
    recipe = load_recipe(root / "few.toml")
    assert recipe.world_size in (2, 4)
    assert (recipe.metrics.machine, recipe.training.mixed_precision_param) == ("small.toml", "bfloat16")
    assert "kB that a rank may hold" in (root / "few.toml").read_text()
    assert "--write few.toml: it is there already" in written("--data", "pets", "--write", "few.toml", status=2)


@pytest.mark.slow
def test_without_data_it_takes_random_ones(written):
    recipe = parse_recipe(written("--modules.vision.trainable", "false"))
    assert (recipe.data.source, recipe.data.options["vocab_size"], recipe.world_size) == ("synthetic", VOCAB, 1)
    assert recipe.data.options["processor"] == "qwen3_vl"
    assert not recipe.modules["vision"].trainable


@pytest.mark.slow
@pytest.mark.exhaustive  # each of them is above or in test_readme_commands.py
def test_readmes_four_commands_from_a_directory_and_a_folder_of_images(root, capsys, monkeypatch, start_training):
    """To a directory that transformers loads, on two ranks."""
    from transformers import AutoModelForImageTextToText

    name = "llava-1.5-7b-hf"
    (root / "models").mkdir()
    (root / "models" / name).symlink_to(root / "qwen3_vl")
    (root / "pets" / "cat.png").write_bytes((root / "pets" / "images" / "0.png").read_bytes())
    (block,) = [each for each in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if "hetmesh init" in each]
    init, train, generate, export = block.replace("/models", f"{root}/models").replace("/data", str(root)).splitlines()

    def run(command: str, *more: str):
        """In this process, which has imported what each command would import anew."""
        (_, *arguments), _, file = (shlex.split(part, comments=True) for part in command.partition(">"))
        assert main([*arguments, *more]) == 0
        printed = capsys.readouterr()
        if file:
            Path(*file).write_text(printed.out)
        return printed

    monkeypatch.chdir(root)
    assert all(command.startswith("hetmesh ") for command in (init, train, generate, export))
    run(init, "--ranks", "2")
    trained = start_training(*shlex.split(train, comments=True)[2:])  # its workers are forked from one thread
    out, err = trained.communicate(timeout=300)
    assert trained.returncode == 0, err
    assert "weights: logits differ from transformers' own by at most" in out
    assert "workers start anew" not in err  # which takes three times as long
    lines = [json.loads(line) for line in (root / "outputs" / name / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "grad_norm" in line] == [1, 2, 3]
    assert "step-3" in run(generate, "--max-new-tokens", "4").err
    run(export)
    before, after = (
        dict(AutoModelForImageTextToText.from_pretrained(path).named_parameters())
        for path in (root / "qwen3_vl", root / "pets_hf")
    )
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[key], after[key]) for key in before)


def test_what_is_wrong_with_directory_or_data_is_said_as_check_says_it(root, written, capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "emu3", "vision_config": {}}')
    (tmp_path / "recipe.toml").write_text(f"[model]\nhf_path = '{tmp_path}'\n")
    assert main(["init", str(tmp_path)]) == 2
    refused = capsys.readouterr().err
    assert main(["check", str(tmp_path / "recipe.toml")]) == 2
    assert capsys.readouterr().err == refused.replace("error: ", f"error: {tmp_path}/recipe.toml: ")
    asked = [{"from": "human", "value": "what is this"}]
    (root / "asked.json").write_text(json.dumps([{"id": "a", "conversations": asked}]))
    for arguments, says in (
        (["--data", "asked.json"], "none of 1 samples of the data that were looked at has a target: nothing in them"),
        (["--data", "qwen3_vl"], "--data = 'qwen3_vl': no conversations in it: one conversation per line of a .jsonl"),
        (["--data", "nowhere"], "--data = 'nowhere': there is no such file"),
        (["--data", "pets", "--ranks", "0"], "--ranks 0: must be above 0"),
        (["--data", "pets", "--machine", "m1"], "machine 'm1': valid are a100, b200, cpu"),
        (["--data", "pets", "--training.stpes", "1"], "did you mean 'steps'?"),
    ):
        assert says in written(*arguments, status=2)
