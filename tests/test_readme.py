"""What the README promises: its pictures and tables are true, and its scripts train as one process does."""

import argparse
import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import tomli
import torch
from torch import nn

import hetmesh
from hetmesh.cli import VERBS, main
from hetmesh.graph import dense_mesh
from hetmesh.recipe.recipe import load_recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def blocks(language):
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


def test_two_commands_do_all_set_up():
    first, _, third = [block.strip() for block in blocks("bash")[:3]]
    assert first == "pip install . && hetmesh train recipes/digits.toml"
    assert third == "pip install -e '.[test]' && pytest"


def test_it_is_short():
    assert len(README.splitlines()) <= 450


def test_the_recipe_that_is_shown_is_part_of_the_digits_recipe():
    shown = tomli.loads(next(block for block in blocks("toml") if "[modules.vision]" in block))
    whole = tomli.loads((ROOT / "recipes" / "digits.toml").read_text(encoding="utf-8"))
    assert shown["boundaries"] == whole["boundaries"]
    for section in ("modules", "parallelism"):
        assert {name: {**whole[section][name], **table} for name, table in shown[section].items()} == whole[section]


def test_the_picture_is_what_explain_prints(capsys):
    (picture,) = [text for text in blocks("") if text.startswith("disjoint: ")]
    for above, *rows in (part.splitlines() for part in picture.split("\n\n")):
        for cut in (slice(0, 57), slice(57, None)):
            assert main(["explain", str(ROOT / above[cut].split()[-1])]) == 0
            printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
            assert {row[cut].strip() for row in rows} <= set(printed)


def test_the_table_of_measurements_is_that_of_the_kept_outputs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    written = importlib.import_module("page_table").written(README, "measured_table")
    measured_table = importlib.import_module("measured_table")
    again = "an output, or code that one judges, has changed: python tools/measured_table.py --write"
    assert measured_table.accepted(written), again


def test_every_command_is_listed_with_options_that_it_has():
    listed = re.findall(r"^\| `hetmesh (\w+) [^`]*` \| (.*) \|$", README, re.MULTILINE)
    assert sorted([*(verb for verb, _ in listed), "init", "train"]) == sorted(VERBS)
    for verb, says in listed:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"hetmesh.cli.{verb}").add_arguments(parser)
        known = {option for action in parser._actions for option in action.option_strings}
        assert {option for option in re.findall(r"`(--[\w-]+)(?=[ `])", says) if "." not in option} <= known, verb


def test_every_recipe_is_listed_and_every_listed_one_exists():
    assert {path.name for path in (ROOT / "recipes").glob("*.toml")} == set(
        re.findall(r"`recipes/(\w+\.toml)`", README)
    )


AXES = {"data parallel": "dp_replicate", "FSDP": "dp_shard", "tensor parallel": "tp", "context parallel": "cp"}


@pytest.mark.parametrize("line", re.findall(r"^\| `recipes/\w+\.toml` \| .* \|$", README, re.MULTILINE))
def test_degrees_in_the_table_of_recipes_are_theirs(line):
    """All that it says, and with "the same" what the line above says."""
    name, says = re.findall(r"^\| `(recipes/\w+\.toml)` \| (.*) \|$", line)[0]
    recipe = load_recipe(ROOT / name)
    meshes = [dense_mesh(mesh) for mesh in recipe.wiring.meshes.values()]
    degrees = {(axis, mesh.axis_size(axis)) for mesh in meshes for axis in (*AXES.values(), "pp")}
    for kind, size in re.findall(rf"({'|'.join(AXES)}) (\d+)", says):
        assert (AXES[kind], int(size)) in degrees
    if re.search(r"(two|four)[- ]stages?", says):
        assert ("pp", 2) in degrees  # four stages on two ranks take turns
    for count in re.findall(r"([\d,]+) GPUs", says):
        assert recipe.world_size == int(count.replace(",", ""))
    if "in one process" in says:
        assert recipe.world_size == 1


