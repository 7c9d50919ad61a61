"""`[model] hf_path`: a Hugging Face directory as the tables that it stands for.

Only its JSON files are read, so that a mistyped recipe does not wait for torch. Whatever the recipe says itself about a
key that the directory expands to holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetmesh.errors import RecipeError
from hetmesh.files import json_object, read_file
from hetmesh.recipe.hf_families import MEDIA, PROCESSORS, PROMPTS, family_of, part_of
from hetmesh.recipe.section import table_in

if TYPE_CHECKING:
    from hetmesh.recipe.recipe import Recipe

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
        hub = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not Path(path).exists()
        get = f": hf download {path} --local-dir {path.rpartition('/')[2]}" if hub else ""
        raise RecipeError(
            f"{SECTION}.{KEY} = {path!r}: there is no config.json in it; give a local Hugging Face directory{get}"
        )
    whole, config = str(config.get("model_type")), part_of(config)
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
    parts: dict[str, dict[str, Any]] = {
        part: {"model": "hf_encoder", "initial_load_path": path, "media": MEDIA[part]} for part in towers
    }
    given = raw.get("modules", {})
    if not isinstance(given, Mapping):  # which is refused
        return dict(raw)
    boundaries: list[dict[str, Any]] = []
    for part in towers:
        last = part
        if part == "vision" and PROJECTOR in given and "model" not in table_in(given, PROJECTOR):
            parts[part]["config"] = {"projector": False}
            parts[PROJECTOR] = {"model": "hf_projector", "initial_load_path": path}
            boundaries.append({"from": part, "to": PROJECTOR})
            last = PROJECTOR
        boundaries.append({"from": last, "to": "llm", "at": MEDIA[part]})
    parts["llm"] = {"model": "hf_llm", "initial_load_path": path, "attention_mask": family.mask}
    modules = {name: {**keys, **table_in(given, name)} for name, keys in parts.items()}
    modules |= {name: value for name, value in given.items() if name not in modules}
    out = {**raw, "modules": modules, "boundaries": raw.get("boundaries", boundaries)}
    out["data"] = _data(path, config, whole, [MEDIA[part] for part in towers], raw.get("data", {}))
    return out


def _data(path: str, config: Mapping[str, Any], whole: str, kinds: list[str], given: Any) -> Any:
    """`[data]` with the directory's tokenizer, processors and placeholders, where it reads conversations."""
    if not isinstance(given, Mapping) or given.get("source", "conversations") != "conversations" or "mixture" in given:
        return given
    options: dict[str, Any] = {"tokenizer": path}
    combined = _read(path, "processor_config.json") or {}  # as transformers 5 saves processors
    if "image" in kinds and ("image_processor" in combined or _is_file(path, "preprocessor_config.json")):
        options["image_processor"] = path
        prompt = PROMPTS.get(processor_of(path, whole))
        if prompt is not None and prompt.tiles == "always":
            options["image_tiles"] = True
    if "audio" in kinds:
        options["audio_processor"] = path
        way = family_of(str(config.get("model_type"))).calls.get("audio")
        options["audio_frames"] = "counted" if way == "padded_frames" else "own"
    tokens = {kind: _token(path, config, kind) for kind in kinds}
    if found := {kind: token for kind, token in tokens.items() if token is not None}:
        options["placeholders"] = found
    own = given.get("options", {})
    if not isinstance(own, Mapping):  # which is refused
        return {"source": "conversations", **given}
    options |= _prompt_options(path, whole, {**options, **own})
    return {"source": "conversations", **given, "options": {**options, **own}}


def processor_of(path: str, model_type: str) -> str:
    """The name of a directory's processor class, as transformers finds it; empty where nothing says."""
    combined = _read(path, "processor_config.json") or {}
    tables = [combined]
    files = {"preprocessor_config.json": "image_processor", "video_preprocessor_config.json": "video_processor"}
    for name, nested in files.items():
        if _is_file(path, name):
            tables.append(_read(path, name) if combined.get(nested) is None else table_in(combined, nested))
            break
    for table in (*tables, *(_read(path, name) or {} for name in ("tokenizer_config.json", "config.json"))):
        if isinstance(found := table.get("processor_class"), str):
            return found
    return PROCESSORS.get(model_type, "")


def prompt_note(recipe: Recipe) -> str:
    """What the prompts of a directory's recipe do not have of its processor's; empty if nothing is known."""
    path = recipe.model.hf_path
    if path is None:
        return ""
    if any(table.source == "conversations" for table in recipe.data.mixture):
        return f"{SECTION}.{KEY} fills in nothing of [[data.mixture]]: its tables say what is around an item, and BOS"
    if recipe.data.source != "conversations":
        return ""
    config = _read(path, "config.json") or {}
    name = processor_of(path, str(config.get("model_type")))
    if name in PROMPTS and PROMPTS[name].tiles and recipe.data.options.get("image_tiles") is False:
        does = "cuts" if PROMPTS[name].tiles == "always" else "may cut"
        said = "data.options.image_tiles = false: images are one tile each"
        return f"{said}; transformers' {name} {does} them into several"
    return ""


