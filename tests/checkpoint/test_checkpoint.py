"""Checkpoints hold everything, give it back to the last bit, and refuse what does not fit."""

import errno
import os
import re
import resource
import shutil
import sys
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from hetmesh.boundary import World, init
from hetmesh.boundary.accelerator import Accelerator
from hetmesh.checkpoint import save_plan as plan
from hetmesh.checkpoint.checkpointer import Checkpointer
from hetmesh.checkpoint.reading import Index
from hetmesh.errors import CheckpointError, RecipeError
from hetmesh.parallel.apply import Root
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.records import checkpoint_folders, checksums
from hetmesh.records.checkpoint_folders import newest_step
from hetmesh.resolve.resolved import resolve
from hetmesh.training.optimizers import make_optimizers
from hetmesh.training.trainer import Trainer
from support.checkpoint_pieces import different, everything, make, steps

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = (
    *("--training.global_batch_size", "8", "--training.steps", "5", "--lr_scheduler.warmup_steps", "2"),
    *("--modules.vision.config.num_hidden_layers", "1", "--modules.llm.config.num_hidden_layers", "1"),
    *("--metrics.enable_tensorboard", "false", "--metrics.log_freq", "100", "--checkpoint.enable", "true"),
)


def small(name, folder, *overrides):
    local = {"digits_colocated": 4, "digits_overlapping": 4}.get(name, 8)
    local = ("--training.local_batch_size", str(local), "--job.dump_folder", str(folder))
    return load_recipe(RECIPES / f"{name}.toml", (*SMALL, *local, *overrides))


def exact(metrics):
    return metrics.step, metrics.loss, metrics.grad_norm, metrics.lr


def save_and_resume(rank, recipe):
    """Names of what there is, what differs after a resume, and the next steps of both."""
    world = World.current()
    first = Trainer(resolve(recipe), world)
    first.reporter.close()
    for _ in range(3):
        first.train_step()
    torch.rand(rank + 1)  # random states that differ between ranks
    first.save()
    before = everything(first.job.root, first.optimizers, first.job.loader)
    expected = [exact(first.train_step()) for _ in range(2)]
    first.checkpointer.wait()

    second = Trainer(resolve(recipe), world)
    second.reporter.close()
    after = everything(second.job.root, second.optimizers, second.job.loader)
    assert second.step == 3
    return set(before), different(before, after), expected, [exact(second.train_step()) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("digits", "disabled"),
        # colocated: as in `test_checkpoint_pairs.py`, which compares whole checkpoints of such layouts, too
        pytest.param("digits_colocated", "disabled", marks=pytest.mark.exhaustive),
        ("digits_overlapping", "async"),
    ],
)
def test_everything_is_saved_and_comes_back_to_the_last_bit(pool4, tmp_path, name, mode):
    recipe = small(name, tmp_path, "--checkpoint.async_mode", mode)
    results = pool4.run(save_and_resume, recipe, timeout=120)
    for names, differing, expected, continued in results:
        assert differing == []
        assert continued == expected
        assert any(".exp_avg_sq" in key for key in names)
    expected = set().union(*(names for names, *_ in results)) | {"extra.run"}
    assert set(Index.of(tmp_path / "checkpoint" / "step-3").saved) == expected


def full_state(rank, recipe, steps):
    """Whole tensors of parameters and of the optimizer, after `steps` steps or as they were resumed."""
    trainer = Trainer(resolve(recipe), World.current())
    trainer.reporter.close()
    resumed = trainer.step
    for _ in range(steps - trainer.step):
        trainer.train_step()
    if not resumed:
        trainer.save()
    state = {**trainer.job.root.state_dict(), **trainer.optimizers[0].state_dict()}
    return {
        k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items() if isinstance(v, torch.Tensor)
    }


@pytest.mark.slow
def test_another_layout_reads_the_same_state(pool4, tmp_path):
    saved = {k: v for rank in pool4.run(full_state, small("digits_colocated", tmp_path), 2) for k, v in rank.items()}
    for name in ("digits", "digits_overlapping"):
        read = {k: v for rank in pool4.run(full_state, small(name, tmp_path), 2) for k, v in rank.items()}
        assert different(saved, read) == []


