"""What a directory says of its images: the file that transformers reads, and where that is silent, its class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetmesh.data.images.image_tiles import ANY_RESOLUTION, CROPS, GLM, QWEN, SPLITS
from hetmesh.errors import RecipeError
from hetmesh.files import json_object
from hetmesh.recipe.hf_path import processor_of

FILE, COMBINED = "preprocessor_config.json", "processor_config.json"
"""Where a directory says how to prepare images. The second holds for all kinds of media; what it nests under
`image_processor` goes before the first, as in transformers."""

FOLLOWED = (*QWEN, *GLM, *ANY_RESOLUTION, *CROPS, *SPLITS, "Gemma3ImageProcessor", "LlavaImageProcessor")
"""`image_processor_type`s with steps of their own that are done here; the last two have none without pan-and-scan and
`do_pad`."""

STEPS = {
    *("preprocess", "_preprocess", "_preprocess_image_like_inputs", "process_image", "convert_to_rgb"),
    *("resize", "center_crop", "rescale", "normalize"),
}
"""Methods in which a class does something else to an image than resize, crop, rescale and normalise it."""


@dataclass(frozen=True)
class ImageSettings:
    """The settings of a directory's image processor.

    Attributes:
        config: keys of the file; those that it leaves out or that are null, of the class.
        kind: `image_processor_type`; empty where nothing names one, and the keys are taken as they are.
        processor: class of the processor of images and text, empty if unknown.
        where: the recipe key, the directory and the file, with which errors begin.
        unknown: why nobody here knows what the class does; empty if it is known.
    """

    config: dict[str, Any]
    kind: str
    processor: str
    where: str
    unknown: str = ""


def image_settings(folder: Path, key: str) -> ImageSettings:
    """Read `folder`'s settings. Raises RecipeError: there are none, or they cannot be read."""
    place = f"{key} = '{folder}'"
    combined = json_object(folder / COMBINED, place) if (folder / COMBINED).is_file() else {}
    name, config = COMBINED, combined.get("image_processor")
    if config is None:
        if combined and not (folder / FILE).is_file():
            raise RecipeError(f"{key} = '{folder}': {name} does not say how to prepare images, and there is no {FILE}")
        name, config = FILE, json_object(folder / FILE, place)
    where = f"{key} = '{folder}': {name}"
    if not isinstance(config, dict):
        raise RecipeError(f"{where} must hold a JSON object")
    said = {name: value for name, value in config.items() if value is not None}
    whole = json_object(folder / "config.json", place) if (folder / "config.json").is_file() else {}
    model_type = str(whole.get("model_type"))
    old = str(said.get("feature_extractor_type", "")).replace("FeatureExtractor", "ImageProcessor")
    kind = str(said.get("image_processor_type") or old or _of_model(model_type))
    processor = processor_of(str(folder), model_type)
    if not kind:
        return ImageSettings(said, kind, processor, where)
    try:
        defaults, unknown = _of_class(kind)
    except ImportError as error:  # the class is a stand-in
        defaults = {}
        unknown = f"{kind} cannot be read without the packages that it needs: {' '.join(str(error).split())[:120]}"
    kept = {**defaults, **said, **_of_processor(processor), "image_processor_type": kind}
    if kept.get("default_to_square") and isinstance(side := kept.get("size"), int):
        kept["size"] = {"height": side, "width": side}
    return ImageSettings(kept, kind, processor, where, unknown)


def _of_model(model_type: str) -> str:
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES as OF_MODELS

    found = OF_MODELS.get(model_type) or {}
    return str(found.get("torchvision") or found.get("pil") or "")


def _of_class(kind: str) -> tuple[dict[str, Any], str]:
    """The values that a class has of itself, and why it is unknown here."""
    from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name as named

    base = kind.removesuffix("Fast").removesuffix("Pil")
    found: Any = named(f"{base}Pil") or named(base)
    if found is None:
        return {}, f"transformers has no image processor {kind!r}"
    names = ("default_to_square", *found.valid_kwargs.__annotations__)
    values = {name: value for name in names if (value := getattr(found, name, None)) is not None}
    steps = dict.fromkeys(("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb"), False)
    bases = [base for base in found.__mro__ if base.__module__.startswith("transformers.models.")]
    own = sorted(STEPS.intersection(name for base in bases for name in vars(base)))
    strange = f"{kind} has steps of its own ({', '.join(own)}), which hetmesh does not know"
    return {**steps, **values}, strange if own and base not in FOLLOWED else ""


def _of_processor(name: str) -> dict[str, Any]:
    """What the processor of images and text asks of images, whatever their own file says."""
    from transformers.models.auto.processing_auto import processor_class_from_name

    try:
        return getattr(processor_class_from_name(name), "images_kwargs", None) or {} if name else {}
    except ImportError:  # a stand-in: it does not work here
        return {}
