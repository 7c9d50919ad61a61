"""Which of a recipe's values are defaults that differ from torchtitan's: whoever brings a config along should know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetmesh.recipe.recipe import Recipe
    from hetmesh.recipe.sections import Section


def differing_defaults(recipe: Recipe) -> list[str]:
    """`"training.mixed_precision_param = 'float32' (torchtitan: 'bfloat16')"` for each key that the recipe leaves out,
    has an effect in it, and means something else to torchtitan (0.2.2 and 0.3.0)."""
    found = [
        _said("training", recipe.training, "mixed_precision_param", "bfloat16"),
        _said("activation_checkpoint", recipe.activation_checkpoint, "mode", "selective"),
        _said("lr_scheduler", recipe.lr_scheduler, "warmup_steps", 200),
    ]
    if recipe.optimizer.name == "SGD" and "implementation" not in recipe.optimizer.model_fields_set:
        found.append(_line("optimizer.implementation", "foreach", "fused"))  # takes no DTensors
    for name, table in recipe.parallelism.modules.items():
        mesh = recipe.wiring.meshes[name]
        if mesh.axis_size("dp_replicate") > 1 and table.data_parallel_replicate_degree is None:
            found.append(_said(f"parallelism.{name}", table, "data_parallel_shard_degree", -1))
        if mesh.axis_size("tp") > 1 and name == recipe.sink:
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
