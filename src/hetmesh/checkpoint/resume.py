"""What a resumed run takes from its recipe and what from its checkpoint: changed keys are named, taken or refused."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from hetmesh.boundary import World
from hetmesh.checkpoint.reading import Index, read_index, read_into
from hetmesh.errors import CheckpointError, RecipeError
from hetmesh.files import from_json
from hetmesh.formatting import listed
from hetmesh.models import pretrained_of
from hetmesh.recipe.recipe import Recipe
from hetmesh.recipe.section import flat, freeze
from hetmesh.recipe.sections import Module, ModuleParallelism
from hetmesh.resolve.directories import References

FREE = frozenset({"job", "checkpoint", "metrics", "profiling", "comm", "validation", "elastic"})
"""Tables that do not affect what is trained; their changes are not reported."""

REFUSED = frozenset({"data.source", "data.mixture", "data.order", "training.dtype", "debug.seed"})
"""Keys whose change gives the saved state or position another meaning."""

RUN = "extra.run"
"""The name of `run_state` in a checkpoint."""

ELSE = "start a new run from the saved weights: checkpoint.initial_load_path and another job.dump_folder"
ADVICE = f"restore it, or {ELSE}"

UNTRAINED = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"})
"""Keys of a config.json that do not affect the trained model."""

LAYOUT = ("parallelism.", "balance.", "training.local_batch_size", "training.global_batch_size")
"""What keys begin with on which it depends what deferral saves."""

_N_CHANGES = 8  # that a message names

Changes = dict[str, tuple[Any, Any]]
"""Dotted key -> its value in the checkpoint and in the recipe."""

Configs = Mapping[str, Mapping[str, Any]]
"""Module -> the config.json of its directory."""


def run_state(recipe: Recipe, **fields: Any) -> str:
    """The text of a checkpoint's `RunState`: `fields` are those other than recipe and versions."""
    return json.dumps({"recipe": recipe.model_dump(mode="json", by_alias=True), "versions": versions(), **fields})


@functools.cache
def versions() -> dict[str, str]:
    """Of Python and the libraries that compute: results may differ with another one."""
    numbers = {"python": platform.python_version()}
    for name in ("hetmesh", "torch", "transformers", "torchtitan"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            numbers[name] = metadata.version(name)
    return numbers


@dataclass(frozen=True)
class RunState:
    """A checkpoint's record of its run; fields that an older version did not write are None or empty.

    Attributes:
        step: after which it holds the state.
        loss: of that step.
        skipped_in_a_row: the last of `skipped_steps`.
        versions: of libraries, by name.
        references: where the modules are that the checkpoint does not hold.
        experts: placement of experts (`ExpertPlacement.state`).
        configs: of the directories that modules come from.
        profile: `Profile.digest` of what balancers and cuts went by; empty: FLOPs.
        deferral: whether samples were deferred, and why (`DeferralChoice`).
    """

    recipe: Mapping[str, Any] | None = None
    step: int | None = None
    loss: float | None = None
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    samples_skipped: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    references: References = field(default_factory=dict)
    experts: Mapping[str, Any] = field(default_factory=dict)
    configs: Configs = field(default_factory=dict)
    profile: str = ""
    deferral: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> RunState:
        """What `run_state` wrote, empty for an empty text. Raises CheckpointError: it did not write that."""
        try:
            content = from_json(text or "{}")
            names = [field.name for field in dataclasses.fields(cls) if field.name in content]
            state = cls(**{name: content[name] for name in names})
            if not all(isinstance(entry["files"], dict) and "path" in entry for entry in state.references.values()):
                raise ValueError(state.references)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"a checkpoint's {RUN} is not as training writes it: {error!r}") from error
        return state

    def check_name(self, path: Path) -> None:
        """Raise CheckpointError if the folder of this checkpoint, `path`, is named after another step."""
        if self.step is not None and path.name != f"step-{self.step}":
            raise CheckpointError(
                f"checkpoint {path} holds the state after step {self.step}: somebody has renamed it; call it "
                f"step-{self.step} again"
            )

    def check_model(self, recipe: Recipe, now: Configs, path: Path) -> None:
        """`check_model` and `check_configs` of this checkpoint, at `path`; `now` are the `configs` of `recipe`."""
        check_model(changes(self.recipe, recipe), path)
        check_configs(self.configs, now, path)

    def other_versions(self) -> str:
        """Libraries of another version now, as text; empty if there are none."""
        now = versions()
        pairs = [(name, old, now.get(name, "none")) for name, old in self.versions.items()]
        return ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)


