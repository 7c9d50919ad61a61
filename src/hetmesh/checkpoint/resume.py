"""What a resumed run takes from its recipe and what from its checkpoint: changed keys are named, taken or refused."""

from __future__ import annotations

import contextlib
import functools
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from hetmesh.boundary import World
from hetmesh.checkpoint.reading import Index, read_index, read_into
from hetmesh.errors import CheckpointError, RecipeError
from hetmesh.files import from_json
from hetmesh.models import pretrained_of
from hetmesh.recipe.recipe import Recipe
from hetmesh.recipe.sections import ModuleParallelism
from hetmesh.resolve.references import References

FREE = frozenset({"job", "checkpoint", "metrics", "profiling", "comm", "validation"})
"""Tables that say nothing about what is trained: not worth a word."""

REFUSED = frozenset({"data.source", "data.mixture", "training.dtype", "debug.seed"})
"""Keys without which the saved state or position means something else."""

RUN = "extra.run"
"""What `run_state` is called in a checkpoint."""

ELSE = "start a new run from the saved weights: checkpoint.initial_load_path and another job.dump_folder"
ADVICE = f"restore it, or {ELSE}"

UNTRAINED = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"})
"""Keys of a config.json that say nothing about the trained model."""

_SHOWN = 8  # changes that a message names

Changes = dict[str, tuple[Any, Any]]
"""Dotted key -> its value in the checkpoint and in the recipe."""

Configs = Mapping[str, Mapping[str, Any]]
"""Module -> what the config.json of its directory says."""


def run_state(recipe: Recipe, **found: Any) -> str:
    """What a checkpoint says about its run: `found` are the fields of `RunState` but for recipe and versions."""
    return json.dumps({"recipe": recipe.model_dump(mode="json", by_alias=True), "versions": versions(), **found})


