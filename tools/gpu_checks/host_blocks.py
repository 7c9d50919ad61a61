"""Nothing in a profiler's trace holds the host up between the first and the last action of a step.

On CUDA three recipes train on four ranks, and one step of each is traced. Waits are named by function from the trace,
and by source line where torch's own debug mode for synchronisations sees them. On the fake accelerator a dry run counts
them.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from gpu_checks.found import Found, Place
from gpu_checks.ranks import run_ranks
from gpu_checks.trace import Block, Span, blocks, launches, prepared, reads
from hetmesh.boundary import World
from hetmesh.dryrun.dry_run import dry_run
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.training.trainer import Trainer

RECIPES = Path(__file__).parents[2] / "recipes"
TRACED = {"cuda": ("digits", "digits_fsdp", "digits_cp_pp"), "cpu": ("digits",)}
RANKS, WARM_UP = 4, 3
STEP, ACTIONS = "gpu_check.step", "gpu_check.actions"
PER_STEP = 2
"""Reads of the device that a whole step may have: its loss and its norm."""
DRY = (("digits", 0), ("digits", 2), ("digits_fsdp", 0), ("digits_cp_pp", 0), ("digits_cp_pp", 3))
"""Recipes and ranks for dry runs: an encoder, an LLM, sharded modules, the first and last stage."""
ALLOWED: dict[str, str] = {}
"""Part of a place -> why the host may wait there."""


def run(place: Place) -> Found:
    """The waits of each recipe, over all ranks."""
    if place.device == "fake":
        return dry_runs()
    found: dict[str, Any] = {}
    for name in TRACED[place.device]:
        found[name] = _together(run_ranks(traced, RANKS, place, name, timeout=280))
        told = "{in_actions} waits between actions, {reads_in_actions} reads on the host".format(**found[name])
        print(f"{name}: {told}", flush=True)
        for block in found[name]["blocks"]:
            print("  {call} x {count}: {where}".format(**block), flush=True)
    figures = {
        "recipes": found,
        "allowed": ALLOWED,
        "blocks_in_actions": sum(each["in_actions"] for each in found.values()),
        "blocks_per_step": max(each["in_step"] for each in found.values()),
    }
    if not place.on_gpu:
        why = "a CPU has no queue: reads on the host between actions are shown, and most are of the host's own tensors"
        return Found(figures, {}, {"waits for a device": why})
    return Found(figures, {"blocks_in_actions": 0, "blocks_per_step": PER_STEP})


def dry_runs() -> Found:
    """Waits that a dry run counts, by source line."""
    found: dict[str, Any] = {}
    for name, rank in DRY:
        run = dry_run(resolve(load_recipe(RECIPES / f"{name}.toml", [])), rank)
        lines: Counter[str] = Counter()
        for wait, count in run.waits:
            lines[f"{wait.direction}: {wait.line} {wait.model}".rstrip()] += count
        found[f"{name}, rank {rank}"] = {
            "reads_per_step": run.waiting("device_to_host"),
            "reads_in_actions": run.waiting("device_to_host", within=True),
            "copies_in_actions": run.waiting("host_to_device", within=True),
            "timed_waits": run.timed_waits,
            "lines": dict(lines),
        }
        told = "{reads_per_step} reads a step, {reads_in_actions} in actions, {copies_in_actions} waiting copies there"
        print(f"{name}, rank {rank}: " + told.format(**found[f"{name}, rank {rank}"]), flush=True)
        for line, count in lines.items():
            print(f"  {count} {line}", flush=True)
    most = {key: max(each[key] for each in found.values()) for key in next(iter(found.values())) if key != "lines"}
    bounds = {"reads_per_step": PER_STEP, **dict.fromkeys(("reads_in_actions", "copies_in_actions", "timed_waits"), 0)}
    return Found({"recipes": found, **most}, bounds, {"a trace": "nothing runs: a dry run counts instead"})


def _together(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all ranks: those between actions add up, those of a whole step are the worst rank's."""
    merged: Counter[tuple[str, str]] = Counter()
    for rank in ranks:
        merged.update({(b.call, b.where): b.count for b in rank["blocks"]})
    lines: Counter[str] = Counter()
    for rank in ranks:
        lines.update(rank["lines"])
    named = [asdict(Block(call, where, count)) for (call, where), count in sorted(merged.items())]
    return {
        "in_actions": sum(b["count"] for b in named if not allowed(b["where"])),
        "in_step": max(rank["in_step"] for rank in ranks),
        "blocks": named,
        "lines": dict(lines),
        "reads_in_actions": sum(b.count for rank in ranks for b in rank["reads"]),
        "reads": sorted({b.where for rank in ranks for b in rank["reads"]}),
        "allocations": max(rank["prepared"] for rank in ranks),
    }


