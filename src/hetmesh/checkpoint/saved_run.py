"""What a run has left, for one process: its recipe, and the tensors of a checkpoint, verified as they are read."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hetmesh.checkpoint.reading import Planner, first_cause, saved_tensors
from hetmesh.checkpoint.resume import RUN, RunState, configs
from hetmesh.errors import CheckpointError, RecipeError
from hetmesh.files import from_json, read_file
from hetmesh.models import Adapter, pretrained_of
from hetmesh.models.weights.fill_module import WRAPPERS
from hetmesh.models.weights.load import check_weights, own_tensors, read_tensors
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.recipe.recipe import Recipe, place_beside
from hetmesh.recipe.sections import freeze
from hetmesh.records import checksums
from hetmesh.records.checkpoint_folders import complete_steps, newest_step, step_of
from hetmesh.records.dump_folder import CODE_FOLDER, RECIPE_FILE
from hetmesh.resolve.describe import describe
from hetmesh.resolve.modules import empty_module
from hetmesh.resolve.references import check_references, references_alone

MODEL = "model."
"""What names of parameters and buffers begin with in a checkpoint."""


@dataclass(frozen=True, eq=False)
class SavedRun:
    """A run and one of its checkpoints. Made by `saved_run`, or from a recipe at hand.

    Attributes:
        recipe: of the run, as it was last started.
        path: the step folder.
    """

    recipe: Recipe
    path: Path

    @cached_property
    def _sums(self) -> Mapping[str, dict[checksums.SavedPart, checksums.Sum]]:
        found: dict[str, dict[checksums.SavedPart, checksums.Sum]] = {}
        for part, crc in checksums.read_manifest(self.path).items():
            found.setdefault(part.name, {})[part] = crc
        return found

    @cached_property
    def _entries(self) -> Mapping[str, tuple[str, TensorStorageMetadata]]:
        _ = self._sums  # whose reading says whether the index is as it was written
        found = {}
        for key, entry in saved_tensors(self.path).items():
            if key.startswith(MODEL) and isinstance(entry, TensorStorageMetadata):
                found[_without_wrappers(key.removeprefix(MODEL))] = (key, entry)
        return found

    @cached_property
    def state(self) -> RunState:
        """What the checkpoint says about its run.

        Raises:
            CheckpointError: it cannot be read.
        """
        if RUN not in saved_tensors(self.path):
            return RunState()
        state = {RUN: ""}
        self._verified(RUN)
        self._load(state)
        return RunState.of(state[RUN])

    @cached_property
    def _referred(self) -> Mapping[str, Referred]:
        """Modules that the checkpoint only refers to, by name."""
        saved = self.state.references
        if not saved:
            return {}
        check_references(self.path, saved, references_alone(self.recipe, saved))
        adapters = describe(self.recipe)[1]
        return {name: Referred.of(self.recipe, name, adapters[name]) for name in saved}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of parameters and buffers, `<module>.<name>`.

        Raises:
            CheckpointError: the checkpoint's index cannot be read, or has changed.
        """
        return (*self._entries, *(f"{m}.{key}" for m, one in self._referred.items() for key in one.tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one of `names`."""
        return tuple(self._entries[name][1].size if name in self._entries else self._elsewhere(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Of one of `names`."""
        return self._entries[name][1].properties.dtype if name in self._entries else self._elsewhere(name).dtype

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors on the CPU, whatever layout wrote them.

        Raises:
            CheckpointError: they cannot be read, or their bytes have changed since they were written.
        """
        wanted = list(dict.fromkeys(names))
        self._verify(wanted)
        empty = {name: torch.empty(self.shape(name), dtype=self.dtype(name)) for name in wanted}
        self._fill(empty)
        return empty

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """The same into tensors that are there already, by name."""
        self._verify(tensors)
        self._fill(tensors)

    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        self._load({self._entries[name][0]: tensor for name, tensor in tensors.items() if name in self._entries})
        for module, one in self._referred.items():
            prefix = f"{module}."
            one.read({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})

    def _elsewhere(self, name: str) -> Tensor:
        module, _, key = name.partition(".")
        return self._referred[module].tensors[key]

    def _verify(self, names: Iterable[str]) -> None:
        """That the bytes of tensors of the checkpoint are those that were written, and as many as their shapes need."""
        for name in names:
            if name not in self._entries:
                continue
            key, entry = self._entries[name]
            stored, needed = self._verified(key), math.prod(entry.size) * self.dtype(name).itemsize
            if stored < needed:
                raise CheckpointError(
                    f"checkpoint {self.path} is damaged: {name} {list(entry.size)} needs {needed} bytes, its "
                    f"files hold {stored}; restore it from a copy"
                )

    def _verified(self, key: str) -> int:
        """How many bytes a value of the checkpoint has, once they have been compared with their checksums."""
        parts = self._sums.get(key, {})
        if wrong := checksums.damaged(self.path, parts):
            raise CheckpointError(f"checkpoint {self.path} is damaged: {wrong[0]}; restore it from a copy")
        return sum(part.length for part in parts)

    def _load(self, state: dict[str, Any]) -> None:
        """Read verified values of the checkpoint, in place."""
        try:
            with warnings.catch_warnings():  # that there is one process
                warnings.simplefilter("ignore", UserWarning)
                dcp.load(state, storage_reader=checksums.Reader(self.path), planner=Planner(), no_dist=True)
        except CheckpointException as error:
            raise CheckpointError(f"checkpoint {self.path} cannot be read: {first_cause(error)}") from error


@dataclass(frozen=True, eq=False)
class Referred:
    """A module that a checkpoint refers to.

    Attributes:
        tensors: without values, by name.
    """

    pretrained: Pretrained
    adapter: Adapter
    found: Mapping[str, str]
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, recipe: Recipe, name: str, adapter: Adapter) -> Referred:
        """Module `name` of `recipe`, from the directory that it names."""
        pretrained, module = pretrained_of(name, recipe.modules[name]), empty_module(recipe, adapter, name).module
        assert pretrained is not None  # else nothing could be referred to
        found = check_weights(adapter, module, pretrained)
        tied = own_tensors(module)[1]
        return cls(pretrained, adapter, found | {n: found[first] for n, first in tied.items()}, module.state_dict())

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Read values into whole tensors."""
        read_tensors(self.adapter, self.pretrained, self.found, tensors.items())


def saved_run(folder: Path, step: int | None = None) -> SavedRun:
    """The run in a dump folder and its newest complete checkpoint, or that of `step`.

    Raises:
        RecipeError: there is no run in the folder, it kept no checkpoint, or not that one, or the checkpoint is of
            another model than the run's recipe and directories are now.
        CheckpointError: the checkpoint cannot be read, or is that of another step than its folder's name says; the
            newest one has lost its checksums.
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
    found = SavedRun(recipe, checkpoints / f"step-{newest}")
    found.state.check_name(found.path)
    found.state.check_model(recipe, configs(recipe), found.path)
    return found


def run_recipe(folder: Path) -> Recipe:
    """The recipe of the run in a dump folder.

    Raises:
        RecipeError: there is none, or it is of another version.
    """
    file = folder / RECIPE_FILE
    try:
        raw: Any = from_json(read_file(file))
    except OSError as error:
        reason, advice = (error.strerror or str(error)).lower(), "give the dump_folder of a run"
        top, step = next((each for each in folder.parents if (each / RECIPE_FILE).is_file()), None), step_of(folder)
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
    if code is not None:
        place_beside(recipe, code)
    return recipe


def _without_wrappers(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
