"""What a run has left, for one process: its recipe, and the tensors of a checkpoint, verified as they are read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hetmesh.checkpoint.fit import MODEL
from hetmesh.checkpoint.reading import Index, read_alone
from hetmesh.checkpoint.resume import RUN, RunState, configs
from hetmesh.errors import CheckpointError, RecipeError
from hetmesh.files import from_json, read_file
from hetmesh.models import Adapter, pretrained_of
from hetmesh.models.weights.fill_module import unwrapped_name
from hetmesh.models.weights.load import check_weights, own_tensors, read_tensors
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.recipe.recipe import Recipe, place_beside
from hetmesh.recipe.sections import freeze
from hetmesh.records.checkpoint_folders import RESTORE, complete_steps, newest_step, step_of
from hetmesh.records.dump_folder import CODE_FOLDER, RECIPE_FILE
from hetmesh.resolve.directories import check_references, references
from hetmesh.resolve.modules import empty_module
from hetmesh.resolve.resolved import ResolvedRecipe, resolve


@dataclass(frozen=True, eq=False)
class SavedRun:
    """A run, by its recipe as it was last started, and the step folder `path` of one of its checkpoints. Made by
    `saved_run`, or from a recipe at hand; `known` is that recipe, if it is resolved already."""

    recipe: Recipe
    path: Path
    known: ResolvedRecipe | None = None

    @cached_property
    def resolved(self) -> ResolvedRecipe:
        """What the recipe means."""
        return self.known or resolve(self.recipe)

    @cached_property
    def index(self) -> Index:
        """Of the checkpoint. Raises CheckpointError: it cannot be read, or has changed."""
        return Index.of(self.path)

    @cached_property
    def _bytes(self) -> Mapping[str, int]:
        """How many bytes the files hold of each value."""
        sizes: Counter[str] = Counter()
        for part in self.index.sums:
            sizes[part.name] += part.length
        return sizes

    @cached_property
    def _entries(self) -> Mapping[str, tuple[str, TensorStorageMetadata]]:
        """DCP's names and descriptions of tensors, by their names here."""
        entries = {}
        for key, entry in self.index.saved.items():
            if key.startswith(MODEL) and isinstance(entry, TensorStorageMetadata):
                entries[unwrapped_name(key.removeprefix(MODEL))] = (key, entry)
        return entries

    @cached_property
    def state(self) -> RunState:
        """What the checkpoint says about its run. Raises CheckpointError: it cannot be read."""
        state = {RUN: ""}
        if RUN in self.index.saved:
            self._load(state)
        return RunState.of(state[RUN])

    @cached_property
    def _referred(self) -> Mapping[str, Referred]:
        """Modules that the checkpoint only refers to, by name."""
        if not (saved := self.state.references):
            return {}
        check_references(self.path, saved, references(self.recipe, saved))
        adapters = self.resolved.adapters
        return {name: Referred.of(self.recipe, name, adapters[name]) for name in saved}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of parameters and buffers, `<module>.<name>`. Raises CheckpointError: see `index`."""
        return (*self._entries, *(f"{m}.{key}" for m, referred in self._referred.items() for key in referred.tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one of `names`."""
        return tuple(self._entries[name][1].size if name in self._entries else self._elsewhere(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Of one of `names`."""
        return self._entries[name][1].properties.dtype if name in self._entries else self._elsewhere(name).dtype

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors on the CPU, whatever layout wrote them. Raises CheckpointError: they cannot be read, or their
        bytes have changed since they were written."""
        tensors = {}
        for name in dict.fromkeys(names):
            shape, dtype = self.shape(name), self.dtype(name)
            needed = math.prod(shape) * dtype.itemsize
            if name in self._entries and (stored := self._bytes.get(self._entries[name][0], 0)) < needed:
                raise CheckpointError(
                    f"checkpoint {self.path} is damaged: {name} {list(shape)} needs {needed} bytes, its files hold "
                    f"{stored}; restore it from a copy"
                )
            tensors[name] = torch.empty(shape, dtype=dtype)
        self.read_into(tensors)
        return tensors

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """The same into tensors that exist already, by name; they may be overwritten with bytes that have changed."""
        self._load({self._entries[name][0]: tensor for name, tensor in tensors.items() if name in self._entries})
        for module, referred in self._referred.items():
            prefix = f"{module}."
            referred.read({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})

    def _elsewhere(self, name: str) -> Tensor:
        module, _, key = name.partition(".")
        return self._referred[module].tensors[key]

    def _load(self, state: dict[str, Any]) -> None:
        """Read values of the checkpoint, in place."""
        try:
            read_alone(self.path, state, self.index)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {RESTORE}") from error


@dataclass(frozen=True, eq=False)
class Referred:
    """A module that a checkpoint refers to: its directory, the names of tensors there, and `tensors` without values."""

    pretrained: Pretrained
    adapter: Adapter
    names: Mapping[str, str]
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, recipe: Recipe, name: str, adapter: Adapter) -> Referred:
        """Module `name` of `recipe`, from the directory that it names."""
        pretrained, module = pretrained_of(name, recipe.modules[name]), empty_module(recipe, adapter, name)
        assert pretrained is not None  # else nothing could be referred to
        names = check_weights(adapter, module, pretrained)
        names |= {name: names[first] for name, first in own_tensors(module)[1].items()}  # tied ones
        return cls(pretrained, adapter, names, module.state_dict())

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Read values into whole tensors."""
        read_tensors(self.adapter, self.pretrained, self.names, tensors.items())


def saved_run(folder: Path, step: int | None = None) -> SavedRun:
    """The run in a dump folder and its newest complete checkpoint, or that of `step`.

    Raises:
        RecipeError: there is no run in the folder, it kept no checkpoint, or not that one, or the recipe or directories
            now describe another model than the checkpoint's.
        CheckpointError: the checkpoint cannot be read, its folder is named after another step, or the newest one has
            lost its checksums.
    """
    recipe = run_recipe(folder)
    checkpoints = folder / recipe.checkpoint.folder
    try:
        steps = complete_steps(checkpoints)
        newest = newest_step(checkpoints) if step is None else step
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise RecipeError(f"{checkpoints} cannot be read: {error.strerror or error}") from error
    if not steps:
        raise RecipeError(
            f"{folder}: the run kept no checkpoint, so its weights are gone; train again with [checkpoint] enable = "
            "true (--checkpoint.enable true)"
        )
    if newest not in steps:
        raise RecipeError(f"{checkpoints} has no complete checkpoint of step {newest}; there are {steps}")
    run = SavedRun(recipe, checkpoints / f"step-{newest}")
    run.state.check_name(run.path)
    run.state.check_model(recipe, configs(recipe.modules), run.path)
    return run


def run_recipe(folder: Path) -> Recipe:
    """The recipe of the run in a dump folder. Raises RecipeError: there is none, or it is of another version."""
    file = folder / RECIPE_FILE
    try:
        raw: Any = from_json(read_file(file))
    except OSError as error:
        reason, advice = (error.strerror or str(error)).lower(), "give the dump_folder of a run"
        top, step = next((p for p in folder.parents if (p / RECIPE_FILE).is_file()), None), step_of(folder)
        if top is not None and step is not None:
            advice = f"it is a checkpoint of the run {top}: give that, and --step {step}"
        raise RecipeError(
            f"{folder}: there is no run in it ({RECIPE_FILE} cannot be read: {reason}); {advice}"
        ) from error
    except ValueError as error:
        raise RecipeError(f"{file} is no JSON: {error}") from error
    code = raw.pop(CODE_FOLDER, None) if isinstance(raw, dict) else None
    try:
        whole = Recipe.model_validate(freeze(raw))
        # All defaults are in the file; what a recipe was given and what it was not makes a difference to some checks.
        recipe = Recipe.model_validate(freeze(whole.model_dump(mode="json", by_alias=True, exclude_defaults=True)))
    except ValidationError as error:
        first = error.errors()[0]
        raise RecipeError(
            f"{file} is no recipe of this version: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error
    place_beside(recipe, code)
    return recipe
