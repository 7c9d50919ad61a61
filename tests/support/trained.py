"""Which parameters a recipe trains, worked out apart from hetmesh."""

from __future__ import annotations

import re

from hetmesh.recipe.sections import Module


def trains(module: Module, fqn: str) -> bool:
    """Whether a parameter of `module`, by its name there, is trained where its class does not freeze it."""
    if isinstance(module.trainable, bool):
        return module.trainable
    chosen = [pattern for pattern in module.trainable if pattern[0] != "!"]
    excluded = [pattern[1:] for pattern in module.trainable if pattern[0] == "!"]
    return (not chosen or any(re.search(p, fqn) for p in chosen)) and not any(re.search(p, fqn) for p in excluded)
