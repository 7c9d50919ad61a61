"""What the first pages promise: pictures, outputs and tables are true, and scripts train as one process does."""

import argparse
import importlib
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import tomli
import torch
from torch import nn

import hetmesh
from hetmesh.cli import VERBS, main
from hetmesh.graph import dense_mesh
from hetmesh.recipe.recipe import load_recipe
from support.forked import ranks_of, script

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECIPES = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "src" / "hetmesh" / "cli" / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "tools" / "results"


def blocks(language, page=README):
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


def test_two_commands_do_all_set_up():
    first, _, third = [block.strip() for block in blocks("bash")[:3]]
    assert first == "pip install . && hetmesh train recipes/digits.toml"
    assert third == "pip install -e '.[test]' && pytest"


@pytest.mark.parametrize(("page", "lines"), [("README.md", 180), ("CONTRIBUTING.md", 200)])
def test_they_are_short(page, lines):
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= lines


def test_the_recipe_that_is_shown_is_part_of_the_digits_recipe():
    shown = tomli.loads(next(block for block in blocks("toml", RECIPES) if "[modules.vision]" in block))
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


@pytest.fixture
def measured_table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("measured_table")


def test_the_tables_of_measurements_are_those_of_the_kept_outputs(measured_table):
    assert len(measured_table.PAGES) == 2
    for page, rows in measured_table.PAGES.items():
        written = measured_table.page_table.written(page.read_text(encoding="utf-8"), "measured_table")
        again = "an output, or code that one judges, has changed: python tools/measured_table.py --write"
        assert measured_table.accepted(written, rows), f"{page}: {again}"


