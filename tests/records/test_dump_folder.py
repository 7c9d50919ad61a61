"""Which folder a run writes to: never one with results of another run; resumed and finished runs say so in a line."""

import errno
import json
import os
from pathlib import Path

import pytest

from hetmesh.api import run_recipe
from hetmesh.errors import OutputError, RecipeError
from hetmesh.recipe.recipe import load_recipe
from hetmesh.recipe.sections import Metrics
from hetmesh.records import dump_folder
from hetmesh.records.checkpoint_folders import COMPLETE
from hetmesh.records.dump_folder import claim_folder
from hetmesh.records.metrics import StepMetrics
from hetmesh.records.reporter import Reporter
from hetmesh.resolve.refusals import check_run
from hetmesh.resolve.resolved import resolve
from hetmesh.training.notices import StepNotices
from hetmesh.training.trainer import Trainer

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_single.toml"


def recipe(folder, *overrides):
    small = ("--training.local_batch_size", "2", "--training.steps", "2", "--validation.samples", "2")
    return load_recipe(RECIPE, (*small, "--metrics.log_freq", "1", "--job.dump_folder", str(folder), *overrides))


def saved(folder, step, **summary):
    """What a run with checkpoints leaves, as far as the choice of a folder looks at it."""
    (folder / "checkpoint" / f"step-{step}").mkdir(parents=True)
    (folder / "checkpoint" / f"step-{step}" / COMPLETE).write_text("")
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {i}}}\n' for i in range(1, step + 3)))
    (folder / "recipe.json").write_text(json.dumps({"job": {"dump_folder": str(folder)}}))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))


@pytest.mark.slow
def test_the_same_command_again_takes_a_folder_of_its_own(tmp_path, capsys):
    folder, other = tmp_path / "digits", tmp_path / "digits-2"
    events = ("--metrics.enable_tensorboard", "true")
    run_recipe(recipe(folder, *events))
    left = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {path.name for path in left} >= {"metrics.jsonl", "summary.json", "recipe.json"}
    assert any("tfevents" in path.name for path in left)
    out = capsys.readouterr().out
    assert f"results are in {folder}: summary.json, metrics.jsonl, tensorboard/\n" in out
    assert "another run" not in out

    run_recipe(recipe(folder, *events, "--optimizer.lr", "1e-4"))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == left
    assert (other / "metrics.jsonl").read_text().count("grad_norm") == 2
    assert len(list((other / "tensorboard").iterdir())) == 1
    out = capsys.readouterr().out
    assert f"results of another run are in {folder}: this one writes to {other}\n" in out
    assert f"results are in {other}: " in out


def test_numbers_go_on_and_folders_without_results_are_used(world, tmp_path):
    folder = tmp_path / "digits"
    for _ in range(2):
        claim_folder(recipe(folder), world).claim.close()  # a run that failed before its first step left nothing
        assert [path.name for path in tmp_path.iterdir()] == ["digits"]
    for number in ("", "-2"):
        (tmp_path / f"digits{number}").mkdir(exist_ok=True)
        (tmp_path / f"digits{number}" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert claim_folder(recipe(folder), world).path == tmp_path / "digits-3"


def test_a_kill_while_the_recipe_is_written_does_not_hide_the_run(world, tmp_path, monkeypatch):
    """Its folder is found by what recipe.json says: `digits-2` is that of `digits`."""
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "metrics.jsonl").write_text('{"step": 1}\n')
    described = recipe(tmp_path / "digits", "--checkpoint.enable", "true")
    first = claim_folder(described, world)
    first.begin(recipe(tmp_path / "digits", "--checkpoint.enable", "true", "--job.description", "x" * 1000))
    whole = (first.path / "recipe.json").read_text()
    first.release()
    (first.path / "checkpoint" / "step-1").mkdir(parents=True)
    (first.path / "checkpoint" / "step-1" / COMPLETE).touch()
    with monkeypatch.context() as patch:
        patch.setattr("os.ftruncate", lambda *_: None)  # killed before it
        again = claim_folder(described, world)
        again.begin(described)
        again.release()
    assert (first.path / "recipe.json").stat().st_size == len(whole)
    last = claim_folder(described, world)
    assert (last.path.name, last.step) == ("digits-2", 1)
    last.begin(described)
    last.release()
    assert json.loads((first.path / "recipe.json").read_text()) == described.model_dump(mode="json", by_alias=True)
    assert (first.path / "recipe.json").stat().st_size < len(whole) - 800


