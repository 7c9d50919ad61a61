"""Media items that a model in one process makes: an image of a question's answer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hetmesh.data.source import Source
from hetmesh.errors import UsageError
from hetmesh.graph.sample import MediaItem, SampleMeta, kinds_of
from hetmesh.models.draws import EVALUATION, Draws
from hetmesh.training.one_process import OneProcess

NO_IMAGE = "--out: {}; what is written is an image [1 or 3 channels, height, width]"


def generators(model: OneProcess) -> dict[str, str]:
    """The modules after the LLM that can make items of their media, by their own sampling, and these media."""
    graph, adapters = model.resolved.graph, model.resolved.adapters
    after = [name for name in graph.order if name in graph.topology.after_llm]
    return {name: graph[name].media or "" for name in after if adapters[name].abilities.sample is not None}


def made_of(model: OneProcess, meta: SampleMeta) -> list[tuple[MediaItem, str]]:
    """The items of a sample that modules after the LLM make, each with the module."""
    made = generators(model) if meta.media else {}
    return [(item, name) for item in meta.media for name, kinds in made.items() if item.name in kinds_of(kinds)]


@torch.no_grad()
def drawn_item(model: OneProcess, source: Source, index: int = 0, *, seed: int = 0) -> Tensor:
    """The last item of sample `index` of `source` that a module after the LLM makes, of its raw shape, from the tokens
    up to it. `seed`: of the noise that it is made of; that of a run gives what its validation judged. Raises
    UsageError: there is no such module, or item."""
    adapters, graph = model.resolved.adapters, model.resolved.graph
    if not generators(model):
        raise UsageError(f"--out: no module of {', '.join(graph.order)} makes media of the LLM's hidden states")
    loader = model.loader(source)
    batch = loader.drawn([index])
    found = made_of(model, batch[0].meta)
    if not found:
        kinds = ", ".join(generators(model).values())
        raise UsageError(f"--out: the question asks for none of what the model makes ({kinds})")
    item, name = found[-1]
    adapter, rows = adapters[name], dict[str, Tensor]()
    feed = model.feed(loader, batch)
    for before in graph.order:
        if before in graph.topology.upstream(name):
            model.run(before, feed, rows)
    of_llm = {graph.llm.name, *graph.topology.after_llm}
    encoders = [b.source for b in graph.inputs(name) if b.source not in of_llm]
    (read,) = (rows[b.key] for b in graph.inputs(name) if b.source in of_llm)
    condition = read[-adapter.item_rows(item.extent) :]
    abilities = adapter.abilities
    assert abilities.sample is not None
    latents = [adapter.item_latents(each.extent) for each, by in found if by == name]
    drawn = Draws(seed, EVALUATION).of(name, [batch[0].meta.id], [len(latents)], [sum(latents)], abilities.draws)
    noise = drawn["noise"][-latents[-1] :].to(condition)
    made = abilities.sample(model.modules[name], condition, item.shape, noise, abilities.sampling_steps)
    for encoder in encoders:
        if (decode := adapters[encoder].abilities.decode) is None:
            raise UsageError(f"--out: {name!r} makes rows of {encoder!r}, which cannot turn them into {item.name!r}")
        made = decode(model.modules[encoder], made, item.shape)
    return made


def write_image(item: Tensor, path: Path) -> None:
    """An image of values -1..1 as a file, in the format of its suffix. Raises UsageError: it is no image, or the file
    cannot be written."""
    from PIL import Image

    if item.ndim != 3 or item.shape[0] not in (1, 3):
        raise UsageError(NO_IMAGE.format(f"the model made a tensor of shape {tuple(item.shape)}"))
    levels = ((item.float().cpu().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    pixels = levels.permute(1, 2, 0).squeeze(2).numpy()
    try:
        Image.fromarray(pixels).save(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--out {path}: {error or type(error).__name__}; .png does, for one") from error
