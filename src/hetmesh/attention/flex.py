"""The local kernel on CUDA: flex_attention (arXiv 2412.05496) with a BlockMask made from the calls.

On an H100 (torch 2.11) both directions equal the CPU's kernel within 1e-5. The suite tests the forward on a CPU, where
flex_attention has no backward. The backward computes a buffer's attention again and lets autograd go through the online
softmax: with w the weight of the buffer, exp(its logsumexp - the final one), d out / d (its out) is w, and
d out / d (its logsumexp) is w (its out - out).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from hetmesh.attention.kernels import ForwardState, Running, Terms
from hetmesh.attention.key_blocks import BLOCK, Buffer, KernelCalls, PartialMasks
from hetmesh.boundary import World
from hetmesh.context.rule import ALWAYS, BEFORE, NEVER, reach

FLEX: dict[str, Callable[..., Any] | None] = {"cuda": None}
"""Types of devices whose kernel this is, with what stands for flex_attention there; None: torch's own."""


def flex_forward(running: Running, q: Tensor, kv: Tensor, work: KernelCalls, terms: Terms) -> None:
    """As `cpu_forward`."""
    if work.calls:
        out, logsumexp = _attend(q, kv, work, terms)
        running.add(slice(None), out, logsumexp)


def flex_backward(saved: ForwardState, kv: Tensor, work: KernelCalls, terms: Terms, dq: Tensor, dkv: Tensor) -> None:
    """As `cpu_backward`."""
    if not work.calls:
        return
    q, keys = saved.q.detach().requires_grad_(), kv.detach().requires_grad_()
    with torch.enable_grad():
        out, logsumexp = _attend(q, keys, work, terms)
    weight = (logsumexp.detach() - saved.logsumexp).exp()[..., None]
    to_out = weight * saved.gradient
    to_logsumexp = (to_out * (out.detach() - saved.out)).sum(-1)
    to_q, to_kv = torch.autograd.grad((out, logsumexp), (q, keys), (to_out.to(out.dtype), to_logsumexp))
    dq += to_q
    dkv += to_kv


def _attend(q: Tensor, kv: Tensor, work: KernelCalls, terms: Terms) -> tuple[Tensor, Tensor]:
    """Folded attention on one buffer, and its logsumexp (natural, -inf for rows that see nothing)."""
    heads, folded, width = q.shape
    rows, group = folded // terms.group, terms.group
    apart = q.view(heads, rows, group, width).transpose(1, 2).reshape(1, heads * group, rows, width)
    k, v = (x.transpose(0, 1)[None] for x in kv.unbind(1))
    queries, keys = _padded(rows), _padded(len(kv))
    more = max(_NARROWEST - width, 0)  # zeros, which change no score: the scale is given
    apart = F.pad(apart, (0, more, 0, queries - rows))
    k, v = (F.pad(x, (0, more, 0, keys - len(kv))) for x in (k, v))
    mask = block_mask(work, terms.masks, queries, keys, q.device)
    kernel = _kernel(q.device.type, heads, group, width + more, q.dtype, torch.is_grad_enabled())
    out, aux = kernel(
        apart,
        k,
        v,
        block_mask=mask,
        scale=terms.scale,
        enable_gqa=group > 1,
        return_aux=AuxRequest(lse=True),
        # not the kernel for short queries: it has no block size for 65 to 127 rows of heads that share keys (in 2.11)
        kernel_options={"BACKEND": "TRITON"},
    )
    out, logsumexp = out[:, :, :rows, :width], aux.lse[:, :, :rows]
    out = out.reshape(heads, group, rows, width).transpose(1, 2).reshape(heads, folded, width)
    return out, logsumexp.reshape(heads, group, rows).transpose(1, 2).reshape(heads, folded)


_NARROWEST = 16  # columns of a head that Triton's products take


