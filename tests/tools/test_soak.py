"""The soak tool: it counts what hangs and what fails, adds to earlier counts, and says so by its exit status."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "tools" / "soak.py"


@pytest.fixture
def soak(monkeypatch):
    spec = importlib.util.spec_from_file_location("soak", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "soak", module)
    spec.loader.exec_module(module)
    return module


def test_counts_add_up(soak, monkeypatch, tmp_path, capsys):
    answers = iter([None, "hang: no end within 5 s", None, "failure: exit status 1", None, None])
    monkeypatch.setitem(soak.KINDS, "launches", lambda limit: next(answers))
    arguments = ["launches", "--n", "3", "--json", "--add", "--output", str(tmp_path / "kept" / "soak.json")]
    assert [soak.main(arguments), soak.main(arguments)] == [1, 1]
    first, both = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["n"], first["hangs"], first["failures"]) == (3, 1, 0)
    assert (both["n"], both["hangs"], both["failures"]) == (6, 1, 1)
    assert len(both["seconds"]) == 6
    assert json.loads((tmp_path / "kept" / "soak.json").read_text()) == both


@pytest.mark.slow
def test_a_hang_is_found_ended_and_shown(soak, monkeypatch):
    monkeypatch.setattr(soak, "COMMAND", ("-c", "import time; print('begun', flush=True); time.sleep(600)"))
    problem = soak.launch(2.0)
    assert problem.startswith("hang: no end within 2 s\nbegun\n")
    assert 'File "<string>", line 1 in <module>' in problem


def test_a_process_left_behind_is_found(soak, monkeypatch):
    child = "s.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], stdout=s.DEVNULL, stderr=s.DEVNULL)"
    code = f"import subprocess as s, sys; {child}"
    monkeypatch.setattr(soak, "COMMAND", ("-c", code))
    assert soak.launch(60.0).startswith("failure: it left processes behind")


@pytest.mark.exhaustive
def test_pools_start_again_and_again(soak, capsys):
    assert soak.main(["pools", "--n", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hangs"] == 0


@pytest.mark.exhaustive
def test_agents_come_and_go():
    """As a process of its own: it forks, which numpy's threads forbid in this one."""
    command = [sys.executable, FILE, "elastic", "--n", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (ranks,) = json.loads(done.stdout)["ranks"]
    assert (ranks[0], min(ranks), ranks[-1]) == (8, 4, 8)
