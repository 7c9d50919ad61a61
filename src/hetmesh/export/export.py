"""Export: a checkpoint of any layout as directories that transformers loads, read and written in one process."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from hetmesh.checkpoint.saved_run import SavedRun
from hetmesh.errors import OutputError, RecipeError
from hetmesh.export.directory_files import MADE_FROM, copy_files, is_made_from, made_from, prepared_otherwise, put_aside
from hetmesh.export.export_plan import Adapted, Directory, ExportPlan, Origin, Regrouped, export_plan
from hetmesh.files import write_json, writing
from hetmesh.formatting import counted
from hetmesh.models.weights.pretrained import TensorEntry
from hetmesh.models.weights.save import LARGEST_FILE, Stored, Written, as_dtype, write_config, write_tensors
from hetmesh.models.weights.stored_form import StoredBlock
from hetmesh.records.checkpoint_folders import PARTIAL
from hetmesh.records.dump_folder import RECIPE_FILE
from hetmesh.resolve.resolved import ResolvedRecipe

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What weights may be converted to."""

AS_DIRECTORY = "directory"
"""In place of a dtype: each tensor has that of the directory which the modules come from."""

ADAPTER_FOLDER = "adapter"

Dtype = torch.dtype | Literal["directory"] | None


def export(
    run: SavedRun, folder: Path, *, dtype: Dtype = None, merge: bool = True, largest: int = LARGEST_FILE
) -> list[str]:
    """Write the weights of `run` to `folder`, which gets its name when it is complete.

    Args:
        dtype: of the weights; `"directory"`: of each as in the directory that all modules come from; None: as trained.
        merge: add LoRA adapters to the weights; else they are peft's directory `adapter` beside the weights.
        largest: bytes of a file.

    Returns:
        What was written, as lines of text.

    Raises:
        OutputError: `folder` is not empty, cannot be written or read back equal, or values are too large for `dtype`.
        CheckpointError: the checkpoint cannot be read, has changed, or has other tensors than the recipe's modules.
        RecipeError: the recipe's directories or data are gone; `"directory"`, and the modules do not all come from one.
    """
    folder = folder.expanduser().absolute()
    with writing(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OutputError(f"{folder} already exists; choose a new or empty folder")
    plan = export_plan(run, merge=merge)
    origin = made_from(run, dtype, merge=merge)
    if dtype == AS_DIRECTORY and any(directory.place or directory.source is None for directory in plan.directories):
        raise RecipeError("--dtype directory: the run's modules do not all come from one directory; name a dtype")
    partial, lines = folder.with_name(folder.name + PARTIAL), list[str]()
    with writing(partial):
        shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
        partial.mkdir(parents=True)
    try:
        lines += [plan.note] if plan.note else []
        for directory in plan.directories:
            lines += _write(run, partial, directory, dtype, largest)
        if not merge:
            lines += _write_adapters(run, partial, folder, plan, dtype if isinstance(dtype, torch.dtype) else None)
        if len(plan.directories) > 1 or plan.directories[0].place:
            # The recipe says how the modules of several directories belong together.
            write_json(partial / RECIPE_FILE, run.recipe.model_dump(mode="json", by_alias=True), indent=2)
        write_json(partial / MADE_FROM, origin, indent=2)
        with writing(folder):
            if folder.is_dir():
                folder.rmdir()  # empty, or this is an error
            partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return lines


def export_last(resolved: ResolvedRecipe, path: Path) -> list[str]:
    """Export the checkpoint at `path`, a run's last one, to `{path}-hf`, as `[checkpoint]` says.

    An export of the same checkpoint that exists already (of the run before it was resumed) stays; one of anything else
    is renamed. Returns what was done, as lines of text.
    """
    folder = path.with_name(f"{path.name}-hf")
    name = resolved.recipe.checkpoint.export_dtype
    run, dtype = SavedRun(resolved.recipe, path, resolved), None if name is None else DTYPES[name]
    aside, lines = None, list[str]()
    if folder.is_dir() and any(folder.iterdir()):
        if is_made_from(folder, made_from(run, dtype, merge=True)):
            return [f"{folder} is there already, of this checkpoint, and stays as it is"]
        aside = put_aside(folder)
        lines = [f"{folder} was made from another checkpoint, or otherwise; it is {aside} now"]
    try:
        lines += export(run, folder, dtype=dtype)
    except BaseException:
        if aside is not None and not folder.exists():
            with suppress(OSError):
                aside.rename(folder)
        raise
    return [*lines, f"exported to {folder}"]


def _write(run: SavedRun, top: Path, directory: Directory, dtype: Dtype, largest: int) -> Iterator[str]:
    place = top / directory.place
    with writing(place):
        place.mkdir(exist_ok=True)
    dtypes = {name: dtype if isinstance(dtype, torch.dtype) else None for name in directory.tensors}
    if dtype == AS_DIRECTORY and directory.source is not None:
        dtypes |= {name: _dtype_of(entry) for name, entry in directory.source.tensors.items()}
    tensors = {name: _stored(run, origin, dtypes[name]) for name, origin in directory.tensors.items()}

    def read(names: Sequence[str]) -> Mapping[str, Tensor]:
        return _read(run, {name: directory.tensors[name] for name in names}, tensors)

    written = write_tensors(place, tensors, read, largest, directory.file_name)
    if directory.config is not None:
        origins = directory.tensors.items()
        trained = (tensors[name].dtype for name, o in origins if isinstance(o, Regrouped) or o.source is None)
        named = next((d for d in trained if d.is_floating_point), torch.float32)
        write_config(place, directory.config, named if directory.has_dtype and dtype != AS_DIRECTORY else None)
    yield _summary(directory, written)
    if directory.source is not None:
        copied, linked = copy_files(directory.source, place)
        if copied:
            yield f"  {counted(copied, 'file')} copied from {directory.source.path}"
            notes = prepared_otherwise(run.recipe, directory.source.path, whole=not directory.place)
            yield from (f"  {note}" for note in notes)
        if linked:
            yield f"  not copied, as they are links out of the directory: {', '.join(linked)}"
    if directory.write_others is not None:
        yield from (f"  {line}" for line in directory.write_others(place))
    if directory.left_out:
        yield f"  without {', '.join(directory.left_out)}: nothing in the run reads them, so it has none"
    loads = f"loads with {directory.loads_with}.from_pretrained" if directory.loads_with else ""
    yield f"  {loads or 'plain safetensors: transformers has no class for this module alone'}"


def _summary(directory: Directory, written: Written) -> str:
    origins = [origin for origin in directory.tensors.values() if isinstance(origin, Origin)]
    copied = sum(origin.source is not None for origin in origins)
    merged = sum(len(origin.keys) > 1 for origin in origins)
    blocks = len(directory.tensors) - len(origins)
    notes = [f"{merged} with their adapters merged"] if merged else []
    notes += [f"{blocks} made of parts of the run's, as such files have them"] if blocks else []
    notes += [f"{copied} that no module has, as in the directory they came from"] if copied else []
    place = f"{directory.place}: " if directory.place else ""
    size = f"{written.tensors} tensors, {written.bytes / 1e6:,.1f} MB in {counted(len(written.files), 'file')}"
    return f"{place}{size}{' (' + ', '.join(notes) + ')' if notes else ''}, read again and equal bit by bit"


def _stored(run: SavedRun, origin: Origin | Regrouped, dtype: torch.dtype | None) -> Stored:
    if isinstance(origin, Regrouped):
        return Stored(origin.shape, _stored(run, origin.parts[0][0], dtype).dtype)
    if origin.source is not None:
        entry = origin.source.tensors[origin.keys[0]]
        return Stored(entry.shape, _dtype_of(entry))
    own = run.dtype(origin.keys[0])
    return Stored(run.shape(origin.keys[0]), dtype if dtype is not None and own.is_floating_point else own)


def _dtype_of(entry: TensorEntry) -> torch.dtype:
    known = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    known |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "BOOL": torch.bool}
    return known[entry.dtype]


