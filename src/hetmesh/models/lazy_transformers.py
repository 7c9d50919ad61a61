"""transformers, imported where it is first used: that takes a second, and most commands need none of it."""

from __future__ import annotations

import importlib
from typing import Any


def hf(name: str) -> Any:
    """What a name of transformers, or of one of its submodules, stands for: `hf("CLIPVisionModel")`,
    `hf("activations.ACT2FN")`."""
    module, _, attribute = f"transformers.{name}".rpartition(".")
    return getattr(importlib.import_module(module), attribute)
