"""Losses of the first steps of every digits recipe, to the last bit, beside those kept before.

    python tools/bench.py losses --json --output tools/results/losses.json
    python tools/bench.py losses --against tools/results/losses.json

For changes that are to change no result: each recipe of `recipes/digits*.toml` is trained by `hetmesh train` from its
seed (digits_frozen too, whose weights come from a run of another recipe otherwise). `equal` names the recipes whose
losses and gradient norms are those of the kept output, bit for bit; `differing` the others, with the largest relative
difference of a loss and of a gradient norm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

JUDGES = ("src/hetmesh", "recipes")
"""What an output of it judges (`kept.py`)."""

ROOT = Path(__file__).parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Number of steps, recipes, and what to compare with."""
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--recipes", nargs="*", metavar="NAME", help="without .toml; default: all digits recipes")
    parser.add_argument("--against", type=Path, metavar="FILE", help="an output of this benchmark")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train each recipe, and compare."""
    names = args.recipes or sorted(path.stem for path in (ROOT / "recipes").glob("digits*.toml"))
    measured = {name: _train(name, args.steps) for name in names}
    result: dict[str, Any] = {"steps": args.steps, "recipes": measured}
    if args.against:
        before = json.loads(args.against.read_text(encoding="utf-8"))["recipes"]
        compared = {name: _difference(measured[name], before[name]) for name in names if name in before}
        result["equal"] = [name for name in compared if measured[name] == before[name]]
        result["differing"] = {name: found for name, found in compared.items() if name not in result["equal"]}
        result["not_compared"] = [name for name in names if name not in before]
    return result


def table(result: dict[str, Any]) -> str:
    """A line per recipe."""
    lines = [f"{name:24} {rows[-1]['loss']!r} at step {len(rows)}" for name, rows in result["recipes"].items()]
    if "equal" in result:
        lines.append(f"equal to the last bit: {len(result['equal'])} of {len(result['recipes'])}")
        lines += [f"differs: {name}: {found}" for name, found in result["differing"].items()]
    return "\n".join(lines)


def _train(name: str, steps: int) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hetmesh", "train", str(ROOT / "recipes" / f"{name}.toml")]
        options = {"training.steps": steps, "job.dump_folder": folder, "validation.enable": "false"}
        options |= {"checkpoint.enable": "false", "metrics.log_freq": 1, "lr_scheduler.total_steps": 800}
        options |= {"checkpoint.initial_load_path": "", "checkpoint.exclude_from_loading": "[]"}
        for key, value in options.items():
            command += [f"--{key}", str(value)]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stdout}{done.stderr}")
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [{"loss": row["loss"], "grad_norm": row["grad_norm"]} for row in rows if "loss" in row]


def _difference(now: list[dict[str, float]], before: list[dict[str, float]]) -> dict[str, float]:
    if len(now) != len(before):
        return {"steps": len(now), "steps_before": len(before)}
    pairs = list(zip(now, before, strict=True))
    return {key: max(abs(a[key] - b[key]) / max(abs(b[key]), 1e-30) for a, b in pairs) for key in ("loss", "grad_norm")}
