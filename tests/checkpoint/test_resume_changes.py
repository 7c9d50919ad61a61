"""What a resumed run takes from a changed recipe, from its first step on, and what it refuses by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from hetmesh.boundary import init
from hetmesh.checkpoint import resume
from hetmesh.checkpoint.resume import changes, check_changes, check_configs, check_model, described
from hetmesh.errors import CheckpointError, RecipeError
from hetmesh.recipe.recipe import load_recipe
from hetmesh.records import checksums
from hetmesh.resolve.resolved import resolve
from hetmesh.training.trainer import Trainer
from support.profiles import write_profile

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_single.toml"


def recipe(folder, *overrides):
    small = (
        *("--training.local_batch_size", "2", "--training.steps", "4", "--validation.samples", "2"),
        *("--modules.llm.config.num_hidden_layers", "1", "--modules.vision.config.num_hidden_layers", "1"),
        *("--checkpoint.enable", "true", "--lr_scheduler.warmup_steps", "0", "--lr_scheduler.decay_type", "linear"),
        *("--metrics.enable_tensorboard", "false", "--modules.llm.lr", "1e-3"),
    )
    return load_recipe(RECIPE, (*small, "--job.dump_folder", str(folder), *overrides))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run's folder with a checkpoint of step 2."""
    folder, world = tmp_path_factory.mktemp("made") / "run", init()
    trainer = Trainer(resolve(recipe(folder)), world)
    for _ in range(2):
        trainer.reporter.step(trainer.train_step())
    trainer.save()
    trainer.reporter.close()
    world.close()
    return folder


