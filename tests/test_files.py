"""What hetmesh writes is strict JSON, whole or not at all, and an error that names the path where it cannot be."""

import json
import math
from pathlib import Path

import pytest

from hetmesh.cli import main
from hetmesh.errors import OutputError
from hetmesh.files import to_json, write_json, writing


def strict(text):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_is_strict():
    value = {"loss": math.nan, "norms": [1.5, math.inf, -math.inf], "more": ({"a": math.nan}, True, None, "NaN")}
    assert strict(to_json(value)) == {
        "loss": None,
        "norms": [1.5, None, None],
        "more": [{"a": None}, True, None, "NaN"],
    }
    assert to_json({"a": 0.1}) == json.dumps({"a": 0.1})


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": math.inf})
    assert strict(path.read_text()) == {"a": None}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert strict(path.read_text()) == {"a": None}


def test_errors_name_the_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/a\.json cannot be written: not a directory"):
        write_json(tmp_path / "file" / "a.json", {})
    with (
        pytest.raises(OutputError, match="x cannot be written: no space left on device; free some"),
        writing("x", "free some"),
    ):
        Path("/dev/full").write_text("x")


def test_commands_print_strict_json(monkeypatch, capsys):
    class View:
        def as_json(self):
            return {"seconds": math.inf}

    monkeypatch.setattr("hetmesh.report.explain", lambda recipe, machine: View())
    recipe = Path(__file__).parents[1] / "recipes" / "digits.toml"
    assert main(["explain", str(recipe), "--json"]) == 0
    assert strict(capsys.readouterr().out) == {"seconds": None}
