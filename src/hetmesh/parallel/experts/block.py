"""ExpertBlock: a mixture-of-experts block of a ready-made model, its experts spread over ranks.

Each token travels once to each rank that holds one of its experts, which computes them and sends one weighted sum
back. Sums are in the order of the token's own choice on a rank, and of the ranks where it comes from; so on one rank
the result equals transformers' own block (`grouped_mm`, which it chooses by default) to the last bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetmesh._torch_compat import grouped_mm, not_compiled
from hetmesh.balance.place_experts import Placement
from hetmesh.parallel.experts.load_balancing import balance_terms, choices_per_sample, inject
from hetmesh.parallel.experts.routed_tokens import LaneSamples, RoutedTokens
from hetmesh.parallel.experts.token_exchange import (
    ExpertRanks,
    RoutedCounts,
    count_choices,
    return_rows,
    send_rows,
    start_counts,
    sum_choices,
)
from hetmesh.parallel.experts.token_routes import collect, route_to_experts, route_to_ranks, spread
from hetmesh.parallel.linear import local
from hetmesh.parallel.random_state import current_microbatch

INNER: Mapping[str, int] = MappingProxyType({"gate_up_proj": 2, "down_proj": 2})
"""The dim of each parameter of the experts that tensor parallelism splits."""

WITHIN: Mapping[str, int] = MappingProxyType({"gate_up_proj": 2, "down_proj": 1})
"""The dim that FSDP splits where there are more ranks than experts."""


@dataclass(frozen=True)
class ExpertLayers:
    """The mixture-of-experts blocks of one module.

    A block has a child `gate`, which gives `(logits [n, experts], weights [n, chosen], experts [n, chosen])` for tokens
    `[n, features]`, and a child `experts` with the parameters `gate_up_proj` `[experts, 2, inner, features]` (gate
    first) and `down_proj` `[experts, features, inner]`, and the activation `act_fn`. If it has a child `shared_expert`,
    every token goes through that, too, times the sigmoid of what a child `shared_expert_gate` makes of it, `[n, 1]`.

    Attributes:
        blocks: their FQNs, in execution order; all of the module, whatever stage holds them.
        count: experts of each block.
        chosen: experts of each token.
        inner: features between an expert's two products.
        balance: the weight of the load-balancing loss; 0 has none.
    """

    blocks: tuple[str, ...]
    count: int
    chosen: int
    inner: int
    features: int
    balance: float = 0.0


class LocalExperts(nn.Module):
    """The experts of this rank. `gate_up_proj` `[experts, 2, inner, features]` and `down_proj` `[experts, features,
    inner]` may be DTensors; with shares of `inner` the output is a summand over `tp`."""

    gate_up_proj: Tensor
    down_proj: Tensor
    act_fn: Callable[[Tensor], Tensor]

    def forward(self, rows: Tensor, counts: tuple[int, ...]) -> Tensor:
        """Rows `[n, features]`, expert by expert, through their experts, in the dtype of the rows."""
        first, second = (local(weight).to(rows.dtype) for weight in (self.gate_up_proj, self.down_proj))
        gate, up = grouped_linear(rows, first.flatten(1, 2), counts).chunk(2, dim=-1)
        return grouped_linear(self.act_fn(gate) * up, second, counts)


class ExpertBlock(nn.Module):
    """Takes the place of a model's class; children and their names stay.

    Attributes:
        peers: the ranks along `ep`.
        placement: the expert at each place: which ranks hold which.
        places: the place of each expert, int64 `[experts]`; None where each is at its own number.
        sharing: the ranks that share a sample's tokens (`cp`); None: this one has all.
        balances: whether this rank adds the load-balancing loss's gradient.
        enter, leave: what tensor parallelism does to rows that enter, and to a rank's summand of the output.
        shares_summand: whether what the shared expert gives is a rank's summand, too.
    """

    gate: nn.Module
    shared_expert_gate: nn.Module
    experts: LocalExperts
    layers: ExpertLayers
    number: int
    peers: ExpertRanks
    tokens: RoutedTokens
    placement: Placement
    places: Tensor | None = None
    sharing: dist.ProcessGroup | None
    balances: bool
    enter: Callable[[Tensor], Tensor] | None
    leave: Callable[[Tensor], Tensor] | None
    shares_summand: bool = False

    @not_compiled
    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., features]` -> the same; padding after the real tokens gives 0."""
        flat = hidden_states.flatten(0, -2)
        samples = self.tokens.samples
        real = flat[: len(samples.of_token)]
        logits, weights, experts = self.gate(real)
        places = experts if self.places is None else self.places[experts]
        wanted, counts = count_choices(places, self.peers.ranks, self.layers.count)
        finish = start_counts(self.peers, counts, experts.shape, current_microbatch())
        weights = self._balanced(weights, logits, experts, samples)
        out = self._routed(real, weights, places, wanted, finish)
        if padding := len(flat) - len(real):
            out = torch.cat([out, out.new_zeros(padding, out.shape[1])])
        out = out.view_as(hidden_states)
        leave = self.leave or (lambda x: x)
        if (shared := getattr(self, "shared_expert", None)) is None:
            return leave(out)
        for_all = torch.sigmoid(self.shared_expert_gate(hidden_states)) * shared(hidden_states)
        return leave(out + for_all) if self.shares_summand else leave(out) + for_all

    def _balanced(self, weights: Tensor, logits: Tensor, experts: Tensor, samples: LaneSamples) -> Tensor:
        """The routing weights, which bring the gradient of the load-balancing loss to the router."""
        if not torch.is_grad_enabled():  # nobody asks how even the routing of an evaluation is
            return weights
        choices = choices_per_sample(experts, samples, self.layers.count)
        own = choices.sum(0)
        if self.sharing is not None and choices.numel():
            sum_choices(choices, self.sharing, self.peers, current_microbatch())
        dtype = torch.promote_types(logits.dtype, torch.float32)
        probabilities = torch.softmax(logits, dim=-1, dtype=dtype)
        loss, gradient = balance_terms(probabilities, choices, samples)
        self.tokens.count(self.number, (loss, own))
        trained = any(p.requires_grad for p in self.gate.parameters())
        if not (trained and self.balances and self.layers.balance):
            return weights
        factor = self.layers.balance / len(self.layers.blocks)
        return inject(weights, probabilities, gradient * factor)

    def _routed(
        self, rows: Tensor, weights: Tensor, places: Tensor, wanted: Tensor, finish: Callable[[], RoutedCounts]
    ) -> Tensor:
        """The weighted sum over each token's experts, `[tokens, features]`; they lie at `places` `[tokens, chosen]`."""
        peers, features, chosen = self.peers, rows.shape[1], places.shape[1]
        microbatch, kind = current_microbatch(), rows.device.type
        if torch.is_autocast_enabled(kind):  # which leaves what norms give in fp32, and knows no grouped products
            rows = rows.to(torch.get_autocast_dtype(kind))
        together = torch.cat([rows, weights.to(rows.dtype)], 1)
        if self.enter is not None:
            together = self.enter(together)
        numbers = places.to(torch.int16)
        counts = finish()
        if peers.ranks > 1:
            there = route_to_ranks(wanted, sum(counts.sent), min(chosen, peers.ranks))
            sent = spread(together, there), numbers.index_select(0, there.source)
            together, numbers = send_rows(*sent, counts, peers, microbatch)
        each = self.layers.count // peers.ranks
        own = numbers.to(torch.int64) - each * peers.own
        own = torch.where((own >= 0) & (own < each), own, each)
        route, choice = route_to_experts(own, sum(counts.experts))
        computed = self.experts(spread(together[:, :features], route), counts.experts)
        weights = together[:, features:].reshape(-1).index_select(0, choice)
        sums = collect(computed * weights[:, None], route)
        if peers.ranks > 1:
            sums = collect(return_rows(sums, counts, peers, microbatch), there)
        return sums


