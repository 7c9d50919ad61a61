"""What lies beside the weights of an exported directory: tokenizer, processors and chat templates of the one that it
came from, and what the run did otherwise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from hetmesh.files import writing
from hetmesh.models.pretrained import PICKLES, Pretrained
from hetmesh.recipe.hf_path import prompt_note
from hetmesh.recipe.hf_prompts import PROMPTS
from hetmesh.recipe.recipe import Recipe

NOT_COPIED = (
    "*.safetensors",
    "*.index.json",
    "config.json",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.gguf",
    "*.py",
    "README*",
    "adapter_*",
    *PICKLES,
)
"""Files of a source directory that are its weights, are written anew, or describe another model."""

PREPARING = ("tokenizer", "image_processor", "audio_processor")
"""Options of conversations that name directories."""


def copy_files(source: Pretrained, place: Path) -> int:
    """Tokenizer, processors, chat templates, generation_config.json and what else there is beside the weights."""
    count = 0
    for file in sorted(source.path.iterdir()):
        if file.is_file() and not file.name.startswith(".") and not any(file.match(pattern) for pattern in NOT_COPIED):
            with writing(place / file.name):
                shutil.copyfile(file, place / file.name)
            count += 1
    templates = source.path / "additional_chat_templates"
    if templates.is_dir():
        with writing(place / templates.name):
            shutil.copytree(templates, place / templates.name)
    return count


def prepared_otherwise(recipe: Recipe, source: Path, *, whole: bool) -> Iterator[str]:
    """In what the run's samples differ from those that the files of `source`, which are copied, make; in lines.

    Args:
        whole: `source` is the directory of all modules, so that samples were to be prepared by its files.
    """
    if _has_own_form(recipe, source):
        yield (
            "the run trained on conversations in the form of its own data.options.chat_template; what was copied "
            "writes another: give the run's to apply_chat_template"
        )
    for options in (each.options for each in recipe.data.mixture or (recipe.data,) if whole):
        for key in PREPARING:
            path = options.get(key)
            if isinstance(path, str) and Path(path).expanduser().resolve() != source.resolve():
                yield f"the run's samples were made with data.options.{key} = {path!r}: take that, not what was copied"
        if options.get("pad_to_square"):
            yield "the run's images were padded to squares (data.options.pad_to_square); what was copied may not do it"
    if whole and not recipe.data.mixture and (note := prompt_note(recipe)):
        yield note


def _has_own_form(recipe: Recipe, source: Path) -> bool:
    """Whether the recipe writes conversations in a form that neither the files of the directory nor the processor of
    its model has."""
    forms = [each.options.get("chat_template") for each in recipe.data.mixture or (recipe.data,)]
    files = [source / name for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")]
    known: set[object] = {form for prompt in PROMPTS.values() for form in (prompt.template, prompt.default)}
    for file in (file for file in files if file.is_file()):
        text = file.read_text(encoding="utf-8")
        known.add(text)
        if file.suffix == ".json" and isinstance(table := json.loads(text), dict):
            found = table.get("chat_template")
            known |= {each["template"] for each in found} if isinstance(found, list) else {found}
    return any(form is not None and form not in known for form in forms)
