"""What is known and measured of a step, as values: one line of metrics.jsonl, one log line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hetmesh.balance.imbalance import BatchLoad

LINE_WIDTH = 120  # characters of a log line
_ALWAYS = ("step", "loss", "grad_norm", "lr", "samples_per_s", "tokens_per_s", "time_s")
_SAMPLES = ("samples_without_target", "samples_skipped", "media_dropped", "tokens_dropped")
_COUNTS = ("skipped_steps", "skipped_in_a_row", *_SAMPLES, "over_in_flight", "samples_by_source", "expert_placement")

Loads = Mapping[str, Mapping[str, float]]
"""By module: `balance_loss`, the mean over tokens and blocks, without its coefficient (`experts per token` where
routing is even); `max_over_mean`, the tokens of the busiest expert over the mean expert's, in the block where that is
largest; `ranks_max_over_mean`, the same of ranks along `ep`; `without_tokens`, experts of any block that got none."""


@dataclass(frozen=True)
class StepCost:
    """What every rank knows about a step from metadata.

    Attributes:
        flops: per module, forward and backward, over all its ranks; modules of unknown sizes are left out.
        module_mfu: the module's FLOPs over what its ranks could have done in the step at their peak in its dtype.
        mfu: the time that all allocated ranks would have needed at their peak, over the time that they took.
        imbalance: per module: the busiest lane's rows over the mean lane's (`hetmesh.cost.imbalance`).
    """

    flops: Mapping[str, int] = field(default_factory=dict)
    module_mfu: Mapping[str, float] = field(default_factory=dict)
    mfu: float | None = None
    imbalance: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepLoad:
    """How even the microbatches and lanes of a step were, and would have been had every sample stayed where it was
    drawn, in as many microbatches as the recipe asks for."""

    drawn: BatchLoad
    balanced: BatchLoad

    def record(self) -> dict[str, Any]:
        """What metrics.jsonl has of it: `load` by module, and `deferred_samples`."""
        load = {}
        for name, balanced in self.balanced.modules.items():
            drawn = {f"drawn_{key}": value for key, value in asdict(self.drawn.modules[name]).items()}
            load[name] = {key: round(value, 4) for key, value in (asdict(balanced) | drawn).items()}
        return {"load": load, "deferred_samples": self.balanced.deferred}


@dataclass(frozen=True)
class Measured:
    """What the ranks measured in one step, gathered.

    Attributes:
        memory_bytes: the largest peak of any rank so far: allocated on CUDA, else resident.
        active_ranks: those that hold a module.
        boundary_bytes: received over all ranks, by boundary and direction.
        wait_s: seconds that the rank which waited longest did nothing but wait for a boundary's messages.
        data: of the samples, `bytes_read` and `bytes_needed` over all ranks, `bytes_read_most` by any rank,
            `frames_decoded` and `frames_needed` of videos, over all ranks; `load_s`, the seconds that those of the rank
            whose samples took longest took to prepare, by all of its processes together; and `wait_s`, the seconds that
            the rank which waited longest for them did.
        experts: how even routing was, by module.
        lending: of the ranks that may lend themselves to encoders, the mean's seconds in collectives of tensor
            parallelism (`gap_s`), and those of them in which it did (`lent_s`).
    """

    memory_bytes: int
    active_ranks: int
    allocated_ranks: int
    boundary_bytes: Mapping[str, Mapping[str, int]]
    wait_s: Mapping[str, float]
    data: Mapping[str, float] = field(default_factory=dict)
    experts: Loads = field(default_factory=dict)
    lending: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl.

    Attributes:
        step: 1 for the first optimizer step.
        loss: cross-entropy per valid target token of the global batch.
        grad_norm: global 2-norm over all modules before clipping, replicas counted once.
        lr: `[optimizer] lr` times the schedule's factor; modules with a rate of their own scale alike.
        samples_per_s, tokens_per_s: of the whole job; tokens without padding.
        cost: FLOPs, MFU and imbalance; empty on ranks other than 0.
        measured: memory, bytes and waits, of the steps that are logged.
        load: how even microbatches and lanes were, of the steps that are logged; None on ranks other than 0.
        skipped: the step was left out, since loss or gradient were not finite.
        skipped_steps: so far, this one included; skipped_in_a_row: the last ones.
        samples_without_target, samples_skipped: of the global batch, without a target or unreadable; they add no loss.
        samples_by_source: of the global batch, where they come from a mixture.
        media_dropped, tokens_dropped: what of the global batch did not fit into `seq_len`.
        expert_placement: by module, experts that changed their rank after this step, how even ranks were and are, and
            the tokens of each expert since the last time.
        over_in_flight: microbatches beyond `bubble_fill_in_flight` that encoders might hold in this step.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    samples_per_s: float
    tokens_per_s: float
    time_s: float
    cost: StepCost = field(default_factory=StepCost)
    measured: Measured | None = None
    skipped: bool = False
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    samples_without_target: int = 0
    samples_skipped: int = 0
    media_dropped: int = 0
    tokens_dropped: int = 0
    over_in_flight: int = 0
    samples_by_source: Mapping[str, int] = field(default_factory=dict)
    load: StepLoad | None = None
    expert_placement: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The line of metrics.jsonl; what is unknown is left out, and so are counts of 0."""
        known = {key: getattr(self, key) for key in _ALWAYS}
        counts = {key: value for key in _COUNTS if (value := getattr(self, key))}
        more = asdict(self.cost) | (asdict(self.measured) if self.measured else {})
        more |= self.load.record() if self.load else {}
        return known | counts | {key: value for key, value in more.items() if value not in (None, {})}

    def line(self, steps: int, left_s: float | None = None) -> str:
        """The log line, for people: what fits into `LINE_WIDTH` characters, which for any usual numbers is everything;
        `steps` of the whole run, of which `left_s` seconds are left, as far as known."""
        shown = [
            f"step {self.step}/{steps}",
            f"loss {short(self.loss, 4)}" + (" (skipped)" if self.skipped else ""),
            f"grad norm {short(self.grad_norm, 3)}",
            f"lr {self.lr:.3g}",
            f"{short(self.tokens_per_s, 0, 1e9)} tokens/s",
            f"{self.time_s:.3g} s",
        ]
        if left_s is not None:
            shown.append(f"ETA {duration(left_s)}")
        while len(line := "  ".join(shown)) > LINE_WIDTH:
            shown.pop()
        return line

    def details(self) -> Iterator[str]:
        """What `[metrics] verbose` adds to the log line, part by part."""
        yield f"{self.samples_per_s:.0f} samples/s"
        if self.cost.mfu is not None:
            yield f"MFU {self.cost.mfu:.1%}"
        if self.measured is not None:
            yield f"memory {amount(self.measured.memory_bytes)}B"
            yield f"{self.measured.active_ranks} of {self.measured.allocated_ranks} ranks active"
        for name, uneven in self.cost.imbalance.items():
            shown = [name]
            if name in self.cost.flops:
                shown.append(f"{amount(self.cost.flops[name])}FLOP")
            if name in self.cost.module_mfu:
                shown.append(f"MFU {self.cost.module_mfu[name]:.1%}")
            shown.append(f"imbalance {uneven:.2f}")
            if self.load is not None and name in self.load.balanced.modules:
                now, drawn = (load.modules[name].max_over_mean for load in (self.load.balanced, self.load.drawn))
                shown.append(f"largest load {now:.2f} ({drawn:.2f} as drawn)")
            yield " ".join(shown)
        for name, sizes in self.measured.boundary_bytes.items() if self.measured else ():
            assert self.measured is not None
            yield f"{name} {amount(sum(sizes.values()))}B waited {1000 * self.measured.wait_s[name]:.0f} ms"
        for name, load in self.measured.experts.items() if self.measured else ():
            yield (
                f"experts of {name} balance loss {load['balance_loss']:.3f} max/mean {load['max_over_mean']:.2f} of "
                f"ranks {load['ranks_max_over_mean']:.2f} {load['without_tokens']:.0f} without tokens"
            )
        if self.measured is not None and (lending := self.measured.lending):
            gap_s, lent_s = lending["gap_s"], lending["lent_s"]
            yield f"{lent_s / gap_s:.0%} of {1000 * gap_s:.0f} ms in collectives lent to encoders"
        if self.media_dropped or self.tokens_dropped:
            yield f"cut by seq_len: {self.tokens_dropped} tokens and {self.media_dropped} media items"
        if self.samples_by_source:
            yield "samples of " + ", ".join(f"{name} {count}" for name, count in self.samples_by_source.items())
        if self.over_in_flight:
            yield f"bubble_fill_in_flight exceeded by {self.over_in_flight}"
        if self.samples_skipped:
            yield f"{self.samples_skipped} samples skipped"
        if self.measured is not None and self.measured.data:
            data = self.measured.data
            yield (
                f"samples read {amount(data['bytes_read'])}B of {amount(data['bytes_needed'])}B needed prepared in "
                f"{1000 * data.get('load_s', 0):.0f} ms waited {1000 * data['wait_s']:.0f} ms"
            )
            if frames := data.get("frames_decoded"):
                yield f"{frames:.0f} frames decoded of {data['frames_needed']:.0f} needed"