def _read(run: SavedRun, origins: Mapping[str, Origin | Regrouped], stored: Mapping[str, Stored]) -> dict[str, Tensor]:
    plain = {name: origin for name, origin in origins.items() if isinstance(origin, Origin)}
    values = run.read(key for origin in plain.values() if origin.source is None for key in origin.keys)
    out: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, origin in plain.items():
        if origin.source is not None:
            from safetensors import safe_open

            with safe_open(origin.source.tensors[origin.keys[0]].file, "pt") as reader:
                out[name] = reader.get_tensor(origin.keys[0])
            continue
        value = as_dtype(_trained(origin, values), stored[name].dtype, name)
        out[name] = value.clone() if origin.keys[0] in used else value  # safetensors takes no two views of one memory
        used.add(origin.keys[0])
    blocks: dict[Origin, list[tuple[str, StoredBlock]]] = {}
    for name, regrouped in origins.items():
        if isinstance(regrouped, Regrouped):
            out[name] = torch.empty(regrouped.shape, dtype=stored[name].dtype)
            for part, block in regrouped.parts:
                blocks.setdefault(part, []).append((name, block))
    for part, named in blocks.items():  # one tensor of the run is in memory at a time
        value = _trained(part, run.read(part.keys))
        for name, block in named:
            inside = tuple(slice(start, stop) for start, stop in block.place)
            out[name][block.slices(block.place)] = as_dtype(block.to_file(value[inside]), out[name].dtype, name)
    return out


