"""Encoder work in the LLM's bubbles: ViT-22B + GPT-175B on 1,536 to 3,072 GPUs, simulated, beside published seconds.

Three cells of the strong scaling of Optimus (arXiv 2408.03505): batch 1536, microbatch 2, sequence 2048, TP 8, PP 8.

*balanced*: one chain of ViT and GPT blocks, cut into 96 virtual stages by dynamic programming over FLOPs
(`hetmesh.cost.stage_cuts`, ties `even`), interleaved 1F1B. *megatron*: all ViT blocks in the first of 8 stages, 1F1B;
literally beside 12 GPT blocks, and rebalanced. *bubble_fill*: the LLM in 96 virtual stages, the ViT with a plan of its
own on the same ranks, on which its stages may take turns, of all plans that fit the fastest; with encoder kernels in
the LLM's TP collectives (`bubble_fill_in_collectives`), without, and placed coarsely. Recomputation everywhere. One
replica is simulated, all are equal.

*What counts* (`share_of_saving`) runs: the plan is simulated as a run has it, with what is begun in a collective over
at its place and no more microbatches in flight than the cap; `hetmesh check` takes it with the key on, and `hetmesh
dryrun` of rank 0, at full size and on the fake device, reaches the end of a step (`runs.py`). A plan of which that is
not so is named (`does_not_run`), and the next best is taken, three times at most. No GPU has run any of them: seconds
are the simulator's, and the dry run takes no time. Three things differ. The recipe has embeddings, a projector and a
head, which the simulated model leaves out. So plans fit into 80 GB by the simulator (`peak_gb`), while the dry run,
with these and the estimate for communicators, may come to more (`dryrun_peak_gb`). And on GPUs nobody waits at the
places of actions, but for rows, while the host hands encoder actions over one of the LLM's microbatches ahead, which no
simulation knows.

*bound* (`bound_s`, `speedup_reachable`): what no order of any plan that fits is below (`bound.py`), in which LLM and
machine stay as they are. The LLM waits for its first rows, which is the encoder's forward through all its layers, and
takes its first eight microbatches faster than a pipeline of one stage per rank makes them; the sums of the encoder's
gradients follow the LLM's. `over_bound` is how far the found order is from it. With 16 microbatches, 0.08 of the 0.09 s
by which the step is longer than the LLM and those sums are these rows, 0.006 s the encoder's share of the optimizer:
backwards are all hidden, those behind the LLM's last one beside the sums of its gradients. So `hidden_share_16` cannot
be 0.95: `hidden_share_16_reachable` is the most over all plans, of which the plan with the most hidden is not the
fastest one.

With fewer samples in flight than the LLM's own order needs (64 are allowed: activations of 32 microbatches are 5 GB on
a rank) an encoder that is a pipeline, too, stalls it. zero_bubble has one stage per rank, and with that few turns its
own bubbles are larger than what it hides. All blocks have sequence parallelism. Between stages of the LLM and of the
baseline ranks send their share of the tokens, and between those of the encoder all tokens, as a run does.

`share_of_bound`, the LLM's own step over the filled one, is `share_of_bound_unfilled` for the balanced chain, which
hides nothing. `share_of_saving` is the share of the seconds between the balanced step and the LLM's own that filling
saves, by number of GPUs: with encoder kernels in TP collectives, and without.
`drift_worst` compares with 1f1b without filling, which takes twice as long: `drift_worst_over_rivals` is the worst of
one batch over the best of three_phase, the coarse placement and an order of that batch's own.

Nothing but the balanced baseline's three seconds was used to choose a constant. What is hidden is the share of the
encoder's seconds that does not lengthen the step beyond the LLM alone and the sum of the encoder's gradients.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.optimus import models
from benchmarks.optimus.bound import Bound, llm_alone
from benchmarks.optimus.drift import drift
from benchmarks.optimus.encoder_plans import EncoderPlan
from benchmarks.optimus.filled import Filled, best, bounds, fill, in_flight, plans
from benchmarks.optimus.layouts import balanced_counts, chain_seconds, megatron_counts
from benchmarks.optimus.runs import tried

JUDGES = (
    "src/hetmesh/cost",
    "src/hetmesh/schedule",
    "src/hetmesh/simulate",
    "src/hetmesh/planner/candidates.py",
    "src/hetmesh/simulate/fill_bubbles.py",
    "src/hetmesh/planner/predict.py",
    "src/hetmesh/resolve/refusals.py",
    "src/hetmesh/resolve/schedules.py",
    "src/hetmesh/dryrun/dry_run.py",
    "recipes/mllm_22b_175b.toml",
)
"""What an output of it judges (`kept.py`)."""

TIES = ("even", "early", "late")
MOST_REFUSED = 3  # plans that do not run, until none counts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--batches", type=int, default=8, help="batches of the drifting law (default %(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All cells."""
    began = time.process_time()
    with ProcessPoolExecutor(len(models.PUBLISHED), multiprocessing.get_context("spawn")) as pool:
        cells = pool.map(_cell, models.PUBLISHED, models.PUBLISHED.values())
        drifted = drift(args.batches)
        rows = list(cells)
    speedups = {str(row["gpus"]): row["speedup_over_balanced"] for row in rows}
    last = rows[-1]
    return {
        "balanced_worst_error": max(abs(row["balanced_error"]) for row in rows),
        "speedup_over_balanced": speedups,
        "speedup_without_tp_gaps": {str(row["gpus"]): row["speedup_without_tp_gaps"] for row in rows},
        "speedup_bound": min(row["speedup_bound"] for row in rows),
        "share_of_bound": min(row["share_of_bound"] for row in rows),
        **_shares(rows),
        "speedup_reachable": {str(row["gpus"]): row["speedup_reachable"] for row in rows},
        "over_bound": max(row["over_bound"] for row in rows),
        "hidden_share_16": last["hidden_share"],
        "hidden_share_16_reachable": last["hidden_share_reachable"],
        "over_llm_and_traffic": max(row["over_llm_and_traffic"] for row in rows),
        "coarse_grows": rows[0]["coarse_share"] < last["coarse_share"]
        and rows[0]["coarse_speedup"] < last["coarse_speedup"],
        "ordered": all(row["ordered"] for row in rows),
        "drift_worst": drifted["worst"],
        "drift_worst_over_rivals": drifted["worst_over_rivals"],
        "drift": drifted,
        "constants": {
            "machine": "h100",
            **models.DATA_SHEET,
            **models.CALIBRATION,
            "ties": TIES[0],
            "others": models.OTHERS,
        },
        "cpu_seconds": time.process_time() - began + sum(row["cpu_seconds"] for row in rows),
        "rows": rows,
    }