def errors(rank, saved, others):
    full_state(rank, saved, 1)
    messages = []
    for recipe in others:
        try:
            Trainer(resolve(recipe), World.current()).reporter.close()
            messages.append("no error")
        except RecipeError as error:
            messages.append(str(error))
    return messages


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_one_error_on_every_rank(pool4, tmp_path):
    text = (RECIPES / "digits.toml").read_text().replace('"projector"', '"adapter"').replace(".projector]", ".adapter]")
    local = ("--training.local_batch_size", "8", "--job.dump_folder", str(tmp_path))
    others = [
        small("digits", tmp_path, "--modules.llm.config.intermediate_size", "64"),
        parse_recipe(text, (*SMALL, *local)),
        small("digits", tmp_path, "--debug.seed", "3"),
    ]
    results = pool4.run(errors, small("digits", tmp_path), others, timeout=120)
    assert all(messages == results[0] for messages in results)
    width, name, seed = results[0]
    path = re.escape(str(tmp_path / "checkpoint" / "step-1"))
    shapes = r"was float32 \[(96, 256|256, 96)\] and is float32 \[(96, 64|64, 96)\]"
    says = rf"model\.llm\.model\.layers\.0\.mlp\.\w+\.weight {shapes}"
    assert re.match(rf"checkpoint {path} does not fit this recipe: {says}; .*; .* \(and 6 more\); ", width), width
    assert "; keys that have changed: modules.llm.config.intermediate_size 256 -> 64; restore it, or start" in width
    assert name.startswith(
        f"checkpoint {tmp_path}/checkpoint/step-1 does not fit this recipe: it holds the modules "
        "['llm', 'projector', 'vision'], the recipe has ['adapter', 'llm', 'vision']"
    )
    assert seed.startswith(
        f"debug.seed = 3: the checkpoint {tmp_path}/checkpoint/step-1 is of a run with 0; restore it"
    )


@pytest.mark.parametrize("trained", [[False, False], []], ids=["one of two", "none"])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "torch.optim:RMSprop"])
def test_a_parameter_that_had_no_gradient_yet_starts_counting_where_it_would_have(world, tmp_path, name, trained):
    optimizer = ("--optimizer.name", name)
    checkpointer = Checkpointer(world, tmp_path)
    root, optimizers = make(optimizer)
    steps(root, optimizers, trained)
    before = everything(root, optimizers)
    checkpointer.save(2, root, optimizers, {"step": 2})
    assert different(before, everything(root, optimizers)) == []
    steps(root, optimizers, [True, False])

    other, resumed = make(optimizer)
    assert checkpointer.load(2, other, resumed, {"step": 0}) == {"step": 2}
    assert different(before, everything(other, resumed)) == []
    steps(other, resumed, [True, False])
    assert different(everything(root, optimizers), everything(other, resumed)) == []


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"width": 4}, r"model\.llm\.used\.weight was float32 \[1, 3\] and is float32 \[1, 4\]; .*"),
        ({"dtype": torch.float64}, r"model\.llm\.count was float32 \[\] and is float64 \[\]; .*"),
        (
            {"overrides": ("--optimizer.name", "SGD")},
            r"it lacks optimizer\.param_groups\.llm\.used\.weight\.momentum; .*",
        ),
    ],
)
def test_what_does_not_fit_is_named(world, tmp_path, other, says):
    checkpointer = Checkpointer(world, tmp_path)
    root, optimizers = make()
    steps(root, optimizers, [True])
    checkpointer.save(1, root, optimizers, {})
    with pytest.raises(
        RecipeError, match=rf"checkpoint {re.escape(str(tmp_path))}/step-1 does not fit this recipe: {says}"
    ):
        checkpointer.load(1, *make(**other), {})


def test_what_nobody_would_read_is_named(world, tmp_path):
    checkpointer = Checkpointer(world, tmp_path)
    checkpointer.save(1, *make(), {"position": 1, "more": 2})
    with pytest.raises(RecipeError, match=r"does not fit this recipe: extra\.more is not used$"):
        checkpointer.load(1, *make(), {"position": 0})


def flip(file, at):
    content = bytearray(file.read_bytes())
    content[at] ^= 4
    file.write_bytes(content)


