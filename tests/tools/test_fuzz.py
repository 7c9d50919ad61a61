"""`tools/fuzz.py`: its list, its exit status, and misuse that must not offend."""

import argparse
import importlib
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def load(monkeypatch):
    """`load("fuzzing.fuzz_misuse")`: a module of tools/."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


def test_help_lists_the_fuzzers(load, capsys):
    with pytest.raises(SystemExit):
        load("fuzz").main(["--help"])
    out = capsys.readouterr().out
    assert "recipes  Drawn recipes train" in out
    assert "misuse   Wrong arguments" in out


@pytest.mark.parametrize("kind", ["values", "texts", "commands"])
def test_misuse_meets_only_the_projects_own_errors(load, kind):
    """Recipes and command lines; the rest is run by hand: `python tools/fuzz.py misuse`."""
    result = load("fuzzing.fuzz_misuse").run(argparse.Namespace(n=40, seed=11, kind=kind))
    assert result["failures"] == []
    assert result["counts"][f"{kind}: refused"] > 0


def test_files_that_are_broken_meet_only_the_projects_own_errors(load):
    result = load("fuzzing.fuzz_misuse").run(argparse.Namespace(n=60, seed=11, kind="files"))
    assert result["failures"] == []


def test_what_raises_anything_else_is_an_offender(load):
    attempt = load("fuzzing.fuzz_misuse").attempt
    assert attempt(lambda: {}["key"])[0] == "offends"
    assert attempt(lambda: None)[0] == "accepted"


def test_failures_are_an_exit_status(load, capsys, monkeypatch):
    fuzz, kinds = load("fuzz"), load("fuzzing.fuzz_misuse")
    assert fuzz.main(["misuse", "--n", "1", "--kind", "texts"]) == 0
    monkeypatch.setattr(kinds, "attempt", lambda call: ("offends", "KeyError: 'x'"))
    assert fuzz.main(["misuse", "--n", "1", "--kind", "texts"]) == 1
    assert "KeyError: 'x'" in capsys.readouterr().out
