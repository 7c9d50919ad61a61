"""Experts on different ranks: bytes against a bound, a step against replicated experts, and loads under skewed routing.

`bytes_over_bound`: bytes that ranks sent to other ranks in the mixture-of-experts blocks of some steps, counted at the
buffers of the all-to-alls, over a bound that follows from routing alone: each token goes once to each other rank that
holds one of its experts, as its features, its routing weights and the numbers of its experts (2 bytes each); a sum of
its features comes back; backward the gradients of both take the same ways. It is the worst rank of the worst layout,
`min_bytes_over_bound` the other end, and `bytes_over_features` what weights and numbers add: over a bound of features
alone, at `--features`. Sizes, which are exchanged once per block and microbatch, are `size_bytes`. Activation
checkpointing is off: what is computed again is sent again.

`step_time_ratio`: a step of EP 2 over a step with all experts on both ranks, where it sums their gradients and updates
each twice; optimizer included. All else is equal. Both take turns, step by step, in the same two processes; the ratio
of a round is that of the medians of its steps, of the slower rank each, and this is the median of the rounds.
`step_cpu_ratio` is the same of CPU seconds of both ranks, to which neither waits nor other processes add.

`skew_load_before`, `skew_load_after`: tokens of the fullest rank over those of the mean one, with experts in their own
order and where `place_experts` puts them by what it counted in one batch; the worst of some later batches, which it
has not seen, of several draws, and of all numbers of experts and ranks in `SIZES`. Of every batch the k-th expert gets
a share like 1/k, in shuffled order. No placement evens out an expert that is more than a rank's share by itself:
`least` is the load of the most popular one with as many of the least popular as fit beside it, and `out_of_reach` are
sizes at which that is more than `REACHABLE`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hetmesh.balance.place_experts import place_experts
from hetmesh.boundary import World
from hetmesh.boundary.backend import Backend
from hetmesh.boundary.watchdog import Handle
from hetmesh.recipe.recipe import Recipe, load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.pool import WorkerPool
from hetmesh.training.job import Job
from hetmesh.training.trainer import Trainer

JUDGES = ("src/hetmesh/parallel/experts", "src/hetmesh/balance/place_experts.py", "src/hetmesh/boundary")
"""What an output of it judges (`kept.py`)."""

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_moe.toml"
WARM_UP = 2  # steps of each
STEPS = 2  # whose bytes are counted
REACHABLE = 1.1
FP32, NUMBER = 4, 2  # bytes of a feature or routing weight, and of an expert's number

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "EP 2, encoder on other ranks": {},
    "EP 4, encoder on the same": {"ranks": "0-3", "data_parallel_replicate_degree": 4, "expert_parallel_degree": 4},
    "EP 2 of FSDP 4": {"ranks": "0-3", "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": 4},
    "EP 2, TP 2": {"ranks": "0-3", "tensor_parallel_degree": 2},
    "EP 2, CP 2": {"ranks": "0-3", "context_parallel_degree": 2},
    "EP 2, PP 2": {"ranks": "0-3", "pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2},
}
"""What they change in the LLM's table of recipes/digits_moe.toml."""

SIZES = ((8, 2), (16, 2), (64, 2), (64, 4), (128, 2), (128, 4), (256, 4), (32, 4), (128, 8))
"""Experts and ranks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--rounds", type=int, default=5, help="of steps in turns (default %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="of each in a round (default %(default)s)")
    parser.add_argument("--features", type=int, default=512, help="of the LLM (default %(default)s)")
    parser.add_argument("--inner", type=int, default=512, help="features inside an expert (default %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="samples per rank and step (default %(default)s)")
    parser.add_argument("--draws", type=int, default=20, help="of skewed routing per size (default %(default)s)")
    parser.add_argument("--choices", type=int, default=65536, help="of all tokens of a batch (default %(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Count, time, draw."""
    layouts = {name: _bytes(name, args.features) for name in LAYOUTS}
    sizes = [_skew(experts, ranks, args.draws, args.choices) for experts, ranks in SIZES]
    within = [size for size in sizes if size["least"] <= REACHABLE]
    return {
        "bytes_over_bound": max(each["over_bound"][1] for each in layouts.values()),
        "min_bytes_over_bound": min(each["over_bound"][0] for each in layouts.values()),
        "bytes_over_features": max(each["over_features"] for each in layouts.values()),
        **_step_times(args),
        "skew_load_before": max(size["before"] for size in within),
        "skew_load_after": max(size["after"] for size in within),
        **_of_all_sizes(sizes),
        "layouts": layouts,
        "skew": within,
        "out_of_reach": [size for size in sizes if size not in within],
    }


