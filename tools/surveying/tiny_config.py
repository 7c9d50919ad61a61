"""Any config of transformers made tiny by the names and values of its keys.

Heads keep their size, so that rotary sections and the like still fit; there are fewer of them, and fewer layers,
experts and tokens. What had one width before has one width after, in all parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

LAYERS, HEADS, KV_HEADS, EXPERTS, CHOSEN, WIDE, VOCABULARY = 4, 4, 2, 4, 2, 64, 512
FIRST_OTHER = 100
"""The smallest id of a token that means something and stands for no item; text of `RandomMedia` is below it."""

LAYER_KEYS = frozenset(
    [
        "num_hidden_layers",
        "depth",
        "num_layers",
        "encoder_layers",
        "decoder_layers",
        "n_layers",
        "conf_num_hidden_layers",
        "num_blocks",
        "num_decoder_layers",
    ]
)
HEAD_KEYS = frozenset(
    [
        "num_attention_heads",
        "num_heads",
        "attention_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
        "conf_num_attention_heads",
    ]
)
OTHER_HEAD_KEYS = frozenset(["linear_num_heads", "linear_num_key_heads", "linear_num_value_heads", "index_n_heads"])
"""Of heads beside those of attention, which say nothing of widths."""
WIDTH_KEYS = frozenset(["hidden_size", "d_model", "embed_dim"])
INNER_KEYS = frozenset(
    [
        "intermediate_size",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
        "ffn_dim",
        "d_ff",
        "moe_intermediate_size",
        "mlp_dim",
        "shared_expert_intermediate_size",
        "intermediate_size_mlp",
        "alignment_intermediate_size",
        "projection_intermediate_size",
        "shared_experts_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "moe_hidden_size",
        "q_lora_rank",
        "mm_embed_dim",
        "output_proj_dims",
    ]
)
EXPERT_KEYS = frozenset(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
CHOSEN_KEYS = frozenset(["num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"])
INDEX_KEYS = frozenset(
    [
        "deepstack_visual_indexes",
        "fullatt_block_indexes",
        "global_attn_indexes",
        "intermediate_layers_indices",
        "spatial_target_layers",
        "cross_attention_layers",
        "moe_layers",
        "full_attn_idxs",
        "rope_scaling_layers",
    ]
)
INTO_TEXT_KEYS = frozenset(["out_hidden_size", "text_hidden_size"])
FEATURE_LAYER_KEYS = frozenset(["vision_feature_layer", "vision_feature_layers", "image_feature_layer"])


def make_tiny(config: Any, small_images: bool = True, axes: bool = False) -> Any:
    """`config`, in place.

    Args:
        axes: its LLM has positions of three axes.
        small_images: also make images as small as four patches a side, where a part says how large they are.
    """
    parts = list(_parts(config))
    text = config.get_text_config()
    widths = _widths([*(part for part in parts if part is not text), text])
    tokens = _placeholders(config)
    into_text = widths.get(_first(text, ("hidden_size",)))
    for part in parts:
        old = _first(part, LAYER_KEYS)
        heads = _first(part, HEAD_KEYS)
        whole = heads and _first(part, ("head_dim",)) * heads == _first(part, sorted(WIDTH_KEYS))
        kinds = list(vars(part).get("layer_types") or ())
        for key, value in list(vars(part).items()):
            if not key.startswith("_"):
                changed = _changed(key, value, old, widths, tokens)
                if key == "num_key_value_heads" and value == heads:
                    changed = min(heads, HEADS)
                if key in INTO_TEXT_KEYS and into_text and isinstance(value, int):
                    changed = into_text  # some default configs have another width there
                if changed is not value:
                    setattr(part, key, changed)
        if (spec := vars(part).get("_heterogeneity_spec")) is not None and old > LAYERS:
            chosen = [spec.per_layer_overrides.get(i, {}) for i in _chosen(kinds or list(range(old)))]
            part.per_layer_config = {
                i: {key: _changed(key, value, old, widths, tokens) for key, value in values.items()}
                for i, values in enumerate(chosen)
                if values
            }
        if whole:  # a width that another part has too may have other heads
            part.head_dim = _first(part, sorted(WIDTH_KEYS)) // _first(part, HEAD_KEYS)
        if part is not text and into_text and {"embed_dim", "hidden_size"} <= vars(part).keys():
            part.hidden_size = into_text  # of Qwen2-VL's tower, what it gives
        _suit(part, axes and part is text)
        if small_images:
            _shrink_images(part)
    vision = vars(config).get("vision_config")
    if small_images and "image_grid_pinpoints" in vars(config) and vision is not None:
        side = vision.image_size
        config.image_grid_pinpoints = [[side, 2 * side], [2 * side, side]]
    return config


def _parts(config: Any) -> Iterator[Any]:
    from transformers import PreTrainedConfig

    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _first(part: Any, keys: Iterable[str]) -> int:
    """The first of the keys that has a number, 0 if none has. (Layers may have values of their own, so no getattr.)"""
    return next((n for key in keys if isinstance(n := vars(part).get(key), int) and not isinstance(n, bool)), 0)


def _widths(parts: list[Any]) -> dict[int, int]:
    """New width by old one, such that heads keep their size; of the last part where several have one width."""
    found: dict[int, int] = {}
    for part in parts:
        heads, width = _first(part, HEAD_KEYS), _first(part, sorted(WIDTH_KEYS))
        if heads and width:
            size = _first(part, ("head_dim",)) or max(width // heads // 8 * 8, 8)
            found[width] = min(HEADS, heads) * size
    return found


def _changed(key: str, value: Any, layers: int, widths: dict[int, int], tokens: dict[int, int]) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float) and ("drop" in key):
        return 0.0
    if key.endswith(("_token_id", "_token_index", "_token_ids")) or key in ("image_patch_id",):
        return _token(value, tokens)
    if isinstance(value, list | tuple) and layers > LAYERS and len(value) == layers and key not in INDEX_KEYS:
        return type(value)(_representative(list(value)))
    if key in INDEX_KEYS and isinstance(value, list | tuple):
        return type(value)(range(min(len(value), LAYERS - 1)))
    if key in FEATURE_LAYER_KEYS:
        return _near(value)
    if not isinstance(value, int):
        return value
    if key in LAYER_KEYS:
        return min(value, LAYERS)
    if key in HEAD_KEYS | OTHER_HEAD_KEYS:
        return min(value, HEADS)
    if key == "num_key_value_heads":
        return min(value, KV_HEADS)
    if key in EXPERT_KEYS:
        return min(value, EXPERTS)
    if key in CHOSEN_KEYS:
        return min(value, CHOSEN)
    if key in ("n_group", "topk_group", "first_k_dense_replace"):
        return min(value, 1)
    if key in INNER_KEYS:
        return min(value, WIDE)
    if key == "vocab_size":
        return min(value, VOCABULARY)
    if key.endswith(("_size", "_dim", "_channels", "d_model")) and "head" not in key:
        return _width(value, widths)
    return value


def _width(value: int, widths: dict[int, int]) -> int:
    if value in widths:
        return widths[value]
    for old, new in sorted(widths.items(), reverse=True):  # what several of one width are joined to
        if value > old and value % old == 0 and value // old <= 16 and old >= 256:
            return new * (value // old)
    return value


def _token(value: Any, tokens: dict[int, int]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_token(each, tokens) for each in value)
    if not isinstance(value, int) or value < 0:
        return value
    return tokens.setdefault(value, FIRST_OTHER + len(tokens))


def _placeholders(config: Any) -> dict[int, int]:
    """New token by old one for what stands for an item: 1, or 1 and 2, as `RandomMedia` has them."""
    found: dict[int, int] = {}
    for kind in ("image", "audio"):
        for key in (f"{kind}_token_id", f"{kind}_token_index"):
            if isinstance(old := vars(config).get(key), int) and old >= 0:
                found.setdefault(old, 1 + len(found))
    return found


def _representative(kinds: list[Any]) -> list[Any]:
    """`LAYERS` of the layers' kinds, each at least once if so many fit, in their order."""
    return [kinds[i] for i in _chosen(kinds)]


