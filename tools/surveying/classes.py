"""Which classes of the installed transformers read images or audio and write text."""

from __future__ import annotations

from collections.abc import Mapping


def image_text_classes() -> Mapping[str, str]:
    """Class by `model_type`: transformers' own list."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def audio_text_classes() -> Mapping[str, str]:
    """Class by `model_type`: what transformers lists as multimodal and not among those that read images alone."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    images = image_text_classes()
    return {key: name for key, name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items() if key not in images}
