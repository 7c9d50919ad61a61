"""Whole runs of recipes with modules after the LLM: what they record, leave out, refuse and go on from."""

import json
import math
import signal

import pytest
import torch

import hetmesh
from hetmesh.boundary import World
from hetmesh.cli.check import checked
from hetmesh.data.source import Sample
from hetmesh.errors import LossError, NonFiniteError, RecipeError, SampleError
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.sources import RandomMedia
from hetmesh.training.job import Job
from hetmesh.training.trainer import Trainer
from support.losses import distances, mean_distance, smoothed
from support.signal_points import SignalPoint

pytestmark = pytest.mark.slow

RECIPE = """
[modules.vision]
model = "siglip"
config = { hidden_size = 8, num_hidden_layers = 1, num_attention_heads = 2, patch_size = 4, intermediate_size = 12 }
loss = { kind = "support.losses:squares", unit = "items", weight = 0.1 }
[modules.llm]
model = "qwen3"
config = { hidden_size = 8, num_hidden_layers = 2, num_attention_heads = 2, head_dim = 4, intermediate_size = 12 }
[modules.drawer]
model = "flow"
config = { queries = 2, hidden_size = 8, num_hidden_layers = 2, num_attention_heads = 2, patch_size = 4 }
loss = { kind = "flow_matching", weight = 0.5 }
[modules.pose]
model = "mlp"
config = { out_features = 3 }
loss = { kind = "support.losses:distances", unit = "latents", weight = 0.3 }
[[boundaries]]
from = "vision"
to = "llm"
at = "image"
[[boundaries]]
from = "llm"
to = "drawer"
at = "drawing"
[[boundaries]]
from = "llm"
to = "pose"
at = "pose"
[data]
source = "hetmesh.testing.sources:RandomMedia"
[data.options]
kinds = { image = [1, 8, 8], drawing = [1, 8, 8], pose = [2, 3] }
held_out = 5
text_only = 0.2
[training]
dtype = "float64"
local_batch_size = 4
steps = 6
[metrics]
enable_tensorboard = false
[validation]
samples = 5
freq = 3
[optimizer]
lr = 1e-2
eps = 1e-2
"""
LOSSES = {"llm", "vision", "drawer", "pose"}
APART = """
[parallelism.llm]
ranks = [0]
pipeline_parallel_microbatch_size = 2
[parallelism.vision]
ranks = [1]
[parallelism.drawer]
ranks = [1]
[parallelism.pose]
ranks = [1]
"""
TOGETHER = """
[parallelism.llm]
ranks = [0, 1]
tensor_parallel_degree = 2
[parallelism.drawer]
ranks = [1, 0]
pipeline_parallel_degree = 2
"""


class SomeUnreadable(RandomMedia):
    """Of every third sample nothing can be read: with `without`, it has no target and no media instead, of which
    nothing else depends."""

    def __init__(self, *args, without=False, **options):
        super().__init__(*args, **options)
        self.without = without

    def load(self, index, kinds=None):
        if index % 3 == 0 and not self.without:
            raise SampleError(f"sample {index}: its file is broken")
        return super().load(index, kinds)

    def _make(self, index):
        meta, sample = super()._make(index)
        if index % 3 or not self.without:
            return meta, sample
        text = torch.full((2,), self.words - 1)
        return type(meta)(meta.id, 2, (), ()), Sample(sample.id, text, {kind: [] for kind in self.kinds})


def steps_of(recipe, world, count=2):
    """Losses of some steps, and the gradients of the last."""
    job = Job.assemble(resolve(recipe), world)
    results = [job.forward_backward() for _ in range(count)]
    job.upcoming.close()
    return results, {name: p.grad for name, p in job.root.named_parameters()}


def test_samples_that_cannot_be_read_add_nothing_to_any_loss(world):
    source = ("--data.source", "test_output_runs:SomeUnreadable")
    skipping = parse_recipe(RECIPE, (*source, "--data.on_bad_sample", "skip", "--training.local_batch_size", "6"))
    without = parse_recipe(RECIPE, (*source, "--data.options.without", "true", "--training.local_batch_size", "6"))
    results, gradients = steps_of(skipping, world)
    expected, truth = steps_of(without, world)
    assert sum(result.samples_skipped for result in results) > 0
    for result, other in zip(results, expected, strict=True):
        assert result.losses.keys() == LOSSES
        assert dict(result.losses) == pytest.approx(dict(other.losses), rel=1e-10)
        assert result.grad_norm == pytest.approx(other.grad_norm, rel=1e-10)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, truth[name], rtol=1e-10, atol=1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["APART", "TOGETHER"])