def test_every_changed_byte_is_found(world, tmp_path):
    root, optimizers = make()
    steps(root, optimizers, [True])
    checkpointer = Checkpointer(world, tmp_path)
    path = checkpointer.save(1, root, optimizers, {"step": 1})
    sums = checksums.read_manifest(path)
    (file,) = path.glob("*.distcp")
    assert sum(part.length for part in sums) == file.stat().st_size  # so none is outside all parts
    for at in range(0, file.stat().st_size, 487):
        flip(file, at)
        (part,) = (p for p in sums if p.offset <= at < p.offset + p.length)
        named = re.escape(
            f"damaged: {part.name} in {file.name}, bytes {part.offset} to {part.offset + part.length}, has"
        )
        with pytest.raises(CheckpointError, match=rf"{named} changed; restore it"):
            checkpointer.load(1, root, optimizers, {"step": 1})
        flip(file, at)
    checkpointer.load(1, root, optimizers, {"step": 1})
    for name in (".metadata", "checksums.json"):
        for at in range(0, (path / name).stat().st_size, 97):
            flip(path / name, at)
            with pytest.raises(CheckpointError, match=rf"step-1 is damaged: {re.escape(name)} "):
                checksums.read_manifest(path)
            flip(path / name, at)
    assert checksums.read_manifest(path) == sums


def test_whoever_knows_dcp_can_read_one(world, tmp_path):
    root, _ = make()
    path = Checkpointer(world, tmp_path).save(1, root, None, {"step": 1})
    name = "model.llm.used.weight"
    state = {name: torch.zeros_like(root.llm.used.weight), "extra.step": 0}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert torch.equal(state[name], root.llm.used.weight)
    assert state["extra.step"] == 1


def test_checkpoints_of_older_versions_are_read(world, tmp_path):
    """Their checksums are CRC-32, and their tensors may lie in any order of dims."""
    root, _ = make()
    with torch.no_grad():
        root.llm.used.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4)[:, 1:].T)
    before = everything(root, None)
    path = Checkpointer(world, tmp_path).save(1, root, None, {})
    files = {file.name: file.read_bytes() for file in path.glob("*.distcp")}
    sums = checksums.read_manifest(path)
    assert all(isinstance(each, str) for each in sums.values())
    old = {part: zlib.crc32(files[part.file][part.offset :][: part.length]) for part in sums}
    for kind in (sums, old):
        checksums.write_manifest(path, kind)
        with torch.no_grad():
            root.llm.used.weight.zero_()
        Checkpointer(world, tmp_path).load(1, root, None, {})
        assert different(before, everything(root, None)) == []
    flip(path / "__0_0.distcp", 700)
    with pytest.raises(CheckpointError, match=r"has changed; restore it"):
        Checkpointer(world, tmp_path).load(1, root, None, {})


def damage_cut(file):
    file.write_bytes(file.read_bytes()[:100])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_cut, r"is damaged: \S+ in __0_0\.distcp, bytes \d+ to \d+, has changed"),
        (lambda file: file.unlink(), r"is damaged: __0_0\.distcp is missing"),
        (lambda file: (file.unlink(), os.mkfifo(file)), r"cannot be read: .*_0\.distcp', which is no name of a file"),
        (lambda file: flip(file, file.stat().st_size // 2), r"is damaged: \S+ in __0_0\.distcp, .* has changed"),
        (lambda file: (file.parent / ".metadata").write_bytes(b"nothing"), r"is damaged: \.metadata has changed"),
        (lambda file: (file.parent / ".metadata").unlink(), r"cannot be read: .*No such file.*metadata'"),
        (lambda file: (file.parent / "checksums.json").write_text("{}"), r"is damaged: checksums.json is no list"),
        (lambda file: (file.parent / "checksums.json").unlink(), r"has no checksums.json: it was copied in part"),
    ],
)
def test_damaged_files_are_one_error_and_an_older_checkpoint_can_be_loaded_then(world, tmp_path, damage, says):
    checkpointer = Checkpointer(world, tmp_path)
    root, optimizers = make()
    steps(root, optimizers, [True])
    before = everything(root, optimizers)
    checkpointer.save(1, root, optimizers, {})
    checkpointer.save(2, root, optimizers, {})
    damage(tmp_path / "step-2" / "__0_0.distcp")
    other, others = make()
    steps(other, others, [True, True])
    hint = "restore it from a copy, or remove the folder to resume from step-1"
    with pytest.raises(CheckpointError, match=rf"^checkpoint {re.escape(str(tmp_path))}/step-2 {says}.*; {hint}$"):
        checkpointer.load(2, other, others, {})
    checkpointer.load(1, other, others, {})
    assert different(before, everything(other, others)) == []
    assert world.timeout == 300  # of a step, as before