def kept(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", ["README.md", "src/hetmesh/README.md", "tools/results/README.md"])
def test_figures_in_sentences_are_those_of_the_kept_outputs(page):
    """Each of them that a page names."""
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    planner, optimus, survey, cards = kept("planner"), kept("optimus"), kept("survey"), kept("cards")
    searches = [own for row in kept("tune")["rows"] for own in row["searches"]]
    kinds = [survey[kind] for kind in ("image_text", "audio_text")]
    classes = (*(str(kind[key]) for kind in kinds for key in ("passed", "classes")), str(survey["video"]))
    found = {
        r"(\d+) of (\d+) image-text classes and (\d+) of (\d+) audio-text classes .* make, (\d+) of them": classes,
        r"of (\d+) image-text classes (\d+), and of (\d+) audio-text classes (\d+), train .* make, (\d+) of them": (
            *classes[1::-1],
            *classes[3:1:-1],
            classes[4],
        ),
        r"predicted gain is ([\d.]+) points off": (f"{planner['gain_error_points']:.1f}",),
        r"runs are (\d+)% off \(rank correlation ([\d.]+)\)": (
            f"{100 * cards['mean_step_error']:.0f}",
            f"{cards['rank_correlation']:.2f}",
        ),
        r"never ran are (\d+)% off, and (\d+) of (\d+) choices": (
            f"{100 * kept('tune')['error_after']:.0f}",
            str(sum(own["within"] for own in searches)),
            str(len(searches)),
        ),
        r"`share_of_bound` \(([\d.]+)\)": (f"{optimus['share_of_bound']:.2f}",),
        r"doing nothing scores ([\d.]+)": (f"{optimus['share_of_bound_unfilled']:.2f}",),
    }
    named = {pattern: match.groups() for pattern in found if (match := re.search(pattern, text))}
    assert named
    assert named == {pattern: found[pattern] for pattern in named}


def test_the_step_that_is_shown_is_that_of_the_digits_recipe():
    ((step, loss, norm),) = re.findall(r"^step (\d+)/800  loss ([\d.]+)  grad norm ([\d.]+)", README, re.MULTILINE)
    of = kept("losses")["recipes"]["digits"][int(step) - 1]
    assert (loss, norm) == (f"{of['loss']:.4f}", f"{of['grad_norm']:.3f}")


@pytest.mark.exhaustive
def test_the_plans_that_are_shown_are_what_plan_prints(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (command,) = re.findall(r"`(hetmesh plan [^`]*)`", README)
    (shown,) = [text for text in blocks("") if "homogeneous  " in text]
    assert main(shlex.split(command)[1:]) == 0
    assert set(shown.splitlines()) <= set(capsys.readouterr().out.splitlines())


def test_every_command_is_listed_with_options_that_it_has():
    listed = re.findall(r"^\| `hetmesh (\w+) [^`]*` \| (.*) \|$", COMMANDS, re.MULTILINE)
    assert sorted(verb for verb, _ in listed) == sorted(VERBS)
    for verb, says in listed:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"hetmesh.cli.{verb}").add_arguments(parser)
        known = {option for action in parser._actions for option in action.option_strings}
        assert {option for option in re.findall(r"`(--[\w-]+)(?=[ `])", says) if "." not in option} <= known, verb


def test_every_recipe_is_listed_and_every_listed_one_exists():
    assert {path.name for path in (ROOT / "recipes").glob("*.toml")} == set(
        re.findall(r"^\| `recipes/(\w+\.toml)`", RECIPES, re.MULTILINE)
    )


AXES = {"data parallel": "dp_replicate", "FSDP": "dp_shard", "tensor parallel": "tp", "context parallel": "cp"}


@pytest.mark.parametrize("line", re.findall(r"^\| `recipes/\w+\.toml` \| .* \|$", RECIPES, re.MULTILINE))
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
    (text,) = (block for block in blocks("python") if "redistribute" in block)
    assert len([line for line in text.splitlines() if line]) <= 30
    path = write(tmp_path / "two_meshes.py", text)
    ranks = ranks_of(path, 4)
    assert [status for status, *_ in ranks] == [0] * 4, ranks
    assert printed_losses("".join(out for _, out, _ in ranks)) == pytest.approx(one_process(), abs=1e-12)


def page_scripts():
    """Of the page of training."""
    page = (ROOT / "src" / "hetmesh" / "training" / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def printed_losses(out):
    return [float(text) for text in re.findall(r"step \d loss (\S+)", out)]


def losses_of(path, start_forked):
    """What a script prints that starts its ranks itself."""
    process = start_forked(script, str(path))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return printed_losses(out)


@pytest.mark.slow
def test_a_loop_of_ones_own_trains_as_one_process_does(tmp_path, start_forked):
    """Loss, optimizer and loop of the script, over the same recipe on one rank."""
    (text,) = (block for block in page_scripts() if "open_job" in block)
    assert len(text.splitlines()) <= 60
    path = write(tmp_path / "train_digits.py", text)
    own = runpy.run_path(str(path))
    losses = losses_of(path, start_forked)
    with hetmesh.open_job(hetmesh.parse_recipe(own["RECIPE"] | {"parallelism": {}}), loss=own["loss"]) as job:
        optimizer = torch.optim.AdamW(job.parameters(), lr=2e-3, foreach=False)
        for loss in losses:
            assert loss == pytest.approx(job.forward_backward(max_norm=1.0).loss, rel=1e-4)
            optimizer.step()
    assert len(losses) == 5


@pytest.mark.slow
def test_parts_of_ones_own_train_without_a_recipe(tmp_path, start_forked):
    (text,) = (block for block in page_scripts() if "Pipeline(" in block)
    losses = losses_of(write(tmp_path / "parts.py", text), start_forked)
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)


def write(path, text):
    path.write_text(text)
    return path


def pages():
    """The README, CONTRIBUTING and the README of each room, with the folders that they name files from."""
    package = ROOT / "src" / "hetmesh"
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "recipes" / "README.md"):
        yield path, (ROOT, package)
    yield ROOT / "tests" / "README.md", (ROOT / "tests", ROOT, ROOT / "tests" / "support")
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
