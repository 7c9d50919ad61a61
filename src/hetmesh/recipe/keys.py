"""Which keys a recipe may hold: valid, known to torchtitan but not implemented yet, or unknown (with a suggestion).

To switch a key or value on in a later version: give it a field in `sections.py` if it has none, and delete its
line in `NOT_IMPLEMENTED`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from hetmesh.errors import Refusals
from hetmesh.recipe import sections as sections

SECTIONS: Mapping[str, type[sections.Section]] = {
    "job": sections.JobKeys,
    "model": sections.ModelKeys,
    "modules": sections.Module,  # one table per module
    "boundaries": sections.Boundary,  # an array of tables
    "parallelism": sections.ModuleParallelism,  # flat, and one table per module
    "data": sections.Data,
    "balance": sections.Balance,
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
    "model.name": "describe each module in [modules.<name>], or name a directory in [model] hf_path",
    "model.flavor": "give sizes in [modules.<name>.config], or name a directory in [model] hf_path",
    "model.hf_assets_path": "write [model] hf_path",
    "model.tokenizer_path": "write [model] hf_path, or [data.options] tokenizer",
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


def check_keys(raw: Mapping[str, Any], refusals: Refusals) -> dict[str, Any]:
    """`raw` without the keys that mean nothing to hetmesh: accepted ones, and those that `refusals` then names because
    they are unknown or not implemented yet."""
    kept = {}
    for section, value in raw.items():
        if section not in SECTIONS and section not in NOT_IMPLEMENTED:
            refusals.add(f"[{section}]: {unknown('table', section, SECTIONS)}")
        elif (valid := _check_section(section, value, refusals)) is not None:
            kept[section] = valid
    return kept


def _check_section(section: str, value: Any, refusals: Refusals) -> Any:
    if section == "boundaries":
        if not isinstance(value, list):
            refusals.add("boundaries: write each boundary as its own [[boundaries]] table")
            return None
        return [_check_table(section, f"boundaries[{i}]", table, refusals) for i, table in enumerate(value)]
    if not isinstance(value, Mapping):
        refusals.add(f"{section}: must be a table of keys, got {value!r}")
        return None
    if section == "modules":
        return {name: _check_table(section, f"modules.{name}", table, refusals) for name, table in value.items()}
    if section == "parallelism":
        tables = {k: v for k, v in value.items() if isinstance(v, Mapping)}
        flat = _check_table(section, section, {k: v for k, v in value.items() if k not in tables}, refusals)
        each = {k: _check_table(section, f"parallelism.{k}", table, refusals) for k, table in tables.items()}
        return flat | each
    kept = _check_table(section, section, value, refusals)
    return kept if section in SECTIONS else None


def _check_table(section: str, where: str, table: Any, refusals: Refusals) -> Any:
    if not isinstance(table, Mapping):
        refusals.add(f"{where}: must be a table of keys, got {table!r}")
        return {}
    fields = valid_keys(section) if section in SECTIONS else ()
    later = NOT_IMPLEMENTED.get(section, {})
    kept = {}
    for key, value in table.items():
        instead = INSTEAD.get(f"{section}.{key}") or INSTEAD.get(section)
        if key in later and value not in later[key]:
            refusals.add(_not_implemented(f"{where}.{key}", value, later[key], instead))
        elif key in fields:
            kept[key] = value
        elif key in later:
            continue
        elif instead:
            refusals.add(f"{where}.{key}: hetmesh has no such key; {instead}")
        elif section not in SECTIONS and not later:
            refusals.add(_not_implemented(f"{where}.{key}", value, (), instead))
        else:
            refusals.add(f"{where}.{key}: {unknown('key', key, fields or later)}")
    return kept


def _not_implemented(key: str, value: Any, accepted: tuple[Any, ...], instead: str | None) -> str:
    values = f"; implemented so far: {', '.join(map(repr, accepted))}" if accepted else ""
    hint = f"; {instead}" if instead else ""
    return f"{key} = {value!r}: a known key that hetmesh does not implement yet{values}{hint}"
