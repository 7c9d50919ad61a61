"""Qwen3-VL's LLMs (Qwen3VLTextModel and Qwen3VLMoeTextModel with a head): positions of three axes, DeepStack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph.sample import MediaItem, SampleMeta
from hetmesh.models.adapter import Abilities, AdapterRequest, ItemGrid
from hetmesh.models.config_keys import hf, positive_int
from hetmesh.models.named.causal_lm import CausalLMAdapter
from hetmesh.models.named.deepstack import deepstack_arguments, layer_index
from hetmesh.models.named.qwen3 import derived_sizes
from hetmesh.models.named.qwen3_moe import Qwen3MoeAdapter, expert_sizes
from hetmesh.models.weights.model_forms import class_forms
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.models.weights.stored_form import StoredForm

TIED = "tie_word_embeddings"
MROPE: Mapping[str, Any] = {"rope_type": "default", "mrope_interleaved": True}


class Qwen3VLTextAdapter(CausalLMAdapter):
    """Qwen3 with rotary positions of three axes (time, height, width), and DeepStack features added to image tokens."""

    @classmethod
    def make(cls, request: AdapterRequest) -> CausalLMAdapter:
        """The adapter of a recipe's module; keys not given follow the others as those of `qwen3`; a head's
        frequencies are divided among the axes as in the released models."""
        from hetmesh.models.named.qwen3_vl_causal_lm import Qwen3VLTextForCausalLM

        return cls.make_vl(request, hf("Qwen3VLTextConfig"), Qwen3VLTextForCausalLM, derived_sizes(request))

    @classmethod
    def make_vl(
        cls, request: AdapterRequest, config_class: Any, model_class: Any, derived: dict[str, Any]
    ) -> CausalLMAdapter:
        """`make` for a config class and a model class like Qwen3-VL's."""
        if (head := request.config.get("head_dim", derived.get("head_dim"))) is not None and request.pretrained is None:
            derived["rope_parameters"] = cls.rope_parameters(positive_int(request, "head_dim", head))
        # transformers keeps this key in the config of the whole model.
        given = {key: value for key, value in request.config.items() if key != TIED}
        adapter = cls.make_from(replace(request, config=given), config_class, model_class, derived)
        whole = request.pretrained.config if request.pretrained is not None else {}
        adapter.config.tie_word_embeddings = bool(request.config.get(TIED, whole.get(TIED, False)))
        _check_sections(request, adapter.config)
        return adapter

    @classmethod
    def rope_parameters(cls, head_dim: int) -> dict[str, Any]:
        """Frequencies divided among time, height and width as in the released models: 24, 20, 20 for a head of 128."""
        side = head_dim // 2 * 5 // 16
        return {**MROPE, "rope_theta": 500_000.0, "mrope_section": [head_dim // 2 - 2 * side, side, side]}

    @property
    def abilities(self) -> Abilities:
        return replace(super().abilities, layer_of_output=self.layer_of_output, position_ids=multimodal_positions)

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        # transformers gives no plan for this model, whose layers are those of Qwen3.
        return self.plan_from(hf("Qwen3Config").base_model_tp_plan)

    def layer_of_output(self, output: str) -> str | None:
        """The layer after which a side output of the encoder is added to its tokens; None if there is none."""
        index = layer_index(output, self.config.num_hidden_layers)
        return None if index is None else f"model.layers.{index}"

    def added_features(
        self, model: Any, hidden: Tensor, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        return deepstack_arguments(self, model, hidden, batch, inputs)


def _check_sections(request: AdapterRequest, config: Any) -> None:
    """Raise RecipeError unless the frequencies of the axes add up to those of a head."""
    parameters = config.rope_parameters or {}
    sections, share = parameters.get("mrope_section", [24, 20, 20]), parameters.get("partial_rotary_factor", 1.0)
    half, times = int(config.head_dim * share) // 2, "" if share == 1 else f" x partial_rotary_factor = {share}"
    if len(sections) != 3 or sum(sections) != half:
        raise RecipeError(
            f"{request.key}.config.rope_parameters.mrope_section: the frequencies of time, height and width must add "
            f"up to head_dim / 2{times} = {half}, got {list(sections)}"
        )


def multimodal_positions(meta: SampleMeta, grids: Mapping[str, ItemGrid]) -> tuple[tuple[int, ...], ...]:
    """Three rows of `meta.tokens` positions each.

    Text advances all three axes. The rows of an image start where the text before it ended, each at its frame, height
    and width; the text after it continues from the larger of height and width (Qwen3-VL; transformers'
    `Qwen3VLModel.get_rope_index`). Media without a grid count as text. Raises SampleError: an item has several runs.
    """
    parts, token, position = [], 0, 0
    for item in meta.media:
        if (grid := grid_of(meta, item, grids)) is None:
            continue
        if len(item.spans) > 1:
            raise SampleError(
                f"sample {meta.id!r}: the rows of the {item.name!r} at position {item.position} lie in "
                f"{len(item.runs)} runs, whose positions the model of a directory alone knows ([model] hf_path)"
            )
        text = item.position - token
        parts.append(np.tile(np.arange(position, position + text), (3, 1)))
        position += text
        frames, height, width = grid
        parts.append(position + np.indices((frames, height, width)).reshape(3, -1))
        token = item.stop
        position += max(height, width)
    parts.append(np.tile(np.arange(position, position + meta.tokens - token), (3, 1)))
    return tuple(tuple(row) for row in np.concatenate(parts, axis=1).tolist())


def grid_of(
    meta: SampleMeta, item: MediaItem, grids: Mapping[str, ItemGrid], of_rows: bool = True
) -> tuple[int, int, int] | None:
    """Frames, height and width of an item; None where positions count it as text. Raises SampleError: with `of_rows`,
    the size of a placed item is not the grid of its rows."""
    if not item.runs:
        return grids[item.name](item.extent) if item.name in grids else None
    if item.name == "audio":
        return None
    frames, height, width = (*item.size, 0, 0, 0)[:3]
    if of_rows and frames * height * width != item.rows:
        raise SampleError(
            f"sample {meta.id!r}: the size of the {item.name!r} at position {item.position} is {item.size}, from which "
            f"positions follow; it must be frames, height and width of the grid of its {item.rows} rows"
        )
    return frames, height, width


class Qwen3VLMoeTextAdapter(Qwen3MoeAdapter, Qwen3VLTextAdapter):
    """Positions of three axes and DeepStack features, and mixture-of-experts blocks, which ranks along `ep` share."""

    @classmethod
    def make(cls, request: AdapterRequest) -> Qwen3MoeAdapter:
        """The adapter of a recipe's module; keys not given follow the others as those of `qwen3_moe` and
        `qwen3_vl_text`. Routing weights of a token always add up to 1 (there is no `norm_topk_prob`)."""
        from hetmesh.models.named.qwen3_vl_causal_lm import Qwen3VLMoeTextForCausalLM

        adapter = cls.make_vl(request, hf("Qwen3VLMoeTextConfig"), Qwen3VLMoeTextForCausalLM, expert_sizes(request))
        return cls.with_experts(request, adapter)

    def read_forms(self, pretrained: Pretrained) -> Mapping[str, StoredForm]:
        """Experts' matrices are transposed in released checkpoints, not by `save_pretrained`: their shapes tell."""
        count, inner, features = self.config.num_experts, self.config.moe_intermediate_size, self.config.hidden_size
        shapes = {
            "mlp.experts.gate_up_proj": (count, 2 * inner, features),
            "mlp.experts.down_proj": (count, features, inner),
        }
        return class_forms(self.model_class, SimpleNamespace(model_type="qwen3_vl_moe"), pretrained, shapes)
