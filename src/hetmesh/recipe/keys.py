"""Which keys a recipe may hold: valid, known to torchtitan but not implemented yet, or unknown (with a suggestion).

To switch a key or value on in a later version: give it a field in `recipe_sections.py` if it has none, and delete its
line in `NOT_IMPLEMENTED`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from hetmesh.errors import RecipeError
from hetmesh.recipe import sections as sections

SECTIONS: Mapping[str, type[sections.Section]] = {
    "job": sections.JobKeys,
    "modules": sections.Module,  # one table per module
    "boundaries": sections.Boundary,  # an array of tables
    "parallelism": sections.ModuleParallelism,  # flat, and one table per module
    "data": sections.Data,
    "training": sections.Training,
    "activation_checkpoint": sections.ActivationCheckpoint,
    "compile": sections.Compile,
    "optimizer": sections.Optimizer,
    "lr_scheduler": sections.LRScheduler,
    "checkpoint": sections.Checkpoint,
    "metrics": sections.Metrics,
    "validation": sections.Validation,
    "profiling": sections.Profiling,
    "comm": sections.Comm,
    "debug": sections.Debug,
}
"""Every table of a recipe and the class that holds its keys."""

NOTHING: tuple[Any, ...] = ()

NOT_IMPLEMENTED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "job": {"config_file": NOTHING, "custom_config_module": NOTHING, "save_config_file": NOTHING},
    "modules": {},
    "parallelism": {
        "expert_parallel_degree": (1,),
        "expert_tensor_parallel_degree": (1,),
        "pipeline_parallel_schedule": ("sequential", "1f1b", "interleaved", "zero_bubble", "three_phase"),
        "pipeline_parallel_schedule_csv": ("",),
        "pipeline_parallel_first_stage_less_layers": NOTHING,
        "pipeline_parallel_last_stage_less_layers": NOTHING,
        "enable_async_tensor_parallel": (False,),
        "enable_compiled_autograd": (False,),
        "disable_loss_parallel": (True,),
        "context_parallel_rotate_method": NOTHING,
    },
    "training": {
        "dataset": NOTHING,
        "dataset_path": NOTHING,
        "gc_freq": NOTHING,
        "gc_debug": (False,),
    },
    "optimizer": {"early_step_in_backward": (False,)},
    "checkpoint": {
        "async_mode": ("disabled",),
        "initial_load_model_only": (True,),
        "initial_load_in_hf": (False,),
        "initial_load_in_hf_quantized": (False,),
        "last_save_model_only": (False,),
        "last_save_in_hf": (False,),
        "export_dtype": ("float32",),
        "load_step": (-1,),
        "load_only": (False,),
        "enable_first_step_checkpoint": (False,),
        "create_seed_checkpoint": (False,),
    },
    "metrics": {
        "disable_color_printing": (False,),
        "save_tb_folder": NOTHING,
        "save_for_all_ranks": (False,),
    },
    "validation": {
        "enable": (True,),
        "dataset": NOTHING,
        "dataset_path": NOTHING,
        "local_batch_size": NOTHING,
        "seq_len": NOTHING,
        "steps": (-1,),
    },
    "comm": {"trace_buf_size": NOTHING, "save_traces_folder": NOTHING, "mode": ("default",)},
    "debug": {"deterministic_warn_only": (False,), "moe_force_load_balance": (False,)},
    "profiling": {
        "enable_profiling": (False,),
        "save_traces_folder": NOTHING,
        "profile_freq": NOTHING,
        "enable_memory_snapshot": (False,),
        "save_memory_snapshot_folder": NOTHING,
    },
    "model": {"name": NOTHING, "flavor": NOTHING, "hf_assets_path": NOTHING, "tokenizer_path": NOTHING},
    "activation_checkpoint": {"selective_ac_option": ("op",), "early_stop": NOTHING},
    "quantize": {},
    "fault_tolerance": {"enable": (False,)},
    "memory_estimation": {"enabled": (False,)},
    "experimental": {},
}
"""Known keys, most of them torchtitan 0.2.2's, that hetmesh does not implement yet -> the values that are accepted all
the same because they ask for what hetmesh does anyway. A key that has a field is passed on, any other is dropped."""

INSTEAD: Mapping[str, str] = {
    "model": "describe each module in [modules.<name>]",
    "training.dataset": "write [data] source",
    "training.seed": "write [debug] seed",
    "training.deterministic": "write [debug] deterministic",
    "modules.mesh": "write [parallelism.<module>] ranks",
    "modules.ranks": "write [parallelism.<module>] ranks",
    "boundaries.source": "write from",
    "boundaries.destination": "write to",
    "job.world_size": "the ranks under [parallelism] say it",
}
"""Keys that users of torchtitan and newcomers look for -> where hetmesh has them."""


def valid_keys(section: str) -> tuple[str, ...]:
    """The keys that tables of `section` may hold, as written in TOML."""
    return tuple(field.alias or name for name, field in SECTIONS[section].model_fields.items())


def unknown(what: str, name: str, valid: Iterable[str]) -> str:
    """`"unknown key 'stpes'; did you mean 'steps'? Valid are ..."`"""
    valid = list(valid)
    close = difflib.get_close_matches(name, valid, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"unknown {what} {name!r}{hint} Valid are: {', '.join(valid)}"


def check_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` without the accepted keys that mean nothing to hetmesh, once every key in it is known.

    Raises:
        RecipeError: a table or key is unknown or not implemented yet, or a table is no table.
    """
    for section in raw:
        if section in SECTIONS or section in NOT_IMPLEMENTED:
            continue
        raise RecipeError(f"[{section}]: {unknown('table', section, SECTIONS)}")
    return {section: kept for section, value in raw.items() if (kept := _check_section(section, value)) is not None}


