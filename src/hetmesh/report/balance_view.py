"""A recipe and its data, or lengths of any -> BalanceView: every balancer on the same batches. One process, no weights,
no process group."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from hetmesh.balance import (
    DEFERRING,
    POLICIES,
    Assignment,
    BalanceOptions,
    BatchLoads,
    assign,
    batch_loads,
    batch_plan_of,
    graph_slots,
)
from hetmesh.balance.co_located import leaders
from hetmesh.balance.imbalance import BatchLoad, ModuleLoad, batch_load
from hetmesh.balance.plan_batch import within_range
from hetmesh.data.lengths import read_lengths
from hetmesh.errors import GraphError, RecipeError
from hetmesh.graph import MetaArrays, ModuleGraph, SampleMeta
from hetmesh.recipe.recipe import Recipe
from hetmesh.report.balance_values import BalancerResult, BalanceView, Candidate, Histogram, ModuleSizes
from hetmesh.report.expert_use import expert_use
from hetmesh.report.given_lengths import GivenLengths
from hetmesh.report.run_lines import metrics_lines
from hetmesh.resolve.balance_options import sample_costs
from hetmesh.resolve.describe import describe, make_loader
from hetmesh.resolve.module_shapes import module_shapes
from hetmesh.resolve.recipe_step_model import named_step_model
from hetmesh.resolve.schedules import StepSchedules
from hetmesh.simulate import StepModel, simulate

SHOWN = ("none", "auto")
"""Policies whose loads are shown as histograms."""
MUCH_PADDING = 0.1


def balance_view(
    recipe: Recipe,
    *,
    lengths: str | None = None,
    batches: int = 4,
    machine: str | None = None,
    profile: str | None = None,
) -> BalanceView:
    """What every balancer makes of the first `batches` global batches of `recipe`.

    Args:
        lengths: a file of lengths (`hetmesh.data.lengths`), whose samples take the place of the recipe's.
        machine, profile: as of `hetmesh.resolve.simulated_step.simulate_recipe`.

    Raises:
        RecipeError: what `hetmesh check` would find, a line of `lengths` that does not fit, sizes of a module or a
            machine that are not known, or fewer than 1 batch.
        GraphError: the recipe's own balancer finds no way to keep a cap.
    """
    if batches < 1:
        raise RecipeError(f"--batches {batches}: must be at least 1")
    source, adapters, graph = describe(recipe)
    notes: list[str] = []
    if lengths is None:
        loader = make_loader(recipe, source, graph, adapters)
        drawn: Iterator[Sequence[SampleMeta]] = (batch.metas for batch in islice(loader, batches))
    else:
        valid = [*(name for name in graph.order if name != graph.sink.name), graph.sink.name]
        given = GivenLengths(read_lengths(lengths, valid), graph, adapters, recipe.training.seq_len)
        notes += given.notes
        if len(given) < recipe.batch.global_batch_size:
            notes.append(
                f"{lengths} has {len(given)} samples, fewer than the {recipe.batch.global_batch_size} of a batch: "
                "some come several times"
            )
        drawn = given.batches(batches, recipe.batch.global_batch_size, recipe.debug.seed)
    model = named_step_model(recipe, graph, adapters, machine, profile)
    keys = recipe.balance
    options = BalanceOptions(
        keys.policy,
        sample_costs(graph, module_shapes(recipe, adapters)),
        keys.max_tokens,
        keys.microbatch_sizes,
        free=keys.microbatches == "free",
        deferral=keys.deferral,
        microbatch_shares=keys.microbatch_shares,
    )
    runs = _runs(options)
    comparison = _Comparison(recipe, graph, model)
    for samples in map(MetaArrays.of, drawn):
        for run in runs:
            comparison.add(run, samples)
    alone = all(graph[name].num_lanes * recipe.batch.num_microbatches == 1 for name in graph.order)
    if alone:
        notes.append("every module has one lane and one microbatch: there is nothing to balance")
    notes += [f"{run.name}: {run.problem}" for run in runs if run.problem]
    notes += _about_padding(graph, runs)
    auto = next(run for run in runs if run.name == "auto")
    sizes = _sizes(graph, recipe, runs)
    tokens = sizes[-1].mean * recipe.batch.global_batch_size
    folder = Path(recipe.job.dump_folder)
    lines = metrics_lines(folder)
    return BalanceView(
        recipe.job.description,
        lengths or f"data.source = {recipe.data.source!r}",
        batches,
        recipe.batch.global_batch_size,
        recipe.schedule,
        model.machine.name,
        sizes,
        tuple(_result(run, runs[0]) for run in runs),
        () if alone else tuple(map(tuple, auto.candidates)),
        expert_use(graph, adapters, tokens, lines.steps if lines else ()),
        tuple(notes),
    )


def _about_padding(graph: ModuleGraph, runs: Sequence[_Run]) -> Iterator[str]:
    most = max((each.modules[graph.sink.name].padding for run in runs for each in run.even), default=0.0)
    if most > MUCH_PADDING:
        yield (
            f"up to {most:.0%} of what {graph.sink.name} computes is padding: auto and buckets count it; "
            "training.pack_samples = true leaves none"
        )


@dataclass(eq=False)
class _Run:
    """One balancer, and what it made of the batches so far: a number or value per batch."""

    name: str
    options: BalanceOptions
    recipe: bool
    loads: list[tuple[BatchLoads, Assignment]] = field(default_factory=list)
    even: list[BatchLoad] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    candidates: list[list[Candidate]] = field(default_factory=list)
    problem: str = ""


def _runs(options: BalanceOptions) -> list[_Run]:
    """`none` as a recipe has it, then every other policy with the recipe's keys, and with keys that it may try."""
    others = sorted(set(POLICIES) - {"none", "auto"}, key=lambda name: (name in DEFERRING, name))
    none = replace(options, policy="none", max_tokens={}, free=False, deferral=False)
    found = [_Run("none", none, options.policy == "none")]
    for policy in (*others, "auto"):
        own = replace(options, policy=policy, deferral=options.deferral and policy in DEFERRING)
        found.append(_Run(policy, own, policy == options.policy))
        if policy in DEFERRING and not own.deferral:
            found.append(_Run(f"{policy}, deferral", replace(own, deferral=True), False))
    if not options.free:
        found.append(_Run("auto, free", replace(options, policy="auto", free=True), False))
    return found


