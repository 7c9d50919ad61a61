"""Directories of a tower without an LLM (CLIP, SigLIP, DINOv2, Whisper): its last hidden states are the rows."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

INPUTS = {"image": "pixel_values", "audio": "input_features"}
"""Kind of media -> what transformers calls the input of its towers."""


def tower_of(model: Any, media: str) -> Any:
    """The tower of `model` that reads `media`, maybe the whole model; None if there is none."""
    tower = model.get_encoder(media)
    if tower in (model, model.base_model):
        tower = model.base_model
        tower = tower.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else tower
    return tower if getattr(tower, "main_input_name", None) == INPUTS[media] else None


def with_rows(model_class: Any, model: Any) -> Any:
    """`model_class`, of which `model` is one, with a `get_..._features` that takes what its tower takes and gives the
    last hidden states; None if it has no tower."""
    media = next((media for media in INPUTS if tower_of(model, media) is not None), None)
    if media is None:
        return None

    def rows(self: Any, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
        hidden = tower_of(self, media)(*args, **kwargs).last_hidden_state
        if hidden.ndim != 3:
            raise ValueError(f"its last hidden state has {hidden.ndim} dims, not 3: [items, rows, features]")
        return SimpleNamespace(pooler_output=hidden)

    vars(rows)["__signature__"] = inspect.signature(type(tower_of(model, media)).forward)
    own = {"__module__": model_class.__module__, f"get_{media}_features": rows}
    return type(model_class.__name__, (model_class,), own)