def _padded(rows: int) -> int:
    """Whole blocks, and at least two: a size of one is compiled apart from all others."""
    return max(2, -(-rows // BLOCK)) * BLOCK


@cache
def _kernel(device: str, *kind: object) -> Callable:
    """flex_attention, compiled for each `kind` on its own: what one compiled function may meet before dynamo gives up,
    and runs it with dense scores, is 8 kinds of arguments. In float64, which is for comparisons and which Triton's
    kernel does not take, it has dense scores (torch warns of that)."""
    if (other := FLEX.get(device)) is not None:
        return other
    plain: Callable = flex_attention
    return compiled_kernel("inductor") if device == "cuda" and torch.float64 not in kind else plain


def compiled_kernel(backend: str) -> Callable:
    """flex_attention under torch.compile, with a separate limit of recompilations; over it is an error."""

    def attend(*args: Any, **options: Any) -> Any:
        return flex_attention(*args, **options)

    attend.__code__ = attend.__code__.replace()  # what dynamo counts by
    compiled: Callable = torch.compile(attend, dynamic=True, fullgraph=True, backend=backend)
    return compiled


_Key = tuple[PartialMasks, int, int, torch.device]
_block_masks: WeakKeyDictionary[KernelCalls, dict[_Key, BlockMask]] = WeakKeyDictionary()


def block_mask(work: KernelCalls, masks: PartialMasks, rows: int, keys: int, device: torch.device) -> BlockMask:
    """The blocks of 128 x 128 that calls touch; those that calls without a mask fill need no mask. Kept for as long as
    `work` is: a cache of some fixed size would be too small for some number of chunks, layers and microbatches."""
    made = _block_masks.setdefault(work, {})
    key = (masks, rows, keys, device)
    if key not in made:
        made[key] = _made(work, masks, rows, keys, device)
    return made[key]


def _made(work: KernelCalls, masks: PartialMasks, rows: int, keys: int, device: torch.device) -> BlockMask:
    area = np.zeros((-(-rows // BLOCK), -(-keys // BLOCK)), np.int64)
    touched = np.zeros(area.shape, bool)
    for call in work.calls:
        for run in call.keys:
            pair = np.outer(_overlap(call.rows, len(area)), _overlap(run, area.shape[1]))
            touched |= pair > 0
            area += pair if call.positions is None else 0
    full = area == BLOCK * BLOCK
    partial, whole = (_listed(blocks, device) for blocks in (touched & ~full, full))
    visible = _visible(work, masks, rows, keys, device)
    return BlockMask.from_kv_blocks(*partial, *whole, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(rows, keys))


def _listed(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Per row of blocks how many are set, and which: those first."""
    order = np.argsort(~blocks, axis=1, kind="stable")
    counts, which = (on_device(x.astype(np.int32), device)[None, None] for x in (blocks.sum(1), order))
    return counts, which


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device, for which the host does not wait."""
    host = torch.tensor(array)
    if device.type == "cpu":
        return host
    # Also where there is no World: its accelerator knows how others than CUDA pin.
    pinned = host.pin_memory() if device.type == "cuda" else World.current().accelerator.pinned(host)
    return pinned.to(device, non_blocking=True)


def _overlap(run: tuple[int, int], blocks: int) -> np.ndarray:
    """How many of a run's rows lie in each block."""
    edges = np.clip(np.arange(blocks + 1) * BLOCK, *run)
    return np.diff(edges)


def _visible(work: KernelCalls, masks: PartialMasks, rows: int, keys: int, device: torch.device) -> Callable:
    """The visibility rule on rows and keys of the buffer, through a table of all pairs of segments."""
    mask = masks.mask
    index = np.arange(len(mask.segments))
    table = np.full((len(index) + 1, len(index) + 1), NEVER, np.int8)  # the last one is padding
    table[:-1, :-1] = reach(mask.fields.take(index[:, None]), mask.fields.take(index[None, :]))
    places = [_positions(Buffer.of(work.runs), rows), _positions(work.keys, keys)]
    sees = on_device(table, device)
    q_at, k_at = (on_device(place, device) for place in places)
    q_of, k_of = (on_device(mask.segment_of(place) % (len(index) + 1), device) for place in places)
    window = masks.window if masks.window is not None else mask.length + 1

    def visible(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        found, ahead = sees[q_of[row], k_of[key]], k_at[key] - q_at[row]
        return ((found == ALWAYS) | ((found == BEFORE) & (ahead <= 0))) & (ahead.abs() < window)

    return visible


def _positions(buffer: Buffer, rows: int) -> np.ndarray:
    """The position of each row of a buffer, -1 where it has none."""
    out = np.full(rows, -1)
    for start, stop, row in zip(buffer.starts, buffer.stops, buffer.rows, strict=True):
        out[row : row + stop - start] = np.arange(start, stop)
    return out