def _chosen(kinds: list[Any]) -> list[int]:
    try:
        first = sorted({kinds.index(kind) for kind in kinds})[:LAYERS]
    except TypeError:
        first = []
    rest = [i for i in range(len(kinds)) if i not in first]
    return sorted([*first, *rest[: LAYERS - len(first)]])


def _near(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_near(each) for each in value)
    return max(value, -LAYERS) if value < 0 else min(value, LAYERS - 1)


def _suit(part: Any, axes: bool) -> None:
    """Make keys suit each other that do not in all default configs."""
    rope, heads = vars(part).get("rope_parameters"), _first(part, HEAD_KEYS)
    size = _first(part, ("head_dim",)) or (_first(part, WIDTH_KEYS) // heads if heads else 0)
    if isinstance(rope, dict) and "rope_type" in rope and size and (axes or "mrope_section" in rope):
        sections = rope.setdefault("mrope_section", [size // 8, size // 8 * 3 // 2, size // 8 * 3 // 2])
        rope["partial_rotary_factor"] = 2 * sum(sections) / size
    if "sliding_attention" in (vars(part).get("layer_types") or ()) and vars(part).get("sliding_window") is None:
        part.sliding_window = WIDE


def _shrink_images(part: Any) -> None:
    if isinstance(vars(part).get("mm_tokens_per_image"), int):
        part.mm_tokens_per_image = 4
    patch, image = vars(part).get("patch_size"), vars(part).get("image_size")
    if isinstance(patch, list | tuple) and len(set(patch)) == 1:
        patch = patch[0]
    if not isinstance(patch, int) or image is None:
        return
    side = 4 * patch
    part.image_size = type(image)((side, side)) if isinstance(image, list | tuple) else side
