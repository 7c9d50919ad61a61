"""What the README promises: its two commands, its recipes, and its script, which trains as one process does."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hetmesh

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_two_commands_do_all_set_up():
    first, _, third = [block.strip() for block in blocks("bash")[:3]]
    assert first == "pip install . && hetmesh train recipes/digits.toml"
    assert third == "pip install -e '.[test]' && pytest"


def test_every_recipe_is_listed_and_every_listed_one_exists():
    assert {path.name for path in (ROOT / "recipes").glob("*.toml")} == set(
        re.findall(r"`recipes/(\w+\.toml)`", README)
    )


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
    assert losses_of(script, tmp_path / "two_meshes.py", *TORCHRUN) == pytest.approx(one_process(), abs=1e-12)


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
    (script,) = (block for block in blocks("python") if "open_job" in block)
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
    page = (ROOT / "src" / "hetmesh" / "training" / "README.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
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
