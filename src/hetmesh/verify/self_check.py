"""Whether the modules of a recipe compute what transformers computes from the same directory, on a few samples.

One process, fp32. The whole model is loaded by transformers and called by its own forward, one sample at a time; the
modules are loaded, fed and called as a run of one rank does it. An error names the first module that differs.

The bound on differences is relative, row by row, so that small logits are compared as sharply as large ones. Rounding
grows with depth and with weights that saturate attention, by an unknown factor: transformers' decoder is called once
more, with inputs that differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hetmesh.data.loader import DrawnBatch, Loader
from hetmesh.errors import RecipeError, SampleError, SelfCheckError
from hetmesh.graph import ModuleGraph
from hetmesh.inference.one_process import OneProcess, on_one_rank
from hetmesh.models import AdapterRequest, placeholder_rows
from hetmesh.models.named.causal_lm import CausalLMAdapter
from hetmesh.models.split.encoder_half import HfEncoderAdapter
from hetmesh.models.split.whole_forward import load_whole, whole_logits
from hetmesh.models.split.whole_model import TOWERS, WholeModel, whole_model
from hetmesh.recipe.hf_path import PLACEHOLDER_KEYS
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.directories import directory_of
from hetmesh.resolve.modules import loaded_module
from hetmesh.resolve.resolved import resolve
from hetmesh.verify.self_check import check_close, relative
from hetmesh.verify.self_check_samples import self_check_source

NOT_COMPARED = (
    "on short random samples (text alone, one item, several) in fp32 and one process; not compared: prompts, what a "
    "processor makes of files, longer samples, other precisions and layouts"
)
"""What the result covers."""

TOLERANCE = 1e-5
"""Largest relative difference of a row where rounding does not grow: 48 random layers were measured at 3e-6."""

LARGEST = 1e-3
"""No bound is larger: where rounding alone may change more, the comparison would say nothing."""

PERTURBATION = 2.0**-22
"""Relative size of a change of the decoder's inputs: two units in the last place of fp32."""

NOISE_FACTOR = 4.0
"""What two orders of computing may change, as a multiple of what `PERTURBATION` changes: 0.02 to 1.2 was
measured, with 3 to 48 layers and weights of deviation 0.2 and 1."""


@dataclass
class Values:
    """What transformers or the modules computed, by kind of sample; for the modules the kind is empty.

    Attributes:
        rows: of all items of a placeholder, `[rows, features]`, by `(kind, placeholder)`.
        hidden: what the head takes for the targets, `[targets, features]`.
        logits: of the targets, `[targets, vocab]`.
        noise: how much of the hidden states and of the logits rounding may change, by kind of sample.
    """

    rows: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    hidden: dict[str, Tensor] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)
    noise: dict[str, tuple[float, float]] = field(default_factory=dict)


def self_check(recipe: Recipe) -> float:
    """Compare; returns the largest difference of a logit.

    Raises:
        SelfCheckError: the modules compute something else; says which module, and by how much.
        RecipeError: the recipe's modules do not all come from one directory of a multimodal model.
    """
    pretrained = directory_of(recipe)
    if pretrained is None:
        raise RecipeError(
            "there is nothing to compare the weights with: the modules do not all come from one directory of a "
            "multimodal model of transformers, such as [model] hf_path names"
        )
    whole = whole_model(pretrained)
    encoders = _encoders(recipe, whole)
    placeholders = {at: _placeholder(whole, each.media) for at, each in encoders.items()}
    shapes: dict[str, Sequence[tuple[int, ...]]] = {at: [each.call.blank] for at, each in encoders.items()}
    around = {at: whole.around[each.media] for at, each in encoders.items() if each.media in whole.around}
    dims = {at: each.call.size_dims for at, each in encoders.items()}
    source = self_check_source(whole.config, shapes, placeholders, dims, around)
    training = {"local_batch_size": len(source), "pack_samples": recipe.training.pack_samples, "dtype": "float32"}
    alone = on_one_rank(recipe, **training)
    resolved = resolve(alone, source)
    graph = resolved.graph
    for at, rows in placeholder_rows(graph, resolved.adapters).items():
        shapes[at] = _compare_rows_of_items(whole, encoders[at], rows, f"{_chain(graph, at)}: ")
    source = self_check_source(whole.config, shapes, placeholders, dims, around)
    resolved = resolve(alone, source)
    loader = Loader(source, len(source), resolved.expander, shuffle=False)
    drawn = loader.batch(0)
    with torch.no_grad():
        expected = _by_transformers(whole, encoders, loader, drawn)
        modules = {name: loaded_module(alone, resolved.adapters[name], name) for name in graph.order}
        model = OneProcess(resolved, modules, torch.device("cpu"))
        return _compare(expected, _by_modules(model, loader, drawn), graph)