def one_process():
    """The README's script without meshes, as one would write it."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 12)).double()
    decoder = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 4)).double()
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    losses = []
    for _ in range(5):
        images, targets = torch.randn(16, 8).double(), torch.randn(16, 4).double()
        loss = nn.functional.mse_loss(decoder(encoder(images)), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_the_script_trains_in_parity_with_one_process(tmp_path):
    (script,) = (block for block in blocks("python") if "redistribute" in block)
    assert len([line for line in script.splitlines() if line]) <= 30
    assert losses_of(script, tmp_path / "two_meshes.py", *TORCHRUN) == pytest.approx(one_process(), abs=1e-12)


def page_scripts():
    """Of the page of training."""
    page = (ROOT / "src" / "hetmesh" / "training" / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


def losses_of(script, path, *launcher):
    """What a script of the README prints, which does not change with the launcher."""
    path.write_text(script)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=path.parent)
    assert done.returncode == 0, done.stderr
    return [float(text) for text in re.findall(r"step \d loss (\S+)", done.stdout)]


@pytest.mark.slow
def test_a_loop_of_ones_own_trains_as_one_process_does(tmp_path):
    """Loss, optimizer and loop of the script, over the same recipe on one rank."""
    (script,) = (block for block in page_scripts() if "open_job" in block)
    assert len(script.splitlines()) <= 60
    own = runpy.run_path(str(write(tmp_path / "train_digits.py", script)))
    losses = losses_of(script, tmp_path / "train_digits.py")
    with hetmesh.open_job(hetmesh.parse_recipe(own["RECIPE"] | {"parallelism": {}}), loss=own["loss"]) as job:
        optimizer = torch.optim.AdamW(job.parameters(), lr=2e-3, foreach=False)
        for loss in losses:
            assert loss == pytest.approx(job.forward_backward(max_norm=1.0).loss, rel=1e-4)
            optimizer.step()
    assert len(losses) == 5


@pytest.mark.slow
def test_parts_of_ones_own_train_without_a_recipe(tmp_path):
    (script,) = (block for block in page_scripts() if "Pipeline(" in block)
    losses = losses_of(script, tmp_path / "parts.py")
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)


def write(path, text):
    path.write_text(text)
    return path


def test_every_test_that_stands_for_a_requirement_exists():
    table = CONTRIBUTING.split("## Requirements and their tests")[1]
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", table)
    assert len(named) > 20
    for path, name in named:
        assert (ROOT / path).is_file(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"


def test_tests_that_a_default_run_leaves_out_are_said_to_be_exhaustive():
    left_out = 0
    for line in CONTRIBUTING.split("## Requirements and their tests")[1].splitlines():
        for path, name, after in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`( \(`exhaustive`\))?", line):
            above = (ROOT / path).read_text(encoding="utf-8").partition(f"def {name}(")[0]
            if "@pytest.mark.exhaustive\n" in above.split("\n\n\n")[-1]:
                assert after, f"{path}::{name}"
                left_out += 1
    assert left_out > 3


REQUIREMENTS = [
    f"{letter}{n}"
    for letter, last in (("H", 10), ("C", 10), ("O", 11), ("E", 10), ("U", 27))
    for n in range(1, last + 1)
]


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_every_requirement_has_a_row_that_names_a_test(requirement):
    rows = re.findall(rf"^\| {requirement} \| .* \| (.*) \|$", CONTRIBUTING, re.MULTILINE)
    assert rows
    assert any(re.search(r"`tests/[\w/]+\.py", row) for row in rows)


def test_every_case_of_peers_has_a_test():
    table = CONTRIBUTING.split("| peer | what | test |")[1].split("\n\n")[0]
    rows = table.strip().splitlines()[1:]
    assert len(rows) >= 15
    assert all(re.search(r"`tests/[\w/]+\.py[^|]* \|$", row) for row in rows)


def pages():
    """The README, CONTRIBUTING and the README of each room, with the folders that they name files from."""
    package = ROOT / "src" / "hetmesh"
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        yield path, (ROOT, package)
    for path in sorted(package.glob("*/README.md")):
        yield path, (path.parent, package, ROOT)


def test_every_file_that_a_page_names_exists():
    found = 0
    for page, folders in pages():
        text = page.read_text(encoding="utf-8")
        listed = re.findall(r"^(\w+\.py) {2,}", text, re.MULTILINE)  # a room's map of its own files
        for name in [*re.findall(r"`([\w./-]+\.(?:py|toml|md))`", text), *listed]:
            assert any((folder / name).is_file() for folder in folders), f"{page.relative_to(ROOT)} names {name}"
            found += 1
    assert found > 100


def test_every_room_has_a_page():
    rooms = {path.parent for path in (ROOT / "src" / "hetmesh").glob("*/__init__.py")}
    assert {room.name for room in rooms if not (room / "README.md").is_file()} == set()


@pytest.mark.parametrize(
    ("file", "definition"),
    [
        ("schedule/schedule.py", "class Schedule:"),
        ("boundary/world.py", "class World:"),
        ("training/recorder.py", "class StepRecorder:"),
        ("context/token_owners.py", "def "),
        ("parallel/gradient_sums.py", "def "),
    ],
)
def test_what_a_newcomer_looks_for_is_in_the_file_of_its_name(file, definition):
    assert f"\n{definition}" in (ROOT / "src" / "hetmesh" / file).read_text(encoding="utf-8")
