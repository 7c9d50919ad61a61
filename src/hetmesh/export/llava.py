"""A SigLIP or CLIP, an MLP and a Llama or Qwen3 as one directory of LLaVA, with its processor."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetmesh.data.chat import DEFAULT_TEMPLATE, FILES
from hetmesh.files import writing
from hetmesh.models import pretrained_of
from hetmesh.models.config_keys import hf
from hetmesh.recipe.hf_path import PROCESSOR_FILES
from hetmesh.recipe.recipe import Recipe

CLASS = "LlavaForConditionalGeneration"
TOWER, PROJECTOR, LLM = "model.vision_tower.", "model.multi_modal_projector.", "model.language_model."
"""Prefixes of the names of its parts' tensors; the head is beside these."""
_FILES: Mapping[str, Sequence[str]] = {"tokenizer": FILES, "image_processor": PROCESSOR_FILES}
KINDS = {TOWER: ("siglip", "clip"), PROJECTOR: ("mlp",), LLM: ("llama", "qwen3")}


def llava_parts(recipe: Recipe) -> dict[str, str]:
    """Part of LLaVA -> module, of a recipe that has these modules alone, of kinds that LLaVA has; else empty."""
    before = {b.destination: b.source for b in recipe.boundaries}
    projector = before.get(recipe.llm, "")
    names = dict(zip(KINDS, (before.get(projector, ""), projector, recipe.llm), strict=True))
    alone = len(before) == len(recipe.boundaries) and {*names.values()} == recipe.modules.keys()
    return names if alone and all(recipe.modules[n].model in KINDS[part] for part, n in names.items()) else {}


def why_not_llava(recipe: Recipe, projector: Any) -> str:
    """What LLaVA cannot say of such modules; empty where it can say all."""
    inside, outside = projector.hidden_features, projector.out_features
    if inside != outside:
        return f"its projector is as wide inside as the LLM, {outside}; here hidden_features = {inside}"
    mask = recipe.modules[recipe.llm].attention_mask
    return "" if mask == "causal" else f"its attention is causal; here attention_mask = {mask!r}"


def llava_config(image_token: int, tower: Any, vision: Any, text: Any) -> Any:
    """The config of a tower, with its config, and an LLM with the config `text`."""
    clip = vision.model_type == "clip_vision_model"
    # SigLIP's rows have passed its last norm, which transformers leaves out of hidden states unless the config asks.
    return hf("LlavaConfig")(
        vision_config={**vision.to_dict(), "tie_last_hidden_states": not clip},
        text_config=text.to_dict(),
        image_token_index=image_token,
        image_seq_length=tower.rows_per_item,
        vision_feature_select_strategy="default" if clip and not tower.class_token else "full",
        vision_feature_layer=-1,  # CLIP's blocks behind the one that is read are not built
        architectures=[CLASS],
    )


def write_processor(recipe: Recipe, config: Any, place: Path) -> Iterator[str]:
    """Write the processor of the tokenizer and image processor that the recipe's data name, or else of those in the
    directories of its modules, and what the LLM's directory says of generation. Yields what there is to know, as lines
    of text."""
    llm, tower = (pretrained_of(name, recipe.modules[name]) for name in (recipe.llm, llava_parts(recipe)[TOWER]))
    if llm is not None and (file := llm.path / "generation_config.json").is_file():
        with writing(place / file.name):
            shutil.copyfile(file, place / file.name)
    if config.vision_config.tie_last_hidden_states:
        yield "for transformers from 5.18 on: older ones leave out the tower's last norm (tie_last_hidden_states)"
    tables = (data.options for data in recipe.data.mixture or (recipe.data,))
    options = next((table for table in tables if {"tokenizer", "image_processor"} <= table.keys()), None)
    named = options is not None
    if options is None and llm is not None and tower is not None:
        options = {"tokenizer": llm.path, "image_processor": tower.path}
        if not all(any((options[key] / name).is_file() for name in _FILES[key]) for key in options):
            options = None
    if options is None:
        yield "without tokenizer and processor: the recipe's data name none, and its modules' directories have none"
        return
    try:
        tokenizer, images = (
            hf(kind).from_pretrained(Path(options[key]).expanduser(), local_files_only=True)
            for kind, key in (("AutoTokenizer", "tokenizer"), ("AutoImageProcessor", "image_processor"))
        )
        if not (named or config.image_token_index in tokenizer.added_tokens_decoder):
            raise ValueError(f"token {config.image_token_index}, which stands for an image, is a word in {llm}")
        clip = config.vision_config.model_type == "clip_vision_model"
        image_token = tokenizer.convert_ids_to_tokens(config.image_token_index)
        processor = hf("LlavaProcessor")(
            images,
            tokenizer,
            patch_size=config.vision_config.patch_size,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
            chat_template=_template(tokenizer, image_token, options.get("chat_template")),
            image_token=image_token,
            num_additional_image_tokens=int(clip),
        )
    except Exception as error:  # whatever transformers makes of the directories
        yield f"without tokenizer and processor: {' '.join(str(error).split())}"
        return
    with writing(place):
        processor.save_pretrained(place)
    whose = "the run's tokenizer and image processor" if named else f"{llm} and {tower}; the recipe's data name none"
    yield f"with a LlavaProcessor of {whose}"


_JOINED = (
    "{% set joined = namespace(messages=[]) %}{% for m in messages %}{% set text %}{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for p in m.content %}{{ p.text if p.type == 'text' else 'IMAGE' }}{% endfor %}"
    "{% endif %}{% endset %}{% set joined.messages = joined.messages + [dict(m, content=text)] %}{% endfor %}"
    "{% set messages = joined.messages %}"
)


def _template(tokenizer: Any, image_token: str, given: str | None) -> str:
    """The run's chat template for contents in parts, as processors hand them over; one that takes text alone gets them
    joined, which is what the run has trained on."""
    stored = tokenizer.chat_template
    template = given or (stored.get("default") if isinstance(stored, Mapping) else stored) or DEFAULT_TEMPLATE
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]
    try:
        written = tokenizer.apply_chat_template(parts, chat_template=template, tokenize=False)
    except Exception:  # whatever a template makes of parts
        written = ""
    return template if written.count(image_token) == 1 else _JOINED.replace("IMAGE", image_token) + template