def test_a_full_disk_leaves_the_recipe_that_was_there(world, tmp_path, monkeypatch):
    folder, write = tmp_path / "digits", os.pwrite
    first = claim_folder(recipe(folder), world)
    first.begin(recipe(folder))
    there = (folder / "recipe.json").read_bytes()
    monkeypatch.setattr("os.pwrite", lambda descriptor, data, at: write(descriptor, data[:5], at))  # room for no more
    with pytest.raises(OutputError, match="no space left on device"):
        first.begin(recipe(folder, "--job.description", "x" * 1000))
    first.release()
    assert (folder / "recipe.json").read_bytes() == there


def no_locks(*_):
    raise OSError(errno.ENOTSUP, "Operation not supported")


@pytest.mark.parametrize("locks", [True, False])
def test_two_runs_at_once_do_not_share_a_folder(world, tmp_path, monkeypatch, locks):
    """With a file system's locks or, of one machine, without them."""
    monkeypatch.setattr("hetmesh.records.dump_folder._ENDING_S", 0.2)  # how long an ending run is waited for
    if not locks:
        monkeypatch.setattr("fcntl.flock", no_locks)
    first, second = (claim_folder(recipe(tmp_path / "digits"), world) for _ in range(2))
    assert (first.path.name, second.path.name) == ("digits", "digits-2")
    saved(tmp_path / "saved", 1)
    enabled = recipe(tmp_path / "saved", "--checkpoint.enable", "true")
    resumed = claim_folder(enabled, world)
    with pytest.raises(OutputError, match="saved: another process is training there; wait for it, or give another"):
        claim_folder(enabled, world)
    resumed.claim.close()
    again = claim_folder(enabled, world)
    assert again.step == 1
    note = "without file locks: while this run writes there, one of another machine would not be noticed"
    assert [note in line for line in again.describe()] == [False] + [True] * (not locks)
    for each in (first, second, again):
        each.release()


def test_a_run_that_was_killed_may_take_a_moment_to_let_its_folder_go(world, tmp_path, monkeypatch):
    saved(tmp_path / "run", 1)
    enabled = recipe(tmp_path / "run", "--checkpoint.enable", "true", "--training.steps", "9")
    killed = claim_folder(enabled, world)
    with monkeypatch.context() as patch:
        patch.setattr(dump_folder.time, "sleep", lambda _: killed.claim.close())
        resumed = claim_folder(enabled, world)
    assert resumed.step == 1
    resumed.release()


def test_what_a_run_did_until_its_folder_was_free_is_not_lost(world, tmp_path, monkeypatch):
    """It saves, or begins, between the look of another command and its lock."""
    lock, meanwhile = dump_folder._locked, []

    def locked(folder):
        for step in meanwhile:
            saved(folder, step)
        meanwhile.clear()
        return lock(folder)

    monkeypatch.setattr(dump_folder, "_locked", locked)
    saved(tmp_path / "run", 1)
    meanwhile.append(3)
    resumed = claim_folder(recipe(tmp_path / "run", "--checkpoint.enable", "true", "--training.steps", "9"), world)
    assert resumed.step == 3
    resumed.release()
    meanwhile.append(1)
    fresh = claim_folder(recipe(tmp_path / "digits"), world)
    assert (fresh.path.name, fresh.occupied) == ("digits-2", tmp_path / "digits")
    fresh.release()


def test_a_checkpoint_is_resumed_wherever_the_run_went(world, tmp_path):
    folder = tmp_path / "digits"
    enabled = recipe(folder, "--checkpoint.enable", "true", "--training.steps", "9")
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')  # of a run without checkpoints
    first = claim_folder(enabled, world)
    assert (first.path.name, first.step, first.occupied) == ("digits-2", None, folder)
    first.claim.close()
    saved(tmp_path / "digits-2", 3)
    (tmp_path / "digits-2" / "recipe.json").write_text(json.dumps({"job": {"dump_folder": str(folder)}}))
    (tmp_path / "digits-3").mkdir()  # of somebody who named it so
    saved(tmp_path / "digits-3", 5)
    resumed = claim_folder(enabled, world)
    assert (resumed.path.name, resumed.step) == ("digits-2", 3)
    assert len((tmp_path / "digits-2" / "metrics.jsonl").read_text().splitlines()) == 5  # a refused one changes nothing
    resumed.begin(enabled)
    assert resumed.describe() == [f"resuming at step 3 of {tmp_path / 'digits-2'}"]
    assert (tmp_path / "digits-2" / "metrics.jsonl").read_text() == "".join(f'{{"step": {i}}}\n' for i in (1, 2, 3))