def _of_all_sizes(sizes: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Those too that no placement makes even, since each rank holds equally many experts."""
    return {
        "skew_load_after_all": max(size["after"] for size in sizes),
        "skew_least_all": max(size["least"] for size in sizes),
        "skew_after_over_least": max(size["after"] / size["least"] for size in sizes),
    }


# --- Bytes ---


@dataclass(frozen=True)
class Counting(Backend):
    """Gloo, which counts what its all-to-alls send to other ranks.

    Attributes:
        sent: bytes, by group and whether they are integers.
    """

    sent: Counter[tuple[dist.ProcessGroup, bool]] = field(default_factory=Counter, compare=False)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        sizes: tuple[Sequence[int], Sequence[int]],
        tag: int,
        group: dist.ProcessGroup,
        what: object,
    ) -> Handle:
        stays = sizes[1][dist.get_rank(group)]
        self.sent[group, not sent.is_floating_point()] += (sent.numel() - stays) * sent.itemsize
        return super().all_to_all(received, sent, sizes, tag, group, what)


@dataclass(frozen=True)
class Routed:
    """What one rank sent, and how its tokens were routed.

    Attributes:
        peers: the ranks that share its experts, in order.
        choices: experts of each token, of all blocks and microbatches.
        sent, sizes: bytes to other ranks: rows, and how many they are.
    """

    peers: tuple[int, ...]
    choices: list[list[int]]
    sent: int
    sizes: int


def _bytes(name: str, features: int) -> dict[str, Any]:
    changes = {"ranks": "2-3", **LAYOUTS[name]}
    recipe = _recipe(changes, features, inner=16, batch=4, overrides=("--parallelism.vision.ranks=0-1",))
    with WorkerPool(4) as pool:
        ranks = pool.run(_routed, recipe, timeout=600)
    config = recipe.modules["llm"].config
    experts, chosen = config["num_experts"], config["num_experts_per_tok"]
    by_rank = {rank: each for rank, each in enumerate(ranks) if each is not None}
    bounds = sent_bound(by_rank, experts, features, chosen)
    ratios = [by_rank[rank].sent / bound for rank, bound in bounds.items()]
    alone = sum(sent_bound(by_rank, experts, features, 0).values())
    return {
        "sent": sum(each.sent for each in by_rank.values()),
        "bound": sum(bounds.values()),
        "over_bound": (min(ratios), max(ratios)),
        "over_features": sum(each.sent for each in by_rank.values()) / alone,
        "size_bytes": sum(each.sizes for each in by_rank.values()),
    }


def sent_bound(ranks: Mapping[int, Routed], experts: int, features: int, chosen: int) -> dict[int, int]:
    """The bytes that each rank has to send, forward and backward: from the definition, token by token.

    Args:
        chosen: experts of a token; 0: without routing weights and numbers.
    """
    row, gradient = FP32 * features, FP32 * (features + chosen)
    total = dict.fromkeys(ranks, 0)
    for source, routed in ranks.items():
        each = experts // len(routed.peers)
        for token in routed.choices:
            for other in {routed.peers[expert // each] for expert in token} - {source}:
                total[source] += gradient + NUMBER * chosen + row  # the token, and the gradient of its sum
                total[other] += row + gradient  # its sum, and the gradient of the token
    return total


def _routed(rank: int, recipe: Recipe) -> Routed | None:
    """Some steps of one rank; None where it has no experts."""
    backend = Counting()
    world = World(timeout=60.0, backend=backend)
    with world.as_current():
        world.connect()
        job = Job.assemble(resolve(recipe), world)
        choices: list[list[int]] = []
        gates = [module for name, module in job.root.named_modules() if name.endswith(".mlp.gate")]
        for gate in gates:
            gate.register_forward_hook(lambda _, __, output: choices.extend(output[2].tolist()))
        for _ in range(STEPS):
            job.forward_backward()
        if "llm" not in job.parallel:
            return None
        group = job.parallel["llm"].device_mesh.get_group("ep")
    peers = tuple(dist.get_process_group_ranks(group))
    return Routed(peers, choices, backend.sent[group, False], backend.sent[group, True])


def _recipe(llm: Mapping[str, Any], features: int, inner: int, batch: int, overrides: Sequence[str] = ()) -> Recipe:
    config = {"hidden_size": features, "moe_intermediate_size": inner, "head_dim": features // 4}
    return load_recipe(
        RECIPE,
        (
            *(f"--modules.llm.config.{key}={value}" for key, value in config.items()),
            *(f"--parallelism.llm.{key}={value}" for key, value in llm.items()),
            *(f"--training.local_batch_size={batch}", "--training.steps=100000"),
            *overrides,
        ),
    )


# --- Times ---


def _step_times(args: argparse.Namespace) -> dict[str, Any]:
    recipes = [
        _recipe(
            {"ranks": "0-1", "expert_parallel_degree": degree},
            args.features,
            args.inner,
            args.batch,
            ("--parallelism.vision.ranks=0-1",),
        )
        for degree in (2, 1)
    ]
    with WorkerPool(2) as pool:
        ranks = pool.run(_times, recipes, args.rounds, args.steps, timeout=1800)
    seconds = [_medians(ranks, recipe, max, args.steps, 0) for recipe in range(2)]  # a step ends on the slower rank
    cpu_seconds = [_medians(ranks, recipe, sum, args.steps, 1) for recipe in range(2)]
    ratios, cpu_ratios = ([a / b for a, b in zip(*each, strict=True)] for each in (seconds, cpu_seconds))
    return {
        "step_time_ratio": statistics.median(ratios),
        "step_cpu_ratio": statistics.median(cpu_ratios),
        "ratios": ratios,
        "cpu_ratios": cpu_ratios,
        "ep_ms": 1e3 * statistics.median(seconds[0]),
        "replicated_ms": 1e3 * statistics.median(seconds[1]),
        "loss_difference": max(difference for _, difference in ranks),
    }


Spent = list[list[tuple[float, float]]]
"""Per recipe and step: seconds, and CPU seconds of this process."""


def _medians(
    ranks: Sequence[tuple[Spent, float]], recipe: int, over: Callable[[Any], float], steps: int, which: int
) -> list[float]:
    """Of the steps of each round; of a step what `over` makes of its ranks."""
    each = [over(spent[which] for spent in step) for step in zip(*(spent[recipe] for spent, _ in ranks), strict=True)]
    return [statistics.median(each[i : i + steps]) for i in range(0, len(each), steps)]


def _times(rank: int, recipes: Sequence[Recipe], rounds: int, steps: int) -> tuple[Spent, float]:
    """What the steps of each recipe took, and how far apart the losses of the first steps were."""
    torch.set_num_threads(1)
    taken: Spent = [[] for _ in recipes]
    difference = 0.0
    with tempfile.TemporaryDirectory() as folder:
        trainers = [_trainer(recipe, Path(folder, str(i))) for i, recipe in enumerate(recipes)]
        for step in range(WARM_UP + rounds * steps):
            losses = []
            for trainer, spent in list(zip(trainers, taken, strict=True))[:: 1 if step % 2 else -1]:
                dist.barrier()
                started, cpu_started = time.perf_counter(), time.process_time()
                losses.append(trainer.train_step().loss)
                if step >= WARM_UP:
                    spent.append((time.perf_counter() - started, time.process_time() - cpu_started))
            if step < WARM_UP:  # later, rounding has had time to grow
                difference = max(difference, abs(losses[0] - losses[1]))
        for trainer in trainers:
            trainer.upcoming.close()
            trainer.reporter.close()
    return taken, difference


def _trainer(recipe: Recipe, folder: Path) -> Trainer:
    job = recipe.job.model_copy(update={"dump_folder": str(folder)})
    return Trainer(resolve(recipe.model_copy(update={"job": job})), World.current())


# --- Skew ---


def _skew(experts: int, ranks: int, draws: int, choices: int, later: int = 5) -> dict[str, Any]:
    """The worst of `later` batches of each draw, before and after the experts were placed by an earlier one."""
    before, after = [], []
    for seed in range(draws):
        random = np.random.default_rng(seed)
        batch = _batches(random, random.permutation(_shares(experts)), choices)
        placement = place_experts(batch(), ranks)
        for _ in range(later):
            loads = np.array(batch())
            before.append(_load(loads, ranks))
            after.append(_load(loads[list(placement)], ranks))
    shares = _shares(experts)
    least = shares[0] + shares[experts - experts // ranks + 1 :].sum()  # ranks hold equally many
    return {
        "experts": experts,
        "ranks": ranks,
        "before": max(before),
        "after": max(after),
        "least": max(1.0, float(least * ranks)),
    }


def _shares(experts: int) -> np.ndarray:
    """1/k of the k-th, of 1 altogether."""
    shares = 1 / np.arange(1, experts + 1)
    return shares / shares.sum()


def _batches(random: np.random.Generator, shares: np.ndarray, choices: int) -> Callable[[], list[int]]:
    """Each call draws a batch: choices per expert."""
    return lambda: random.multinomial(choices, shares).tolist()


def _load(loads: np.ndarray, ranks: int) -> float:
    """Of the fullest rank over the mean, where equally many experts lie on each in this order."""
    held = loads.reshape(ranks, -1).sum(1)
    return float(held.max() / held.mean())


def table(result: dict[str, Any]) -> str:
    """A line per layout and size."""
    lines = [f"{'layout':32} {'sent':>12} {'bound':>12} {'/ bound':>8} {'/ features':>11} {'sizes':>8}"]
    lines += [
        f"{name:32} {each['sent']:>12,} {each['bound']:>12,} {each['over_bound'][1]:>8.4f} "
        f"{each['over_features']:>11.4f} {each['size_bytes']:>8,}"
        for name, each in result["layouts"].items()
    ]
    lines += [
        "",
        f"a step: EP 2 {result['ep_ms']:.0f} ms, replicated {result['replicated_ms']:.0f} ms, "
        f"ratio {result['step_time_ratio']:.3f}, of CPU seconds {result['step_cpu_ratio']:.3f}",
        "",
        f"{'experts':>7} {'ranks':>6} {'before':>7} {'after':>7} {'least':>7}",
    ]
    lines += [
        f"{size['experts']:>7} {size['ranks']:>6} {size['before']:>7.3f} {size['after']:>7.3f} {size['least']:>7.3f}"
        + ("  out of reach" if size in result["out_of_reach"] else "")
        for size in (*result["skew"], *result["out_of_reach"])
    ]
    return "\n".join(lines)