def _trained(origin: Origin, values: Mapping[str, Tensor]) -> Tensor:
    """A tensor of the run, its adapter merged if it is to be."""
    value = values[origin.keys[0]]
    if len(origin.keys) > 1:
        a, b = (values[key].double() for key in origin.keys[1:])
        value = (value.double() + origin.scale * (b @ a)).to(value.dtype)
    return value


def _write_adapters(
    run: SavedRun, top: Path, final: Path, plan: ExportPlan, dtype: torch.dtype | None
) -> Iterator[str]:
    """Write the adapters of each directory of `plan`, which is in `top` now and will be in `final`, as a directory of
    peft inside of it. Raises RecipeError: the run has no adapters."""
    if not plan.adapters:
        raise RecipeError(f"{run.path}: none of the run's modules has LoRA adapters ([modules.<name>.lora])")
    for place, adapted in plan.adapters.items():
        folder = top / place / ADAPTER_FOLDER
        with writing(folder):
            folder.mkdir()
        halves = [(layer.name, half, key) for layer in adapted for half, key in (("A", layer.a), ("B", layer.b))]
        # "base_model.model." is what peft puts before the FQN of a layer.
        keys = {f"base_model.model.{name}.lora_{half}.weight": key for name, half, key in halves}
        stored = {name: Stored(run.shape(key), dtype or run.dtype(key)) for name, key in keys.items()}
        values = run.read(keys.values())
        tensors = {name: as_dtype(values[key], stored[name].dtype, name) for name, key in keys.items()}
        take = partial(lambda made, _: made, tensors)
        written = write_tensors(folder, stored, take, 1 << 62, name="adapter_model")
        write_json(folder / "adapter_config.json", _adapter_config(run, adapted, str(final / place)), indent=2)
        yield (
            f"{Path(place, ADAPTER_FOLDER)}: {written.tensors} tensors of {len(adapted)} adapted layers; loads with "
            f"peft.PeftModel.from_pretrained(model, {str(final / place / ADAPTER_FOLDER)!r})"
        )


def _adapter_config(run: SavedRun, adapted: Sequence[Adapted], base: str) -> dict[str, object]:
    loras = {layer.name: run.recipe.modules[layer.module].lora for layer in adapted}
    known = {re.escape(name): lora for name, lora in loras.items() if lora is not None}
    first = next(iter(known.values()))
    others = {name: lora for name, lora in known.items() if (lora.rank, lora.alpha) != (first.rank, first.alpha)}
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "target_modules": list(loras),
        "rank_pattern": {name: lora.rank for name, lora in others.items()},
        "alpha_pattern": {name: lora.alpha for name, lora in others.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "task_type": None,
    }
