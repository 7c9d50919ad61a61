"""The encoder of digits_video.toml: clips of any number of frames become a row per frame. Frames of all clips lie one
after another, without padding, so that a clip costs what it is long: what balancers count."""

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, lengths):
        qkv = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        seen = [scaled_dot_product_attention(*clip) for clip in qkv.split(lengths, dim=2)]
        x = x + self.out(torch.cat(seen, dim=1).transpose(0, 1).flatten(1))
        return x + self.down(gelu(self.up(self.between(x))))


class ClipTower(nn.Module):
    """Clips `[frames, channels, side, side]`; each frame attends to all of its clip."""

    def __init__(self, out_features, channels=1, side=8, depth=2, heads=4):
        super().__init__()
        self.out_features = out_features
        self.embed = nn.Linear(channels * side * side, out_features)
        self.blocks = nn.ModuleList(Block(out_features, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(out_features)

    def item_rows(self, shape):
        if len(shape) != 4 or shape[1] * shape[2] * shape[3] != self.embed.in_features:
            raise ValueError(f"each frame must have {self.embed.in_features} numbers")
        return shape[0]

    def forward(self, clips):
        lengths = [len(clip) for clip in clips]
        x = self.embed(torch.cat(clips).flatten(1))
        places = torch.cat([torch.arange(length, device=x.device) for length in lengths])
        x = x + wave(places, x.shape[1]).to(x.dtype)
        for block in self.blocks:
            x = block(x, lengths)
        return self.norm(x)


def wave(places, width):
    """Sines and cosines of each place, `[places, width]` (Vaswani et al., arXiv 1706.03762, section 3.5)."""
    angles = places[:, None] / 10000 ** (torch.arange(0, width, 2, device=places.device) / width)
    return torch.cat([angles.sin(), angles.cos()], dim=1)
