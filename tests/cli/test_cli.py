"""The command line without workers: verbs, overrides, exit statuses, errors in one line, and what is imported when."""

import contextlib
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from hetmesh.cli import main, split_overrides
from hetmesh.cli.launch import start_method, threads_per_worker
from hetmesh.cli.workers import Failure, first_cause
from hetmesh.errors import BoundaryTimeout, LaunchError

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def trainer(monkeypatch):
    """A trainer that only notes what it was asked to train."""
    module = types.ModuleType("hetmesh.api")
    module.recipes = []  # type: ignore[attr-defined]
    module.run_recipe = lambda recipe, resolved=None: module.recipes.append(recipe)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hetmesh.api", module)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    return module


def one_error(capsys) -> str:
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def test_help_and_unknown_verbs(capsys):
    assert main(["--help"]) == 0
    assert "train    train a recipe" in capsys.readouterr().out
    assert main([]) == 2
    capsys.readouterr()
    assert main(["trian", "x"]) == 2
    assert "unknown verb 'trian'; did you mean 'train'? valid are init, train, check" in one_error(capsys)


@pytest.mark.parametrize("verb", ["train", "check"])
def test_arguments(verb, capsys):
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    assert "--section.key value" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main([verb])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("given", "own", "overrides"),
    [
        (["r.toml"], ["r.toml"], []),
        (["r.toml", "--a.b", "1", "--c.d=2"], ["r.toml"], ["--a.b", "1", "--c.d=2"]),
        (["--a.b", "1", "r.toml", "--json"], ["r.toml", "--json"], ["--a.b", "1"]),
        (["r.toml", "--a.b", "--c.d", "-1"], ["r.toml"], ["--a.b", "--c.d", "-1"]),
        (["r.toml", "--png", "a.png", "--x=a.b"], ["r.toml", "--png", "a.png", "--x=a.b"], []),
    ],
)
def test_overrides_are_told_from_a_verbs_own_arguments(given, own, overrides):
    assert split_overrides(given) == (own, overrides)


@pytest.mark.parametrize("verb", ["train", "check"])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.toml"], "recipe nowhere.toml cannot be read: no such file"),
        ([str(RECIPES / "digits.toml"), "--training.stpes", "1"], "unknown key 'stpes'; did you mean 'steps'?"),
        ([str(RECIPES / "digits.toml"), "--parallelism.llm.tensor_parallel_degree", "3"], "must divide its number of"),
        (
            [
                *(str(RECIPES / "digits.toml"), "--modules.llm.config.num_attention_heads", "1"),
                *("--modules.llm.config.num_key_value_heads", "1"),
            ],
            "valid degrees are [1]",
        ),
        ([str(RECIPES / "digits.toml"), "--modules.llm.model", "qwen"], "did you mean 'qwen3'?"),
        ([str(RECIPES / "digits.toml"), "--data.source", "digit"], "no such source"),
        ([str(RECIPES / "digits.toml"), "--boundaries.1.at", "photo"], "has the placeholders ['image']"),
    ],
)
def test_bad_recipes_are_one_line_before_any_worker_starts(verb, arguments, says, capsys, trainer):
    assert main([verb, *arguments]) == 2
    assert says in one_error(capsys)
    assert not trainer.recipes


@pytest.mark.parametrize("name", ["digits", "digits_colocated", "digits_overlapping", "digits_single"])
def test_shipped_recipes_pass_check(name, capsys):
    assert main(["check", str(RECIPES / f"{name}.toml")]) == 0
    out = capsys.readouterr().out
    assert "800 steps of 64 samples" in out
    assert out.endswith("ok\n")


def test_one_rank_trains_in_this_process(trainer, capsys):
    assert main(["train", str(RECIPES / "digits_single.toml"), "--training.steps", "3", "--job.print_config=true"]) == 0
    (recipe,) = trainer.recipes
    assert recipe.training.steps == 3
    assert '"from": "vision"' in capsys.readouterr().out


def test_a_failing_run_is_status_1(trainer, capsys):
    def train(recipe, resolved):
        raise BoundaryTimeout("boundary vision->projector: rank 2 waited 5 s")

    trainer.run_recipe = train
    assert main(["train", str(RECIPES / "digits_single.toml")]) == 1
    assert "rank 2 waited" in one_error(capsys)


def test_under_torchrun_it_joins(trainer, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["train", str(RECIPES / "digits.toml")]) == 0
    assert len(trainer.recipes) == 1
    assert capsys.readouterr().out == ""  # rank 0 does the talking


@pytest.mark.parametrize("rank", [0, 1])
def test_under_torchrun_the_number_of_ranks_must_fit(rank, trainer, monkeypatch, capsys):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", str(RECIPES / "digits.toml")]) == 2
    if rank == 0:
        assert "describes 4 ranks, but torchrun started WORLD_SIZE = 2; start 4 (on one" in (told := one_error(capsys))
        assert "--ranks 2 --write FILE.toml` finds a layout for 2, and a checkpoint of any layout goes on in it" in told
    else:
        assert capsys.readouterr().err == ""
    assert not trainer.recipes


def test_help_and_misspelt_keys_do_not_wait_for_torch():
    code = (
        "import sys; from hetmesh.cli import main; "
        "codes = main(['--help']), main(['check', sys.argv[1], '--training.stpes', '1']); "
        "assert codes == (0, 2) and 'torch' not in sys.modules, codes"
    )
    subprocess.run([sys.executable, "-c", code, str(RECIPES / "digits.toml")], check=True, env={**os.environ})


def test_threads_per_worker(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert [threads_per_worker(n) for n in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    assert threads_per_worker(1) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads_per_worker(8) == 5


def test_the_first_cause_is_reported():
    killed = Failure(3, "ended by signal SIGKILL (out of memory?)")
    closed = Failure(2, "RuntimeError: Connection closed by peer [127.0.0.1]", "stack 2 ")
    lost = "BoundaryError: boundary 'a->b', microbatch 0, forward: rank 5 lost rank 3: Connection closed by peer"
    lost = Failure(5, lost, "stack 5 ")
    assert first_cause([killed]) is killed
    assert first_cause([lost, closed, killed]) is killed
    assert first_cause([lost, closed]) is lost
    bug = Failure(1, "KeyError: 'x'", "stack 1 ")
    assert str(first_cause([lost, killed, bug])) == "stack 1 error: rank 1: KeyError: 'x'"
    sample = Failure(0, "SampleError: sample 'd7' has 2 images", "stack 0 ")
    assert str(first_cause([killed, sample, bug])) == "error: rank 0: sample 'd7' has 2 images"


@pytest.mark.parametrize(("devices", "method"), [(0, "fork"), (4, "spawn"), (8, "spawn")])
def test_how_workers_start(devices, method, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(sys, "platform", "linux")
    assert start_method(4) == method


@pytest.mark.parametrize("devices", [1, 3])
def test_fewer_gpus_than_workers_is_an_error_and_not_the_cpu(devices, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    with pytest.raises(LaunchError, match=rf"the recipe has 4 ranks, and this machine {devices} CUDA devices?: "):
        start_method(4)


def test_a_reader_that_is_gone_and_a_full_disk_are_no_tracebacks(monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    for target, status, says in ((writing, 141, ""), ("/dev/full", 1, "no space left")):
        with contextlib.suppress(OSError), open(target, "w") as out, monkeypatch.context() as patch:
            patch.setattr("sys.stdout", out)
            found = main(["check", str(RECIPES / "digits_single.toml")])
        assert found == status
        assert says in capsys.readouterr().err
