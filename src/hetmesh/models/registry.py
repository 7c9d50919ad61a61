"""Recipe modules -> adapters, with row widths resolved across the boundaries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from hetmesh.errors import RecipeError, Refusals
from hetmesh.graph import BoundarySpec, LossSpec
from hetmesh.models.adapter import Adapter, AdapterRequest
from hetmesh.models.named.clip import ClipAdapter
from hetmesh.models.named.diffusion import DiffusersAdapter, VaeAdapter
from hetmesh.models.named.flow import FlowAdapter
from hetmesh.models.named.llama import LlamaAdapter
from hetmesh.models.named.mlp import MlpAdapter
from hetmesh.models.named.qwen3 import Qwen3Adapter
from hetmesh.models.named.qwen3_moe import Qwen3MoeAdapter
from hetmesh.models.named.qwen3_vl_text import Qwen3VLMoeTextAdapter, Qwen3VLTextAdapter
from hetmesh.models.named.qwen3_vl_vision import Qwen3VLVisionAdapter
from hetmesh.models.named.siglip import SiglipAdapter
from hetmesh.models.named.whisper import WhisperAdapter
from hetmesh.models.split.encoder_half import HfEncoderAdapter
from hetmesh.models.split.llm_half import HfLlmAdapter
from hetmesh.models.split.projector import HfProjectorAdapter
from hetmesh.models.user.make import make_user_adapter
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.recipe.keys import unknown
from hetmesh.recipe.sections import Module

MODELS: dict[str, Callable[[AdapterRequest], Adapter | None]] = {
    "siglip": SiglipAdapter.make,
    "clip": ClipAdapter.make,
    "whisper": WhisperAdapter.make,
    "mlp": MlpAdapter.make,
    "flow": FlowAdapter.make,
    "diffusers": DiffusersAdapter.make,
    "diffusers_vae": VaeAdapter.make,
    "qwen3": Qwen3Adapter.make,
    "qwen3_moe": Qwen3MoeAdapter.make,
    "llama": LlamaAdapter.make,
    "qwen3_vl_vision": Qwen3VLVisionAdapter.make,
    "qwen3_vl_text": Qwen3VLTextAdapter.make,
    "qwen3_vl_moe_text": Qwen3VLMoeTextAdapter.make,
    "hf_encoder": HfEncoderAdapter.make,
    "hf_projector": HfProjectorAdapter.make,
    "hf_llm": HfLlmAdapter.make,
}
"""Ready-made models by their name in recipes. To add one, enter its `make` here; `make` returns None as long as it
needs a neighbour's width that the request does not have yet."""


def make_adapters(
    modules: Mapping[str, Module],
    boundaries: Sequence[BoundarySpec],
    media: Mapping[str, str | None],
    vocab_size: int,
    media_shapes: Mapping[str, tuple[int, ...]] | None = None,
    packed: Collection[str] = (),
    losses: Mapping[str, LossSpec] | None = None,
) -> dict[str, Adapter]:
    """One adapter per module, in the order of `modules`. Pure apart from imports; needs no process group.

    Args:
        media: per encoder the kind of media it reads (`Wiring.media`).
        media_shapes: raw shape of an item per kind of media, where the data source has one fixed shape.
        packed: the modules that get the samples of a lane in one row.
        losses: of modules that say theirs.

    Raises:
        RecipeError: unknown models or config keys, of all modules; a width that nothing determines; or widths that
            differ across boundaries.
    """
    made: dict[str, Adapter] = {}
    refusals, refused = Refusals(), set[str]()
    after = {b.destination for b in boundaries if b.output}  # the LLM's outputs have names
    for _ in boundaries:
        after |= {b.destination for b in boundaries if b.source in after}

    def encodes(b: BoundarySpec) -> bool:
        """Whether rows are the targets of a module after the LLM."""
        return b.destination in after and not b.output and b.source not in after

    def request(name: str) -> AdapterRequest:
        into = [b for b in boundaries if b.destination == name]
        out_of = [b for b in boundaries if b.source == name]
        emitted = [_emitted(made[b.source]) for b in into if b.source in made and not encodes(b)]
        consumed = [made[b.destination].in_features for b in out_of if b.destination in made]
        return AdapterRequest(
            name=name,
            model=modules[name].model,
            config=modules[name].config,
            media=(kind := media.get(name)),
            media_shape=(media_shapes or {}).get(kind) if kind else None,
            vocab_size=vocab_size,
            in_features=next(iter(emitted), None),  # where neighbours differ, the check across boundaries names them
            out_features=next(iter(consumed), None),
            placeholders={b.source: None if b.output else b.at for b in into},
            consumers=tuple(b.destination for b in out_of),
            encoders={b.source: made.get(b.source) for b in into if encodes(b)},
            hidden={b.output: (b.at, b.layer) for b in out_of if b.output and b.at is not None},
            loss=(losses or {}).get(name),
            pretrained=pretrained_of(name, modules[name]),
            folder=getattr(modules[name], "folder", None),
            packed=name in packed,
        )

    progress = True
    while progress:
        progress = False
        for name in modules:
            if name in made or name in refused:
                continue
            before, adapter = len(refusals.said), None
            with refusals.collect():
                adapter = _make(modules[name].model, request(name))
            if len(refusals.said) > before:
                refused.add(name)
            if adapter is not None:
                made[name] = adapter
                progress = True
    refusals.finish()
    unresolved = [name for name in modules if name not in made]
    if unresolved:
        raise RecipeError(
            f"modules.{unresolved[0]}: its row widths follow from neither side (unresolved: {unresolved}); "
            "give in_features and out_features in its config"
        )
    for b in boundaries:
        if made[b.source].out_features is None and not b.output:
            refusals.add(
                f"modules.{b.source}: an LLM emits logits, not rows, but {b.destination!r} consumes it; a module after "
                f"the LLM has a [modules.{b.destination}.loss]"
            )
            continue
        emitted, consumed = _emitted(made[b.source]), made[b.destination].in_features
        if emitted != consumed and not encodes(b):
            refusals.add(
                f"boundary {b.source}->{b.destination}: {b.source!r} emits rows of width {emitted}, "
                f"{b.destination!r} consumes rows of width {consumed}; put a projector (model = 'mlp') between them"
            )
    for name, loss in (losses or {}).items():
        draws, given = made[name].abilities.draws, f"modules.{name}.loss.kind = {loss.kind!r}: {modules[name].model}"
        if loss.kind == "flow_matching" and not draws:
            refusals.add(f"{given} predicts its targets from the LLM's rows alone; write 'mse'")
        elif loss.kind == "mse" and draws:
            refusals.add(f"{given} predicts velocities of noisy targets; write 'flow_matching'")
    refusals.finish()
    return {name: made[name] for name in modules}


def _emitted(adapter: Adapter) -> int | None:
    """The width of its rows; of an LLM that of its hidden states, which is that of the rows that it takes."""
    return adapter.in_features if adapter.out_features is None else adapter.out_features


def _make(model: str, request: AdapterRequest) -> Adapter | None:
    if model in MODELS:
        return MODELS[model](request)
    if ":" in model:
        return make_user_adapter(model, request)
    raise RecipeError(f"{request.key}.model: {unknown('model', model, [*sorted(MODELS), 'package.module:Class'])}")


def pretrained_of(name: str, module: Module) -> Pretrained | None:
    """The directory that a module's weights come from, None for random ones."""
    path = getattr(module, "initial_load_path", None)
    return Pretrained(Path(path).expanduser(), f"modules.{name}.initial_load_path") if path else None
