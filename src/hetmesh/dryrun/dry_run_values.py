"""What a dry run finds out, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetmesh.dryrun.device_work import WorkCount
from hetmesh.dryrun.host_waits import HostWait
from hetmesh.runtime.live_bytes import SpanBytes
from hetmesh.simulate import RankMemory


@dataclass(frozen=True)
class EdgeTraffic:
    """What one rank sent and received along one boundary in one direction.

    Attributes:
        edge: the boundary and `forward` or `backward`.
        messages: how many.
        sent, received: bytes.
    """

    edge: str
    messages: int
    sent: int
    received: int


@dataclass(frozen=True)
class DryRun:
    """What a step of one rank did. Bytes are of tensors on the device.

    Attributes:
        rank: whose step it was.
        microbatches: of the step.
        built, built_peak: alive behind the building of its modules, and the most while they were built.
        state: parameters, buffers and optimizer state.
        live: alive behind the step; more than `state` is what a step leaves behind.
        peak: the most in a step.
        first_checks: the most while the gradients of the first step are compared between replicas.
        actions: alive before and after each action, and the most in it; the first is what is before all actions, the
            last what is behind them (sums, norm, optimizer).
        work: per module, and `""` for what is in no action.
        waits: where the host waits for the device in a step.
        timed_waits: waits with a timeout, for which NCCL holds up the host.
        traffic: messages by boundary.
        build_seconds, seconds: that building and the step took here.
    """

    rank: int
    microbatches: int
    built: int
    built_peak: int
    state: int
    live: int
    peak: int
    first_checks: int
    actions: tuple[SpanBytes, ...]
    work: Mapping[str, WorkCount]
    waits: tuple[tuple[HostWait, int], ...]
    timed_waits: int
    traffic: tuple[EdgeTraffic, ...]
    build_seconds: float
    seconds: float

    def waiting(self, direction: str, *, within: bool = False) -> int:
        """How often the host waits in a step.

        Args:
            direction: `device_to_host` or `host_to_device`.
            within: only between the begin of the first action and the end of the last.
        """
        return sum(n for w, n in self.waits if w.direction == direction and (w.within or not within))


@dataclass(frozen=True)
class RankGroup:
    """Ranks that do the same, one of which was run.

    Attributes:
        ranks: they hold the same stages; the one that was run has most to do in this batch.
        run: its step.
        predicted: what `hetmesh explain` would say of the rank that was run, in this batch.
    """

    ranks: tuple[int, ...]
    run: DryRun
    predicted: RankMemory

    @property
    def memory_error(self) -> float:
        """By which share of the peak the prediction is off."""
        return abs(self.predicted.tensors - self.run.peak) / self.run.peak

    @property
    def peak(self) -> int:
        """The most that the rank ever has in tensors."""
        return max(self.run.peak, self.run.first_checks, self.run.built_peak)

    @property
    def beside(self) -> int:
        """What a device holds beside tensors, as far as the machine says: its context and the rank's communicators."""
        return self.predicted.communicators + self.predicted.context


@dataclass(frozen=True)
class DryRuns:
    """A dry run of some ranks of a recipe.

    Attributes:
        groups: what was run.
        machine: whose memory counts.
        memory_bytes: of its device; 0: unknown.
    """

    groups: tuple[RankGroup, ...]
    machine: str
    memory_bytes: int

    @property
    def fullest(self) -> RankGroup:
        """Those that hold most."""
        return max(self.groups, key=lambda group: group.peak + group.beside)

    @property
    def peak(self) -> int:
        """The most that any of them holds."""
        return self.fullest.peak + self.fullest.beside
