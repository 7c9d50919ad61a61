"""The checks of `tools/gpu_check.py`, one file each.

A check is a module with `run(place) -> Found`; the first line of its docstring is what the list says. It says nothing
about passing: it gives figures, and of some of them what they may be at most. What it cannot do where it runs it raises
as `Skip`, or names in `Found.left_out`.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType

sys.path.append(str(Path(__file__).parents[2] / "tests"))  # for `support`, which hetmesh's own tests share
CHECKS = {
    "machine": 120.0,
    "parity": 600.0,
    "recipes": 1200.0,
    "transfers": 300.0,
    "flex": 900.0,
    "compiling": 600.0,
    "host_blocks": 900.0,
    "memory": 900.0,
    "step_time": 900.0,
    "beside": 900.0,
}
"""Seconds that each may take on the slowest of its devices; in the order in which they run."""


def descriptions() -> dict[str, str]:
    """Name -> what it checks. Nothing is imported."""
    folder = Path(__file__).parent
    texts = {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in CHECKS}
    return {name: (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0] for name, text in texts.items()}


def load(name: str) -> ModuleType:
    """The module of a check."""
    return importlib.import_module(f"gpu_checks.{name}")
