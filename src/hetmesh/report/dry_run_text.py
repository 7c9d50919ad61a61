"""A dry run as text and as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from hetmesh.dryrun.dry_run import DryRun, DryRuns, RankGroup
from hetmesh.formatting import ranks_text
from hetmesh.report.text import bytes_text, room
from hetmesh.runtime.live_bytes import SpanBytes

NOT_MODELLED = "not modelled: fragments of the allocator, workspaces inside kernels (cuBLAS, attention), time"
_BESIDE = ("communicators", "context")
_DIRECTIONS = {"device_to_host": "device to host", "host_to_device": "host to device"}


def dry_run_lines(runs: DryRuns) -> Iterator[str]:
    """In short lines, with whether what was run fits the machine."""
    for group in runs.groups:
        yield from _group(group)
        yield ""
    yield room(runs.machine, runs.memory_bytes, runs.peak, "at most")
    yield f"  of which {bytes_text(runs.fullest.beside)} are the machine's estimate for context and communicators"
    yield NOT_MODELLED


def _group(group: RankGroup) -> Iterator[str]:
    run = group.run
    of = f", one of the ranks {ranks_text(group.ranks)}, which hold the same stages" if len(group.ranks) > 1 else ""
    yield f"rank {run.rank}{of}"
    yield f"one step of {run.microbatches} microbatches, run in {run.seconds:.1f} s on a fake device"
    state, first = bytes_text(run.state), bytes_text(run.first_checks)
    yield f"built      {bytes_text(run.built)}, {bytes_text(run.built_peak)} at most while it was built"
    yield f"after it   {bytes_text(run.live)} alive: parameters, buffers and optimizer state are {state}"
    yield f"peak       {bytes_text(run.peak)} in a step, {first} while replicas are compared in the first one"
    sign = "more" if group.predicted.tensors >= run.peak else "less"
    parts = {name: size for name, size in group.predicted.parts.items() if size and name not in _BESIDE}
    largest = sorted(parts, key=lambda name: -parts[name])[:3]
    most_of_it = ", ".join(f"{name} {bytes_text(parts[name])}" for name in largest)
    error = f"{100 * group.memory_error:.0f}% {sign}"
    yield f"explained  {bytes_text(group.predicted.tensors)}, {error}: most of it {most_of_it}"
    yield from ("", "bytes alive by kind of action        before      peak     after")
    kinds: dict[str, list[SpanBytes]] = {}  # of actions, and their targets, over all microbatches
    for span in run.actions:
        action: Any = span.label
        kinds.setdefault(f"{action.kind.value} {action.target}", []).append(span)
    for name, spans in kinds.items():
        most = max(spans, key=lambda span: span.peak)
        yield f"  {name:<32} {bytes_text(most.before):>9} {bytes_text(most.peak):>9} {bytes_text(most.after):>9}"
    yield from ("", "work by module            kernels    TFLOPs  collectives     bytes")
    for name, work in sorted(run.work.items(), key=lambda item: -item[1].flops):
        computed = f"{name or '(outside actions)':<22} {work.kernels:>8,} {work.flops / 1e12:>9.2f}"
        yield f"  {computed} {work.collectives:>12,} {bytes_text(work.collective_bytes):>9}"
    if run.traffic:
        yield from ("", "messages by boundary                    number      sent  received")
    for edge in run.traffic:
        yield f"  {edge.edge:<36} {edge.messages:>7,} {bytes_text(edge.sent):>9} {bytes_text(edge.received):>9}"
    yield from ("", *_waits(run))


def _waits(run: DryRun) -> Iterator[str]:
    for direction, words in _DIRECTIONS.items():
        within = run.waiting(direction, within=True)
        yield f"the host waits, {words}: {run.waiting(direction)} times a step, {within} of them in actions"
        lines: Counter[tuple[str, str, str]] = Counter()
        for wait, count in run.waits:
            if wait.direction == direction:
                lines[wait.line or "torch's backward", wait.model, wait.what] += count
        for (line, model, what), count in lines.most_common():
            yield f"  {count:>5} {line} ({what})" + (f" for {model}" if model else "")
    yield f"waits with a timeout, which hold up the host on NCCL: {run.timed_waits}"


def dry_run_json(runs: DryRuns) -> dict[str, Any]:
    """As plain values; bytes are plain numbers."""
    plain = {key: getattr(runs, key) for key in ("machine", "memory_bytes", "peak")}
    plain["fits"] = runs.peak <= runs.memory_bytes if runs.memory_bytes else None
    return plain | {"groups": [_group_json(group, group.run) for group in runs.groups]}


def _group_json(group: RankGroup, run: DryRun) -> dict[str, Any]:
    return {
        "ranks": group.ranks,
        "predicted": group.predicted.tensors,
        "predicted_parts": group.predicted.parts,
        "memory_error": group.memory_error,
        **{key: value for key, value in vars(run).items() if isinstance(value, (int, float))},
        "actions": [{**asdict(span), "label": str(span.label)} for span in run.actions],
        "work": {name: asdict(work) for name, work in run.work.items()},
        "waits": [{**asdict(wait), "during": str(wait.during), "count": count} for wait, count in run.waits],
        "traffic": [asdict(edge) for edge in run.traffic],
    }
