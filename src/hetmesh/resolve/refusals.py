"""Everything that can be wrong with a recipe beyond its text: what its models, its data or hetmesh cannot do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch

from hetmesh.cost import Profile, load_machine
from hetmesh.cost.saved_operations import ATTENTION, SAVABLE, operations, saved_names
from hetmesh.errors import HetmeshError, RecipeError, Refusals
from hetmesh.formatting import listed
from hetmesh.graph import dense_mesh
from hetmesh.graph.sample import kinds_of
from hetmesh.models import Adapter
from hetmesh.parallel.compile import unknown_backend
from hetmesh.recipe.module_options import module_options, token_axes
from hetmesh.recipe.recipe import Recipe
from hetmesh.recipe.sections import LRScheduler, Module, Optimizer, ScheduleKeys, Training
from hetmesh.recipe.wiring import DEGREE_OF_AXIS, EXPERT_DEGREE
from hetmesh.records.checkpoint_folders import check_complete
from hetmesh.records.dump_folder import check_folder, resumable
from hetmesh.records.reporter import require_wandb
from hetmesh.resolve.directories import referenced
from hetmesh.resolve.module_refusals import check_module
from hetmesh.resolve.modules import Shapes
from hetmesh.resolve.named_loss import named_loss
from hetmesh.resolve.optimizer_choice import check_optimizers
from hetmesh.resolve.splits import reason_not_sliced
from hetmesh.simulate.stage_contents import blocks


def check_recipe(
    recipe: Recipe,
    adapters: Mapping[str, Adapter] | None = None,
    placeholders: Collection[str] | None = None,
    shapes: Shapes | None = None,
) -> None:
    """Check `recipe` in one process, without process groups, weights or data.

    Keys, ranks, degrees, boundaries and batch sizes were checked when the recipe was loaded.

    Args:
        adapters: the modules' adapters; None leaves out what needs them.
        placeholders: the placeholders that the data source knows; None leaves them unchecked.
        shapes: sizes of the modules; None leaves slices unchecked.

    Raises:
        RecipeError: all that is wrong, a line each: key, what was given, what is valid.
    """
    refusals = Refusals()
    _kernels(recipe, refusals)
    _save_ops(recipe, shapes or {}, refusals)
    _freezing(recipe.modules, refusals)
    _optimizer(recipe.optimizer, recipe.training, recipe.lr_scheduler, refusals)
    if shapes is not None:
        check_optimizers(recipe, shapes, refusals)
    _schedule_keys(recipe, refusals)
    if placeholders is not None:
        source = f"data source {recipe.data.source!r} has the placeholders {sorted(placeholders)}"
        for i, boundary in enumerate(recipe.boundaries):
            if boundary.at is not None and not set(placeholders).intersection(kinds_of(boundary.at)):
                refusals.add(f"boundaries[{i}].at = {boundary.at!r}: {source}")
        for name, module in recipe.modules.items():
            if module.media is not None and not set(placeholders).intersection(kinds_of(module.media)):
                refusals.add(f"modules.{name}.media = {module.media!r}: {source}")
    _losses(recipe, refusals)
    if recipe.fills_bubbles:
        _bubble_fill(recipe, adapters or {}, shapes, refusals)
    for name, adapter in (adapters or {}).items():
        check_module(recipe, name, adapter, refusals)
    refusals.finish()


def _losses(recipe: Recipe, refusals: Refusals) -> None:
    """Losses that have a name, and those that cannot leave samples out."""
    for name, module in recipe.modules.items():
        if module.loss is not None and ":" in module.loss.kind:
            with refusals.collect():
                named_loss(f"modules.{name}.loss.kind", module.loss)
        shared = name != recipe.llm and name in recipe.wiring.losses and token_axes(recipe, name)
        if shared and recipe.data.on_bad_sample == "skip":
            refusals.add(
                f"modules.{name}.loss: not together with its context parallel ranks and data.on_bad_sample = 'skip', "
                "as a rank does not know which of its rows are of samples that cannot be read"
            )


def check_run(recipe: Recipe) -> None:
    """Check what a run of `recipe` needs and no other verb: loggers and the files of its `[metrics]` and `[profiling]`.
    Raises RecipeError: all that is wrong, a line each."""
    refusals, keys = Refusals(), recipe.checkpoint
    try:
        check_folder(recipe)
    except HetmeshError as error:
        refusals.add(f"job.dump_folder: {error}")
    if keys.exclude_from_loading and not keys.initial_load_path:
        refusals.add(
            f"checkpoint.exclude_from_loading = {list(keys.exclude_from_loading)}: nothing is loaded without "
            "checkpoint.initial_load_path; give it, or leave this key out"
        )
    if keys.last_save_in_hf and not keys.enable:
        refusals.add("checkpoint.last_save_in_hf = True: it is of the last checkpoint; set checkpoint.enable = true")
    if keys.export_dtype not in (None, "float32") and not keys.last_save_in_hf:  # float32 is torchtitan's default
        refusals.add(
            f"checkpoint.export_dtype = {keys.export_dtype!r}: it is of the last checkpoint; set "
            "checkpoint.last_save_in_hf = true"
        )
    if keys.enable and keys.frozen == "reference":
        _references(recipe, refusals)
    if keys.initial_load_path and resumable(recipe) is None:  # a run that goes on has its own weights
        with refusals.collect():
            check_complete(Path(keys.initial_load_path), "checkpoint.initial_load_path")
    if recipe.metrics.enable_wandb:
        with refusals.collect():
            require_wandb()
    if recipe.metrics.machine:
        try:
            load_machine(recipe.metrics.machine)
        except RecipeError as error:
            refusals.add(f"metrics.machine: {error}")
    if recipe.profiling.profile:
        try:
            Profile.load(recipe.profiling.profile)
        except HetmeshError as error:
            refusals.add(f"profiling.profile: {error}")
    refusals.finish()


def _kernels(recipe: Recipe, refusals: Refusals) -> None:
    """Precision, offload and compilation."""
    training, compiled = recipe.training, recipe.compile
    tables = {"training": training} | {f"modules.{name}": module for name, module in recipe.modules.items()}
    for table, keys in tables.items():
        given = keys.mixed_precision_param if "mixed_precision_param" in keys.model_fields_set else None
        if given == {"float64": "bfloat16", "bfloat16": "float32"}.get(training.dtype, ""):
            refusals.add(
                f"{table}.mixed_precision_param = {given!r} needs training.dtype = 'float32', got {training.dtype!r}"
            )
    sharded = [n for n, mesh in recipe.wiring.meshes.items() if dense_mesh(mesh).axis_size("dp_shard") > 1]
    trained = [name for name in sharded if recipe.modules[name].trainable]
    computes = {recipe.modules[name].mixed_precision_param or training.mixed_precision_param for name in trained}
    if training.mixed_precision_reduce == "bfloat16" and "bfloat16" not in computes:
        refusals.add(
            "training.mixed_precision_reduce = 'bfloat16': it is for gradients of modules with a "
            "data_parallel_shard_degree above 1 and mixed_precision_param = 'bfloat16', but no module that is trained "
            "has both"
        )
    if training.enable_cpu_offload and not sharded:
        refusals.add(
            "training.enable_cpu_offload: it moves the shards of modules with a data_parallel_shard_degree above 1 to "
            "the CPU, but no module has one"
        )
    if compiled.enable and "model" in compiled.components and (valid := unknown_backend(compiled.backend)):
        refusals.add(
            f"compile.backend = {compiled.backend!r}: torch knows no such backend; valid are {', '.join(valid)}"
        )


def _save_ops(recipe: Recipe, shapes: Shapes, refusals: Refusals) -> None:
    """A list of operations that nothing reads, or with some never called or whose results have no known size."""
    if (given := recipe.activation_checkpoint.save_ops) is None:
        return
    key = f"activation_checkpoint.save_ops = {list(given)}"
    modes = {name: module_options(recipe, name).activation_checkpoint for name in recipe.modules}
    reading = [name for name, mode in modes.items() if mode == "selective"]
    if not reading:
        refusals.add(f"{key}: only the mode 'selective' reads it, and no module has that; leave it out")
    # What a user's class calls, and where attention is, its sizes do not show.
    plain = [name for name in reading if ":" not in recipe.modules[name].model]
    known = [shape for name in plain if (shape := shapes.get(name)) is not None]
    layers = (layer for shape in known for layer in shape.layers if layer.name in blocks(shape))
    called = Counter(name for layer in layers for _, name, _ in operations(layer))
    told = listed([f"{name} ({times} times)" for name, times in sorted(called.items())]) or "none"
    for op in given:
        namespace, _, name = op.partition(".")
        if not (namespace and name and hasattr(getattr(torch.ops, namespace), name)):
            refusals.add(f"{key}: torch has no operation {op!r}; valid are {listed(SAVABLE)}")
        elif op not in SAVABLE:
            refusals.add(f"{key}: how much {op!r} keeps does not follow from sizes; valid are {listed(SAVABLE)}")
        elif known and len(known) == len(reading) and op != ATTENTION and not saved_names([op]) & called.keys():
            refusals.add(f"{key}: no block of {listed(reading)} calls {op!r}; they call {told}")


def _freezing(modules: Mapping[str, Module], refusals: Refusals) -> None:
    """What nothing is trained by: options of frozen modules, adapters in them, a model of nothing else."""
    for name, module in modules.items():
        if not isinstance(module.trainable, bool) and module.lora is not None:
            refusals.add(
                f"modules.{name}.trainable = {list(module.trainable)}, but with modules.{name}.lora only adapters are "
                "trained; leave out one of them"
            )
    frozen = [name for name, module in modules.items() if not module.trainable]
    for name in frozen:
        module = modules[name]
        if module.lora is not None:
            refusals.add(
                f"modules.{name}.trainable = false, but modules.{name}.lora gives it adapters to train, beside which "
                "all else is frozen anyway; leave out one of them"
            )
            continue
        for key in ("lr", "weight_decay"):
            if (value := getattr(module, key)) is not None:
                refusals.add(
                    f"modules.{name}.{key} = {value!r}: the module is frozen (modules.{name}.trainable = false), so no "
                    "optimizer changes it; leave out one of them"
                )
    if len(frozen) == len(modules) and all(module.lora is None for module in modules.values()):
        given = ", ".join(f"modules.{name}.trainable = false" for name in frozen)
        refusals.add(f"{given}: nothing would be trained; make a module trainable, or give one a lora table")


def _optimizer(keys: Optimizer, training: Training, schedule: LRScheduler, refusals: Refusals) -> None:
    skipped, total = "max_consecutive_non_finite", schedule.total_steps
    if keys.name == "SGD" and keys.implementation == "fused" and "implementation" in keys.model_fields_set:
        refusals.add(
            "optimizer.implementation = 'fused': torch's fused SGD does not take sharded parameters (DTensors); valid "
            "with optimizer.name = 'SGD' are 'foreach' (also where the key is left out) and 'for-loop'"
        )
    adam = {"AdamW", "Adam"} & set(keys.names)
    idle = [] if adam else ["beta1", "beta2", "eps"]
    if not adam and "SGD" not in keys.names:
        idle.append("implementation")
    for key in idle:
        if key in keys.model_fields_set:
            instead = "leave it out, or take AdamW or Adam"
            if ":" in keys.name:
                instead = "write what the class takes in optimizer.options"
            refusals.add(
                f"optimizer.{key} = {getattr(keys, key)!r}: optimizer.name = {keys.name!r} has no {key}; {instead}"
            )
    if skipped in training.model_fields_set and training.on_non_finite == "stop":
        refusals.add(
            f"training.{skipped} = {getattr(training, skipped)}: the first step that is not finite ends the run; leave "
            'it out, or set training.on_non_finite = "skip"'
        )
    if total is not None and total < training.steps:
        refusals.add(
            f"lr_scheduler.total_steps = {total}: the schedule would end before the run, which has training.steps = "
            f"{training.steps}; valid are {training.steps} and more"
        )


_KEYS_OF = {"three_phase_": "three_phase", "bubble_fill_": "bubble_fill", "interleaved_": "interleaved"}
"""Schedule keys by how they begin -> the one schedule that they mean something to."""


def _schedule_keys(recipe: Recipe, refusals: Refusals) -> None:
    """Keys of schedules that the run does not have: whoever gives one expects something of it."""
    for key in ScheduleKeys.model_fields:
        of = next((schedule for begin, schedule in _KEYS_OF.items() if key.startswith(begin)), None)
        value = recipe.schedule_key(key)
        if of is None or value is None or of in (recipe.schedule, recipe.llm_schedule):
            continue
        chosen = repr(recipe.schedule) + (f" over {recipe.llm_schedule!r}" if recipe.fills_bubbles else "")
        refusals.add(
            f"{recipe.schedule_place(key)} = {value!r}: it is a key of the schedule {of!r}, and this one is "
            f"{chosen}; leave it out, or take {of!r}"
        )
    key = "context_parallel_assignment"
    if (value := recipe.schedule_key(key)) is not None:
        place = recipe.schedule_place(key)
        readers = recipe.modules if place == f"parallelism.{key}" else [recipe.llm]
        if not any(token_axes(recipe, name) for name in readers):
            refusals.add(
                f"{place} = {value!r}: no ranks share the tokens of a sample; leave it out, or give "
                f"{recipe.llm!r} a context_parallel_degree above 1, or tensor parallel ranks and "
                "enable_sequence_parallel"
            )


def _bubble_fill(recipe: Recipe, adapters: Mapping[str, Adapter], shapes: Shapes | None, refusals: Refusals) -> None:
    """Encoders that fill the gaps of the LLM's pipeline must lie there, and one be cut by the key for slices."""
    wiring = recipe.wiring
    topology = wiring.topology
    fillers = [n for n in topology.names if n in topology.after_llm or (n != recipe.llm and not topology.inputs(n))]
    ranks = set(wiring.meshes[recipe.llm].ranks)
    if not any(ranks & set(wiring.meshes[name].ranks) for name in fillers):
        refusals.add(
            "parallelism.pipeline_parallel_schedule = 'bubble_fill': no encoder, nor a module after the LLM, shares "
            f"ranks with {recipe.llm!r} "
            f"({','.join(map(str, sorted(ranks)))}), whose gaps it would fill; put one there, or take the schedule "
            "1f1b, interleaved or zero_bubble"
        )
    if recipe.schedule_key("bubble_fill_in_collectives"):
        _in_collectives(recipe, refusals)
    key = "bubble_fill_layers_per_slice"
    if shapes is None or (value := recipe.schedule_key(key)) is None:
        return
    others = [name for name in wiring.topology.names if name != recipe.llm and name in adapters]
    reasons = {name: reason_not_sliced(recipe, name, adapters[name], shapes) for name in others}
    if others and all(reasons.values()):
        listed = "; ".join(f"{name!r}: {reason}" for name, reason in reasons.items())
        refusals.add(f"{recipe.schedule_place(key)} = {value!r}: it cuts no module ({listed}); leave it out")


