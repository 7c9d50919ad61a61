"""What `hetmesh balance` shows, as values: how large samples are, what balancers make of batches, what `auto` picks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hetmesh.balance.imbalance import ModuleLoad

MAX_BARS = 10
WIDE_RATIO = 6  # times the mean from which on the largest value has its bars grow by doubling


@dataclass(frozen=True)
class Histogram:
    """How many of some numbers lie between `edges[i]` and `edges[i + 1]`; the last bar has its upper edge too."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, values: np.ndarray, largest: float) -> Histogram:
        """Of values from 0 to `largest`, in equally wide bars."""
        return cls._between(values, np.arange(MAX_BARS + 1) * ((largest or 1.0) / MAX_BARS))

    @classmethod
    def of_counts(cls, values: np.ndarray) -> Histogram:
        """Of whole numbers from 0 on, in bars between whole numbers; where a few are very large, each twice as wide as
        the one before."""
        largest = max(int(values.max(initial=0)), 1)
        if largest > WIDE_RATIO * max(int(values.sum()) / max(len(values), 1), 1.0):
            edges = -(-largest // 2 ** np.arange(MAX_BARS)[::-1])
            return cls._between(values, np.unique([0, *edges]))
        step = -(-largest // MAX_BARS)
        return cls._between(values, np.arange(0, largest + step, step))

    @classmethod
    def _between(cls, values: np.ndarray, edges: np.ndarray) -> Histogram:
        counts, _ = np.histogram(np.minimum(values, edges[-1]), edges)  # a quotient may round beyond the last edge
        return cls(tuple(edges.tolist()), tuple(counts.tolist()))


@dataclass(frozen=True)
class ModuleSizes:
    """One module that is balanced, with those that go along with it.

    Attributes:
        followers: modules that take the same samples in the same places.
        cap: `balance.max_tokens` of one microbatch and lane.
        unit: what its tokens are: `"rows"` of an encoder, `"tokens"` of the LLM.
        mean, largest: tokens of one sample.
        work: forward FLOPs per rank of the mean microbatch on one lane.
        samples: of the tokens of samples.
        loads: by policy, of the work of one microbatch on one lane over the mean one.
    """

    name: str
    followers: tuple[str, ...]
    lanes: int
    microbatches: int
    cap: int | None
    unit: str
    mean: float
    largest: int
    work: float
    samples: Histogram
    loads: Mapping[str, Histogram]


@dataclass(frozen=True)
class BalancerResult:
    """What one balancer makes of the batches; numbers are means over them.

    Attributes:
        name: the policy, and the keys that differ from the recipe's.
        recipe: whether it is what the recipe trains with.
        deferred: samples of a batch that the LLM takes late.
        seconds: of the simulated step; gain: throughput over `none`; milliseconds: CPU time of one assignment.
        problem: why there is no result; the numbers then mean nothing.
    """

    name: str
    recipe: bool
    modules: Mapping[str, ModuleLoad]
    deferred: float
    seconds: float
    gain: float
    milliseconds: float
    problem: str = ""


@dataclass(frozen=True)
class Candidate:
    """What `auto` compared, for one batch: the length of the step by which it chose, of which the first has 1 (None: it
    did not compare), and the seconds of the simulated step."""

    name: str
    score: float | None
    seconds: float
    chosen: bool


@dataclass(frozen=True)
class ExpertUse:
    """The experts of one module.

    Attributes:
        blocks, count, chosen: its blocks with experts, experts of each, experts of each token.
        ranks: along `ep`, which share them; tokens: of the mean expert of a block in a step.
        steps: logged steps of the run, 0 for none; `last` is the number of the last one. Without any, the rest says of
            even routing what holds for it.
        max_over_mean, last_max_over_mean: tokens of the busiest expert over the mean expert's, in the block where that
            is largest: mean of these steps, and in the last.
        without_tokens: experts that got none in the last step, of all blocks.
    """

    name: str
    blocks: int
    count: int
    chosen: int
    ranks: int
    tokens: float
    steps: int = 0
    last: int = 0
    max_over_mean: float = 1.0
    last_max_over_mean: float = 1.0
    without_tokens: int = 0


@dataclass(frozen=True)
class BalanceView:
    """What balancing does for the `batches` of `samples` each that were drawn: schedule and machine are those of the
    simulated step, modules those that are balanced, the LLM last; `none` is the first of balancers; choices are what
    `auto` compared per batch."""

    description: str
    source: str
    batches: int
    samples: int
    schedule: str
    machine: str
    modules: tuple[ModuleSizes, ...]
    balancers: tuple[BalancerResult, ...]
    choices: tuple[tuple[Candidate, ...], ...]
    experts: tuple[ExpertUse, ...]
    notes: tuple[str, ...]
