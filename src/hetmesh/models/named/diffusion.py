"""Transformers and autoencoders of diffusers by directory: the first make latents of an LLM's hidden states, the second
are frozen encoders whose latents are their targets. diffusers is imported where a recipe names one of them."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import Abilities, AdapterRequest, SavedAs
from hetmesh.models.config_keys import check_keys, positive_int
from hetmesh.models.generator import GeneratorAdapter, generator_place
from hetmesh.models.named.encoder import EncoderAdapter, check_encoder

READS = ("hidden_states", "encoder_hidden_states", "timestep")
"""What the forward of every transformer here reads: noisy latents, what conditions them, and the time."""

FILLED = ("pooled_projections", "img_ids", "txt_ids", "return_dict")
"""What some read besides, and get: a pooled prompt, of zeros, and the places of packed latents and of the rows."""

CONDITIONS = ("joint_attention_dim", "caption_channels", "context_in_dim", "cross_attention_dim")
"""Keys of the width of `encoder_hidden_states`, in the order in which they count."""

TIMESTEPS = {
    **dict.fromkeys(("SD3Transformer2DModel", "PixArtTransformer2DModel", "SanaTransformer2DModel"), 1000.0),
    **dict.fromkeys(("FluxTransformer2DModel", "AuraFlowTransformer2DModel", "PRXTransformer2DModel"), 1.0),
}
"""By class: the `timestep` of pure noise, which no signature tells."""

FILE_NAME = "diffusion_pytorch_model"


def diffusers_class(request: AdapterRequest) -> tuple[Any, Mapping[str, Any]]:
    """The class that config.json names, and its keys. Raises RecipeError: no directory, no diffusers, no such class."""
    where = f"{request.key}.model = {request.model!r}"
    if request.pretrained is None:
        raise RecipeError(f"{where}: {request.key}.initial_load_path: missing; give a directory of diffusers")
    try:
        diffusers: Any = importlib.import_module("diffusers")
    except ImportError as error:
        raise RecipeError(f"{where} needs diffusers: pip install 'hetmesh[diffusers]' ({error})") from error
    config = request.pretrained.config
    found = getattr(diffusers, str(name := config.get("_class_name")), None)
    if not (isinstance(found, type) and issubclass(found, diffusers.ModelMixin)):
        raise RecipeError(
            f"{request.pretrained}: its config.json must name a model of diffusers {diffusers.__version__} as "
            f"_class_name, got {name!r}; a pipeline has one directory for each of its models"
        )
    return found, config


def saved_as(model_class: type, config: Mapping[str, Any]) -> SavedAs:
    """A directory as `save_pretrained` of diffusers writes it."""
    return SavedAs(config, f"diffusers.{model_class.__name__}", FILE_NAME)


def layers_of(module: nn.Module) -> tuple[str, ...]:
    """The children of a module that have parameters, in the order of their definition, of a ModuleList its members."""
    return tuple(
        name if at is None else f"{name}.{at}"
        for name, child in module.named_children()
        for at in (range(len(child)) if isinstance(child, nn.ModuleList) else (None,))
        if any(True for _ in child.parameters())
    )


@dataclass(frozen=True, kw_only=True)
class DiffusersAdapter(GeneratorAdapter):
    """A transformer of diffusers that predicts flow: noise - data, at sigma = 1 - t.

    Attributes:
        timestep: of pure noise.
        grid: height and width of an item's latents, whose rows are its cells.
        packed: latents are a sequence in which each `packed` x `packed` cells are one; 0: they are a grid.
    """

    model_class: Any
    config: Mapping[str, Any]
    timestep: float
    grid: tuple[int, int]
    packed: int
    layer_names: tuple[str, ...]
    reasons: ClassVar = {"activation": "the forwards of diffusers' transformers are not split into pipeline stages"}

    @classmethod
    def make(cls, request: AdapterRequest) -> DiffusersAdapter | None:
        """The adapter of a recipe's module, or None while a neighbour is not resolved. Keys: `queries`,
        `sampling_steps` (20), and `timestep_scale`, the timestep of pure noise, of a class not in `TIMESTEPS`."""
        check_keys(request, ("queries", "sampling_steps", "timestep_scale"))
        queries = positive_int(request, "queries", request.config.get("queries"))
        steps = positive_int(request, "sampling_steps", request.config.get("sampling_steps", 20))
        model_class, config = diffusers_class(request)
        name, parameters = model_class.__name__, inspect.signature(model_class.forward).parameters
        lacking = [key for key in READS if key not in parameters]
        more = [k for k, p in parameters.items() if p.default is p.empty and k not in ("self", *READS, *FILLED)]
        more += [key for key in ("guidance_embeds", "resolution_embeds") if config.get(key)]
        if lacking or more:
            what = f"does not read {lacking}" if lacking else f"needs {more}, too"
            raise RecipeError(f"{request.pretrained}: the forward of {name} {what}; hetmesh gives it {list(READS)}")
        timestep = request.config.get("timestep_scale", TIMESTEPS.get(name, 0) * config.get("timestep_scale", 1))
        if not (isinstance(timestep, int | float) and timestep > 0):
            raise RecipeError(
                f"{request.key}.config.timestep_scale: which timestep is pure noise for {name}? (known are "
                f"{TIMESTEPS}), got {timestep!r}"
            )
        condition = next((config[key] for key in CONDITIONS if config.get(key)), None)
        if (place := generator_place(request, "diffusers", condition)) is None:
            return None
        if len(shape := place["media_shape"]) != 3:
            raise RecipeError(f"{request.key}: {name} makes images (channels, height, width), got {shape}")
        place = {"latents": shape[1] * shape[2], "width": shape[0], **place}
        cells, channels, reads = place["latents"], place["width"], config["in_channels"]
        height = max(round(math.sqrt(cells * shape[1] / shape[2])), 1)
        grid = height, cells // height
        packed = {channels: 1, 4 * channels: 2}.get(reads, 0) if "img_ids" in parameters else 0
        side = packed or config.get("patch_size", 1)
        fits = packed or (reads == channels and "img_ids" not in parameters)
        if math.prod(grid) != cells or not fits or grid[0] % side or grid[1] % side:
            raise RecipeError(
                f"{request.key}: {name} has in_channels = {reads} and patches of {side}, which {cells} latents of "
                f"width {channels} of an image {shape} do not make"
            )
        with torch.device("meta"):
            module = model_class.from_config(config)
        if getattr(module, "use_additional_conditions", False):
            raise RecipeError(f"{request.pretrained}: {name} needs added_cond_kwargs (use_additional_conditions)")
        made: dict[str, Any] = {**place, "queries": queries, "steps": steps, "model_class": model_class}
        made |= {"config": config, "timestep": timestep, "grid": grid, "packed": packed}
        return cls(**made, layer_names=layers_of(module))

    @property
    def abilities(self) -> Abilities:
        whole = self.model_class.__name__ not in TIMESTEPS  # of others it is known that they enter each layer once
        saved = saved_as(self.model_class, self.config)
        return self.of_flow(gathered_whole=whole, saved_as=saved, reasons=self.reasons)

    def build(self) -> nn.Module:
        return self.model_class.from_config(self.config)

    def layers(self) -> tuple[str, ...]:
        return self.layer_names

    def to_latents(self, items: Tensor) -> Tensor:
        return items.flatten(2).transpose(1, 2)

    def to_items(self, latents: Tensor) -> Tensor:
        return latents.transpose(1, 2).unflatten(2, self.grid)

    def velocity(self, module: nn.Module, noisy: Tensor, rows: Tensor, time: Tensor) -> Tensor:
        return -self.against_sigma(module, noisy, rows, 1 - time)

    def against_sigma(self, module: nn.Module, noisy: Tensor, rows: Tensor, sigma: Tensor) -> Tensor:
        """What the transformer predicts, `[n, latents, width]`; the second half of outputs twice as wide,
        learned variances, is left out, as in diffusers' pipelines."""
        parameters = inspect.signature(self.model_class.forward).parameters
        (height, width), latents = self.grid, self.to_items(noisy.to(rows.dtype))
        given: dict[str, Any] = {"encoder_hidden_states": rows, "timestep": sigma * self.timestep, "return_dict": False}
        if "pooled_projections" in parameters:
            given["pooled_projections"] = rows.new_zeros(len(rows), self.config["pooled_projection_dim"])
        if side := self.packed:
            latents = latents.unflatten(3, (-1, side)).unflatten(2, (-1, side)).permute(0, 2, 4, 1, 3, 5)
            latents, grid = latents.flatten(3).flatten(1, 2), (height // side, width // side)
            y, x = torch.meshgrid(*(torch.arange(cells, device=rows.device) for cells in grid), indexing="ij")
            given["img_ids"] = torch.stack([torch.zeros_like(y), y, x], -1).flatten(0, 1).to(rows.dtype)
            given["txt_ids"] = rows.new_zeros(rows.shape[1], 3)
        output = module(latents, **given)[0]
        if side:
            output = output.unflatten(2, (-1, side, side)).unflatten(1, grid)
            output = output.permute(0, 3, 1, 4, 2, 5).reshape(len(rows), -1, height, width)
        return self.to_latents(output[:, : self.width])

    def sample(self, module: nn.Module, rows: Tensor, shape: tuple[int, ...], noise: Tensor, steps: int) -> Tensor:
        """One item by diffusers' `FlowMatchEulerDiscreteScheduler`; see `Abilities.sample`."""
        self._check(shape)
        scheduler = importlib.import_module("diffusers").FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(steps, device=noise.device)
        drawn = noise[None]
        for timestep in scheduler.timesteps:
            sigma = timestep.expand(1) / scheduler.config.num_train_timesteps
            predicted = self.against_sigma(module, drawn, rows[None], sigma).to(drawn.dtype)
            (drawn,) = scheduler.step(predicted, timestep, drawn, return_dict=False)
        return drawn[0] if self.encoder is not None else self.to_items(drawn)[0]


@dataclass(frozen=True, kw_only=True)
class VaeAdapter(EncoderAdapter):
    """A frozen autoencoder of diffusers: images -> the cells of their latents, row by row, scaled as its pipelines do.
    Of a distribution of latents, the mode."""

    model_class: Any
    shape: tuple[int, ...]
    channels: int = 0
    grid: tuple[int, int] = (0, 0)
    layer_names: tuple[str, ...] = ()

    @classmethod
    def make(cls, request: AdapterRequest) -> VaeAdapter:
        """The adapter of a recipe's module; it has no keys."""
        check_keys(request, ())
        media, (model_class, config) = check_encoder(request, "diffusers_vae"), diffusers_class(request)
        if not (hasattr(model_class, "encode") and hasattr(model_class, "decode")):
            raise RecipeError(f"{request.pretrained}: {model_class.__name__} is no autoencoder; models are 'diffusers'")
        if config.get("latents_mean") or config.get("latents_std"):
            raise RecipeError(
                f"{request.pretrained}: hetmesh scales latents by scaling_factor, not by latents_mean/std"
            )
        if request.media_shape is None:
            raise RecipeError(f"{request.key}: diffusers_vae reads images of one shape; {media!r} of the data has none")
        made = cls(config=config, media=media, model_class=model_class, shape=tuple(request.media_shape))
        with torch.device("meta"):
            module = made.build()
            try:
                _, channels, height, width = made.latents(module, torch.zeros(1, *made.shape)).shape
            except Exception as error:
                raise RecipeError(
                    f"{request.pretrained}: {model_class.__name__} does not encode {media!r} {made.shape}: {error}"
                ) from error
        return replace(made, channels=channels, grid=(height, width), layer_names=layers_of(module))

    @property
    def out_features(self) -> int:
        return self.channels

    @property
    def media_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    def rows_per_item(self) -> int:
        return math.prod(self.grid)

    @property
    def abilities(self) -> Abilities:
        saved = saved_as(self.model_class, self.config)
        return Abilities(decode=self.decode, gathered_whole=True, saved_as=saved)

    def build(self) -> nn.Module:
        return self.model_class.from_config(self.config).requires_grad_(False)

    def layers(self) -> tuple[str, ...]:
        return self.layer_names

    def latents(self, module: Any, media: Tensor) -> Tensor:
        """`[n, channels, height, width]`."""
        found = module.encode(media.to(next(module.parameters()).dtype), return_dict=False)[0]
        found = found if isinstance(found, Tensor) else found.mode()
        return (found - self._shift) * self._scale

    @property
    def _shift(self) -> float:
        return self.config.get("shift_factor") or 0.0

    @property
    def _scale(self) -> float:
        return self.config.get("scaling_factor") or 1.0

    def encode(self, module: nn.Module, media: Tensor) -> Tensor:
        return self.latents(module, media).flatten(2).transpose(1, 2)

    def decode(self, module: Any, latents: Tensor, shape: tuple[int, ...]) -> Tensor:
        """One image, see `Abilities.decode`."""
        cells = latents.T.unflatten(1, self.grid)[None] / self._scale + self._shift
        return module.decode(cells, return_dict=False)[0][0]
