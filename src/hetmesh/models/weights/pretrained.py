"""Local Hugging Face directories: their config and the names, shapes and files of their tensors. Nothing is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hetmesh.errors import RecipeError
from hetmesh.files import json_object
from hetmesh.formatting import listed
from hetmesh.models.weights.stored_form import StoredForm, whole

Names = tuple[tuple[str, str], ...]
"""One way in which checkpoints name a module's tensors: `(prefix in the module, prefix in the checkpoint)` pairs."""

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
ADAPTER_CONFIG = "adapter_config.json"
"""In a directory with this file transformers loads the base model that it names, and the adapter."""

QUANTISED = ("I8", "U8", "F8", "F6", "F4")
"""Prefixes of safetensors' dtypes whose values need scales, which are stored in format-specific ways."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint, as its file's header describes it; `dtype` as safetensors calls it (`"BF16"`)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Pretrained:
    """A directory with `config.json` and one safetensors file, or several with their index. `key`: the recipe key that
    names it; errors begin with it."""

    path: Path
    key: str

    def __post_init__(self) -> None:
        if not self.path.is_dir():
            what = "is a file, not a directory" if self.path.exists() else "does not exist"
            raise RecipeError(
                f"{self}: it {what}; give a local directory with config.json and *.safetensors (nothing is downloaded)"
            )

    def __str__(self) -> str:
        return f"{self.key} = '{self.path}'"

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json. Raises RecipeError if it is missing, it asks for remote code or quantised
        weights, or the directory has an adapter."""
        file = self.path / "config.json"
        if not file.is_file():
            raise RecipeError(f"{self}: there is no config.json in it")
        config = json_object(file, self)
        if "auto_map" in config:
            raise RecipeError(
                f"{self}: its config.json asks for code that comes with the weights (auto_map = "
                f"{config['auto_map']}); hetmesh runs no such code. Use a model that is part of transformers"
            )
        if (self.path / ADAPTER_CONFIG).is_file():
            raise RecipeError(
                f"{self}: there is an adapter in it ({ADAPTER_CONFIG}), which transformers loads with the weights and "
                "hetmesh would not; merge it first, or move it elsewhere"
            )
        if "quantization_config" in config:
            raise RecipeError(f"{self}: its weights are quantised (quantization_config); use the full-precision ones")
        return config

    def section(self, model: str, types: Collection[str]) -> dict[str, Any]:
        """The part of the config whose `model_type` is one of `types`: a part of a multimodal model's, or all of it.
        (Qwen3-VL's vision tower has the model_type of the whole model.)"""
        parts: dict[str, Mapping[str, Any]] = {k: part for k, part in self.config.items() if isinstance(part, Mapping)}
        parts[""] = self.config
        for part in parts.values():
            if part.get("model_type") in types:
                return dict(part)
        found = [f"{p['model_type']!r}" + (f" ({k})" if k else "") for k, p in parts.items() if "model_type" in p]
        raise RecipeError(
            f"{self}: its config.json describes {', '.join(found) or 'no model_type'}; model = {model!r} reads "
            f"{' or '.join(map(repr, types))}"
        )

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The safetensors files. Raises RecipeError: there are none, or only pickles, or one is missing."""
        indices = sorted(self.path.glob("*.safetensors.index.json"))
        if indices:
            stored = json_object(indices[0], self).get("weight_map")
            if not isinstance(stored, dict) or not all(isinstance(name, str) for name in stored.values()):
                raise RecipeError(f"{self}: {indices[0].name} must have a weight_map of tensors to file names")
            names = sorted(set(stored.values()))
            if outside := [name for name in names if Path(name).name != name]:
                raise RecipeError(f"{self}: {indices[0].name} names {outside[0]!r}, which is outside of the directory")
            if missing := [name for name in names if not os.path.isfile(self.path / name)]:  # names may be too long
                raise RecipeError(f"{self}: {indices[0].name} names {listed(missing)}, missing in the directory")
            return tuple(self.path / name for name in names)
        files = sorted(self.path.glob("*.safetensors"))
        if len(files) > 1:
            raise RecipeError(
                f"{self}: it holds {listed([f.name for f in files])} without a model.safetensors.index.json that says "
                "which of them belong together"
            )
        if not files:
            pickles = sorted(f.name for pattern in PICKLES for f in self.path.glob(pattern))
            raise RecipeError(
                f"{self}: it has only pickled weights ({listed(pickles)}), which can run any code when they are "
                "opened; convert them where you trust them, with transformers' save_pretrained"
                if pickles
                else f"{self}: there is no *.safetensors file in it"
            )
        return tuple(files)

    @cached_property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """All tensors of the checkpoint by name, from the headers of its files."""
        from safetensors import SafetensorError, safe_open

        found: dict[str, TensorEntry] = {}
        for file in self.files:
            try:
                with safe_open(file, "pt") as reader:
                    for name in reader.keys():  # noqa: SIM118 (no mapping)
                        described = reader.get_slice(name)
                        if (dtype := described.get_dtype()).startswith(QUANTISED):
                            raise RecipeError(
                                f"{self}: {name} in {file.name} is quantised (dtype {dtype}); use the full-precision "
                                "weights"
                            )
                        found[name] = TensorEntry(file, tuple(described.get_shape()), dtype)
            except (SafetensorError, OSError) as error:
                raise RecipeError(f"{self}: {file.name} cannot be read as safetensors: {error}") from error
        return found

    @cached_property
    def forms(self) -> Mapping[str, StoredForm]:
        """All tensors, as they are stored."""
        return {name: whole(name, entry.shape) for name, entry in self.tensors.items()}

    def match(
        self,
        expected: Mapping[str, Sequence[int]],
        ways: Sequence[Names],
        unused: Iterable[str] = (),
        aliases: Mapping[str, str] | None = None,
        forms: Mapping[str, StoredForm] | None = None,
    ) -> dict[str, str]:
        """Match the parameters of a module with the tensors of the checkpoint.

        Args:
            expected: shape by name in the module.
            ways: how checkpoints name the module's tensors; the one that finds most of them is used. Tensors that it
                cannot name belong to other modules.
            unused: patterns (regular expressions of names in the module) of tensors that the module does not use.
            aliases: other names in the module of the same parameters (tied weights) -> their name in `expected`.
            forms: the tensors as the module's model reads them; None: as they are stored.

        Returns:
            Name in the checkpoint by name in the module.

        Raises:
            RecipeError: tensors are missing, left over, or of another shape; lists up to 8 names of each kind.
        """
        aliases = aliases or {}
        forms = self.forms if forms is None else forms
        found = self.named(expected, ways, forms)
        for alias, name in aliases.items():
            if alias in found:
                found.setdefault(name, found[alias])
        patterns = [re.compile(pattern) for pattern in unused]
        missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in found]
        extra = [
            theirs
            for name, theirs in found.items()
            if name not in expected and name not in aliases and not any(p.fullmatch(name) for p in patterns)
        ]
        misshaped = [
            _misshaped(found[name], forms[found[name]], shape)
            for name, shape in expected.items()
            if name in found and forms[found[name]].shape != tuple(shape)
        ]
        if len(missing) == len(expected):  # nothing fits: the left-over names would be all the others
            wrong = [f"none of the module's {len(expected)} tensors is in it, e.g. {listed(missing)}"]
            wrong.append(f"its own are {listed(list(self.tensors))}")
        else:
            kinds = (("missing", missing), ("left over", extra), ("of another shape", misshaped))
            wrong = [f"{len(given)} {kind}: {listed(given)}" for kind, given in kinds if given]
        if wrong:
            raise RecipeError(f"{self}: its tensors are not those of the module. {'. '.join(wrong)}")
        return {name: found[name] for name in expected}

    def named(
        self, expected: Mapping[str, Any], ways: Sequence[Names], forms: Mapping[str, StoredForm] | None = None
    ) -> dict[str, str]:
        """Name in the checkpoint by name in the module, by the way that names most of `expected`; also tensors that are
        not expected. `forms`: as for `match`."""
        known = self.tensors if forms is None else forms
        names = [self._names(way, known) for way in ways]
        return max(names, key=lambda found: len(found.keys() & expected.keys()))

    def _names(self, way: Names, known: Iterable[str]) -> dict[str, str]:
        """Name in the checkpoint by name in the module, of all tensors `known` that `way` can name."""
        found: dict[str, str] = {}
        longest_first = sorted(way, key=lambda pair: -len(pair[1]))
        for theirs in known:
            for ours_prefix, theirs_prefix in longest_first:
                if theirs.startswith(theirs_prefix):
                    found[ours_prefix + theirs[len(theirs_prefix) :]] = theirs
                    break
        return found


def prefixes(*names: str) -> tuple[Names, ...]:
    """Ways of naming that put one of these prefixes before every name of the module."""
    return tuple((("", name),) for name in names)


def _misshaped(name: str, form: StoredForm, shape: Sequence[int]) -> str:
    first, last = form.names[0], form.names[-1]
    of = "" if form.is_whole else f" (made of {first}" + (f" to {last})" if last != first else ")")
    return f"{name}{of} is {list(form.shape)}, not {list(shape)}"
