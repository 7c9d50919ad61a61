"""How a checkpoint stores the tensors of a transformers model: as found in a directory, or as it would be saved.

transformers 5 says what it makes of a checkpoint's tensors by a `WeightConverter`: name patterns, and operations on the
tensors that match them (`transformers.core_model_loading`). Operations that only join tensors, split them or exchange
dims are supported: they change no element, so that shares can be read, and written back. All others are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from hetmesh.errors import RecipeError
from hetmesh.formatting import listed
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.models.weights.stored_form import Shape, StoredForm, cut, exchanged, joined, renumbered, stacked, whole


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
    """What a model (on any device) reads of stored tensors, by transformers' own renamings and conversions.

    Args:
        expected: shapes of the model's parameters and persistent buffers, by name.
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
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
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
    models in it too. `expected`: shapes in the model by name suffix, for conversions that depend on them."""
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
    return [t for t in found if isinstance(t, WeightConverter)]


def saved(model: Any, shapes: Mapping[str, Shape]) -> ModelForms:
    """How `save_pretrained` stores a model that it did not load, and under which names.

    Args:
        model: on any device; its tensors are not read.
        shapes: shapes of its parameters and persistent buffers; of tied ones the first.
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    saved = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()}
    where = f"save_pretrained of {type(model).__name__}"
    found = model_forms(model, saved, shapes, where)
    if lost := [name for name in shapes if name not in found.names]:
        raise RecipeError(f"{where}: it has no form for {lost[0]} and {len(lost) - 1} others")
    return found


@dataclass(frozen=True)
class Taken:
    """A stored tensor that a converter reads.

    Attributes:
        before: its name after renaming.
        name: name in the model of the tensor made from it; of the first, if there are several.
        pattern: the one of the converter's source patterns that it matches.
    """

    before: str
    name: str
    pattern: str


Lists = list[list[StoredForm]]
"""What is being converted: one list per source pattern, in order."""

NOT_THOSE = "its tensors are not those of the module"
_ITEM = ".*."
"""In a pattern: the star stands for the number of an item."""
_SHOWN = 8  # names in a message


@dataclass(frozen=True)
class _Target:
    """One tensor of a model that transformers makes.

    Attributes:
        converter: transformers' `WeightConverter`.
        shape: its shape in the model, if known.
    """

    name: str
    converter: Any
    shape: Shape | None
    where: object


def converted(
    taken: Mapping[str, Taken],
    shapes: Mapping[str, Shape],
    converters: Sequence[Any],
    expected: Mapping[str, Shape],
    where: object,
) -> dict[str, StoredForm]:
    """The forms of the tensors that `converters` make, by name in the model.

    Args:
        taken: the tensors that converters read, by their stored names.
        expected: shapes in the model, as far as known; some conversions depend on them.

    Raises:
        RecipeError: tensors of a list are missing or differ in shape, or an operation of a converter is not supported.
    """
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    made_of: dict[str, dict[str, dict[int, str]]] = {}
    for name, entry in taken.items():
        items = made_of.setdefault(entry.name, {}).setdefault(entry.pattern, {})
        item = _item(entry, name, where)
        if item in items:
            raise RecipeError(f"{where}: {items[item]} and {name} are the same part of {entry.name}")
        items[item] = name
    targets = {
        ours: _Target(ours, by_pattern[next(iter(lists))], expected.get(ours), where) for ours, lists in made_of.items()
    }
    for ours, target in targets.items():
        _check_understood(target, next(name for items in made_of[ours].values() for name in items.values()))
    _check_lists(targets, made_of, shapes)
    found: dict[str, StoredForm] = {}
    for ours, target in targets.items():
        lists = [
            [name for _, name in sorted(made_of[ours][pattern].items())] for pattern in target.converter.source_patterns
        ]
        made = _made(target, [[whole(name, shapes[name]) for name in names] for names in lists])
        found |= zip(_names(target, len(made)), made, strict=True)
    _check_square([(by_pattern[next(iter(lists))], found[ours]) for ours, lists in made_of.items()], where)
    return found


def _check_square(made: Sequence[tuple[Any, StoredForm]], where: object) -> None:
    """Raise RecipeError if shapes show that some tensors are transposed but others are square: transformers would load
    the square ones untransposed."""
    transposed: list[str] = []
    square: list[str] = []
    for converter, form in made:
        for operation in converter.operations:
            if getattr(operation, "check_dims", False):
                if not form.is_whole:
                    transposed += form.names[:1]
                elif form.shape[operation.dim0] == form.shape[operation.dim1]:
                    square += form.names[:1]
    if transposed and square:
        raise RecipeError(
            f"{where}: {transposed[0]} is transposed, as its shape says; of {square[0]} and {len(square) - 1} more, "
            "which are square, nothing does. Convert them where you know it"
        )


def _item(taken: Taken, name: str, where: object) -> int:
    """The number that the star of its pattern stands for, -1 if there is no star."""
    if _ITEM not in taken.pattern:
        return -1
    match = re.search(taken.pattern.removeprefix("^").replace(_ITEM, r"\.(?P<item>[^.]+)\.", 1), taken.before)
    if match is None or not match["item"].isdigit():
        raise RecipeError(f"{where}: {name} has no number where transformers looks for one ({taken.pattern})")
    return int(match["item"])


