"""Whisper's encoder (transformers' WhisperEncoder): log-mel features -> one row per two frames."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.config_keys import hf, positive_int, transformers_config
from hetmesh.models.named.encoder import EncoderAdapter, check_encoder, check_sizes
from hetmesh.models.weights.pretrained import prefixes
from hetmesh.parallel.stage_views import is_absent


class LocalHeads(ParallelStyle):
    """Set an attention's number of heads to that of its shard, by which Whisper reshapes keys and values."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        attention: Any = module
        attention.num_heads //= device_mesh.size()
        return module


TENSOR_PARALLEL_PLAN: Mapping[str, Any] = MappingProxyType(
    {"layers.*.self_attn": LocalHeads()}
    | {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    | {"layers.*.self_attn.out_proj": "rowwise", "layers.*.fc1": "colwise", "layers.*.fc2": "rowwise"}
)

SIZES = ("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "num_mel_bins")


class WhisperAdapter(EncoderAdapter):
    """Whisper's encoder over log-mel features `[num_mel_bins, frames]`, `frames = 2 * max_source_positions`. As in
    transformers every item has that many (30 s in released models); its sinusoidal positions are not trained."""

    checkpoint_names: ClassVar = prefixes("", "encoder.", "model.encoder.")
    token_sharded: ClassVar = ("layers", "layer_norm")
    first_layers: ClassVar = ("conv1", "conv2", "embed_positions")

    @classmethod
    def make(cls, request: AdapterRequest) -> WhisperAdapter:
        """The adapter of a recipe's module. Keys not given follow the others: `num_mel_bins` and `max_source_positions`
        are those of the data source's recordings, `encoder_ffn_dim` is 4 x `d_model`; the rest are transformers'."""
        media = check_encoder(request, "whisper")
        derived: dict[str, Any] = {}
        if request.media_shape is not None and len(request.media_shape) == 2:
            derived["num_mel_bins"], frames = request.media_shape
            derived["max_source_positions"] = -(-frames // 2)
        if "d_model" in request.config:
            derived["encoder_ffn_dim"] = 4 * positive_int(request, "d_model", request.config["d_model"])
        config = transformers_config(request, hf("WhisperConfig"), derived, types=("whisper",))
        check_sizes(request, config, (*SIZES, "max_source_positions"), {"d_model": "encoder_attention_heads"})
        if config.encoder_layerdrop:
            raise RecipeError(
                f"{request.key}.config.encoder_layerdrop: must be 0, got {config.encoder_layerdrop}: every layer runs "
                "in every microbatch, on every rank"
            )
        return cls(config, media)

    @property
    def media_shape(self) -> tuple[int, ...]:
        """Shape of one recording: `(num_mel_bins, frames)`."""
        return (self.config.num_mel_bins, 2 * self.config.max_source_positions)

    @property
    def rows_per_item(self) -> int:
        return self.config.max_source_positions

    def build(self) -> nn.Module:
        return hf("models.whisper.modeling_whisper.WhisperEncoder")(self.config)

    def layers(self) -> tuple[str, ...]:
        blocks = (f"layers.{i}" for i in range(self.config.encoder_layers))
        return (*self.first_layers, *blocks, "layer_norm")

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        return TENSOR_PARALLEL_PLAN

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        return {"encoder_attention_heads": self.config.encoder_attention_heads}

    def encode(self, module: nn.Module, media: Tensor) -> Tensor:
        encoder: Any = module
        if is_absent(encoder.conv1) or is_absent(encoder.layer_norm):
            return self._run_stage(encoder, media)
        return encoder(input_features=media.to(encoder.conv1.weight.dtype)).last_hidden_state

    def _run_stage(self, encoder: Any, hidden: Tensor) -> Tensor:
        """The forward of transformers' WhisperEncoder, from and up to any layer."""
        if not is_absent(encoder.conv1):
            hidden = nn.functional.gelu(encoder.conv1(hidden.to(encoder.conv1.weight.dtype)))
            hidden = nn.functional.gelu(encoder.conv2(hidden)).permute(0, 2, 1)
            hidden = hidden + encoder.embed_positions.weight
            hidden = nn.functional.dropout(hidden, p=encoder.dropout, training=encoder.training)
        for layer in encoder.layers:
            hidden = layer(hidden, None)
        return encoder.layer_norm(hidden)
