"""The recipe: a TOML file in torchtitan's vocabulary, read into one frozen, checked value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from hetmesh.errors import RecipeError, Refusals
from hetmesh.files import from_toml, read_text
from hetmesh.recipe import sections as sections
from hetmesh.recipe.batch_sizes import BatchSizes, batch_sizes
from hetmesh.recipe.hf_path import expand_hf_path
from hetmesh.recipe.keys import check_keys, unknown, valid_keys
from hetmesh.recipe.overrides import apply_override, parse_overrides
from hetmesh.recipe.section import freeze, thaw

if TYPE_CHECKING:
    from hetmesh.recipe.wiring import Wiring

LAYOUT_KEYS = frozenset(sections.ModuleParallelism.model_fields) - frozenset(sections.ScheduleKeys.model_fields)


class Recipe(sections.Section):
    """What a run trains, where, and how. Frozen, hashable and picklable; equal on every rank.

    Made by `load_recipe` or `parse_recipe`, which check everything that needs no model: keys, types, ranks, degrees,
    boundaries and batch sizes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ignored_types=(cached_property,))

    modules: Annotated[Mapping[str, sections.Module], Field(min_length=1), AfterValidator(freeze)]
    job: sections.JobKeys = sections.JobKeys()
    model: sections.ModelKeys = sections.ModelKeys()
    boundaries: tuple[sections.Boundary, ...] = ()
    parallelism: sections.Parallelism = sections.Parallelism()
    data: sections.Data = sections.Data()
    balance: sections.Balance = sections.Balance()
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
    elastic: sections.Elastic = sections.Elastic()
    debug: sections.Debug = sections.Debug()
    without_effect: Annotated[tuple[str, ...], Field(exclude=True)] = ()  # keys that are taken but do nothing, in words

    @cached_property
    def wiring(self) -> Wiring:
        """Which modules there are, who feeds whom and where each lies. With the models it makes the ModuleGraph."""
        # Meshes import torch (a second or more): a misspelt key is reported before that.
        from hetmesh.recipe.wiring import wiring

        return wiring(self)

    @property
    def code_folder(self) -> str | None:
        """The folder of the recipe's file, where it names code (`place_beside`)."""
        losses = (module.loss for module in self.modules.values() if module.loss is not None)
        tables = (self.data, self.optimizer, *self.modules.values(), *losses)
        return next((table.folder for table in tables if table.folder is not None), None)

    @property
    def llm(self) -> str:
        """The module that computes the loss: the LLM."""
        return self.wiring.llm

    @property
    def world_size(self) -> int:
        """Processes that the recipe needs."""
        return self.wiring.world_size

    @property
    def lanes(self) -> int:
        """Data-parallel coordinates of the LLM."""
        return self.wiring.lanes(self.llm)

    @cached_property
    def batch(self) -> BatchSizes:
        """The batch sizes, with what the recipe leaves out filled in."""
        return batch_sizes(
            local_batch_size=self.training.local_batch_size,
            global_batch_size=self.training.global_batch_size,
            microbatch_size=self.schedule_key("pipeline_parallel_microbatch_size"),
            lanes=self.lanes,
        )

    def with_global_batch_size(self, size: int) -> Recipe:
        """The same with `size` samples per optimizer step."""
        training = self.training.model_copy(update={"global_batch_size": size})
        copy = self.model_copy(update={"training": training})
        copy.__dict__.pop("batch", None)  # which was worked out from the other size
        return copy

    @property
    def schedule(self) -> str:
        """The schedule policy's name."""
        return self.schedule_key("pipeline_parallel_schedule") or "sequential"

    @property
    def llm_schedule(self) -> str:
        """The policy by which the LLM's own stages take turns: what bubble_fill fills, else `schedule`."""
        return (self.schedule_key("bubble_fill_schedule") or "1f1b") if self.fills_bubbles else self.schedule

    @property
    def fills_bubbles(self) -> bool:
        """Whether slices of encoders run in the gaps of the LLM's pipeline."""
        return self.schedule == "bubble_fill"

    def schedule_key(self, key: str) -> Any:
        """A key of the whole run's schedule, from the LLM's table or the flat one; None if neither has it."""
        own = self.parallelism.modules.get(self.llm)
        value = None if own is None else getattr(own, key)
        return getattr(self.parallelism, key) if value is None else value

    def schedule_place(self, key: str) -> str:
        """The full name of a key of the whole run's schedule, for messages: in the LLM's table or the flat one."""
        own = self.parallelism.modules.get(self.llm)
        return f"parallelism.{key}" if own is None or getattr(own, key) is None else f"parallelism.{self.llm}.{key}"


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe at `path` and apply `overrides`, e.g. `("--training.steps", "20", "--modules.llm.lr=1e-3")`.

    Raises:
        RecipeError: the file cannot be read, is no TOML, or does not describe a run; the message names the file, the
            key, what was given and what is valid.
    """
    if Path(path).suffix == ".py":
        raise RecipeError(
            f"recipe {path}: a Python config, as torchtitan has from 0.3 on; recipes are TOML (`hetmesh init`)"
        )
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:  # no UTF-8, or a name that holds a null byte
        reason = error.strerror.lower() if isinstance(error, OSError) and error.strerror else error
        raise RecipeError(f"recipe {path} cannot be read: {reason}") from error
    try:
        recipe = parse_recipe(text, overrides)
    except RecipeError as error:
        raise RecipeError("\n".join(f"{path}: {line}" for line in str(error).split("\n"))) from error.__cause__
    place_beside(recipe, str(Path(path).resolve().parent))
    return recipe


def place_beside(recipe: Recipe, folder: str | None) -> None:
    """Say in which folder the recipe's file lies, to the tables that name code, which may lie there too; None: it is
    not known."""
    for module in recipe.modules.values():
        if ":" in module.model:
            module.beside(folder)
        if module.loss is not None and ":" in module.loss.kind:
            module.loss.beside(folder)
    if any(":" in source for source in (recipe.data.source, *(table.source for table in recipe.data.mixture))):
        recipe.data.beside(folder)
    if any(":" in name for name in recipe.optimizer.names):
        recipe.optimizer.beside(folder)


def parse_recipe(given: str | Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """`load_recipe` of a recipe's text, or of its tables as a mapping: `{"modules": {"llm": {"model": "qwen3"}}}`.

    Keys and values are checked first, then how they fit together.

    Raises:
        RecipeError: it does not describe a run; the message names the key, what was given and what is valid.
    """
    refusals = Refusals()
    raw = _tables(given)
    changes = list(parse_overrides(overrides))
    for path, value in changes:
        if path[0] == "model":
            raw = apply_override(raw, path, value)
    raw = expand_hf_path(raw)
    for path, value in changes:  # also of what the directory expands to
        raw = apply_override(raw, path, value)
    raw, without_effect = check_keys(raw, refusals)
    modules = raw.get("modules")
    if not modules:
        refusals.add(
            "[modules.<name>] is missing: a recipe describes at least one module, or names a Hugging Face directory in "
            "[model] hf_path"
        )
        refusals.finish()
    assert modules is not None
    _check_module_names(raw, refusals)
    raw["parallelism"] = _merge_flat(raw.get("parallelism", {}), modules)
    try:
        recipe = Recipe.model_validate(freeze({**raw, "without_effect": without_effect}))
    except ValidationError as error:
        refusals.said += _messages(error)
        raise RecipeError("\n".join(refusals.said)) from error
    refusals.finish()
    _check_schedule_keys(recipe, refusals)
    with refusals.collect():
        _ = recipe.batch
    _check_balance(recipe, refusals)
    _check_data(recipe, refusals)
    if recipe.elastic and not recipe.checkpoint.enable:
        refusals.add("elastic: it takes checkpoint.enable = true; without, a run in another layout would begin anew")
    refusals.finish()
    return recipe


def _tables(given: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return thaw(given)
    try:
        return from_toml(given)
    except ValueError as error:
        raise RecipeError(f"not valid TOML: {error}") from error


def _check_schedule_keys(recipe: Recipe, refusals: Refusals) -> None:
    """Those of the whole run are given once, or twice alike: in `[parallelism]`, in the LLM's table."""
    for name, table in recipe.parallelism.modules.items():
        for key in sections.ScheduleKeys.model_fields:
            flat, own = getattr(recipe.parallelism, key), getattr(table, key)
            if own is not None and name != recipe.llm:
                refusals.add(
                    f"parallelism.{name}.{key}: the schedule is the whole run's; write it in [parallelism] or in "
                    f"[parallelism.{recipe.llm}]"
                )
            elif None not in (flat, own) and flat != own:
                refusals.add(
                    f"parallelism.{key} = {flat!r} and parallelism.{name}.{key} = {own!r}: both are of the whole run's "
                    f"schedule; give one of them, or both alike"
                )


