"""A small flow-matching transformer: images out of an LLM's hidden states (DiT, Peebles & Xie, arXiv 2212.09748, with
full attention over the tokens that condition and the latents)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, pad, scaled_dot_product_attention, silu

from hetmesh.errors import RecipeError
from hetmesh.graph.module_graph import Activation
from hetmesh.models.adapter import Abilities, AdapterRequest, SavedAs
from hetmesh.models.config_keys import check_keys, positive_int
from hetmesh.models.generator import GeneratorAdapter, generator_place
from hetmesh.parallel.stage_views import PREVIOUS, is_absent

MODEL_TYPE = "hetmesh_flow"
"""In config.json of an exported directory."""


@dataclass(frozen=True)
class FlowConfig:
    """Sizes of a `FlowTransformer`, and how it is used.

    Attributes:
        queries: tokens of the LLM per image.
        image_size, num_channels, patch_size: of the images, in pixels; a row of targets is a patch. With latents of an
            encoder only for the record.
        latents, latent_features: rows of targets per image, and their width.
        condition_size: width of the LLM's hidden states.
        sampling_steps: Euler steps from noise to an image.
    """

    queries: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    image_size: int
    num_channels: int
    patch_size: int
    latents: int
    latent_features: int
    condition_size: int
    sampling_steps: int = 20


class FlowTransformer(nn.Module):
    """Noisy latents, rows of the LLM and times -> velocities. What its layers hand on is one tensor
    `[n, 1 + queries + latents, hidden_size]`: what is embedded of the time, then the tokens that attend to each other.
    """

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = FlowEmbedding(config)
        self.blocks = nn.ModuleList(FlowBlock(config) for _ in range(config.num_hidden_layers))
        self.head = FlowHead(config)

    def run(self, state: Tensor) -> Tensor:
        """The layers after the first: velocities `[n, latents, latent_features]`, or what the next stage reads."""
        for block in self.blocks:
            state = block(state)
        return self.head(state)


class FlowEmbedding(nn.Module):
    """The tokens of latents and of the LLM's rows, each with its learned place, and the embedded time."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.latents = nn.Linear(config.latent_features, config.hidden_size)
        self.condition = nn.Linear(config.condition_size, config.hidden_size)
        self.time_1 = nn.Linear(config.hidden_size, config.hidden_size)
        self.time_2 = nn.Linear(config.hidden_size, config.hidden_size)
        places = torch.empty(config.queries + config.latents, config.hidden_size)
        self.places = nn.Parameter(nn.init.normal_(places, std=0.02))

    def forward(self, noisy: Tensor, rows: Tensor, time: Tensor) -> Tensor:
        half = self.time_1.in_features // 2
        exponents = torch.arange(half, device=time.device, dtype=time.dtype) / half
        angles = 1000 * time[:, None] * torch.exp(-math.log(10_000) * exponents)
        waves = pad(torch.cat([angles.cos(), angles.sin()], -1), (0, self.time_1.in_features - 2 * half))
        embedded = self.time_2(silu(self.time_1(waves.to(rows.dtype))))
        tokens = torch.cat([self.condition(rows), self.latents(noisy.to(rows.dtype))], 1) + self.places
        return torch.cat([embedded[:, None].to(tokens.dtype), tokens], 1)


class FlowBlock(nn.Module):
    """A pre-norm block whose norms and residuals are modulated by the time (adaLN)."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.head_dim = width // config.num_attention_heads
        self.modulation = nn.Linear(width, 6 * width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))
        self.up_proj, self.down_proj = (
            nn.Linear(width, config.intermediate_size),
            nn.Linear(config.intermediate_size, width),
        )

    def forward(self, state: Tensor) -> Tensor:
        time, x = state[:, :1], state[:, 1:]
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(silu(time)).chunk(6, -1)
        x = x + (1 + gate) * self.attention(modulated(x, shift, scale))
        x = x + (1 + mlp_gate) * self.down_proj(gelu(self.up_proj(modulated(x, mlp_shift, mlp_scale))))
        return torch.cat([time, x], 1)

    def attention(self, x: Tensor) -> Tensor:
        parts = (self.q_proj, self.k_proj, self.v_proj)  # a tensor-parallel rank has some of the heads
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        return self.o_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FlowHead(nn.Module):
    """The velocity of each latent."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.first = 1 + config.queries
        self.modulation = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.latent_features)

    def forward(self, state: Tensor) -> Tensor:
        shift, scale = self.modulation(silu(state[:, :1])).chunk(2, -1)
        return self.out(modulated(state[:, self.first :], shift, scale))


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """The layer norm of `x`, scaled and shifted."""
    return layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


