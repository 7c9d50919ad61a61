"""`hetmesh profile`: what it writes and says."""

import json
from pathlib import Path

import pytest

from hetmesh.cli import main
from hetmesh.cost import Profile

DIGITS = str(Path(__file__).parents[2] / "recipes" / "digits.toml")


@pytest.mark.slow
def test_a_profile_is_written_and_its_error_said(capsys, tmp_path):
    path = tmp_path / "new" / "profile.json"
    arguments = ["--output", str(path), "--seconds", "0", "--training.local_batch_size", "4"]
    assert main(["profile", DIGITS, *arguments]) == 0
    out = capsys.readouterr().out
    assert "held-out shapes: mean error" in out
    profile = Profile.load(path)
    assert main(["profile", DIGITS, *arguments, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["layers"]) == set(profile.layers)
    assert {kind.rpartition("tp ")[2] for kind in profile.layers} == {"1", "2"}


def test_a_wrong_recipe_is_an_error(capsys):
    assert main(["profile", "nowhere.toml"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