_NOT_BESIDE = {axis: DEGREE_OF_AXIS[axis] for axis in ("cp", "dp_shard")} | {"ep": EXPERT_DEGREE}
"""Axes whose ranks meet in collectives inside a module, and the keys of their sizes; beside on a GPU, "tp" may."""


def _in_collectives(recipe: Recipe, refusals: Refusals) -> None:
    """What runs in the LLM's collectives may have none of its own, in which ranks would have to be at the same time. Of
    tensor parallelism it may on GPUs: which the run has is not known here (`check_device`)."""
    key = recipe.schedule_place("bubble_fill_in_collectives")
    llm = recipe.wiring.meshes[recipe.llm]
    if llm.axis_size("tp") == 1:
        refusals.add(
            f"{key} = True: {recipe.llm!r} has a tensor_parallel_degree of 1, and so no collectives in which encoders "
            "could run; leave it out, or give the LLM tensor parallel ranks"
        )
    if after := sorted(recipe.wiring.topology.after_llm):
        refusals.add(
            f"{key} = True: {listed(after)}: no kernels of modules after the LLM run in its collectives; leave the key "
            "out, bubble_fill has their slices in the gaps of the pipeline"
        )
    for has in _meeting_beside(recipe, _NOT_BESIDE):
        refusals.add(
            f"{key} = True: {has}; what runs in the LLM's collectives may have none of its own, give its ranks to "
            "data_parallel_replicate_degree"
        )


