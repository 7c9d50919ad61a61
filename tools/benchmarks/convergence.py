"""Digits on several layouts against one process: the same losses, and the same accuracy in the end.

Trains recipes/digits_single.toml and the disjoint, colocated and overlapping ones with `hetmesh train`, in fp32 with
AdamW as the recipes say, and compares the losses of the first 100 steps and the final accuracy over all held-out
questions. The published system reports a largest loss difference of 0.034-0.057 in fp32 (arXiv 2605.27678).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

JUDGES = (
    "src/hetmesh/layout",
    "src/hetmesh/boundary",
    "src/hetmesh/parallel",
    "src/hetmesh/models",
    "src/hetmesh/data",
    "src/hetmesh/balance",
    "src/hetmesh/schedule",
    "src/hetmesh/runtime",
    "src/hetmesh/training/step.py",
    "src/hetmesh/training/trainer.py",
    "src/hetmesh/training/loss.py",
    "src/hetmesh/training/gradients.py",
    "src/hetmesh/training/optimizers.py",
    "recipes/digits.toml",
    "recipes/digits_single.toml",
    "recipes/digits_colocated.toml",
    "recipes/digits_overlapping.toml",
)
"""What an output of it judges (`kept.py`)."""

ROOT = Path(__file__).parents[2]
REFERENCE = "digits_single"
LAYOUTS = ("digits", "digits_colocated", "digits_overlapping")
COMPARED = 100  # steps whose losses are compared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--steps", type=int, help="training steps (default: the recipes' own, to the end)")
    parser.add_argument("--folder", type=Path, help="keep the runs there (default: a temporary folder)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train all layouts, one after the other."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        runs = {name: train(name, folder / name, args.steps) for name in (REFERENCE, *LAYOUTS)}
    truth = runs[REFERENCE]
    for each in runs.values():
        pairs = zip(truth["losses"][:COMPARED], each["losses"][:COMPARED], strict=True)
        each["loss_difference"] = max(abs(a - b) for a, b in pairs)
        each["accuracy_difference"] = abs(each["answer_accuracy"] - truth["answer_accuracy"])
    for each in runs.values():
        del each["losses"]
    return {
        "max_loss_difference": max(runs[name]["loss_difference"] for name in LAYOUTS),
        "max_accuracy_difference": max(runs[name]["accuracy_difference"] for name in LAYOUTS),
        "compared_steps": COMPARED if args.steps is None else min(COMPARED, args.steps),
        "runs": runs,
    }


def train(name: str, folder: Path, steps: int | None, *keys: str) -> dict[str, Any]:
    """Train a recipe, with `keys` on the command line, and say what its losses and answers were."""
    command = [sys.executable, "-m", "hetmesh", "train", str(ROOT / "recipes" / f"{name}.toml")]
    command += [f"--job.dump_folder={folder}", "--validation.freq=0", "--validation.samples=384"]
    command += [*([f"--training.steps={steps}"] if steps else []), *keys]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.getenv("PYTHONPATH")]))
    }
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"hetmesh train {name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "losses": [line["loss"] for line in map(json.loads, lines) if "loss" in line],
        "answer_accuracy": summary["answer_accuracy"],
        "answer_accuracy_by_kind": summary["answer_accuracy_by_kind"],
        "questions": summary["questions"],
        "steps": summary["steps"],
        "train_seconds": summary["train_seconds"],
        "seconds": round(time.perf_counter() - started, 1),
    }


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{'recipe':<20} {'steps':>5} {'accuracy':>8} {'difference':>10} {'loss difference':>15}"]
    lines += [
        f"{name:<20} {r['steps']:>5} {r['answer_accuracy']:>8.4f} {r['accuracy_difference']:>10.4f} "
        f"{r['loss_difference']:>15.2e}"
        for name, r in result["runs"].items()
    ]
    return "\n".join(lines)