def test_a_number_that_was_tidied_away_hides_no_run(world, tmp_path):
    folder, other = tmp_path / "digits", tmp_path / "digits-10"
    for path, step in ((folder, 2), (other, 4), (tmp_path / "digits-9", 3), (tmp_path / "digits-20261123", 9)):
        saved(path, step)
        (path / "recipe.json").write_text(json.dumps({"job": {"dump_folder": str(folder)}}))
    enabled = recipe(folder, "--checkpoint.enable", "true", "--training.steps", "9")
    resumed = claim_folder(enabled, world)
    assert (resumed.path, resumed.step) == (other, 4)
    resumed.release()


def test_the_evaluation_of_the_last_step_stands_once_and_an_earlier_one_is_known(world, tmp_path):
    saved(tmp_path / "run", 3)
    path, lines = tmp_path / "run" / "metrics.jsonl", [f'{{"step": {i}}}\n' for i in (1, 2, 3)]
    evaluation = '{"step": 3, "validation": {"loss": 1.5}}\n'
    for steps, left in ((9, [*lines, evaluation]), (3, lines)):  # the last one comes again, for the summary
        enabled = recipe(tmp_path / "run", "--checkpoint.enable", "true", "--training.steps", str(steps))
        for behind in (evaluation, '{"step": 4, "validation": {"loss": 1}}\n'):
            path.write_text("".join([*lines, behind]))
            resumed = claim_folder(enabled, world)
            assert (resumed.step, resumed.evaluated) == (3, behind == evaluation)
            resumed.begin(enabled)
            resumed.release()
            assert path.read_text() == "".join(left if behind == evaluation else lines)


def test_steps_below_the_checkpoint_are_refused(world, tmp_path):
    saved(tmp_path / "run", 3)
    with pytest.raises(RecipeError, match=r"training\.steps = 2: the run in .*run is at step 3 already; raise it"):
        claim_folder(recipe(tmp_path / "run", "--checkpoint.enable", "true"), world)


def test_a_finished_run_says_so_and_does_nothing(tmp_path, capsys):
    saved(tmp_path / "run", 2, steps=2, loss=1.5)
    enabled = recipe(tmp_path / "run", "--checkpoint.enable", "true")
    assert run_recipe(enabled) == {"steps": 2, "loss": 1.5}
    line, weights, *_ = capsys.readouterr().out.splitlines()
    assert weights == f"its weights are in {tmp_path / 'run' / 'checkpoint' / 'step-2'}"
    assert line.startswith(f"the run in {tmp_path / 'run'} is finished: step 2 of 2, results in ")
    assert "raise training.steps to go on" in line
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4  # untouched


def test_the_summary_of_a_shorter_run_does_not_outlive_its_resumption(world, tmp_path):
    saved(tmp_path / "run", 2, steps=2, loss=1.5)
    longer = recipe(tmp_path / "run", "--checkpoint.enable", "true", "--training.steps", "4")
    resumed = claim_folder(longer, world)
    assert (tmp_path / "run" / "summary.json").exists()
    resumed.begin(longer)
    assert not (tmp_path / "run" / "summary.json").exists()  # `hetmesh report` would show its loss as this run's
    resumed.release()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n', 'line 2: \'{"step": 2, "lo\' is not a step of a run'),
        ("epoch,loss\n1,2.0\n", "line 1: 'epoch,loss' is not a step of a run"),
        ("[1]\n[2]\n", "line 1: '.1.' is not a step of a run"),
        ('{"loss": 1}\n{"step": 1}\n', "line 1: .* is not a step of a run"),
        ("\x00\xff\n{}\n", "line 1: .* is not a step of a run"),
    ],
    ids=["broken", "foreign", "no table", "no step", "binary"],
)
def test_a_foreign_or_broken_metrics_file_is_one_line(world, tmp_path, text, line):
    saved(tmp_path / "run", 1)
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(OutputError, match=f"run/metrics.jsonl, {line}; move the file away, or give another"):
        claim_folder(recipe(tmp_path / "run", "--checkpoint.enable", "true"), world)
    assert path.read_text() == text