def test_what_cannot_be_read_adds_nothing_in_any_layout(pool4, world, layout):
    keys = ("--data.source", "test_output_runs:SomeUnreadable", "--data.on_bad_sample", "skip")
    recipe = parse_recipe(RECIPE + globals()[layout], (*keys, "--training.local_batch_size", "6"))
    expected, _ = steps_of(parse_recipe(RECIPE, (*keys, "--training.local_batch_size", "6")), world)
    for found in pool4.run(losses_on_this_rank, recipe):
        for (losses, norm), result in zip(found, expected, strict=True):
            assert losses == pytest.approx(dict(result.losses), rel=1e-10)
            assert norm == pytest.approx(result.grad_norm, rel=1e-10)


def losses_on_this_rank(rank, recipe):
    return [(dict(result.losses), result.grad_norm) for result in steps_of(recipe, World.current())[0]]


@pytest.mark.parametrize("name", ["drawer", "pose"])
def test_a_loss_that_is_not_finite_is_named(world, tmp_path, name):
    recipe = parse_recipe(RECIPE, ("--job.dump_folder", str(tmp_path)))
    trainer = Trainer(resolve(recipe), world)
    with torch.no_grad():
        list(trainer.job.root.get_submodule(name).parameters())[-1].fill_(math.nan)
    with pytest.raises(NonFiniteError, match=rf"^step 1: the loss of {name} \(rank 0\) and .*parameters of {name}"):
        trainer.run()


def endless(output, batch):
    return output.square().sum() + math.inf


def test_a_loss_that_is_only_measured_need_not_be_finite(world, tmp_path):
    measured = ("--modules.drawer.loss.weight", "0.0", "--modules.drawer.trainable", "false")
    keys = ("--job.dump_folder", str(tmp_path), "--training.steps", "2", *measured)
    summary = hetmesh.train(parse_recipe(RECIPE, keys), loss={"drawer": endless})
    steps, evaluated = lines_of(tmp_path)
    for line in (*steps, evaluated[-1]["validation"]):
        assert math.isfinite(line["loss"])
        assert line["losses"]["drawer"] is None
    assert math.isfinite(summary["validation_loss"])


def test_several_custom_losses_from_python_and_a_mean_is_found_out(world, tmp_path):
    recipe = parse_recipe(RECIPE, ("--job.dump_folder", str(tmp_path), "--training.steps", "2"))
    assert hetmesh.train(recipe, loss={"llm": smoothed, "drawer": distances})["steps"] == 2
    with pytest.raises(LossError, match=r"mean_distance: must be a sum over its rows"):
        hetmesh.train(recipe, loss={"llm": smoothed, "drawer": mean_distance})
    with pytest.raises(RecipeError, match=r"loss of 'painter': the modules with a loss are vision, llm, drawer, pose"):
        hetmesh.train(recipe, loss={"painter": distances})
    with pytest.raises(RecipeError, match=r"loss of 'drawer': must be a function .* summed loss, got 'mse'"):
        hetmesh.train(recipe, loss={"drawer": "mse"})
    with hetmesh.open_job(recipe) as job:
        own = job.forward_backward()
    with hetmesh.open_job(recipe, loss={"llm": smoothed, "drawer": distances}) as job:
        other = job.forward_backward()
    assert {name for name in LOSSES if own.losses[name] != other.losses[name]} == {"llm", "drawer"}
    assert other.loss == pytest.approx(sum(weight * other.losses[n] for n, weight in WEIGHTS.items()), rel=1e-12)


WEIGHTS = {"llm": 1.0, "vision": 0.1, "drawer": 0.5, "pose": 0.3}


def lines_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line], [line for line in lines if "validation" in line]


