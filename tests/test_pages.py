"""Commands and snippets of the pages: each is run by a test, and names nothing that does not exist."""

import argparse
import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hetmesh
from hetmesh.balance import POLICIES as BALANCERS
from hetmesh.balance import BatchLoads, Slots, assign
from hetmesh.cli import VERBS
from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.weights.build import build_module
from hetmesh.schedule import POLICIES as SCHEDULES
from support.forked import script

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted(page for room in ("recipes", "src", "tools", "tests") for page in (ROOT / room).rglob("README.md"))

COMMANDS = "tests/training/test_readme_commands.py"
RUN_BY = {
    "README.md": {
        "pip install . && hetmesh train recipes/digits.toml": (
            ".ci/run",
            f"{COMMANDS}::test_train_then_ask_then_export",
        ),
        "hetmesh generate outputs/digits --sample 0": (f"{COMMANDS}::test_train_then_ask_then_export",),
        "pip install -e '.[test]' && pytest": (".ci/run",),
        "hetmesh init /models/llava-1.5-7b-hf --data /data/pets > pets.toml": (
            "tests/resolve/test_starter.py::test_readmes_four_commands_from_a_directory_and_a_folder_of_images",
        ),
        "import torch": ("tests/test_readme.py::test_the_script_trains_in_parity_with_one_process",),
    },
    "recipes/README.md": {
        "[modules.vision]": ("tests/test_readme.py::test_the_recipe_that_is_shown_is_part_of_the_digits_recipe",),
    },
    "src/hetmesh/cli/README.md": {
        "torchrun --nproc-per-node 4 -m hetmesh train recipes/digits.toml": (f"{COMMANDS}::test_torchrun",),
        "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d": (f"{COMMANDS}::test_torchrun",),
        "srun --nodes 2 --ntasks 4": (f"{COMMANDS}::test_srun",),
        "[elastic]": ("tests/cli/test_elastic_start.py::test_the_tables_of_the_page_are_read",),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun": ("tests/tools/test_soak.py::test_agents_come_and_go",),
    },
    "src/hetmesh/planner/README.md": {
        "hetmesh plan recipes/siglip_qwen3_8b.toml": (f"{COMMANDS}::test_plan_then_look_at_the_plan",),
    },
    "src/hetmesh/training/tune/README.md": {
        "hetmesh tune recipes/digits.toml": (
            "tests/training/test_tune.py::test_the_command_finds_a_layout_behind_one_that_fails_on_one_rank",
        ),
    },
    "src/hetmesh/data/README.md": {
        "[[data.phases]]": ("tests/data/test_data_mixture.py::test_the_phases_that_the_page_shows",),
        "[data.options.generated]": ("tests/data/test_data_generated.py::test_the_options_that_the_page_shows",),
        "[data.options]": ("tests/data/test_data_columns.py::test_the_options_that_the_page_shows",),
    },
    "src/hetmesh/models/split/README.md": {
        "[model]": (f"{COMMANDS}::test_the_heart_of_a_recipe_of_a_directory",),
        "[modules.vision]\nmodel": ("tests/models/test_two_directories.py::test_the_recipe_of_the_page_trains",),
        "[modules.vision]\nmedia": (
            "tests/training/test_prepared_media.py::test_images_and_videos_train_as_in_transformers",
        ),
    },
    "CONTRIBUTING.md": {
        "# src/hetmesh/models/named/mistral.py": ("tests/test_pages.py::test_a_model_is_added",),
        "# src/hetmesh/balance/policies/dealt.py": ("tests/test_pages.py::test_a_balancer_is_added",),
        "# src/hetmesh/schedule/gpipe.py": ("tests/test_pages.py::test_a_schedule_policy_is_added",),
        "# counted.py": ("tests/test_pages.py::test_a_transport_is_added",),
    },
    "src/hetmesh/models/user/README.md": {
        "import torch": ("tests/models/test_user.py::test_the_example_equals_one_process_in_every_layout",),
        "[modules.vision]": ("tests/models/test_user.py::test_the_example_equals_one_process_in_every_layout",),
    },
    "src/hetmesh/testing/README.md": {
        "import torch\nfrom hypothesis": ("tests/testing/test_testing_readme.py::test_examples_run",),
        "import torch\nimport torch.distributed": ("tests/testing/test_testing_readme.py::test_examples_run",),
        "from hetmesh.testing.emulated_nccl": ("tests/testing/test_testing_readme.py::test_examples_run",),
    },
    "src/hetmesh/training/README.md": {
        "import torch\nfrom torch.nn.functional": (
            "tests/test_readme.py::test_a_loop_of_ones_own_trains_as_one_process_does",
        ),
        "import torch\nfrom torch import nn": ("tests/test_readme.py::test_parts_of_ones_own_train_without_a_recipe",),
        "[optimizer]": ("tests/training/test_custom_optimizers.py::test_the_example_suits_the_digits",),
    },
}
"""Page -> the beginning of each of its blocks in a language -> what runs it, shortened where it takes minutes.

A block without a language is a map or a picture."""


