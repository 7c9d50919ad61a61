"""Graphs for drawn recipes whose models hetmesh has no adapter for: users' own classes, and directories."""

from __future__ import annotations

import tomli
from hypothesis import strategies as st

from hetmesh.recipe.hf_path import expand_hf_path
from support import tiny_vlms
from support.recipe_draft import SINK, Draft, random_media, wire

OWN = "support.user_models"
ITEMS = f"{OWN}:Items"


def user_models(draw: st.DrawFn, draft: Draft) -> None:
    """A tower and an LLM that are plain nn.Modules, a third one between them or not."""
    depths = {"vision": draw(st.integers(1, 3)), SINK: draw(st.integers(1, 4))}
    width, between = draw(st.sampled_from([8, 16])), draw(st.booleans())
    modules = draft.table("modules")
    own = draw(st.sampled_from([8, 12])) if between else width
    modules["vision"] = {"model": f"{OWN}:Tower", "config": {"out_features": own, "depth": depths["vision"]}}
    if between:
        modules["projector"] = {
            "model": f"{OWN}:Widen",
            "config": {"branch": draw(st.sampled_from(["none", "gated", "normalised"]))},
        }
    modules[SINK] = {"model": f"{OWN}:Decoder", "config": {"width": width, "depth": depths[SINK]}}
    ends = {"vision": (["embed"], ["norm"]), SINK: (["embed"], ["norm", "head"])}
    for name, (first, last) in ends.items():
        draft.layers[name] = (*first, *(f"blocks.{i}" for i in range(depths[name])), *last)
    draft.heads = {"vision": 4, "projector": 1, SINK: 4}
    wire(draft, *modules, at="image")
    if not _items(draw, draft):
        random_media(draw, draft, {"image": [1, 8, 8]})
    if draft.tables["data"]["options"]["text_only"] == 1.0:  # which tells nobody of what shape images are
        modules["vision"]["config"]["media_shape"] = [1, 8, 8]


def _items(draw: st.DrawFn, draft: Draft) -> bool:
    """Instead of the tower, or not, an encoder that takes images of any size one by one."""
    if draw(st.booleans()):
        return False
    draft.tables["modules"]["vision"]["model"] = ITEMS
    draft.heads["vision"] = 1
    del draft.layers["vision"]
    random_media(draw, draft, {"image": [1, 8, 8]}, largest={"image": [1, 16, 16]})
    return True


TILED = ("llava_onevision", "internvl")
"""Models of `tiny_vlms` whose images may be cut into tiles."""

BLOCKS = {"internvl": "model.vision_tower.encoder.layer", "gemma3": "model.vision_tower.encoder.layers"}
"""Towers of `tiny_vlms` that can be cut anywhere -> where their blocks are."""

LAYERS = {"gemma3": "sliding_attention", "qwen3_5": "linear_attention"}
"""Models of `tiny_vlms` -> the kind of layers that their LLMs have beside full attention."""


def directories(draw: st.DrawFn, draft: Draft) -> None:
    """A whole model from a directory, whose images are one tile or several, or whose layers are of two kinds."""
    name = draw(st.sampled_from((*TILED, *LAYERS)))
    raw = expand_hf_path(
        {"model": {"hf_path": str(tiny_vlms.kept(name))}, "data": {"source": "hetmesh.testing.sources"}}
    )
    draft.tables["modules"] = {name: {**table, "config": {}} for name, table in raw["modules"].items()}
    draft.tables["boundaries"] = raw["boundaries"]
    if draw(st.booleans()):
        draft.tables["modules"]["vision"]["trainable"] = False
    draft.causal = LAYERS.get(name) == "linear_attention"
    draft.whole = ("vision",) if name == "llava_onevision" else ()
    heads = tiny_vlms.DELTA_NET["linear_num_key_heads"] if draft.causal else tiny_vlms.TEXT["num_attention_heads"]
    draft.heads = {"vision": 2 if name in LAYERS else 4, SINK: heads}
    prefix = "model.language_model"
    blocks = (f"{prefix}.layers.{i}" for i in range(4 if name == "gemma3" else 3))
    draft.layers[SINK] = (f"{prefix}.embed_tokens", *blocks, f"{prefix}.norm", "lm_head")
    if name in BLOCKS:
        layers = (f"{BLOCKS[name]}.{i}" for i in range(3))
        tower = BLOCKS[name].partition(".encoder.")[0]
        last = (f"{tower}.post_layernorm",) if name == "gemma3" else ()
        draft.layers["vision"] = (f"{tower}.embeddings", *layers, *last, "model.multi_modal_projector")
    random_media(draw, draft, {"image": [3, 8, 8]}, apart=True)
    draft.tables["data"]["source"], options = tiny_vlms.source_of(tiny_vlms.kept(name))
    draft.tables["data"]["options"] |= tomli.loads(f"options = {{ {options} }}")["options"]
