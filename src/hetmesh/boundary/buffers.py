"""Buffers: memory for packed messages, used again and again.

Fresh memory of a few MB is cleared by the kernel page by page, which costs as much as packing. CUDA's allocator keeps
memory itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SMALLEST = 2**15  # elements; less comes from the heap of the process at no cost
_KEPT = 2**28  # bytes that lie unused at most


class Buffers:
    """Flat tensors on one device, by dtype and power of two."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self._bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of at least `numel` elements, of any content."""
        if numel < _SMALLEST or self.device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=self.device)
        size = 1 << (numel - 1).bit_length()
        free = self._free.get((dtype, size))
        if not free:
            with torch.inference_mode(False):  # what is made inside cannot be written to outside
                return torch.empty(size, dtype=dtype)
        buffer = free.pop()
        self._bytes -= buffer.nbytes
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Hand back what `take` returned and nobody uses any more."""
        if buffer.numel() < _SMALLEST or self.device.type != "cpu" or self._bytes + buffer.nbytes > _KEPT:
            return
        self._bytes += buffer.nbytes
        self._free.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)
