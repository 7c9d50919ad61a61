"""Cases of peers' own tests: on which positions rows land (Megatron-LM), what a pack is (Megatron-Bridge)."""

import pytest
import torch

from hetmesh.data.source import Sample
from hetmesh.errors import SampleError
from hetmesh.graph.sample import MediaItem, SampleMeta
from hetmesh.models import AdapterRequest, build_module
from hetmesh.models.collate import collate_tokens
from hetmesh.models.named.qwen3 import Qwen3Adapter
from hetmesh.models.packing import pack_tokens

PLACEHOLDERS = {"image": 1, "sound": 2, "video": 3}
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def llm(*kinds):
    """An LLM whose own embeddings are zero, and its adapter; rows of each kind come from a module of that name."""
    request = AdapterRequest("llm", SIZES, vocab_size=30, placeholders={kind: kind for kind in kinds})
    adapter = Qwen3Adapter.make(request)
    model = build_module(adapter, "llm", 0, torch.float32)
    model.get_input_embeddings().weight.data.zero_()
    return adapter, model


def sample(name, length, items):
    """`items`: (kind, first position, rows)."""
    tokens = torch.full((length,), 9)
    for kind, position, rows in items:
        tokens[position : position + rows] = PLACEHOLDERS[kind]
    media = tuple(MediaItem(kind, (1,), position, rows) for kind, position, rows in items)
    return Sample(name, tokens, {}), SampleMeta(name, length, media, ((length - 1, length),))


def embedded(kinds, *pairs):
    """What the decoder gets, `[samples, length, 8]`, and the rows of each kind: 1, 2, 3, ... times ten per kind."""
    adapter, model = llm(*kinds)
    samples, metas = zip(*pairs, strict=True)
    batch = adapter.collate(samples, metas, placeholders=PLACEHOLDERS)
    rows = {}
    for i, kind in enumerate(kinds, 1):
        count = int(sum((each.tokens == PLACEHOLDERS[kind]).sum() for each in samples))
        rows[kind] = (torch.arange(1.0, count + 1) + 100 * i)[:, None].expand(-1, 8)
    found = []
    model.model.register_forward_pre_hook(
        lambda _, args, given: found.append(given["inputs_embeds"].detach()), with_kwargs=True
    )
    adapter.forward(model, batch, rows)
    return found[0]


def landed(out):
    """Value by position of each sample, where it is not zero."""
    assert torch.equal(out, out[..., :1].expand_as(out))
    return [{int(at): float(row[at, 0]) for at in row[:, 0].nonzero()} for row in out]


def test_rows_of_one_modality_land_on_their_own_positions():
    out = embedded(["image"], sample("a", 6, [("image", 2, 1)]), sample("b", 6, [("image", 4, 1)]))
    assert landed(out) == [{2: 101}, {4: 102}]


def test_rows_of_three_modalities_land_on_their_own_positions():
    kinds = ("image", "sound", "video")
    first = sample("a", 10, [(kind, at, 1) for kind, at in zip(kinds, (1, 4, 8), strict=True)])
    second = sample("b", 10, [(kind, at, 1) for kind, at in zip(kinds, (2, 5, 7), strict=True)])
    assert landed(embedded(kinds, first, second)) == [{1: 101, 4: 201, 8: 301}, {2: 102, 5: 202, 7: 302}]


def test_several_images_of_unequal_length():
    """Two of 3 and 2 rows in one sample, one of 4 in the other."""
    first = sample("a", 9, [("image", 1, 3), ("image", 6, 2)])
    out = embedded(["image"], first, sample("b", 9, [("image", 3, 4)]))
    assert landed(out) == [
        {1: 101, 2: 102, 3: 103, 6: 104, 7: 105},
        {3: 106, 4: 107, 5: 108, 6: 109},
    ]


def test_counts_that_differ_and_a_modality_without_a_token_are_errors():
    tokens, meta = sample("a", 6, [("image", 2, 2)])
    tokens.tokens[4] = PLACEHOLDERS["image"]
    with pytest.raises(SampleError, match=r"sample 'a': 3 'image' placeholder tokens, but .* 2 rows"):
        embedded(["image"], (tokens, meta))
    adapter, _ = llm("image")
    with pytest.raises(SampleError, match=r"sample 'a': 0 'image' placeholder tokens, but .* 2 rows"):
        adapter.collate([tokens], [meta], placeholders={"sound": 2})


def packed(lengths, pad_id=0, token=9, axes=1):
    """The pack of samples of `token`, and the mRoPE positions of each counted from 0 along `axes` axes."""
    positions = {n: (tuple(range(n)),) * axes if axes > 1 else None for n in lengths}
    metas = [SampleMeta(str(n), n, (), ((1, n),), position_ids=positions[n]) for n in lengths]
    samples = [Sample(str(n), torch.full((n,), token), {}) for n in lengths]
    batch = collate_tokens(samples, metas, sources={}, placeholders={}, pad_id=pad_id)
    return pack_tokens(batch, lengths, ((0, sum(lengths)),))


def test_samples_of_3_2_4_tokens_become_one_row_whose_positions_start_anew():
    out = packed([3, 2, 4])
    assert out["input_ids"].shape == (1, 9)
    assert out["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]  # so they begin at 0, 3, 5; the longest has 4
    assert out["target_positions"].tolist() == [0, 1, 3, 5, 6, 7]  # none of them predicts the next sample
    assert packed([3, 2])["input_ids"].shape == (1, 5)  # padded to 4 and 4 before


def test_a_token_like_the_padding_stays_for_lengths_say_what_is_padding():
    assert packed([3, 2], pad_id=9, token=9)["input_ids"].tolist() == [[9] * 5]


def test_positions_of_three_axes_are_packed_along_their_tokens():
    out = packed([3, 2], axes=3)
    assert out["position_ids"].tolist() == [[[0, 1, 2, 0, 1]]] * 3  # [3, 1, 5]


def test_positions_of_other_lengths_are_an_error():
    meta = SampleMeta("a", 3, (), ((1, 3),), position_ids=((0, 1, 2), (0, 1, 2), (0, 1)))
    with pytest.raises(SampleError, match="'a': position_ids must be 3 rows of 3 positions"):
        collate_tokens([Sample("a", torch.ones(3).long(), {})], [meta], sources={}, placeholders={}, pad_id=0)
