"""Training from Python: a loop, loss and optimizer of one's own equal a run of the recipe."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import hetmesh
from hetmesh.boundary import World
from hetmesh.errors import BoundaryError, LaunchError, LossError, NonFiniteError, RecipeError, SampleError
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.resolve.summary import summary
from hetmesh.testing.parity import Outcome, compare
from hetmesh.training.trainer import Trainer

RECIPES = Path(__file__).parents[2] / "recipes"
STEPS = 3


def recipe(name, folder, *overrides):
    given = (
        *("--training.dtype", "float64", "--training.local_batch_size", "8", "--training.steps", str(STEPS)),
        *("--training.max_norm", "0.5", "--job.dump_folder", str(folder), "--lr_scheduler.warmup_steps", "0"),
        *("--lr_scheduler.min_lr_factor", "1.0", "--metrics.enable_tensorboard", "false", "--validation.samples", "6"),
        *("--optimizer.lr", "2e-3", "--optimizer.eps", "0.01", "--optimizer.weight_decay", "0.1"),
    )
    size = ("--parallelism.llm.pipeline_parallel_microbatch_size", "2") if name == "digits_cp_pp" else ()
    return load_recipe(RECIPES / f"{name}.toml", (*given, *size, *overrides))


def outcome(losses, job):
    full = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in job.root.named_parameters()}
    return Outcome(tuple(losses), {}, {name: p.detach().clone() for name, p in full.items()})


def summed(logits, batch):
    return cross_entropy(logits, batch["targets"], reduction="sum")


def both(rank, given):
    """The outcome of the recipe's own run, and that of a loop around a job with an optimizer of torch."""
    trainer = Trainer(resolve(given), World.current())
    trainer.reporter.close()
    taken = [trainer.train_step() for _ in range(STEPS)]
    whole = outcome([m.loss for m in taken], trainer.job)
    norms, losses = [m.grad_norm for m in taken], []
    with hetmesh.open_job(given, loss=summed) as job:
        o = given.optimizer
        options = {"lr": o.lr, "betas": (o.beta1, o.beta2), "eps": o.eps, "weight_decay": o.weight_decay}
        optimizer = torch.optim.AdamW(job.parameters(), **options, foreach=False)
        for norm in norms:
            result = job.forward_backward(max_norm=0.5)
            assert result.grad_norm == pytest.approx(norm, rel=1e-12)
            assert (result.samples, result.finite) == (given.batch.global_batch_size, True)
            optimizer.step()
            losses.append(result.loss)
        own = outcome(losses, job)
    alone = rank == 0
    return [Outcome(o.losses if alone else (0.0,) * STEPS, {}, o.parameters) for o in (whole, own)]


@pytest.mark.slow
@pytest.mark.parametrize(  # the layout of `digits` is that of the page's script, too: `test_readme.py`
    "name", ["digits_fsdp", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("digits", "digits_cp_pp"))]
)
def test_a_loop_of_ones_own_equals_the_recipes_run(pool4, tmp_path, name):
    ranks = pool4.run(both, recipe(name, tmp_path), timeout=120)
    expected = [each[0] for each in ranks]
    parameters = {name: p for each in expected for name, p in each.parameters.items()}
    compare(Outcome(expected[0].losses, {}, parameters), [each[1] for each in ranks], 1e-10)
    compare(Outcome(expected[0].losses, {}, parameters), expected, 1e-10)


def smooth(logits, batch):
    return cross_entropy(logits, batch["targets"], reduction="sum", label_smoothing=0.1)


def with_hooks(rank, given):
    seen = []

    def on_step(metrics):
        seen.append(metrics.loss)
        return rank == 3 and metrics.step == 2  # one rank is enough

    return seen, hetmesh.train(given, loss=smooth, on_step=on_step)


@pytest.mark.slow
def test_a_loss_of_ones_own_and_a_run_that_a_callback_ends(pool4, tmp_path):
    given = recipe("digits", tmp_path, "--training.steps", "9", "--validation.enable", "false")
    ranks = pool4.run(with_hooks, given, timeout=120)
    assert all(seen == ranks[0][0] for seen, _ in ranks)
    seen, summary = ranks[0]
    assert len(seen) == summary["steps"] == 2
    assert summary["stopped_by_on_step"]
    with hetmesh.open_job(recipe("digits_single", tmp_path), loss=smooth) as job:
        assert job.forward_backward().loss == pytest.approx(seen[0], rel=1e-10)
    with hetmesh.open_job(recipe("digits_single", tmp_path)) as job:
        assert job.forward_backward().loss != pytest.approx(seen[0], rel=1e-3)


VALUED = ("--data.source", "support.valued_digits:ValuedDigits", "--training.local_batch_size", "6")


def rewarded(logits, batch):
    """Of the tokens' own weights and the rewards of their samples."""
    weight, reward = batch["values.weight"], batch["values.reward"]
    assert torch.equal(weight, 1 + batch["targets"].double() / 7)  # each is where its target is
    return (weight * reward * cross_entropy(logits, batch["targets"], reduction="none")).sum()


def by_rewards(rank, given):
    with hetmesh.open_job(given, loss=rewarded) as job:
        optimizer = torch.optim.SGD(job.parameters(), lr=0.01, foreach=False)
        losses = []
        for _ in range(STEPS):
            losses.append(job.forward_backward().loss)
            optimizer.step()
        return outcome(losses if rank == 0 else (0.0,) * STEPS, job)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param("digits", (), marks=pytest.mark.exhaustive),  # tensor parallel
        ("digits_cp_pp", ()),
        pytest.param("digits_homogeneous", ("--training.pack_samples", "true"), marks=pytest.mark.exhaustive),
    ],
)
def test_values_of_samples_reach_a_loss_of_ones_own_in_every_layout(pool4, tmp_path, name, more):
    given = recipe(name, tmp_path, *VALUED, *more)
    batch = given.batch.global_batch_size
    single = recipe("digits_single", tmp_path, *VALUED, "--training.local_batch_size", str(batch))
    ranks = pool4.run(by_rewards, given, timeout=120)
    compare(by_rewards(0, single), ranks, 1e-10)


