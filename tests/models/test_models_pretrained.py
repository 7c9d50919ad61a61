"""Real weights: directories as transformers saves them, through a recipe, on one process and on shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetmesh.data.loader import Loader
from hetmesh.data.source import Sample
from hetmesh.graph.sample import MediaItem, SampleMeta
from hetmesh.training.job import describe, loaded_module, make_prepare
from hetmesh.training.recipe import Recipe, parse_recipe

VOCAB, MEDIA = 40, 1
IMAGE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
IMAGE |= {"image_size": 8, "patch_size": 4, "num_channels": 1}
LLM: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 50, "num_hidden_layers": 2, "vocab_size": VOCAB}
LLM |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "pad_token_id": 0}
LLM |= {"bos_token_id": None, "eos_token_id": None}


def whisper_config():
    from transformers import WhisperConfig

    ids = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "decoder_start")}
    sizes = {"d_model": 16, "num_mel_bins": 6, "max_source_positions": 5, "vocab_size": 9, **ids}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 32}
    return WhisperConfig(**sizes, suppress_tokens=None, begin_suppress_tokens=None)


def build(kind: str, **changes: Any):
    """A random model of transformers; biases and norms are random too, or a wrong one would not be seen."""
    import transformers as t

    torch.manual_seed(len(kind))
    models = {
        "clip": lambda: t.CLIPVisionModel(t.CLIPVisionConfig(**{**IMAGE, **changes})),
        "siglip": lambda: t.SiglipVisionModel(t.SiglipVisionConfig(**{**IMAGE, **changes})),
        "whisper": lambda: t.WhisperForConditionalGeneration(whisper_config()),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**{**LLM, **changes})),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**{**LLM, **changes})),
        "llava": lambda: t.LlavaForConditionalGeneration(
            t.LlavaConfig(vision_config=t.CLIPVisionConfig(**IMAGE), text_config=t.LlamaConfig(**LLM))
        ),
    }
    model: Any = models[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def save(model: Any, folder: Path, shards: bool = False) -> Path:
    model.save_pretrained(folder, **({"max_shard_size": "8KB"} if shards else {}))
    assert (folder / "model.safetensors.index.json").exists() == shards
    return folder


class Items:
    """A source of 8 samples with 0 to 2 items of one kind each."""

    vocab_size, pad_id = VOCAB - 3, 0

    def __init__(self, kind: str = "image"):
        self.placeholders = {kind: MEDIA}
        self.kind, self.shape = kind, {"image": (1, 8, 8), "audio": (6, 10)}[kind]

    def __len__(self) -> int:
        return 8

    def meta(self, index: int) -> SampleMeta:
        items = tuple(MediaItem(self.kind, self.shape, 1 + i) for i in range((index + 1) % 3))
        return SampleMeta(f"{index}", 6 + len(items), items, ((3 + len(items), 6 + len(items)),))

    def load(self, index: int) -> Sample:
        draw = torch.Generator().manual_seed(index)
        count = (index + 1) % 3
        tokens = torch.tensor([5 + index, *[MEDIA] * count, 20, 3, 7, 8 + index, 9])
        return Sample(f"{index}", tokens, {self.kind: [torch.rand(self.shape, generator=draw) for _ in range(count)]})


def recipe(encoder: tuple[str, Any], llm: tuple[str, Any], more: str = "", projector: Any = None) -> Recipe:
    """A recipe of an encoder, a projector (random unless it has a directory) and an LLM: `(model, directory)`."""
    kind = "audio" if encoder[0] == "whisper" else "image"
    load = "" if projector is None else f"initial_load_path = '{projector}'"
    return parse_recipe(f"""
        [modules.vision]
        model = "{encoder[0]}"
        initial_load_path = "{encoder[1]}"
        [modules.projector]
        model = "mlp"
        {load}
        [modules.llm]
        model = "{llm[0]}"
        initial_load_path = "{llm[1]}"
        [[boundaries]]
        from = "vision"
        to = "projector"
        [[boundaries]]
        from = "projector"
        to = "llm"
        at = "{kind}"
        [data]
        source = "{__name__}:Items"
        options = {{ kind = "{kind}" }}
        [training]
        local_batch_size = 4
        steps = 1
        {more}
    """)


def modules_of(recipe: Recipe) -> tuple[Any, Any]:
    """Adapters and loaded modules, on one process."""
    _, adapters, graph = describe(recipe)
    return adapters, {name: loaded_module(recipe, adapters[name], name) for name in graph.order}


def logits_of(recipe: Recipe, adapters: Any, modules: Any) -> torch.Tensor:
    """hetmesh's logits of the targets of all samples."""
    source, _, graph = describe(recipe)
    loader = Loader(source, len(source), make_prepare(recipe, graph, adapters), shuffle=False)
    drawn = loader.batch(0)
    metas, samples = [d.meta for d in drawn], loader.load(drawn)
    rows: dict[str, torch.Tensor] = {}
    for name in graph.order:
        batch = adapters[name].collate(samples, metas, placeholders=source.placeholders, pad_id=source.pad_id)
        inputs = {b.source: rows[b.source] for b in graph.inputs(name)}
        rows[name] = adapters[name].forward(modules[name], batch, inputs)
    return rows["llm"]


