"""What tests of dry runs do in a process of its own."""

from __future__ import annotations

import contextlib
import gc
import io
import os
from pathlib import Path

import torch

from hetmesh.boundary import World
from hetmesh.cli import main
from hetmesh.dryrun.dry_run import DryRun, DryRuns, dry_run, dry_runs
from hetmesh.dryrun.fake_device import fake_device
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve

FOLDER = Path(__file__).parents[2] / "recipes"


def dry(name: str, rank: int, *overrides: str) -> tuple[DryRun, int]:
    """The dry run of a rank, and the bytes that its attention keeps in block masks."""
    from hetmesh.attention.flex import _block_masks

    torch.set_num_threads(1)
    fake_device()  # before the first backward, as `dry_runs` does
    _block_masks.clear()
    run = dry_run(resolve(load_recipe(FOLDER / f"{name}.toml", overrides)), rank)
    return run, sum(map(len, _block_masks.values())) * 2**20


def grouped(name: str, *overrides: str) -> DryRuns:
    """The dry run of all ranks."""
    return dry_runs(load_recipe(FOLDER / f"{name}.toml", overrides), None, machine="h100")


def left_behind() -> dict[str, object]:
    """What is not as it was before a dry run."""

    def state() -> dict[str, object]:
        gc.collect()
        return {
            "default device": torch.get_default_device(),
            "random state": torch.get_rng_state().tolist(),
            "accelerators": (torch.accelerator.is_available(), torch.accelerator.device_count()),
            "accelerator": torch.accelerator.current_accelerator(check_available=True),
            "process group": torch.distributed.is_initialized(),
            "dtensor random": torch.distributed.tensor._random._rng_tracker,
            "dispatch modes": torch._C._len_torch_dispatch_stack(),
            "threads": torch.get_num_threads(),
            "environment": dict(os.environ),
            "resize": torch.UntypedStorage.resize_,
            "exits": sum(isinstance(each, World) for each in gc.get_objects()),
        }

    import torch.distributed.tensor._random

    before = state()
    dry_run(resolve(load_recipe(FOLDER / "digits_fsdp.toml")), 0)
    return {key: (before[key], value) for key, value in state().items() if before[key] != value}


def printed(arguments: list[str]) -> tuple[int, str]:
    """What the command says, and its status."""
    os.chdir(FOLDER.parent)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main(arguments)
    return status, out.getvalue()
