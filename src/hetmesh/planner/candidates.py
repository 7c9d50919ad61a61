"""Candidates: every layout of a module on some ranks, every way to place modules beside each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from hetmesh.balance.co_located import lane_affinity
from hetmesh.graph import MetaArrays, ModuleSpec, expert_axis, experts_fit, experts_mesh
from hetmesh.graph.module_graph import CheckpointMode, Reshard
from hetmesh.planner.layout_plan import AXES, LayoutPlan, ModulePlan
from hetmesh.planner.problem import ModuleFacts, Problem

LONG_SAMPLE_TOKENS = 4096
"""Tokens of a sample from which on the ranks of a lane may share it where samples are packed anyway: below, the
exchange of keys costs more than it saves, and packing would be all that is gained."""

_MAX_TENSOR, _MAX_CONTEXT, _MAX_STAGES, _MAX_TURNS, _MAX_MICROBATCHES = 8, 8, 16, 12, 64
_FEW_RANKS = 16  # ranks that are parted in any way; more in whole nodes, powers of two and some shares
_MAX_RANK_SPLITS = 4  # ways to part the ranks that are looked at
_CHECKPOINTS: tuple[CheckpointMode, ...] = ("none", "full")


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << i for i in range(max(most, 1).bit_length())]


def module_plans(problem: Problem, name: str, first: int, ranks: int) -> Iterator[ModulePlan]:
    """Every layout of a module on `ranks` ranks from rank `first` on that the model and what is fixed allow.

    Tensor and context parallelism stay within a node. Lanes replicate their weights, shard them over all lanes, or
    shard them over the lanes of a node and replicate those; how these gather is left to `reshard_variants`.
    """
    facts = problem.facts[name]
    node = problem.machine.ranks_per_node or ranks
    wanted = problem.fixed.get((name, "tp"))
    for tp in [wanted] if isinstance(wanted, int) else powers_of_two(min(_MAX_TENSOR, node, ranks)):
        if facts.tensor_degrees and tp not in facts.tensor_degrees:
            continue
        shared = facts.sequence_parallel and tp > 1 and problem.fixed.get((name, "enable_sequence_parallel"), True)
        for cp, pp in itertools.product(_contexts(problem, facts, name, node // tp), _stages(facts, ranks // tp)):
            lanes, rest = divmod(ranks, tp * cp * pp)
            if rest or not lanes:
                continue
            for replicate, shard in _data_parallel(problem, name, lanes, max(node // (tp * cp), 1)):
                degrees = pp, replicate, shard, cp, tp
                for ep, checkpoint in itertools.product(_expert_degrees(facts, degrees), _CHECKPOINTS):
                    plan = ModulePlan((first, first + ranks), degrees, checkpoint, ep, "default", bool(shared))
                    if _agrees(problem, name, plan):
                        yield plan


def variants(problem: Problem, plan: LayoutPlan) -> Iterator[LayoutPlan]:
    """`plan`, and the same with what is no choice of candidates, of which there would be several times as many: FSDP
    gathers a module in every microbatch and not once per step, or the other way round (of a homogeneous layout all
    modules); an interleaved pipeline warms up early; three phases come in windows of microbatches."""
    each: list[list[ModulePlan]] = []
    for own in plan.modules.values():
        ways: tuple[Reshard, ...] = ("default", "always" if own.degree("pp") > 1 else "never")
        others = [replace(own, reshard=way) for way in ways if way != own.reshard and own.degree("dp_shard") > 1]
        each.append([own, *others])
    options = [plan.options]
    if plan.schedule == "interleaved":
        options.append(replace(plan.options, early=not plan.options.early))
    if plan.schedule == "three_phase":
        options += [replace(plan.options, window=window) for window in _windows(problem, plan)]
    together = zip(*each, strict=False) if plan.placement == "homogeneous" else itertools.product(*each)
    for modules, own in itertools.product(together, options):
        way = replace(plan, modules=dict(zip(plan.modules, modules, strict=True)), options=own)
        if can_run(way):
            yield way


def gathered_once(plan: LayoutPlan) -> LayoutPlan:
    """`plan` where FSDP gathers all modules once per step: the fastest way, which holds most."""
    if all(own.degree("pp") > 1 or own.degree("dp_shard") == 1 for own in plan.modules.values()):
        return plan
    modules = {
        name: replace(own, reshard="never") if own.degree("pp") == 1 < own.degree("dp_shard") else own
        for name, own in plan.modules.items()
    }
    return replace(plan, modules=modules)


def _windows(problem: Problem, plan: LayoutPlan) -> list[int]:
    """Microbatches of a window: halves of the step's, for as long as they fill the pipeline twice."""
    llm = plan.modules[problem.graph.llm.name]
    count, found = problem.global_batch_size // (llm.lanes * plan.microbatch_size), list[int]()
    while count % 2 == 0 and count // 2 >= 2 * llm.degree("pp"):
        count //= 2
        found.append(count)
    return found


