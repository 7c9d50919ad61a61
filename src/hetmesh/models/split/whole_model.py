"""A Hugging Face directory as one model of transformers, and which part of hetmesh owns which of its parameters.

The model is built once, on the meta device. Its decoder and head are the LLM; everything else belongs to the tower of
the media that it reads. Parts keep the model's own FQNs, so each tensor of a checkpoint has one owner.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetmesh.errors import RecipeError
from hetmesh.formatting import listed
from hetmesh.models.adapter import AdapterDefaults
from hetmesh.models.config_keys import hf
from hetmesh.models.split.tower_alone import tower_of, with_rows
from hetmesh.models.weights.load import saved_tensors
from hetmesh.models.weights.model_forms import ModelForms, model_forms
from hetmesh.models.weights.pretrained import Names, Pretrained
from hetmesh.models.weights.stored_form import StoredForm
from hetmesh.parallel.tensor_parallel import within
from hetmesh.recipe.hf_families import MEDIA, Family, class_of, family_of

LLM, PROJECTOR = "llm", "projector"
TOWERS: Mapping[str, str] = {media: part for part, media in MEDIA.items()}
"""Kind of media -> the part that reads it."""


@dataclass(frozen=True, eq=False)
class WholeModel:
    """A `...ForConditionalGeneration` as its directory describes it, or a tower or an LLM alone. Made by `whole_model`.

    Attributes:
        config: its config, with attention as hetmesh needs it.
        has_llm: its towers are for an LLM that it has; else nothing but its tower is used.
    """

    pretrained: Pretrained
    config: Any
    model_class: Any
    has_llm: bool = True

    @cached_property
    def model(self) -> Any:
        """The whole model on the meta device; not to be changed."""
        with torch.device("meta"):
            return self.build()

    def build(self) -> Any:
        """The whole model, with random weights on the default device."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.model_class(copy.deepcopy(self.config))

    @property
    def family(self) -> Family:
        """What is peculiar about it."""
        return family_of(self.config.model_type)

    @cached_property
    def around(self) -> Mapping[str, tuple[int, int]]:
        """Kind of media -> tokens right before and after an item, where `get_rope_index` goes by them."""
        found = {}
        for kind, keys in self.family.around.items():
            before, after = (getattr(self.config, key, None) for key in keys)
            if not isinstance(before, int) or not isinstance(after, int):
                raise RecipeError(f"{self.pretrained}: its config.json must have {keys[0]} and {keys[1]}")
            found[kind] = (before, after)
        return found

    @property
    def parts_beside(self) -> list[str]:
        """Patterns of the tensors of other parts of a directory of whose model this is one."""
        inside = family_of(str(self.pretrained.config.get("model_type"))).inside
        keys = [key for key in self.pretrained.config if key.endswith("_config")] if inside else []
        return [f"^{key.removesuffix('_config')}\\." for key in keys if inside and key != inside[0]]

    @property
    def text_config(self) -> Any:
        return self.model.get_decoder().config

    def fqn(self, module: nn.Module) -> str:
        return next(name for name, part in self.model.named_modules() if part is module)

    @cached_property
    def decoder(self) -> str:
        return self.fqn(self.model.get_decoder())

    @cached_property
    def head(self) -> str:
        return self.fqn(self.model.get_output_embeddings())

    @cached_property
    def embedding(self) -> str:
        return self.fqn(self.model.get_input_embeddings())

    @cached_property
    def towers(self) -> Mapping[str, str]:
        """Part -> FQN of its tower, without what follows it (projectors); empty for the whole model."""
        found = {}
        for media, part in TOWERS.items():
            called = features_of(self.model, media) is not None or media in self.family.by_parts
            tower = self.model.get_encoder(media) if self.has_llm else tower_of(self.model, media)
            if self.has_llm and tower is self.model:  # it has none by a name that transformers knows
                tower = next((p for n, p in self.model.base_model.named_children() if _named(n, part)), None)
            if called and tower is not None:
                found[part] = self.fqn(tower)
        return found

    def config_of(self, part: str) -> Any:
        return getattr(self.config, f"{part}_config", self.config)

    @cached_property
    def positions(self) -> str:
        """Which positions its LLM has, as in `Family`; by default three axes if the model has them."""
        axes = hasattr(self.model.get_submodule(self.decoder.rpartition(".")[0]), "get_rope_index")
        return self.family.positions or ("rope_index" if axes else "from_0")

    @cached_property
    def owners(self) -> Mapping[str, str]:
        """Part by name of each parameter and persistent buffer; of what is beside a tower without an LLM "". Raises
        RecipeError if some of them belong to no part, or to several because they are tied."""
        parts = {name: self._owner(name) for name, _ in saved_tensors(self.model)}
        owners = {name: part for name, part in parts.items() if part is not None}
        if lost := [name for name, part in parts.items() if part is None]:
            raise RecipeError(
                f"{self.pretrained}: {len(lost)} parameters of {self.model_class.__name__} belong neither to its LLM "
                f"nor to a tower: {listed(lost)}"
            )
        self._check_ties(owners)
        return owners

    def _owner(self, name: str) -> str | None:
        if not self.has_llm:
            return next((part for part, tower in self.towers.items() if not tower or within(name, tower)), "")
        if within(name, self.decoder) or within(name, self.head):
            return LLM
        for part, tower in self.towers.items():
            if within(name, tower):
                return part
        if len(self.towers) == 1:  # what belongs to neither tower nor LLM lies between them
            return next(iter(self.towers))
        named = [part for part in self.towers if _named(name, part)]
        return named[0] if len(named) == 1 else None

    def _check_ties(self, owners: Mapping[str, str]) -> None:
        first: dict[int, str] = {}
        for name, tensor in saved_tensors(self.model):
            other = first.setdefault(id(tensor), name)
            if owners[other] != owners[name]:
                raise RecipeError(
                    f"{self.pretrained}: {other} of {owners[other]!r} and {name} of {owners[name]!r} are one tensor, "
                    "which parts on different ranks cannot share"
                )

    @cached_property
    def projector(self) -> str:
        """FQN of the one module between tower and LLM. Raises RecipeError if there are several parts, or towers."""
        (tower, *others) = self.towers.items()
        between = [name for name, part in self.owners.items() if part == tower[0] and not within(name, tower[1])]
        parent = tower[1].rpartition(".")[0]
        prefix = f"{parent}." if parent else ""
        children = {prefix + name.removeprefix(prefix).partition(".")[0] for name in between}
        if others or len(children) != 1 or children <= set(between):
            raise RecipeError(
                f"{self.pretrained}: between tower and LLM of {self.model_class.__name__} there is no single projector "
                f"that could be a module of its own, but {sorted(children)}; leave [modules.projector] out"
            )
        return children.pop()

    @cached_property
    def owners_apart(self) -> Mapping[str, str]:
        """`owners` where the projector is a separate module."""
        return {name: PROJECTOR if within(name, self.projector) else part for name, part in self.owners.items()}

    def keep_part(self, model: Any, part: str, owners: Mapping[str, str], prefix: str = "") -> Any:
        """`model`, as `build` makes it, without what other parts own; in place. `prefix`: of a submodule's names."""
        names = [name for name in owners if name.startswith(prefix)]
        for name, child in list(model.named_children()):
            inside = {owners[fqn] for fqn in names if fqn.startswith(f"{prefix}{name}.")}
            if inside and part not in inside:
                del model._modules[name]
            elif len(inside) > 1:
                self.keep_part(child, part, owners, f"{prefix}{name}.")
        for name in (*model._parameters, *model._buffers):
            if owners.get(f"{prefix}{name}", part) != part:
                model._parameters.pop(name, None)
                model._buffers.pop(name, None)
        return model

    @property
    def checkpoint_names(self) -> Mapping[str, str]:
        """Name in the checkpoint (in `stored_forms`) by name in the model, through transformers' own renamings."""
        return self._read.names

    def stored_forms(self, _: Pretrained) -> Mapping[str, StoredForm]:
        """The tensors of the checkpoint as the model reads them; those that transformers makes of several (experts) by
        their name in the model. Raises RecipeError for tensors that the model does not know, that are missing among
        experts, or of which transformers computes something else."""
        return self._read.forms

    @cached_property
    def _read(self) -> ModelForms:
        ignored = [*self.parts_beside, *(self.model._keys_to_ignore_on_load_unexpected or ())]
        ignored += [r".*rotary_emb\.inv_freq", r".*position_ids"]
        found = model_forms(
            self.model,
            {name: entry.shape for name, entry in self.pretrained.tensors.items()},
            {name: tuple(tensor.shape) for name, tensor in saved_tensors(self.model)},
            self.pretrained,
            lambda name: not self.has_llm or any(re.search(pattern, name) for pattern in ignored),
        )
        if unknown := found.unknown:
            kind = self.model_class.__name__
            raise RecipeError(f"{self.pretrained}: {len(unknown)} tensors are none of {kind}: {listed(unknown)}")
        return found


