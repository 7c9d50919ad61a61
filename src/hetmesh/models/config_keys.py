"""Checks of a module's `config` table against the keys that its model knows."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import AdapterRequest


def check_keys(request: AdapterRequest, valid: Collection[str]) -> None:
    """Raise RecipeError for a config key that is not in `valid`, with the nearest valid one."""
    for key in request.config:
        if key not in valid:
            near = difflib.get_close_matches(key, valid, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"valid keys are {sorted(valid)}"
            raise RecipeError(f"{request.key}.config.{key}: unknown key; {hint}")


def transformers_config(request: AdapterRequest, config_class: Any, derived: Mapping[str, Any]) -> Any:
    """An instance of a transformers config class from the config table over `derived` values.

    Raises:
        RecipeError: an unknown key, or a value that transformers rejects.
    """
    # Only keys of the class itself: those of its base (dtype, return_dict, id2label) are not the recipe's business.
    check_keys(request, tuple(config_class.__annotations__))
    try:
        return config_class(**{**derived, **request.config}, attn_implementation="sdpa")
    except Exception as error:  # huggingface_hub's strict dataclasses raise a plain subclass of Exception
        raise RecipeError(f"{request.key}.config: {' '.join(str(error).split())}") from error


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
