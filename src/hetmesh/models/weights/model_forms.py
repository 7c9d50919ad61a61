"""How a checkpoint stores the tensors of a transformers model: as found in a directory, or as it would be saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from hetmesh.errors import RecipeError
from hetmesh.models.weights.conversions import Taken, converted
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.models.weights.stored_form import Shape, StoredForm, whole


@dataclass(frozen=True)
class ModelForms:
    """What a model reads from a checkpoint.

    Attributes:
        forms: the forms, by stored name where a tensor is read unchanged, else by name in the model.
        names: keys of `forms` by name in the model.
        unknown: stored tensors that do not belong to the model.
    """

    forms: Mapping[str, StoredForm]
    names: Mapping[str, str]
    unknown: tuple[str, ...]


def model_forms(
    model: Any,
    shapes: Mapping[str, Shape],
    expected: Mapping[str, Shape],
    where: object,
    ignored: Callable[[str], bool] = lambda _: False,
) -> ModelForms:
    """What the transformers model `model` (on any device) reads of stored tensors, by transformers' own renamings and
    conversions.

    Args:
        shapes: shapes of the stored tensors, by name.
        expected: shapes of the model's parameters and persistent buffers, by name.
        where: what errors begin with.
        ignored: whether an unknown tensor of that name is left out of `unknown`.

    Raises:
        RecipeError: two stored tensors are the same tensor of the model, tensors of experts are missing or do not fit
            each other, or a conversion is not supported.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, apply_renamings, rename_source_key

    try:
        transforms = get_model_conversion_mapping(model)
    except Exception as error:  # an unknown model_type, for example
        reason = f"{type(error).__name__}: {error}"
        raise RecipeError(f"{where}: transformers does not say how its tensors are stored: {reason}") from error
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    forms: dict[str, StoredForm] = {}
    names: dict[str, str] = {}
    taken: dict[str, Taken] = {}
    unknown: list[str] = []
    for name, shape in shapes.items():
        ours, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if ours not in state and name in state:  # it already has its name in the model
            ours, pattern = rename_source_key(name, [], [], prefix, state)
        if ours not in expected:
            unknown += [] if ignored(ours) else [name]
        elif pattern is not None:
            taken[name] = Taken(apply_renamings(name, renamings), ours, pattern)
        elif ours in names:
            raise RecipeError(f"{where}: {names[ours]} and {name} are the same tensor of the model, {ours}; keep one")
        else:
            forms[name], names[ours] = whole(name, shape), name
    made = converted(taken, shapes, converters, expected, where)
    if twice := sorted(made.keys() & (names.keys() | forms.keys())):
        raise RecipeError(f"{where}: {twice[0]} is in it as it is, and as {made[twice[0]].names[0]} too")
    return ModelForms({**forms, **made}, {**names, **{ours: ours for ours in made}}, tuple(unknown))


def class_forms(
    model_class: Any, config: Any, pretrained: Pretrained, expected: Mapping[str, Shape] = MappingProxyType({})
) -> Mapping[str, StoredForm]:
    """The tensors of a directory as a transformers class reads them, with any prefix to their names; those of other
    models in it too.

    Args:
        expected: shapes in the model by name suffix, for conversions that depend on them.

    Raises:
        RecipeError: as for `model_forms`.
    """
    from transformers.core_model_loading import apply_converters

    converters = converters_of(model_class, config)
    if not converters:
        return pretrained.forms
    taken: dict[str, Taken] = {}
    for name in pretrained.tensors:
        ours, pattern = apply_converters(name, converters)
        if pattern is not None:
            taken[name] = Taken(name, ours, pattern)
    shapes = {name: entry.shape for name, entry in pretrained.tensors.items()}
    wanted = {t.name: shape for t in taken.values() for end, shape in expected.items() if t.name.endswith(end)}
    made = converted(taken, shapes, converters, wanted, pretrained)
    plain = {name: form for name, form in pretrained.forms.items() if name not in taken}
    if twice := sorted(made.keys() & plain.keys()):
        raise RecipeError(f"{pretrained}: {twice[0]} is in it as it is, and as {made[twice[0]].names[0]} too")
    return {**plain, **made}


def converters_of(model_class: Any, config: Any) -> list[Any]:
    """transformers' converters for the checkpoints of a class."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    found = get_checkpoint_conversion_mapping(model_class.__name__)
    if found is None:
        found = get_checkpoint_conversion_mapping(config.model_type) or []
    return [each for each in found if isinstance(each, WeightConverter)]


def saved_forms(model: Any, shapes: Mapping[str, Shape]) -> dict[str, StoredForm] | None:
    """How transformers' `save_pretrained` stores a model that it did not load: forms by name in the model; None if it
    converts nothing.

    Args:
        model: on any device; its tensors are not read.
        shapes: shapes of its parameters and persistent buffers; of tied ones the first.

    Raises:
        RecipeError: a conversion is not supported.
    """
    from transformers.core_model_loading import revert_weight_conversion

    if not converters_of(type(model), model.config):
        return None
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    saved = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()}
    where = f"save_pretrained of {type(model).__name__}"
    found = model_forms(model, saved, shapes, where)
    if lost := [name for name in shapes if name not in found.names]:
        raise RecipeError(f"{where}: it has no form for {lost[0]} and {len(lost) - 1} others")
    return {name: found.forms[found.names[name]] for name in shapes}
