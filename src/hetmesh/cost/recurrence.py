"""What a layer computes and keeps that remembers earlier tokens otherwise than by attention.

Each head has a state S `[dk, dv]`. It follows S_t = A_t S_{t-1} + k_t v_t^T, where A_t is a number (Mamba-2, lightning
attention) or, by the delta rule, a matrix (Gated DeltaNet). Chunks of C tokens are computed at once, by products within
a chunk and with the state before it; the delta rule solves a triangular system, too. In front of it there may be a
causal convolution, and a layer may have that alone.

Counted is what torch computes where no kernels are installed, in transformers' functions and in
`hetmesh.attention.delta_rule` alike: in fp32 or better, with each product's factors kept. Kernels keep less.
"""

from __future__ import annotations

from dataclasses import dataclass

MOVED = 4
"""Elements that torch reads and writes for each that it keeps. On a CPU the rule takes as long as its bytes, not as its
FLOPs: 0.5 to 0.6 ns per byte that it keeps, at 14 to 28 of 186 GFLOP/s."""


@dataclass(frozen=True, slots=True)
class RankCuts:
    """Of the cuts of samples between the ranks that share the tokens of a lane, all of them, and those that this rank
    has pieces before and behind; `rows`: of its pieces before a cut."""

    all: int = 0
    before: int = 0
    behind: int = 0
    rows: int = 0


@dataclass(frozen=True)
class CutBytes:
    """What goes over one cut of a sample between ranks, in one layer and whatever its length, in a forward and a
    backward (`hetmesh.attention.recurrence`): the map of a piece before it, the state from which the piece behind it
    goes on, and the last inputs of the convolution. In the backward gradients of states go to the ranks that have
    their heads, and from there to the pieces before the cuts."""

    maps: int
    states: int
    halo: int

    @property
    def forward(self) -> int:
        return self.maps + self.states + self.halo

    @property
    def backward(self) -> int:
        return 2 * self.states + self.halo


@dataclass(frozen=True)
class Recurrence:
    """Sizes of the states and the convolution of one layer.

    Attributes:
        heads: with a state each; 0: there is none.
        key_heads: of keys and queries, each of which serves as many states as any other.
        key_width, value_width: dk and dv.
        delta_rule: whether a state is multiplied by a matrix, not by a number.
        chunk: C.
        convolved: features of the convolution.
        kernel: tokens that it reads.
    """

    heads: int = 0
    key_heads: int = 0
    key_width: int = 0
    value_width: int = 0
    delta_rule: bool = False
    chunk: int = 64
    convolved: int = 0
    kernel: int = 0

    @property
    def flops(self) -> int:
        """Of a row, in a forward; those of the convolution are its weight's."""
        k, v, c = self.key_width, self.value_width, self.chunk
        solving = 2 * c * k + c * (k + v) + 2 * k * v if self.delta_rule else 0
        return self.heads * (2 * c * (k + v) + 4 * k * v + solving)

    def kept_bytes(self, itemsize: int) -> float:
        """Of a row, beside the inputs and outputs of products: what the convolution reads and makes, as far as no
        product makes it; of the rule, queries and keys as they come and as they are scaled and decayed, values, and
        what the triangular system or the pairs of a chunk hold, with a state per chunk; then of the gated norm its
        input, both its factors and what it multiplies the gate by."""
        wide, k, v, c = max(itemsize, 4), self.key_width, self.value_width, self.chunk
        kept: float = itemsize * self.convolved * (1 if self.heads else 2)
        of_state = 6 * k + 3 * v + 5 * c if self.delta_rule else 5 * k + 3 * v + 4 * c
        kept += wide * (2 * self.key_heads * k * self.delta_rule + self.heads * (of_state + k * v / c + 8))
        return kept + self.heads * v * ((2 + (itemsize < wide)) * wide + 2 * itemsize)

    def map_bytes(self, itemsize: int) -> float:
        """Of a row of a piece before a cut, what its map keeps: the rule once more, without outputs."""
        k, v, c = self.key_width, self.value_width, self.chunk
        of_state = 7 * k + 3 * v + 3 * c + k * (k + v) / c + 4
        return max(itemsize, 4) * (self.key_heads * k + self.heads * of_state)

    def cut_bytes(self, itemsize: int, tp: int = 1) -> CutBytes:
        """What a cut sends between all ranks, those included that keep some heads of what they have; of one of `tp`
        ranks that split its heads."""
        state = max(itemsize, 4) * self.heads * self.key_width // tp
        halo = itemsize * max(self.kernel - 1, 0) * self.convolved // tp
        return CutBytes(state * (self.key_width + self.value_width), state * self.value_width, halo)
