"""What modules after the LLM share that make media items: their targets, and flow matching.

Rectified flow (Lipman et al., arXiv 2210.02747; Liu et al., arXiv 2209.03003): time runs from 0, noise, to 1, data. An
item at time t is x_t = (1 - t) * noise + t * data; the module predicts its velocity, data - noise, and an item is drawn
by Euler steps from t = 0 to 1. (The schedulers of diffusers count sigma = 1 - t, and velocities against it.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hetmesh.errors import BoundaryError, RecipeError, SampleError
from hetmesh.graph.sample import SampleMeta
from hetmesh.models.adapter import Abilities, AdapterDefaults, AdapterRequest, SampleLike
from hetmesh.models.collate import collate_media
from hetmesh.models.weights.pretrained import Names, prefixes
from hetmesh.parallel.stage_views import PREVIOUS


@dataclass(frozen=True, kw_only=True)
class GeneratorAdapter(AdapterDefaults):
    """Base of the adapters of flow-matching modules whose items have one shape.

    Attributes:
        queries: rows of the LLM per item.
        latents, width: rows of targets per item, and their width.
        encoder: the encoder whose rows are the targets; None: they are made of the items themselves.
        steps: of sampling.
    """

    name: str
    in_features: int
    media: str
    media_shape: tuple[int, ...]
    queries: int
    latents: int
    width: int
    encoder: str | None = None
    steps: int = 20
    out_features: ClassVar[None] = None
    checkpoint_names: ClassVar[tuple[Names, ...]] = prefixes("")
    checkpoint_unused: ClassVar[tuple[str, ...]] = ()

    def of_flow(self, **more: Any) -> Abilities:
        """Its abilities, and more."""
        return Abilities(draws=self.width, sample=self.sample, sampling_steps=self.steps, **more)

    def velocity(self, module: nn.Module, noisy: Tensor, rows: Tensor, time: Tensor) -> Tensor:
        """The predicted velocities of n > 0 items, `[n, latents, width]` as `noisy` is; rows of the LLM
        `[n, queries, in_features]`, times `[n]`."""
        raise NotImplementedError

    def to_latents(self, items: Tensor) -> Tensor:
        """Items `[n, *media_shape]` -> targets `[n, latents, width]`."""
        raise NotImplementedError

    def to_items(self, latents: Tensor) -> Tensor:
        """The inverse of `to_latents`."""
        raise NotImplementedError

    def item_rows(self, shape: tuple[int, ...]) -> int:
        self._check(shape)
        return self.queries

    def item_latents(self, shape: tuple[int, ...]) -> int:
        self._check(shape)
        return self.latents

    def _check(self, shape: tuple[int, ...]) -> None:
        if tuple(shape) != self.media_shape:
            raise SampleError(
                f"module {self.name!r} is configured to make {self.media!r} of shape {self.media_shape}, "
                f"got {tuple(shape)}"
            )

    def collate(self, samples: Sequence[SampleLike], metas: Sequence[SampleMeta], **_: Any) -> dict[str, Tensor]:
        """`targets`: `[rows of targets, width]`; nothing where an encoder makes them."""
        if self.encoder is not None:
            return {}
        items = collate_media(samples, metas, self.media, self.media_shape)["media"]
        return {"targets": self.to_latents(items).flatten(0, 1)}

    def read(self, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> tuple[int, Tensor, Tensor]:
        """How many items there are, the rows `[n, queries, in_features]` and the targets `[n, latents, width]`: of a
        blank item if there is none, so that results depend on every parameter and input. Raises BoundaryError unless
        there are as many of one as of the other."""
        data = batch["targets"] if self.encoder is None else inputs[self.encoder]
        (source, rows), *more = ((k, v) for k, v in inputs.items() if k not in (self.encoder, PREVIOUS))
        n, found = len(rows) // self.queries, (tuple(rows.shape), tuple(data.shape))
        if more or found != ((n * self.queries, self.in_features), (n * self.latents, self.width)):
            raise BoundaryError(
                f"module {self.name!r} reads {self.queries} rows of {source!r} and {self.latents} targets per item, of "
                f"widths {self.in_features} and {self.width}, got {found}" + "".join(f" and {key!r}" for key, _ in more)
            )
        if n == 0:
            rows, data = (
                torch.cat([x, x.new_zeros(k, x.shape[1])]) for x, k in ((rows, self.queries), (data, self.latents))
            )
        return n, rows.view(-1, self.queries, self.in_features), data.view(-1, self.latents, self.width)

    def noised(
        self, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> tuple[int, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """How many items there are, their true velocities, and the arguments of `velocity`; see `read`."""
        n, rows, data = self.read(batch, inputs)
        noise, time = batch["noise"].view(-1, self.latents, self.width), batch["time"]
        if n == 0:
            noise, time = noise.new_zeros(1, *noise.shape[1:]), time.new_zeros(1)
        data, at = data.to(noise.dtype), time[:, None, None]
        return n, data - noise, ((1 - at) * noise + at * data, rows, time)

    def result(self, n: int, predicted: Tensor, target: Tensor) -> dict[str, Tensor]:
        """What `forward` returns for n items, of tensors `[n, latents, width]`, or of a blank one for none."""
        return {"": predicted[:n].flatten(0, 1), "target": target[:n].flatten(0, 1)}

    def forward(
        self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> Tensor | Mapping[str, Tensor]:
        n, target, given = self.noised(batch, inputs)
        return self.result(n, self.velocity(module, *given), target)

    def sample(self, module: nn.Module, rows: Tensor, shape: tuple[int, ...], noise: Tensor, steps: int) -> Tensor:
        """One item, see `Abilities.sample`."""
        self._check(shape)
        drawn = noise[None]
        for step in range(steps):
            drawn = drawn + self.velocity(module, drawn, rows[None], drawn.new_full((1,), step / steps)) / steps
        return drawn[0] if self.encoder is not None else self.to_items(drawn)[0]


def generator_place(request: AdapterRequest, model: str, in_features: int | None = None) -> dict[str, Any] | None:
    """The fields of a `GeneratorAdapter` that follow from its place in the graph; `latents` and `width` only where they
    come from an encoder. `in_features`: of the rows that it reads, where it knows them itself. None while a neighbour
    is not resolved. Raises RecipeError: it is not after the LLM, or items have no fixed shape."""
    if not request.generates:
        raise RecipeError(
            f"{request.key}: {model} makes media items of an LLM's hidden states, so it needs a [{request.key}.loss], "
            "a boundary from the LLM, with `at`, and none out of it (into it: "
            f"{list(request.placeholders)}, out of it: {list(request.consumers)})"
        )
    if len(request.encoders) > 1 or len(request.placeholders) - len(request.encoders) != 1:
        raise RecipeError(
            f"{request.key}: {model} has one boundary into it that comes from the LLM, and at most one from an encoder "
            f"whose rows are its targets; got those from {list(request.placeholders)}"
        )
    in_features = in_features or request.in_features
    if in_features is None or None in request.encoders.values():
        return None
    shape = request.media_shape
    if shape is None:
        raise RecipeError(
            f"{request.key}: {model} makes items of one shape, and {request.media!r} of the data has none"
        )
    place: dict[str, Any] = {"name": request.name, "in_features": in_features, "media": request.media}
    for name, encoder in request.encoders.items():
        assert encoder is not None
        if encoder.in_features is not None:
            raise RecipeError(
                f"{request.key}: {model} takes targets from an encoder, and {name!r} is none: it reads rows"
            )
        place |= {"encoder": name, "latents": encoder.item_rows(shape), "width": encoder.out_features}
    return {**place, "media_shape": tuple(shape)}