def run_summary(
    steps: int,
    ranks: int,
    seconds: float,
    *,
    loss: float | None,
    cut_short: bool,
    skipped_steps: int,
    samples_skipped: int,
    evaluated: Mapping[str, Any],
) -> dict[str, Any]:
    """What summary.json says of training; counts of 0 are left out.

    Args:
        steps: that are done, those before a resume included.
        seconds: that this start has trained.
        cut_short: `on_step` has ended the run before its last step.
    """
    summary: dict[str, Any] = {"steps": steps, "ranks": ranks, "train_seconds": round(seconds, 3)}
    if loss is not None:
        summary["loss"] = loss
    if cut_short:
        summary["stopped_by_on_step"] = True
    counts = {"skipped_steps": skipped_steps, "samples_skipped": samples_skipped}
    return {**summary, **{name: count for name, count in counts.items() if count}, **evaluated}


def amount(value: float) -> str:
    """A number with a decimal prefix: `amount(12_345_678)` is `"12.3 M"`."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 999.5:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} E"


def short(value: float, decimals: int, limit: float = 1e4) -> str:
    """A number in a few characters: with `decimals` below `limit`, beyond that with a power of ten."""
    return f"{value:.{decimals}f}" if abs(value) < limit else f"{value:.3g}"


def duration(seconds: float) -> str:
    """A time as a clock shows it: `duration(3725)` is `"1:02:05"`, `duration(200_000)` is `"2d 7:33"`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of nested tables as one table, keys joined by `/`, as TensorBoard and Weights & Biases group them."""
    out: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{key}/")
        elif not isinstance(value, Sequence):
            out[f"{prefix}{key}"] = value
    return out
