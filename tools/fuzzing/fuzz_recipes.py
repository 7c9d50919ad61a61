"""Drawn recipes train to the last digits as one process does, and the digits model as a plain loop does.

Every recipe takes three SGD steps in worker processes; loss, every gradient and all parameters are compared with one
process in fp64 (error below 1e-10; the few fp32 recipes 1e-5, or twice what one process loses to rounding). A failing
recipe is made as small as it goes.

One process draws what a layout draws only where every module has one lane and dropout is on values that all ranks hold
alike (`support.dropout_oracles`). Other recipes with dropout run twice: replicas must be equal, losses finite, and both
outcomes the same to the last bit.

What only whole runs have (`--feature checkpoint`, `timeline`, `free running` and so on) changes nothing in them, to the
last bit; what goes on from a checkpoint, in the same layout or in another one, is the uninterrupted run
(`support.whole_runs`).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fuzzing.simplify import candidates_of as candidates_of
from fuzzing.simplify import simplest
from hetmesh.cli.check import checked
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.modules import loaded_module
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.emulated_nccl import emulate
from hetmesh.testing.parity import TOLERANCE, Outcome, ParityError, Policy, compare, reference, run_as
from hetmesh.testing.pool import WorkerPool
from support import plain_digits
from support.assignments import RandomAssignment
from support.dropout_oracles import draws_alike, has_dropout
from support.recipes import FEATURES, RecipeCase, draw_recipes
from support.trained import trains
from support.whole_runs import check_runs, has_run

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
    "src/hetmesh/recipe",
    "src/hetmesh/context",
    "src/hetmesh/data",
    "src/hetmesh/training",
    "src/hetmesh/testing",
    "tests/support",
)
"""What an output of it judges (`kept.py`)."""

STEPS, LR = 3, 0.1
PRELOAD = (
    "hetmesh.training.job",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.siglip.modeling_siglip",
)
ONE_PROCESS = "one process"
PLAIN = "one process and the plain loop"
DRAWN_ALIKE = "dropout: one process"
REPEATED = "dropout: equal replicas, finite losses, twice the same"
ORACLES = (ONE_PROCESS, PLAIN, DRAWN_ALIKE, REPEATED)
"""What judges a recipe."""

FRESH = 40  # recipes per start of the workers: every layout leaves its process groups behind


@dataclass(frozen=True)
class Pools:
    """Worker pools of 4 and 8 processes. `again`: recipes that were compared a second time, by how."""

    four: WorkerPool
    eight: WorkerPool
    again: Counter[str] = field(default_factory=Counter)

    def __getitem__(self, world: int) -> WorkerPool:
        return self.four if world <= 4 else self.eight

    def close(self) -> None:
        """End the workers; the next use starts new ones."""
        self.four.close()
        self.eight.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options beside --n and --seed."""
    parser.add_argument("--part", default="1/1", metavar="I/K", help="run only every K-th of the drawn recipes, from I")
    parser.add_argument("--feature", choices=FEATURES, metavar="NAME", help="draw only recipes with it")
    parser.add_argument("--tries", type=int, default=80, help="how many smaller recipes to try after a failure")
    parser.add_argument("--verbose", action="store_true", help="a line per recipe")
    parser.add_argument(
        "--assign", choices=["recipe", "random"], default="recipe", help="random: samples in any microbatch and lane"
    )
    parser.add_argument("--emulate-nccl", action="store_true", help="workers send over emulated NCCL")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that one recipe may take")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Draw, run and compare; a dict of counts and failures."""
    part, parts = map(int, args.part.split("/"))
    torch.set_num_threads(1)  # the workers have the cores; tiny tensors gain nothing from more
    policy = RandomAssignment(args.seed) if args.assign == "random" else None
    mine = list(cases(args.n, args.seed, args.feature))[part - 1 :: parts]
    begin = emulate if args.emulate_nccl else None
    pools = Pools(*(WorkerPool(n, preload=PRELOAD, begin=begin) for n in (4, 8)))
    features: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    oracles: Counter[str] = Counter()
    start = time.monotonic()
    try:
        for i, case in enumerate(mine):
            if i and i % FRESH == 0:
                pools.close()
                print(f"{i} of {len(mine)} recipes, {len(failures)} failed", file=sys.stderr, flush=True)
            error = problem(pools, case, args.timeout, policy=policy)
            if args.verbose:
                print(f"recipe {i}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
            if error is None:
                features.update(case.features)
                oracles[oracle(case.recipe, policy)] += 1
                continue
            print(f"recipe {i}: {_line(error)}", file=sys.stderr, flush=True)
            minimal = simplest(case, partial(_fails, pools, args.timeout, policy, type(error)), args.tries)
            failures.append({"error": _line(error), "recipe": case.told(), "minimal": minimal.told()})
            print(f"smallest that fails so:\n\n{minimal.told()}", file=sys.stderr, flush=True)
    finally:
        pools.close()
    return {
        "n": args.n,
        "seed": args.seed,
        "part": args.part,
        "assign": args.assign,
        "passed": len(mine) - len(failures),
        "judged_by": {name: oracles[name] for name in ORACLES},
        "compared_again": dict(pools.again),
        "seconds": round(time.monotonic() - start, 1),
        "features": {name: features[name] for name in FEATURES},
        "failures": failures,
    }


def cases(n: int, seed: int, feature: str | None = None) -> Iterator[RecipeCase]:
    """`n` recipes: of every four three for 4 processes and one for 8; only those with `feature`."""
    large = n // 4
    eight = iter(draw_recipes(large, seed, 8, feature=feature))
    for i, case in enumerate(draw_recipes(n - large, seed, 4, feature=feature)):
        yield case
        if i % 3 == 2:
            yield from [case for case in [next(eight, None)] if case is not None]
    yield from eight


def problem(
    pools: Pools, case: RecipeCase, timeout: float = 60.0, steps: int = STEPS, policy: Policy | None = None
) -> Exception | None:
    """What is wrong with how a recipe trains, with samples where `policy` puts them; None where nothing is."""
    try:
        recipe = case.recipe
        judge, limit = oracle(recipe, policy), TOLERANCE[recipe.training.dtype]
        whole = policy is None and has_run(recipe)
        steps = 1 if whole else steps  # of which the whole run has more
        pool = pools[recipe.world_size]
        ranks = pool.run(run_as, recipe, steps, None, policy, timeout=timeout)  # checks replicas too
        truth = None
        if judge == REPEATED:
            check_equal(ranks, pool.run(run_as, recipe, steps, None, policy, timeout=timeout))
        else:
            truth = reference(recipe, steps, LR, microbatches=judge == DRAWN_ALIKE)
            try:
                compare(truth, ranks, limit)
            except ParityError as error:
                exact = recipe.training.dtype == "float64"
                pools.again["steps of a hundredth" if exact else "twice the rounding of one process"] += 1
                if exact:
                    print(
                        f"with steps of a hundredth, as descent that diverges multiplies rounding: {_line(error)}",
                        file=sys.stderr,
                    )
                    slow = reference(recipe, steps, LR / 100, microbatches=judge == DRAWN_ALIKE)
                    compare(slow, pool.run(run_as, recipe, steps, None, policy, LR / 100, timeout=timeout), limit)
                else:
                    compare(truth, ranks, 2 * rounding(case, truth, steps, microbatches=judge == DRAWN_ALIKE))
        if judge == PLAIN:
            compare(plain_outcome(recipe, steps), ranks, limit)
        if whole:
            checked(recipe)
            check_runs(pools.__getitem__, case, truth, timeout)
    except Exception as error:  # of any type: whatever comes out is the finding
        return error
    return None


def rounding(case: RecipeCase, truth: Outcome, steps: int, *, microbatches: bool) -> float:
    """By how much one process in fp32, `truth`, differs from one in fp64, and so layouts from each other: tiny random
    models with linear attention lose more than 1e-5."""
    exact = replace(case, text=case.text.replace('dtype = "float32"', 'dtype = "float64"')).recipe
    return compare(reference(exact, steps, LR, microbatches=microbatches), [truth], math.inf)


def oracle(recipe: Recipe, policy: Policy | None = None) -> str:
    """Which of `ORACLES` judges a recipe. What dropout draws depends on the microbatch."""
    if has_dropout(recipe):
        return DRAWN_ALIKE if draws_alike(recipe) and policy is None else REPEATED
    digits = recipe.data.source == "digits" and not recipe.data.mixture
    plain = digits and all(module.lora is None for module in recipe.modules.values())
    return PLAIN if plain else ONE_PROCESS


def check_equal(first: Sequence[Outcome], second: Sequence[Outcome]) -> None:
    """Raise ParityError unless losses are finite and two runs gave every rank the same, bit for bit."""
    for rank, (a, b) in enumerate(zip(first, second, strict=True)):
        if not all(map(math.isfinite, a.losses)):
            raise ParityError(f"losses on rank {rank} are not finite: {a.losses}")
        if a.losses != b.losses:
            raise ParityError(f"a second run gave rank {rank} the losses {b.losses}, not {a.losses}")
        for what, one, other in (
            ("gradient", a.gradients, b.gradients),
            ("parameter", a.parameters, b.parameters),
        ):
            for name, value in one.items():
                if not _same(value, other[name]):
                    raise ParityError(f"a second run gave rank {rank} another {what} {name}")


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def plain_outcome(recipe: Recipe, count: int = STEPS) -> Outcome:
    """What the plain loop gives, from the weights that hetmesh draws, on the samples that it draws."""
    resolved = resolve(recipe)
    source = resolved.source
    config = {name: module.config for name, module in recipe.modules.items()}
    model = plain_digits.PlainModel(
        config["vision"],
        config["projector"].get("hidden_features", config["llm"]["hidden_size"]),
        {**config["llm"], "vocab_size": source.vocab_size},
        source.placeholders["image"],
        recipe.modules["llm"].attention_mask,
    )
    for name, module in recipe.modules.items():
        model.get_submodule(name).load_state_dict(loaded_module(recipe, resolved.adapters[name], name).state_dict())
        for fqn, parameter in model.get_submodule(name).named_parameters():
            parameter.requires_grad_(trains(module, fqn))
    steps = [list(_questions(recipe, source, step)) for step in range(count)]
    losses, gradients, parameters = plain_digits.train(model, steps, LR)
    return Outcome(tuple(losses), gradients, parameters)


def _questions(recipe: Recipe, source: Any, step: int) -> Iterator[plain_digits.PlainSample]:
    from hetmesh.data.loader import Loader

    for index in Loader(source, recipe.batch.global_batch_size, seed=recipe.debug.seed).indices(step):
        sample, meta = source.load(index), source.meta(index)
        ((answer, _),) = meta.targets
        yield plain_digits.PlainSample(tuple(sample.tokens.tolist()), tuple(sample.media["image"]), answer)


def _fails(pools: Pools, timeout: float, policy: Policy | None, kind: type[Exception], case: RecipeCase) -> bool:
    return type(problem(pools, case, timeout, policy=policy)) is kind


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{name:28} {count}" for name, count in result["features"].items()]
    for failure in result["failures"]:
        lines += ["", failure["error"], "", failure["minimal"]]
    lines += ["", *(f"{name:28} {count}" for name, count in result["judged_by"].items())]
    lines.append(f"{result['passed']} recipes passed, {len(result['failures'])} failed, in {result['seconds']} s")
    return "\n".join(lines)