def blocks(page):
    """Language and text of the fenced blocks of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def snippet(beginning):
    """The block of CONTRIBUTING that begins so."""
    (found,) = [text for _, text in blocks(ROOT / "CONTRIBUTING.md") if text.startswith(beginning)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_run_by_a_test(page):
    listed = dict(RUN_BY.get(str(page.relative_to(ROOT)), {}))
    for language, text in blocks(page):
        if not language:
            assert not re.search(r"^\s*(\$|hetmesh |python |pip |torchrun |srun |import )", text, re.MULTILINE), text
            continue
        beginnings = [beginning for beginning in listed if text.startswith(beginning)]
        assert len(beginnings) == 1, f"{page.name}: which test runs this block? {text}"
        for test in listed.pop(beginnings[0]):
            file, _, name = test.partition("::")
            assert (ROOT / file).is_file(), test
            assert not name or f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), test
    assert not listed, f"{page.name} has no such blocks any more"


def test_what_must_pass_before_a_change_lands_is_the_second_command():
    (second,) = [text.strip() for _, text in blocks(ROOT / "README.md") if text.startswith("pip install -e")]
    assert second in (ROOT / ".ci" / "run").read_text().replace("--quiet ", "")


def spans(page):
    """Inline code of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def options(verb):
    module = importlib.import_module(f"hetmesh.cli.{verb}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return {option for action in parser._actions for option in action.option_strings}


def test_verbs_and_options_that_pages_name_exist():
    found = 0
    for page in PAGES:
        lines = [line for language, text in blocks(page) if language == "bash" for line in text.splitlines()]
        for command in [*spans(page), *lines]:
            words = re.split(r"\s+", command.partition(" #")[0].replace("python -m ", ""))
            if words[0] != "hetmesh" or len(words) < 2:
                continue
            assert words[1] in VERBS, f"{page}: {command}"
            named = {w.partition("=")[0] for w in words[2:] if w.startswith("--") and "." not in w.partition("=")[0]}
            assert named <= options(words[1]), f"{page}: {command}"
            found += 1
    assert found > 60


def test_tools_and_options_that_pages_name_exist():
    """Options by their names in the sources of the tool."""
    found = 0
    for page in PAGES:
        for command in spans(page):
            match = re.match(r"(?:python )?tools/(\w+)\.py\b(.*)", command)
            if match is None:
                continue
            tool, rest = match[1], match[2].split()
            folder = {"bench": "benchmarks", "fuzz": "fuzzing", "soak": "soaking", "gpu_check": "gpu_checks"}.get(tool)
            sources = [ROOT / "tools" / f"{tool}.py", *(ROOT / "tools" / (folder or "none")).rglob("*.py")]
            text = "".join(source.read_text(encoding="utf-8") for source in sources)
            if tool in ("bench", "fuzz", "soak") and rest and not rest[0].startswith("-") and rest[0] != "NAME":
                known = {source.stem.removeprefix("fuzz_") for source in sources} | {"launches", "pools"}
                known |= {source.parent.name for source in sources}
                assert rest[0] in known, f"{page}: {command}"
            for option in (word for word in rest if word.startswith("--") and word != "--help"):
                assert f'"{option}"' in text, f"{page}: {command}"
            found += 1
    assert found > 40


def test_tests_that_pages_name_for_a_command_exist():
    named = [path for page in PAGES for span in spans(page) for path in re.findall(r"^pytest .*?(tests/\S+)", span)]
    assert len(named) >= 2
    assert all((ROOT / path).exists() for path in named)


def test_links_between_pages_lead_somewhere():
    found = 0
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if target.startswith("http"):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path) if path else page
            assert file.is_file(), f"{page}: {target}"
            heads = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
            anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert not anchor or anchor in anchors, f"{page}: {target}"
            found += 1
    assert found > 20


