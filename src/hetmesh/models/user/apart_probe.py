"""Whether what a user's module makes of a sample, or its gradients, depend on those beside it: called with several, and
with each alone, in training and in evaluation.

Lanes and microbatches hold other samples together in every layout, so a mean over the batch, or attention that sees
padding, would train something else in each of them. Layers that are known to do so are refused by their class
(`models/batch_statistics.py`); this finds the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hetmesh._torch_compat import has_gradient_hooks
from hetmesh.errors import RecipeError
from hetmesh.models.adapter import Adapter, AdapterRequest
from hetmesh.models.build import build_module
from hetmesh.models.user.adapters import UserAdapter, UserEncoder, UserItemsEncoder, UserSink
from hetmesh.models.user.packing_probe import LARGEST, two_samples
from hetmesh.models.user.same_draws import SameDraws

_TOLERANCE = 1e-9
_OF_SUMS = 1e-3  # of gradients: a module may compute in float32, whose sums over samples are rounded in another order

Call = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Of `adapter.forward`: a batch, and rows by source."""


def check_apart(adapter: UserAdapter, example: nn.Module, request: AdapterRequest) -> str | None:
    """Compare both, in float64, with random weights; what is drawn is the same for every sample.

    Returns:
        Why it could not be tried, in training or in evaluation; None if it was.

    Raises:
        RecipeError: they differ, or two constructions do, or a forward writes into its rows.
    """
    if sum(p.numel() for p in example.parameters()) > LARGEST:
        return f"it has more than {LARGEST:,} parameters; try a small one of the class"
    if isinstance(adapter, UserSink) and request.vocab_size < 2:
        return "its data has no tokens"
    modules = [build_module(adapter, request.name, 0, torch.float64) for _ in range(2)]
    where = f"{request.key}: {type(example).__name__}"
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        found = [_try(adapter, modules, training, request.vocab_size, where) for training in (True, False)]
    return found[0] or found[1]


def _try(adapter: UserAdapter, modules: list[nn.Module], training: bool, vocab_size: int, where: str) -> str | None:
    """`check_apart` in one of the modes, of two modules that should be equal."""

    def forward(module: nn.Module, call: Call) -> Tensor:
        torch.manual_seed(0)
        with SameDraws():
            return adapter.forward(module.train(training), *call)

    (together, apart), (unwritten, _) = (calls_of(adapter, vocab_size) for _ in range(2))
    sink, mode = isinstance(adapter, UserSink), "training" if training else "evaluation"
    try:
        of_both, again, other = (forward(module, together) for module in (modules[0], *modules))
    except Exception as error:  # training says what is wrong with it, of what it really gets
        return f"in {mode} its forward of random inputs failed: {type(error).__name__}: {error!s:.200}"
    if any(not torch.equal(rows, unwritten[1][source]) for source, rows in together[1].items()):
        raise RecipeError(f"{where} writes into the rows that it gets, which others read too: take rows * 2, not mul_")
    if not torch.equal(of_both, again):
        return f"in {mode} two forwards of the same input differ: it draws numbers that are not torch's, or counts"
    if training and not torch.equal(of_both, other):
        raise RecipeError(
            f"{where}, constructed twice with the same seeds, computes something else, so replicas would: draw from "
            "torch, numpy.random or random, which are seeded, or give a generator a seed"
        )
    try:
        of_each = torch.cat([forward(modules[0], call) for call in apart])
    except Exception as error:
        told = f"{type(error).__name__}: {error!s:.200}"
        if sink:  # the samples have other lengths then
            return f"in {mode} its forward of one sample failed: {told}"
        raise RecipeError(f"{where} fails on one sample, in {mode}, and not on two: {told}") from error
    difference = float((of_both - of_each).abs().max())
    if not difference <= _TOLERANCE * max(float(of_both.abs().max()), 1.0):
        what = "logits of a sample" if sink else "rows of an item"
        beside = "a longer one, or padding" if sink else "another"
        raise RecipeError(
            f"{where} computes in {mode} what is no matter of each sample alone: the {what} differ by "
            f"{difference:.2g} where {beside} is computed beside it. Lanes and microbatches hold other samples "
            "together in every layout, so each would train something else: does it take a mean or a maximum over the "
            "batch, or attend to padding?"
        )
    return _gradients(modules[0], forward, (together, *apart), where) if training else None