@pytest.mark.exhaustive
def test_a_run_records_every_loss_and_goes_on_where_it_was_killed_also_in_another_layout(start_training, tmp_path):
    (tmp_path / "apart.toml").write_text(RECIPE + APART)
    (tmp_path / "together.toml").write_text(RECIPE + TOGETHER)
    saves = ("--checkpoint.enable", "true", "--checkpoint.interval", "2")
    kill = SignalPoint("hetmesh.training.trainer:take_step", rank=1, call=4, after=True, to="group")

    def end(name, layout, *keys, status=0, **how):
        process = start_training(tmp_path / f"{layout}.toml", "--job.dump_folder", str(tmp_path / name), *keys, **how)
        out, err = process.communicate(timeout=300)
        assert process.returncode == status, (out, err)
        return out

    out = end("whole", "apart")
    steps, evaluated = lines_of(tmp_path / "whole")
    assert [line["step"] for line in steps] == list(range(1, 7))
    for line in steps:
        assert line["losses"].keys() <= LOSSES  # a batch may have none of one
        assert line["loss"] == pytest.approx(sum(WEIGHTS[n] * loss for n, loss in line["losses"].items()), rel=1e-6)
    assert set().union(*(line["losses"] for line in steps)) == LOSSES
    assert [line["validation"]["losses"].keys() for line in evaluated] == [LOSSES, LOSSES]
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["validation_losses"] == evaluated[-1]["validation"]["losses"]
    for name in LOSSES:
        assert f"  {name} " in out
        assert f"  loss/{name} " in out
    for name, layout in (("killed", "apart"), ("moved", "apart")):
        end(name, layout, *saves, status=-signal.SIGKILL, points=(kill,))
    end("killed", "apart", *saves)
    end("moved", "together", *saves)
    for name, limit in (("killed", 0.0), ("moved", 1e-9)):
        again, other = lines_of(tmp_path / name)
        last = {line["step"]: line for line in again}
        assert sorted(last) == list(range(1, 7))
        for line in steps:
            for module, loss in line["losses"].items():
                assert last[line["step"]]["losses"][module] == pytest.approx(loss, rel=limit, abs=0)
            assert last[line["step"]]["grad_norm"] == pytest.approx(line["grad_norm"], rel=limit, abs=0)
        for module, loss in evaluated[-1]["validation"]["losses"].items():
            assert other[-1]["validation"]["losses"][module] == pytest.approx(loss, rel=limit, abs=0)


REFUSED = {
    "a loss without a unit": (
        ('"support.losses:distances", unit = "latents"', '"support.losses:distances"'),
        r"modules\.pose\.loss\.unit is missing: say what 'support\.losses:distances' is divided by",
    ),
    "a placeholder that no sample has": (('at = "pose"', 'at = "gesture"'), r"boundaries\[2\]\.at = 'gesture': data"),
    "a target of another shape": (
        ("pose = [2, 3]", "pose = [2, 4]"),
        r"pose\.config\.out_features\), .* must be that$",
    ),
    "an image that patches do not cover": (
        ("drawing = [1, 8, 8]", "drawing = [1, 9, 9]"),
        r"modules\.drawer\.config\.p",
    ),
    "a loss that is nowhere": (
        ("losses:distances", "losses:nothing"),
        r"modules\.pose\.loss\.kind = 'support\.losses:n",
    ),
    "a layer that there is not": (('at = "pose"', 'at = "pose"\nlayer = "layers.1"'), r"boundaries\[2\]\.layer = 'lay"),
    "the embedding as a layer": (
        ('at = "pose"', 'at = "pose"\nlayer = "model.embed_tokens"'),
        r"boundaries\[2\]\.layer = .* behind model\.layers\.0 to model\.norm can be read",
    ),
    "the head as a layer": (('at = "pose"', 'at = "pose"\nlayer = "lm_head"'), r"boundaries\[2\]\.layer = 'lm_head'"),
    "a generator whose rows nobody keeps": (
        ("[data]\n", '[[boundaries]]\nfrom = "drawer"\nto = "pose"\n[data]\n'),
        r"modules\.drawer\.loss: 'drawer' hands its rows on to 'pose'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_with_its_key(what):
    (old, new), message = REFUSED[what]
    assert old in RECIPE
    with pytest.raises(RecipeError, match=message):
        checked(parse_recipe(RECIPE.replace(old, new)))