def _prompt_options(path: str, model_type: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The chat template, and what the directory's processor makes of its text."""
    if "chat_template" in options:  # the recipe's own: its text is what the model gets
        return {"special_tokens": True}
    name = processor_of(path, model_type)
    prompt = PROMPTS.get(name)
    what = f"{SECTION}.{KEY} = {path!r}: transformers' {name or 'processor'} (model_type {model_type!r})"
    write = f"write the whole form of a conversation as [data.options] chat_template, {_tokens_around(options)}"
    if prompt is None:
        raise RecipeError(f"{what}: hetmesh does not know what it writes around an item; {write}")
    if prompt.refused:
        raise RecipeError(f"{what}: {prompt.refused}; to train on another form, {write}")
    template = _template(path, None if prompt.default else str(options["tokenizer"]))
    if prompt.template and template is not None:
        raise RecipeError(f"{what}: it has its own form, and there is a chat template in the directory; {write}")
    if template is None and not (prompt.template or prompt.default):
        raise RecipeError(f"{what}: there is no chat template in the directory; {write}")
    image = table_in(options, "placeholders").get("image", "<image>")
    found: dict[str, Any] = {}
    if prompt.template:
        found["chat_template"] = prompt.template.replace("<image>", image)
    elif chosen := prompt.default if template is None else template:
        found["chat_template"] = chosen
    if replacements := prompt.replacements(image, _read(path, "tokenizer_config.json") or {}):
        found["replacements"] = replacements
    return {**found, "special_tokens": True} if prompt.special_tokens else found


def _tokens_around(options: Mapping[str, Any]) -> str:
    tokens = " and ".join(repr(token) for token in table_in(options, "placeholders").values())
    return f"with {tokens} for an item and the tokens around it" if tokens else "with the tokens around an item"


def _template(path: str, tokenizer: str | None) -> str | None:
    """The chat template that the tokenizer does not read by itself; empty where it does, None where there is none.

    Args:
        tokenizer: the tokenizer's directory; None where the processor looks at no template of it.
    """
    for name in ("processor_config.json", "chat_template.json"):  # before chat_template.jinja, as in transformers
        found = (_read(path, name) or {}).get("chat_template")
        found = found.get("default") if isinstance(found, Mapping) else found
        if isinstance(found, str):
            return found
    if tokenizer is None:
        return _text(path, "chat_template.jinja")
    of_tokenizer = (_read(tokenizer, "tokenizer_config.json") or {}).get("chat_template")
    return "" if of_tokenizer or _is_file(tokenizer, "chat_template.jinja") else None


def positions_of(path: str) -> int | None:
    """The longest sequence that the LLM of a directory is made for; None where its config.json does not say."""
    text = table_in(_read(path, "config.json") or {}, "text_config")
    found = text.get("max_position_embeddings")
    return found if isinstance(found, int) else None


def synthetic_options(path: str) -> dict[str, Any]:
    """Options of the source `synthetic` that suit the LLM and the tower of a directory. Raises RecipeError: its
    config.json does not say enough."""
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
    return {"vocab_size": vocabulary, "image_token": token, "image_shape": [3, height, width]}


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


def _token(path: str, config: Mapping[str, Any], kind: str) -> str | None:
    """The text of the token that stands for an item, None where the files do not say."""
    number = next((config[key] for key in PLACEHOLDER_KEYS[kind] if isinstance(config.get(key), int)), None)
    if number is None:
        return None
    listed = (_read(path, "tokenizer.json") or {}).get("added_tokens")
    added = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    decoder = table_in(_read(path, "tokenizer_config.json"), "added_tokens_decoder")
    found = next((entry for entry in added if entry.get("id") == number), table_in(decoder, str(number))).get("content")
    return found if isinstance(found, str) else None


def _is_file(path: str, name: str) -> bool:
    return (Path(path).expanduser() / name).is_file()


def _text(path: str, name: str) -> str | None:
    file = Path(path).expanduser() / name
    try:
        return read_file(file).decode("utf-8") if file.is_file() else None
    except (OSError, ValueError) as error:
        raise RecipeError(f"{SECTION}.{KEY} = {path!r}: {name} cannot be read: {error}") from error


def _read(path: str, name: str) -> Any:
    file = Path(path).expanduser() / name
    return json_object(file, f"{SECTION}.{KEY} = {path!r}") if file.is_file() else None
