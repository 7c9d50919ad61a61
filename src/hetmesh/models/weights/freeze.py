"""Which parameters of a module are trained, by patterns of their names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from hetmesh.errors import RecipeError
from hetmesh.formatting import listed

EXCEPT = "!"
"""What a pattern begins with that freezes what it matches."""


def freeze_by_name(module: nn.Module, patterns: Sequence[str], key: str) -> None:
    """Freeze all parameters of `module`, in place, but those that `patterns` choose and its class has not frozen.

    A pattern is a regular expression that is searched in the parameters' FQNs. Those that any pattern matches are
    trained, or all where every pattern begins with "!"; those that one with "!" matches never are. A parameter that
    several layers share has the names that it has in each.

    Args:
        key: of the patterns in the recipe, for errors.

    Raises:
        RecipeError: a pattern matches nothing.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for fqn, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(fqn)
    matched = {
        pattern: {p for p, fqns in names.items() if any(re.search(pattern.removeprefix(EXCEPT), fqn) for fqn in fqns)}
        for pattern in patterns
    }
    if missed := [pattern for pattern, found in matched.items() if not found]:
        kinds = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", fqn) for fqns in names.values() for fqn in fqns)
        raise RecipeError(
            f"{key} = {list(patterns)}: {', '.join(map(repr, missed))} matches the name of no parameter; there are "
            f"{listed(list(kinds), 12)}"
        )
    chosen = [found for pattern, found in matched.items() if not pattern.startswith(EXCEPT)]
    frozen = [found for pattern, found in matched.items() if pattern.startswith(EXCEPT)]
    trained = (set().union(*chosen) if chosen else set(names)).difference(*frozen)
    for parameter in names.keys() - trained:
        parameter.requires_grad_(False)
