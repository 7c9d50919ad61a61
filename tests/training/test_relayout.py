"""A job in another layout, between two steps and without a file, goes on as if nothing had happened."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from hetmesh.boundary import World
from hetmesh.checkpoint.relayout import HeldState, HeldTensor, check_same_run, full_layout
from hetmesh.errors import BoundaryError, BoundaryTimeout, RecipeError
from hetmesh.layout import Layout, MeshSpec
from hetmesh.parallel import local_part
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.pool import WorkerError
from hetmesh.testing.precision import exact_dtypes
from hetmesh.training.job import Job
from hetmesh.training.optimizers import take_step
from hetmesh.training.trainer import Trainer
from support.checkpoint_pieces import different
from support.relayouts import FAULTS, drawn, faults, figures, judge, recipe_in, ride, state

CHAIN = ["tp 2, dp 2", "pp 2, fsdp 2", "last two ranks", "overlapping, hsdp"]


def changed(recipe, **tables):
    """With other values of keys, by table."""
    each = {name: getattr(recipe, name).model_copy(update=keys) for name, keys in tables.items()}
    return type(recipe).model_validate(recipe.model_copy(update=each).model_dump(by_alias=True, exclude_defaults=True))


@pytest.mark.slow
def test_a_job_goes_on_in_other_layouts(pool4):
    recipes, counts = [recipe_in(name) for name in CHAIN], [2, 1, 1, 2]
    truth = pool4.run(ride, recipes[:1], [sum(counts)], timeout=180)[0].losses
    ridden = pool4.run(ride, recipes, counts, timeout=240)
    found = figures(ridden, truth)
    assert found.error < 1e-10
    assert found.sent == found.bound > 0
    assert found.peak <= 1.25
    for rank in ridden:
        assert rank.told == rank.logged
        assert not rank.drew


@pytest.mark.slow
def test_injected_faults_are_found(pool4):
    recipes = [recipe_in("one rank"), recipe_in("last two ranks")]
    truth = pool4.run(ride, recipes[:1], [3], timeout=180)[0].losses
    for fault in ("", *FAULTS):
        found = figures(pool4.run(ride, recipes, [1, 2], fault, timeout=180), truth)
        assert (found.error > 1e-7) == bool(fault), fault


@pytest.mark.slow
def test_an_optimizer_of_your_own_goes_along_to_ranks_that_had_none(pool4):
    found = judge(pool4, [recipe_in(name) for name in ("last two ranks", "disjoint")], [1, 2], own=True)
    assert found.error < 1e-10
    assert found.sent == found.bound


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "variant"), [*drawn(30, seed=0)])
def test_drawn_pairs_of_layouts(pool4, first, second, variant):
    found = judge(pool4, [recipe_in(name, variant) for name in (first, second)], [2, 3])
    assert found.error < 1e-10
    assert found.sent == found.bound


def there_and_back(rank, first, second):
    """What differs in what a rank holds after a step, a relayout, and another one back; and how much there is."""
    job = Job.assemble(resolve(first), World.current())
    job.forward_backward()
    if job.optimizers is not None:
        take_step(*job.optimizers)
    before = everything(job)
    job.relayout(second)
    job.relayout(first)
    job.upcoming.close()
    return different(before, everything(job)), len(before)


def everything(job):
    kept = {name: local_part(tensor).clone() for name, tensor in state(job).items()}
    for optimizer in (job.optimizers or ((),))[0]:
        for group in optimizer.param_groups:
            names = [f"{name} step" for name in group["param_names"]]
            kept |= {n: optimizer.state[p]["step"].clone() for n, p in zip(names, group["params"], strict=True)}
            kept |= {f"{name} lr": group["lr"] for name in names}
    return kept


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "variant"),
    [({"dtype": "bfloat16"}, "frozen encoder"), ({}, "Adafactor")],
    ids=["copies in fp32 of parameters in bf16", "a number for each row and column"],
)
def test_there_and_back_nothing_has_changed(pool4, training, variant):
    first, second = (changed(recipe_in(name, variant), training=training) for name in ("tp 2, dp 2", "pp 2, fsdp 2"))
    for differing, count in pool4.run(there_and_back, first, second, timeout=180):
        assert differing == []
        assert count > 20


def refused(rank, recipe, others):
    """What a job says to relayouts that it refuses, and whether it goes on as it was."""
    job, errors = Job.assemble(resolve(recipe), World.current()), []
    job.forward_backward()
    before = {name: local_part(p).clone() for name, p in job.root.named_parameters()}
    for other in others:
        with pytest.raises((RecipeError, TypeError)) as caught:
            job.relayout(other)
        errors.append(str(caught.value))
    after = {name: local_part(p) for name, p in job.root.named_parameters()}
    same = different(before, after) == [] and job.forward_backward().step == 2
    job.upcoming.close()
    return errors, same


@pytest.mark.slow
def test_a_relayout_that_is_refused_leaves_the_job_as_it_was(pool4):
    given, other = recipe_in("one rank"), recipe_in("last two ranks")
    for (seed, nothing), same in pool4.run(refused, given, [changed(other, debug={"seed": 1}), other], timeout=180):
        assert "debug.seed = 1: the job has 0" in seed
        assert "give the optimizer of your loop" in nothing
        assert same


def refused_optimizers(rank, recipe, other, third):
    """What a job says to optimizers that do not suit it, to recipes that differ by rank, and to what a hand froze."""
    job, errors = Job.assemble(resolve(recipe), World.current()), []
    job.forward_backward()
    own = job.parameters()
    for given, groups in (
        (other, [{"params": own[1:]}]),
        (other, [{"params": [*own, torch.nn.Parameter(torch.zeros(2))]}]),
        (other, [{"params": own, "lr": 0.1 + rank}]),
        ((other, third)[rank > 1], [{"params": own}]),
        (other, [{"params": own}]),
    ):
        own[0].requires_grad_(len(errors) < 4)
        with pytest.raises(RecipeError) as caught:
            job.relayout(given, torch.optim.SGD(groups, lr=0.1, foreach=False))
        errors.append(str(caught.value))
    job.upcoming.close()
    return errors


@pytest.mark.slow
def test_what_would_not_be_trained_any_more_is_refused(pool4):
    recipes = [recipe_in(name) for name in ("tp 4", "dp 4", "one rank")]
    for lacks, foreign, options, recipe, frozen in pool4.run(refused_optimizers, *recipes, timeout=180):
        assert "the optimizer lacks vision." in lacks
        assert "has 1 parameters that are none of the job's" in foreign
        assert "group 0 of the optimizer has lr 1.1 on rank 1 and 0.1 on rank 0" in options
        assert recipe == "relayout: rank 2 was given another recipe than rank 0"
        assert "frozen and is float64" in frozen


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (changed(recipe_in("tp 4"), optimizer={"lr": 0.5}), "optimizer.lr = 0.5"),
        (changed(recipe_in("tp 4"), data={"order": "given"}), "data.order"),
        (changed(recipe_in("tp 4"), training={"global_batch_size": 4}), "training.global_batch_size"),
        (recipe_in("tp 4", "2 key heads"), "modules.llm.config.num_key_value_heads = 2"),
        (recipe_in("tp 4", "frozen encoder"), "modules.vision.trainable"),
    ],
)
def test_what_is_no_layout_stays(other, named):
    with pytest.raises(RecipeError, match=named):
        check_same_run(recipe_in("disjoint"), other, SimpleNamespace(size=4))


def test_ranks_of_the_job_suffice():
    check_same_run(recipe_in("tp 4"), recipe_in("last two ranks"), SimpleNamespace(size=5))
    with pytest.raises(RecipeError, match="needs 4 ranks, this job has 3"):
        check_same_run(recipe_in("one rank"), recipe_in("tp 4"), SimpleNamespace(size=3))


def test_another_model_is_named_before_anything_moves():
    weight = HeldTensor((4, 6), torch.float32, Layout(MeshSpec.make([0, 1], tp=2), [Shard(0)]))
    before = HeldState(held={("llm.a", ""): weight, ("llm.a", "exp_avg"): weight, ("llm.b", ""): weight})
    after = {("llm.a", ""): replace(weight, layout=Layout(MeshSpec.make([2], dp=1), [Replicate()]))}
    assert before.in_layout(after | {("llm.b", ""): weight})["llm.a", "exp_avg"].layout.mesh.ranks == (2,)
    for other, text in (
        (after, "it lacks llm.b"),
        (after | {("llm.b", ""): weight, ("llm.c", ""): weight}, "it also has llm.c"),
        (after | {("llm.b", ""): replace(weight, shape=(4, 7))}, r"llm.b was .*\[4, 6\].* and is .*\[4, 7\]"),
        (after | {("llm.b", ""): replace(weight, dtype=torch.bfloat16)}, "llm.b was float32 .* and is bfloat16"),
    ):
        with pytest.raises(RecipeError, match=text):
            before.in_layout(other)


def until_killed(rank, recipe, other, folder):
    """Two steps, a checkpoint, another step, and a relayout in which rank 1 is killed."""
    trainer = Trainer(resolve(recipe), World.current())
    trainer.reporter.close()
    with exact_dtypes(trainer.job.root):
        for step in range(3):
            trainer.train_step()
            if step == 1:
                trainer.save()
    try:
        with faults("killed"):
            trainer.job.relayout(other)
    except (BoundaryError, BoundaryTimeout) as error:
        Path(folder, f"rank{rank}").write_text(str(error))
        with pytest.raises(BoundaryError, match="the job is over"):
            trainer.job.forward_backward()
        raise


def resumed(rank, recipe):
    trainer = Trainer(resolve(recipe), World.current())
    trainer.reporter.close()
    first = trainer.step
    with exact_dtypes(trainer.job.root):
        losses = [trainer.train_step().loss for _ in range(3)]
    trainer.upcoming.close()
    return first, losses


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_the_checkpoint(pool4, tmp_path):
    first, second = (recipe_in(name, folder=tmp_path / "run") for name in ("disjoint", "tp 2, dp 2"))
    truth = pool4.run(ride, [recipe_in("disjoint")], [5], timeout=180)[0].losses
    with pytest.raises(WorkerError):
        pool4.run(until_killed, first, second, str(tmp_path), timeout=180)
    said = [file.read_text() for file in tmp_path.glob("rank*")]
    assert any("relayout of" in text and "rank 1" in text for text in said)
    for step, losses in pool4.run(resumed, second, timeout=180):
        assert step == 2
        assert losses == pytest.approx(truth[2:], rel=1e-10)


def test_a_trainer_whose_job_left_its_layout_trains_no_more():
    job, given = SimpleNamespace(recipe=recipe_in("tp 4")), recipe_in("disjoint")
    with pytest.raises(RuntimeError, match="a Trainer stays in its layout"):
        Trainer.train_step(SimpleNamespace(job=job, recipe=given))


def test_a_tensor_lies_on_the_whole_mesh_of_its_stage():
    spec = MeshSpec.make(range(8), dp_shard=2, ep=2, tp=2)
    assert full_layout(torch.zeros(3), spec).placements == (Replicate(),) * 3