@pytest.fixture
def saved(made, tmp_path):
    """A copy of it for each test."""
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.mark.slow
def test_changed_options_hold_from_the_first_resumed_step(saved, world):
    """With a learning rate of 0 nothing moves; with weight decay alone parameters shrink by just that."""
    zero = ("--optimizer.lr", "0", "--modules.llm.lr", "0")
    still = Trainer(resolve(recipe(saved, *zero)), world)
    before = [p.clone() for p in still.job.parameters()]
    metrics = still.train_step()
    assert (metrics.step, metrics.lr) == (3, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, still.job.parameters(), strict=True))
    still.reporter.close()

    # betas of 0 and a huge eps: AdamW's own update vanishes, its decay is lr * weight_decay * factor
    decay = ("--optimizer.lr", "0.5", "--modules.llm.lr", "0.25", "--optimizer.weight_decay", "0.5")
    decay = (
        *decay,
        "--optimizer.eps",
        "1e12",
        "--lr_scheduler.warmup_steps",
        "4",
        "--lr_scheduler.min_lr_factor",
        "0.5",
    )
    shrunk = Trainer(resolve(recipe(saved, *decay)), world)
    before = {name: p.clone() for name, p in shrunk.job.root.named_parameters()}
    metrics = shrunk.train_step()
    shrunk.reporter.close()
    assert metrics.lr == 0.5 * 3 / 4  # the third of four steps of the new warm-up
    for name, p in shrunk.job.root.named_parameters():
        rate = 0.25 if name.startswith("llm.") else 0.5
        torch.testing.assert_close(p, before[name] * (1 - rate * 3 / 4 * 0.5), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_resumed_run_says_so_and_what_has_changed(saved, world, capsys):
    Trainer(resolve(recipe(saved, "--optimizer.lr", "0.001", "--training.steps", "3")), world).run()
    out = capsys.readouterr().out
    assert f"resuming at step 2 of {saved}\n" in out
    assert "changed since, and taken from step 3 on: optimizer.lr 0.002 -> 0.001, training.steps 4 -> 3\n" in out
    assert f"results are in {saved}: summary.json, metrics.jsonl, checkpoint/\n" in out
    lines = [json.loads(line) for line in (saved / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]


@pytest.mark.slow
def test_a_resumed_run_says_that_its_profile_has_changed(saved, world, capsys, tmp_path):
    """E1: what balancers go by; the file has the same name, and other seconds in it."""
    path, digests = tmp_path / "profile.json", []
    for step in (3, 4):
        profile = write_profile(path, resolve(recipe(saved)), {"llm": float(step)})
        digests.append(profile.digest)
        keys = (f"--profiling.profile={path}", f"--training.steps={step}")
        Trainer(resolve(recipe(saved, *keys)), world).run()
    out = capsys.readouterr().out
    assert f'profiling.profile nothing -> "{digests[0]}"' in out
    assert f'profiling.profile "{digests[0]}" -> "{digests[1]}"' in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        (("--optimizer.name", "SGD"), r'optimizer\.name = "SGD": the checkpoint .*step-2 is of a run with "AdamW"'),
        (("--training.dtype", "float64"), r'training\.dtype = "float64": .* is of a run with "float32"; restore it'),
        (("--debug.seed", "1"), r"debug\.seed = 1: .* is of a run with 0; restore it, or start a new run"),
        (("--data.source", "synthetic"), r'data\.source = "synthetic": .* is of a run with "digits"; restore it'),
        (
            ("--modules.llm.config.intermediate_size", "128"),
            r"does not fit .*; keys that have changed: modules\.llm\.config\.intermediate_size 256 -> 128",
        ),
        (
            ("--modules.llm.config.num_attention_heads", "2", "--modules.llm.config.head_dim", "48"),
            r"does not fit .*; keys that have changed: modules\.llm\.config\.head_dim 24 -> 48",
        ),
        (("--modules.llm.config.rms_norm_eps", "0.1"), r"rms_norm_eps = 0\.1: .* is of a model with nothing; restore"),
        (
            ("--modules.llm.attention_mask", "bidirectional_media"),
            r'attention_mask = "bidirectional_media": .* is of a model with "causal"; restore',
        ),
    ],
    ids=["optimizer", "dtype", "seed", "source", "shapes", "heads", "eps", "mask"],
)
def test_what_cannot_change_is_refused_by_name(saved, world, override, message):
    other = recipe(saved, *override)
    if override[0] == "--data.source":  # whose vocabulary would not fit either
        with pytest.raises(RecipeError, match=message):
            check_changes(changes(recipe(saved).model_dump(mode="json", by_alias=True), other), saved / "step-2")
        return
    with pytest.raises(RecipeError, match=message):
        Trainer(resolve(other), world)


@pytest.mark.slow
def test_u27_a_run_is_resumed_with_other_libraries_and_says_so(saved, world, monkeypatch):
    now = resume.versions()
    assert {"python", "torch", "transformers"} <= now.keys()
    monkeypatch.setattr(resume, "versions", lambda: now | {"torch": "9.9"})
    trainer = Trainer(
        resolve(recipe(saved, "--modules.vision.config.attention_dropout", "0.1")), world
    )  # which may change
    trainer.reporter.close()
    assert trainer.notes[-1] == f"other libraries than those that it was saved with: torch {now['torch']} -> 9.9"


@pytest.mark.slow
def test_u27_another_batch_size_goes_on_at_the_same_sample(saved, world):
    before = Trainer(resolve(recipe(saved)), world).job.loader
    after = Trainer(resolve(recipe(saved, "--training.local_batch_size", "4")), world).job.loader
    assert (before.step, after.step) == (2, 2)
    assert after.indices(2) == before.indices(2) + before.indices(3)


def test_changes_of_what_is_not_trained_are_no_changes(tmp_path):
    old = recipe(tmp_path).model_dump(mode="json", by_alias=True)
    assert changes(old, recipe(tmp_path / "b", "--metrics.log_freq", "3", "--checkpoint.interval", "7")) == {}
    assert changes(None, recipe(tmp_path)) == {}
    found = changes(old, recipe(tmp_path, "--parallelism.llm.ranks", "[0]", "--optimizer.name", "Adam"))
    check_changes(found, tmp_path)  # Adam's state is AdamW's
    told = 'optimizer.name "AdamW" -> "Adam", parallelism.llm.ranks nothing -> [0]'
    assert described(found) == told  # no table of parallelism is one of defaults


