"""`[model] hf_path`: a Hugging Face directory as the tables that it stands for.

Only its JSON files are read, so that a mistyped recipe does not wait for torch. Whatever the recipe says itself about a
key that the directory expands to holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetmesh.errors import RecipeError
from hetmesh.recipe.hf_families import MEDIA, family_of

SECTION, PROJECTOR = "model", "projector"
KEY = "hf_path"
PLACEHOLDER_KEYS: Mapping[str, tuple[str, ...]] = {
    media: (f"{media}_token_id", f"{media}_token_index") for media in ("image", "audio")
}
"""Where a config.json says which token stands for an item."""


def expand_hf_path(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with what its `[model] hf_path` stands for; as it is without one.

    Raises:
        RecipeError: the directory is none, its config.json describes no multimodal model, or one that is refused.
    """
    table = raw.get(SECTION)
    path = table.get(KEY) if isinstance(table, Mapping) else None
    if not isinstance(path, str):  # without a value, or with one that is refused by its type
        return dict(raw)
    config = _read(path, "config.json")
    if config is None:
        raise RecipeError(
            f"{SECTION}.{KEY} = {path!r}: there is no config.json in it; give a local Hugging Face directory"
        )
    model_type = config.get("model_type")
    family = family_of(str(model_type))
    if family.refused:
        raise RecipeError(f"{SECTION}.{KEY} = {path!r}: model_type {model_type!r} is not supported: {family.refused}")
    towers = [part for part in MEDIA if isinstance(config.get(f"{part}_config"), Mapping)]
    if not towers:
        raise RecipeError(
            f"{SECTION}.{KEY} = {path!r}: its config.json (model_type {model_type!r}) has neither vision_config nor "
            "audio_config; for a model of text alone name a model in [modules.<name>]"
        )
    parts: dict[str, dict[str, Any]] = {
        part: {"model": "hf_encoder", "initial_load_path": path, "media": MEDIA[part]} for part in towers
    }
    given = raw.get("modules", {})
    if not isinstance(given, Mapping):  # which is refused
        return dict(raw)
    boundaries: list[dict[str, Any]] = []
    for part in towers:
        last = part
        if part == "vision" and PROJECTOR in given and "model" not in _table(given, PROJECTOR):
            parts[part]["config"] = {"projector": False}
            parts[PROJECTOR] = {"model": "hf_projector", "initial_load_path": path}
            boundaries.append({"from": part, "to": PROJECTOR})
            last = PROJECTOR
        boundaries.append({"from": last, "to": "llm", "at": MEDIA[part]})
    parts["llm"] = {"model": "hf_llm", "initial_load_path": path, "attention_mask": family.mask}
    modules = {name: {**keys, **_table(given, name)} for name, keys in parts.items()}
    modules |= {name: value for name, value in given.items() if name not in modules}
    out = {**raw, "modules": modules, "boundaries": raw.get("boundaries", boundaries)}
    out["data"] = _data(path, config, [MEDIA[part] for part in towers], raw.get("data", {}))
    return out


def _data(path: str, config: Mapping[str, Any], kinds: list[str], given: Any) -> Any:
    """`[data]` with the directory's tokenizer, processors and placeholders, where it reads conversations."""
    if not isinstance(given, Mapping) or given.get("source", "conversations") != "conversations" or "mixture" in given:
        return given
    options: dict[str, Any] = {"tokenizer": path}
    combined = _read(path, "processor_config.json") or {}  # as transformers 5 saves processors
    if "image" in kinds and ("image_processor" in combined or _is_file(path, "preprocessor_config.json")):
        options["image_processor"] = path
    if "audio" in kinds:
        options["audio_processor"] = path
    template = (_read(path, "chat_template.json") or {}).get(
        "chat_template"
    )  # of a processor; tokenizers do not read it
    if isinstance(template, str) and not _is_file(path, "chat_template.jinja"):
        options["chat_template"] = template
    tokens = {kind: _token(path, config, kind) for kind in kinds}
    if found := {kind: token for kind, token in tokens.items() if token is not None}:
        options["placeholders"] = found
    own = given.get("options", {})
    return {"source": "conversations", **given, "options": {**options, **own} if isinstance(own, Mapping) else own}


def _token(path: str, config: Mapping[str, Any], kind: str) -> str | None:
    """The text of the token that stands for an item, None where the files do not say."""
    number = next((config[key] for key in PLACEHOLDER_KEYS[kind] if isinstance(config.get(key), int)), None)
    if number is None:
        return None
    for added in (_read(path, "tokenizer.json") or {}).get("added_tokens", ()):
        if added.get("id") == number:
            return added.get("content")
    decoder = (_read(path, "tokenizer_config.json") or {}).get("added_tokens_decoder", {})
    return decoder.get(str(number), {}).get("content")


def _is_file(path: str, name: str) -> bool:
    return (Path(path).expanduser() / name).is_file()


def _table(tables: Any, name: str) -> Mapping[str, Any]:
    table = tables.get(name, {}) if isinstance(tables, Mapping) else {}
    return table if isinstance(table, Mapping) else {}


def _read(path: str, name: str) -> Any:
    file = Path(path).expanduser() / name
    if not file.is_file():
        return None
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{SECTION}.{KEY} = {path!r}: {name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise RecipeError(f"{SECTION}.{KEY} = {path!r}: {name} must hold a JSON object")
    return value