def _encoders(recipe: Recipe, whole: WholeModel) -> dict[str, HfEncoderAdapter]:
    """By placeholder how its items are handed to the whole model, whatever adapters the recipe names."""
    found: dict[str, HfEncoderAdapter] = {}
    for name, media in recipe.wiring.media.items():
        if media is not None and TOWERS.get(media) in whole.towers:
            (at,) = recipe.wiring.topology.placeholders(name)
            request = AdapterRequest(
                name, media=media, consumers=(recipe.sink,), model="hf_encoder", pretrained=whole.pretrained
            )
            found[at] = HfEncoderAdapter.make(request)
    return found


def _placeholder(whole: WholeModel, media: str) -> int:
    for key in PLACEHOLDER_KEYS[media]:
        if isinstance(number := getattr(whole.config, key, None), int):
            return number
    raise RecipeError(f"{whole.pretrained}: its config.json does not say which token stands for {media!r}")


def _compare_rows_of_items(
    whole: WholeModel, encoder: HfEncoderAdapter, rows: Callable[[tuple[int, ...]], int], what: str
) -> list[tuple[int, ...]]:
    """The shapes of a small and a larger item, or of those that the modules take."""
    taken = []
    for shape in (encoder.call.blank, encoder.call.larger):
        try:
            ours, theirs = rows(shape), encoder.item_rows(shape)
        except SampleError:
            continue
        if ours != theirs:
            raise SelfCheckError(
                f"{what}{ours} rows for an item of shape {shape}, {whole.model_class.__name__} makes {theirs} of it"
            )
        taken.append(shape)
    if not taken:
        raise SelfCheckError(f"{what}they take no item of shape {encoder.call.blank}, as the model does")
    return taken


def _chain(graph: ModuleGraph, at: str) -> str:
    """The modules that rows at a placeholder come through."""
    names = [next(b.source for b in graph.inputs(graph.sink.name) if b.at == at)]
    while inputs := graph.inputs(names[0]):
        names.insert(0, inputs[0].source)
    return f"module {names[0]!r}" if len(names) == 1 else "modules " + " and ".join(map(repr, names))


def _by_transformers(
    whole: WholeModel, encoders: Mapping[str, HfEncoderAdapter], loader: Loader, drawn: DrawnBatch
) -> Values:
    model = load_whole(whole).eval()
    values, inputs_of_head = Values(), list[Tensor]()
    model.get_submodule(whole.head).register_forward_pre_hook(lambda _, args: inputs_of_head.append(args[0]))
    for sample, meta in zip(loader.load(drawn), drawn.metas, strict=True):
        try:
            values.logits[meta.id] = whole_logits(whole, model, encoders, sample, meta)
            hidden = inputs_of_head.pop()[0]
            with perturbed(model.get_submodule(whole.decoder)):
                other_logits = whole_logits(whole, model, encoders, sample, meta)
            other = inputs_of_head.pop()[0]
        except Exception as error:  # whatever the model makes of samples that its config does not allow
            raise RecipeError(
                f"{whole.pretrained}: transformers' own forward fails for {meta.id}: {_in_one_line(error)}"
            ) from error
        predicting = torch.cat([torch.arange(start - 1, stop - 1) for start, stop in meta.targets])
        values.hidden[meta.id] = hidden[predicting]
        of_logits = relative(other_logits, values.logits[meta.id])
        values.noise[meta.id] = relative(other[predicting], hidden[predicting]), of_logits
        for at, encoder in encoders.items():
            if items := sample.media.get(at, ()):
                batch = encoder.call.collate(items, [item.size for item in meta.media if item.name == at])
                rows = encoder.encode(model, batch)[""]
                values.rows[meta.id, at] = rows[: sum(i.rows for i in meta.media if i.name == at)]
    return values