def make_expert_block(block: Any, **attributes: Any) -> None:
    """Make a ready-made block an ExpertBlock, in place."""
    block.__class__ = ExpertBlock
    block.experts.__class__ = LocalExperts
    for name, value in attributes.items():
        setattr(block, name, value)


def grouped_linear(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Each group of rows through the linear layer of its expert.

    Args:
        rows: `[sum(counts), inputs]`, expert by expert.
        weight: `[experts, outputs, inputs]`, of the dtype of `rows`.
        counts: rows of each expert; any may be 0. An expert without rows gets a zero gradient, not none.

    Returns:
        `[rows, outputs]`.
    """
    return _GroupedLinear.apply(rows, weight, tuple(counts))


class _GroupedLinear(torch.autograd.Function):
    """One node of the graph for all experts, so that activation checkpointing keeps the same tensors however routed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        return _products(rows, weight, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        to_rows = _products(gradient, weight.transpose(1, 2), ctx.counts) if ctx.needs_input_grad[0] else None
        to_weight = _outer_products(gradient, rows, ctx.counts) if ctx.needs_input_grad[1] else None
        return to_rows, to_weight, None


def _products(rows: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
    if _on_device(rows, weight):
        return grouped_mm(rows, weight.transpose(1, 2), offs=_ends(counts, rows.device))
    groups = zip(rows.split(counts), weight.unbind(), strict=True)
    return torch.cat([torch.mm(group, own.T) for group, own in groups])


def _outer_products(gradient: Tensor, rows: Tensor, counts: tuple[int, ...]) -> Tensor:
    if _on_device(gradient, rows):
        product = grouped_mm(gradient.T, rows, offs=_ends(counts, rows.device))
        empty = [i for i, count in enumerate(counts) if not count]
        for i in empty:  # of which the kernel need not write anything
            product[i].zero_()
        return product
    return torch.stack([torch.mm(g.T, x) for g, x in zip(gradient.split(counts), rows.split(counts), strict=True)])


def _on_device(a: Tensor, b: Tensor) -> bool:
    """Whether the device's own kernel takes these: CUDA from Ampere on, bf16, rows of whole 16 bytes."""
    if a.device.type != "cuda" or a.dtype != torch.bfloat16 or grouped_mm is None or not len(a):
        return False
    aligned = all(size % 8 == 0 for matrix in (a, b) for size in matrix.shape[1:])
    return aligned and torch.cuda.get_device_capability(a.device) >= (8, 0)


def _ends(counts: tuple[int, ...], device: torch.device) -> Tensor:
    ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32)
    return ends.pin_memory().to(device, non_blocking=True)