def _check_balance(recipe: Recipe, refusals: Refusals) -> None:
    from hetmesh.balance.policies import DEFERRING  # where needed, as the tables look names up

    keys = recipe.balance
    for key in ("max_tokens", "microbatch_sizes", "microbatch_shares"):
        for name in getattr(keys, key):
            if name not in recipe.modules:
                refusals.add(f"balance.{key}.{name}: no such module; there are {', '.join(sorted(recipe.modules))}")
    if recipe.llm in keys.microbatch_sizes:
        refusals.add(
            f"balance.microbatch_sizes.{recipe.llm}: that of the LLM is parallelism.pipeline_parallel_microbatch_size "
            "or training.local_batch_size"
        )
    if recipe.llm in keys.microbatch_shares:
        refusals.add(f"balance.microbatch_shares.{recipe.llm}: lanes of encoders share microbatches, not the LLM's")
    for name in sorted(set(keys.microbatch_sizes) & set(keys.microbatch_shares)):
        refusals.add(
            f"balance.microbatch_sizes.{name} and balance.microbatch_shares.{name}: lanes take samples of each "
            "microbatch or whole microbatches; give one of them"
        )
    idle = [f"balance.{key}" for key in ("max_tokens", "deferral") if getattr(keys, key) not in ({}, False, "auto")]
    idle += ["balance.microbatches = 'free'"] if keys.microbatches == "free" else []
    if keys.policy == "none" and idle:
        refusals.add(f"{', '.join(idle)}: balance.policy = 'none' keeps samples where they are drawn; take another one")
    elif keys.deferral is True and keys.policy not in DEFERRING:
        refusals.add(f"balance.deferral: balance.policy = {keys.policy!r} defers nothing; {', '.join(DEFERRING)} do")
    if keys.split_deferred_backward and (keys.deferral is False or keys.policy not in DEFERRING):
        refusals.add(
            "balance.split_deferred_backward: nothing is deferred; it takes balance.deferral = true or 'auto', and "
            f"balance.policy {', '.join(DEFERRING)}"
        )


