"""`hetmesh explain`: text, JSON, picture, errors."""

import json
from pathlib import Path

import pytest

from hetmesh.cli import main

RECIPES = Path(__file__).parents[2] / "recipes"
DIGITS = str(RECIPES / "digits.toml")


def test_text(capsys):
    assert main(["explain", DIGITS, "--parallelism.vision.ranks", "2-3"]) == 0
    out = capsys.readouterr().out
    assert "rank 2" in out
    assert "4 ranks, 800 steps of 64 samples in 1 microbatch" in out
    assert "note: no module uses rank 0-1" in out


@pytest.mark.slow
def test_json_and_png(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "digits.png"
    assert main(["explain", DIGITS, "--json", "--png", str(path)]) == 0
    view = json.loads(capsys.readouterr().out)
    assert [module["name"] for module in view["modules"]] == ["vision", "projector", "llm"]
    assert path.stat().st_size > 1000


def test_errors_are_those_of_check(capsys):
    assert main(["explain", DIGITS, "--parallelism.llm.tensor_parallel_degree", "4"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert main(["explain", "nowhere.toml"]) == 2


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("siglip_qwen3_8b", "8,190,735,360"),
        ("qwen3_vl_30b_a3b", "30,532,122,624"),
        ("qwen3_5_35b_a3b", "34,660,610,688"),
    ],
)
def test_check_accepts_the_large_recipes(name, parameters, capsys):
    assert main(["check", str(RECIPES / f"{name}.toml")]) == 0
    out = capsys.readouterr().out
    assert parameters in out
    assert out.endswith("ok\n")
