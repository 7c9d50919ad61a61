"""Files beside the weights of an exported directory: tokenizer, processors and chat templates of the one that it came
from, what the run did otherwise, and what it was made from."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hetmesh.checkpoint.saved_run import SavedRun
from hetmesh.files import from_json, place_in, read_file, to_json, writing
from hetmesh.models.weights.pretrained import PICKLES, Pretrained
from hetmesh.recipe.recipe import Recipe
from hetmesh.records.checksums import manifest_sum

MADE_FROM = "hetmesh_export.json"
"""What an exported directory was made from, so that a stale one is not taken for a new one."""

NOT_COPIED = (
    *("*.safetensors", "*.index.json", "config.json", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.py", "README*"),
    *("adapter_*", MADE_FROM, *PICKLES),
)
"""Files of a source directory that are its weights, are written anew, or describe another model."""

PREPARING = ("processor", "tokenizer", "image_processor", "audio_processor")
"""Options of conversations that name directories."""


def copy_files(source: Pretrained, place: Path) -> tuple[int, list[str]]:
    """Copy tokenizer, processors, chat templates, generation_config.json and what else there is beside the weights.
    Returns the number of files, and the names of links out of the directory, which are not copied."""
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
    """How the run's samples differ from those that the copied files of `source` make, as lines of text. `whole`: it is
    the directory of all modules, so its files were to prepare the samples."""
    tables = [data.options for data in recipe.data.mixture or (recipe.data,)]
    if any(options.get("chat_template") is not None for options in tables):
        yield (
            "the run trained on conversations in the form of its own data.options.chat_template: give that to "
            "apply_chat_template, unless what was copied has the same"
        )
    for options in tables if whole else ():
        for key in PREPARING:
            path = options.get(key)
            if isinstance(path, str) and Path(path).expanduser().resolve() != source.resolve():
                yield f"the run's samples were made with data.options.{key} = {path!r}: take that, not what was copied"
        if given := options.get("processor_options"):
            yield f"the run's processor had data.options.processor_options = {given}; what was copied does not say so"


def made_from(run: SavedRun, dtype: object, *, merge: bool) -> dict[str, Any]:
    """What an export is made from, for `MADE_FROM`: the checkpoint by the checksum of its checksums, its modules as the
    recipe describes them, and what is done with dtypes and adapters. Raises CheckpointError: it has no checksums."""
    modules = {name: module.model_dump(mode="json", by_alias=True) for name, module in run.recipe.modules.items()}
    return {
        "checkpoint": run.path.name,  # no path: exports are given to others
        "checksums_sha256": manifest_sum(run.path),
        "modules_sha256": hashlib.sha256(to_json(modules).encode()).hexdigest(),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "lora": "merged" if merge else "adapters",
    }


def is_made_from(folder: Path, origin: Mapping[str, Any]) -> bool:
    """Whether the directory was made from `origin`; one without the file (of an older version, say) was not."""
    try:
        return bool(from_json(read_file(folder / MADE_FROM)) == origin)
    except (OSError, ValueError):
        return False


def put_aside(folder: Path) -> Path:
    """Rename an exported directory, which may still be needed; returns its new path. Raises OutputError."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    with writing(folder):
        folder.rename(aside)
    return aside
