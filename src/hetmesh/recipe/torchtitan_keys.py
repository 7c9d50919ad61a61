"""Keys of torchtitan's that are no keys of hetmesh: which values are taken all the same, and what to write for others.

Every key of torchtitan 0.2.2's JobConfig is here or has a field in `sections.py`
(github.com/pytorch/torchtitan, torchtitan/config/job_config.py at v0.2.2; a test holds them together).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetmesh.recipe.section import table_in

if TYPE_CHECKING:
    from hetmesh.recipe.recipe import Recipe
    from hetmesh.recipe.sections import Section


Raw = Mapping[str, Any]
"""A recipe as TOML gives it, by table."""


class _Any:
    def __contains__(self, value: object) -> bool:
        return True


ANY: Container[Any] = _Any()
OFF = (False,)


@dataclass(frozen=True)
class Foreign:
    """A key that has no effect here, or a field of which some values have none.

    Attributes:
        accepted: values that change nothing: they ask for what hetmesh does anyway, or belong to a feature that is off.
        instead: what to write where another value is given.
        without_effect: values that are taken, but do nothing; the summary says `note` of them.
        matters: whether the key means anything in a recipe; where it does not, every value is accepted.
    """

    accepted: Container[Any] = ()
    instead: str = ""
    without_effect: Container[Any] = ()
    note: str = ""
    matters: Callable[[Raw], bool] = lambda raw: True


def _on(section: str, key: str, default: bool = False) -> Callable[[Raw], bool]:
    return lambda raw: table_in(raw, section).get(key, default) is not False


def _selective(raw: Raw) -> bool:
    modules = [table for table in table_in(raw, "modules").values() if isinstance(table, Mapping)]
    modes = [table_in(raw, "activation_checkpoint").get("mode"), *(m.get("activation_checkpoint") for m in modules)]
    return "selective" in modes


def _shared(degree: str) -> Callable[[Raw], bool]:
    """Whether some module has more than one rank along an axis."""

    def found(raw: Raw) -> bool:
        layout = table_in(raw, "parallelism")
        return any(table.get(degree, 1) != 1 for table in (layout, *layout.values()) if isinstance(table, Mapping))

    return found


_SEEN = "leave it out; [profiling] timeline = true, the default, records a step, and `hetmesh simulate` predicts memory"
_NO_FP8 = "leave it out; hetmesh computes in float32 or bfloat16"
_DATA = "[data] source and [data.options]"
_EXPERT_TP = "leave it out; tensor parallel ranks split experts as they split all else"
_RECORDER = "torch's flight recorder takes its settings from the environment (TORCH_FR_BUFFER_SIZE)"
_NO_FT = "leave it out; a run that was killed resumes from its last checkpoint, with [elastic] also on other ranks"
_HF_WEIGHTS = "leave it out; [modules.<name>] initial_load_path or [model] hf_path takes a Hugging Face directory"
_WORKERS = "write [data] num_workers"

_CUSTOM = 'name your class in [modules.<name>] model = "package.module:Class"'
_VALIDATES, _SAVES = _on("validation", "enable", True), _on("checkpoint", "enable")
_LOGS = _on("metrics", "enable_tensorboard")

_LAYOUT: Mapping[str, Foreign] = {
    "expert_tensor_parallel_degree": Foreign((1,), _EXPERT_TP),
    "expert_parallel_comm_backend": Foreign(ANY),  # of expert_parallel_degree
    "pipeline_parallel_expert_parallel_overlap": Foreign(ANY),  # of DualPipeV
    "pipeline_parallel_schedule_csv": Foreign(("",), "name a schedule in pipeline_parallel_schedule"),
    **dict.fromkeys(
        ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers"),
        Foreign(
            (),
            "name the layers of each stage in module_fqns_per_model_part",
            (0, 1),
            "stages are cut such that they take equal time, with what embeddings and head cost",
            _shared("pipeline_parallel_degree"),
        ),
    ),
    "enable_async_tensor_parallel": Foreign(OFF, "leave it out"),
    "enable_compiled_autograd": Foreign(OFF, "leave it out; [compile] enable = true compiles blocks"),
    "disable_loss_parallel": Foreign(
        OFF,
        "leave it out",
        (True,),
        "tensor parallel ranks keep shares of the logits where a model allows it (the loss is the same)",
        _shared("tensor_parallel_degree"),
    ),
    "context_parallel_load_balancer": Foreign(
        (),
        "write context_parallel_assignment = 'balanced'",
        ("headtail", "ptrr"),
        "tokens are shared by what their attention costs; context_parallel_assignment = 'zigzag' is head and tail",
        _shared("context_parallel_degree"),
    ),
    "context_parallel_rotate_method": Foreign(
        (),
        "leave it out",
        ("allgather", "alltoall"),
        "ranks fetch the keys and values that their tokens see, and no others",
        _shared("context_parallel_degree"),
    ),
}

FOREIGN: Mapping[str, Mapping[str, Foreign]] = {
    "job": {
        "config_file": Foreign(instead="name the file on the command line: hetmesh train RECIPE"),
        "custom_config_module": Foreign(("",), _CUSTOM),
        "save_config_file": Foreign(
            instead="leave it out; a run writes recipe.json, with all defaults, into its dump_folder"
        ),
    },
    "modules": {},
    "parallelism": _LAYOUT,
    "training": {
        "dataset": Foreign(instead=f"write {_DATA}"),
        "dataset_path": Foreign(instead="write [data.options] path"),
        "gc_freq": Foreign(without_effect=ANY, note="Python collects garbage when it sees fit"),
        "gc_debug": Foreign(OFF, "leave it out"),
        "dataloader.num_workers": Foreign((0,), _WORKERS),
        "dataloader.persistent_workers": Foreign(ANY),  # workers live as long as the run
        "dataloader.pin_memory": Foreign(OFF, "leave it out"),
        "dataloader.prefetch_factor": Foreign(instead="write [data] prefetch_factor"),
    },
    "optimizer": {
        "early_step_in_backward": Foreign(OFF, "leave it out; gradients are clipped by the norm over all modules first")
    },
    "checkpoint": {
        "enable_ft_dataloader_checkpoints": Foreign(ANY),  # of fault_tolerance
        "async_mode": Foreign(
            ("disabled", "async"),
            "write 'async': a thread writes what was copied, from a device into pinned memory",
            matters=_SAVES,
        ),
        "initial_load_model_only": Foreign(
            (True,), "leave it out; a run whose dump_folder has checkpoints goes on with optimizer, schedule and data"
        ),
        "initial_load_in_hf": Foreign(OFF, _HF_WEIGHTS),
        "initial_load_in_hf_quantized": Foreign(OFF, _HF_WEIGHTS),
        "last_save_model_only": Foreign(
            OFF, "write false", (True,), "the last checkpoint, too, has all that a resumed run needs", _SAVES
        ),
        "load_step": Foreign((-1,), "write [checkpoint] initial_load_path, the folder of a step"),
        "load_only": Foreign(OFF, "leave it out; [checkpoint] enable = false saves none"),
        "enable_first_step_checkpoint": Foreign(OFF, "leave it out; `--checkpoint.interval 1` tries saving"),
        "create_seed_checkpoint": Foreign(OFF, "leave it out; [debug] seed gives the same weights in every layout"),
    },
    "metrics": {
        "disable_color_printing": Foreign(OFF, "set NO_COLOR=1 in the environment"),
        "save_tb_folder": Foreign(
            ("tensorboard",), "leave it out", ANY, "events are in the folder tensorboard of the dump_folder", _LOGS
        ),
        "save_for_all_ranks": Foreign(OFF, "leave it out; metrics are those of all ranks together"),
    },
    "validation": {
        "dataset": Foreign(instead=f"leave it out; held-out samples are a split of {_DATA}", matters=_VALIDATES),
        "dataset_path": Foreign(instead="write [data.options] validation_path", matters=_VALIDATES),
        "local_batch_size": Foreign(
            without_effect=ANY,
            note="held-out samples come in batches of [training] local_batch_size",
            matters=_VALIDATES,
        ),
        "seq_len": Foreign(
            without_effect=ANY, note="[training] seq_len holds for held-out samples too", matters=_VALIDATES
        ),
        "steps": Foreign((-1,), "write [validation] samples", matters=_VALIDATES),
        "dataloader.num_workers": Foreign((0,), _WORKERS, matters=_VALIDATES),
        "dataloader.persistent_workers": Foreign(ANY),
        "dataloader.pin_memory": Foreign(OFF, "leave it out", matters=_VALIDATES),
        "dataloader.prefetch_factor": Foreign(ANY),  # of num_workers
    },
    "comm": {
        "trace_buf_size": Foreign(without_effect=ANY, note=_RECORDER),
        "save_traces_folder": Foreign(ANY),  # of trace_buf_size
        "save_traces_file_prefix": Foreign(ANY),
        "mode": Foreign(
            ("default",), "leave it out; `hetmesh check` and `hetmesh simulate` try a layout without processes"
        ),
    },
    "debug": {
        "deterministic_warn_only": Foreign(OFF, "leave it out"),
        "moe_force_load_balance": Foreign(OFF, "leave it out"),
    },
    "profiling": {
        "enable_profiling": Foreign(OFF, _SEEN),
        "save_traces_folder": Foreign(ANY),  # of enable_profiling, as the three below
        "profile_freq": Foreign(ANY),
        "profiler_active": Foreign(ANY),
        "profiler_warmup": Foreign(ANY),
        "enable_memory_snapshot": Foreign(OFF, _SEEN),
        "save_memory_snapshot_folder": Foreign(ANY),
    },
    "model": {
        "name": Foreign(instead="describe each module in [modules.<name>], or name a directory in [model] hf_path"),
        "flavor": Foreign(instead="give sizes in [modules.<name>.config], or name a directory in [model] hf_path"),
        "hf_assets_path": Foreign(instead="write [model] hf_path, or [data.options] tokenizer"),
        "tokenizer_path": Foreign(instead="write [model] hf_path, or [data.options] tokenizer"),
        "converters": Foreign(([],), _NO_FP8),
        "print_after_conversion": Foreign(OFF, "leave it out; `hetmesh explain` shows the modules"),
    },
    "activation_checkpoint": {
        "selective_ac_option": Foreign(
            ("op",),
            "write 'op' (save_ops lists what is not computed again), or mode = 'full' for whole blocks",
            matters=_selective,
        ),
        "per_op_sac_force_recompute_mm_shapes_by_fqns": Foreign(([], ["moe.router.gate"]), "leave it out"),
        "early_stop": Foreign(ANY),  # when a recomputation ends; its results are the same
        "memory_budget": Foreign(ANY),  # of mode = "memory_budget"
        "visualize_memory_budget_pareto": Foreign(OFF, "leave it out"),
        "preserve_rng_state": Foreign((True,), "leave it out; recomputed dropout must draw what it drew"),
        "determinism_check": Foreign(("default",), "leave it out"),
        "debug": Foreign(OFF, "leave it out"),
    },
    "quantize": dict.fromkeys(  # of model.converters
        (
            *map("linear.float8.{}".format, ("enable_fsdp_float8_all_gather", "recipe_name", "filter_fqns", "emulate")),
            *("linear.float8.precompute_float8_dynamic_scale_for_fsdp", "grouped_mm.float8.fqns"),
            *map("linear.mx.{}".format, ("mxfp8_dim1_cast_kernel_choice", "recipe_name", "filter_fqns")),
            *("grouped_mm.mx.recipe_name", "grouped_mm.mx.fqns"),
        ),
        Foreign(ANY),
    ),
    "fault_tolerance": {
        "enable": Foreign(OFF, _NO_FT),
        **dict.fromkeys(("process_group", "process_group_timeout_ms", "replica_id", "group_size"), Foreign(ANY)),
        **dict.fromkeys(("min_replica_size", "semi_sync_method"), Foreign(ANY)),
    },
    "memory_estimation": {
        "enable": Foreign(OFF, "leave it out; `hetmesh simulate` predicts the memory of every rank"),
        "disable_fake_mode": Foreign(ANY),
    },
    "experimental": {"custom_import": Foreign(("",), _CUSTOM), "custom_args_module": Foreign(("",), _CUSTOM)},
}
"""By table and key (of a table inside one with a dot). What has a field too is passed on, all else is dropped."""

_ZERO_BUBBLE = "write 'zero_bubble' (a stage per rank), or 'Interleaved1F1B'"
_SCHEDULES = {
    "GPipe": "write '1F1B', whose stages hold fewer microbatches (the results are the same)",
    "LoopedBFS": "write 'Interleaved1F1B'",
    "InterleavedZeroBubble": _ZERO_BUBBLE,
    "ZBVZeroBubble": _ZERO_BUBBLE,
    "DualPipeV": _ZERO_BUBBLE,
    "PipelineScheduleSingle": "write '1F1B'",
    "PipelineScheduleMulti": "write 'Interleaved1F1B'",
}

VALUES: Mapping[str, Mapping[str, str]] = {
    "parallelism.pipeline_parallel_schedule": _SCHEDULES,
    "parallelism.bubble_fill_schedule": _SCHEDULES,
    "activation_checkpoint.mode": {
        "memory_budget": "write 'selective' (all but matrix products and attention) or 'full'"
    },
}
"""Values of torchtitan's, of keys that are fields here -> what to write instead."""

