"""LoRA adapters as peft's directories: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hetmesh.checkpoint.saved_run import SavedRun
from hetmesh.errors import RecipeError
from hetmesh.export.export_plan import Adapted, ExportPlan
from hetmesh.files import write_json, writing
from hetmesh.models.weights.save import Stored, as_dtype, write_tensors

FOLDER = "adapter"
PREFIX = "base_model.model."
"""What peft puts before the FQN of a layer in its files."""


def write_adapters(
    run: SavedRun, top: Path, final: Path, plan: ExportPlan, dtype: torch.dtype | None, lines: list[str]
) -> None:
    """Write the adapters of each directory of `plan` into its folder `adapter`; appends a line of text each to `lines`.

    Args:
        top: where the directories are now; `final`: where they will be.

    Raises:
        RecipeError: the run has no adapters.
    """
    if not plan.adapters:
        raise RecipeError(f"{run.path}: none of the run's modules has LoRA adapters ([modules.<name>.lora])")
    for place, adapted in plan.adapters.items():
        folder = top / place / FOLDER
        with writing(folder):
            folder.mkdir()
        halves = [(layer.name, half, key) for layer in adapted for half, key in (("A", layer.a), ("B", layer.b))]
        keys = {f"{PREFIX}{name}.lora_{half}.weight": key for name, half, key in halves}
        stored = {name: Stored(run.shape(key), dtype or run.dtype(key)) for name, key in keys.items()}

        def read(
            names: Sequence[str], keys: Mapping[str, str] = keys, stored: Mapping[str, Stored] = stored
        ) -> dict[str, Tensor]:
            values = run.read(keys[name] for name in names)
            return {name: as_dtype(values[keys[name]], stored[name].dtype, name) for name in names}

        written = write_tensors(folder, stored, read, largest=1 << 62, name="adapter_model")
        write_json(folder / "adapter_config.json", _config(run, adapted, str(final / place)), indent=2)
        lines.append(
            f"{Path(place, FOLDER)}: {written.tensors} tensors of {len(adapted)} adapted layers; loads with "
            f"peft.PeftModel.from_pretrained(model, {str(final / place / FOLDER)!r})"
        )


def _config(run: SavedRun, adapted: Sequence[Adapted], base: str) -> dict[str, object]:
    keys = {each.module: run.recipe.modules[each.module].lora for each in adapted}
    (first, *_) = [lora for lora in keys.values() if lora is not None]
    ranks, alphas = {}, {}
    for each in adapted:
        lora = keys[each.module]
        assert lora is not None
        if (lora.rank, lora.alpha) != (first.rank, first.alpha):
            ranks[re.escape(each.name)] = lora.rank
            alphas[re.escape(each.name)] = lora.alpha
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "target_modules": [each.name for each in adapted],
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "task_type": None,
    }