@dataclass(frozen=True, kw_only=True)
class FlowAdapter(GeneratorAdapter):
    """Images of one size, cut into patches, or an encoder's latents of them."""

    config: FlowConfig

    @classmethod
    def make(cls, request: AdapterRequest) -> FlowAdapter | None:
        """The adapter of a recipe's module, or None while a neighbour is not resolved. Keys not given:
        `intermediate_size` is 4 x `hidden_size`, `sampling_steps` 20; image sizes are those of the data source."""
        known = FlowConfig.__annotations__
        check_keys(request, [key for key in known if key not in ("latents", "condition_size")])
        if (place := generator_place(request, "flow")) is None:
            return None
        shape, given = place["media_shape"], dict(request.config)
        if len(shape) != 3 or shape[1] != shape[2]:
            raise RecipeError(f"{request.key}: flow makes square images (channels, size, size), got {shape}")
        if request.pretrained is not None:
            stored = request.pretrained.section(request.model, (MODEL_TYPE,))
            given = {**{key: stored[key] for key in known if key in stored}, **given}
        if request.encoders:
            given.setdefault("patch_size", 1)
        for key in ("queries", "hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size"):
            positive_int(request, key, given.get(key))
        for key, size in (("patch_size", shape[1]), ("num_attention_heads", given["hidden_size"])):
            if size % given[key]:
                raise RecipeError(f"{request.key}.config.{key}: must divide {size}, got {given[key]}")
        patches = {"latents": (shape[1] // given["patch_size"]) ** 2, "width": shape[0] * given["patch_size"] ** 2}
        place = patches | place
        fixed = {"image_size": shape[1], "num_channels": shape[0], "condition_size": place["in_features"]}
        fixed |= {"latents": place["latents"], "latent_features": place["width"]}
        for key, value in fixed.items():
            if given.get(key, value) != value:
                raise RecipeError(f"{request.key}.config.{key}: is {value} here, got {given[key]!r}; leave it out")
        config = FlowConfig(**{"intermediate_size": 4 * given["hidden_size"], **given, **fixed})
        for key in ("intermediate_size", "sampling_steps"):
            positive_int(request, key, getattr(config, key))
        return cls(**place, queries=config.queries, steps=config.sampling_steps, config=config)

    @property
    def activation(self) -> Activation:
        """Between layers, beside the tokens, the velocities pass in columns of their own."""
        return Activation(self.config.hidden_size + self.width, per_item=1)

    def computed_rows(self, shape: tuple[int, ...]) -> int:
        return self.item_rows(shape) + self.latents

    @property
    def abilities(self) -> Abilities:
        config = {**asdict(self.config), "model_type": MODEL_TYPE}
        of_time = "embed.time_1", "embed.time_2", "blocks.*.modulation", "head.modulation"
        # per block two normalised inputs before their modulation, two results before their gates
        costs = {"per_item": of_time, "row_copies": 4}
        return self.of_flow(activation=self.activation, saved_as=SavedAs(config), **costs)

    def build(self) -> nn.Module:
        return FlowTransformer(self.config)

    def layers(self) -> tuple[str, ...]:
        return ("embed", *(f"blocks.{i}" for i in range(self.config.num_hidden_layers)), "head")

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        """Heads and the MLP are split. Modulations, which every rank computes from the time, are not: they act before
        a column-wise layer or behind a row-wise one, where every rank has the whole of values and gradients."""
        plan = {f"blocks.*.{name}_proj": "colwise" for name in ("q", "k", "v", "up")}
        return plan | {f"blocks.*.{name}_proj": "rowwise" for name in ("o", "down")}

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        return {"num_attention_heads": self.config.num_attention_heads}

    def to_latents(self, items: Tensor) -> Tensor:
        patch = self.config.patch_size
        cut = items.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # [n, channels, y, patch, x, patch]
        return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def to_items(self, latents: Tensor) -> Tensor:
        channels, size, _ = self.media_shape
        side, patch = size // self.config.patch_size, self.config.patch_size
        cut = latents.unflatten(2, (channels, patch, patch)).unflatten(1, (side, side))
        return cut.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, size, size)

    def velocity(self, module: Any, noisy: Tensor, rows: Tensor, time: Tensor) -> Tensor:
        return module.run(module.embed(noisy, rows, time))

    def forward(
        self, module: Any, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> Tensor | Mapping[str, Tensor]:
        width = self.config.hidden_size
        if PREVIOUS not in inputs:
            n, velocity, given = self.noised(batch, inputs)
            state = module.embed(*given)
        else:
            passed = inputs[PREVIOUS].view(-1, 1 + self.queries + self.latents, self.activation.features)
            n = len(passed)
            if n == 0:
                passed = torch.cat([passed, passed.new_zeros(1, *passed.shape[1:])])
            state, velocity = passed[..., :width], passed[:, -self.latents :, width:]
        output = module.run(state)
        if is_absent(module.head):
            kept = pad(velocity.to(output.dtype), (0, 0, 1 + self.queries, 0))
            return torch.cat([output, kept], -1)[:n].flatten(0, 1)
        return self.result(n, output, velocity)
