"""The data sources that a recipe names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from hetmesh._own_code import import_named
from hetmesh.data.conversations import ConversationsSource
from hetmesh.data.digits import DigitsSource
from hetmesh.data.loader import TRAIN, VALIDATION
from hetmesh.data.mixture import MixtureSource
from hetmesh.data.payloads import SplitSources
from hetmesh.data.source import Source
from hetmesh.data.synthetic import SyntheticSource
from hetmesh.errors import HetmeshError, RecipeError

if TYPE_CHECKING:
    from hetmesh.recipe.sections import Data

SOURCES: dict[str, Callable[..., Source]] = {
    "digits": DigitsSource,
    "conversations": ConversationsSource,
    "synthetic": SyntheticSource,
}
"""Sources by the name a recipe gives them."""


def make_source(name: str, /, **options: Any) -> Source:
    """Make the source that a recipe names: one of `SOURCES`, or `"package.module:Class"`, a custom class or function,
    called with `options`. Raises RecipeError: it does not exist, takes other options, or makes no `Source`."""
    return source_beside(None, name, options)


def source_beside(folder: str | None, name: str, options: Mapping[str, Any]) -> Source:
    """`make_source` of a recipe whose file lies in `folder`, and so may the code of the source."""
    key = f"[data] source = {name!r}"
    factory = _import(name, key, folder) if ":" in name else SOURCES.get(name)
    if factory is None:
        raise RecipeError(f"{key}: no such source; valid are {sorted(SOURCES)} and 'package.module:Class'")
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some built-in callables have none; calling them tells
        signature = None
    if signature is not None:
        try:
            signature.bind(**options)
        except TypeError as error:
            raise RecipeError(f"{key}: options {options}: {error}; it takes {signature}") from error
    try:
        made = factory(**options)
    except HetmeshError:
        raise
    except Exception as error:  # whatever a constructor makes of values of a wrong type
        raise RecipeError(f"{key}: options {options}: {type(error).__name__}: {error}; it takes {signature}") from error
    missing = [n for n in ("__len__", "meta", "load", "vocab_size", "pad_id", "placeholders") if not hasattr(made, n)]
    if missing:
        raise RecipeError(f"{key}: {type(made).__name__} is not a hetmesh.data.Source, it lacks {missing}")
    try:
        inspect.signature(made.load).bind(0, kinds=())
    except TypeError as error:
        raise RecipeError(
            f"{key}: {type(made).__name__}.load must take (index, kinds), the kinds of media that are wanted: {error}"
        ) from error
    source: Source = made
    ids = {"pad_id": source.pad_id, **{f"placeholder {k!r}": v for k, v in source.placeholders.items()}}
    wrong = {k: v for k, v in ids.items() if not isinstance(v, int) or not 0 <= v < source.vocab_size}
    if wrong:
        raise RecipeError(f"{key}: {wrong} must be token ids 0..{source.vocab_size - 1} (vocab_size)")
    if shared := [kind for kind, token in source.placeholders.items() if token == source.pad_id]:
        raise RecipeError(f"{key}: placeholder {shared[0]!r} and padding share the token id {source.pad_id}")
    try:
        length = len(source)
    except TypeError as error:  # of an option that it has kept as it was given
        raise RecipeError(f"{key}: options {options}: its length is no whole number: {error}") from error
    if length < 1:
        raise RecipeError(f"{key}: the source is empty")
    return source


def recipe_source(keys: Data, split: str | None = None) -> Source:
    """The source that `[data]` describes; with `split="validation"` its held-out samples, of a mixture those of all
    sources that have some, each once. Raises RecipeError: it cannot be made."""
    more = {} if split is None else {"split": split}
    if not keys.mixture:
        return source_beside(keys.folder, keys.source, {**keys.options, **more})
    if keys.options:
        raise RecipeError("[data.options] are of [data] source; with [[data.mixture]] write them into its tables")
    parts: dict[str, Source] = {}
    weights: dict[str, float] = {}
    errors: list[RecipeError] = []
    for table in keys.mixture:
        name = table.name or table.source
        if name in weights:
            raise RecipeError(f"[[data.mixture]]: two sources are called {name!r}; give each a name")
        weights[name] = table.weight
        try:
            parts[name] = source_beside(keys.folder, table.source, {**table.options, **more})
        except RecipeError as error:
            if split is None:
                raise
            errors.append(error)
    if not parts:
        raise errors[0]
    return MixtureSource(parts, weights if split is None and not keys.phases else None)


def split_sources(keys: Data) -> SplitSources:
    """The training and the held-out samples that `[data]` describes."""
    return SplitSources({TRAIN: partial(recipe_source, keys), VALIDATION: partial(recipe_source, keys, "validation")})


def _import(name: str, key: str, folder: str | None) -> Callable[..., Any]:
    try:
        factory = import_named(name, folder)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(f"{key}: cannot import it: {error}; write 'package.module:Class'") from error
    if not callable(factory):
        raise RecipeError(f"{key}: {name.partition(':')[2]} is a {type(factory).__name__}, not a class or function")
    return factory
