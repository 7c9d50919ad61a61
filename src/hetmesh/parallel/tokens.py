"""How an adapter handles its tokens where a rank may keep only some of them (sequence or context parallelism)."""

from __future__ import annotations

from torch import Tensor, nn


class AllTokens:
    """A rank that keeps all tokens of its lane. `hetmesh.parallel` puts another one where it does not, as the attribute
    `hetmesh_tokens` of the module (models have names of their own); adapters find it with `tokens_of`."""

    def split(self, flat: Tensor) -> Tensor:
        """`[B * S, features]` of all tokens -> those that this rank keeps, `[kept, features]`."""
        return flat

    def locate(self, positions: Tensor, total: int) -> Tensor:
        """Positions among all `total` flat tokens -> those that this rank keeps, as positions in its share."""
        return positions

    def as_input(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The kept tokens `[kept, features]` as the first block takes them; `shape` is that of all, `(B, S)`."""
        return flat.view(*shape, -1)

    def mask(self, flat: Tensor) -> Tensor | None:
        """The attention mask to hand to a model that would otherwise make one from the shape of its input; `split`
        tokens are whole again when attention sees them, and causal without a mask."""
        return None

    def select(self, flat: Tensor, positions: Tensor, total: int) -> Tensor:
        """The rows of tokens at `positions` among all `total`, on every rank, from the shares `[kept, features]`."""
        return flat.index_select(0, positions)


def tokens_of(module: nn.Module) -> AllTokens:
    """Which tokens this rank keeps of those that `module` works on."""
    return getattr(module, "hetmesh_tokens", None) or AllTokens()