def _check_section(section: str, value: Any) -> Any:
    if section == "boundaries":
        if not isinstance(value, list):
            raise RecipeError("boundaries: write each boundary as its own [[boundaries]] table")
        return [_check_table(section, f"boundaries[{i}]", table) for i, table in enumerate(value)]
    _require_table(section, value)
    if section == "modules":
        return {name: _check_table(section, f"modules.{name}", table) for name, table in value.items()}
    if section == "parallelism":
        modules = {k: v for k, v in value.items() if isinstance(v, Mapping)}
        flat = _check_table(section, section, {k: v for k, v in value.items() if k not in modules})
        return flat | {name: _check_table(section, f"parallelism.{name}", table) for name, table in modules.items()}
    kept = _check_table(section, section, value)
    return kept if section in SECTIONS else None


def _check_table(section: str, where: str, table: Any) -> dict[str, Any]:
    _require_table(where, table)
    fields = valid_keys(section) if section in SECTIONS else ()
    later = NOT_IMPLEMENTED.get(section, {})
    for key, value in table.items():
        instead = INSTEAD.get(f"{section}.{key}") or INSTEAD.get(section)
        if key in later and value not in later[key]:
            raise RecipeError(_not_implemented(f"{where}.{key}", value, later[key], instead))
        if key in fields or key in later:
            continue
        if instead:
            raise RecipeError(f"{where}.{key}: hetmesh has no such key; {instead}")
        if section not in SECTIONS and not later:
            raise RecipeError(_not_implemented(f"{where}.{key}", value, (), instead))
        raise RecipeError(f"{where}.{key}: {unknown('key', key, fields or later)}")
    return {key: value for key, value in table.items() if key in fields}


def _require_table(where: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise RecipeError(f"{where}: must be a table of keys, got {value!r}")


def _not_implemented(key: str, value: Any, accepted: tuple[Any, ...], instead: str | None) -> str:
    values = f"; implemented so far: {', '.join(map(repr, accepted))}" if accepted else ""
    hint = f"; {instead}" if instead else ""
    return f"{key} = {value!r}: a known key that hetmesh does not implement yet{values}{hint}"