class PartAdapter(AdapterDefaults):
    """What the adapters of the parts of a whole model share: which weights `part` owns. `owners`: of the parameters, by
    name; `WholeModel.owners`, or `owners_apart`."""

    whole: WholeModel
    part: str

    @property
    def owners(self) -> Mapping[str, str]:
        return self.whole.owners

    @property
    def checkpoint_names(self) -> tuple[Names, ...]:
        return (tuple(self.whole.checkpoint_names.items()),)

    @property
    def checkpoint_unused(self) -> tuple[str, ...]:
        others = (re.escape(name) for name, owner in self.owners.items() if owner != self.part)
        return ("|".join(others), *self.whole.parts_beside)

    @cached_property
    def _empty(self) -> nn.Module:
        """The module on the meta device, to look at its parts."""
        with torch.device("meta"):
            return self.build()

    def build(self) -> Any:
        return self.whole.keep_part(self.whole.build(), self.part, self.owners)


def _named(name: str, part: str) -> bool:
    hints = {"audio": ("audio", "speech"), "vision": ("vision", "visual", "image")}
    return any(hint in name for hint in hints[part])


def features_of(model: Any, media: str) -> Any:
    """The method that gives rows for media, of the inner model or of the whole; None if there is none."""
    name = f"get_{media}_features"
    inner = getattr(model, model.base_model_prefix or "model", None)
    return getattr(inner, name, None) or getattr(model, name, None)


