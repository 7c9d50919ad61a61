"""Whether a plan runs: `hetmesh check` takes it, and `hetmesh dryrun` of one rank reaches the end of a step.

The plan is written as overrides of recipes/mllm_22b_175b.toml, with `bubble_fill_in_collectives` on. The recipe has
what the simulated model leaves out: embeddings, a projector on the LLM's first stage, the head. Weights are not drawn;
the step is of full size, with all its microbatches, of a rank on which all modules lie.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.optimus import models
from benchmarks.optimus.encoder_plans import EncoderPlan

ROOT = Path(__file__).parents[3]
RECIPE = "recipes/mllm_22b_175b.toml"
LIMIT_S = 3600.0
"""Seconds for either command."""


@dataclass(frozen=True)
class Tried:
    """What became of a plan.

    Attributes:
        why_not: the last lines of the command that failed; empty where the plan runs.
        figures: JSON.
    """

    why_not: str
    figures: dict[str, Any]


def overrides(dp: int, plan: EncoderPlan, in_flight: int) -> list[str]:
    """The plan as arguments of `hetmesh`. `in_flight`: microbatches that a stage of the encoder may hold."""
    ranks = models.PP * dp * models.TP
    vision: dict[str, object] = {
        "ranks": f"0-{ranks - 1}",
        "pipeline_parallel_degree": plan.pp,
        "data_parallel_replicate_degree": ranks // (plan.pp * plan.tp),
        "tensor_parallel_degree": plan.tp,
        "enable_sequence_parallel": str(plan.tp > 1).lower(),
    }
    if plan.pp > 1:  # embeddings and the last norm count as layers
        vision["pipeline_parallel_layers_per_stage"] = models.ENCODER_LAYERS // (plan.pp * plan.virtual) + 1
    keys = {
        "parallelism.pipeline_parallel_schedule": "bubble_fill",
        "parallelism.bubble_fill_schedule": "Interleaved1F1B",
        "parallelism.bubble_fill_in_collectives": "true",
        "parallelism.bubble_fill_in_flight": in_flight,
        **{f"parallelism.vision.{key}": value for key, value in vision.items()},
        "parallelism.llm.ranks": f"0-{ranks - 1}",
        "parallelism.llm.data_parallel_replicate_degree": dp,
        "balance.microbatch_sizes.vision": plan.microbatch,
    }
    return [f"--{key}={value}" for key, value in keys.items()]


def tried(dp: int, plan: EncoderPlan, in_flight: int) -> Tried:
    """Check and dry-run the plan, in processes of their own."""
    given = overrides(dp, plan, in_flight)
    figures: dict[str, Any] = {"recipe": RECIPE, "overrides": given}
    for verb, options in (("check", []), ("dryrun", ["--rank", "0", "--json"])):
        began = time.monotonic()
        command = [sys.executable, "-m", "hetmesh", verb, RECIPE, *options, *given]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return Tried(f"hetmesh {verb}: not done after {LIMIT_S:g} s", figures)
        figures[f"{verb}_s"] = time.monotonic() - began
        if done.returncode:
            return Tried(f"hetmesh {verb}: {' '.join(done.stderr.split()[-80:])}", figures)
    ran = json.loads(done.stdout)
    (group,) = ran["groups"]
    backwards = Counter(span["label"].split()[0] for span in group["actions"] if " B" in span["label"])
    figures |= {"microbatches": group["microbatches"], "dryrun_peak_gb": ran["peak"] / 1e9}
    wanted, stages = models.BATCH // (dp * models.MICROBATCH), {"vision": plan.virtual, "llm": models.VIRTUAL}
    found = {name: [n for stage, n in backwards.items() if stage.startswith(f"{name}.")] for name in stages}
    if found != {name: [wanted] * count for name, count in stages.items()}:
        return Tried(f"hetmesh dryrun: backwards of {wanted} microbatches in {stages} stages: {found}", figures)
    return Tried("", figures)
