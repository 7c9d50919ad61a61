"""What kept outputs say of themselves: which commit and contents they judge, and whether these have changed since."""

import importlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OUTPUTS = sorted(path for path in (ROOT / "tools" / "results").iterdir() if path.suffix != ".md")


@pytest.fixture
def load(monkeypatch):
    """`load("kept")`: a module of tools/."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module


@pytest.fixture
def kept(load, monkeypatch, tmp_path):
    """In a repository of its own, of two folders."""
    module = load("kept")
    for name, text in (("src/room/a.py", "a = 1\n"), ("src/room/b.py", "b = 1\n"), ("tools/bench.py", "c = 1\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "PLACES", ("src", "tools"))
    module._everywhere.cache_clear()
    yield module
    module._everywhere.cache_clear()


def changed(kept, of):
    kept._everywhere.cache_clear()
    return kept.changed(of)


def test_a_change_counts_and_a_move_does_not(kept, tmp_path):
    of = kept.stamp(["src/room", "tools/bench.py"])
    assert changed(kept, of) == []
    (tmp_path / "src" / "room" / "README.md").write_text("a page")
    shutil.move(tmp_path / "src" / "room" / "a.py", tmp_path / "tools" / "moved.py")
    (tmp_path / "src" / "room").rename(tmp_path / "src" / "renamed")
    assert changed(kept, of) == []
    (tmp_path / "tools" / "moved.py").write_text("a = 2\n")
    assert changed(kept, of) == ["src/room"]
    (tmp_path / "tools" / "moved.py").write_text("a = 1\n")
    (tmp_path / "tools" / "bench.py").unlink()
    assert changed(kept, of) == ["tools/bench.py"]


def test_what_is_added_to_an_output_is_as_old_as_its_first_part(kept, tmp_path):
    first = kept.stamp(["src/room"]) | {"commit": "first", "date": "2026-01-01"}
    (tmp_path / "src" / "room" / "a.py").write_text("a = 2\n")
    both = kept.stamp(["src/room"], before=first)
    assert (both["commit"], both["date"]) == ("first", "2026-01-01")
    assert changed(kept, both) == ["src/room"]
    assert changed(kept, kept.stamp(["src/room"])) == []


def test_imports_of_hetmesh_and_words_are_no_code(kept, tmp_path):
    file = tmp_path / "src" / "room" / "a.py"
    code = "import math\n{imports}\n\ndef f(x):\n    {words}\n    return math.sin(x) + a{end}\n"
    file.write_text(code.format(imports="from hetmesh.layout import a", words='"""Sine."""', end=""))
    of = kept.stamp(["src/room"])
    imports = "from hetmesh.graph import (\n    a,\n    b,\n)"
    file.write_text(code.format(imports=imports, words="# sine", end=""))
    assert changed(kept, of) == []
    file.write_text(code.format(imports="", words='"""Sine."""', end=" + 1"))
    assert changed(kept, of) == ["src/room"]
    file.write_text(code.format(imports="", words='"""Sine."""', end="").replace("import math", "import cmath as math"))
    assert changed(kept, of) == ["src/room"]


def test_an_earlier_commit_is_read_from_git(kept, tmp_path):
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@x"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        if subprocess.run([*git, *command], cwd=tmp_path, capture_output=True).returncode:
            pytest.skip("no git here")
    assert kept.stamp_of_commit(["src/room"], "HEAD")["judges"] == kept.stamp(["src/room"])["judges"]


def test_what_is_judged_has_to_exist(kept):
    with pytest.raises(FileNotFoundError, match="src/rooms, which is to be judged"):
        kept.stamp(["src/rooms"])


def test_a_text_file_ends_with_its_line(kept, tmp_path, monkeypatch):
    (tmp_path / "kept.txt").write_text("23 passed\n")
    monkeypatch.setattr(kept, "RESULTS", tmp_path)
    with pytest.raises(KeyError, match="does not end with a line"):
        kept.kept(tmp_path / "kept.txt")
    for _ in range(2):  # the second replaces the first
        assert kept.main(["kept.txt", "--judges", "src/room"]) == 0
    assert (tmp_path / "kept.txt").read_text().count("kept: ") == 1
    assert kept.kept(tmp_path / "kept.txt")["judges"].keys() == {"src/room"}


@pytest.mark.parametrize("output", OUTPUTS, ids=[path.name for path in OUTPUTS])
def test_every_kept_output_names_its_commit_and_what_it_judges(load, output):
    of = load("kept").kept(output)
    assert len(of["date"]) == len("2026-11-23")
    assert of["commit"]
    assert of["judges"]
    assert all(of["judges"].values())


def test_every_benchmark_says_what_it_judges(load):
    for name in load("bench").benchmarks():
        module = load(f"benchmarks.{name}")
        assert load("kept").stamp(module.JUDGES, module=module)["judges"].keys() > set(module.JUDGES), name


def test_a_row_that_is_older_than_its_code_has_to_have_its_date(load, monkeypatch, tmp_path):
    table, kept = load("measured_table"), load("kept")
    of = {"commit": "abc", "date": "2026-01-02", "judges": {"tools/bench.py": kept._hashes("tools/bench.py").pop()}}
    rows = (table.Row("speed", "speed", "{:.1f}", ("value",), "again", "streams"),)
    monkeypatch.setattr(table, "RESULTS", tmp_path)

    def keep(judges):
        (tmp_path / "speed.json").write_text(json.dumps({"value": 1.25, "kept": of | {"judges": judges}}))
        return table.table(rows)

    fresh, stale = keep(of["judges"]), keep({"tools/bench.py": "0123456789"})
    assert fresh.endswith("\n| speed | 1.2 | `again` |")
    assert stale.endswith("\n| speed (before streams) | 1.2 (2026-01-02) | `again` |")
    assert table.accepted(stale, rows)
    assert not table.accepted(fresh, rows)
    assert keep(of["judges"]) == fresh
    assert table.accepted(fresh, rows)
    assert table.accepted(stale, rows)  # a date is never wrong
    assert not table.accepted(stale + "\n| another | 1 | `again` |", rows)


def test_the_benchmarks_write_it(load, monkeypatch, tmp_path):
    module = load("benchmarks.frozen_rule")
    monkeypatch.setattr(module, "run", lambda args: {"cases": []})
    path = tmp_path / "out.json"
    load("bench").main(["frozen_rule", "--json", "--output", str(path)])
    found = json.loads(path.read_text())
    assert found["kept"]["judges"].keys() == {*module.JUDGES, "tools/benchmarks/frozen_rule.py"}
    assert found["kept"]["load"] >= 0