def _check_data(recipe: Recipe, refusals: Refusals) -> None:
    keys, before = recipe.data, -1
    names = [table.name or table.source for table in keys.mixture]
    valid = ["shuffled", "given", *(["tokens", *sorted(recipe.modules)] if not keys.phases else [])]
    if keys.order not in valid:
        beside = " beside data.phases" if keys.phases else ""
        refusals.add(f"data.order = {keys.order!r}: valid{beside} are {', '.join(valid)}")
    if keys.phases and not keys.mixture:
        refusals.add("data.phases: they are shares of the sources of [[data.mixture]], and there are none")
    for i, table in enumerate(keys.mixture):
        if keys.phases and "weight" in table.model_fields_set:
            refusals.add(f"data.mixture[{i}].weight = {table.weight}: data.phases say the weights; leave it out")
    for i, phase in enumerate(keys.phases):
        here = f"data.phases[{i}]"
        if i == 0 and phase.start_step:
            refusals.add(f"{here}.start_step = {phase.start_step}: the first phase begins at step 0")
        elif phase.start_step <= before:
            refusals.add(
                f"{here}.start_step = {phase.start_step}: the phase before begins at {before}; give a later step"
            )
        before = phase.start_step
        for name in sorted(set(phase.weights) - set(names)) if names else ():
            refusals.add(f"{here}.weights.{name}: {unknown('source', name, names)}")
        if not sum(phase.weights.values()) > 0:
            refusals.add(f"{here}.weights = {dict(phase.weights)}: they must sum to more than 0")


def _check_module_names(raw: Mapping[str, Any], refusals: Refusals) -> None:
    modules = raw["modules"]
    for name in modules:
        # names become prefixes of parameter names and keys of [parallelism]
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name in valid_keys("parallelism"):
            refusals.add(
                f"modules.{name}: a module's name is made of letters, digits and _, and is no key of [parallelism]"
            )
    for name, value in raw.get("parallelism", {}).items():
        if isinstance(value, Mapping) and name not in modules:
            refusals.add(f"parallelism.{name}: {unknown('module', name, modules)}")


def _merge_flat(parallelism: Mapping[str, Any], modules: Mapping[str, Any]) -> dict[str, Any]:
    """The raw `[parallelism]` with flat layout keys moved into every module's table, where they do not override."""
    tables = {name: dict(table) for name, table in parallelism.items() if isinstance(table, Mapping)}
    flat = {key: value for key, value in parallelism.items() if key not in tables}
    layout = {key: value for key, value in flat.items() if key in LAYOUT_KEYS}
    merged = {name: layout | tables.get(name, {}) for name in modules}
    run_wide = {key: value for key, value in flat.items() if key not in layout}
    experts = {key: value for key, value in layout.items() if key in sections.EXPERT_KEYS}
    own = {name: table for name, table in merged.items() if table}
    return run_wide | {"modules": own, "experts_of_all": experts}


def _messages(error: ValidationError) -> list[str]:
    """pydantic's complaints in our words: key, what was given, what is valid."""
    said = []
    for complaint in error.errors():
        key = ""
        for part in complaint["loc"]:
            key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
        key = key.replace("parallelism.modules.", "parallelism.", 1)
        says = complaint["msg"].removeprefix("Value error, ").removeprefix("Input ")
        says = says.replace("a valid tuple", "an array").replace("a valid dictionary", "a table")
        if complaint["type"] == "missing":
            said.append(f"{key} is missing")
        elif complaint["type"] == "extra_forbidden":
            said.append(f"{key}: {unknown('key', str(complaint['loc'][-1]), _keys_at(complaint['loc'][:-1]))}")
        else:
            said.append(f"{key} = {complaint['input']!r}: {says}")
    return said


def _keys_at(place: Sequence[int | str]) -> Iterator[str]:
    """The keys of the table at `place`: names of fields, of tables, and numbers in arrays."""
    table: type[sections.Section] = Recipe
    for part in place:
        if (field := table.model_fields.get(str(part))) is not None:
            table = next(_tables_in(field.annotation), table)  # a module may be called as a key is
    return (field.alias or name for name, field in table.model_fields.items())


def _tables_in(annotation: Any) -> Iterator[type[sections.Section]]:
    if isinstance(annotation, type) and issubclass(annotation, sections.Section):
        yield annotation
    for part in get_args(annotation):
        yield from _tables_in(part)
