"""Whether what a user's module makes of a sample depends on those beside it: called with two, and with each alone, in
training and in evaluation.

Lanes and microbatches hold other samples together in every layout, so a mean over the batch, or attention that sees
padding, would train something else in each of them. Layers that are known to do so are refused by their class
(`models/batch_statistics.py`); this finds the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import Adapter, AdapterRequest
from hetmesh.models.build import build_module
from hetmesh.models.own.adapters import OwnAdapter, OwnEncoder, OwnItemsEncoder, OwnSink
from hetmesh.models.own.packing_probe import LARGEST, two_samples
from hetmesh.models.own.same_draws import SameDraws

_TOLERANCE = 1e-9

Call = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Of `adapter.forward`: a batch, and rows by source."""


def check_apart(adapter: OwnAdapter, example: nn.Module, request: AdapterRequest) -> str | None:
    """Compare both, in float64, with random weights; what is drawn is the same for every sample.

    Returns:
        Why it could not be tried, in training or in evaluation; None if it was.

    Raises:
        RecipeError: they differ; or two constructions do; or a forward writes into its rows, or changes buffers each
            time.
    """
    if sum(p.numel() for p in example.parameters()) > LARGEST:
        return f"it has more than {LARGEST:,} parameters; try a small one of the class"
    if isinstance(adapter, OwnSink) and request.vocab_size < 2:
        return "its data has no tokens"
    module, second = (build_module(adapter, request.name, 0, torch.float64) for _ in range(2))
    probe = _Probe(adapter, type(example).__name__, request)
    for (kind, name, one), (_, _, other) in zip(_tensors(module), _tensors(second), strict=True):
        if not _equal(one, other):
            raise probe.built_otherwise(f"in {kind} {name}")
    with torch.random.fork_rng(devices=[]):
        found = [probe.run(module, second, training) for training in (True, False)]
    return next((why for why in found if why is not None), None)


class _Probe:
    def __init__(self, adapter: OwnAdapter, kind: str, request: AdapterRequest) -> None:
        self.adapter, self.kind, self.request, self.key = adapter, kind, request, request.key

    def run(self, module: nn.Module, second: nn.Module, training: bool) -> str | None:
        """Why it could not be tried in this mode; None if it was."""
        module.train(training)
        second.train(training)
        together, apart = _calls(self.adapter, self.request.vocab_size)
        sink, mode = isinstance(self.adapter, OwnSink), "training" if training else "evaluation"
        rows = {source: each.clone() for source, each in together[1].items()}
        try:
            of_both = self._forward(module, together)
            if any(not torch.equal(each, together[1][source]) for source, each in rows.items()):
                raise RecipeError(
                    f"{self.key}: {self.kind} writes into the rows that it gets, which are another module's output and "
                    "may be read again: work on a copy (rows * 2, not rows.mul_(2))"
                )
            before = [(name, each.clone()) for name, each in module.named_buffers()]
            again, other = self._forward(module, together), self._forward(second, together)
        except RecipeError:
            raise
        except Exception as error:  # training says what is wrong with it, of what it really gets
            return f"in {mode} its forward of random inputs failed: {type(error).__name__}: {error!s:.200}"
        now = dict(module.named_buffers())
        changed = [name for name, each in before if name not in now or not _equal(each, now[name])]
        if training and changed:
            raise RecipeError(
                f"{self.key}: every forward of {self.kind} in training changes its buffer {changed[0]}. Lanes and "
                "microbatches hold other samples in every layout, so each would compute with other ones: leave it "
                "constant, or make it a parameter"
            )
        if not _equal(of_both, again):
            return f"in {mode} two forwards of the same input differ: it draws numbers that are not torch's, or counts"
        if not _equal(of_both, other):
            raise self.built_otherwise("in what they compute")
        try:
            of_each = torch.cat([self._forward(module, call) for call in apart])
        except Exception as error:
            if sink:  # the samples have other lengths then
                return f"in {mode} its forward of one sample failed: {type(error).__name__}: {error!s:.200}"
            raise RecipeError(
                f"{self.key}: {self.kind} fails on one sample, in {mode}, and not on two: {type(error).__name__}: "
                f"{error!s:.200}. A lane may have one alone"
            ) from error
        difference = float((of_both - of_each).abs().max())
        if not difference <= _TOLERANCE * max(float(of_both.abs().max()), 1.0):
            what = "logits of a sample" if sink else "rows of an item"
            beside = "a longer one, or padding" if sink else "another"
            raise RecipeError(
                f"{self.key}: what {self.kind} computes in {mode} is no matter of each sample alone: the {what} "
                f"differ by {difference:.2g} where {beside} is computed beside it. Lanes and microbatches hold other "
                "samples together in every layout, so each would train something else: does it take a mean or a "
                "maximum over the batch, or attend to padding?"
            )
        return None

    def built_otherwise(self, where: str) -> RecipeError:
        return RecipeError(
            f"{self.key}: two constructions of {self.kind} with the same seeds differ {where}, and so would replicas: "
            "draw from torch, numpy.random or random, which are seeded, or from generators with a seed"
        )

    def _forward(self, module: nn.Module, call: Call) -> Tensor:
        torch.manual_seed(0)
        with torch.no_grad(), SameDraws():
            return self.adapter.forward(module, *call)