def save_beside_damage(rank, folder, cause):
    """What each rank says when one file of four is damaged, when one rank is slow, when one rank's disk is full."""
    world = World.current()
    usual = world.timeout
    world.set_timeout(0.5)
    write = torch.save
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if cause == "slow" and rank == 1:
            torch.save = lambda *args, **kwargs: (time.sleep(0.3), write(*args, **kwargs))
        if cause == "full" and rank == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
        checkpointer = Checkpointer(world, Path(folder), timeout=60.0)
        checkpointer.prepare()
        root = Root([(f"rank{rank}", nn.Linear(30, 2))])
        checkpointer.save(1, root, None, {})
        torch.save = write
        if cause == "damage" and rank == 0:
            file = Path(folder) / "step-1" / "__3_0.distcp"
            flip(file, file.stat().st_size // 2)
        torch.distributed.barrier()
        checkpointer.load(1, root, None, {})
    except CheckpointError as error:
        return str(error), sorted(path.name for path in Path(folder).iterdir())
    finally:
        torch.save = write
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        world.set_timeout(usual)
    return "", sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cause", "says", "left"),
    [
        ("slow", r"$", ["step-1"]),  # four tensors and values: longer than the timeout and than twice that
        ("damage", r"checkpoint .*/step-1 is damaged: \S+ in __3_0\.distcp, .*; restore it from a copy", ["step-1"]),
        ("full", r"checkpoint .*/step-1 cannot be written: rank 2: .*; [\d,]+ MiB are free there: make room", []),
    ],
)
def test_what_befalls_one_rank_is_said_by_all(pool4, tmp_path, cause, says, left):
    results = pool4.run(save_beside_damage, str(tmp_path), cause)
    assert all(result[0] == results[0][0] for result in results)
    assert re.match(says, results[0][0]), results[0][0]
    assert results[0][1] == left


