"""Every digits recipe through `hetmesh train` over NCCL, with the losses of gloo on the CPU."""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nccl_recipes
from gpu_checks.found import Found, Place, Skip

AT_ONCE = 3
ARGUMENTS = argparse.Namespace(steps=3, timeout=300.0, backends=("gloo", "nccl"))


def run(place: Place) -> Found:
    """What became of each."""
    if not place.on_gpu:
        raise Skip("it compares NCCL with gloo; `parity` trains layouts over gloo, and the suite all recipes")
    rows = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        paths = nccl_recipes.without_another_run()
        for row in pool.map(lambda path: nccl_recipes.compare(path, ARGUMENTS, Path(folder)), paths):
            print(f"{row['recipe']}: {row['verdict']} ({row['seconds']:.0f} s)", flush=True)
            rows.append(row)
    verdicts = {row["recipe"]: row["verdict"] for row in rows}
    figures = {
        "verdicts": verdicts,
        "worst_loss_difference": max((row["worst"] for row in rows if row["worst"] is not None), default=None),
        "unequal": sum(verdict != "equal" for verdict in verdicts.values()),
    }
    return Found(figures, {"unequal": 0, "worst_loss_difference": nccl_recipes.AGREE})
