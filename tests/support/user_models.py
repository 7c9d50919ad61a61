"""Users' modules, as `hetmesh/models/user/README.md` describes them: an encoder, a projector and an LLM that declare
all that such classes can."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import gelu, scaled_dot_product_attention

from hetmesh.attention import attend


class Attention(nn.Module):
    """Multi-head attention, with biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, batch: Mapping[str, Any] | None) -> Tensor:
        """Of all tokens to each other without a batch, else as that says."""
        parts = (self.query, self.key, self.value)  # with tensor parallelism each rank has some of the heads
        q, k, v = (part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in parts)
        seen = scaled_dot_product_attention(q, k, v) if batch is None else attend(q, k, v, batch)
        out: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of each token by itself."""
        out: Tensor = self.down(gelu(self.up(x)))
        return out


class Block(nn.Module):
    """A transformer block with norms in front."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width, heads), Mlp(width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, batch: Mapping[str, Any] | None = None) -> Tensor:
        """`[samples, tokens, width]` in and out."""
        x = x + self.attention(self.before(x), batch)
        out: Tensor = x + self.mlp(self.between(x))
        return out


PLAN = {f"blocks.*.attention.{name}": "colwise" for name in ("query", "key", "value")}
PLAN |= {"blocks.*.attention.out": "rowwise", "blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}


class Patches(nn.Module):
    """Images of one channel as patches, each with a place of its own."""

    def __init__(self, patch: int, width: int, rows: int) -> None:
        super().__init__()
        self.unfold, self.linear = nn.Unfold(patch, stride=patch), nn.Linear(patch**2, width)
        self.place = nn.Parameter(torch.randn(rows, width))

    def forward(self, images: Tensor) -> Tensor:
        """`[n, 1, height, width]` -> `[n, rows, width]`."""
        out: Tensor = self.linear(self.unfold(images).transpose(1, 2)) + self.place
        return out


class Tower(nn.Module):
    """An encoder of images of one channel; a row per patch."""

    tensor_parallel_plan, token_sharded = PLAN, ("blocks", "norm")

    def __init__(
        self, media_shape: Sequence[int], out_features: int, depth: int = 2, heads: int = 4, patch: int = 4
    ) -> None:
        super().__init__()
        self.activation = self.out_features = out_features
        self.tensor_parallel_sizes = {"heads": heads}
        self.rows_per_item = media_shape[1] * media_shape[2] // patch**2
        self.embed = Patches(patch, out_features, self.rows_per_item)
        self.blocks = nn.ModuleList(Block(out_features, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(out_features)

    def forward(self, images: Tensor | None, hidden: Tensor | None = None) -> Tensor:
        """Rows `[n, rows per item, width]` of images, or of what the stage before returned."""
        if hidden is None:
            hidden = self.embed(images)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.norm(hidden)
        return out


class Items(nn.Module):
    """An encoder of images of any size, each by itself: how often it enters its blocks depends on the data."""

    def __init__(self, media_shape: Sequence[int], out_features: int, depth: int = 2, many: int = 5) -> None:
        super().__init__()
        self.out_features, self.many = out_features, many
        self.embed, self.scale = nn.Linear(media_shape[0] * 16, out_features), nn.Parameter(torch.tensor(0.5))
        self.blocks = nn.ModuleList(Block(out_features, 4) for _ in range(depth))

    def item_rows(self, shape: Sequence[int]) -> int:
        """A row per patch of 4 x 4."""
        return shape[1] * shape[2] // 16

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """`[rows, width]`; images of few patches pass by the last block."""
        rows = []
        for image in images:
            hidden = self.embed(image.unfold(1, 4, 4).unfold(2, 4, 4).permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1))
            for block in self.blocks if len(hidden) >= self.many else self.blocks[:-1]:
                hidden = block(hidden[None])[0]
            rows.append(hidden)
        return torch.cat(rows) * self.scale


BRANCHES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda rows: rows,
    "gated": lambda rows: rows * rows.mean(-1, keepdim=True).sigmoid(),
    "normalised": lambda rows: functional.layer_norm(rows, rows.shape[-1:]),
    "centred": lambda rows: rows - rows.mean(0),
    "batch norm": lambda rows: functional.batch_norm(rows, None, None, training=True),
    "mixed": lambda rows: rows + 0.1 * rows[torch.randperm(len(rows))],
}
"""What a module may do to its rows while it trains."""

MIXING = ("centred", "batch norm", "mixed")
"""Those that no layout has alike; they are refused."""


class Widen(nn.Module):
    """A projector, with one of `BRANCHES` in training alone."""

    def __init__(self, in_features: int, out_features: int, branch: str = "none") -> None:
        super().__init__()
        self.out_features, self.branch = out_features, branch
        self.first, self.second = nn.Linear(in_features, 2 * out_features), nn.Linear(2 * out_features, out_features)

    def forward(self, rows: Tensor) -> Tensor:
        """`[n, in_features]` -> `[n, out_features]`."""
        out: Tensor = self.second(gelu(self.first(rows)))
        return BRANCHES[self.branch](out) if self.training else out


class Embedding(nn.Module):
    """Tokens with their places, or the rows at placeholders in place of tokens."""

    def __init__(self, vocab_size: int, width: int, longest: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(longest, width)

    def forward(self, batch: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> Tensor:
        """`[samples, tokens, width]`."""
        hidden: Tensor = self.tokens(batch["input_ids"])
        for rows in inputs.values():
            hidden = hidden.flatten(0, 1).index_copy(0, batch["positions.image"], rows).view_as(hidden)
        return hidden + self.places(batch["position_ids"])


class Decoder(nn.Module):
    """An LLM that reads rows at the placeholders of images."""

    tensor_parallel_plan, token_sharded, packed_attention = PLAN, ("blocks",), True

    def __init__(self, vocab_size: int, width: int = 16, depth: int = 2, heads: int = 4, longest: int = 128) -> None:
        super().__init__()
        self.activation = self.in_features = width
        self.tensor_parallel_sizes = {"heads": heads}
        self.embed = Embedding(vocab_size, width, longest)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)

    def forward(self, batch: Mapping[str, Any], inputs: Mapping[str, Tensor], hidden: Tensor | None = None) -> Tensor:
        """Logits `[targets, vocab]`, or what the next stage gets."""
        if hidden is None:
            hidden = self.embed(batch, inputs)
        for block in self.blocks:
            hidden = block(hidden, batch)
        hidden = self.norm(hidden).flatten(0, 1)
        out: Tensor = self.head(hidden[batch["target_positions"]])  # only where a token is predicted
        return out