def _contexts(problem: Problem, facts: ModuleFacts, name: str, most: int) -> list[int]:
    fixed = problem.fixed.get((name, "cp"))
    if isinstance(fixed, int):
        return [fixed] if facts.context_parallel or fixed == 1 else []
    spec = problem.graph[name]
    tokens = problem.samples.tokens if name == problem.graph.llm.name else problem.samples.rows_of(name)
    packed = spec.packed or facts.tokens_per_row > 0  # the tokens of an encoder's media never are padded
    long = packed and int(tokens.max(initial=0)) * (facts.tokens_per_row or 1) >= LONG_SAMPLE_TOKENS
    return powers_of_two(min(most, _MAX_CONTEXT)) if facts.context_parallel and long else [1]


def _stages(facts: ModuleFacts, most: int) -> list[int]:
    return [n for n in range(1, min(most, facts.most_stages, _MAX_STAGES) + 1) if most % n == 0]


def _data_parallel(problem: Problem, name: str, lanes: int, in_node: int) -> Iterator[tuple[int, int]]:
    shards = [1, lanes, in_node]
    replicate, shard = (problem.fixed.get((name, axis)) for axis in ("dp_replicate", "dp_shard"))
    shards += [shard] if isinstance(shard, int) else [lanes // replicate] if isinstance(replicate, int) else []
    for size in dict.fromkeys(shards):
        if 0 < size <= lanes and lanes % size == 0:
            yield lanes // size, size


def _expert_degrees(facts: ModuleFacts, degrees: tuple[int, int, int, int, int]) -> Iterator[int]:
    """How many ranks may hold different experts: what divides the experts and the ranks that it is taken of."""
    yield 1
    if facts.experts is None:
        return
    own, mesh = facts.experts, ModulePlan((0, math.prod(degrees)), degrees).mesh
    ranks = mesh.axis_size(expert_axis(mesh))
    for ep in (n for n in range(2, ranks + 1) if ranks % n == 0):
        if experts_fit(experts_mesh(mesh, ep), own.count, own.inner, own.features):
            yield ep


def _agrees(problem: Problem, name: str, plan: ModulePlan) -> bool:
    for axis, size in zip((*AXES, "ep"), (*plan.degrees, plan.expert_parallel), strict=True):
        if problem.fixed.get((name, axis), size) != size:
            return False
    return problem.fixed.get((name, "activation_checkpoint"), plan.activation_checkpoint) == plan.activation_checkpoint


def rank_splits(problem: Problem, work: Mapping[str, float]) -> Iterator[tuple[int, ...]]:
    """Numbers of ranks for `problem.own`, each on its own: near shares of their work, and what nodes suggest. `work`:
    FLOPs of each over a batch."""
    own, ranks = problem.own, problem.ranks
    if len(own) < 2 or ranks < len(own):
        return
    whole = sum(work.values()) or 1.0
    unit = math.gcd(ranks, problem.machine.ranks_per_node or ranks)
    sizes: list[Sequence[int]] = []
    for name in own[:-1]:
        ideal = ranks * work[name] / whole
        each = range(1 if ranks <= _FEW_RANKS else unit, ranks, 1 if ranks <= _FEW_RANKS else unit)
        steps = sorted({*powers_of_two(ranks // 2), *each, ranks // 3, ranks // 4, ranks // 9})
        near = sorted((n for n in steps if 0 < n < ranks), key=lambda n: abs(math.log(n / max(ideal, 0.25))))
        sizes.append(near)
    found = 0
    for chosen in sorted(itertools.product(*map(range, map(len, sizes))), key=lambda places: (sum(places), places)):
        counts = [near[i] for near, i in zip(sizes, chosen, strict=True)]
        rest = ranks - sum(counts)
        layouts = module_plans(problem, own[-1], sum(counts), rest) if rest > 0 else ()
        if any(problem.global_batch_size % plan.lanes == 0 for plan in layouts):  # over whose lanes a batch divides
            yield (*counts, rest)
            found += 1
            if found == _MAX_RANK_SPLITS:
                return


def microbatch_sizes(problem: Problem, lanes: int, stages: int) -> list[int]:
    """Samples per microbatch and lane of the LLM that divide its share of the batch: powers of two where some do, with
    at least as many microbatches as stages where there are enough."""
    each, rest = divmod(problem.global_batch_size, lanes)
    if rest or not each:
        return []
    fixed = problem.fixed.get(("", "microbatch_size"))
    if isinstance(fixed, int):
        return [] if each % fixed else [fixed]
    sizes = [size for size in powers_of_two(each) if each % size == 0 and each // size <= _MAX_MICROBATCHES]
    sizes = sizes or _doubling(each)
    enough = [size for size in sizes if each // size >= min(2 * stages, each)]
    return (enough or sizes)[-4:]


def _doubling(count: int) -> list[int]:
    """Divisors of `count`, each at least twice the one before, from the last that makes too many microbatches on."""
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    first = max(sum(count // size > _MAX_MICROBATCHES for size in divisors) - 1, 0)
    found = divisors[first : first + 1]
    for size in divisors[first + 1 :]:
        found += [size] if size >= 2 * found[-1] else []
    return found


def schedules(
    problem: Problem, placement: str, modules: Mapping[str, ModulePlan]
) -> Iterator[tuple[str, dict[str, ModulePlan]]]:
    """Schedules that suit a layout, and its modules with the stages per rank that these take."""
    *encoders, llm = modules.values()
    pp = llm.degree("pp")
    beside = [own for own in encoders if own.ranks == llm.ranks]
    found = ["sequential"]
    if pp > 1 and beside:
        # Encoders on all ranks between two stages of the LLM stop its pipeline. Where they are pipelines along it, they
        # take turns with several stages of it; with one, their forwards and its backwards wait for each other.
        found = ["three_phase"] + ["interleaved"] * all(own.degree("pp") == pp for own in beside)
    elif pp > 1 or placement == "disjoint":
        found = ["1f1b"] + ["zero_bubble"] * (pp > 1) + ["interleaved"]
    fixed = problem.fixed.get(("", "schedule"))
    for name in found if fixed is None else [str(fixed)]:
        if name != "interleaved":
            yield name, dict(modules)
            continue
        # On ranks of their own encoders keep ahead with one stage per rank.
        each = [
            [own, *(in_turns(problem.facts[module], own) if own in beside or own is llm else ())]
            for module, own in modules.items()
        ]
        for chosen in itertools.product(*each):
            if chosen[-1].stages_per_rank > 1:
                yield name, dict(zip(modules, chosen, strict=True))


def in_turns(facts: ModuleFacts, plan: ModulePlan) -> Iterator[ModulePlan]:
    """A pipeline with several stages per rank: divisors of its layers per rank, each at least twice the last."""
    pp = plan.degree("pp")
    most = min(facts.most_stages // pp, _MAX_TURNS) if pp > 1 else 1
    found = {count for count in powers_of_two(most) if most % count == 0 or count == 2} | {most}
    yield from (replace(plan, stages_per_rank=count) for count in sorted(found - {1}))


def homogeneous(problem: Problem, llm: ModulePlan) -> Iterator[dict[str, ModulePlan]]:
    """All modules as the LLM lies: in its pipeline, as layers of one chain; or before a pipeline, on the ranks of its
    first stage, and behind it on those of its last. Ranks that share tokens are lanes there. What is computed again may
    differ by module."""
    reshard: Reshard = llm.reshard_after_forward if llm.degree("dp_shard") > 1 else "default"
    pp, replicate, shard, cp, tp = llm.degrees
    first, stop = llm.ranks
    for own_pp in dict.fromkeys((1, pp)):
        choices: list[list[ModulePlan]] = []
        for name in problem.own[:-1]:
            facts = problem.facts[name]
            if (facts.tensor_degrees and tp not in facts.tensor_degrees) or own_pp > facts.most_stages:
                break
            shared = facts.sequence_parallel and tp > 1 and problem.fixed.get((name, "enable_sequence_parallel"), True)
            size = (stop - first) * own_pp // pp
            own = ModulePlan(
                (stop - size, stop) if name in problem.after else (first, first + size),
                (own_pp, replicate * cp, shard, 1, tp),
                reshard=reshard if own_pp < pp else llm.reshard,
                sequence_parallel=bool(shared),
            )
            either = (replace(own, activation_checkpoint=again) for again in _CHECKPOINTS)
            choices.append([plan for plan in either if _agrees(problem, name, plan)])
        else:
            for chosen in itertools.product(*choices):
                yield dict(zip(problem.own, (*chosen, llm), strict=True))


def suits(plan: ModulePlan, llm: ModulePlan) -> bool:
    """Whether an encoder may lie so on the ranks of the LLM: its pipelines along the LLM's, its tensor parallel ranks
    among those of one stage (Optimus, arXiv 2408.03505, section 4.1)."""
    pp, tp = llm.degree("pp"), llm.degree("tp")
    return pp % plan.degree("pp") == 0 and (pp == 1 or tp % plan.degree("tp") == 0)


def with_schedules(
    problem: Problem, placement: str, choices: Iterable[Mapping[str, ModulePlan]]
) -> Iterator[LayoutPlan]:
    """Every candidate of a placement from layouts of its modules: with every microbatch size and schedule."""
    if problem.fixed.get(("", "placement"), placement) != placement:
        return
    for modules in choices:
        llm = modules[problem.graph.llm.name]
        for size in microbatch_sizes(problem, llm.lanes, llm.degree("pp")):
            for schedule, chosen in schedules(problem, placement, modules):
                plan = LayoutPlan(placement, chosen, schedule, size, after=problem.after)
                if can_run(plan):
                    yield plan


def can_run(plan: LayoutPlan) -> bool:
    """Whether a recipe may say so: zero_bubble splits backwards, for which pipelines must keep their parameters,
    bubble_fill needs an encoder on the ranks of the LLM, and so do shares of microbatches, one for each of its lanes
    there. Modules of one layout are homogeneous, not colocated."""
    if plan.placement == "colocated" and len({own.degrees for own in plan.modules.values()}) == 1:
        return False
    if plan.schedule == "interleaved" and all(own.stages_per_rank == 1 for own in plan.modules.values()):
        return False
    if any(len(own) != encoder_pipelines(plan, name) for name, own in plan.shares.items()):
        return False
    fills = plan.schedule == "bubble_fill"
    if "zero_bubble" in (plan.schedule, plan.options.inner):
        modules = [*plan.modules.values()][-1:] if fills else plan.modules.values()
        pipelines = (own for own in modules if own.degree("pp") > 1 and own.degree("dp_shard") > 1)
        if not all(own.reshard_after_forward == "never" for own in pipelines):
            return False
    return not fills or (len(plan.modules) > 1 and plan.placement != "disjoint")


def encoder_pipelines(plan: LayoutPlan, name: str) -> int:
    """Lanes of an encoder on the ranks of one lane of the LLM; 0 where one lies on ranks of several, or of none."""
    own, llm = plan.modules[name], [*plan.modules.values()][-1]
    each, rest = divmod(own.lanes, llm.lanes)
    if plan.placement != "colocated" or own.ranks != llm.ranks or rest:
        return 0
    shared = lane_affinity(ModuleSpec(name, own.mesh), ModuleSpec("llm", llm.mesh))
    return each if shared is not None and bool(((shared > 0).sum(1) == 1).all()) else 0


def samples_of_batches(problem: Problem, batches: int, share: float) -> list[MetaArrays]:
    """Some global batches, evenly from the window, of which a share of a layout's lanes takes that share."""
    size = max(round(problem.global_batch_size * share), 1)
    have, count = len(problem.typical), max(len(problem.typical) // problem.global_batch_size, 1)
    firsts = [
        b * count // batches * problem.global_batch_size if count >= batches else b * size for b in range(batches)
    ]
    return [problem.typical.take([i % have for i in range(first, first + size)]) for first in firsts]
