"""Checks of a module's `config` table against the keys that its model knows; transformers' classes of configs."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, get_args

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import AdapterRequest


def hf(name: str) -> Any:
    """What a name of transformers, or of one of its submodules, stands for: `hf("CLIPVisionModel")`,
    `hf("activations.ACT2FN")`. Imported when first asked for: it takes a second, and most commands need none of it."""
    module, _, attribute = f"transformers.{name}".rpartition(".")
    return getattr(importlib.import_module(module), attribute)


NOT_SIZES = frozenset(
    ["architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version", "_name_or_path"]
)
"""Keys of a config.json that do not describe the module."""

FREE = frozenset(
    [
        "activation_dropout",
        "attention_dropout",
        "dropout",
        "encoder_layerdrop",
        "initializer_range",
        "max_position_embeddings",
        "rope_parameters",
        "router_aux_loss_coef",
        "sliding_window",
        "use_cache",
        "use_sliding_window",
    ]
)
"""Keys that a recipe may set differently from the config.json of its weights: they do not change the weights."""


def check_keys(request: AdapterRequest, valid: Collection[str]) -> None:
    """Raise RecipeError for a config key that is not in `valid`, with the nearest valid one."""
    for key in request.config:
        if key not in valid:
            near = difflib.get_close_matches(key, valid, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"valid keys are {sorted(valid)}"
            raise RecipeError(f"{request.key}.config.{key}: unknown key; {hint}")


def transformers_config(
    request: AdapterRequest,
    config_class: Any,
    derived: Mapping[str, Any],
    *,
    types: Collection[str],
    forced: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """An instance of a transformers config class.

    Without `initial_load_path`: the config table over `derived` values. With it: what the directory's config.json says,
    and the config table must agree with that; only keys in `FREE` may differ.

    Args:
        types: the `model_type`s in config.json that the class describes.

    Raises:
        RecipeError: an unknown key, a value that transformers rejects or that differs from config.json.
    """
    # Only keys of the class itself, not those of its base (dtype, return_dict, id2label).
    check_keys(request, tuple(config_class.__annotations__))
    if request.pretrained is not None:
        section = request.pretrained.section(request.model, types)
        keys = config_class.__annotations__  # files may use an alias of a key (num_local_experts), which would win
        names = {alias: key for key, alias in config_class.attribute_map.items() if key in keys and alias not in keys}
        derived = {names.get(key, key): value for key, value in section.items() if key not in NOT_SIZES}
    given = {key: _as_float(value, config_class.__annotations__[key]) for key, value in request.config.items()}
    try:
        config = config_class(**{**derived, **given, **forced}, attn_implementation="sdpa")
        unchanged = config_class(**{**derived, **forced}) if request.pretrained is not None else config
    except Exception as error:  # huggingface_hub's strict dataclasses raise a plain subclass of Exception
        said = " ".join(str(error).split())
        if (found := _TYPE.match(said)) and (key := found[1]) in request.config:
            declared = inspect.formatannotation(config_class.__annotations__[key])
            said = f"{request.key}.config.{key} = {request.config[key]!r}: must be {declared}"
            raise RecipeError(said) from error
        raise RecipeError(f"{request.key}.config: {_FROM.sub('', said)}") from error
    _check_values(request, config)
    for key in request.config:
        if key not in FREE and getattr(config, key) != getattr(unchanged, key):
            raise RecipeError(
                f"{request.key}.config.{key} = {request.config[key]!r}, but {request.pretrained} says "
                f"{getattr(unchanged, key)!r} in its config.json; leave the key out (those that may differ: "
                f"{', '.join(sorted(FREE & set(config_class.__annotations__)))})"
            )
    return config


_FROM = re.compile(r"^(Class v|V)alidation error for \w+ '[^']*': \w+: ")
_TYPE = re.compile(r"^Validation error for field '(\w+)': TypeError: ")
"""How the errors of transformers' configs begin: all of them, and those of values of another type than declared."""


def _as_float(value: Any, declared: Any) -> Any:
    """`value`, an integer as a float where transformers accepts only floats."""
    kinds = get_args(declared) or (declared,)
    return float(value) if type(value) is int and float in kinds and int not in kinds else value


def _check_values(request: AdapterRequest, config: Any) -> None:
    """Raise RecipeError for values that transformers would refuse only when a module is built or run."""
    known = hf("activations.ACT2FN")
    for key, value in request.config.items():
        where = f"{request.key}.config.{key} = {value!r}"
        if key in ACTIVATIONS and value not in known:
            near = difflib.get_close_matches(str(value), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"valid are {', '.join(sorted(known))}"
            raise RecipeError(f"{where}: transformers knows no such activation; {hint}")
        if key.endswith(("dropout", "layerdrop")) and not 0 <= getattr(config, key) < 1:
            raise RecipeError(f"{where}: must be at least 0 and less than 1")


ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")


def positive_int(request: AdapterRequest, key: str, value: Any) -> int:
    """`value` as a positive integer, or a RecipeError naming `config.<key>`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RecipeError(f"{request.key}.config.{key}: must be a positive integer, got {value!r}")
    return value


def constructor_arguments(
    request: AdapterRequest, constructor: Callable, known: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Keyword arguments for `constructor`: the config table, and the `known` sizes where it asks for them by name. Also
    the names of required ones that neither supplies."""
    parameters = {
        name: p
        for name, p in inspect.signature(constructor).parameters.items()
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    }
    if all(p.kind is not p.VAR_KEYWORD for p in inspect.signature(constructor).parameters.values()):
        check_keys(request, tuple(parameters))
    supplied = {key: value for key, value in known.items() if key in parameters and value is not None}
    arguments = {**supplied, **request.config}
    missing = [name for name, p in parameters.items() if p.default is p.empty and name not in arguments]
    return arguments, missing