def read_run(world: World, path: Path) -> tuple[Index, RunState]:
    """What a checkpoint holds, and its `run_state`. Collective. Raises CheckpointError: it cannot be read."""
    state, index = {RUN: ""}, read_index(world, path)
    if RUN in index.saved:
        read_into(world, path, state, index)
    return index, RunState.of(state[RUN])


def changes(saved: Mapping[str, Any] | None, recipe: Recipe) -> Changes:
    """The keys in which `recipe` differs from the one that was saved; empty if none was."""
    if saved is None:
        return {}
    with contextlib.suppress(ValueError):  # keys that an older version did not know have their defaults
        saved = Recipe.model_validate(freeze(saved)).model_dump(mode="json", by_alias=True)
    return _differing(*(_with_tables(table) for table in (saved, recipe.model_dump(mode="json", by_alias=True))))


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    before, after = _flat(old), _flat(new)
    return {k: (before.get(k), after.get(k)) for k in sorted(before | after) if before.get(k) != after.get(k)}


def _with_tables(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with a table of parallelism for each of its modules, by default an empty one."""
    empty, layout = ModuleParallelism().model_dump(mode="json", by_alias=True), _table(recipe.get("parallelism"))
    given = _table(layout.get("modules"))
    tables = {name: empty | _table(given.get(name)) for name in _table(recipe.get("modules"))}
    return {**recipe, "parallelism": {**layout, "modules": tables}}


def _table(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def check_changes(changed: Changes, checkpoint: Path) -> None:
    """Refuse changes of what a resumed run cannot change: a RecipeError names the key, both values and what to do."""
    for key, (old, new) in changed.items():
        family = key == "optimizer.name" and not {old, new} <= {"Adam", "AdamW"}  # which have the same state
        if key in REFUSED or family or (key == "optimizer.param_groups" and _chosen(old) != _chosen(new)):
            raise RecipeError(
                f"{key} = {_shown(new)}: the checkpoint {checkpoint} is of a run with {_shown(old)}; {ADVICE}"
            )


def _chosen(groups: Any) -> list[tuple[str, str]]:
    """Which parameters have which optimizer."""
    return [(group["pattern"], group["optimizer_name"]) for group in groups or ()]


def check_model(changed: Changes, checkpoint: Path) -> None:
    """Refuse another model that the checkpoint would fit: other modules, configs, adapters, masks or boundaries, except
    for dropout, which is a matter of training. A RecipeError names the key, both values and what to do."""
    for key, (old, new) in changed.items():
        if _of_model(key, old, new):
            raise RecipeError(
                f"{key} = {_shown(new)}: the checkpoint {checkpoint} is of a model with {_shown(old)}; {ADVICE}"
            )


def _of_model(key: str, old: Any, new: Any) -> bool:
    top, _, rest = key.partition(".")
    key = rest.partition(".")[2]
    if top == "boundaries":
        return sorted(map(json.dumps, old or ())) != sorted(map(json.dumps, new or ()))
    if top != "modules" or "drop" in key:
        return False
    given = key == "media" and None not in (old, new)  # without it, it is what the boundary says
    return given or key in ("model", "attention_mask") or key.startswith(("config.", "lora."))


def configs(modules: Mapping[str, Module]) -> Configs:
    """The config.json of each module that comes from a directory. Raises RecipeError: it cannot be read."""
    directories = {name: pretrained_of(name, module) for name, module in modules.items()}
    return {name: directory.config for name, directory in directories.items() if directory is not None}


def check_configs(saved: Configs, now: Configs, checkpoint: Path) -> None:
    """Refuse directories whose config.json describes another model than when the run was started: a RecipeError names
    the module, the key, both values and what to do."""
    for name, config in now.items():
        for key, (old, new) in _differing(saved.get(name, config), config).items():
            if "drop" not in key and key.rpartition(".")[2] not in UNTRAINED:
                raise RecipeError(
                    f"modules.{name}.initial_load_path: {key} = {_shown(new)} in its config.json; the checkpoint "
                    f"{checkpoint} is of a model with {_shown(old)}; restore the file, or {ELSE}"
                )


def described(changed: Changes) -> str:
    """Changes as text: `optimizer.lr 0.002 -> 0.001, ...`; empty if there are none, cut short if there are many."""
    return listed([f"{key} {_shown(old)} -> {_shown(new)}" for key, (old, new) in changed.items()], _N_CHANGES)


def _flat(value: Mapping[str, Any]) -> dict[str, Any]:
    """`value` by dotted key, without `FREE`."""
    found = flat({name: table for name, table in value.items() if name not in FREE})
    return {key.replace("parallelism.modules.", "parallelism."): inner for key, inner in found.items()}


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)
