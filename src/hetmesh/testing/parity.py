"""The parity harness: any layout, schedule or balancer must give what one plain process gives, to the last digits.

The truth is `reference`: an ordinary PyTorch loop over the full modules in one process, whole batch at once, autograd
end to end. It shares models and data with the run under test, and nothing else: no plan, no boundary, no runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hetmesh.attention.packed_rows import PackedRows
from hetmesh.balance import BatchPlan
from hetmesh.boundary import World
from hetmesh.boundary.world import reduce_over_ranks
from hetmesh.data.drawn import DrawnSample
from hetmesh.errors import HetmeshError
from hetmesh.graph import ModuleGraph, SampleMeta, output_key
from hetmesh.models import Adapter, lora_plan
from hetmesh.models.named.diffusion import DiffusersAdapter
from hetmesh.models.named.qwen3_5 import Qwen3_5TextAdapter
from hetmesh.models.split.llm_half import HfLlmAdapter
from hetmesh.models.user.adapters import UserLlm
from hetmesh.parallel import RandomPlace, entering, local_gradient, seed_by_place
from hetmesh.parallel.experts import ExpertLayers
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.modules import loaded_module
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.batch_losses import draws_of, summed, units_of
from hetmesh.testing.dense_masks import DenseAttention, dense_mask, masked
from hetmesh.testing.pool import WorkerPool
from hetmesh.testing.precision import exact_dtypes
from hetmesh.training.gradients import scale, squared_norm
from hetmesh.training.job import Job
from hetmesh.training.step import LossWeights

Policy = Callable[[ModuleGraph, Sequence[SampleMeta], int], BatchPlan]
"""(graph, expanded samples of a global batch, samples per microbatch and lane of the LLM) -> the plan;
`hetmesh.balance.plan_batch` is one."""
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
"""Largest relative error, by `[training] dtype`."""


class ParityError(HetmeshError, AssertionError):
    """A run differs from the reference. The message names the worst quantities and their errors."""


@dataclass(frozen=True)
class Outcome:
    """What a few SGD steps gave.

    Attributes:
        losses: per step, weighed and summed over modules.
        of_modules: the same by module, per unit that its loss counts.
        gradients: of the first step, full tensors by parameter name (`llm.lm_head.weight`), None where there is none.
        parameters: after the last step, full tensors.
        norm: of the gradient of the first step over all modules, as a run sums it over ranks; None: nobody did.
    """

    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor | None]
    parameters: Mapping[str, Tensor]
    norm: float | None = None
    of_modules: tuple[Mapping[str, float], ...] = ()


def reference(recipe: Recipe, steps: int = 3, lr: float = 0.1, *, microbatches: bool = False) -> Outcome:
    """Run `recipe`'s model and data in this process alone, ignoring its layout.

    Args:
        microbatches: go through the batch in the recipe's microbatches, and draw random numbers where a run of the
            recipe draws them. With dropout a run equals this if every module has one lane, samples are not packed, and
            dropout is only on values that tensor-parallel ranks hold alike: before column-wise linears and after
            row-wise ones, not on heads or on the inputs of row-wise linears, and without sequence parallelism.
    """
    resolved = resolve(recipe)
    source, adapters, graph, loader = resolved.source, resolved.adapters, resolved.graph, resolved.loader()
    modules = {name: loaded_module(recipe, adapters[name], name) for name in graph.order}
    parameters = {f"{n}.{k}": p for n, module in modules.items() for k, p in module.named_parameters()}
    if microbatches:
        for name, module in modules.items():
            plan = {**adapters[name].tensor_parallel_plan(), **recipe.modules[name].plan}
            seed_by_place(module, adapters[name].layers(), lora_plan(module, plan))
    numbers = count()
    of_modules: list[Mapping[str, float]] = []

    def step() -> float:
        drawn, number = next(loader), next(numbers)
        size = recipe.batch.microbatch_size if microbatches else len(drawn)
        counts = {name: max(units_of(loss, name, graph, adapters, drawn), 1) for name, loss in graph.losses.items()}
        per_token = counts[graph.llm.name] / max(sum(d.meta.tokens for d in drawn), 1)
        parts = [drawn[i : i + size] for i in range(0, len(drawn), size)]
        each = [accumulate(part, counts, per_token, number, m) for m, part in enumerate(parts)]
        found = {name: sum(of_part[name] for of_part in each) for name in counts}
        of_modules.append(found)
        return sum(graph.losses[name].weight * loss for name, loss in found.items())

    def accumulate(
        drawn: Sequence[DrawnSample], counts: Mapping[str, int], per_token: float, number: int, m: int
    ) -> dict[str, float]:
        metas, samples = [d.meta for d in drawn], loader.load(drawn)
        outputs: dict[str, Tensor] = {}
        losses: dict[str, Tensor] = {}
        batch: Mapping[str, Tensor]
        balance: Tensor | float = 0.0
        for name in graph.order:
            inputs = {b.key: outputs[b.key] for b in graph.inputs(name)}
            batch = adapters[name].collate(samples, metas, placeholders=source.placeholders, pad_id=source.pad_id)
            kind = recipe.modules[name].attention_mask
            sees: AbstractContextManager[None] = nullcontext()
            if kind != "causal" and isinstance(adapters[name], UserLlm):
                own: Any = DenseAttention(dense_mask(kind, metas, batch["input_ids"].shape[1]))
                batch = PackedRows(batch, own)
            elif kind != "causal":
                llm: Any = adapters[name]
                sees = masked(llm.decoder_of(modules[name]), dense_mask(kind, metas, batch["input_ids"].shape[1]))
            if name in graph.topology.after_llm:
                batch = {**batch, **draws_of(recipe.debug.seed, number, graph[name], adapters[name], metas)}
            routings = _Routings(adapters[name].abilities.experts)
            with sees, routings.kept(modules[name]), entering(RandomPlace(recipe.debug.seed, name, number, m)):
                result = adapters[name].forward(modules[name], batch, inputs)
            named = {"": result} if isinstance(result, Tensor) else result
            outputs |= {output_key(name, output): rows for output, rows in named.items()}
            if name == graph.llm.name:
                balance = routings.balance_loss([meta.tokens for meta in metas], batch["input_ids"].shape[1])
            if (spec := graph.losses.get(name)) is not None:
                losses[name] = summed(recipe, name, spec.kind, named, batch) / counts[name]
        weighed = [graph.losses[name].weight * loss for name, loss in losses.items()]
        whole = torch.stack(weighed).sum() + balance * per_token / counts[graph.llm.name]
        if whole.requires_grad:  # not where only an encoder is trained, and no sample has anything for it
            whole.backward()
        return {name: loss.item() for name, loss in losses.items()}

    with exact_dtypes(*modules.values(), every_cast=is_split(adapters)):
        return replace(descend(parameters, step, steps, lr), of_modules=tuple(of_modules))


class _Routings:
    """What the routers of a module returned in one forward, and the load-balancing loss of one process from it."""

    def __init__(self, layers: ExpertLayers | None) -> None:
        self.layers = layers
        self.logits: list[Tensor] = []
        self.experts: list[Tensor] = []

    @contextmanager
    def kept(self, module: nn.Module) -> Iterator[None]:
        """While it lasts, those of `module` are kept."""

        def keep(_: Any, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            self.logits.append(output[0])
            self.experts.append(output[2])

        blocks = self.layers.blocks if self.layers is not None else ()
        gates = [module.get_submodule(f"{name}.gate") for name in blocks]
        trained = [gate for gate in gates if any(p.requires_grad for p in gate.parameters())]  # others are not balanced
        handles = [gate.register_forward_hook(keep) for gate in trained]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def balance_loss(self, lengths: Sequence[int], width: int) -> Tensor | float:
        """The loss of samples padded to `width` tokens, each weighed by its real ones, without `targets_per_token`."""
        total: Tensor | float = 0.0
        for logits, experts in zip(self.logits, self.experts, strict=True):
            assert self.layers is not None
            probabilities = torch.softmax(logits, dim=-1)
            for row, length in enumerate(lengths):
                own = slice(row * width, row * width + length)
                chosen = torch.zeros_like(probabilities[own]).scatter_(1, experts[own], 1.0)
                each = self.layers.count * (chosen.mean(0) * probabilities[own].mean(0)).sum()
                total = total + length * self.layers.balance / len(self.layers.blocks) * each
        return total


def run(
    recipe: Recipe,
    world: World,
    steps: int = 3,
    fault: Callable[[Job], None] | None = None,
    policy: Policy | None = None,
    lr: float = 0.1,
) -> Outcome:
    """Run `recipe` on its layout; every rank of `world` calls it, also ranks that the recipe does not use.

    Args:
        policy: assigns samples to lanes and microbatches, equally on all ranks, in place of the recipe's own policy.

    Returns:
        Losses and, for the modules of this rank, full gradients and parameters as this rank's replica has them.
    """
    job = Job.assemble(resolve(recipe), world)
    if fault is not None:
        fault(job)
    parameters = dict(job.root.named_parameters())
    numbers = count()
    norms: list[float] = []

    def step() -> float:
        number = next(numbers)
        if number:
            job.expert_placement.after_step(number, None)
        drawn = next(job.loader)
        metas = [d.meta for d in drawn]
        plan = policy(job.graph, metas, recipe.batch.microbatch_size) if policy else job.plan(metas)
        feed = job.feed(drawn, plan, number)
        weights = LossWeights(plan)
        sums = job.runtime.run(job.schedule(plan), plan, feed, step=number, weights=weights.of_sums)
        scale(parameters.values(), 1 / max(weights.divisor, 1))
        if not norms:
            norms.append(math.sqrt(*reduce_over_ranks([squared_norm(job.counted)], world)))
        losses = weights.losses({name: float(loss) * job.counts_loss(name) for name, loss in sums.items()})
        of_modules.append(losses)
        return weights.total(losses)

    of_modules: list[Mapping[str, float]] = []
    with exact_dtypes(job.root, every_cast=is_split(job.adapters)):
        outcome = descend(parameters, step, steps, lr, partial(job.expert_placement.to_expert_order, None))
    if fault is None:
        job.check_replicas(steps)
    return replace(outcome, norm=norms[0] if norms else None, of_modules=tuple(of_modules))


def check(
    pool: WorkerPool,
    recipe: Recipe,
    steps: int = 3,
    *,
    timeout: float = 120.0,
    microbatches: bool = False,
    policy: Policy | None = None,
) -> float:
    """Run `recipe` in the workers of `pool` and compare it with one process; returns the largest error.

    Args:
        microbatches: as in `reference`; for recipes with dropout.
        policy: as in `run`; what it gives does not change what one process gives.

    Raises:
        ParityError: it differs.
        Exception: what a worker raised; a `WorkerError` if it hung or died.
    """
    ranks = pool.run(run_as, recipe, steps, None, policy, timeout=timeout)
    return compare(reference(recipe, steps, microbatches=microbatches), ranks, TOLERANCE[recipe.training.dtype])


def run_as(rank: int, recipe: Recipe, *how: Any) -> Outcome:
    """`run` in worker `rank` of a `WorkerPool`. `how`: what it takes after `world`."""
    return run(recipe, World.current(), *how)


def descend(
    parameters: Mapping[str, nn.Parameter],
    step: Callable[[], float],
    steps: int,
    lr: float,
    finish: Callable[[], object] = lambda: None,
) -> Outcome:
    """Take SGD steps (Adam would hide scale errors) and keep the first gradients, as full tensors.

    Args:
        finish: called after the last step, before parameters are read.
    """
    losses: list[float] = []
    first: dict[str, Tensor | None] = {}
    for i in range(steps):
        for p in parameters.values():
            p.grad = None
        losses.append(step())
        if i == 0:
            first = {k: None if p.grad is None else _full(p.grad).clone() for k, p in parameters.items()}
        _sgd(parameters.values(), lr)
    finish()
    return Outcome(tuple(losses), first, {k: _full(p.detach()).clone() for k, p in parameters.items()})


@torch.no_grad()
def _sgd(parameters: Iterable[nn.Parameter], lr: float) -> None:
    # On local parts: torch's optimizer would look up the sharding of its operation anew for every mesh, which takes
    # longer than all else that a small model does.
    for p in parameters:
        gradient = local_gradient(p)
        if gradient is not None:
            (p.to_local() if isinstance(p, DTensor) else p).add_(gradient, alpha=-lr)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_split(adapters: Mapping[str, Adapter]) -> bool:
    """Whether modules are parts of a model of any build, or have more casts than norms, rotations and routers do."""
    kinds = HfLlmAdapter | DiffusersAdapter | Qwen3_5TextAdapter
    return any(isinstance(adapter, kinds) for adapter in adapters.values())


def compare(expected: Outcome, ranks: list[Outcome], tolerance: float) -> float:
    """Check the outcomes of all ranks, every replica, against the reference.

    The error of a tensor is the norm of the difference over max(its norm, floor x the norm of all its module's), with
    the floor 1e-3 in fp64 and 1e-2 in fp32 (README.md says why).

    Returns:
        The largest error.

    Raises:
        ParityError: an error above `tolerance`, a gradient on one side only, or a parameter that no rank holds.
    """
    errors: dict[str, float] = {}
    for step, loss in enumerate(expected.losses):
        total = sum(outcome.losses[step] for outcome in ranks)
        errors[f"loss of step {step}"] = abs(total - loss) / max(abs(loss), 1e-12)
        for name, own in expected.of_modules[step].items() if expected.of_modules else ():
            given = sum(outcome.of_modules[step].get(name, 0.0) for outcome in ranks if outcome.of_modules)
            errors[f"loss of {name} in step {step}"] = abs(given - own) / max(abs(own), 1e-12)
    whole = math.hypot(*_module_norms(expected.gradients).values())
    for rank, outcome in enumerate(ranks):
        if outcome.norm is not None:
            errors[f"gradient norm on rank {rank}"] = abs(outcome.norm - whole) / max(whole, 1e-12)
    for what, truth in (("gradient", expected.gradients), ("parameter", expected.parameters)):
        norms = _module_norms(truth)
        for name, value in truth.items():
            held = [getattr(outcome, f"{what}s") for outcome in ranks]
            held = [(rank, tensors[name]) for rank, tensors in enumerate(held) if name in tensors]
            if not held:
                raise ParityError(f"no rank holds {what} {name}")
            for rank, other in held:
                errors[f"{what} {name} on rank {rank}"] = _error(value, other, norms[name.split(".")[0]])
    wrong = sorted(((e, name) for name, e in errors.items() if not e < tolerance), reverse=True)
    if wrong:
        worst = "; ".join(f"{name}: {error:.2e}" for error, name in wrong[:6])
        raise ParityError(f"{len(wrong)} of {len(errors)} quantities differ by more than {tolerance:g}: {worst}")
    return max(errors.values())


def _module_norms(tensors: Mapping[str, Tensor | None]) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, value in tensors.items():
        module = name.split(".")[0]
        squares[module] = squares.get(module, 0.0) + (0.0 if value is None else float(value.double().square().sum()))
    return {module: square**0.5 for module, square in squares.items()}


def _error(expected: Tensor | None, given: Tensor | None, module_norm: float) -> float:
    if expected is None or given is None:
        return 0.0 if expected is given else float("inf")
    if expected.shape != given.shape:
        return float("inf")
    difference = float((expected.double() - given.double()).norm())
    floor = 1e-3 if expected.dtype == given.dtype == torch.float64 else 1e-2
    return difference / max(float(expected.double().norm()), floor * module_norm, 1e-30)