def allowed(where: str) -> bool:
    """Whether the host may wait there."""
    return any(part in where for part in ALLOWED)


def traced(world: World, name: str) -> dict[str, Any]:
    """One rank: train, and trace a step whose memory is warm."""
    with tempfile.TemporaryDirectory() as folder:
        keys = (f"--job.dump_folder={folder}", "--metrics.enable_tensorboard=false", "--training.local_batch_size=32")
        trainer = Trainer(resolve(load_recipe(RECIPES / f"{name}.toml", keys)), world)
        lines: Counter[str] = Counter()
        try:
            for _ in range(WARM_UP):
                trainer.train_step()
            with _around_actions(trainer, lambda: naming_lines(lines)):
                trainer.train_step()
            on_device = [ProfilerActivity.CUDA] if world.device.type == "cuda" else []
            # Python functions are in the trace only if it is asked to be verbose.
            stacks: dict[str, Any] = {"with_stack": True, "experimental_config": _ExperimentalConfig(verbose=True)}
            with profile(activities=[ProfilerActivity.CPU, *on_device], **stacks) as profiler:
                with _around_actions(trainer, lambda: record_function(ACTIONS)), record_function(STEP):
                    trainer.train_step()
                world.accelerator.synchronize()
        finally:
            trainer.upcoming.close()
            trainer.reporter.close()
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    actions = Span.of(events, ACTIONS)
    if on_device and not launches(events, actions):
        raise RuntimeError("the profiler saw no kernel of the step: may this process use CUPTI?")
    return {
        "blocks": blocks(events, actions),
        "in_step": sum(b.count for b in blocks(events, Span.of(events, STEP)) if not allowed(b.where)),
        "reads": reads(events, actions),
        "prepared": prepared(events, actions),
        "lines": lines,
    }


@contextmanager
def _around_actions(trainer: Trainer, entering: Any) -> Iterator[None]:
    """Enter `entering()` around what the runtime does of a step: from its first action to the last gradient's sum."""
    runtime = trainer.job.runtime
    inner = runtime.run

    def run(*args: Any, **options: Any) -> Any:
        with entering():
            return inner(*args, **options)

    runtime.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        del runtime.run


@contextmanager
def naming_lines(lines: Counter[str]) -> Iterator[None]:
    """Count source lines that wait for a CUDA device, as far as torch knows: not NCCL's waits, nor those of backwards,
    which it tells of later."""
    if not torch.cuda.is_available():
        yield
        return

    def note(message: Any, *_: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            lines[source_line()] += 1

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def source_line() -> str:
    """The innermost line of hetmesh that is running, else of what calls this."""
    frames = [f for f in traceback.extract_stack(sys._getframe(1)) if f.filename != __file__]
    ours = [f for f in frames if "/hetmesh/" in f.filename]
    frame = (ours or frames)[-1]
    return f"{frame.filename[max(frame.filename.rfind('hetmesh/'), 0) :]}:{frame.lineno} {frame.name}: {frame.line}"
