"""Each adapter's forward against transformers' own, its gradients, and its behaviour with nothing to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from hetmesh.data.source import Sample
from hetmesh.graph.sample import MediaItem, SampleMeta
from hetmesh.graph.topology import BoundarySpec
from hetmesh.models import build_module, make_adapters

IMAGE, SKETCH, VOCAB = 1, 2, 23


def recipe(**llm) -> dict[str, Any]:
    vision = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, **llm}
    modules = {
        "vision": SimpleNamespace(model="siglip", config=vision),
        "drawing": SimpleNamespace(model="siglip", config={**vision, "patch_size": 8}),
        "projector": SimpleNamespace(model="mlp", config={}),
        "second": SimpleNamespace(model="mlp", config={"hidden_features": 7}),
        "llm": SimpleNamespace(model="qwen3", config=sizes),
    }
    boundaries = [
        BoundarySpec("vision", "projector"),
        BoundarySpec("drawing", "second"),
        BoundarySpec("projector", "llm", "image"),
        BoundarySpec("second", "llm", "sketch"),
    ]
    return make_adapters(
        modules,
        boundaries,
        {"vision": "image", "drawing": "sketch"},
        VOCAB,
        {"image": (1, 8, 8), "sketch": (1, 8, 8)},
    )


def make_sample(name: str, text: str, targets, seed: int = 0):
    """`i` is an image (4 rows), `s` a sketch (1 row), other letters are tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    items, media = [], {"image": [], "sketch": []}
    for letter in text:
        kind = {"i": "image", "s": "sketch"}.get(letter)
        if kind is None:
            tokens.append(3 + ord(letter) % 20)
            continue
        rows = 4 if kind == "image" else 1
        items.append(MediaItem(kind, (1, 8, 8), len(tokens), rows))
        tokens += [IMAGE if kind == "image" else SKETCH] * rows
        media[kind].append(torch.rand(1, 8, 8, generator=generator))
    return Sample(name, torch.tensor(tokens), media), SampleMeta(name, len(tokens), tuple(items), tuple(targets))


FULL = [
    make_sample("a", "xiysz", [(5, 8)], 1),
    make_sample("b", "text only", [(4, 5), (7, 9)], 2),
    make_sample("c", "iixssq", [(9, 12)], 3),
]
TEXT = [FULL[1]]


def run(adapters, modules, pairs):
    """Logits and batch of a single process."""
    samples, metas = [p[0] for p in pairs], [p[1] for p in pairs]
    batches = {
        name: a.collate(samples, metas, placeholders={"image": IMAGE, "sketch": SKETCH}, pad_id=0)
        for name, a in adapters.items()
    }

    def rows(name, **inputs):
        return adapters[name].forward(modules[name], batches[name], inputs)

    projector = rows("projector", vision=rows("vision"))
    second = rows("second", drawing=rows("drawing"))
    return rows("llm", projector=projector, second=second), batches, projector, second


def build(adapters, dtype):
    return {name: build_module(a, name, 0, dtype) for name, a in adapters.items()}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
@pytest.mark.parametrize("llm", [{}, {"tie_word_embeddings": True}, {"use_sliding_window": True, "sliding_window": 3}])
def test_llm_equals_transformers_own_forward(dtype, bound, llm):
    """Merged with masked_scatter, a padding mask, logits everywhere. (fp64: transformers casts norms to fp32.)"""
    adapters = recipe(**llm)
    modules: Any = build(adapters, dtype)
    logits, batches, projector, second = run(adapters, modules, FULL)
    ids = batches["llm"]["input_ids"]
    embeddings = modules["llm"].get_input_embeddings()(ids)
    for rows, token in ((projector, IMAGE), (second, SKETCH)):
        embeddings = embeddings.masked_scatter((ids == token)[..., None], rows)
    lengths = torch.tensor([meta.tokens for _, meta in FULL])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    expected = modules["llm"](inputs_embeds=embeddings, attention_mask=mask).logits
    expected = torch.cat([expected[i, a - 1 : b - 1] for i, (_, m) in enumerate(FULL) for a, b in m.targets])
    assert logits.shape == (9, VOCAB)
    assert (logits - expected).abs().max() < bound
    assert batches["llm"]["targets"].tolist() == [
        int(s.tokens[p]) for s, m in FULL for a, b in m.targets for p in range(a, b)
    ]


def test_vision_equals_transformers_own_forward():
    adapters = recipe()
    modules: Any = build(adapters, torch.float32)
    media = torch.rand(5, 1, 8, 8)
    rows = adapters["vision"].forward(modules["vision"], {"media": media}, {})
    one_by_one = [modules["vision"](pixel_values=m[None]).last_hidden_state[0] for m in media]
    assert rows.shape == (20, 16)
    assert (rows - torch.cat(one_by_one)).abs().max() < 1e-5


def gradients(adapters, modules, pairs):
    for module in modules.values():
        module.zero_grad()
    logits, batches, *_ = run(adapters, modules, pairs)
    loss = cross_entropy(logits, batches["llm"]["targets"], reduction="sum")
    loss.backward()
    return loss.detach(), {f"{n}.{p}": v.grad for n, m in modules.items() for p, v in m.named_parameters()}


def test_the_loss_is_a_sum_over_samples():
    """So is every gradient: padding, other samples and their order leave no trace."""
    adapters = recipe()
    modules = build(adapters, torch.float64)
    loss, grads = gradients(adapters, modules, FULL)
    parts = [gradients(adapters, modules, [pair]) for pair in FULL]
    assert abs(sum(p[0] for p in parts) - loss) < 1e-5
    for key, grad in grads.items():
        total = sum(p[1][key] for p in parts)
        assert (total - grad).abs().max() < 1e-5, key


@pytest.mark.parametrize("pairs", [TEXT, [], [make_sample("d", "xiy", [])]], ids=["text only", "empty", "no targets"])
def test_u1_absent_modality_gives_zero_gradients_not_none(pairs):
    adapters = recipe()
    modules = build(adapters, torch.float32)
    loss, grads = gradients(adapters, modules, pairs)
    assert all(g is not None and bool(g.isfinite().all()) for g in grads.values())
    assert not any(g.any() for key, g in grads.items() if pairs is not TEXT or not key.startswith("llm"))
    assert bool(loss != 0) == (pairs is TEXT)


def test_attention_is_causal_without_a_mask(monkeypatch):
    """sdpa is called with is_causal and no dense mask; the vision tower without either."""
    calls = []

    def spy(*args, attn_mask=None, is_causal=False, **kwargs):
        calls.append((attn_mask, is_causal))
        return scaled_dot_product_attention(*args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    adapters = recipe()
    run(adapters, build(adapters, torch.float32), FULL)
    assert calls == [(None, False)] * 4 + [(None, True)] * 2


def test_the_head_runs_on_target_positions_only():
    adapters = recipe()
    modules: Any = build(adapters, torch.float32)
    seen = []
    modules["llm"].lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    run(adapters, modules, FULL)
    assert seen == [(9, 24)]


def test_parameter_names_are_those_of_the_ready_made_model():
    adapters = recipe()
    for name, module in build(adapters, torch.float32).items():
        names = {n for n, _ in module.named_modules()}
        assert set(adapters[name].layers()) <= names
        covered = tuple(f"{layer}." for layer in adapters[name].layers())
        assert all(p.startswith(covered) for p, _ in module.named_parameters())