ELSEWHERE: Mapping[str, str] = {
    "training.seed": "write [debug] seed",
    "training.deterministic": "write [debug] deterministic",
    "modules.mesh": "write [parallelism.<module>] ranks",
    "modules.ranks": "write [parallelism.<module>] ranks",
    "boundaries.source": "write from",
    "boundaries.destination": "write to",
    "job.world_size": "the ranks under [parallelism] say it",
}
"""Keys that newcomers look for -> where hetmesh has them."""


def differing_defaults(recipe: Recipe) -> list[str]:
    """`"training.mixed_precision_param = 'float32' (torchtitan: 'bfloat16')"` for each key that the recipe leaves out,
    has an effect in it, and means something else to torchtitan (0.2.2 and 0.3.0)."""
    halves = recipe.training.dtype == "bfloat16"
    found = [
        "training.dtype = 'bfloat16' with fp32 copies in the optimizer (torchtitan: without)" if halves else "",
        "" if halves else _said("training", recipe.training, "mixed_precision_param", "bfloat16"),
        _said("activation_checkpoint", recipe.activation_checkpoint, "mode", "selective"),
        _said("lr_scheduler", recipe.lr_scheduler, "warmup_steps", 200),
    ]
    if recipe.optimizer.name == "SGD" and "implementation" not in recipe.optimizer.model_fields_set:
        found.append(_line("optimizer.implementation", "foreach", "fused"))  # takes no DTensors
    for name, table in recipe.parallelism.modules.items():
        mesh = recipe.wiring.meshes[name]
        if mesh.axis_size("dp_replicate") > 1 and table.data_parallel_replicate_degree is None:
            found.append(_said(f"parallelism.{name}", table, "data_parallel_shard_degree", -1))
        if mesh.axis_size("tp") > 1 and name == recipe.llm:
            found.append(_said(f"parallelism.{name}", table, "enable_sequence_parallel", True))
    if any(mesh.axis_size("pp") > 1 for mesh in recipe.wiring.meshes.values()):
        for key, ours, theirs in (
            ("pipeline_parallel_schedule", recipe.schedule, "1F1B"),
            ("pipeline_parallel_microbatch_size", recipe.batch.microbatch_size, 1),
        ):
            if recipe.schedule_key(key) is None and ours != theirs:
                found.append(_line(f"parallelism.{key}", ours, theirs))
    return [line for line in found if line]


def _said(table: str, section: Section, key: str, theirs: Any) -> str:
    return "" if key in section.model_fields_set else _line(f"{table}.{key}", getattr(section, key), theirs)


def _line(key: str, ours: Any, theirs: Any) -> str:
    return f"{key} = {ours!r} (torchtitan: {theirs!r})"