def check_device(recipe: Recipe, *, asynchronous: bool) -> None:
    """Check that the device of a run does what `recipe` asks of it.

    Args:
        asynchronous: whether it is a GPU, to which the host only queues work.

    Raises:
        RecipeError: all that it does not, a line each.
    """
    refusals = Refusals()
    for need in () if asynchronous else needs_of_device(recipe):
        refusals.add(f"{need}; on CPUs give its ranks to data_parallel_replicate_degree, or leave the key out")
    refusals.finish()


def needs_of_device(recipe: Recipe) -> Iterator[str]:
    """What no CPU can do that `recipe` asks for, with the reasons."""
    key = "bubble_fill_in_collectives"
    if recipe.fills_bubbles and recipe.schedule_key(key):
        for has in _meeting_beside(recipe, {"tp": DEGREE_OF_AXIS["tp"]}):
            yield (
                f"{recipe.schedule_place(key)} = True: {has}, which needs GPUs: on CPUs ranks halt encoders wherever a "
                "collective of the LLM ends, so that one would wait in the encoder's for one that halts before it"
            )


def _meeting_beside(recipe: Recipe, axes: Mapping[str, str]) -> Iterator[str]:
    """The modules on ranks of the LLM's whose ranks meet inside along some of `axes`, given with their keys."""
    meshes = recipe.wiring.meshes
    for name, mesh in meshes.items():
        some = [f"{key} = {mesh.axis_size(axis)}" for axis, key in axes.items() if mesh.axis_size(axis) > 1]
        if name == recipe.llm or not some or not set(mesh.ranks) & set(meshes[recipe.llm].ranks):
            continue
        owner = recipe.wiring.tables[name]
        takes = "" if owner == name else f" ({name!r} takes the mesh of {owner!r}: give it a table)"
        yield f"{name!r} has a {' and a '.join(some)}{takes}"


def _references(recipe: Recipe, refusals: Refusals) -> None:
    """Refuse `[checkpoint] frozen = "reference"` where there is nothing to refer to, or something else."""
    names = referenced(recipe)
    if not names:
        refusals.add(
            "checkpoint.frozen = 'reference': no module is frozen whole (trainable = false, no lora) and has an "
            "initial_load_path to refer to; write 'once'"
        )
    own = [name for name in names if name not in recipe.checkpoint.exclude_from_loading]
    if recipe.checkpoint.initial_load_path and own:
        refusals.add(
            f"checkpoint.frozen = 'reference': checkpoint.initial_load_path gives {', '.join(own)} other weights than "
            "their directories have; write 'once', or name them in checkpoint.exclude_from_loading"
        )
