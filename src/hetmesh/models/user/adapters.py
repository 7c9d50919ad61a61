"""Adapters of users' nn.Modules: how each kind is called, whole or as a pipeline stage, and what it must return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hetmesh.attention.packed_rows import with_tensors
from hetmesh.errors import BoundaryError, SampleError
from hetmesh.graph.sample import SampleMeta
from hetmesh.models.adapter import NONE, Abilities, AdapterDefaults, SampleLike
from hetmesh.models.collate import collate_media, collate_tokens, media_items
from hetmesh.models.generator import GeneratorAdapter
from hetmesh.models.weights.pretrained import prefixes
from hetmesh.parallel.fully_shard import needs_backward
from hetmesh.parallel.sequence_parallel import ShardedTokens
from hetmesh.parallel.stage_views import PREVIOUS, is_absent
from hetmesh.parallel.tensor_parallel import within
from hetmesh.parallel.tokens import tokens_of


@dataclass(frozen=True)
class UserAdapter(AdapterDefaults):
    """A user's row-wise module, and what all kinds of modules share.

    Attributes:
        layer_names, plan, sizes, abilities: what the class declares.
        reason_not_probed: why it was not tried whether the module mixes samples; empty if it was.
    """

    name: str
    model_class: type[nn.Module]
    arguments: Mapping[str, Any]
    layer_names: tuple[str, ...]
    plan: Mapping[str, Any]
    sizes: Mapping[str, int]
    abilities: Abilities = NONE
    in_features: int | None = None
    out_features: int | None = None
    reason_not_probed: str = ""
    checkpoint_names: ClassVar = prefixes("")
    checkpoint_unused: ClassVar = ()

    def build(self) -> nn.Module:
        return self.model_class(**self.arguments)

    def layers(self) -> tuple[str, ...]:
        return self.layer_names

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        return self.plan

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        return self.sizes

    def forward(self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        (rows,) = inputs.values()
        per_row = self.abilities.activation.per_row if self.abilities.activation and PREVIOUS in inputs else 1
        n = len(rows) // per_row
        if n == 0:  # concatenated, so that what emitted no rows stays reachable
            rows = torch.cat([rows, rows.new_zeros(per_row, rows.shape[1])])
        output = self.call(module, None, rows) if PREVIOUS in inputs else self.call(module, rows)
        return self.checked(module, output, max(n, 1), 0)[: n * self.passed(module)]

    def call(self, module: nn.Module, *arguments: Any) -> Any:
        """Run `module` on what it reads; in a later pipeline stage what the stage before returned comes last."""
        if self.abilities.activation is None:
            return module(*arguments)
        *read, hidden = arguments if len(arguments) > self.n_read else (*arguments, None)
        return module(*read, hidden=hidden)

    n_read: ClassVar = 1  # positional arguments of the module's forward

    def is_last(self, module: nn.Module) -> bool:
        """Whether a pipeline stage is the last of its module, and returns the result of the module."""
        return self.abilities.activation is None or not is_absent(module.get_submodule(self.layer_names[-1]))

    def passed(self, module: nn.Module) -> int:
        """Rows that a stage returns for each row that the module emits."""
        return 1 if self.is_last(module) or self.abilities.activation is None else self.abilities.activation.per_row

    def checked(self, module: nn.Module, output: Any, rows: int, items: int) -> Tensor:
        """`output` as `[rows, features]`. Raises BoundaryError: it is not, or, between two stages, not as declared."""
        width, between = self.out_features, self.abilities.activation
        if not self.is_last(module) and between is not None:
            rows, width = rows * between.per_row + items * between.per_item, between.features
        if isinstance(output, Tensor) and output.ndim == 3:
            output = output.flatten(0, 1)
        if not isinstance(output, Tensor) or output.shape != (rows, width):
            given = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            where = "" if self.is_last(module) else " to the next pipeline stage (its `activation`)"
            raise BoundaryError(f"module {self.name!r} must return shape {(rows, width)}{where}, got {given}")
        return output


@dataclass(frozen=True)
class UserEncoder(UserAdapter):
    """A user's encoder of media items of one shape."""

    media: str = ""
    media_shape: tuple[int, ...] = ()
    rows_per_item: int = 1

    def item_rows(self, shape: tuple[int, ...]) -> int:
        if tuple(shape) != self.media_shape:
            raise SampleError(f"module {self.name!r} reads {self.media_shape} {self.media!r}, got {tuple(shape)}")
        return self.rows_per_item

    def collate(self, samples: Sequence[SampleLike], metas: Sequence[SampleMeta], **_: Any) -> dict[str, Tensor]:
        return collate_media(samples, metas, self.media, self.media_shape)

    def forward(self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        between = self.abilities.activation
        if PREVIOUS in inputs and between is not None:
            shape: tuple[int, ...] = (between.per_row * self.rows_per_item + between.per_item, between.features)
            items = inputs[PREVIOUS].view(-1, *shape)
        else:
            shape, items = self.media_shape, as_parameters(module, batch["media"])
        n = len(items)
        if n == 0:  # still a function of the input
            items = torch.cat([items, items.new_zeros(1, *shape)])
        output = self.call(module, None, items) if PREVIOUS in inputs else self.call(module, items)
        rows = self.checked(module, output, max(n, 1) * self.rows_per_item, max(n, 1))
        return rows if n else rows[:0]


@dataclass(frozen=True)
class UserItemsEncoder(UserAdapter):
    """A user's encoder of media items of several shapes, whose class says how many rows an item becomes."""

    media: str = ""
    blank: tuple[int, ...] = ()
    sizer: Any = None

    def item_rows(self, shape: tuple[int, ...]) -> int:
        try:
            rows = self.sizer(tuple(shape))
        except ValueError as error:
            raise SampleError(f"module {self.name!r} cannot read {self.media!r} of shape {shape}: {error}") from error
        if type(rows) is not int or rows < 1:
            raise SampleError(f"module {self.name!r}: item_rows({tuple(shape)}) returned {rows!r}, no number of rows")
        return rows

    def collate(self, samples: Sequence[SampleLike], metas: Sequence[SampleMeta], **_: Any) -> dict[str, Tensor]:
        return {f"media.{i}": item for i, item in enumerate(media_items(samples, metas, self.media))}

    def forward(self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        items = [as_parameters(module, batch[f"media.{i}"]) for i in range(len(batch))]
        if not items:
            return self._rows_of_blank(module)
        return self.checked(module, module(items), sum(self.item_rows(tuple(i.shape)) for i in items), len(items))

    def _rows_of_blank(self, module: nn.Module) -> Tensor:
        """No rows, of a blank item. Parameters get no gradient from it: it may enter other layers than items do."""
        device = next((p.device for p in module.parameters()), None)
        item = as_parameters(module, torch.zeros(self.blank, device=device))
        with torch.set_grad_enabled(torch.is_grad_enabled() and needs_backward()):
            return self.checked(module, module([item]), self.item_rows(tuple(item.shape)), 1)[:0]


@dataclass(frozen=True, kw_only=True)
class UserGenerator(GeneratorAdapter, UserAdapter):  # type: ignore[misc]
    """A user's module after the LLM, which predicts the rows of an item along its last dim, or those that an encoder
    makes of it. `flows`: it gets noisy ones and the time, too, and predicts velocities."""

    flows: bool

    def to_latents(self, items: Tensor) -> Tensor:
        return items.reshape(len(items), self.latents, self.width)

    def to_items(self, latents: Tensor) -> Tensor:
        return latents.reshape(-1, *self.media_shape)

    def velocity(self, module: nn.Module, noisy: Tensor, rows: Tensor, time: Tensor) -> Tensor:
        return self.predicted(module(rows, as_parameters(module, noisy), as_parameters(module, time)), len(rows))

    def predicted(self, output: Any, n: int) -> Tensor:
        want = n, self.latents, self.width
        if not isinstance(output, Tensor) or output.shape != want:
            given = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise BoundaryError(f"module {self.name!r} must return a prediction of shape {want}, got {given}")
        return output

    def forward(self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Any:
        if self.flows:
            return super().forward(module, batch, inputs)
        n, rows, data = self.read(batch, inputs)
        return self.result(n, self.predicted(module(rows), len(rows)), data)


@dataclass(frozen=True)
class UserSink(UserAdapter):
    """A user's LLM, which gets the whole batch and computes the logits of the targets."""

    sources: Mapping[str, str] = field(default_factory=dict)
    n_read: ClassVar = 2

    def collate(self, samples: Sequence[SampleLike], metas: Sequence[SampleMeta], **how: Any) -> dict[str, Tensor]:
        return collate_tokens(samples, metas, sources=self.sources, **how)

    def forward(self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        ids, changed = batch["input_ids"], dict(batch)
        if ids.numel() == 0:  # no forward ever sees an empty tensor: one token that predicts nothing
            positions = batch["position_ids"]
            ids = ids.new_zeros(1, 1)
            changed |= {"input_ids": ids, "position_ids": positions.new_zeros(*positions.shape[:-2], 1, 1)}
        last, targets = self.is_last(module), len(batch["target_positions"])
        if not last:  # a stage without the head returns all tokens, which its stand-ins for later layers hand on
            changed["target_positions"] = torch.arange(ids.numel(), device=ids.device)
        batch = with_tensors(batch, changed)
        hidden, rows = inputs.get(PREVIOUS), {key: value for key, value in inputs.items() if key != PREVIOUS}
        if hidden is not None:
            output = self.call(module, batch, {}, hidden.view(*ids.shape, -1))
        else:
            output = self.call(module, batch, rows_of_lane(module, self.sources, batch, rows))
        if not last:
            return self.checked(module, output, ids.numel(), 0)
        if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != targets:
            given = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise BoundaryError(f"module {self.name!r} must return logits of shape {(targets, 'vocab')}, got {given}")
        return output


def as_parameters(module: nn.Module, media: Tensor) -> Tensor:
    """Media in the dtype of the module's parameters if they are floating-point numbers; ids stay as they are."""
    parameter = next(module.parameters(), None)
    return media.to(parameter.dtype) if media.is_floating_point() and parameter is not None else media


def sharded_layers(layers: tuple[str, ...], prefixes: tuple[str, ...]) -> tuple[str, ...]:
    """The layers that work on shares of the tokens."""
    return tuple(layer for layer in layers if within(layer, *prefixes))


def rows_of_lane(
    module: nn.Module, sources: Mapping[str, str], batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Rows for all placeholders of a batch's lane. A rank with sequence parallelism got the rows of its share:
    zeros stand for the others, which are cut off where tokens are split."""
    tokens = tokens_of(module)
    if not isinstance(tokens, ShardedTokens):
        return dict(inputs)
    return {source: tokens.spread(inputs[source], batch, f"positions.{at}") for source, at in sources.items()}
