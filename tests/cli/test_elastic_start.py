"""A run whose number of ranks changes: all ranks take the layout that rank 0 chooses, and it goes on from the newest
checkpoint as a run in that layout does."""

import json
import re
import shutil
import socket
from pathlib import Path

import pytest

from hetmesh.cli import main
from hetmesh.cli.elastic_start import choose
from hetmesh.cost.machine import TYPICAL_PEAK
from hetmesh.errors import RecipeError
from hetmesh.planner import Found
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.recipe.rewrite import rewritten

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = {
    ("training", "local_batch_size"): 8,
    ("modules", "vision", "config", "num_hidden_layers"): 1,
    ("modules", "llm", "config", "num_hidden_layers"): 1,
    ("modules", "vision", "config", "attention_dropout"): 0.2,  # so that random state matters
    ("validation", "enable"): False,
    ("metrics", "enable_tensorboard"): False,
    ("checkpoint", "interval"): 2,
}
ON_TWO = {"vision": {"ranks": [0]}, "llm": {"ranks": [1], "tensor_parallel_degree": 1}}
EXACT = ("step", "loss", "grad_norm", "lr")


@pytest.fixture
def recipe(tmp_path):
    text = rewritten((RECIPES / "digits.toml").read_text(), {**TINY, ("job", "dump_folder"): str(tmp_path / "run")})
    (tmp_path / "two.toml").write_text(rewritten(text, {("parallelism",): ON_TWO}))
    on_one = {("parallelism",): {"ranks": [0]}, ("elastic", "layouts"): ["two.toml"]}
    (tmp_path / "one.toml").write_text(rewritten(text, on_one))
    return tmp_path / "one.toml"


@pytest.fixture
def start_ranks(start_training):
    """`start_ranks(2, recipe, *overrides)`: what a launcher's workers print, whose rank 0 hosts the store, as
    torchrun's agents ask for that have been started again, each another number of times."""

    def start(size, *arguments):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        place = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        place |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        ranks = [{"RANK": str(r), "LOCAL_RANK": str(r), "TORCHELASTIC_RESTART_COUNT": str(r)} for r in range(size)]
        started = [start_training(*arguments, environment=place | rank) for rank in ranks]
        printed = [process.communicate(timeout=120) for process in started]
        return [(process.returncode, *streams) for process, streams in zip(started, printed, strict=True)]

    return start


def curve(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [tuple(line[key] for key in EXACT) for line in map(json.loads, lines) if "loss" in line]


def test_a_run_goes_on_in_the_layout_of_other_ranks(start_ranks, recipe, tmp_path):
    steps = ("--training.steps", "5", "--lr_scheduler.warmup_steps", "2")
    first = start_ranks(2, recipe, *steps)
    assert [(status, err) for status, _, err in first] == [(0, "")] * 2, first
    assert first[0][1].startswith("elastic: 2 ranks (two.toml, step predicted ")
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-5")  # as if it had been killed in step 6
    (tmp_path / "run" / "summary.json").unlink()
    shutil.copytree(tmp_path / "run", tmp_path / "reference")
    ((status, out, err),) = start_ranks(1, recipe, *steps)
    assert (status, err) == (0, ""), out + err
    line, *_ = out.splitlines()
    assert line.startswith("elastic: 1 rank (one.toml, step predicted ")
    assert " in place of 2 (two.toml, step predicted " in line
    assert line.endswith("; goes on after step 4, 1 step lost")
    alone = ("--elastic.layouts", "[]", "--job.dump_folder", str(tmp_path / "reference"))
    ((status, out, err),) = start_ranks(1, recipe, *steps, *alone)
    assert (status, err) == (0, ""), out + err
    assert "elastic" not in out
    assert curve(tmp_path / "run") == curve(tmp_path / "reference")
    assert [step for step, *_ in curve(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_the_tables_of_the_page_are_read():
    page = (RECIPES.parent / "src" / "hetmesh" / "cli" / "README.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```toml\n(\[elastic\]\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    recipe = parse_recipe((RECIPES / "digits.toml").read_text() + text)
    assert (recipe.elastic.layouts, recipe.elastic.plan) == (("six.toml", "four.toml"), True)


def test_what_rank_0_refuses_ends_all_ranks(start_ranks, recipe):
    ranks = start_ranks(3, recipe)
    assert [(status, out) for status, out, _ in ranks] == [(2, "")] * 3, ranks
    assert ranks[0][2].startswith("error: elastic: no layout is of 3 ranks; the nearest is two.toml of 2 ")
    assert [err for *_, err in ranks[1:]] == ["", ""]


def test_agents_that_share_a_store_cannot_come_and_go(recipe, monkeypatch, capsys):
    """Those of torch 2.13: whoever comes later waits for an address that nobody writes down again."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "GROUP_WORLD_SIZE": "2"}
    for name, value in (place | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(recipe)]) == 2
    assert "start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_the_planner_finds_a_layout_that_none_names_and_it_is_kept(recipe, tmp_path):
    on = ("--elastic.plan", "true", "--training.steps", "6")
    read = load_recipe(recipe, on)
    found, line = choose(recipe, read, on, 3)
    file = tmp_path / "run" / "layout-3.toml"
    assert (found.world_size, found.batch.global_batch_size, found.training.steps) == (3, 8, 6)
    assert found.elastic == read.elastic
    assert line.startswith(f"elastic: 3 ranks ({file}, step predicted ")
    written = file.stat().st_mtime_ns
    assert choose(recipe, read, on, 3) == (found, line)
    assert file.stat().st_mtime_ns == written
    again = (*on, "--training.max_norm", "0.5")  # another run: what was planned is not of it
    assert choose(recipe, load_recipe(recipe, again), again, 3)[0].training.max_norm == 0.5


def test_what_the_planner_does_not_find_is_an_error_that_names_the_nearest(recipe, monkeypatch):
    """Nothing is measured for it: each start finds the same."""
    asked = []
    monkeypatch.setattr("hetmesh.cli.elastic_start.search", lambda problem, **how: asked.append(problem) or Found({}))
    on = ("--elastic.plan", "true")
    said = r"no layout is of 3 ranks; the nearest is two.toml of 2 .*, which finds nothing here: no layout of 3 ranks"
    with pytest.raises(RecipeError, match=said):
        choose(recipe, load_recipe(recipe, on), on, 3)
    assert set(asked[0].machine.peak_flops.values()) == {TYPICAL_PEAK}