class _Comparison:
    """Runs balancers on batches, and simulates what they make of them."""

    def __init__(self, recipe: Recipe, graph: ModuleGraph, model: StepModel) -> None:
        self.recipe, self.graph, self.model = recipe, graph, model
        self.schedules = StepSchedules(recipe, graph, {}, model)
        self._simulated: dict[tuple[object, ...], float] = {}  # of the samples below
        self._samples: Sequence[SampleMeta] = ()

    def add(self, run: _Run, samples: Sequence[SampleMeta]) -> None:
        """One batch more."""
        if run.problem:
            return
        options = within_range(self.graph, samples, run.options)
        loads = batch_loads(self.graph, samples, options)
        slots = graph_slots(self.graph, self.recipe.batch.num_microbatches, options, len(samples))
        try:
            started = time.process_time()
            found = assign(loads, slots, run.options.policy)
            run.milliseconds.append(1e3 * (time.process_time() - started))
            run.seconds.append(self.seconds(samples, found))
        except GraphError as error:  # a cap that it cannot keep, routes that the schedule cannot order
            if run.recipe:  # training would end here
                raise
            run.problem = str(error)
            return
        run.loads.append((loads, found))
        run.even.append(batch_load(loads, found, padded=not self.graph.sink.packed))
        if run.name == "auto":
            run.candidates.append(self._candidates(samples, found, run.seconds[-1]))

    def seconds(self, samples: Sequence[SampleMeta], found: Assignment) -> float:
        """Of the simulated step; balancers often agree, and each assignment is simulated once."""
        if samples is not self._samples:
            self._samples, self._simulated = samples, {}
        key = (found.microbatches, found.microbatch.tobytes(), found.lane.tobytes())
        if key not in self._simulated:
            plan = batch_plan_of(self.graph, samples, found)
            schedule = self.schedules.of(plan)
            self._simulated[key] = simulate(schedule, self.model.costs(plan, schedule)).makespan
        return self._simulated[key]

    def _candidates(self, samples: Sequence[SampleMeta], found: Assignment, seconds: float) -> list[Candidate]:
        first = found.tried[0].score
        out = []
        for each in found.tried:
            chosen = each.policy == found.policy.removeprefix("auto: ")
            score = None if each.score is None or not first else each.score / first
            out.append(Candidate(each.policy, score, seconds if chosen else self.seconds(samples, each), chosen))
        return out


def _result(run: _Run, none: _Run) -> BalancerResult:
    if run.problem:
        return BalancerResult(run.name, run.recipe, {}, 0.0, 0.0, 0.0, 0.0, run.problem)
    mean = lambda values: float(np.mean([*values]))  # noqa: E731
    modules = {
        name: ModuleLoad(
            mean(each.modules[name].max_over_mean for each in run.even),
            mean(each.modules[name].std_over_mean for each in run.even),
            mean(each.modules[name].padding for each in run.even),
        )
        for name in run.even[0].modules
    }
    return BalancerResult(
        run.name,
        run.recipe,
        modules,
        mean(each.deferred for each in run.even),
        mean(run.seconds),
        sum(none.seconds) / sum(run.seconds),
        mean(run.milliseconds),
    )


def _sizes(graph: ModuleGraph, recipe: Recipe, runs: Sequence[_Run]) -> tuple[ModuleSizes, ...]:
    led_by = leaders(graph)
    batches = [loads for loads, _ in runs[0].loads]
    work = _microbatch_work(runs)
    out = []
    for i, name in enumerate(batches[0].modules):
        tokens = np.concatenate([loads.tokens[:, i] for loads in batches])
        mean = float(work["none"][i].mean())
        relative = {policy: each[i] / mean if mean else each[i] + 1.0 for policy, each in work.items()}
        largest = max(float(each.max(initial=0.0)) for each in relative.values())
        out.append(
            ModuleSizes(
                name,
                tuple(each for each in graph.order if led_by[each] == name != each),
                graph[name].num_lanes,
                recipe.batch.num_microbatches,
                recipe.balance.max_tokens.get(name),
                "tokens" if name == graph.sink.name else "rows",
                float(tokens.mean()),
                int(tokens.max(initial=0)),
                mean,
                Histogram.of_counts(tokens),
                {policy: Histogram.of(each, largest) for policy, each in relative.items()},
            )
        )
    return tuple(out)


def _microbatch_work(runs: Sequence[_Run]) -> Mapping[str, list[np.ndarray]]:
    """By policy and module, the work of every microbatch and lane of all batches."""
    found = {}
    for run in runs:
        if run.name in SHOWN and run.loads:
            sums = [assignment.sums(loads.work) for loads, assignment in run.loads]
            found[run.name] = [np.concatenate([each[i].ravel() for each in sums]) for i in range(len(sums[0]))]
    return found