def test_a_folder_that_cannot_be_written_is_named(world, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/hetmesh/run")):
        with pytest.raises(OutputError, match=f"^{folder}.* cannot be written: .*; job.dump_folder must be a folder"):
            Trainer(resolve(recipe(folder)), world)


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl"])
def test_a_folder_in_the_place_of_a_file_is_refused_before_a_rank_waits(world, tmp_path, name):
    """Rank 0 alone would open it, while the others wait for its first step."""
    given = recipe(tmp_path / "run", "--checkpoint.enable", "true")
    if name == "metrics.jsonl":  # of a run that is resumed; a new one leaves such a folder alone
        saved(tmp_path / "run", 1)
        (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / name).mkdir(parents=True)
    with pytest.raises(OutputError, match=rf"run/{name} cannot be written: it is a folder; remove it, or give another"):
        claim_folder(given, world)
    with pytest.raises(RecipeError, match=rf"job.dump_folder: .*run/{name} cannot be written: it is a folder"):
        check_run(given)


def test_a_sample_that_is_skipped_again_is_named_once():
    notices = StepNotices(None, None)
    assert notices.skipped(1, {0: "sample 'a': broken", 3: "sample 'b': broken"}) == [
        "step 1: skipped: sample 'a': broken",
        "step 1: skipped: sample 'b': broken",
    ]
    assert notices.skipped(2, {1: "sample 'b': broken"}) == []
    last = notices.skipped(3, {i: f"sample {i}: broken" for i in range(20)})
    assert len(last) == 8
    assert last[-1].endswith("from here on they are only counted, as samples_skipped in metrics.jsonl")


def full(folder, name):
    """Let writes to a file of `folder` fail as on a full disk: /dev/full refuses every one."""
    folder.mkdir()
    (folder / name).symlink_to("/dev/full")
    return folder


def test_a_full_disk_is_named(tmp_path):
    step = StepMetrics(1, 2.0, 1.0, 0.1, 5.0, 6.0, 7.0)
    reporter = Reporter(full(tmp_path / "a", "metrics.jsonl"), 9, rank=0)
    with pytest.raises(OutputError, match=r"a/metrics\.jsonl cannot be written: no space left on device"):
        reporter.step(step)
    reporter = Reporter(full(tmp_path / "b", "summary.json.part"), 9, rank=0)
    with pytest.raises(OutputError, match=r"b/summary\.json cannot be written: no space left on device"):
        reporter.summary({"steps": 9})
    reporter = Reporter(full(tmp_path / "c", "events.jsonl"), 9, rank=0)
    with pytest.raises(OutputError, match=r"c/events\.jsonl cannot be written: no space left on device"):
        reporter.saved(1, 0.0, 0.0, asynchronous=False)
    with pytest.raises(KeyError, match="what came first"):  # closing tries to write the rest
        close_after_an_error(reporter)
    assert reporter._file.closed


def test_a_run_goes_on_without_a_log_that_cannot_be_written(tmp_path, monkeypatch, capfd):
    reporter = Reporter(tmp_path / "run", 9, rank=0, keys=Metrics(log_freq=1))
    with open("/dev/full", "w") as full_disk:
        monkeypatch.setattr("sys.stdout", full_disk)
        log_some(reporter)
        monkeypatch.undo()
    told = "note: standard output takes no more (No space left on device): the run goes on without its log"
    assert capfd.readouterr().err.splitlines() == [told]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 9


def close_after_an_error(reporter):
    try:
        raise KeyError("what came first")
    finally:
        reporter.close()


def log_some(reporter):
    for step in range(9):
        reporter.step(StepMetrics(step, 2.0, 1.0, 0.1, 5.0, 6.0, 7.0))
    reporter.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_under_tensorboard_is_named(tmp_path):
    reporter = Reporter(tmp_path, 9, rank=0, keys=Metrics(log_freq=1, enable_tensorboard=True))
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.unlink()
    file.symlink_to("/dev/full")
    with pytest.raises(OutputError, match=f"^{tmp_path}.* cannot be written: no space left on device"):
        log_some(reporter)