@functools.cache
def versions() -> dict[str, str]:
    """Of what computes: results may differ with another one."""
    found = {"python": platform.python_version()}
    for name in ("hetmesh", "torch", "transformers", "torchtitan"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@dataclass(frozen=True)
class RunState:
    """What a checkpoint says about its run.

    Attributes:
        recipe: as it was; None in an older checkpoint.
        step: it holds the state after so many; None in an older one.
        loss: of its last step; None in an older one.
        skipped_steps, samples_skipped: so far; skipped_in_a_row: the last ones.
        versions: of libraries, by name; empty in an older one.
        references: where the modules are that the checkpoint does not hold.
        experts: where experts lay (`ExpertPlacement.state`).
        configs: of the directories that modules come from; empty in an older one.
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

    @classmethod
    def of(cls, text: str) -> RunState:
        """What `run_state` wrote; of an empty text, nothing.

        Raises:
            CheckpointError: it did not write that.
        """
        try:
            found = from_json(text or "{}")
            state = cls(**{each.name: found[each.name] for each in fields(cls) if each.name in found})
            whole = all(isinstance(entry["files"], dict) and "path" in entry for entry in state.references.values())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"a checkpoint's {RUN} is not as training writes it: {error!r}") from error
        if not whole:
            raise CheckpointError(f"a checkpoint's {RUN} is not as training writes it: {state.references!r}")
        return state

    def check_name(self, path: Path) -> None:
        """Raise CheckpointError where the folder of this checkpoint, `path`, is named after another step."""
        if self.step is not None and path.name != f"step-{self.step}":
            raise CheckpointError(
                f"checkpoint {path} holds the state after step {self.step}: somebody has renamed it; call it "
                f"step-{self.step} again"
            )

    def check_model(self, recipe: Recipe, now: Configs, path: Path) -> None:
        """Refuse a model that this checkpoint, at `path`, fits and that is another one.

        Args:
            now: `configs` of `recipe`.

        Raises:
            RecipeError: names the key, both values and what to do.
        """
        check_model(changes(self.recipe, recipe), path)
        check_configs(self.configs, now, path)

    def other_versions(self) -> str:
        """Libraries that are others now, as text; empty if none is known to be."""
        now = versions()
        pairs = [(name, old, now.get(name, "none")) for name, old in self.versions.items()]
        return ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)


def saved_run(world: World, path: Path, index: Index | None = None) -> RunState:
    """What `run_state` put into the checkpoint at `path`, whose index is `index` if that was read. Collective.

    Raises:
        CheckpointError: it cannot be read.
    """
    state = {RUN: ""}
    index = index or read_index(world, path)
    if RUN in index.saved:
        read_into(world, path, state, index)
    return RunState.of(state[RUN])


def changes(saved: Mapping[str, Any] | None, recipe: Recipe) -> Changes:
    """The keys in which `recipe` differs from the one that was saved; empty if none was."""
    if saved is None:
        return {}
    old, new = (_flat(_with_tables(each)) for each in (saved, recipe.model_dump(mode="json", by_alias=True)))
    return {key: (old.get(key), new.get(key)) for key in sorted(old | new) if old.get(key) != new.get(key)}


def _with_tables(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with a table of parallelism for each of its modules: what no table says is as in an empty one."""
    empty = ModuleParallelism().model_dump(mode="json", by_alias=True)
    layout = _table(recipe.get("parallelism"))
    given = _table(layout.get("modules"))
    tables = {name: empty | _table(given.get(name)) for name in _table(recipe.get("modules"))}
    return {**recipe, "parallelism": {**layout, "modules": tables}}


def _table(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def check_changes(found: Changes, checkpoint: Path) -> None:
    """Refuse changes of what a resumed run cannot change.

    Raises:
        RecipeError: names the key, both values and what to do.
    """
    for key, (old, new) in found.items():
        family = key == "optimizer.name" and "SGD" in (old, new)  # Adam and AdamW have the same state
        if key in REFUSED or family:
            raise RecipeError(
                f"{key} = {_shown(new)}: the checkpoint {checkpoint} is of a run with {_shown(old)}; {ADVICE}"
            )


def check_model(found: Changes, checkpoint: Path) -> None:
    """Refuse a model that its checkpoint fits and that is another one: other modules, configs, adapters, masks or
    boundaries, but for dropout, which is a matter of training.

    Raises:
        RecipeError: names the key, both values and what to do.
    """
    for key, (old, new) in found.items():
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


def configs(recipe: Recipe) -> Configs:
    """What config.json says, of each module of `recipe` that comes from a directory.

    Raises:
        RecipeError: it cannot be read.
    """
    found = {name: pretrained_of(name, module) for name, module in recipe.modules.items()}
    return {name: each.config for name, each in found.items() if each is not None}


def check_configs(saved: Configs, now: Configs, checkpoint: Path) -> None:
    """Refuse directories whose config.json describes another model than it did when the run was started.

    Raises:
        RecipeError: names the module, the key, both values and what to do.
    """
    for name, config in now.items():
        old, new = _flat(saved.get(name, config)), _flat(config)
        for key in sorted(old | new):
            if old.get(key) != new.get(key) and "drop" not in key and key.rpartition(".")[2] not in UNTRAINED:
                raise RecipeError(
                    f"modules.{name}.initial_load_path: {key} = {_shown(new.get(key))} in its config.json; the "
                    f"checkpoint {checkpoint} is of a model with {_shown(old.get(key))}; restore the file, or {ELSE}"
                )


def described(found: Changes) -> str:
    """Changes as text: `optimizer.lr 0.002 -> 0.001, ...`; empty if there are none, cut short if there are many."""
    told = [f"{key} {_shown(old)} -> {_shown(new)}" for key, (old, new) in found.items()]
    return ", ".join(told[:_SHOWN]) + (f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else "")


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, each in value.items():
        name = f"{prefix}{key}"
        if name in FREE:
            continue
        out |= _flat(each, f"{name}.") if isinstance(each, Mapping) else {name: each}
    return {key.replace("parallelism.modules.", "parallelism."): each for key, each in out.items()}


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)