def test_a_full_disk_leaves_the_older_checkpoint_and_no_half_one(world, tmp_path):
    checkpointer = Checkpointer(world, tmp_path)
    root, optimizers = make()
    checkpointer.save(1, root, optimizers, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (100, 3000):  # the first tensor does not fit; some do
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(CheckpointError, match=r"step-2 cannot be written: .*newest complete one is step-1$"):
                checkpointer.save(2, root, optimizers, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    checkpointer.load(1, root, optimizers, {})
    assert checkpointer.save(2, root, optimizers, {}) == tmp_path / "step-2"


def test_folders_that_cannot_be_used_are_named_before_training(world, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be written to \S+/file: .*File exists"):
        Checkpointer(world, tmp_path / "file").prepare()
    with pytest.raises(CheckpointError, match=r"step-1 cannot be written: .*file"):
        Checkpointer(world, tmp_path / "file").save(1, *make(), {})
    if sys.platform == "linux":  # also for root
        with pytest.raises(CheckpointError, match="checkpoints cannot be written to /proc/checkpoint: "):
            Checkpointer(world, Path("/proc/checkpoint")).prepare()
    (tmp_path / "new" / "folder" / "step-3.partial").mkdir(parents=True)  # of a killed save
    Checkpointer(world, tmp_path / "new" / "folder").prepare()
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def prepare_on_machines(rank, folder):
    """What each rank says where the last one has a disk of its own, and where nobody has."""
    world, found = World.current(), []
    for place in (Path(folder) / ("other" if rank == world.size - 1 else "shared"), Path(folder) / "shared"):
        checkpointer = Checkpointer(world, place, timeout=0.0)
        if rank == world.size - 1:
            on_first = checkpointer._on_first
            checkpointer._on_first = lambda *args, place=place, call=on_first: place / call(*args).name
        try:
            checkpointer.prepare()
        except CheckpointError as error:
            found.append(str(error))
    torch.distributed.barrier()
    return found, sorted(path.name for path in (Path(folder) / "shared").iterdir())


@pytest.mark.slow
def test_machines_without_a_shared_folder_are_named_before_training(pool4, tmp_path):
    said = r"checkpoints cannot be written to .*: rank 3 on \S+ does not see what rank 0 writes there: all machines"
    for found, left in pool4.run(prepare_on_machines, str(tmp_path)):
        assert len(found) == 1
        assert re.match(said, found[0])
        assert left == []


def test_foreign_names_are_no_checkpoints(world, tmp_path):
    checkpointer = Checkpointer(world, tmp_path)
    path = checkpointer.save(1, *make(), {})
    (tmp_path / "step-2").write_text("a file")
    for name in ("step-03", "step-4.partial", "step-5.old", "step-\u0663"):
        shutil.copytree(path, tmp_path / name)
    assert newest_step(checkpointer.folder) == 1
    shutil.copytree(path, tmp_path / "step-6")
    (tmp_path / "step-6" / "checksums.json").unlink()
    (tmp_path / "step-6" / ".metadata").unlink()  # only its tensors are left
    with pytest.raises(CheckpointError, match=r"step-6 has no checksums.json: .*; restore it from a copy, or remove"):
        newest_step(checkpointer.folder)


def test_a_checkpoint_that_cannot_be_looked_into_is_not_passed_over(world, tmp_path, monkeypatch):
    """Another user's, say; and one that a run retires meanwhile is none."""
    checkpointer = Checkpointer(world, tmp_path)
    for step in (1, 2):
        checkpointer.save(step, *make(), {})
    looked, problem = Path.iterdir, PermissionError(errno.EACCES, "Permission denied")

    def iterdir(path):
        if path.name == "step-2":
            raise problem
        return looked(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    with pytest.raises(PermissionError, match="Permission denied"):
        newest_step(checkpointer.folder)
    problem = FileNotFoundError(errno.ENOENT, "gone")
    assert newest_step(checkpointer.folder) == 2


def test_a_step_that_is_saved_again_replaces_the_old_one(world, tmp_path):
    checkpointer = Checkpointer(world, tmp_path)
    root, optimizers = make()
    checkpointer.save(1, root, optimizers, {"n": 1})
    checkpointer.save(1, root, optimizers, {"n": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert checkpointer.load(1, root, optimizers, {"n": 0}) == {"n": 2}


def test_the_newest_complete_ones_are_kept(world, tmp_path, monkeypatch):
    checkpointer = Checkpointer(world, tmp_path / "checkpoint", keep_latest=2)
    assert newest_step(checkpointer.folder) == -1
    root, optimizers = make()
    for step in (9, 10, 11):
        checkpointer.save(step, root, optimizers, {})
    assert checkpointer.steps() == [10, 11]
    for name in ("step-12.ab.partial", "step-x", "notes"):  # the first is what a kill in the middle of a save leaves
        (tmp_path / "checkpoint" / name).mkdir()
        (tmp_path / "checkpoint" / name / "__0_0.distcp").write_bytes(b"half")
    assert newest_step(checkpointer.folder) == 11
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a kill while an old one is being deleted
    checkpointer.save(12, root, optimizers, {})
    monkeypatch.undo()
    checkpointer.prepare()  # when the run is started again
    assert checkpointer.steps() == [11, 12]
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == {"step-11", "step-12", "step-x", "notes"}
    with monkeypatch.context() as patch:  # a kill before old ones lose their names, which the last save of a run meets
        patch.setattr(checkpoint_folders, "retire_old", lambda *_: [])
        checkpointer.save(13, root, optimizers, {})
    assert checkpointer.steps() == [11, 12, 13]
    checkpointer.remove_old()  # when the run ends
    assert checkpointer.steps() == [12, 13]
    checkpointer.load(13, root, optimizers, {})


@dataclass(frozen=True)
class WithRandomState(Accelerator):
    """A device (meta stands for it) with a generator of its own."""

    states: dict = field(default_factory=dict)

    @property
    def random_module(self):
        return self

    def get_rng_state(self, device):
        return self.states[device].clone()

    def set_rng_state(self, state, device):
        self.states[device] = state


def test_the_random_state_of_the_device_is_saved_and_restored(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "reduce_over_ranks", lambda values, world: values)  # meta has no values to sum
    device, drawn = torch.device("meta"), torch.arange(5, dtype=torch.uint8)
    accelerator = WithRandomState(device, {device: drawn})
    world = init(accelerator=accelerator)
    try:
        checkpointer, (root, optimizers) = Checkpointer(world, tmp_path), make()
        checkpointer.save(1, root, optimizers, {})
        assert "random.0.meta" in Index.of(tmp_path / "step-1").saved
        accelerator.states[device] = torch.zeros(5, dtype=torch.uint8)
        checkpointer.load(1, root, optimizers, {})
    finally:
        world.close()
    assert torch.equal(accelerator.states[device], drawn)


def test_tied_weights_are_saved_once_and_stay_tied(world, tmp_path):
    def tied():
        root, _ = make()
        root.llm.unused.weight = root.llm.used.weight
        return root, make_optimizers(parse_recipe('[modules.llm]\nmodel = "qwen3"'), root)

    checkpointer = Checkpointer(world, tmp_path)
    root, optimizers = tied()
    steps(root, optimizers, [True, True])
    checkpointer.save(2, root, optimizers, {})
    other, resumed = tied()
    checkpointer.load(2, other, resumed, {})
    assert different(everything(root, optimizers), everything(other, resumed)) == []
    assert other.llm.unused.weight is other.llm.used.weight
