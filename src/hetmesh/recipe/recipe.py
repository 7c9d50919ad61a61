"""The recipe: a TOML file in torchtitan's vocabulary, read into one frozen, checked value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tomli
from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from hetmesh.errors import RecipeError
from hetmesh.recipe import sections as sections
from hetmesh.recipe.batch_sizes import BatchSizes, batch_sizes
from hetmesh.recipe.keys import check_keys, unknown, valid_keys
from hetmesh.recipe.overrides import apply_override, parse_overrides

if TYPE_CHECKING:
    from hetmesh.graph.module_graph import ModuleGraph
    from hetmesh.layout.mesh import MeshSpec

LAYOUT_KEYS = frozenset(sections.ModuleParallelism.model_fields) - frozenset(sections.ScheduleKeys.model_fields)


class Recipe(sections.Section):
    """What a run trains, where, and how. Frozen, hashable and picklable; equal on every rank.

    Made by `load_recipe` or `parse_recipe`, which check everything that needs no model: keys, types, ranks, degrees,
    boundaries and batch sizes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ignored_types=(cached_property,))

    modules: Annotated[Mapping[str, sections.Module], Field(min_length=1), AfterValidator(sections.freeze)]
    job: sections.JobKeys = sections.JobKeys()
    boundaries: tuple[sections.Boundary, ...] = ()
    parallelism: sections.Parallelism = sections.Parallelism()
    data: sections.Data = sections.Data()
    training: sections.Training = sections.Training()
    activation_checkpoint: sections.ActivationCheckpoint = sections.ActivationCheckpoint()
    compile: sections.Compile = sections.Compile()
    optimizer: sections.Optimizer = sections.Optimizer()
    lr_scheduler: sections.LRScheduler = sections.LRScheduler()
    checkpoint: sections.Checkpoint = sections.Checkpoint()
    metrics: sections.Metrics = sections.Metrics()
    validation: sections.Validation = sections.Validation()
    profiling: sections.Profiling = sections.Profiling()
    comm: sections.Comm = sections.Comm()
    debug: sections.Debug = sections.Debug()

    # The mesh room imports torch (a second or more), so it is imported where it is first needed: a misspelt key is
    # reported at once.

    @cached_property
    def graph(self) -> ModuleGraph:
        """The static module graph, without layers: those come from adapters (`graph_with`)."""
        return self.graph_with({})

    def graph_with(self, layers: Mapping[str, Sequence[str]]) -> ModuleGraph:
        """The static module graph with each module's layer names, as its adapter gives them."""
        from hetmesh.recipe.meshes import module_graph

        return module_graph(self, layers)

    def meshes(self) -> dict[str, MeshSpec]:
        """Each module's mesh, by module name."""
        return {module.name: module.mesh for module in self.graph.modules}

    @property
    def sink(self) -> str:
        """The module that computes the loss: the LLM."""
        return self.graph.sink.name

    @property
    def world_size(self) -> int:
        """Processes that the recipe needs."""
        return 1 + self.graph.ranks[-1]

    @property
    def lanes(self) -> int:
        """Data-parallel coordinates of the LLM."""
        return self.graph.sink.num_lanes

    @cached_property
    def batch(self) -> BatchSizes:
        """The batch sizes, with what the recipe leaves out filled in."""
        return batch_sizes(
            local_batch_size=self.training.local_batch_size,
            global_batch_size=self.training.global_batch_size,
            microbatch_size=self.schedule_key("pipeline_parallel_microbatch_size"),
            lanes=self.lanes,
        )

    @property
    def schedule(self) -> sections.SchedulePolicy:
        """The schedule policy's name."""
        return self.schedule_key("pipeline_parallel_schedule") or "sequential"

    def schedule_key(self, key: str) -> Any:
        """A key of the whole run's schedule, from the sink's table or the flat one; None if neither has it."""
        own = self.parallelism.modules.get(self.sink)
        value = None if own is None else getattr(own, key)
        return getattr(self.parallelism, key) if value is None else value


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe at `path` and apply `overrides`, e.g. `("--training.steps", "20", "--modules.llm.lr=1e-3")`.

    Raises:
        RecipeError: the file cannot be read, is no TOML, or does not describe a run; the message names the file, the
            key, what was given and what is valid.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # no UTF-8, or a name that holds a null byte
        reason = error.strerror.lower() if isinstance(error, OSError) and error.strerror else error
        raise RecipeError(f"recipe {path} cannot be read: {reason}") from error
    try:
        return parse_recipe(text, overrides)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error.__cause__


def parse_recipe(text: str, overrides: Sequence[str] = ()) -> Recipe:
    """`load_recipe` of a recipe's text."""
    try:
        raw: dict[str, Any] = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise RecipeError(f"not valid TOML: {error}") from error
    for path, value in parse_overrides(overrides):
        raw = apply_override(raw, path, value)
    raw = check_keys(raw)
    _check_module_names(raw)
    raw["parallelism"] = _merge_flat(raw.get("parallelism", {}), raw["modules"])
    try:
        recipe = Recipe.model_validate(sections.freeze(raw))
    except ValidationError as error:
        raise RecipeError(_message(error)) from error
    for name, table in recipe.parallelism.modules.items():
        for key in sections.ScheduleKeys.model_fields:
            if getattr(table, key) is not None and name != recipe.sink:
                raise RecipeError(
                    f"parallelism.{name}.{key}: the schedule is the whole run's; write it in [parallelism] or in "
                    f"[parallelism.{recipe.sink}]"
                )
    _ = recipe.batch
    return recipe


def _check_module_names(raw: Mapping[str, Any]) -> None:
    modules = raw.get("modules")
    if not modules:
        raise RecipeError("[modules.<name>] is missing: a recipe describes at least one module")
    for name in modules:
        # names become prefixes of parameter names and keys of [parallelism]
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name in valid_keys("parallelism"):
            raise RecipeError(
                f"modules.{name}: a module's name is made of letters, digits and _, and is no key of [parallelism]"
            )
    for name, value in raw.get("parallelism", {}).items():
        if isinstance(value, Mapping) and name not in modules:
            raise RecipeError(f"parallelism.{name}: {unknown('module', name, modules)}")


def _merge_flat(parallelism: Mapping[str, Any], modules: Mapping[str, Any]) -> dict[str, Any]:
    """The raw `[parallelism]` with flat layout keys moved into every module's table, where they do not override."""
    tables = {name: dict(table) for name, table in parallelism.items() if isinstance(table, Mapping)}
    flat = {key: value for key, value in parallelism.items() if key not in tables}
    layout = {key: value for key, value in flat.items() if key in LAYOUT_KEYS}
    merged = {name: layout | tables.get(name, {}) for name in modules}
    run_wide = {key: value for key, value in flat.items() if key not in layout}
    return run_wide | {"modules": {name: table for name, table in merged.items() if table}}


def _message(error: ValidationError) -> str:
    """pydantic's first complaint in our words: key, what was given, what is valid."""
    details = error.errors()
    first = details[0]
    key = ""
    for part in first["loc"]:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
    key = key.replace("parallelism.modules.", "parallelism.", 1)
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    if first["type"] == "missing":
        return f"{key} is missing{more}"
    says = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{key} = {first['input']!r}: {says}{more}"