def transformers_logits(recipe: Recipe, encoder: Any, projector: Any, llm: Any) -> torch.Tensor:
    """The same from models that transformers loaded itself; one sample at a time."""
    source, adapters, _ = describe(recipe)
    out = []
    for index in range(len(source)):
        sample, meta = source.load(index), source.meta(index)
        ids = sample.tokens
        embeddings = llm.get_input_embeddings()(ids)
        media = sample.media[next(iter(source.placeholders))]
        count = len(media)
        if count:
            features = encoder(torch.stack(media))
            features = features[:, 1:] if recipe.modules["vision"].model == "clip" else features
            assert features.shape[1] == adapters["vision"].rows_per_item
            embeddings = torch.cat([embeddings[:1], projector(features.flatten(0, 1)), embeddings[1 + count :]])
        logits = llm(inputs_embeds=embeddings[None]).logits[0]
        out.append(logits[len(logits) - meta.num_targets - 1 : -1])
    return torch.cat(out)


def own_encoder(kind: str, folder: Path):
    """The encoder as transformers loads it: media -> features."""
    import transformers as t

    if kind == "whisper":
        whisper = t.WhisperForConditionalGeneration.from_pretrained(folder).get_encoder()
        return lambda media: whisper(media).last_hidden_state
    tower: Any = {"clip": t.CLIPVisionModel, "siglip": t.SiglipVisionModel}[kind].from_pretrained(folder)
    return lambda media: tower(media).last_hidden_state


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "sharded files"])
@pytest.mark.parametrize(
    ("encoder", "llm", "changes"),
    [
        ("clip", "llama", {}),
        ("siglip", "qwen3", {"attention_bias": True}),
        ("whisper", "qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_saved_and_loaded_back_forwards_agree_with_transformers(tmp_path, encoder, llm, changes, shards):
    from transformers import AutoModelForCausalLM

    save(build(encoder), tmp_path / "encoder", shards)
    save(build(llm, **changes), tmp_path / "llm", shards)
    given = recipe((encoder, tmp_path / "encoder"), (llm, tmp_path / "llm"))
    adapters, modules = modules_of(given)
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "llm")
    expected = transformers_logits(given, own_encoder(encoder, tmp_path / "encoder"), modules["projector"], own)
    logits = logits_of(given, adapters, modules)
    assert logits.shape == (8 * 3, VOCAB)
    assert float((logits - expected).detach().abs().max()) < 1e-5
    assert float(expected.detach().std()) > 0.1
    if changes.get("tie_word_embeddings"):
        assert modules["llm"].lm_head.weight is modules["llm"].model.embed_tokens.weight