def _tensors(module: nn.Module) -> list[tuple[str, str, Tensor]]:
    parameters = [("parameter", *each) for each in module.named_parameters()]
    return parameters + [("buffer", *each) for each in module.named_buffers()]


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (one != one)).all())


def two_of_its_inputs(adapter: Adapter, vocab_size: int) -> Call | None:
    """Two samples for a module that is called as users' own are; None for others."""
    if isinstance(adapter, OwnSink) and vocab_size < 2:
        return None
    return _calls(adapter, vocab_size)[0] if isinstance(adapter, OwnAdapter) else None


def _calls(adapter: OwnAdapter, vocab_size: int) -> tuple[Call, Sequence[Call]]:
    """A call with two samples, and one with each of them."""
    if isinstance(adapter, OwnSink):
        batch, inputs, lengths = two_samples(adapter, vocab_size)
        return (batch, inputs), [_one_sample(i, length, batch, inputs) for i, length in enumerate(lengths)]
    generator = torch.Generator().manual_seed(0)
    shape = _shape_of_one(adapter)
    first, second = torch.randn(2, 1, *shape, generator=generator, dtype=torch.float64)
    if isinstance(adapter, OwnItemsEncoder):
        return ({"media.0": first[0], "media.1": second[0]}, {}), [
            ({"media.0": each[0]}, {}) for each in (first, second)
        ]
    calls: list[Call] = [
        ({"media": each}, {}) if isinstance(adapter, OwnEncoder) else ({}, {"rows": each})
        for each in (torch.cat([first, second]), first, second)
    ]
    return calls[0], calls[1:]


def _shape_of_one(adapter: OwnAdapter) -> tuple[int, ...]:
    if isinstance(adapter, OwnItemsEncoder):
        return adapter.blank
    return adapter.media_shape if isinstance(adapter, OwnEncoder) else (adapter.in_features or 1,)


def _one_sample(i: int, length: int, batch: dict[str, Tensor], inputs: dict[str, Tensor]) -> Call:
    """Sample `i` of two, without the padding of the shorter one."""
    width = batch["input_ids"].shape[1]
    out = {key: batch[key][i : i + 1, :length] for key in ("input_ids", "position_ids")}
    half = len(batch["targets"]) // 2
    out["targets"] = batch["targets"][half * i : half * (i + 1)]
    out["target_positions"] = batch["target_positions"][half * i : half * (i + 1)] - width * i
    out |= {key: at[i : i + 1] - width * i for key, at in batch.items() if key.startswith("positions.")}
    return out, {source: rows[i : i + 1] for source, rows in inputs.items()}
