"""The parity harness's other truth, for models that were split: transformers' own whole model in one process."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hetmesh.graph.sample import SampleMeta
from hetmesh.models import pretrained_of
from hetmesh.models.split.encoder_half import HfEncoderAdapter
from hetmesh.models.split.llm_half import use_loop_in_fp64
from hetmesh.models.split.whole_forward import load_whole, whole_logits
from hetmesh.models.split.whole_model import PROJECTOR, whole_model
from hetmesh.models.weights.build import build_on_meta
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.parity import Outcome, descend
from hetmesh.testing.precision import exact_dtypes
from hetmesh.verify.processor_check import by_transformers
from support.trained import trains

T = TypeVar("T", Tensor, Tensor | None)


def whole_reference(recipe: Recipe, steps: int = 3, lr: float = 0.1, *, processed: bool = False) -> Outcome:
    """Like `parity.reference`, but of the model that transformers itself loads from the recipe's directory, by its own
    forward: its own merge of rows, positions, masks and head, one sample at a time. It shares nothing with the run
    under test but the data. Frozen modules are frozen.

    Parameters have the names that they have in the run: of their module, and in the model; and their shapes there.

    Args:
        processed: of the samples of conversations, too, only targets come from the run: the model is given all that the
            directory's processor makes of the messages.
    """
    resolved = resolve(recipe)
    adapters, graph, loader = resolved.adapters, resolved.graph, resolved.loader()
    pretrained = pretrained_of(recipe.llm, recipe.modules[recipe.llm])
    assert pretrained is not None
    whole = whole_model(pretrained)
    dtype = {"float32": torch.float32, "float64": torch.float64}[recipe.training.dtype]
    model = load_whole(whole).to(dtype)  # from fp32, so that constants are rounded as the run has them
    use_loop_in_fp64(model)
    encoders = {
        b.at: adapter
        for b in graph.inputs(graph.llm.name)
        for name in (b.source, *(before.source for before in graph.inputs(b.source)))
        if b.at is not None and isinstance(adapter := adapters[name], HfEncoderAdapter)
    }
    owners = whole.owners_apart if PROJECTOR in recipe.modules else whole.owners
    parameters = {f"{owners[name]}.{name}": p for name, p in model.named_parameters()}
    declared = dict(whole.model.named_parameters())  # sinusoidal positions are not trained, which loading forgets
    for name, p in parameters.items():
        part, _, inside = name.partition(".")
        p.requires_grad_(declared[inside].requires_grad and trains(recipe.modules[part], inside))

    def step() -> float:
        drawn = next(loader)
        samples, metas = loader.load(drawn), [d.meta for d in drawn]
        count = max(sum(meta.num_targets for meta in metas), 1)
        total = 0.0
        for sample, meta in zip(samples, metas, strict=True):
            if not meta.num_targets:
                continue
            if processed:
                source = resolved.source
                index = next(i for i in range(len(source)) if source.meta(i).id == sample.id)
                typed = "mm_token_type_ids" in inspect.signature(model.forward).parameters
                more = {"return_mm_token_type_ids": True} if typed else {}  # some have it by default
                logits = _logits(model, by_transformers(source, source.preparation, index, **more), meta)
            else:
                logits = whole_logits(whole, model, encoders, sample, meta)
            targets = torch.cat([sample.tokens[a:b] for a, b in meta.targets])
            loss = nn.functional.cross_entropy(logits, targets, reduction="sum") / count
            loss.backward()
            total += loss.item()
        return total

    model.train()
    with exact_dtypes(model, every_cast=True):
        found = descend(_held(parameters), step, steps, lr)
    modules = {name: build_on_meta(adapter) for name, adapter in adapters.items()}
    shapes = {f"{n}.{k}": p.shape for n, m in modules.items() if m is not None for k, p in m.named_parameters()}
    return Outcome(found.losses, _in_shapes(found.gradients, shapes), _in_shapes(found.parameters, shapes))


def _logits(model: nn.Module, made: Mapping[str, Any], meta: SampleMeta) -> Tensor:
    dtype = next(p.dtype for p in model.parameters())
    given = {key: _cast(value, dtype) for key, value in made.items() if key != "labels"}
    logits = model(**given, use_cache=False).logits[0]
    return torch.cat([logits[start - 1 : stop - 1] for start, stop in meta.targets])


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return [_cast(each, dtype) for each in value]
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _in_shapes(tensors: Mapping[str, T], shapes: Mapping[str, torch.Size]) -> dict[str, T]:
    """Experts with gate and up as two tensors, in whose memory the values lie in the same order."""
    return {name: t if t is None else t.reshape(shapes.get(name, t.shape)) for name, t in tensors.items()}


def _held(parameters: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    return {name: p for name, p in parameters.items() if isinstance(p, nn.Parameter)}