def _shares(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What filling saves, of all that hiding the whole encoder would; and what `share_of_bound` is without filling."""

    def saved(row: dict[str, Any], seconds: str) -> float:
        return (row["balanced_s"] - row[seconds]) / (row["balanced_s"] - row["llm_only_s"])

    return {
        "share_of_saving": {str(row["gpus"]): saved(row, "bubble_fill_s") for row in rows if row["run"]},
        "share_of_saving_without_tp_gaps": {str(row["gpus"]): saved(row, "without_tp_gaps_s") for row in rows},
        "share_of_bound_unfilled": min(row["llm_only_s"] / row["balanced_s"] for row in rows),
    }


def _cell(gpus: int, published: dict[str, Any]) -> dict[str, Any]:
    dp, constants = published["dp"], models.CALIBRATION
    balanced = {ties: chain_seconds("mllm", dp, balanced_counts(ties), constants) for ties in TIES}
    began = time.process_time()
    llm = llm_alone(dp, constants).seconds
    searching = time.process_time()
    filled = best(dp, constants, gaps=True)
    searched = time.process_time() - searching
    refused: dict[EncoderPlan, str] = {}
    while (run := tried(dp, filled.plan, in_flight(filled.plan))).why_not and len(refused) < MOST_REFUSED:
        refused[filled.plan] = run.why_not
        filled = best(dp, constants, gaps=True, without=refused)
    plain = best(dp, constants, gaps=False)
    each = [bound for _, bound in bounds(dp, constants)]
    coarse = fill(dp, filled.plan, constants, gaps=False, refine=False)
    split = fill(dp, filled.plan, constants, gaps=True, inner="zero_bubble")
    assert coarse is not None
    reference = balanced[TIES[0]]
    megatron = {name: chain_seconds("mllm", dp, counts, constants) for name, counts in megatron_counts()}
    ranges = [reference / filled.seconds, *(balanced[ties] / filled.seconds for ties in TIES[1:])]
    others = {name: _speedup(dp, other, filled) for name, other in models.OTHERS.items()}
    return {
        "gpus": gpus,
        "microbatches": models.BATCH // (dp * models.MICROBATCH),
        "published": {key: value for key, value in published.items() if key != "dp"},
        "published_speedup": published["balanced_s"] / published["optimus_s"],
        "balanced_s": reference,
        "balanced_error": reference / published["balanced_s"] - 1,
        "balanced_by_ties": balanced,
        "megatron_s": megatron,
        "llm_only_s": llm,
        "encoder_traffic_s": filled.traffic,
        "encoder_work_s": filled.work,
        "bubble_fill_s": filled.seconds,
        "plan": _named(filled.plan),
        "run": None if run.why_not else run.figures,
        "does_not_run": {_named(plan): why for plan, why in refused.items()},
        "plans": len(plans(dp)),
        "plans_that_fit": len(each),
        "bound_s": each[0].seconds,
        "over_bound": filled.seconds / each[0].seconds - 1,
        "search_s": searched,
        "speedup_over_balanced": reference / filled.seconds,
        "speedup_over_megatron": megatron["rebalanced"] / filled.seconds,
        "speedup_range": [min(*ranges, *others.values()), max(*ranges, *others.values())],
        "speedup_by_calibration": others,
        "speedup_bound": reference / llm,
        "speedup_reachable": reference / each[0].seconds,
        "share_of_bound": llm / filled.seconds,
        "over_llm_and_traffic": filled.seconds / (llm + filled.traffic) - 1,
        "hidden_share": _hidden(filled, llm),
        "hidden_share_reachable": max(_hidden(bound, llm) for bound in each),
        "in_tp_gaps_s": filled.hidden,
        "held_samples": filled.held,
        "peak_gb": filled.peak / 1e9,
        "without_tp_gaps_s": plain.seconds,
        "without_tp_gaps_plan": _named(plain.plan),
        "speedup_without_tp_gaps": reference / plain.seconds,
        "hidden_share_without_tp_gaps": _hidden(plain, llm),
        "coarse_s": coarse.seconds,
        "coarse_share": _hidden(coarse, llm),
        "coarse_speedup": reference / coarse.seconds,
        "zero_bubble_fill_s": split.seconds if split else None,
        "zero_bubble_speedup": reference / split.seconds if split else None,
        "ordered": min(megatron.values()) >= reference > filled.seconds,
        "cpu_seconds": time.process_time() - began,
    }


def _speedup(dp: int, constants: dict[str, float], found: Filled) -> float:
    """Of the same plan under another calibration."""
    other = fill(dp, found.plan, constants, gaps=True)
    assert other is not None
    return chain_seconds("mllm", dp, balanced_counts("even"), constants) / other.seconds


def _hidden(filled: Filled | Bound, llm: float) -> float:
    return 1 - max(filled.seconds - llm - filled.traffic, 0.0) / filled.work


def _named(plan: EncoderPlan) -> str:
    turns = f", {plan.virtual} stages per rank" if plan.virtual > 1 else ""
    return f"PP {plan.pp} x TP {plan.tp}, {plan.lanes} pipelines per replica, microbatches of {plan.microbatch}{turns}"


def table(result: dict[str, Any]) -> str:
    """The cells as lines."""
    lines = [f"{'GPUs':>5}{'':>4}{'megatron':>17}{'balanced':>14}{'LLM':>8}{'filled':>8}{'no gaps':>9}{'coarse':>8}"]
    for row in result["rows"]:
        published, megatron = row["published"], row["megatron_s"]
        lines.append(
            f"{row['gpus']:>5}{'':>4}{megatron['literal']:>9.2f}{megatron['rebalanced']:>8.2f}"
            f"{row['balanced_s']:>8.2f} {row['balanced_error']:>+4.1%}{row['llm_only_s']:>8.2f}"
            f"{row['bubble_fill_s']:>8.2f}{row['without_tp_gaps_s']:>9.2f}{row['coarse_s']:>8.2f} s"
        )
        lines.append(
            f"{'published':>18}{published['megatron_s']:>8.2f}{published['balanced_s']:>8.2f}{'':>14}"
            f"{published['optimus_s']:>8.2f} s"
        )
        low, high = row["speedup_range"]
        lines.append(
            f"      over balanced {row['speedup_over_balanced']:.3f} ({low:.3f} to {high:.3f} over ties and "
            f"calibrations), published {row['published_speedup']:.3f}, LLM alone {row['speedup_bound']:.3f}, "
            f"any plan and order {row['speedup_reachable']:.3f} ({row['over_bound']:+.2%} over that bound); "
            f"without TP gaps {row['speedup_without_tp_gaps']:.3f}, coarse {row['coarse_speedup']:.3f}; "
            f"hidden {row['hidden_share']:.0%}, {row['hidden_share_without_tp_gaps']:.0%}, {row['coarse_share']:.0%} "
            f"(at most {row['hidden_share_reachable']:.0%}); "
            f"{row['over_llm_and_traffic']:+.1%} over LLM and gradient sums"
        )
        lines.append(f"      {row['plan']}, {row['peak_gb']:.0f} GB; search {row['search_s']:.0f} s")
        told = "runs: check, and dryrun of {microbatches} microbatches ({dryrun_s:.0f} s, {dryrun_peak_gb:.0f} GB)"
        lines.append(f"      {told.format(**row['run']) if row.get('run') else 'not shown to run, and not counted'}")
        lines += [f"      does not run: {plan}: {why}" for plan, why in row.get("does_not_run", {}).items()]
    stale = {key.removeprefix("over_"): max(each) for key, each in result["drift"].items() if key.startswith("over_")}
    lines.append("drift, worst step over " + ", ".join(f"{key}: {value:.3f}" for key, value in stale.items()))
    lines.append(f"constants: {result['constants']}")
    return "\n".join(lines)