def _check_understood(target: _Target, name: str) -> None:
    """Raise RecipeError for a converter with an unsupported operation; `name` is a stored tensor for the message."""
    for operation in target.converter.operations:
        dims = [getattr(operation, key, 0) for key in ("dim", "dim0", "dim1")]
        known = type(operation).__name__ in STEPS and min(dims) >= 0
        if not known or getattr(operation, "num_shards_attribute", None) is not None:
            raise RecipeError(
                f"{target.where}: transformers computes {target.name} from {name} by {operation!r}, which hetmesh does "
                "not do; save it with save_pretrained(..., save_original_format=False) first"
            )


def _check_lists(
    targets: Mapping[str, _Target], made_of: Mapping[str, Mapping[str, Mapping[int, str]]], shapes: Mapping[str, Shape]
) -> None:
    """Raise RecipeError unless the lists of each target have equal items, numbered from 0, and each list one shape."""
    missing: list[str] = []
    misshaped: list[str] = []
    for ours, target in targets.items():
        numbers = {number for items in made_of[ours].values() for number in items}
        wanted = [-1] if max(numbers) < 0 else range(max(numbers) + 1)
        for pattern in target.converter.source_patterns:
            items = made_of[ours].get(pattern, {})
            for number in wanted:
                if number not in items:
                    like = next(iter(items.items()), None)
                    of_pattern = f"{pattern.replace('*', str(number))} of {ours}"
                    missing.append(renumbered(like[1], like[0], number) if like else of_pattern)
            names = [name for _, name in sorted(items.items())]
            misshaped += [
                f"{name} is {list(shapes[name])}, not {list(shapes[names[0]])} as {names[0]}"
                for name in names
                if shapes[name] != shapes[names[0]]
            ]
    where = next((target.where for target in targets.values()), "")
    kinds = (("missing", missing), ("of another shape", misshaped))
    wrong = [f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds if names]
    if wrong:
        raise RecipeError(f"{where}: {NOT_THOSE}. {'. '.join(wrong)}")


def _made(target: _Target, lists: Lists) -> list[StoredForm]:
    """The forms that the converter's operations make of the lists, in the order of its target patterns."""
    given = lists
    for operation in target.converter.operations:
        try:
            lists = STEPS[type(operation).__name__](target, operation, lists)
        except (IndexError, ValueError) as error:
            names = [name for forms in given for form in forms for name in form.names]
            shown = " to ".join(dict.fromkeys((names[0], names[-1])))
            shapes = [list(form.shape) for forms in lists for form in forms]
            raise RecipeError(
                f"{target.where}: {NOT_THOSE}. The shapes of {shown}, which make {target.name}, do not fit each other "
                f"({operation!r} of {shapes[:_SHOWN]})"
            ) from error
    return [form for forms in lists for form in forms]


def _names(target: _Target, count: int) -> list[str]:
    """The names of the `count` tensors that a converter makes, of which `target` is the first."""
    patterns = target.converter.target_patterns
    first = patterns[0]
    unclear = len(patterns) > 1 and (first not in target.name or any(c in p for p in patterns for c in "\\*"))
    if unclear or len(patterns) != count:
        raise RecipeError(
            f"{target.where}: how transformers names {target.name} and what else it computes with it ({patterns}) is "
            "not clear; save it with save_pretrained(..., save_original_format=False) first"
        )
    before, _, after = target.name.partition(first)
    return [target.name, *(f"{before}{other}{after}" for other in patterns[1:])]


def _chunk(target: _Target, operation: Any, lists: Lists) -> Lists:
    ((form,),) = lists
    count, size = len(target.converter.target_patterns), form.shape[operation.dim]
    step = -(-size // count)
    if step * (count - 1) >= size:
        raise ValueError(size)
    return [[cut(form, operation.dim, i * step, min((i + 1) * step, size))] for i in range(count)]


def _transpose(target: _Target, operation: Any, lists: Lists) -> Lists:
    ((form,),) = lists
    if operation.check_dims:
        if target.shape is None:
            raise RecipeError(
                f"{target.where}: whether {form.names[0]} is transposed depends on the module's tensor, whose shape is "
                "not known"
            )
        if form.shape == target.shape:
            return lists
    return [[exchanged(form, operation.dim0, operation.dim1)]]


def _unpadded(target: _Target, _: Any, lists: Lists) -> Lists:
    if lists[0][0].shape != target.shape:  # the rows that it leaves out would be lost
        raise ValueError(target.shape)
    return lists


STEPS: Mapping[str, Callable[[_Target, Any, Lists], Lists]] = {
    "MergeModulelist": lambda _, operation, lists: [[stacked(forms, operation.dim)] for forms in lists],
    "Concatenate": lambda _, operation, lists: [[joined([form for forms in lists for form in forms], operation.dim)]],
    "Chunk": _chunk,
    "Transpose": _transpose,
    "Inkling2UnpadVocab": _unpadded,
}
"""The supported operations of transformers, by the name of their class."""
