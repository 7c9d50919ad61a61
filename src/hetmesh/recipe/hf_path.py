"""`[model] hf_path`: a Hugging Face directory as the tables that it stands for.

Only its JSON files are read, so a mistyped recipe does not wait for torch. Keys that the recipe gives itself hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetmesh.errors import RecipeError
from hetmesh.files import hub_hint, json_object
from hetmesh.recipe.hf_families import MEDIA, family_of, part_of
from hetmesh.recipe.section import table_in

if TYPE_CHECKING:
    from hetmesh.recipe.recipe import Recipe

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""Files of which a directory with a processor has one."""

SECTION, PROJECTOR = "model", "projector"
KEY = "hf_path"
PLACEHOLDER_KEYS: Mapping[str, tuple[str, ...]] = {
    media: (f"{media}_token_id", f"{media}_token_index") for media in ("image", "audio")
}
"""Where a config.json says which token stands for an item."""


def expand_hf_path(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with what its `[model] hf_path` stands for; as it is without one. Raises RecipeError: the directory is
    none, its config.json describes no multimodal model, or one that is refused."""
    table = raw.get(SECTION)
    path = table.get(KEY) if isinstance(table, Mapping) else None
    if not isinstance(path, str):  # without a value, or with one that is refused by its type
        return dict(raw)
    config = _read(path, "config.json")
    if config is None:
        raise RecipeError(
            f"{SECTION}.{KEY} = {path!r}: there is no config.json in it; give a local Hugging Face directory"
            f"{hub_hint(path)}"
        )
    config = part_of(config)
    model_type = config.get("model_type")
    family = family_of(str(model_type))
    if family.refused:
        raise RecipeError(f"{SECTION}.{KEY} = {path!r}: model_type {model_type!r} is not supported: {family.refused}")
    towers = [part for part in MEDIA if isinstance(config.get(f"{part}_config"), Mapping)]
    if not towers and "text_config" in config:
        tables = ", ".join(f"{key} = null" if config[key] is None else key for key in config if key.endswith("_config"))
        raise RecipeError(
            f"{SECTION}.{KEY} = {path!r}: model_type {model_type!r} is not supported: hetmesh takes its towers from "
            f"vision_config and audio_config of config.json, which has {tables}"
        )
    if not towers:
        raise RecipeError(
            f"{SECTION}.{KEY} = {path!r}: its config.json (model_type {model_type!r}) has neither vision_config nor "
            "audio_config; for a model of text alone name a model in [modules.<name>]"
        )
    given = raw.get("modules", {})
    if not isinstance(given, Mapping):  # which is refused
        return dict(raw)
    media = {part: str(table_in(given, part).get("media", MEDIA[part])) for part in towers}
    parts: dict[str, dict[str, Any]] = {
        part: {"model": "hf_encoder", "initial_load_path": path, "media": media[part]} for part in towers
    }
    boundaries: list[dict[str, Any]] = []
    for part in towers:
        last = part
        if part == "vision" and PROJECTOR in given and "model" not in table_in(given, PROJECTOR):
            parts[part]["config"] = {"projector": False}
            parts[PROJECTOR] = {"model": "hf_projector", "initial_load_path": path}
            boundaries.append({"from": part, "to": PROJECTOR})
            last = PROJECTOR
        boundaries.append({"from": last, "to": "llm", "at": media[part]})
    parts["llm"] = {"model": "hf_llm", "initial_load_path": path, "attention_mask": family.mask}
    modules = {name: {**keys, **table_in(given, name)} for name, keys in parts.items()}
    modules |= {name: value for name, value in given.items() if name not in modules}
    out = {**raw, "modules": modules, "boundaries": raw.get("boundaries", boundaries)}
    out["data"] = _data(path, raw.get("data", {}))
    return out


def _data(path: str, given: Any) -> Any:
    """`[data]` with the directory's processor where it reads conversations."""
    if not isinstance(given, Mapping):
        return given
    if isinstance(tables := given.get("mixture"), list):
        return {**given, "mixture": [_with_processor(path, table) for table in tables]}
    return given if "mixture" in given else _with_processor(path, {"source": "conversations", **given})


def _with_processor(path: str, table: Any) -> Any:
    own = table.get("options", {}) if isinstance(table, Mapping) else None
    if not isinstance(own, Mapping) or table.get("source") != "conversations" or "tokenizer" in own:
        return table
    return {**table, "options": {"processor": path, **own}}


def positions_of(path: str) -> int | None:
    """The longest sequence that the LLM of a directory is made for; None where its config.json does not say."""
    text = table_in(_read(path, "config.json") or {}, "text_config")
    found = text.get("max_position_embeddings")
    return found if isinstance(found, int) else None


def synthetic_options(path: str) -> dict[str, Any]:
    """Options of the source `synthetic` that suit a directory's modules. Raises RecipeError: they do not say it."""
    config = _read(path, "config.json") or {}
    text, vision = table_in(config, "text_config"), table_in(config, "vision_config")
    token = next((config[key] for key in PLACEHOLDER_KEYS["image"] if isinstance(config.get(key), int)), None)
    vocabulary = text.get("vocab_size", config.get("vocab_size"))
    if not vision or token is None or not isinstance(vocabulary, int):
        raise RecipeError(
            f"{SECTION}.{KEY} = {path!r}: its config.json does not say what random data should be like (vision_config, "
            "image_token_id and vocab_size); give --data"
        )
    size = vision.get("image_size", 16 * vision.get("patch_size", 14) * vision.get("spatial_merge_size", 1))
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
    has_processor = any((Path(path).expanduser() / name).is_file() for name in PROCESSOR_FILES)
    own = {"processor": path} if has_processor else {}
    return {"vocab_size": vocabulary, "image_token": token, "image_shape": [3, height, width], **own}


def check_placeholders(recipe: Recipe, placeholders: Mapping[str, int], vocabulary: int) -> None:
    """That a directory's config.json and the data agree on which token stands for an item: transformers, which an
    exported model goes back to, looks for the config's.

    Args:
        placeholders: token id by kind, of the data source.
        vocabulary: number of tokens of the data source.

    Raises:
        RecipeError: they differ, or there is no such token.
    """
    path = recipe.model.hf_path
    config = None if path is None else part_of(_read(path, "config.json") or {})
    if not config or any(table.source != "conversations" for table in recipe.data.mixture or (recipe.data,)):
        return
    for kind, keys in PLACEHOLDER_KEYS.items():
        key, number = next(((key, config[key]) for key in keys if isinstance(config.get(key), int)), ("", None))
        if number is None or kind not in placeholders:
            continue
        where = f"{SECTION}.{KEY} = {path!r}: its config.json has {key} = {number}"
        if number >= vocabulary:
            raise RecipeError(f"{where}, but the tokenizer has {vocabulary} tokens, 0 to {vocabulary - 1}")
        if placeholders[kind] != number:
            raise RecipeError(
                f"{where}, but data.options.placeholders.{kind} is token {placeholders[kind]}; name the token that the "
                "config means, or change the config"
            )


def _read(path: str, name: str) -> Any:
    file = Path(path).expanduser() / name
    return json_object(file, f"{SECTION}.{KEY} = {path!r}") if file.is_file() else None
