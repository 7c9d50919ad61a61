"""Whether the modules of a recipe compute what transformers computes from the same directory, on a few samples.

One process, fp32. The whole model is loaded by transformers and called by its own forward, one sample at a time; the
modules are loaded, fed and called as a run of one rank does it. What differs is named by the first module in which it
does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hetmesh.balance import BalanceOptions, plan_batch
from hetmesh.data.loader import DrawnBatch, Loader
from hetmesh.errors import RecipeError, SampleError, SelfCheckError
from hetmesh.graph import ModuleGraph, Stage, output_key
from hetmesh.models import AdapterRequest, placeholder_rows
from hetmesh.models.named.causal_lm import CausalLMAdapter
from hetmesh.models.split.encoder_half import HfEncoderAdapter
from hetmesh.models.split.whole_forward import load_whole, whole_logits
from hetmesh.models.split.whole_model import TOWERS, WholeModel, whole_model
from hetmesh.recipe import sections as sections
from hetmesh.recipe.hf_path import PLACEHOLDER_KEYS
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.modules import loaded_module
from hetmesh.resolve.resolved import ResolvedRecipe, resolve
from hetmesh.resolve.whole_directory import directory_of
from hetmesh.training.feed import Feed
from hetmesh.verify.self_check_bound import check_close, relative, shaken
from hetmesh.verify.self_check_samples import self_check_source

NOT_COMPARED = (
    "on short random samples (text alone, one item, several) in fp32 and one process; not compared: prompts, what a "
    "processor makes of files, longer samples, other precisions and layouts"
)
"""What a result says, and what it does not."""


@dataclass
class Values:
    """What one of both sides computed, by kind of sample.

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
    alone = _on_one_rank(recipe, len(source))
    resolved = resolve(alone, source)
    graph = resolved.graph
    for at, rows in placeholder_rows(graph, resolved.adapters).items():
        shapes[at] = _compare_rows_of_items(whole, encoders[at], rows, f"{_chain(graph, at)}: ")
    source = self_check_source(whole.config, shapes, placeholders, dims, around)
    resolved = resolve(alone, source)
    loader = Loader(source, len(source), resolved.expander, shuffle=False)
    drawn = loader.batch(0)
    with torch.no_grad():
        truth = _by_transformers(whole, encoders, loader, drawn)
        return _compare(truth, _by_modules(resolved, loader, drawn), resolved.graph)


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


def _on_one_rank(recipe: Recipe, samples: int) -> Recipe:
    """`recipe` with all modules on one rank, in fp32, and so many samples in a step."""
    kept = {name: getattr(recipe, name) for name in Recipe.model_fields}
    kept["parallelism"] = sections.Parallelism()
    kept["balance"] = sections.Balance(policy="none")
    training = recipe.training
    kept["training"] = sections.Training(  # of as many steps: a schedule of learning rates must not end before them
        local_batch_size=samples, seq_len=1 << 20, pack_samples=training.pack_samples, steps=training.steps
    )
    return Recipe.model_validate(kept)


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
    values = Values()
    taken: list[Tensor] = []
    head = model.get_submodule(whole.head)
    handle = head.register_forward_pre_hook(lambda _, args: taken.append(args[0]))
    for sample, each in zip(loader.load(drawn), drawn, strict=True):
        meta = each.meta
        try:
            values.logits[meta.id] = whole_logits(whole, model, encoders, sample, meta)
            hidden = taken.pop()[0]
            with shaken(model.get_submodule(whole.decoder)):
                other_logits = whole_logits(whole, model, encoders, sample, meta)
            other = taken.pop()[0]
        except Exception as error:  # whatever the model makes of samples that its config does not allow
            raise RecipeError(
                f"{whole.pretrained}: transformers' own forward fails for {meta.id}: {_said(error)}"
            ) from error
        predicting = torch.cat([torch.arange(start - 1, stop - 1) for start, stop in meta.targets])
        values.hidden[meta.id] = hidden[predicting]
        values.noise[meta.id] = (
            relative(other[predicting], hidden[predicting]),
            relative(other_logits, values.logits[meta.id]),
        )
        for at, encoder in encoders.items():
            if items := sample.media.get(at, ()):
                sizes = [item.size for item in meta.media if item.name == at]
                batch = encoder.call.collate(items, sizes)
                rows = encoder.encode(model, batch)[""]
                values.rows[meta.id, at] = rows[: sum(i.rows for i in meta.media if i.name == at)]
    handle.remove()
    return values


