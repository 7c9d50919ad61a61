"""Digits read and drawn by recipes/digits_draw.toml: accuracies of three seeds, and losses of two layouts.

Trains the recipe with `hetmesh train` for each seed. Of held-out questions it counts the right answers; held-out
requests for a digit ("draw a seven") are drawn, and judged by the nearest of the held-out real digits, which training
never sees; how well that judge reads the real digits of the train split is measured, too. Then the first 100 steps of
the first seed again in another layout: each loss of each step is compared, in fp32 with AdamW.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import convergence
from hetmesh.data.digits import data_set, images_of, read_by_judge

RECIPE = "digits_draw"
JUDGES = (*(path for path in convergence.JUDGES if path.startswith("src")), f"recipes/{RECIPE}.toml")
"""What an output of it judges (`kept.py`)."""

COMPARED = 100  # steps whose losses are compared
OTHER_LAYOUT = (
    *("--training.local_batch_size=32", "--parallelism.llm.tensor_parallel_degree=1"),
    *("--parallelism.llm.data_parallel_replicate_degree=2", "--parallelism.drawer.ranks=[1, 2]"),
    *("--parallelism.drawer.data_parallel_replicate_degree=1", "--parallelism.drawer.tensor_parallel_degree=2"),
)
"""LLM data parallel 2 on ranks 0-1, the decoder tensor parallel 2 on ranks 1-2: they overlap."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, help="keep the runs there (default: a temporary folder)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train all, one after the other."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        runs = {f"seed {seed}": _train(folder / f"seed-{seed}", f"--debug.seed={seed}") for seed in args.seeds}
        steps = next(iter(runs.values()))["steps"]
        short = (f"--debug.seed={args.seeds[0]}", f"--training.steps={COMPARED}", f"--lr_scheduler.total_steps={steps}")
        other = _train(folder / "other-layout", *short, *OTHER_LAYOUT)
    first = next(iter(runs.values()))
    pairs = list(zip(first["losses"][:COMPARED], other["losses"], strict=True))
    difference = {name: max(abs(a[name] - b[name]) for a, b in pairs) for name in ("total", "llm", "drawer")}
    for each in runs.values():
        del each["losses"]
    return {
        "min_drawn_accuracy": min(each["drawn_accuracy"] for each in runs.values()),
        "min_answer_accuracy": min(each["answer_accuracy"] for each in runs.values()),
        "judge_accuracy": judge_accuracy(),
        "max_loss_difference": max(difference.values()),
        "loss_difference": difference,
        "runs": runs,
    }


def judge_accuracy() -> float:
    """Of the judge, on the real digits of the train split, of which it has seen none."""
    images, labels = data_set()
    unseen = list(images_of("train"))
    read = [read_by_judge(images[i : i + 1] / 8 - 1)[0] for i in unseen]
    return float((np.array(read) == labels[unseen]).mean())


def _train(folder: Path, *keys: str) -> dict[str, Any]:
    result = convergence.train(RECIPE, folder, None, *keys, "--checkpoint.interval=1000000")
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    result["losses"] = [{"total": line["loss"], **line["losses"]} for line in records if "losses" in line]
    summary = json.loads((folder / "summary.json").read_text())
    return result | {key: summary[key] for key in ("drawn_accuracy", "drawn")}


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{'run':<8} {'steps':>5} {'answers':>8} {'of':>4} {'drawings':>8} {'of':>4} {'seconds':>8}"]
    lines += [
        f"{name:<8} {r['steps']:>5} {r['answer_accuracy']:>8.4f} {r['questions']:>4} {r['drawn_accuracy']:>8.4f} "
        f"{r['drawn']:>4} {r['seconds']:>8.0f}"
        for name, r in result["runs"].items()
    ]
    lines.append(f"the judge reads {result['judge_accuracy']:.4f} of the real digits that it has not seen")
    lines.append(f"largest difference of a loss in {COMPARED} steps: {result['loss_difference']}")
    return "\n".join(lines)
