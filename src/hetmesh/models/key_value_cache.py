"""Next tokens from an LLM with a key-value cache: each token is computed once."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hetmesh.models.adapter import Adapter
from hetmesh.models.lazy_transformers import hf
from hetmesh.models.named.causal_lm import CausalLMAdapter

Cache = dict[str, Any]
"""What is kept between tokens; empty before the first."""


def keeps_keys(adapter: Adapter, model: Any, packed: bool) -> bool:
    """Whether `next_logits` can replace an LLM's forward: it is a causal decoder of transformers whose attention goes
    through transformers' registry. `packed`: whether its attention is hetmesh's own (packing or another mask), which
    has no cache."""
    if packed or not isinstance(adapter, CausalLMAdapter) or adapter.abilities.use_packed is None:
        return False
    return _cache_argument(adapter.decoder_of(model)) is not None


def _cache_argument(decoder: Any) -> str | None:
    """The name under which the forward of `decoder` takes its cache; transformers renamed it in 5.24."""
    parameters = inspect.signature(decoder.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


def next_logits(
    adapter: CausalLMAdapter, model: Any, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor], cache: Cache
) -> Tensor:
    """The logits `[1, vocab]` of the last target of the one sample in `batch`, which continues the sample of the
    previous call. Masks are transformers' own, as in its `generate`. `cache`: the cache of this sample; the tokens up
    to the one before the last target are added."""
    known = cache.setdefault("keys and values", hf("DynamicCache")(config=adapter.config))
    start, stop = known.get_seq_length(), int(batch["target_positions"][-1]) + 1
    embedded = adapter.embedded(model, batch["input_ids"], batch, inputs)[None, start:stop]
    features = adapter.added_features(model, embedded, batch, inputs) if start == 0 else {}
    decoder = adapter.decoder_of(model)
    hidden = decoder(
        inputs_embeds=embedded,
        position_ids=batch["position_ids"][..., start:stop],
        attention_mask=None,
        use_cache=True,
        **{str(_cache_argument(decoder)): known},
        **features,
    ).last_hidden_state
    return adapter.logits(model, hidden[0, -1:])