def folders():
    """Those with more than three files, but for what holds no code."""
    for top in ("src/hetmesh", "tools"):
        for folder in sorted({path.parent for path in (ROOT / top).rglob("*.py")}):
            files = [p.name for p in folder.iterdir() if p.suffix in (".py", ".toml") and p.name != "__init__.py"]
            if len(files) > 3:
                yield folder, files
    machines = ROOT / "src" / "hetmesh" / "cost" / "machines"
    yield machines, [path.name for path in machines.glob("*.toml")]


def test_every_room_of_more_than_three_files_has_a_page_that_names_each_of_them():
    rooms = list(folders())
    assert len(rooms) > 30
    for folder, files in rooms:
        page = folder / "README.md"
        assert page.is_file(), folder
        text = page.read_text(encoding="utf-8")
        assert [name for name in files if not re.search(rf"(?<![\w/]){re.escape(name)}", text)] == [], page


def test_tables_of_policies_are_complete():
    page = (ROOT / "src" / "hetmesh" / "balance" / "README.md").read_text(encoding="utf-8")
    table = page.split("## Where the algorithms come from")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(BALANCERS)
    page = (ROOT / "src" / "hetmesh" / "schedule" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}" in page for name in SCHEDULES if name != "1f1b")


# What CONTRIBUTING says of additions


def test_a_model_is_added():
    """Its logits are those of the model's own forward."""
    own = {}
    exec(snippet("# src/hetmesh/models/named/mistral.py"), own)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "sliding_window": None}
    adapter = own["MistralAdapter"].make(AdapterRequest("llm", sizes, vocab_size=20))
    model = build_module(adapter, "llm", 0, torch.float64)
    ids = torch.tensor([[3, 5, 7, 11, 13]])
    meta = SimpleNamespace(tokens=5, media=(), position_ids=None, targets=((1, 5),), id="a", rows={})
    batch = adapter.collate([SimpleNamespace(id="a", tokens=ids[0], media={})], [meta])
    assert batch["targets"].tolist() == [5, 7, 11, 13]
    torch.testing.assert_close(adapter.forward(model, batch, {}), model(input_ids=ids).logits[0, :4])


def test_a_balancer_is_added(monkeypatch, capsys):
    own = {}
    exec(snippet("# src/hetmesh/balance/policies/dealt.py"), own)
    assert capsys.readouterr().out == "[[0 0]\n [0 0]\n [1 1]\n [1 1]]\n"
    monkeypatch.setattr(sys.modules["hetmesh.balance.run_balancer"], "POLICIES", {**BALANCERS, "dealt": own["dealt"]})
    rng = np.random.default_rng(0)
    for lanes, microbatches in (((2, 2), (3, 3)), ((4, 2), (2, 2)), ((1, 3), (4, 2))):
        loads = BatchLoads(("vision", "llm"), rng.integers(0, 99, (40, 2)))
        found = assign(loads, Slots(lanes, microbatches), "dealt")  # checked: each sample once, where there is a place
        assert found.policy == "dealt"


def test_a_schedule_policy_is_added(monkeypatch):
    """It is validated, and trains as the sequential one does."""
    own = {}
    exec(snippet("# src/hetmesh/schedule/gpipe.py"), own)
    monkeypatch.setitem(SCHEDULES, "gpipe", own["gpipe"])
    text = (ROOT / "recipes" / "digits_single.toml").read_text(encoding="utf-8")
    small = ("--training.local_batch_size", "8", "--parallelism.pipeline_parallel_microbatch_size", "2")
    losses = []
    for policy in ("sequential", "gpipe"):
        recipe = hetmesh.parse_recipe(text, (*small, "--parallelism.pipeline_parallel_schedule", policy))
        assert recipe.schedule == policy
        with hetmesh.open_job(recipe) as job:
            losses.append(job.forward_backward().loss)
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_transport_is_added(tmp_path, start_forked):
    path = tmp_path / "counted.py"
    path.write_text(snippet("# counted.py"))
    process = start_forked(script, str(path))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    # Two processes print: a line's end may come after the next line's text.
    assert sorted(re.findall(r"rank \d: [^r]* bytes", out)) == [
        "rank 0: [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], sent 24 bytes",
        "rank 1: [[6.0, 7.0], [8.0, 9.0], [10.0, 11.0]], sent 0 bytes",
    ]