def _gradients(
    module: nn.Module, forward: Callable[[nn.Module, Call], Tensor], calls: Sequence[Call], where: str
) -> str | None:
    """Compare the gradients of a call with all samples with the sums of those of each: hooks on activations, autograd
    functions and branches under `torch.is_grad_enabled` mix samples where a forward without gradients does not."""
    found: list[dict[str, Tensor]] = []
    weights, at = torch.zeros(()), 0
    for call, (batch, inputs) in enumerate(calls):
        module.zero_grad()
        rows = {source: given.detach().requires_grad_() for source, given in inputs.items()}
        try:
            with torch.enable_grad():
                out = forward(module, (batch, {source: given.clone() for source, given in rows.items()}))
                if not out.requires_grad:
                    return None
                if call == 0:
                    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
                with SameDraws():
                    (out * weights[at : at + len(out)]).sum().backward()
        except Exception as error:
            return f"in training its backward failed: {type(error).__name__}: {error!s:.200}"
        at += len(out) if call else 0
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        found.append({name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for name, p in named})
        found[-1] |= {f"the rows of {source}": given.grad for source, given in rows.items() if given.grad is not None}
    if hooked := [name for name, parameter in module.named_parameters() if has_gradient_hooks(parameter)]:
        raise RecipeError(f"{where} sets a gradient hook on its parameter {hooked[0]}, which no layout keeps")
    of_all, *of_each = found
    largest = max((float(gradient.abs().max()) for gradient in of_all.values() if gradient.numel()), default=0.0)
    for name, gradient in of_all.items():
        each = [gradients[name] for gradients in of_each]
        apart = torch.cat(each) if name.startswith("the rows of") else sum(each)
        difference = float((gradient - apart).abs().max()) if gradient.numel() else 0.0
        if gradient.numel() and not difference <= _OF_SUMS * max(float(gradient.abs().max()), 1e-2 * largest):
            raise RecipeError(
                f"{where} computes in training gradients that are no sums over samples: that of {name} differs by "
                f"{difference:.2g} where another sample is computed beside it. Lanes and microbatches hold other "
                "samples together in every layout: does a hook or an autograd function normalise gradients, or take a "
                "mean over the batch?"
            )
    return None


def two_of_its_inputs(adapter: Adapter, vocab_size: int) -> Call | None:
    """Two samples for a module that is called as users' own are; None for others."""
    if isinstance(adapter, UserSink) and vocab_size < 2:
        return None
    return calls_of(adapter, vocab_size)[0] if isinstance(adapter, UserAdapter) else None


def calls_of(adapter: UserAdapter, vocab_size: int) -> tuple[Call, Sequence[Call]]:
    """A call with several samples (two of an LLM, three of others), and one with each of them."""
    if isinstance(adapter, UserSink):
        batch, inputs, lengths = two_samples(adapter, vocab_size)
        return (batch, inputs), [_one_sample(i, length, batch, inputs) for i, length in enumerate(lengths)]
    generator = torch.Generator().manual_seed(0)
    shape = _shape_of_one(adapter)
    samples = torch.randn(3, 1, *shape, generator=generator, dtype=torch.float64)
    if isinstance(adapter, UserItemsEncoder):
        return ({f"media.{i}": sample[0] for i, sample in enumerate(samples)}, {}), [
            ({"media.0": sample[0]}, {}) for sample in samples
        ]
    calls: list[Call] = [
        ({"media": some}, {}) if isinstance(adapter, UserEncoder) else ({}, {"rows": some})
        for some in (samples.flatten(0, 1), *samples)
    ]
    return calls[0], calls[1:]


def _shape_of_one(adapter: UserAdapter) -> tuple[int, ...]:
    if isinstance(adapter, UserItemsEncoder):
        return adapter.blank
    return adapter.media_shape if isinstance(adapter, UserEncoder) else (adapter.in_features or 1,)


def _one_sample(i: int, length: int, batch: dict[str, Tensor], inputs: dict[str, Tensor]) -> Call:
    """Sample `i` of two, without the padding of the shorter one."""
    width = batch["input_ids"].shape[1]
    out = {key: batch[key][i : i + 1, :length] for key in ("input_ids", "position_ids")}
    half = len(batch["targets"]) // 2
    out["targets"] = batch["targets"][half * i : half * (i + 1)]
    out["target_positions"] = batch["target_positions"][half * i : half * (i + 1)] - width * i
    out |= {key: at[i : i + 1] - width * i for key, at in batch.items() if key.startswith("positions.")}
    return out, {source: rows[i : i + 1] for source, rows in inputs.items()}
