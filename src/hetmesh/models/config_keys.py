"""Checks of a module's `config` table against the keys that its model knows."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import AdapterRequest

NOT_SIZES = frozenset(
    ("architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version", "_name_or_path")
)
"""Keys of a config.json that do not describe the module."""

FREE = frozenset(
    (
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
    )
)
"""Keys that a recipe may set otherwise than the config.json that the weights came with: they change no weight."""


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
        forced: what hetmesh sets in any case.

    Raises:
        RecipeError: an unknown key, a value that transformers rejects or that differs from config.json.
    """
    # Only keys of the class itself: those of its base (dtype, return_dict, id2label) are not the recipe's business.
    check_keys(request, tuple(config_class.__annotations__))
    if request.pretrained is not None:
        section = request.pretrained.section(request.model, types)
        own = config_class.__annotations__  # files may have another name of a key (num_local_experts), which would win
        names = {theirs: key for key, theirs in config_class.attribute_map.items() if key in own and theirs not in own}
        derived = {names.get(key, key): value for key, value in section.items() if key not in NOT_SIZES}
    given = {key: _as_float(config_class, key, value) for key, value in request.config.items()}
    try:
        config = config_class(**{**derived, **given, **forced}, attn_implementation="sdpa")
        unchanged = config_class(**{**derived, **forced}) if request.pretrained is not None else config
    except Exception as error:  # huggingface_hub's strict dataclasses raise a plain subclass of Exception
        raise RecipeError(f"{request.key}.config: {' '.join(str(error).split())}") from error
    for key in request.config:
        if key not in FREE and getattr(config, key) != getattr(unchanged, key):
            raise RecipeError(
                f"{request.key}.config.{key} = {request.config[key]!r}, but {request.pretrained} says "
                f"{getattr(unchanged, key)!r} in its config.json; leave the key out (those that may differ: "
                f"{', '.join(sorted(FREE & set(config_class.__annotations__)))})"
            )
    return config


def _as_float(config_class: Any, key: str, value: Any) -> Any:
    """`value` of a key; 0 is as good as 0.0 where transformers declares a float alone, which it takes by type."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if integer and config_class.__annotations__[key] in (float, "float") else value


def positive_int(request: AdapterRequest, key: str, value: Any) -> int:
    """`value` as a positive integer, or a RecipeError naming `config.<key>`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RecipeError(f"{request.key}.config.{key}: must be a positive integer, got {value!r}")
    return value


def constructor_arguments(
    request: AdapterRequest, constructor: Callable, known: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Keyword arguments for `constructor`: the config table, and the `known` sizes where it asks for them by name.

    Returns:
        The arguments, and the names of required ones that neither supplies.

    Raises:
        RecipeError: a config key that the constructor does not take.
    """
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
