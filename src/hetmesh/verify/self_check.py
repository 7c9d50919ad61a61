"""Whether the modules of a recipe compute what transformers computes from the same directory, on a few samples.

One process, fp32. The whole model is loaded by transformers and called by its own forward, one sample at a time; the
modules are loaded, fed and called as a run of one rank does it. An error names the first module that differs.

The bound on differences is relative, row by row, so that small logits are compared as sharply as large ones. Rounding
grows with depth and with weights that saturate attention, by an unknown factor: transformers' decoder is called once
more, with inputs that differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetmesh.data.drawn import DrawnBatch
from hetmesh.data.loader import Loader
from hetmesh.data.preparation import Preparation
from hetmesh.errors import RecipeError, SampleError, SelfCheckError
from hetmesh.graph import ModuleGraph
from hetmesh.graph.sample import kinds_of
from hetmesh.models import AdapterRequest, placeholder_rows
from hetmesh.models.named.causal_lm import CausalLMAdapter
from hetmesh.models.split.encoder_half import HfEncoderAdapter
from hetmesh.models.split.units import MADE, taken
from hetmesh.models.split.whole_forward import load_whole, whole_logits
from hetmesh.models.split.whole_model import TOWERS, WholeModel, whole_model
from hetmesh.recipe.hf_path import PLACEHOLDER_KEYS
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.directories import directory_of, up_to_llm
from hetmesh.resolve.modules import loaded_module
from hetmesh.resolve.resolved import resolve
from hetmesh.training.one_process import OneProcess, on_one_rank
from hetmesh.verify.self_check_samples import processed_samples, self_check_source

NOT_COMPARED = (
    "on short random samples (text alone, one item, several) in fp32 and one process; not compared: prompts, what a "
    "processor makes of files, longer samples, other precisions and layouts"
)
"""What the result covers."""

TOLERANCE = 1e-5
"""Largest relative difference of a row where rounding does not grow: 48 random layers were measured at 3e-6."""

MAX_TOLERANCE = 1e-3
"""No bound is larger: where rounding alone may change more, the comparison would say nothing."""

PERTURBATION = 2.0**-22
"""Relative size of a change of the decoder's inputs: two units in the last place of fp32."""

NOISE_FACTOR = 4.0
"""What two orders of computing may change, as a multiple of what `PERTURBATION` changes: 0.02 to 1.2 was
measured, with 3 to 48 layers and weights of deviation 0.2 and 1."""


@dataclass
class Values:
    """What transformers or the modules computed for one sample, or the modules for a batch.

    Attributes:
        logits: of the targets, `[targets, vocab]`.
        hidden: the input of the head for the targets, `[targets, features]`; None where the LLM has no separate head.
        rows: of all items by placeholder, `[rows, features]`.
        noise: how much rounding may change of the hidden states and of the logits.
    """

    logits: Tensor
    hidden: Tensor | None
    rows: dict[str, Tensor]
    noise: tuple[float, float] = (0.0, 0.0)


def self_check(recipe: Recipe) -> float:
    """Compare; returns the largest difference of a logit.

    Raises:
        SelfCheckError: the modules compute something else; says which module, and by how much.
        RecipeError: the recipe's modules do not all come from one directory of a multimodal model.
    """
    recipe = up_to_llm(recipe)
    pretrained = directory_of(recipe)
    if pretrained is None:
        raise RecipeError(
            "there is nothing to compare the weights with: the modules do not all come from one directory of a "
            "multimodal model of transformers, such as [model] hf_path names"
        )
    whole = whole_model(pretrained)
    encoders = _encoders(recipe, whole)
    placeholders = {at: _placeholder(whole, kinds_of(encoder.media)[0]) for at, encoder in encoders.items()}
    kinds = {at: encoder.media for at, encoder in encoders.items()}
    processed = bool(kinds) and all(encoder.units is not None for encoder in encoders.values())
    if processed:
        read = [kind for media in kinds.values() for kind in kinds_of(media)]
        options = recipe.data.options if recipe.data.source == "conversations" else {}
        template = options.get("chat_template")
        source = processed_samples(Preparation(pretrained.path, {}, template, "[data.options]"), read)
    else:
        shapes = {at: encoder.item for at, encoder in encoders.items() if encoder.item is not None}
        if without := sorted(encoders.keys() - shapes.keys()):
            raise RecipeError(f"{whole.pretrained}: its processor prepares {without} alone, which cannot be compared")
        source = self_check_source(whole.config, shapes, placeholders)
    training = {"local_batch_size": len(source), "pack_samples": recipe.training.pack_samples, "dtype": "float32"}
    alone = on_one_rank(recipe, **training)
    resolved = resolve(alone, source)
    graph = resolved.graph
    if not processed:
        for at, rows in placeholder_rows(graph, resolved.adapters).items():
            _compare_rows_of_an_item(whole, encoders[at], rows, f"{_chain(graph, at)}: ")
    loader = Loader(source, len(source), resolved.expander, shuffle=False)
    drawn = loader.batch(0)
    with torch.no_grad():
        expected = _by_transformers(whole, encoders, loader, drawn)
        modules = {name: loaded_module(alone, resolved.adapters[name], name) for name in graph.order}
        model = OneProcess(resolved, modules, torch.device("cpu"))
        return _compare(expected, _by_modules(model, loader, drawn), graph)


