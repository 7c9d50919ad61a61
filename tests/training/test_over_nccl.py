"""Recipes train over emulated NCCL with the losses of gloo: no hang, nothing read early, everything waited for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import hetmesh
from hetmesh.boundary import World
from hetmesh.recipe.recipe import load_recipe
from hetmesh.testing.emulated_nccl import EmulatedNccl, emulated_world
from hetmesh.testing.parity import run

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes"
STEPS = 2
# What goes how, on which schedule: most of these recipes are run always, the others where `exhaustive` is asked for.
OFTEN = {
    "digits_fsdp": "sequential; ranks without a message; all-to-all, gathers and sums of FSDP",
    "digits_cp_pp": "three_phase; fetches of context parallelism, pipeline, tensor parallelism",
    "digits_interleaved": "interleaved; edges of the same ranks in both directions",
    "digits_bubble_fill": "bubble_fill; a colocated encoder",
    "digits_moe": "tokens that go to experts on other ranks",
}
SMALL_8B = (
    *("--modules.vision.config.num_hidden_layers", "2", "--modules.vision.config.hidden_size", "32"),
    *("--modules.vision.config.num_attention_heads", "2", "--modules.vision.config.intermediate_size", "48"),
    *("--modules.vision.config.image_size", "42", "--data.options.image_shape", "[3, 42, 42]"),
    *("--modules.llm.config.num_hidden_layers", "2", "--modules.llm.config.hidden_size", "64"),
    *("--modules.llm.config.num_attention_heads", "8", "--modules.llm.config.num_key_value_heads", "4"),
    *("--modules.llm.config.head_dim", "8", "--modules.llm.config.intermediate_size", "96"),
    *("--modules.llm.config.vocab_size", "512", "--data.options.vocab_size", "512"),
    *("--data.options.image_token", "511", "--data.options.text_tokens", "[4, 32]"),
    *("--training.local_batch_size", "1", "--training.global_batch_size", "8"),
)
FP64 = ("--training.dtype", "float64")
ALL = {
    **{path.stem: FP64 for path in sorted(RECIPES.glob("digits*.toml"))},
    "digits_moe": (*FP64, "--parallelism.llm.expert_placement_interval", "1"),
    # Its template, llava_style, is run with files of its own: `pytest --emulate-nccl tests/models`.
    "siglip_qwen3_8b": SMALL_8B,
}


def losses(rank, name, overrides, backends):
    """Of each step over gloo, then over each of `backends`; and what those counted."""
    recipe = load_recipe(RECIPES / f"{name}.toml", overrides)
    found, counts = [run(recipe, World.current(), STEPS).losses], []
    for options in backends:
        with emulated_world(EmulatedNccl(**options)) as world:
            found.append(run(recipe, world, STEPS).losses)
            counts.append(world.backend.counts)
    return found, counts


def equal(pool, name, backends):
    ranks = pool.run(losses, name, ALL[name], backends, timeout=300)
    gloo, *others = ([sum(each) for each in zip(*ofs, strict=True)] for ofs in zip(*(f for f, _ in ranks), strict=True))
    assert len(gloo) == STEPS
    for other in others:
        assert other == pytest.approx(gloo, rel=1e-12)
    counts = [each for _, all_counts in ranks for each in all_counts]
    assert sum(each.timed_waits for each in counts) == 0
    return counts


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive) if name != "digits_cp_pp" else name for name in OFTEN],
)
def test_a_recipe_trains_over_nccl_with_the_losses_of_gloo(pool4, name):
    counts = equal(pool4, name, [{}])
    assert sum(each.messages for each in counts) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALL)
def test_every_recipe_trains_over_nccl_whatever_the_delays(pool, name):
    """Also where transports are chosen as on gloo, which sends nearly everything by messages."""
    delayed = [{"delay": 0.004, "seed": seed, "chooses_as": choice} for seed, choice in ((1, "nccl"), (2, "gloo"))]
    equal(pool(8 if name not in OFTEN and load_recipe(RECIPES / f"{name}.toml").world_size > 4 else 4), name, delayed)


TRAINED = (
    *("--training.steps", "4", "--training.local_batch_size", "16", "--lr_scheduler.warmup_steps", "1"),
    *("--validation.freq", "2", "--validation.samples", "10", "--checkpoint.enable", "true"),
    *("--checkpoint.interval", "2", "--metrics.log_freq", "1", "--metrics.enable_tensorboard", "false"),
)


def trained(rank, name, folder, stops):
    """Train, over gloo or emulated NCCL, to the end or to a checkpoint, and from there to the end."""
    recipe = load_recipe(RECIPES / f"{name}.toml", (*TRAINED, "--job.dump_folder", folder))

    def on_step(metrics):
        return metrics.step == 2 and stops

    if "gloo" in folder:
        return hetmesh.train(recipe, on_step=on_step)
    with emulated_world(EmulatedNccl(delay=0.002)) as world:
        summary = hetmesh.train(recipe, on_step=on_step)
        assert world.backend.counts.timed_waits == 0
        return summary


def curve(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [[line[key] for key in ("step", "loss", "grad_norm")] for line in map(json.loads, lines) if "loss" in line]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["digits_cp_pp", "digits_bubble_fill", "digits_fsdp"])
def test_evaluation_and_resume_over_nccl(pool4, tmp_path, name):
    folders = {backend: tmp_path / backend for backend in ("gloo", "nccl")}
    (whole, *_) = pool4.run(trained, name, str(folders["gloo"]), False, timeout=300)
    for stops in (True, False):
        (resumed, *_) = pool4.run(trained, name, str(folders["nccl"]), stops, timeout=300)
    assert len(curve(folders["gloo"])) == 4
    for here, there in zip(*(curve(folder) for folder in folders.values()), strict=True):
        assert here == pytest.approx(there, rel=1e-5)
    assert resumed["validation_loss"] == pytest.approx(whole["validation_loss"], rel=1e-5)


PARITY = sorted(path.name for path in Path(__file__).parent.glob("test_parity*.py"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("file", PARITY)
def test_layouts_equal_one_process_over_nccl(file):
    """All layouts of the tests of parity that are run by default."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--emulate-nccl"]
    done = subprocess.run(
        [*command, str(Path(__file__).parent / file)], capture_output=True, text=True, timeout=1500, cwd=RECIPES.parent
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
