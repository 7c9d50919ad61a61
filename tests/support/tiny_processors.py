"""Directories with a tokenizer and a processor as transformers saves them, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surveying.tiny_config import make_tiny
from surveying.tiny_processor import default_config, fit_config, save_processor


def save(model_type: str, path: Path) -> Path:
    """The directory `path` of a tiny model of that type."""
    config = fit_config(model_type, make_tiny(default_config(model_type)))
    config.save_pretrained(path)
    save_processor(model_type, config, path)
    return path


def change(path: Path, name: str, **keys: Any) -> None:
    """Set keys of a JSON file of a directory; None leaves a key out. `__` parts the keys of nested tables."""
    file = path / f"{name}.json"
    value = json.loads(file.read_text()) if file.exists() else {}
    for key, to in keys.items():
        *folders, last = key.split("__")
        table = value
        for folder in folders:
            table = table[folder]
        table.pop(last, None)
        if to is not None:
            table[last] = to
    file.write_text(json.dumps(value))
