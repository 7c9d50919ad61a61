"""The command line without workers: verbs, overrides, exit statuses, errors in one line, and what is imported when."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from hetmesh.cli import main, split_overrides
from hetmesh.cli.launch import Failure, first_failure, threads_per_worker
from hetmesh.errors import BoundaryTimeout

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def trainer(monkeypatch):
    """A trainer that only notes what it was asked to train."""
    module = types.ModuleType("hetmesh.training.trainer")
    module.recipes = []  # type: ignore[attr-defined]
    module.train = module.recipes.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hetmesh.training.trainer", module)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
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
    assert "unknown verb 'trian'; did you mean 'train'? valid are train, check" in one_error(capsys)


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
        ([str(RECIPES / "digits.toml"), "--modules.llm.config.num_key_value_heads", "1"], "valid degrees are [1]"),
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
    def train(recipe):
        raise BoundaryTimeout("boundary vision->projector: rank 2 waited 5 s")

    trainer.train = train
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
        assert "describes 4 ranks, but torchrun started WORLD_SIZE = 2; start 4 (on one" in one_error(capsys)
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


def write_error(folder: Path, rank: int, message: str, time_ns: int) -> None:
    file = folder / "run" / "attempt_0" / str(rank) / "error.json"
    file.parent.mkdir(parents=True)
    file.write_text(f'{{"message": {{"message": "{message}", "extraInfo": {{"py_callstack": "stack {rank} "}}}}}}')
    os.utime(file, ns=(time_ns, time_ns))


def test_the_first_cause_is_reported(tmp_path):
    killed = Failure(3, "ended by signal SIGKILL (out of memory?)")
    assert first_failure(tmp_path, killed) is killed
    write_error(tmp_path, 2, "RuntimeError: Connection closed by peer [127.0.0.1]", 1000)
    assert first_failure(tmp_path, killed) is killed
    assert first_failure(tmp_path, Failure(2, "ended with 1")).rank == 2
    lost = "BoundaryError: boundary 'a->b', microbatch 0, forward: rank 5 lost rank 3: Connection closed by peer"
    write_error(tmp_path, 5, lost, 500)
    assert first_failure(tmp_path, killed) is killed
    write_error(tmp_path, 1, "KeyError: 'x'", 3000)
    assert str(first_failure(tmp_path, killed)) == "stack 1 error: rank 1: KeyError: 'x'"
    write_error(tmp_path, 0, "SampleError: sample 'd7' has 2 images", 2000)
    assert str(first_failure(tmp_path, killed)) == "error: rank 0: sample 'd7' has 2 images"