def _encoders(recipe: Recipe, whole: WholeModel) -> dict[str, HfEncoderAdapter]:
    """By placeholder how its items are handed to the whole model, whatever adapters the recipe names."""
    encoders: dict[str, HfEncoderAdapter] = {}
    for name, media in recipe.wiring.media.items():
        if media is not None and TOWERS.get(kinds_of(media)[0]) in whole.towers:
            (at,) = recipe.wiring.topology.placeholders(name)
            request = AdapterRequest(
                name, media=media, consumers=(recipe.llm,), model="hf_encoder", pretrained=whole.pretrained
            )
            encoders[at] = HfEncoderAdapter.make(request)
    return encoders


def _placeholder(whole: WholeModel, media: str) -> int:
    for key in PLACEHOLDER_KEYS[media]:
        if isinstance(number := getattr(whole.config, key, None), int):
            return number
    raise RecipeError(f"{whole.pretrained}: its config.json does not say which token stands for {media!r}")


def _compare_rows_of_an_item(
    whole: WholeModel, encoder: HfEncoderAdapter, rows: Callable[[tuple[int, ...]], int], what: str
) -> None:
    assert encoder.item is not None
    try:
        ours, theirs = rows(encoder.item), encoder.item_rows(encoder.item)
    except SampleError as error:
        raise SelfCheckError(f"{what}they take no item of shape {encoder.item}, as the model does: {error}") from error
    if ours != theirs:
        raise SelfCheckError(
            f"{what}{ours} rows for an item of shape {encoder.item}, {whole.model_class.__name__} makes {theirs} of it"
        )


def _chain(graph: ModuleGraph, at: str) -> str:
    """The modules that rows at a placeholder come through."""
    names = [next(b.source for b in graph.inputs(graph.llm.name) if b.at == at)]
    while inputs := graph.inputs(names[0]):
        names.insert(0, inputs[0].source)
    return f"module {names[0]!r}" if len(names) == 1 else "modules " + " and ".join(map(repr, names))


def _by_transformers(
    whole: WholeModel, encoders: Mapping[str, HfEncoderAdapter], loader: Loader, drawn: DrawnBatch
) -> dict[str, Values]:
    """The values of each sample, by its kind."""
    model, values = load_whole(whole).eval(), dict[str, Values]()
    inputs_of_head: list[Tensor] = []
    model.get_submodule(whole.head).register_forward_pre_hook(lambda _, args: inputs_of_head.append(args[0]))
    for sample, meta in zip(loader.load(drawn), drawn.metas, strict=True):
        try:
            logits = whole_logits(whole, model, encoders, sample, meta)
            with perturbed(model.get_submodule(whole.decoder)):
                other_logits = whole_logits(whole, model, encoders, sample, meta)
        except Exception as error:  # whatever the model makes of samples that its config does not allow
            raise RecipeError(
                f"{whole.pretrained}: transformers' own forward fails for {meta.id}: {_in_one_line(error)}"
            ) from error
        predicting = torch.cat([torch.arange(start - 1, stop - 1) for start, stop in meta.targets])
        hidden, other = (inputs[0][predicting] for inputs in inputs_of_head)
        inputs_of_head.clear()
        rows = {}
        for at, encoder in encoders.items():
            if n_rows := sum(item.rows for item in meta.media if item.name in kinds_of(encoder.media)):
                batch = encoder.collate([sample], [meta])
                made = encoder.encode(model, batch)[""]
                rows[at] = taken(made, batch) if MADE in batch else made[:n_rows]
        values[meta.id] = Values(logits, hidden, rows, (relative(other, hidden), relative(other_logits, logits)))
    return values


