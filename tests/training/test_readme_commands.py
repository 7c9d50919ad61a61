"""Commands of the pages as they stand, with fewer steps; `exhaustive`: with all the processes that they say."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from hetmesh.cli import main
from support.tiny_directory import save_directory

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")]

ROOT = Path(__file__).parents[2]
ROOMS = ROOT / "src" / "hetmesh"
PAGES = [ROOT / "README.md", *(ROOMS / room / "README.md" for room in ("cli", "planner", "models/split"))]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
SHORT = ("--training.steps", "1", "--training.local_batch_size", "8", "--validation.samples", "4")
SHORT += ("--validation.free_running", "0", "--metrics.enable_tensorboard", "false")
# One rank for each of the two modules.
TWO_RANKS = (
    *("--parallelism.vision.ranks", "0", "--parallelism.vision.data_parallel_replicate_degree", "1"),
    *("--parallelism.llm.ranks", "1", "--parallelism.llm.tensor_parallel_degree", "1"),
)
SRUN = """#!{python}
import os, subprocess, sys
options, rest = {{}}, sys.argv[1:]
while rest[0].startswith("--"):
    key, value, *rest = rest
    options[key] = int(value)
nodes, tasks, each = (options[key] for key in ("--nodes", "--ntasks", "--ntasks-per-node"))
assert tasks == nodes * each
started = []
for rank in range(tasks):
    own = dict(
        SLURM_JOB_ID=os.environ["JOB"], SLURM_STEP_ID=0, SLURM_NTASKS=tasks, SLURM_STEP_NUM_TASKS=tasks,
        SLURM_STEP_NUM_NODES=nodes, SLURM_STEP_NODELIST="localhost", SLURM_STEP_TASKS_PER_NODE=f"{{each}}(x{{nodes}})",
        SLURM_NODEID=rank // each, SLURM_PROCID=rank, SLURM_LOCALID=rank % each,
    )
    started.append(subprocess.Popen(rest, env={{**os.environ, **{{k: str(v) for k, v in own.items()}}}}))
sys.exit(max(process.wait() for process in started))
"""
"""As Slurm starts tasks, both nodes being this machine."""


def commands(beginning):
    """The lines of the block that begins so, without comments."""
    fenced = re.findall(r"^```bash\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    (block,) = [text for text in fenced if text.startswith(beginning)]
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def in_parts(text):
    """The commands of a line with `&&`."""
    words, parts = commands(text)[0], [[]]
    for word in words:
        parts.append([]) if word == "&&" else parts[-1].append(word)
    return parts


def test_train_then_ask_then_export(start_training, tmp_path, monkeypatch, capsys):
    install, train = in_parts("pip install . ")
    assert install == ["pip", "install", "."]
    assert train[:2] == ["hetmesh", "train"]
    run = start_training(*train[2:], *SHORT, "--job.dump_folder", str(tmp_path / "outputs" / "digits"))
    out, err = run.communicate(timeout=240)
    assert run.returncode == 0, err
    assert "4 ranks, 1 steps of 8 samples" in out
    monkeypatch.chdir(tmp_path)
    digit = Image.new("L", (8, 8), 255)
    digit.paste(0, (3, 1, 5, 7))  # a one
    digit.save("my_digit.png")
    ask, read, export = commands("hetmesh generate outputs/digits --sample 0")
    for command in (ask, read):
        assert command[0] == "hetmesh"
        assert main([*command[1:], "--max-new-tokens", "2"]) == 0
        assert capsys.readouterr().out
    assert main(export[1:]) == 0
    assert json.loads((tmp_path / "digits_hf" / "config.json").read_text())["model_type"] == "llava"


def ended(processes, folder, ranks):
    """Each without an error, as one job of so many ranks."""
    said = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said
    assert sum(out.count(f"{ranks} ranks, 1 steps of 8 samples") for out, _ in said) == 1
    assert [path.name for path in folder.iterdir()] == ["run"]
    assert json.loads((folder / "run" / "summary.json").read_text())["ranks"] == ranks


def start(command, folder, **environment):
    """In the repository, with this Python first in the path; as few steps as can be."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.Popen(
        [*command, *SHORT, "--job.dump_folder", str(folder / "run")],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def with_changes(command, changes):
    """`command` with other values behind some of its options."""
    for option, value in changes.items():
        command[command.index(option) + 1] = value
    return command


@pytest.mark.parametrize(
    ("nodes", "whole"),
    [pytest.param(n, whole, marks=pytest.mark.exhaustive) for n, whole in ((2, False), (1, True), (2, True))],
    ids=["two nodes, a rank each", "one node", "two nodes"],
)
def test_torchrun(tmp_path, nodes, whole):
    (command,) = commands("torchrun --nnodes 2" if nodes == 2 else "torchrun --nproc")
    command[:1] = [sys.executable, "-m", "torch.distributed.run"]
    if nodes == 2:
        command = with_changes(command, {"--rdzv-endpoint": f"localhost:{free_port()}"})
    if not whole:
        command = [*with_changes(command, {"--nproc-per-node": "1"}), *TWO_RANKS]
    ended([start(command, tmp_path) for _ in range(nodes)], tmp_path, 4 if whole else 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("whole", [False, True], ids=["two", "four"])
def test_srun(tmp_path, whole):
    (command,) = commands("srun")
    assert command[0] == "srun"
    shim = tmp_path / "bin" / "srun"
    shim.parent.mkdir()
    shim.write_text(SRUN.format(python=sys.executable))
    shim.chmod(0o755)
    if not whole:
        command = [*with_changes(command, {"--ntasks": "2", "--ntasks-per-node": "1"}), *TWO_RANKS]
    folder = tmp_path / "outputs"
    folder.mkdir()
    command[0] = str(shim)
    ended([start(command, folder, JOB=str(os.getpid()))], folder, 4 if whole else 2)  # the port follows from the job


def planned(lines, folder):
    """What the commands return, of a model with few layers on two ranks."""
    os.chdir(folder)
    small = ("--modules.llm.config.num_hidden_layers", "2", "--modules.vision.config.num_hidden_layers", "1")
    small += ("--training.global_batch_size", "4", "--training.local_batch_size", "1", "--training.steps", "40")
    plan, *others = lines
    return [main([*with_changes(plan, {"--ranks": "2"})[1:], *small]), *(main(each[1:]) for each in others)]


@pytest.mark.exhaustive  # tests/cli and tests/planner have the commands
def test_plan_then_look_at_the_plan(apart, tmp_path):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    lines = commands("hetmesh plan")
    assert apart(planned, lines, str(tmp_path)) == [0] * len(lines) == [0, 0, 0]
    assert "num_hidden_layers = 2" in (tmp_path / "planned.toml").read_text()


def test_the_heart_of_a_recipe_of_a_directory(tmp_path, capsys, monkeypatch):
    save_directory("qwen3_vl", tmp_path)
    (toml,) = [text for text in re.findall(r"^```toml\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE) if "hf_path" in text]
    recipe = tmp_path / "recipe.toml"
    turns = [{"from": "human", "value": "what is this"}, {"from": "gpt", "value": "a cat"}]
    (tmp_path / "train.json").write_text(json.dumps([{"id": str(i), "conversations": turns} for i in range(4)]))
    data = '[data.options]\npath = "train.json"\n[training]\nlocal_batch_size = 2\n'
    recipe.write_text(toml.replace("/models/llava-1.5-7b-hf", str(tmp_path / "qwen3_vl")) + data)
    monkeypatch.chdir(tmp_path)
    assert main(["check", str(recipe)]) == 0
    assert "tp 2" in capsys.readouterr().out