def _by_modules(resolved: ResolvedRecipe, loader: Loader, drawn: DrawnBatch) -> list[tuple[list[str], Values]]:
    """Of each kind of sample alone, and of all in one batch: their kinds, and the values, one after the other."""
    adapters, graph = resolved.adapters, resolved.graph
    modules = {name: loaded_module(resolved.recipe, adapters[name], name).eval() for name in graph.order}
    for name, module in modules.items():
        use = adapters[name].abilities.use_packed
        if graph[name].packed and use is not None:
            use(module)
    found = []
    for batch in (*(drawn[i : i + 1] for i in range(len(drawn))), drawn):
        metas = [each.meta for each in batch]
        plan = plan_batch(graph, metas, len(batch), BalanceOptions(policy="none"))
        feed = Feed(loader, batch, plan, adapters, 0)
        values = Values()
        taken: list[Tensor] = []
        outputs: dict[str, Tensor] = {}
        llm: Any = adapters[graph.sink.name]
        handle = None
        if isinstance(llm, CausalLMAdapter):
            head = llm.head_of(modules[graph.sink.name])
            handle = head.register_forward_pre_hook(lambda _, args, taken=taken: taken.append(args[0]))
        for name in graph.order:
            inputs = {b.key: outputs[b.key] for b in graph.inputs(name)}
            try:
                result = adapters[name].forward(modules[name], feed(Stage(name, 0), 0), inputs)
            except Exception as error:  # whatever the model makes of what it is called with
                where = ", ".join(meta.id for meta in metas)
                raise SelfCheckError(f"module {name!r} fails for {where}: {_said(error)}") from error
            named = {"": result} if isinstance(result, Tensor) else result
            outputs |= {output_key(name, output): rows for output, rows in named.items()}
        if handle is not None:
            handle.remove()
        kinds = [meta.id for meta in metas]
        values.logits[""] = outputs[graph.sink.name]
        if taken:
            values.hidden[""] = taken[0].reshape(-1, taken[0].shape[-1])
        for b in graph.inputs(graph.sink.name):
            if b.at is not None and not b.output:
                values.rows["", b.at] = outputs[b.key]
        found.append((kinds, values))
    return found


def _compare(truth: Values, given: list[tuple[list[str], Values]], graph: ModuleGraph) -> float:
    largest = 0.0
    for kinds, values in given:
        where = kinds[0] if len(kinds) == 1 else "all kinds of samples in one batch"
        for (_, at), rows in values.rows.items():
            expected = [truth.rows[kind, at] for kind in kinds if (kind, at) in truth.rows]
            if expected:
                check_close(rows, torch.cat(expected), f"{_chain(graph, at)}: its rows for {where}")
        llm, noise = f"module {graph.sink.name!r}", [truth.noise[kind] for kind in kinds]
        if "" in values.hidden:
            expected_hidden = torch.cat([truth.hidden[kind] for kind in kinds])
            what = f"{llm}: its decoder's output for {where}"
            check_close(values.hidden[""], expected_hidden, what, max(of_hidden for of_hidden, _ in noise))
        expected_logits = torch.cat([truth.logits[kind] for kind in kinds])
        what = f"{llm}: its head's logits for {where}"
        check_close(values.logits[""], expected_logits, what, max(of_logits for _, of_logits in noise))
        largest = max(largest, float((values.logits[""] - expected_logits).abs().max()))
    return largest


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
