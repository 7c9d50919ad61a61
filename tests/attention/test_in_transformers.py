"""Context-parallel attention inside transformers' models, through their registry."""

import pytest
import torch

from hetmesh.attention import in_transformers
from hetmesh.attention.context_attention import ContextAttention
from hetmesh.attention.in_transformers import register
from hetmesh.context import assign, causal, join, text_with_instances
from hetmesh.errors import BoundaryError

LAYERS = 3


def decoder(attention):
    """A small Qwen3 whose last layers have a sliding window."""
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

    config = Qwen3Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
    )
    config._attn_implementation = attention
    torch.manual_seed(0)
    return Qwen3Model(config).double()


def run(model, x, positions, state=None):
    more = {} if state is None else {"attention_state": state}
    return model(inputs_embeds=x, position_ids=positions, use_cache=False, **more).last_hidden_state


def embeddings(batch, length):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, length, 16, dtype=torch.float64, generator=generator)


def gradients(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_a_model_equals_its_own_attention_and_every_layer_is_counted():
    x, positions = embeddings(2, 12), torch.arange(12).expand(2, 12)
    ours, theirs = decoder(register()), decoder("sdpa")
    in_transformers.counter.clear()
    y = run(ours, x, positions, ContextAttention(join([causal(12)] * 2), name="llm cp attention"))
    expected = run(theirs, x, positions)
    assert torch.allclose(y, expected, rtol=0, atol=1e-12)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert all(torch.allclose(a, b, atol=1e-11) for a, b in zip(gradients(ours), gradients(theirs), strict=True))
    assert in_transformers.counter == {("llm cp attention", layer): 1 for layer in range(LAYERS)}


def test_autocast():
    x, positions = embeddings(1, 12).float(), torch.arange(12)[None]
    ours, theirs = decoder(register()).float(), decoder("sdpa").float()
    with torch.autocast("cpu", torch.bfloat16):
        y = run(ours, x, positions, ContextAttention(causal(12)))
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(theirs, x, positions)
    assert torch.allclose(y, expected, atol=0.05)


def test_packed_samples_equal_each_alone():
    x, positions = embeddings(1, 20), torch.cat([torch.arange(8), torch.arange(12)])[None]
    model = decoder(register())
    packed = run(model, x, positions, ContextAttention(join([causal(8), causal(12)])))
    for rows in (slice(0, 8), slice(8, 20)):
        alone = run(model, x[:, rows], positions[:, rows], ContextAttention(causal(rows.stop - rows.start)))
        assert torch.allclose(packed[:, rows], alone, rtol=0, atol=1e-12)


def test_without_a_microbatch_it_is_refused():
    with pytest.raises(BoundaryError, match=r"layer 0: no microbatch is set"):
        run(decoder(register()), embeddings(1, 4), torch.arange(4)[None])


MASK = join([text_with_instances(300, [(20, 190), (230, 290)]), causal(200)])


def shared(rank, shares, checkpoint):
    """The model on this rank's tokens (one that counts for nothing, where it has none); gradients summed by hand."""
    model = decoder(register())
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    at = torch.tensor([row for a, b in shares[rank] for row in range(a, b)], dtype=torch.int64)
    in_transformers.counter.clear()
    state = ContextAttention(MASK, shares, range(len(shares)), name="llm cp attention", chunk=128)
    used = at if len(at) else torch.zeros(1, dtype=torch.int64)
    y = run(model, embeddings(1, MASK.length)[:, used], used[None], state)[:, : len(at)]
    y.square().sum().backward()
    for gradient in gradients(model):
        torch.distributed.all_reduce(gradient)
    return y.detach(), gradients(model), dict(in_transformers.counter)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_model_on_four_ranks_equals_one(pool4, checkpoint):
    whole = decoder(register())
    expected = run(whole, embeddings(1, MASK.length), torch.arange(MASK.length)[None], ContextAttention(MASK))
    expected.square().sum().backward()
    shares = (*assign(MASK, 3), ())
    for runs, (y, found, calls) in zip(shares, pool4.run(shared, shares, checkpoint), strict=True):
        at = [row for a, b in runs for row in range(a, b)]
        assert torch.allclose(y, expected[:, at], rtol=0, atol=1e-12)
        assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(found, gradients(whole), strict=True))
        assert calls == {("llm cp attention", layer): 1 + checkpoint for layer in range(LAYERS)}
