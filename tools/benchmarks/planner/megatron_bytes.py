"""What Megatron-LM holds in a published layout, by published formulas alone: a second opinion on predicted memory.

Parameters and optimizer state as its distributed optimizer has them; activations of a block as Korthikanti et al.
(arXiv 2205.05198, equation 4) count them, with the sizes of gated MLPs and grouped keys, and without what flash
attention and fused kernels do not keep.
"""

from __future__ import annotations

from benchmarks.planner.architectures import Decoder, Encoder, decoder, encoder
from benchmarks.planner.published_rows import Row

BF16, FP32, STATE = 2, 4, 12  # bytes of an element; of the fp32 copy of a parameter and both moments of it


def megatron_bytes(row: Row, which: int, recomputed: bool, gradient: int = BF16) -> dict[str, float]:
    """Bytes on a rank of the LLM's first stage, which holds most, of one layout of a row.

    Args:
        recomputed: whether the encoder is: its blocks then keep their inputs alone.
        gradient: bytes of an element of gradients.
    """
    layout, tower, llm = row.layouts[which], encoder(row.encoder), decoder(row.llm)
    (tp_e, cp_e, _, dp_e), (tp, cp, pp, dp) = layout.encoder, layout.llm
    counts = tower.shape().parameters / tp_e, llm.shape().parameters / tp / pp
    rows_e, rows = row.vision * row.seq / cp_e, row.seq / cp * row.microbatch_size(which)
    samples = row.microbatch_size(which) * min(pp, row.global_batch // dp)  # between their forward and backward
    kept = 1 if recomputed else _block(tower, 2 * tower.inner) / tower.width / BF16
    # before a pipeline on the same ranks an encoder runs for all of the step's samples, as NVIDIA's three phases do
    ahead = row.global_batch / dp_e if which and pp > 1 else samples
    return {
        "parameters": BF16 * sum(counts),
        "gradients": gradient * sum(counts),
        "optimizer": STATE * (counts[0] / dp_e / cp_e + counts[1] / dp / cp),
        "encoder activations": ahead * rows_e * tower.layers * kept * BF16 * tower.width / tp_e,
        "LLM activations": min(pp, row.global_batch // dp) * rows * llm.layers / pp * _block(llm, 3 * llm.inner) / tp,
        "logits": 0.0 if pp > 1 else rows * llm.vocabulary / tp * (BF16 + FP32),
    }


def _block(size: Encoder | Decoder, mlp: int) -> float:
    """Bytes of a row on all tensor-parallel ranks: what both norms and both parts read; queries, keys, values and what
    attention makes of them; `mlp`: what lies in the MLP."""
    heads, keys = (size.heads, size.keys) if isinstance(size, Decoder) else (size.width, size.width)
    return BF16 * (4 * size.width + 2 * heads + 2 * keys + mlp)
