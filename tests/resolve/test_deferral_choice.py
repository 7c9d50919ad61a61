"""`[balance] deferral` of a run: on where simulated steps are shorter with it and fit, for all of the run."""

import json

import pytest

from benchmarks.straggler.source import recipe as charts
from hetmesh.api import train
from hetmesh.cli import main
from hetmesh.recipe.recipe import load_recipe
from hetmesh.report import explain
from hetmesh.resolve.deferral import DeferralChoice
from hetmesh.resolve.predictions import step_memory
from hetmesh.resolve.recipe_step_model import agreed_step_model
from hetmesh.resolve.resolved import check_first_batch, resolve
from hetmesh.simulate import simulate

RECIPE = """
[modules.vision]
model = "siglip"
[modules.vision.config]
hidden_size = 64
num_hidden_layers = 3
num_attention_heads = 2
patch_size = 8
image_size = 64
intermediate_size = 128
[modules.projector]
model = "mlp"
[modules.llm]
model = "qwen3"
[modules.llm.config]
hidden_size = 64
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
intermediate_size = 128
[[boundaries]]
from = "vision"
to = "projector"
[[boundaries]]
from = "projector"
to = "llm"
at = "image"
[data]
source = "synthetic"
[data.options]
vocab_size = 1000
image_token = 999
image_shape = [3, 64, 64]
max_images = 8
text_only = 0.5
text_tokens = [8, 1024]
[training]
local_batch_size = 64
pack_samples = true
steps = 20
[balance]
policy = "entrain"
[parallelism]
pipeline_parallel_schedule = "1F1B"
pipeline_parallel_microbatch_size = 8
[parallelism.vision]
ranks = "0"
[parallelism.llm]
ranks = "1-2"
pipeline_parallel_degree = 2
"""


@pytest.fixture
def given(tmp_path):
    """Resolves the recipe with some keys changed."""
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return lambda *keys: resolve(load_recipe(path, keys))


def steps_of(resolved):
    """The four sampled batches of 20 steps, and their simulated seconds."""
    loader, model = resolved.loader(), agreed_step_model(resolved.recipe, resolved.graph, resolved.shapes)
    plans = [resolved.plan(loader.batch(step).metas) for step in (0, 5, 10, 15)]
    schedules = [resolved.schedules.of(plan) for plan in plans]
    costs = (model.costs(plan, schedule) for plan, schedule in zip(plans, schedules, strict=True))
    return plans, sum(simulate(*each).makespan for each in zip(schedules, costs, strict=True))


@pytest.mark.parametrize("split", ["false", "true"])
def test_it_is_on_where_simulated_steps_are_shorter(given, split):
    key = f"--balance.split_deferred_backward={split}"
    auto, always, never = given(key), given(key, "--balance.deferral=true"), given("--balance.deferral=false")
    (deferred, seconds), (plain, longer) = steps_of(always), steps_of(never)
    assert auto.deferral.on
    assert auto.deferral.saved == pytest.approx(1 - seconds / longer)
    assert auto.deferral.saved > 0.02
    assert [plan.lanes for plan in steps_of(auto)[0]] == [plan.lanes for plan in deferred]
    assert any(plan.routes.pairs for plan in deferred)
    assert not any(plan.routes.pairs for plan in plain)


def test_auto_defers_where_charts_of_16k_patches_gain_by_it():
    sizes = {"width": 256, "smaller": 4.5, "vision_layers": 4, "llm_layers": 4, "microbatch": 4, "microbatches": 32}
    found = resolve(charts("auto", "recipe", law="chart-16k", **sizes)).deferral
    assert found.on
    assert 0.01 <= found.saved < 0.05


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("--balance.policy=auto",), "defers nothing in sampled batches"),
        (("--balance.policy=lpt",), "'lpt' defers nothing"),
        (("--data.options.max_images=1", "--data.options.text_only=0.0"), "less than 1%"),
        (("--training.local_batch_size=8",), "two microbatches or more"),
        (("--balance.deferral=false",), "as balance.deferral says"),
    ],
)
def test_elsewhere_it_is_off_and_says_why(given, keys, said):
    resolved = given(*keys)
    assert not resolved.deferral.on
    assert said in str(resolved.deferral)
    assert not resolved.balance.deferral


def test_it_is_off_where_it_does_not_fit(given, tmp_path):
    machine = tmp_path / "machine.toml"

    def with_memory(size, *keys):
        machine.write_text(f"memory_bytes = {size}\nmemory_bandwidth = 1e10\npeak_flops = {{ float32 = 5e10 }}\n")
        return given(f"--metrics.machine={machine}", *keys)

    resolved = with_memory(10**12, "--balance.deferral=true")
    model = resolved.step_model()
    plans, _ = steps_of(resolved)
    held = max(memory.total for plan in plans for memory in step_memory(resolved, model, plan).values())
    assert with_memory(2 * held).deferral.on
    choice = with_memory(held - 1).deferral
    assert not choice.on
    assert "would hold" in str(choice)


def test_explain_says_it_and_what_the_encoder_holds(given, capsys, tmp_path):
    rows = {}
    for key in ("balance.deferral=false", "balance.deferral=true", "balance.split_deferred_backward=true"):
        assert main(["explain", str(tmp_path / "recipe.toml"), f"--{key}"]) == 0
        out = capsys.readouterr().out
        assert ("deferral is on: in simulated steps" in out) is (key == "balance.split_deferred_backward=true")
        view = explain(given(f"--{key}"))
        rows[key] = view.modules[0].held[0]
        assert f"vision.0: {rows[key].microbatches} of " in out
    whole, split = rows["balance.deferral=true"], rows["balance.split_deferred_backward=true"]
    assert whole.microbatches == 1 + rows["balance.deferral=false"].microbatches
    assert split.rows < whole.rows  # what is not deferred goes a microbatch sooner


def test_what_a_checkpoint_says_holds_after_the_check_of_caps_too(given):
    """`hetmesh train` in one process, or under torchrun, has balanced a batch by then."""
    resolved = given("--balance.max_tokens.llm=100000")
    check_first_batch(resolved)
    assert resolved.balance.deferral
    resolved.keep_deferral(DeferralChoice(False, "as it was"))
    assert not resolved.balance.deferral


def trained(rank, recipe):
    train(recipe)


@pytest.mark.slow
@pytest.mark.exhaustive  # what a checkpoint says is above
def test_a_run_that_goes_on_defers_as_before_and_its_events_say_so(given, pool, tmp_path):
    machine = tmp_path / "machine.toml"
    machine.write_text("memory_bytes = 1000\nmemory_bandwidth = 1e10\npeak_flops = { float32 = 5e10 }\n")
    folder = tmp_path / "run"
    small = ("--training.local_batch_size=16", "--parallelism.pipeline_parallel_microbatch_size=2", "--debug.seed=1")
    keys = (*small, f"--job.dump_folder={folder}", "--checkpoint.enable=true", "--profiling.timeline=false")
    assert given(*keys, "--training.steps=2").deferral.on
    assert not given(*keys, "--training.steps=4", f"--metrics.machine={machine}").deferral.on
    for more in (["--training.steps=2"], ["--training.steps=4", f"--metrics.machine={machine}"]):
        pool(3).run(trained, given(*keys, *more).recipe, timeout=300)
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    starts = [(event["step"], event["deferral"]) for event in events if event["event"] == "started"]
    assert [step for step, _ in starts] == [0, 2]
    assert starts[0][1] == starts[1][1]
    assert starts[0][1].startswith("on: in simulated steps of 2 batches it saves")
