"""SIGTERM, SIGINT and SIGHUP are noted, and the step that runs is ended and saved; a second SIGINT ends all at once."""

import os
import signal
from pathlib import Path

import pytest

from hetmesh.recipe.recipe import load_recipe
from hetmesh.records.checkpoint_folders import complete_steps
from hetmesh.resolve.resolved import resolve
from hetmesh.training.stopping import Stopped, StopSignals
from hetmesh.training.trainer import Trainer

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_single.toml"


@pytest.fixture
def usual():
    """All signals as they are in a process of its own, and afterwards as they were."""
    handlers = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL)
    handlers[signal.SIGINT] = signal.default_int_handler
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield handlers
    for number, handler in before.items():
        signal.signal(number, handler)


def recipe(folder, *overrides):
    small = (
        *("--training.local_batch_size", "2", "--training.steps", "4", "--validation.samples", "2"),
        *("--modules.llm.config.num_hidden_layers", "1", "--modules.vision.config.num_hidden_layers", "1"),
        *("--metrics.enable_tensorboard", "false", "--checkpoint.interval", "3"),
    )
    return load_recipe(RECIPE, (*small, "--job.dump_folder", str(folder), *overrides))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_is_noted_and_a_second_interrupt_ends_the_process(usual, number, capfd):
    with StopSignals(announce=True) as signals:
        assert signals.number == 0
        os.kill(os.getpid(), number)
        assert signals.number == number
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)  # as often as somebody likes
        assert signals.number == number
    told = "interrupted: stopping after the current step; press Ctrl-C again to stop at once\n"
    assert capfd.readouterr().err == (told if number == signal.SIGINT else "")
    assert {each: signal.getsignal(each) for each in usual} == usual


def test_what_somebody_else_handles_or_ignores_is_left_alone(usual):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nohup
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    with StopSignals(announce=False) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert (signals.number, heard) == (0, [1])


@pytest.mark.slow
@pytest.mark.parametrize("saves", ["true", "false"])
def test_a_run_ends_behind_the_step_with_the_signals_exit_status(usual, world, tmp_path, capsys, saves):
    def send(metrics):
        if metrics.step == 1 and signal.getsignal(signal.SIGINT) not in usual.values():
            os.kill(os.getpid(), signal.SIGINT)

    described = recipe(tmp_path / "run", "--checkpoint.enable", saves, "--checkpoint.async_mode", "async")
    with pytest.raises(Stopped) as stopped:
        Trainer(resolve(described), world, on_step=send).run()
    assert stopped.value.code == 130
    assert complete_steps(tmp_path / "run" / "checkpoint") == ([2] if saves == "true" else [])
    saved = "checkpoint saved; rerun the same command to resume"
    if saves == "false":
        saved = "no checkpoint saved, since [checkpoint] enable = false"
    assert f"stopped by SIGINT after step 2: {saved}\n" in capsys.readouterr().out