def test_keys_that_an_older_version_did_not_save_are_no_changes(tmp_path):
    old = recipe(tmp_path).model_dump(mode="json", by_alias=True)
    for table, key in (("data", "order"), ("data", "phases"), ("balance", "split_deferred_backward")):
        del old[table][key]
    assert changes(old, recipe(tmp_path)) == {}
    with pytest.raises(RecipeError, match=r'data\.order = "given": .* is of a run with "shuffled"; restore it'):
        check_changes(changes(old, recipe(tmp_path, "--data.order", "given")), tmp_path)


def test_what_of_a_model_cannot_change():
    """Where the checkpoint fits all the same."""
    boundaries = [{"from": "vision", "to": "llm", "at": "<image>"}, {"from": "audio", "to": "llm", "at": "<audio>"}]
    for same in (
        {"modules.llm.lora.dropout": (0.0, 0.1), "modules.llm.config.attention_dropout": (0.0, 0.1)},
        {
            "modules.llm.trainable": (True, False),
            "modules.llm.lr": (None, 0.1),
            "modules.vision.media": (None, "image"),
        },
        {"boundaries": (boundaries, boundaries[::-1])},
    ):
        check_model(same, Path("step-2"))
    for key, old, new in (
        ("modules.llm.lora.alpha", 16, 64),
        ("modules.llm.model", "qwen3", "llama"),
        ("modules.vision.media", "image", "video"),
        ("boundaries", boundaries, boundaries[:1]),
    ):
        with pytest.raises(RecipeError, match=rf"^{key} = .* step-2 is of a model with "):
            check_model({key: (old, new)}, Path("step-2"))


def test_a_directory_whose_config_has_changed_is_another_model():
    saved = {"llm": {"text_config": {"rope_theta": 1e4, "attention_dropout": 0.1}, "transformers_version": "5.1"}}
    check_configs(
        saved, {"llm": {"text_config": {"rope_theta": 1e4}, "dtype": "float32"}, "vision": {}}, Path("step-2")
    )
    check_configs({}, saved, Path("step-2"))
    told = r"modules\.llm\.initial_load_path: text_config\.rope_theta = 5\.0 in its config\.json; .* with 10000\.0"
    with pytest.raises(RecipeError, match=told):
        check_configs(saved, {"llm": {"text_config": {"rope_theta": 5.0}}}, Path("step-2"))


@pytest.mark.slow
def test_a_checkpoint_under_another_ones_name_is_refused(saved, world):
    (saved / "checkpoint" / "step-2").rename(saved / "checkpoint" / "step-3")
    with pytest.raises(CheckpointError, match=r"step-3 holds the state after step 2: .*; call it step-2 again"):
        Trainer(resolve(recipe(saved)), world)


@pytest.mark.slow
def test_damage_of_what_a_checkpoint_says_of_its_run_is_told(saved, world):
    path = saved / "checkpoint" / "step-2"
    part = next(each for each in checksums.read_manifest(path) if each.name == resume.RUN)
    with open(path / part.file, "r+b") as stream:
        stream.seek(part.offset + part.length // 2)
        stream.write(b"\0")
    with pytest.raises(CheckpointError, match=r"is damaged: extra\.run in .* has changed; restore it"):
        Trainer(resolve(recipe(saved)), world)


@pytest.mark.slow
def test_a_resumed_run_does_without_the_weights_that_it_once_began_with(saved, world):
    trainer = Trainer(resolve(recipe(saved, "--checkpoint.initial_load_path", str(saved / "gone"))), world)
    assert trainer.step == 2
    trainer.reporter.close()