def test_values_that_nobody_reads_or_that_are_missing_are_refused(tmp_path):
    given = recipe("digits_single", tmp_path, *VALUED)
    said = "data.options.values = ['weight', 'reward'] reach a custom loss"
    assert any(said in line for line in summary(resolve(given)))
    for start in (hetmesh.train, lambda given: hetmesh.open_job(given).__enter__()):
        with pytest.raises(RecipeError, match=r"values = \['weight', 'reward'\]: cross-entropy reads none and weighs"):
            start(given)
    less = recipe("digits_single", tmp_path, *VALUED, "--data.source", "support.valued_digits:LessValued")
    with (
        hetmesh.open_job(less, loss=rewarded) as job,
        pytest.raises(SampleError, match=r"sample 'digits/.*': its value 'reward' must be one number or one for each"),
    ):
        job.forward_backward()


def broken(logits, batch):
    return summed(logits, batch) * float("nan")


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (
            lambda logits, batch: cross_entropy(logits, batch["targets"]),
            LossError,
            r"loss .*: must be a sum over batch\['targets'\], but gives .* for \d+ of them, and",
        ),
        (
            lambda logits, batch: cross_entropy(logits, batch["targets"], reduction="none"),
            LossError,
            r"must return a scalar tensor, the sum over batch\['targets'\], got torch.float64 \(\d+,\)",
        ),
        (lambda logits, batch: summed(logits, batch).detach(), LossError, "does not depend on the logits"),
        (broken, NonFiniteError, r"step 1: .* not finite \(loss nan"),
    ],
)
def test_losses_that_are_no_sums_are_refused(tmp_path, loss, error, message):
    with (
        hetmesh.open_job(recipe("digits_single", tmp_path), loss=loss) as job,
        pytest.raises(error, match=message) as caught,
    ):
        job.forward_backward()
    assert not caught.value.__context__


def test_a_recipe_from_python_is_that_of_its_text():
    tables = {
        "modules": {"llm": {"model": "qwen3", "config": {"hidden_size": 12}}},
        "parallelism": {"llm": {"ranks": (0, 1), "tensor_parallel_degree": 2}},
        "training": {"steps": 3},
    }
    text = """
        [modules.llm]
        model = "qwen3"
        config = { hidden_size = 12 }
        [parallelism.llm]
        ranks = [0, 1]
        tensor_parallel_degree = 2
        [training]
        steps = 4"""
    assert parse_recipe(tables, ("--training.steps", "4")) == parse_recipe(text)
    assert tables["training"] == {"steps": 3}
    with pytest.raises(RecipeError, match=r"training\.stepz: unknown key 'stepz'; did you mean 'steps'"):
        parse_recipe(tables | {"training": {"stepz": 3}})
    with pytest.raises(RecipeError, match=r"training.steps = '3': should be a valid integer"):
        parse_recipe(tables | {"training": {"steps": "3"}})


def test_the_number_of_ranks_and_how_to_start_them_is_said(tmp_path):
    with pytest.raises(
        RecipeError, match=r"the recipe needs 4 ranks, this job has 1; start it by torchrun --nproc-per"
    ):
        hetmesh.train(recipe("digits", tmp_path))


def test_every_public_name_is_there():
    assert sorted(hetmesh.__all__) == sorted(name for name in hetmesh.__all__ if hasattr(hetmesh, name))


def test_workers_that_load_samples_start_before_a_world(tmp_path):
    world = hetmesh.init()
    try:
        with pytest.raises(RecipeError, match=r"data\.num_workers = 2: worker processes are forked before"):
            hetmesh.train(recipe("digits_single", tmp_path, "--data.num_workers", "2"))
    finally:
        world.close()
    with pytest.raises(TypeError, match=r"a hetmesh\.Recipe is needed: hetmesh\.load_recipe\(path\)"):
        hetmesh.train("recipes/digits.toml")


@pytest.mark.slow
def test_what_a_launched_function_raises_is_told(start_forked):
    process = start_forked(launch, int, 2, "many")
    _, err = process.communicate(timeout=60)
    assert re.search(r"(?s)LaunchError: .*ValueError: invalid literal for int\(\).*'many'", err), err


def test_a_job_that_is_over_says_so(tmp_path):
    """Nobody would plan its next step, which would be waited for."""
    with hetmesh.open_job(recipe("digits_single", tmp_path)) as job:
        job.forward_backward()
    with pytest.raises(BoundaryError, match=r"the job is over, .*: step within `with open_job"):
        job.forward_backward()


def launch(function, *arguments):
    """In a process of one thread, which can be forked."""
    hetmesh.launch(function, *arguments)
    return 0


def again():
    for _ in range(3):
        world = hetmesh.init(timeout=20, init_timeout=20)
        everyone = torch.ones(1)
        dist.all_reduce(everyone)
        assert everyone.item() == world.size
        world.close()


@pytest.mark.slow
def test_a_process_may_join_its_job_again(start_forked):
    process = start_forked(launch, again, 2)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err


def test_a_launcher_that_started_another_number_is_told(monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for key, value in (place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(key, value)
    with pytest.raises(LaunchError, match=r"4 ranks are needed, but torchrun started 2 processes"):
        hetmesh.launch(print, 4)