def _by_modules(model: OneProcess, loader: Loader, drawn: DrawnBatch) -> list[tuple[list[str], Values]]:
    """Of each kind of sample alone, and of all in one batch: their kinds, and the values, one after the other."""
    found, graph, sink = [], model.resolved.graph, model.resolved.graph.sink.name
    llm: Any = model.resolved.adapters[sink]
    inputs_of_head: list[Tensor] = []
    if isinstance(llm, CausalLMAdapter):
        head = llm.head_of(model.modules[sink])
        head.register_forward_pre_hook(lambda _, args: inputs_of_head.append(args[0]))
    for batch in (*(drawn[i : i + 1] for i in range(len(drawn))), drawn):
        kinds, feed, outputs = [sample.meta.id for sample in batch], model.feed(loader, batch), dict[str, Tensor]()
        for name in graph.order:
            try:
                model.run(name, feed, outputs)
            except Exception as error:  # whatever the model makes of what it is called with
                raise SelfCheckError(f"module {name!r} fails for {', '.join(kinds)}: {_in_one_line(error)}") from error
        values = Values(logits={"": outputs[sink]})
        if inputs_of_head:
            values.hidden[""] = inputs_of_head[0].reshape(-1, inputs_of_head[0].shape[-1])
            inputs_of_head.clear()
        media = [b for b in graph.inputs(sink) if b.at is not None and not b.output]
        values.rows = {("", str(b.at)): outputs[b.key] for b in media}
        found.append((kinds, values))
    return found


def _compare(expected: Values, given: list[tuple[list[str], Values]], graph: ModuleGraph) -> float:
    largest = 0.0
    for kinds, values in given:
        where = kinds[0] if len(kinds) == 1 else "all kinds of samples in one batch"
        for (_, at), rows in values.rows.items():
            if items := [expected.rows[kind, at] for kind in kinds if (kind, at) in expected.rows]:
                check_close(rows, torch.cat(items), f"{_chain(graph, at)}: its rows for {where}")
        llm, noise = f"module {graph.sink.name!r}", [expected.noise[kind] for kind in kinds]
        if "" in values.hidden:
            hidden, what = (
                torch.cat([expected.hidden[kind] for kind in kinds]),
                f"{llm}: its decoder's output for {where}",
            )
            check_close(values.hidden[""], hidden, what, max(of_hidden for of_hidden, _ in noise))
        logits, what = torch.cat([expected.logits[kind] for kind in kinds]), f"{llm}: its head's logits for {where}"
        check_close(values.logits[""], logits, what, max(of_logits for _, of_logits in noise))
        largest = max(largest, float((values.logits[""] - logits).abs().max()))
    return largest


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextmanager
def perturbed(decoder: nn.Module) -> Iterator[None]:
    """While it lasts, the embedded tokens that `decoder` is given are changed by as much as rounding does."""

    def perturb(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = given.get("inputs_embeds")
        if tokens is not None:
            draw = torch.Generator().manual_seed(0)
            given = {**given, "inputs_embeds": tokens * (1 + PERTURBATION * torch.randn(tokens.shape, generator=draw))}
        return args, given

    handle = decoder.register_forward_pre_hook(perturb, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def relative(given: Tensor, expected: Tensor) -> float:
    """The largest difference of a row `[..., features]`, of its own norm; rows close to zero, of the largest row's."""
    if not expected.numel():
        return 0.0
    norms = torch.linalg.vector_norm(expected.double(), dim=-1)
    floor = max(float(norms.max()) * 1e-3, torch.finfo(torch.float32).tiny)
    difference = torch.linalg.vector_norm((given - expected).double(), dim=-1)
    return float((difference / norms.clamp(min=floor)).max())


def check_close(given: Tensor, expected: Tensor, what: str, noise: float = 0.0) -> None:
    """That `given` is `expected`, rows of features, but for rounding.

    Args:
        what: what it is, for errors.
        noise: what changed of `expected` when its inputs were `perturbed`, as `relative` gives it.

    Raises:
        SelfCheckError: it is not, or rounding alone may change so much that it cannot be known.
    """
    if given.shape != expected.shape:
        raise SelfCheckError(f"{what} have shape {tuple(given.shape)}, transformers' {tuple(expected.shape)}")
    found, bound = relative(given, expected), max(TOLERANCE, NOISE_FACTOR * noise)
    if found <= min(bound, LARGEST):
        return
    far = float((given - expected).abs().max())
    says = f"{what} differ from transformers' by up to {far:.1e}, {found:.1e} of a row's size; at most "
    if found <= bound:
        raise SelfCheckError(
            f"{says}{LARGEST:g} is accepted, although with these weights rounding of the tokens alone changes "
            f"{noise:.1e}: compare it with weights that are not random"
        )
    raise SelfCheckError(f"{says}{min(bound, LARGEST):.0e} would be rounding")
