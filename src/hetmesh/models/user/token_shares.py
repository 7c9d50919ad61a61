"""Sequence parallelism of a user's module: tokens are split before the first layer that takes shares, and joined after
the last, so that the module's forward sees all tokens everywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from hetmesh.models.adapter import Abilities
from hetmesh.parallel.sequence_parallel import ShardedTokens
from hetmesh.parallel.tokens import tokens_of


class _Layered(Protocol):
    @property
    def abilities(self) -> Abilities: ...
    def layers(self) -> tuple[str, ...]: ...


def sharded_layers(layers: tuple[str, ...], prefixes: tuple[str, ...]) -> tuple[str, ...]:
    """The layers that work on shares of the tokens."""
    return tuple(layer for layer in layers if any(f"{layer}.".startswith(f"{prefix}.") for prefix in prefixes))


def install_token_shares(module: nn.Module, adapter: _Layered) -> None:
    """Make `module` split its tokens before the first of its sharded layers and join them after the last, if it has
    sequence parallelism. Does so once per module."""
    tokens: Any = tokens_of(module)
    if not isinstance(tokens, ShardedTokens) or tokens.by_hooks:
        return
    tokens.by_hooks = True
    inside = sharded_layers(adapter.layers(), adapter.abilities.token_sharded)

    def share(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return tokens.split_lane(arguments[0]), *arguments[1:]

    def join(_: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        return tokens.join(output)

    module.get_submodule(inside[0]).register_forward_pre_hook(share)
    module.get_submodule(inside[-1]).register_forward_hook(join)


def rows_of_lane(
    module: nn.Module, sources: Mapping[str, str], batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Rows for all placeholders of a batch's lane. A rank with sequence parallelism got the rows of its share:
    zeros stand for the others, which are cut off where tokens are split."""
    tokens = tokens_of(module)
    if not isinstance(tokens, ShardedTokens):
        return dict(inputs)
    return {source: tokens.spread(inputs[source], batch, f"positions.{at}") for source, at in sources.items()}
