"""How an adapter handles its tokens where a rank may keep only some of them (sequence or context parallelism)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from hetmesh.context.token_owners import TokenShares

SHARE, WHICH = "share.", "share_index."
"""Prefixes of the keys that `positions_in_share` adds to a batch, before the key of the positions."""


def positions_in_share(batch: Mapping[str, Tensor], part: int, parts: int) -> dict[str, Tensor]:
    """Where the positions of a batch lie in the share that one of `parts` ranks keeps of its tokens. Worked out on the
    host, where a batch is collated: on a device their number would not be known without waiting for it.

    Returns:
        For each key of positions, `target_positions` and `positions.<placeholder>`:
        `share.<key>`: int64, positions in the share of those that it holds.
        `share_index.<key>`: int64, which of all positions these are.
    """
    start, stop = TokenShares(max(batch["input_ids"].numel(), 1), parts).span(part)
    found: dict[str, Tensor] = {}
    for key, positions in batch.items():
        if key == "target_positions" or key.startswith("positions."):
            which = ((positions >= start) & (positions < stop)).nonzero().flatten()
            found |= {SHARE + key: positions[which] - start, WHICH + key: which}
    return found


class AllTokens:
    """A rank that keeps all tokens of its lane. Where it does not, `hetmesh.parallel` sets another one as the attribute
    `hetmesh_tokens` of the module; adapters get it from `tokens_of`."""

    def split(self, flat: Tensor) -> Tensor:
        """`[B * S, features]` of all tokens -> those that this rank keeps, `[kept, features]`."""
        return flat

    def locate(self, batch: Mapping[str, Tensor], key: str) -> Tensor:
        """Those of the positions `batch[key]` among all flat tokens that this rank keeps, as positions in its share."""
        return batch[key]

    def as_input(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The kept tokens `[kept, features]` as the first block takes them; `shape` is that of all, `(B, S)`."""
        return flat.view(*shape, -1)

    def mask(self, flat: Tensor) -> Tensor | None:
        """The attention mask to hand to a model that would otherwise make one from the shape of its input; `split`
        tokens are whole again when attention sees them, and causal without a mask."""
        return None

    def select(self, flat: Tensor, batch: Mapping[str, Tensor], key: str) -> Tensor:
        """The rows of tokens at the positions `batch[key]` among all, on every rank, from the shares
        `[kept, features]`."""
        return flat.index_select(0, batch[key])


def tokens_of(module: nn.Module) -> AllTokens:
    """The tokens of `module` that this rank keeps."""
    return getattr(module, "hetmesh_tokens", None) or AllTokens()
