"""What is known and measured of a step, as values: one line of metrics.jsonl, one log line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hetmesh.balance.imbalance import BatchLoad

LINE_WIDTH = 120  # characters of a log line
_ALWAYS = ("step", "loss", "grad_norm", "lr", "samples_per_s", "tokens_per_s", "time_s")
_SAMPLES = ("samples_without_target", "samples_skipped", "media_dropped", "tokens_dropped")
_COUNTS = ("skipped_steps", "skipped_in_a_row", *_SAMPLES, "over_in_flight", "samples_by_source")
_TABLES = ("losses", "expert_placement")

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
        loss: per valid target token of the global batch; of several losses their weighted sum.
        losses: of several, each by its module, per unit that it counts; without those of which the batch has none.
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
    losses: Mapping[str, float] = field(default_factory=dict)
    load: StepLoad | None = None
    expert_placement: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The line of metrics.jsonl; what is unknown is left out, and so are counts of 0."""
        known = {key: getattr(self, key) for key in _ALWAYS}
        counts = {key: value for key in (*_COUNTS, *_TABLES) if (value := getattr(self, key))}
        more = asdict(self.cost) | (asdict(self.measured) if self.measured else {})
        more |= self.load.record() if self.load else {}
        return known | counts | {key: value for key, value in more.items() if value not in (None, {})}

    def line(self, steps: int, left_s: float | None = None) -> str:
        """The log line, for people: what fits into `LINE_WIDTH` characters, which for any usual numbers is everything;
        `steps` of the whole run, of which `left_s` seconds are left, as far as known."""
        shown = [
            f"step {self.step}/{steps}",
            f"loss {short(self.loss, 4)}" + (" (skipped)" if self.skipped else ""),
            *(f"{name} {short(loss, 4)}" for name, loss in self.losses.items()),
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
        """What `[metrics] verbose` adds to the log line: all other figures, under the keys that loggers have."""
        for key, value in flat(self.record()).items():
            if key == "samples_per_s" or key not in _ALWAYS:
                yield f"{key} {amount(value).strip()}"


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
