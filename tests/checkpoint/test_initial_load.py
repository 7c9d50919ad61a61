"""`[checkpoint] initial_load_path`: what does not fit is said, on every rank; nothing is lost in silence."""

import contextlib
import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from hetmesh.boundary import World
from hetmesh.checkpoint.fit import Needs, left_out, unused, verdict
from hetmesh.checkpoint.initial_load import check_initial_weights, load_initial_weights
from hetmesh.checkpoint.resume import RunState
from hetmesh.errors import RecipeError
from hetmesh.models.weights.lora import is_adapter
from hetmesh.parallel.apply import Root
from hetmesh.parallel.gradient_sums import local_part
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.training.job import Job
from hetmesh.training.trainer import Trainer

DIGITS = Path(__file__).parents[2] / "recipes" / "digits.toml"
SMALL = ("--training.local_batch_size=4", "--modules.llm.config.num_hidden_layers=2")
PIPELINE = (
    '--parallelism.llm.ranks="0-3"',
    "--parallelism.llm.pipeline_parallel_degree=2",
    "--parallelism.llm.pipeline_parallel_schedule=1f1b",
)
LORA = ("--modules.llm.lora.rank=4", "--modules.llm.lora.alpha=8")
TIED = ("--modules.llm.config.tie_word_embeddings=true",)


def recipe_of(*overrides):
    return load_recipe(DIGITS, (*SMALL, *overrides))


def local(root):
    return {name: local_part(value).clone() for name, value in root.state_dict().items()}


def save(world, folder, *overrides):
    """One step of training and its checkpoint; the folder and what this rank has."""
    trainer = Trainer(resolve(recipe_of(f"--job.dump_folder={folder}", *overrides)), world)
    trainer.train_step()
    trainer.save()
    trainer.reporter.close()
    trainer.upcoming.close()
    return Path(folder, "checkpoint", "step-1"), local(trainer.job.root)


def loaded(world, path, *overrides, exclude=()):
    """What this rank has then, or the error; and what was printed."""
    root, told = Job.assemble(resolve(recipe_of(*overrides)), world).root, io.StringIO()
    try:
        with contextlib.redirect_stdout(told):
            load_initial_weights(world, root, path, exclude)
    except RecipeError as error:
        return str(error)
    return local(root)


def checked(path, *overrides):
    """What one process says, which reads no weights."""
    recipe = recipe_of(f"--checkpoint.initial_load_path={path}", *overrides)
    try:
        return check_initial_weights(resolve(recipe))
    except RecipeError as error:
        return str(error)


def checks(found, plain, lora):
    """It refuses what training has refused, in its words."""
    fewer = "--modules.llm.config.num_hidden_layers=1"
    assert checked(plain, fewer) == found["a layer less"]
    assert checked(plain, fewer, '--checkpoint.exclude_from_loading=["llm.model.layers.1"]') == []
    assert checked(lora) == found["LoRA lost"]
    assert checked(lora, "--modules.llm.lora.rank=2", "--modules.llm.lora.alpha=9") == found["other adapters"]
    assert checked(lora, *LORA) == checked(plain, *LORA) == []


def cases(rank, folder):
    world = World.current()
    plain, _ = save(world, f"{folder}/plain")
    lora, trained = save(world, f"{folder}/lora", *LORA)
    found = {
        "a layer less": loaded(world, plain, "--modules.llm.config.num_hidden_layers=1"),
        "without it": loaded(world, plain, "--modules.llm.config.num_hidden_layers=1", exclude=["llm.model.layers.1"]),
        "tied": loaded(world, plain, *TIED, *PIPELINE),
        "tied, without a head": loaded(world, plain, *TIED, *PIPELINE, exclude=["llm.lm_head"]),
        "LoRA lost": loaded(world, lora, *PIPELINE),
        "fewer adapters": loaded(world, lora, *LORA, '--modules.llm.lora.target_modules=["q_proj"]'),
        "other adapters": loaded(world, lora, "--modules.llm.lora.rank=2", "--modules.llm.lora.alpha=9"),
    }
    if rank == 0:
        checks(found, plain, lora)
    again = loaded(world, lora, *LORA)
    assert not isinstance(again, str), again
    assert again.keys() == trained.keys()
    assert all(torch.equal(again[name], trained[name]) for name in trained)
    if any(map(is_adapter, trained)):
        assert any(each.any() for name, each in trained.items() if ".lora_B." in name)  # not as a new one begins
    job, told = Job.assemble(resolve(recipe_of()), world), io.StringIO()
    with contextlib.redirect_stdout(told):
        load_initial_weights(world, Root((n, m) for n, m in job.root.named_children() if n == "vision"), plain)
    return {name: each if isinstance(each, str) else "" for name, each in found.items()}, told.getvalue()


@pytest.mark.slow
def test_what_a_checkpoint_has_and_a_module_has_not_is_said_on_every_rank(pool4, tmp_path):
    results = pool4.run(cases, str(tmp_path), timeout=200)
    assert all(found == results[0][0] for found, _ in results)
    found = results[0][0]
    assert (
        "modules.llm has no use for 11 of its tensors: llm.model.layers.1.input_layernorm.weight, llm.model"
        in (found["a layer less"])
    )
    assert "name them, or what they are in, in checkpoint.exclude_from_loading" in found["a layer less"]
    assert (
        "llm.model.embed_tokens.weight and llm.lm_head.weight are one here (tied) and two there: set " in found["tied"]
    )
    assert found["without it"] == found["tied, without a head"] == ""
    lost = "it has adapters (LoRA) of rank 4 beside 14 layers of modules.llm, which has no adapters there (llm.model."
    assert lost in found["LoRA lost"]
    assert "or merge them first (hetmesh export RUN DIR) and start from DIR (model.hf_path, or" in found["LoRA lost"]
    assert "lacks" not in found["LoRA lost"]
    assert "beside 12 layers of modules.llm, which has other target_modules there" in found["fewer adapters"]
    assert found["other adapters"].endswith(
        ": modules.llm.lora.rank = 2: its adapters have rank 4; write that; modules.llm.lora.alpha = 9: its adapters "
        "were trained with 8, and would count otherwise; write that"
    )
    assert [told.partition(" also holds ")[2] for _, told in results] == [
        "llm, projector, which this recipe does not have\n",
        "",
        "",
        "",
    ]


def saved(**shapes):
    properties = TensorProperties(dtype=torch.float32)
    return {f"model.{k}": TensorStorageMetadata(properties, torch.Size(size), []) for k, size in shapes.items()}


def test_a_module_that_is_referred_to_is_not_called_missing_and_what_is_excluded_may_be_there_alone():
    root = Root({"vision": nn.Linear(3, 2), "llm": nn.Linear(2, 2)}.items())
    there = saved(**{"llm.weight": (2, 2), "llm.bias": (2,), "llm.more.weight": (7,), "audio.weight": (1,)})
    run = RunState(references={"vision": {"path": "/models/clip", "files": {}}, "video": {"path": "/v", "files": {}}})
    for exclude, expected in (
        ((), ["it does not hold modules.vision, which was frozen, but refers to /models/clip", "has no use for 1 of"]),
        (("vision", "llm.more", "audio"), []),
    ):
        needs = Needs.of(root, exclude, there, run.references)
        told = verdict([replace(needs, state={}), Needs()], exclude, there, run)
        assert len(told) == len(expected)
        assert all(part in text for part, text in zip(expected, told, strict=True))
        assert left_out([needs], exclude, there) == ([] if exclude else ["audio"])
        assert unused([needs], (*exclude, "ll", "llm.mor"), there) == ["ll", "llm.mor"]