def _by_modules(model: OneProcess, loader: Loader, drawn: DrawnBatch) -> list[tuple[list[str], Values]]:
    """The kinds and values of each sample alone, and last of all in one batch."""
    computed, graph, decoder = [], model.resolved.graph, model.resolved.graph.llm.name
    llm: Any = model.resolved.adapters[decoder]
    inputs_of_head: list[Tensor] = []
    if isinstance(llm, CausalLMAdapter):
        head = llm.head_of(model.modules[decoder])
        head.register_forward_pre_hook(lambda _, args: inputs_of_head.append(args[0]))
    for batch in (*(drawn[i : i + 1] for i in range(len(drawn))), drawn):
        kinds, feed, outputs = [sample.meta.id for sample in batch], model.feed(loader, batch), dict[str, Tensor]()
        for name in graph.order:
            try:
                model.run(name, feed, outputs)
            except Exception as error:  # whatever the model makes of what it is called with
                raise SelfCheckError(f"module {name!r} fails for {', '.join(kinds)}: {_in_one_line(error)}") from error
        hidden = inputs_of_head[0].reshape(-1, inputs_of_head[0].shape[-1]) if inputs_of_head else None
        inputs_of_head.clear()
        media = {b.at: outputs[b.key] for b in graph.inputs(decoder) if b.at is not None and not b.output}
        computed.append((kinds, Values(outputs[decoder], hidden, media)))
    return computed


def _compare(expected: Mapping[str, Values], computed: list[tuple[list[str], Values]], graph: ModuleGraph) -> float:
    largest, llm = 0.0, f"module {graph.llm.name!r}"
    for kinds, values in computed:
        where = kinds[0] if len(kinds) == 1 else "all kinds of samples in one batch"
        samples = [expected[kind] for kind in kinds]
        for at, rows in values.rows.items():
            if items := [sample.rows[at] for sample in samples if at in sample.rows]:
                check_close(rows, torch.cat(items), f"{_chain(graph, at)}: its rows for {where}")
        if values.hidden is not None:
            hidden = torch.cat([sample.hidden for sample in samples if sample.hidden is not None])
            noise = max(sample.noise[0] for sample in samples)
            check_close(values.hidden, hidden, f"{llm}: its decoder's output for {where}", noise)
        logits, noise = torch.cat([sample.logits for sample in samples]), max(sample.noise[1] for sample in samples)
        check_close(values.logits, logits, f"{llm}: its head's logits for {where}", noise)
        largest = max(largest, float((values.logits - logits).abs().max()))
    return largest


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextmanager
def perturbed(decoder: nn.Module) -> Iterator[None]:
    """While it lasts, the embedded tokens that `decoder` takes are changed by as much as rounding does."""

    def perturb(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = kwargs.get("inputs_embeds")
        if tokens is not None:
            draw = torch.Generator().manual_seed(0)
            kwargs = {
                **kwargs,
                "inputs_embeds": tokens * (1 + PERTURBATION * torch.randn(tokens.shape, generator=draw)),
            }
        return args, kwargs

    handle = decoder.register_forward_pre_hook(perturb, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def relative(actual: Tensor, expected: Tensor) -> float:
    """The largest difference of a row `[..., features]`, of its own norm; rows close to zero, of the largest row's."""
    if not expected.numel():
        return 0.0
    norms = torch.linalg.vector_norm(expected.double(), dim=-1)
    floor = max(float(norms.max()) * 1e-3, torch.finfo(torch.float32).tiny)
    difference = torch.linalg.vector_norm((actual - expected).double(), dim=-1)
    return float((difference / norms.clamp(min=floor)).max())


def check_close(actual: Tensor, expected: Tensor, what: str, noise: float = 0.0) -> None:
    """That `actual` is `expected`, rows of features, but for rounding.

    Args:
        what: what it is, for errors.
        noise: what changed of `expected` when its inputs were `perturbed`, as `relative` gives it.

    Raises:
        SelfCheckError: it is not, or rounding alone may change so much that it cannot be known.
    """
    if actual.shape != expected.shape:
        raise SelfCheckError(f"{what} have shape {tuple(actual.shape)}, transformers' {tuple(expected.shape)}")
    error, bound = relative(actual, expected), max(TOLERANCE, NOISE_FACTOR * noise)
    if error <= min(bound, MAX_TOLERANCE):
        return
    largest = float((actual - expected).abs().max())
    message = f"{what} differ from transformers' by up to {largest:.1e}, {error:.1e} of a row's size; at most "
    if error <= bound:
        raise SelfCheckError(
            f"{message}{MAX_TOLERANCE:g} is accepted, although with these weights rounding of the tokens alone changes "
            f"{noise:.1e}: compare it with weights that are not random"
        )
    raise SelfCheckError(f"{message}{min(bound, MAX_TOLERANCE):.0e} would be rounding")
