"""Train recipes over NCCL on one GPU, all ranks on it, and compare their losses with gloo's on the CPU.

    python tools/nccl_recipes.py                                   # every recipe of digits that needs no earlier run
    python tools/nccl_recipes.py recipes/digits_cp_pp.toml --steps 3 --json

Where there are fewer GPUs than ranks these share them, and NCCL takes them for ranks of different hosts (see
gpu_checks/ranks.py). Where there is no GPU it says so and exits with 0. Losses agree where they differ by less than
1e-5 of gloo's; convolutions in TF32, torch's default on CUDA, are switched off for that.

tools/results/nccl_recipes.txt keeps what it said on one H100.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu_checks.ranks import Launched, environment, free_port
from hetmesh.recipe.recipe import load_recipe
from kept import stamp

JUDGES = (
    "src/hetmesh/layout",
    "src/hetmesh/graph",
    "src/hetmesh/schedule",
    "src/hetmesh/boundary",
    "src/hetmesh/attention",
    "src/hetmesh/parallel",
    "src/hetmesh/models",
    "src/hetmesh/runtime",
    "src/hetmesh/balance",
    "src/hetmesh/training",
    "src/hetmesh/context",
    "src/hetmesh/data",
    "recipes",
)
"""What an output of it judges (`kept.py`)."""

RECIPES = Path(__file__).parents[1] / "recipes"
AGREE = 1e-5
TRAIN = """import sys, torch
from hetmesh.cli import main
torch.backends.cudnn.allow_tf32 = False
sys.exit(main(sys.argv[1:]))
"""


def main() -> int:
    """Run all; returns 1 if any recipe failed or differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", type=Path, metavar="RECIPE", help="default: recipes/digits*.toml")
    parser.add_argument("--steps", type=int, default=3, help="steps of each run (default %(default)s)")
    parser.add_argument(
        "--at-once", type=int, default=3, help="recipes that run at the same time (default %(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds of a run (default %(default)s)")
    parser.add_argument("--backends", nargs=2, default=("gloo", "nccl"), choices=("gloo", "nccl"), help="to compare")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    args = parser.parse_args()
    if "nccl" in args.backends and not torch.cuda.is_available():
        print(json.dumps({"gpu": None}) if args.json else "no CUDA device here: nothing to run over NCCL")
        return 0
    recipes, of = args.recipes or without_another_run(), stamp(JUDGES)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.at_once) as pool:
        found = []
        for each in pool.map(lambda path: compare(path, args, Path(folder)), recipes):
            found.append(each)
            if not args.json:  # as they come: a machine may be lent for minutes
                print(f"{each['recipe']}: {each['verdict']} ({each['seconds']:.0f} s)", flush=True)
    if args.json:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        print(json.dumps({"gpu": gpu, "torch": torch.__version__, "recipes": found, "kept": of}, indent=1))
    else:
        print(f"kept: {json.dumps(of)}")  # at the end of an output that is kept
    return int(any(each["verdict"] != "equal" for each in found))


def without_another_run() -> list[Path]:
    """The recipes of digits that need no earlier run."""
    return [p for p in sorted(RECIPES.glob("digits*.toml")) if not load_recipe(p, []).checkpoint.initial_load_path]


def compare(path: Path, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both runs of one recipe, at the same time."""
    ranks, began = load_recipe(path, []).world_size, time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(train, path, ranks, backend, args, folder / f"{path.stem}-{i}")
            for i, backend in enumerate(args.backends)
        ]
        (first, why_first), (second, why_second) = (run.result() for run in runs)
    worst = max((abs(a - b) / abs(a) for a, b in zip(first, second, strict=False)), default=None)
    failed = [f"{backend}: {why}" for backend, why in zip(args.backends, (why_first, why_second), strict=True) if why]
    if len(first) != args.steps or len(second) != args.steps:
        failed.append(f"{len(first)} and {len(second)} of {args.steps} steps")
    verdict = "; ".join(failed) or ("equal" if worst is not None and worst < AGREE else f"losses differ by {worst:.1e}")
    seconds = time.monotonic() - began
    return {
        **{"recipe": path.name, "ranks": ranks, "losses": [first, second], "worst": worst, "verdict": verdict},
        "seconds": seconds,
    }


def train(
    path: Path, ranks: int, backend: str, args: argparse.Namespace, folder: Path
) -> tuple[list[float], str | None]:
    """The losses of a run, and what went wrong: the last lines of the first rank that failed."""
    command = [sys.executable, "-c", TRAIN, "train", str(path), f"--training.steps={args.steps}"]
    command += ["--validation.samples=8", "--metrics.enable_tensorboard=false", f"--job.dump_folder={folder}"]
    port, hidden = free_port(), {"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {}
    gpus = torch.cuda.device_count() if backend == "nccl" else 0
    environments = [{**environment(rank, ranks, port, gpus), **hidden} for rank in range(ranks)]
    launched = Launched(command, environments, [folder.parent / f"{folder.name}-{rank}.log" for rank in range(ranks)])
    wrong = launched.wait(args.timeout)
    metrics = next(iter(sorted(folder.glob("**/metrics.jsonl"))), None)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics else []
    losses = [line["loss"] for line in lines if "loss" in line]
    return losses, wrong


if __name__ == "__main__":
    sys.exit(main())
