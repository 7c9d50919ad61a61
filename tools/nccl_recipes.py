"""Train recipes over NCCL on one GPU, all ranks on it, and compare their losses with gloo's on the CPU.

    python tools/nccl_recipes.py                                   # every recipe of digits that needs no earlier run
    python tools/nccl_recipes.py recipes/digits_cp_pp.toml --steps 3 --json

NCCL refuses two ranks on one GPU unless it takes them for ranks of different hosts: each gets a NCCL_HOSTID of its own,
and messages go through sockets of the loopback interface. That shows hangs, wrong orders and wrong sums as several
machines would; it says nothing about speed. Where there is no GPU it says so and exits with 0. Losses agree where they
differ by less than 1e-5 of gloo's; convolutions in TF32, torch's default on CUDA, are switched off for that.

tools/results/nccl_recipes.txt keeps what it said on one H100.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hetmesh.recipe.recipe import load_recipe

RECIPES = Path(__file__).parents[1] / "recipes"
AGREE = 1e-5
TRAIN = """import sys, torch
from hetmesh.cli import main
torch.backends.cudnn.allow_tf32 = False
sys.exit(main(sys.argv[1:]))
"""
OF_ANOTHER_HOST = {
    **{"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    **{"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"},
}


def main() -> int:
    """Run all; returns 1 if any recipe failed or differs."""
    import torch

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
    recipes = args.recipes or [p for p in sorted(RECIPES.glob("digits*.toml")) if not _needs_another_run(p)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.at_once) as pool:
        found = []
        for each in pool.map(lambda path: compare(path, args, Path(folder)), recipes):
            found.append(each)
            if not args.json:  # as they come: a machine may be lent for minutes
                print(f"{each['recipe']}: {each['verdict']} ({each['seconds']:.0f} s)", flush=True)
    if args.json:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        print(json.dumps({"gpu": gpu, "torch": torch.__version__, "recipes": found}, indent=1))
    return int(any(each["verdict"] != "equal" for each in found))


def _needs_another_run(path: Path) -> bool:
    return bool(load_recipe(path, []).checkpoint.initial_load_path)


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
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-c", TRAIN, "train", str(path), f"--training.steps={args.steps}"]
    command += ["--validation.samples=8", "--metrics.enable_tensorboard=false", f"--job.dump_folder={folder}"]
    started, running = time.monotonic(), []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
        env = os.environ | OF_ANOTHER_HOST | {key: str(value) for key, value in place.items()}
        env |= {"MASTER_ADDR": "127.0.0.1", "NCCL_HOSTID": f"rank{rank}"}
        if backend == "gloo":
            env["CUDA_VISIBLE_DEVICES"] = ""
        folder.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f"{folder.name}-{rank}.log").open("w") as log:
            running.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        while any(p.poll() is None for p in running) and time.monotonic() - started < args.timeout:
            if any(p.returncode for p in running):
                break
            time.sleep(0.2)
        broken = next((rank for rank, p in enumerate(running) if p.poll() not in (None, 0)), None)
    finally:
        for process in running:
            process.kill()
            process.wait()
    metrics = next(iter(sorted(folder.glob("**/metrics.jsonl"))), None)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics else []
    losses = [line["loss"] for line in lines if "loss" in line]
    if broken is not None:
        told = (folder.parent / f"{folder.name}-{broken}.log").read_text().strip().splitlines()[-6:]
        return losses, f"rank {broken} ended with {running[broken].returncode}: {' | '.join(told)}"
    return losses, f"not done after {args.timeout:g} s" if any(p.returncode < 0 for p in running) else None


if __name__ == "__main__":
    sys.exit(main())
