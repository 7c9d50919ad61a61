"""Import what a recipe names as `"package.module:Class"`, from Python's path or from the folder beside the recipe.

The folder never stays on `sys.path`: it is there, at the end, while such a module is imported, so that a file beside a
recipe takes the place of nothing else. Two recipes may each have a file of the same name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

_beside: dict[str, str] = {}
"""Modules in `sys.modules` that came from a recipe's folder -> that folder."""


def import_named(path: str, folder: str | None = None) -> Any:
    """The class, function or value `"package.module:Name"`.

    Args:
        folder: of the recipe that names it, if it was read from a file.

    Raises:
        ImportError: there is no such module, in the folder or elsewhere, or in both; or it fails to import.
        AttributeError: it has no such name.
        ValueError: the path is malformed.
    """
    module_name, _, name = path.partition(":")
    if folder is not None and _lies_in(module_name, folder):
        found: Any = _import_beside(module_name, folder)
    else:
        try:
            found = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if folder is None or error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise ModuleNotFoundError(f"{error}, neither beside the recipe ({folder}) nor in Python's path") from error
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _lies_in(module_name: str, folder: str) -> bool:
    parts = module_name.split(".")
    if not all(part.isidentifier() for part in parts):
        return False
    path = Path(folder, *parts)
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _import_beside(module_name: str, folder: str) -> Any:
    top = module_name.partition(".")[0]
    if any(_same(entry, folder) for entry in sys.path):  # as for a script: Python finds it by itself
        _forget(folder)
        return importlib.import_module(module_name)
    other = PathFinder.find_spec(top, sys.path)
    if top in sys.builtin_module_names or (other is not None and other.loader is not None):
        where = "Python itself" if other is None else other.origin
        raise ImportError(f"{top!r} is both beside the recipe ({folder}) and in {where}; rename the one beside it")
    _forget(folder)
    before = set(sys.modules)
    with _at_the_end(folder):
        importlib.invalidate_caches()
        try:
            found = importlib.import_module(module_name)
        finally:
            _beside.update({name: folder for name in set(sys.modules) - before if _came_from(folder, name)})
    if not _came_from(folder, module_name):
        where = getattr(found, "__file__", "elsewhere")
        raise ImportError(f"{module_name!r} lies beside the recipe ({folder}), but was imported from {where} before")
    return found


def _came_from(folder: str, name: str) -> bool:
    file = getattr(sys.modules[name], "__file__", None)
    paths = [file] if file else list(getattr(sys.modules[name], "__path__", ()))
    return any(Path(path).resolve().is_relative_to(Path(folder).resolve()) for path in paths)


def _forget(folder: str) -> None:
    """Let go of the modules of other recipes' folders: this one's may have the same names."""
    for name in [name for name, other in _beside.items() if other != folder]:
        sys.modules.pop(name, None)
        del _beside[name]


@contextmanager
def _at_the_end(folder: str) -> Iterator[None]:
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _same(entry: str, folder: str) -> bool:
    return Path(entry or ".").resolve() == Path(folder).resolve()
