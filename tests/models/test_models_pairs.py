"""CLIP + Llama, SigLIP + Qwen3, Whisper + Qwen3: hetmesh's forward against transformers' own, alone and with TP."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from hetmesh.data.source import Sample
from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph.sample import MediaItem, SampleMeta
from hetmesh.graph.topology import BoundarySpec
from hetmesh.layout.mesh import MeshSpec
from hetmesh.models import build_module, make_adapters
from hetmesh.parallel import Reduction, parallelize
from hetmesh.testing.precision import exact_dtypes

MEDIA, VOCAB = 1, 23
IMAGE = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 4}
AUDIO = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "num_mel_bins": 6}
LLM = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPES = {"image": (3, 8, 8), "audio": (6, 10)}
PAIRS = {
    "clip, llama": ("clip", {**IMAGE, "feature_layer": -2}, "llama", LLM),
    "clip with its class token, tied llama": (
        "clip",
        {**IMAGE, "class_token": True},
        "llama",
        {**LLM, "tie_word_embeddings": True},
    ),
    "siglip, qwen3": ("siglip", IMAGE, "qwen3", LLM),
    "whisper, tied qwen3": ("whisper", AUDIO, "qwen3", {**LLM, "tie_word_embeddings": True}),
}


def make(pair: str) -> tuple[Any, str]:
    """The adapters, and the kind of media."""
    encoder, encoder_config, llm, llm_config = PAIRS[pair]
    kind = "audio" if encoder == "whisper" else "image"
    modules = {
        "encoder": SimpleNamespace(model=encoder, config=encoder_config),
        "projector": SimpleNamespace(model="mlp", config={"hidden_features": 9}),
        "llm": SimpleNamespace(model=llm, config=llm_config),
    }
    boundaries = [BoundarySpec("encoder", "projector"), BoundarySpec("projector", "llm", kind)]
    return make_adapters(modules, boundaries, {"encoder": kind}, VOCAB, SHAPES), kind


def samples(adapters: Any, kind: str, counts: tuple[int, ...]):
    """Per entry one sample with that many media items, each between two tokens; the last three tokens are targets."""
    generator = torch.Generator().manual_seed(3)
    rows = adapters["encoder"].item_rows(SHAPES[kind])
    pairs = []
    for i, count in enumerate(counts):
        tokens, items = [5 + i], []
        for _ in range(count):
            items.append(MediaItem(kind, SHAPES[kind], len(tokens), rows))
            tokens += [MEDIA] * rows + [6]
        tokens += [7, 8 + i, 9, 10]
        media = {kind: [torch.rand(SHAPES[kind], generator=generator) for _ in items]}
        meta = SampleMeta(str(i), len(tokens), tuple(items), ((len(tokens) - 3, len(tokens)),))
        pairs.append((Sample(str(i), torch.tensor(tokens), media), meta))
    return pairs


def run(adapters: Any, modules: Any, kind: str, pairs: Any):
    """Logits of the targets and all batches."""
    batches = {
        n: a.collate([s for s, _ in pairs], [m for _, m in pairs], placeholders={kind: MEDIA}, pad_id=0)
        for n, a in adapters.items()
    }
    rows = adapters["encoder"].forward(modules["encoder"], batches["encoder"], {})
    rows = adapters["projector"].forward(modules["projector"], {}, {"encoder": rows})
    return adapters["llm"].forward(modules["llm"], batches["llm"], {"projector": rows}), batches


def reference_logits(pair: str, adapters: Any, modules: Any, pairs: Any, kind: str):
    """The same by transformers alone: own feature selection, masked_scatter, a padding mask, logits everywhere."""
    media = torch.stack([item for s, _ in pairs for item in s.media[kind]])
    encoder = modules["encoder"]
    media = media.to(next(encoder.parameters()).dtype)
    if pair.startswith("whisper"):
        features = encoder(input_features=media).last_hidden_state
    elif pair.startswith("siglip"):
        features = encoder(pixel_values=media).last_hidden_state
    else:
        features = full_clip(adapters["encoder"], encoder)(pixel_values=media, output_hidden_states=True)
        features = features.hidden_states[adapters["encoder"].feature_layer]
        features = features if adapters["encoder"].class_token else features[:, 1:]
    rows = modules["projector"](features.flatten(0, 1))
    length = max(m.tokens for _, m in pairs)
    ids = torch.stack([torch.nn.functional.pad(s.tokens, (0, length - len(s.tokens))) for s, _ in pairs])
    mask = torch.stack([(torch.arange(length) < m.tokens).long() for _, m in pairs])
    embeddings = modules["llm"].get_input_embeddings()(ids).masked_scatter((ids == MEDIA)[..., None], rows)
    logits = modules["llm"](inputs_embeds=embeddings, attention_mask=mask).logits
    return torch.cat([logits[i, a - 1 : b - 1] for i, (_, m) in enumerate(pairs) for a, b in m.targets])


def full_clip(adapter: Any, tower: Any):
    """CLIPVisionModel with all of its blocks; those behind the feature layer stay random."""
    from transformers import CLIPVisionModel

    model = CLIPVisionModel(adapter.config).to(next(tower.parameters()).dtype)
    missing, unexpected = model.load_state_dict(tower.state_dict(), strict=False)
    assert not unexpected
    assert all(n.startswith(("post_layernorm", "encoder.layers.2.")) for n in missing)
    return model


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("pair", PAIRS)
def test_forward_equals_transformers_own(pair, dtype, bound):
    adapters, kind = make(pair)
    modules: Any = {n: build_module(a, n, 0, dtype) for n, a in adapters.items()}
    pairs = samples(adapters, kind, (2, 0, 1))
    with exact_dtypes(*modules.values()):
        logits, _ = run(adapters, modules, kind, pairs)
        expected = reference_logits(pair, adapters, modules, pairs, kind)
    assert logits.shape == (9, VOCAB)
    assert (logits - expected).abs().max() < bound


@pytest.mark.parametrize("pair", PAIRS)
def test_rows_layers_and_nothing_to_do(pair):
    adapters, kind = make(pair)
    encoder = adapters["encoder"]
    rows = {"clip, llama": 4, "siglip, qwen3": 4, "whisper, tied qwen3": 5}.get(pair, 5)
    assert encoder.item_rows(SHAPES[kind]) == rows
    with pytest.raises(SampleError, match=f"configured for '{kind}' of shape"):
        encoder.item_rows((3, 4, 4))
    modules: Any = {n: build_module(a, n, 0) for n, a in adapters.items()}
    for name, module in modules.items():
        covered = tuple(f"{layer}." for layer in adapters[name].layers())
        assert set(adapters[name].layers()) <= {n for n, _ in module.named_modules()}
        assert all(p.startswith(covered) for p, _ in module.named_parameters())
    for counts in ((), (0, 0)):
        logits, batches = run(adapters, modules, kind, samples(adapters, kind, counts))
        assert logits.shape == (3 * len(counts), VOCAB)
        cross_entropy(logits, batches["llm"]["targets"], reduction="sum").backward()
        for p in [p for n in ("encoder", "projector") for p in modules[n].parameters() if p.requires_grad]:
            assert p.grad is not None
            assert not p.grad.any()


def test_llama_attends_causally_without_a_mask(monkeypatch):
    calls = []

    def spy(*args, attn_mask=None, is_causal=False, **kwargs):
        calls.append((attn_mask, is_causal))
        return scaled_dot_product_attention(*args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    adapters, kind = make("clip, llama")
    modules = {n: build_module(a, n, 0) for n, a in adapters.items()}
    run(adapters, modules, kind, samples(adapters, kind, (2, 0, 1)))
    assert calls == [(None, False)] * 2 + [(None, True)] * 2


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        ("clip", {**IMAGE, "feature_layer": -4}, r"feature_layer: must be in -3\.\.-1 .*got -4"),
        ("clip", {**IMAGE, "feature_layer": 0}, r"feature_layer: must be in -3\.\.-1"),
        ("clip", {**IMAGE, "class_token": 1}, "class_token: must be true or false, got 1"),
        ("clip", {**IMAGE, "patch_size": 9}, "patch_size: must be at most image_size = 8, got 9"),
        ("clip", {**IMAGE, "patchsize": 4}, "patchsize: unknown key; did you mean 'patch_size'"),
        ("whisper", {**AUDIO, "encoder_layerdrop": 0.1}, r"encoder_layerdrop: must be 0, got 0\.1"),
        ("whisper", {**AUDIO, "encoder_attention_heads": 5}, "must divide d_model = 16, got 5"),
    ],
)
def test_recipe_errors(monkeypatch, model, config, message):
    monkeypatch.setitem(PAIRS, "wrong", (model, config, "qwen3", LLM))
    with pytest.raises(RecipeError, match=rf"modules\.encoder\.config\..*{message}"):
        make("wrong")


def tensor_parallel_errors(rank: int, pair: str) -> tuple[float, float]:
    """Errors of loss and gradients with TP 2 against one process, relative to the module's whole gradient."""
    adapters, kind = make(pair)
    pairs = samples(adapters, kind, (2, 0, 1))
    reference = {n: build_module(a, n, 0, torch.float64) for n, a in adapters.items()}
    modules = copy.deepcopy(reference)
    spec = MeshSpec.make(range(2), tp=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallel = [parallelize(adapters[n], m, spec, mesh) for n, m in modules.items()]
    losses = []
    for each in (reference, modules):
        with exact_dtypes(*each.values()):
            logits, batches = run(adapters, each, kind, pairs)
            loss = cross_entropy(logits, batches["llm"]["targets"], reduction="sum")
            loss.backward()
        losses.append(loss.item())
    worst = 0.0
    for each in parallel:
        Reduction(each)()()
    for name, module in reference.items():
        whole = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        for (fqn, p), (other, q) in zip(module.named_parameters(), modules[name].named_parameters(), strict=True):
            assert fqn == other
            if p.grad is None:
                assert q.grad is None
                assert fqn == "embed_positions.weight"  # Whisper's sinusoids
                continue
            given = q.grad.full_tensor() if isinstance(q.grad, DTensor) else q.grad
            worst = max(worst, float((given - p.grad).norm() / max(p.grad.norm(), 1e-3 * whole)))
    return abs(losses[0] - losses[1]) / losses[0], worst


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_h5_tensor_parallel_gradients_equal_those_of_one_process(pool, pair):
    for loss_error, gradient_error in pool(2).run(tensor_parallel_errors, pair):
        assert loss_error < 1e-12
        assert gradient_error < 1e-10
