"""What lies beside the weights of an exported directory: tokenizer, processors and chat templates of the one that it
came from, and what the run did otherwise."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from hetmesh.export.provenance import MADE_FROM
from hetmesh.files import json_object, place_in, read_file, writing
from hetmesh.models.weights.pretrained import PICKLES, Pretrained
from hetmesh.recipe.hf_families import PROMPTS
from hetmesh.recipe.hf_path import prompt_note
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
    MADE_FROM,
    *PICKLES,
)
"""Files of a source directory that are its weights, are written anew, or describe another model."""

PREPARING = ("tokenizer", "image_processor", "audio_processor")
"""Options of conversations that name directories."""


def copy_files(source: Pretrained, place: Path) -> tuple[int, list[str]]:
    """Tokenizer, processors, chat templates, generation_config.json and what else there is beside the weights.

    Returns:
        How many files, and the names of links out of the directory: whose they are it cannot say.
    """
    count, linked = 0, []
    templates = source.path / "additional_chat_templates"
    for file in (*sorted(source.path.iterdir()), *(sorted(templates.iterdir()) if templates.is_dir() else ())):
        if not file.is_file() or file.name.startswith(".") or any(file.match(pattern) for pattern in NOT_COPIED):
            continue
        name = str(file.relative_to(source.path))
        try:
            place_in([source.path], name)
        except OSError:
            linked.append(name)
            continue
        with writing(place / name):
            (place / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, place / name)
        count += 1
    return count, linked


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
        if file.suffix == ".json":
            found = json_object(file, source).get("chat_template")
            named = found if isinstance(found, list) else [{"template": found}]
            known |= {str(each.get("template")) for each in named if isinstance(each, dict)}
        else:
            known.add(read_file(file).decode("utf-8", errors="replace"))
    return any(form is not None and form not in known for form in forms)
