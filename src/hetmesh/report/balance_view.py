"""A recipe and its data, or lengths of any -> BalanceView: every balancer on the same batches. One process, no weights,
no process group."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hetmesh.balance import DEFERRING, POLICIES, Assignment, BalanceOptions, BatchLoads, assign
from hetmesh.balance.co_located import leaders
from hetmesh.balance.imbalance import BatchLoad, ModuleLoad, batch_load
from hetmesh.balance.plan_batch import batch_loads, batch_plan_of, graph_slots, within_range
from hetmesh.data.lengths import Lengths, read_lengths
from hetmesh.errors import GraphError, RecipeError, UsageError
from hetmesh.formatting import listed
from hetmesh.graph import MediaItem, MetaArrays, ModuleGraph, SampleMeta
from hetmesh.models import Adapter
from hetmesh.recipe.recipe import Recipe
from hetmesh.records.run_lines import metrics_lines
from hetmesh.report.balance_values import BalancerResult, BalanceView, Candidate, ExpertUse, Histogram, ModuleSizes
from hetmesh.resolve.resolved import ResolvedRecipe
from hetmesh.resolve.schedules import StepSchedules
from hetmesh.simulate import StepModel, simulate

HISTOGRAMS = ("none", "auto")  # policies whose loads are shown as such
PADDING_SHARE = 0.1  # share of what the LLM computes


def balance_view(
    resolved: ResolvedRecipe,
    *,
    lengths: str | None = None,
    batches: int = 4,
    machine: str | None = None,
    profile: str | None = None,
) -> BalanceView:
    """What every balancer makes of the first `batches` global batches of a recipe.

    Args:
        lengths: a file of lengths (`hetmesh.data.lengths`), whose samples take the place of the recipe's.
        machine, profile: as of `hetmesh.resolve.predictions.simulate_recipe`.

    Raises:
        RecipeError: a line of `lengths` that does not fit, or sizes of a module or a machine that are not known.
        UsageError: fewer than 1 batch.
        GraphError: the recipe's balancer finds no way to keep a cap.
    """
    if batches < 1:
        raise UsageError(f"--batches {batches}: must be at least 1")
    recipe, adapters, graph = resolved.recipe, resolved.adapters, resolved.graph
    notes: list[str] = []
    if lengths is None:
        drawn: Iterator[Sequence[SampleMeta]] = (batch.metas for batch in islice(resolved.loader(), batches))
    else:
        valid = [*(name for name in graph.order if name != graph.llm.name), graph.llm.name]
        given = GivenLengths(read_lengths(lengths, valid), graph, adapters, recipe.training.seq_len)
        notes += given.notes
        if len(given) < recipe.batch.global_batch_size:
            notes.append(
                f"{lengths} has {len(given)} samples, fewer than the {recipe.batch.global_batch_size} of a batch: "
                "some come several times"
            )
        drawn = given.batches(batches, recipe.batch.global_batch_size, recipe.debug.seed)
    model = resolved.step_model(machine, profile)
    runs = _runs(resolved.balance_with(resolved.deferral.on))
    comparison = _Comparison(recipe, graph, model)
    for samples in map(MetaArrays.of, drawn):
        for run in runs:
            comparison.add(run, samples)
    alone = all(graph[name].num_lanes * recipe.batch.num_microbatches == 1 for name in graph.order)
    if alone:
        notes.append("every module has one lane and one microbatch: there is nothing to balance")
    notes += [f"{run.name}: {run.problem}" for run in runs if run.problem]
    most = max((load.modules[graph.llm.name].padding for run in runs for load in run.even), default=0.0)
    if most > PADDING_SHARE:
        padding = f"up to {most:.0%} of what {graph.llm.name} computes is padding: auto and buckets count it"
        notes.append(f"{padding}; training.pack_samples = true leaves none")
    auto = next(run for run in runs if run.name == "auto")
    sizes = _sizes(graph, recipe, runs)
    lines = metrics_lines(Path(recipe.job.dump_folder))
    tokens = sizes[-1].mean * recipe.batch.global_batch_size
    return BalanceView(
        description=recipe.job.description,
        source=lengths or f"data.source = {recipe.data.source!r}",
        batches=batches,
        samples=recipe.batch.global_batch_size,
        schedule=recipe.schedule,
        machine=model.machine.name,
        modules=sizes,
        balancers=tuple(_result(run, runs[0]) for run in runs),
        choices=() if alone else tuple(map(tuple, auto.candidates)),
        experts=_expert_use(graph, adapters, tokens, lines.steps if lines else ()),
        notes=tuple(notes),
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
        tried = replace(options, policy=policy, deferral=options.deferral and policy in DEFERRING)
        found.append(_Run(policy, tried, policy == options.policy))
        if policy in DEFERRING and not tried.deferral:
            found.append(_Run(f"{policy}, deferral", replace(tried, deferral=True), False))
    if not options.free:
        found.append(_Run("auto, free", replace(options, policy="auto", free=True), False))
    return found


class _Comparison:
    """Runs balancers on batches, and simulates what they make of them."""

    def __init__(self, recipe: Recipe, graph: ModuleGraph, model: StepModel) -> None:
        self.recipe, self.graph, self.model = recipe, graph, model
        self.schedules = StepSchedules(recipe, graph, model)
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
        run.even.append(batch_load(loads, found, padded=not self.graph.llm.packed))
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

    def _candidates(self, samples: Sequence[SampleMeta], taken: Assignment, seconds: float) -> list[Candidate]:
        first = taken.tried[0].score
        candidates = []
        for tried in taken.tried:
            chosen = tried.policy == taken.policy.removeprefix("auto: ")
            score = None if tried.score is None or not first else tried.score / first
            step_s = seconds if chosen else self.seconds(samples, tried)
            candidates.append(Candidate(tried.policy, score, step_s, chosen))
        return candidates


def _result(run: _Run, none: _Run) -> BalancerResult:
    if run.problem:
        return BalancerResult(run.name, run.recipe, {}, 0.0, 0.0, 0.0, 0.0, run.problem)
    loads = {name: [even.modules[name] for even in run.even] for name in run.even[0].modules}
    modules = {name: ModuleLoad(*np.mean([*map(astuple, even)], 0).tolist()) for name, even in loads.items()}
    deferred, seconds, milliseconds = (
        float(np.mean(values)) for values in ([even.deferred for even in run.even], run.seconds, run.milliseconds)
    )
    gain = sum(none.seconds) / sum(run.seconds)
    return BalancerResult(run.name, run.recipe, modules, deferred, seconds, gain, milliseconds)


def _sizes(graph: ModuleGraph, recipe: Recipe, runs: Sequence[_Run]) -> tuple[ModuleSizes, ...]:
    led_by = leaders(graph)
    batches = [loads for loads, _ in runs[0].loads]
    work = {}  # by policy and module, of every microbatch and lane of all batches
    for run in runs:
        if run.name in HISTOGRAMS and run.loads:
            sums = [assignment.sums(loads.work) for loads, assignment in run.loads]
            work[run.name] = [np.concatenate([batch[i].ravel() for batch in sums]) for i in range(len(sums[0]))]
    sizes = []
    for i, name in enumerate(batches[0].modules):
        tokens = np.concatenate([loads.tokens[:, i] for loads in batches])
        mean = float(work["none"][i].mean())
        relative = {policy: loads[i] / mean if mean else loads[i] + 1.0 for policy, loads in work.items()}
        largest = max(float(loads.max(initial=0.0)) for loads in relative.values())
        module = ModuleSizes(
            name,
            followers=tuple(other for other in graph.order if led_by[other] == name != other),
            lanes=graph[name].num_lanes,
            microbatches=recipe.batch.num_microbatches,
            cap=recipe.balance.max_tokens.get(name),
            unit="tokens" if name == graph.llm.name else "rows",
            mean=float(tokens.mean()),
            largest=int(tokens.max(initial=0)),
            work=mean,
            samples=Histogram.of_counts(tokens),
            loads={policy: Histogram.of(loads, largest) for policy, loads in relative.items()},
        )
        sizes.append(module)
    return tuple(sizes)


def _expert_use(
    graph: ModuleGraph, adapters: Mapping[str, Adapter], tokens: float, records: Iterable[Mapping[str, Any]]
) -> tuple[ExpertUse, ...]:
    """Of every module whose experts ranks can share, with `tokens` of a step in the LLM and lines of the run's
    metrics.jsonl, of which those without `experts` are passed over."""
    logged = [record for record in records if record.get("experts")]
    uses = []
    for name, adapter in adapters.items():
        if (experts := adapter.abilities.experts) is None:
            continue
        sizes = len(experts.blocks), experts.count, experts.chosen, graph[name].mesh.axis_size("ep")
        use = ExpertUse(name, *sizes, tokens * experts.chosen / experts.count)
        if measured := [(line["step"], line["experts"][name]) for line in logged if name in line["experts"]]:
            last, load = measured[-1]
            use = replace(
                use,
                steps=len(measured),
                last=last,
                max_over_mean=float(np.mean([load["max_over_mean"] for _, load in measured])),
                last_max_over_mean=load["max_over_mean"],
                without_tokens=int(load["without_tokens"]),
            )
        uses.append(use)
    return tuple(uses)


class GivenLengths:
    """The samples of a file of lengths under the modules of a recipe.

    An encoder's tokens are what it computes on; where several make a row that it hands on (Qwen3-VL merges four), rows
    are counted from them. What a module between gets follows from its encoder, unless the file says it. All tokens of a
    sample attend to each other in an encoder, as those of one image do, and every token of the LLM that is no row is a
    target. Raises RecipeError: a sample has no token for the LLM, or there are modules after it.

    Attributes:
        rows: per module but the LLM, the rows it emits for each sample, int64 `[samples]`.
        tokens: of the LLM, int64 `[samples]`.
        notes: what had to be assumed.
    """

    def __init__(self, lengths: Lengths, graph: ModuleGraph, adapters: Mapping[str, Adapter], seq_len: int) -> None:
        self.lengths, self.graph = lengths, graph
        llm = graph.llm.name
        if after := sorted(graph.topology.after_llm):
            raise RecipeError(
                f"{lengths.path}: lengths do not say which tokens of {llm!r} modules after it read, and the recipe has "
                f"{listed(after)}; leave the file out, or take a recipe without them"
            )
        self.rows: dict[str, np.ndarray] = {}
        for name in graph.order:
            given, inputs = lengths.of(name), graph.inputs(name)
            if name == llm:
                continue
            if inputs and name not in lengths.modules:
                sizes, inverse = np.unique(self.rows[inputs[0].source], return_inverse=True)
                rows = [adapters[name].rows(n) if n else 0 for n in sizes.tolist()]
                self.rows[name] = np.array(rows, np.int64)[inverse]
            else:
                unit = 1 if inputs else adapters[name].abilities.tokens_per_row or 1
                self.rows[name] = -(-given // unit)
        self.tokens = lengths.of(llm)
        if (self.tokens < 1).any():
            line = int(lengths.lines[self.tokens.argmin()])
            valid = f"valid are 1 or more, as every sample goes through {llm!r}"
            raise RecipeError(f"{lengths.path}, line {line}, key {llm!r}: got 0 tokens; {valid}")
        self._edges = {b.at: b.source for b in graph.boundaries if b.at is not None}  # side outputs share a placeholder
        self.notes = tuple(self._checked(llm, seq_len))

    def __len__(self) -> int:
        return len(self.lengths)

    def meta(self, index: int) -> SampleMeta:
        """Sample `index`, expanded."""
        items: list[MediaItem] = []
        first = 1
        for at, source in self._edges.items():
            if count := int(self.rows[source][index]):
                items.append(MediaItem(at, (count,), first, count))
                first += count
        tokens = int(self.tokens[index])
        targets = ((first, tokens),) if first < tokens else ()
        rows = {name: int(rows[index]) for name, rows in self.rows.items()}
        return SampleMeta(f"line {self.lengths.lines[index]}", tokens, tuple(items), targets, rows)

    def batches(self, count: int, size: int, seed: int) -> Iterator[list[SampleMeta]]:
        """`count` batches of `size` samples: each sample once before any comes again."""
        rng = np.random.default_rng(seed)
        rounds = -(-count * size // len(self))
        order = np.concatenate([rng.permutation(len(self)) for _ in range(rounds)])
        for i in range(count):
            yield [self.meta(place) for place in order[i * size : (i + 1) * size].tolist()]

    def _checked(self, llm: str, seq_len: int) -> Iterator[str]:
        needed = 1 + sum((self.rows[source] for source in self._edges.values()), np.zeros_like(self.tokens))
        short = self.tokens < needed
        if short.any():
            first = int(short.argmax())
            yield (
                f"{short.sum()} of {len(self)} samples have fewer tokens of {llm!r} than rows that take the place of "
                f"one each (line {self.lengths.lines[first]}: {self.tokens[first]} tokens, {needed[first] - 1} rows): "
                f"they count as rows and one token. Rows belong to the tokens of {llm!r}"
            )
            self.tokens = np.maximum(self.tokens, needed)
        if (long := self.tokens > seq_len).any():
            longer = f"{long.sum()} of {len(self)} samples are longer than training.seq_len = {seq_len}"
            yield f"{longer}, to which training cuts them; here they are whole"