def whole_model(pretrained: Pretrained) -> WholeModel:
    """The model that a directory describes; made once per directory. Raises RecipeError: it cannot be split."""
    _ = pretrained.config
    stamp = (pretrained.path / "config.json").stat().st_mtime_ns
    return _whole_model(pretrained.path.resolve(), stamp, pretrained.key)


@lru_cache(maxsize=8)
def _whole_model(path: Path, stamp: int, key: str) -> WholeModel:
    import transformers

    pretrained = Pretrained(path, key)
    inside = family_of(str(pretrained.config.get("model_type"))).inside
    name = class_of(pretrained.config)
    try:
        found: Any = getattr(transformers, name, None)
    except ImportError as error:  # a torchvision of another torch, say
        raise RecipeError(f"{pretrained}: transformers cannot import {name}: {error.__cause__ or error}") from error
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    if not is_model:
        given = pretrained.config.get("architectures") or []
        raise RecipeError(
            f"{pretrained}: its config.json says architectures = {given}; a model of transformers "
            f"{transformers.__version__} is expected"
        )
    try:
        kind = found.config_class if inside else hf("AutoConfig")
        config = kind.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        model_class = _with_attention(found, config)
    except Exception as error:  # whatever transformers makes of a broken config.json
        raise RecipeError(f"{pretrained}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    whole = WholeModel(pretrained, config, model_class)
    if whole.family.refused:
        raise RecipeError(f"{pretrained}: model_type {config.model_type!r} is not supported: {whole.family.refused}")
    has_head = whole.model.get_output_embeddings() is not None and whole.model.get_decoder() is not whole.model
    if getattr(config, "is_encoder_decoder", False) or not has_head:
        if (model_class := with_rows(found, whole.model)) is None:
            raise RecipeError(
                f"{pretrained}: {found.__name__} has neither a tower of images or log-mel features nor a decoder with "
                "a head that could be the LLM"
            )
        whole = WholeModel(pretrained, config, model_class, has_llm=False)
    elif not whole.towers and not name.endswith("ForCausalLM"):
        raise RecipeError(
            f"{pretrained}: {found.__name__} has no tower that it calls by get_image_features or get_audio_features, "
            "so there is nothing to split from its LLM"
        )
    _ = whole.owners
    return whole


def _with_attention(model_class: Any, config: Any) -> Any:
    """Let every part compute in the dtype of its module, with torch's attention where it has that."""
    for part in _configs(config):
        part.dtype = None
    for name in ("sdpa", "eager"):  # models with soft-capped logits have no sdpa
        config._attn_implementation = name
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model_class(copy.deepcopy(config))
            return model_class
        except (ValueError, ImportError):
            if name == "eager":
                raise
    return model_class


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if isinstance(value, hf("PreTrainedConfig")):
            yield from _configs(value)
