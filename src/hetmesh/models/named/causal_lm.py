"""A transformers causal LM as the LLM: tokens, and rows at placeholders -> logits of the target tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, nn

from hetmesh.attention.in_transformers import use_in
from hetmesh.attention.packed_rows import attention_of
from hetmesh.errors import RecipeError
from hetmesh.graph.module_graph import Activation
from hetmesh.graph.sample import SampleMeta
from hetmesh.models.adapter import Abilities, Adapter, AdapterDefaults, AdapterRequest, SampleLike
from hetmesh.models.collate import collate_tokens
from hetmesh.models.config_keys import hf, positive_int, transformers_config
from hetmesh.models.weights.model_forms import class_forms
from hetmesh.models.weights.pretrained import Pretrained, prefixes
from hetmesh.models.weights.stored_form import StoredForm, in_parts
from hetmesh.parallel.key_heads import KEY_HEADS, KeyHeads
from hetmesh.parallel.linear_cross_entropy import logits_or_loss
from hetmesh.parallel.stage_views import PREVIOUS, is_absent
from hetmesh.parallel.tokens import tokens_of


@dataclass(frozen=True)
class CausalLMAdapter(AdapterDefaults):
    """A decoder `model` with `embed_tokens`, `layers` and `norm`, and a head `lm_head`.

    Padding is on the right and attention causal, so no real token ever sees padding and no mask is needed: attention
    runs with `is_causal` and no dense mask. `lm_head` runs only on the positions that predict a target. `sources`:
    producer module -> the placeholder that its rows replace. `hidden`: what modules after it read, by output: the
    placeholder of the tokens, and the layer whose output it is; None: what the head reads.
    """

    config: Any
    model_class: Any
    sources: Mapping[str, str]
    out_features: None = None
    hidden: Mapping[str, tuple[str, str | None]] = field(default_factory=lambda: MappingProxyType({}))
    checkpoint_names: ClassVar = (
        *prefixes("", "language_model."),
        (("model.", "model.language_model."), ("lm_head.", "lm_head.")),  # multimodal models of transformers 5
        (("model.", ""),),  # saved without its head, which is then tied
    )
    in_two_dims: ClassVar[Mapping[str, tuple[int, int]]] = MappingProxyType({})
    """Name suffixes of tensors that the module holds with a dim split in two -> that dim, and the size of the first."""
    checkpoint_unused: ClassVar = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

    @classmethod
    def make_from(
        cls, request: AdapterRequest, config_class: Any, model_class: Any, derived: Mapping[str, Any]
    ) -> CausalLMAdapter:
        """The adapter of a recipe's module. Its config table overrides the `derived` values, or those of the
        directory's config.json with `initial_load_path`; `vocab_size` is the data source's, or a given larger one."""
        derived = {"vocab_size": request.vocab_size, **derived}
        config = transformers_config(request, config_class, derived, types=(config_class.model_type,))
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"):
            positive_int(request, key, getattr(config, key))
        if config.num_attention_heads % config.num_key_value_heads:
            raise RecipeError(
                f"{request.key}.config.num_key_value_heads: must divide num_attention_heads = "
                f"{config.num_attention_heads}, got {config.num_key_value_heads}"
            )
        features = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if features % 2:  # of which transformers rotates all, whatever `partial_rotary_factor` says
            raise RecipeError(f"{request.key}.config.head_dim: must be even (rotary positions), got {features}")
        if config.vocab_size < request.vocab_size:
            raise RecipeError(
                f"{request.key}.config.vocab_size: must be at least the data source's {request.vocab_size}, "
                f"got {config.vocab_size}"
            )
        return cls(config, model_class, request.sources, hidden=request.hidden)

    @property
    def in_features(self) -> int:
        return self.config.hidden_size

    @property
    def abilities(self) -> Abilities:
        return Abilities(
            activation=Activation(self.config.hidden_size, padded=True),
            token_sharded=self._token_sharded,
            splits_tokens=True,
            use_packed=self.use_packed,
            attention_dropout=self.config.attention_dropout or 0.0,
            stored_forms=self.stored_forms,
            head="lm_head",
            loss_by_chunks=True,
        )

    def stored_forms(self, pretrained: Pretrained) -> Mapping[str, StoredForm]:
        """The tensors of a directory as the module holds them. One that cannot be split as `in_two_dims` says is left
        unchanged, so that the comparison of shapes refuses it."""
        forms = dict(self.read_forms(pretrained))
        for end, (dim, count) in self.in_two_dims.items():
            for name, form in forms.items():
                if name.endswith(end) and dim < len(form.shape) and form.shape[dim] % count == 0:
                    forms[name] = in_parts(form, dim, count)
        return forms

    def read_forms(self, pretrained: Pretrained) -> Mapping[str, StoredForm]:
        """The tensors of a directory as `model_class` holds them."""
        return class_forms(self.model_class, self.config, pretrained)

    def build(self) -> nn.Module:
        return self.model_class(self.config)

    @property
    def _token_sharded(self) -> tuple[str, ...]:
        # transformers would build the mask of a sliding window from the shape of a token share.
        windows = "sliding_attention" in (getattr(self.config, "layer_types", None) or ())
        return () if windows else ("model.layers", "model.norm")

    def use_packed(self, module: nn.Module) -> None:
        """Let `module` take packed samples, and tokens shared between ranks: its attention becomes hetmesh's own."""
        use_in(module, self.config)

    def layers(self) -> tuple[str, ...]:
        blocks = (f"model.layers.{i}" for i in range(self.config.num_hidden_layers))
        return ("model.embed_tokens", *blocks, "model.norm", "lm_head")

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        return self.plan_from(self.config.base_model_tp_plan)

    def plan_from(self, of_decoder: Mapping[str, str]) -> Mapping[str, Any]:
        """The plan with what transformers' plan of the decoder does not have."""
        prefix, config = self.model_class.base_model_prefix, self.config
        plan: dict[str, Any] = {f"{prefix}.{pattern}": style for pattern, style in of_decoder.items()}
        features = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        plan[f"{prefix}.layers.*.self_attn"] = KeyHeads(config.num_key_value_heads, features)
        # A head tied to the (replicated) embedding stays replicated with it.
        head = {} if config.tie_word_embeddings else self.model_class._tp_plan
        return {**plan, **head}

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        return {key: getattr(self.config, key) for key in ("num_attention_heads", KEY_HEADS)}

    def collate(self, samples: Sequence[SampleLike], metas: Sequence[SampleMeta], **how: Any) -> dict[str, Tensor]:
        read = {output: at for output, (at, _) in self.hidden.items()}
        return collate_tokens(samples, metas, sources={**read, **self.sources}, **how)

    def forward(
        self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> Tensor | Mapping[str, Tensor]:
        model: Any = module
        ids, position_ids = batch["input_ids"], batch["position_ids"]
        if ids.numel() == 0:  # transformers cannot reshape empty tensors: use one token that predicts nothing
            ids, position_ids = ids.new_zeros(1, 1), position_ids.new_zeros(*position_ids.shape[:-2], 1, 1)
        tokens = tokens_of(module)
        flat = inputs[PREVIOUS] if PREVIOUS in inputs else self.embedded(model, ids, batch, inputs)
        # Finished masks (here: none) keep transformers from detecting packed sequences and building a mask. Models
        # without sliding layers (Llama) accept no finished masks: they detect no packing, and build none. Eager
        # attention is causal only by its mask, which transformers then builds.
        decoder = self.decoder_of(model)
        builds = getattr(decoder, "has_sliding_layers", True) or decoder.config._attn_implementation == "eager"
        masks: Any = None if builds else {"full_attention": None}
        extra: dict[str, Any] = {}
        if (attention := attention_of(batch)) is not None:
            extra["attention_state"] = attention
            masks = masks or flat.new_zeros(1, 1, 1, 1)  # four dims count as finished; the packed mask is elsewhere
        embedded = tokens.as_input(flat, ids.shape)
        with outputs_of(module, {layer for _, layer in self.hidden.values() if layer is not None}) as of_layers:
            hidden = decoder(
                inputs_embeds=embedded,
                position_ids=position_ids,
                attention_mask=tokens.mask(flat) if masks is None else masks,
                use_cache=False,
                **extra,
                **self.added_features(model, embedded, batch, inputs),
            ).last_hidden_state.flatten(0, 1)
        last = not is_absent(self.head_of(model))
        found = of_layers | ({None: hidden} if last else {})
        read = {
            output: found[layer].flatten(0, -2).index_select(0, tokens.locate(batch, f"positions.{at}"))
            for output, (at, layer) in self.hidden.items()
            if layer in found
        }
        rows = {"": hidden}
        if last:
            of_targets, make = tokens.select(hidden, batch, "target_positions"), partial(self.logits, model)
            rows = logits_or_loss(self.head_of(model), make, of_targets, batch, plain=self.plain_head)
        return rows[""] if "" in rows and not read else {**rows, **read}

    def decoder_of(self, model: Any) -> Any:
        return model.model

    def head_of(self, model: Any) -> Any:
        return model.lm_head

    def embed(self, model: Any, ids: Tensor) -> Tensor:
        return model.model.embed_tokens(ids)

    @property
    def plain_head(self) -> bool:
        """Whether `logits` only calls the head."""
        return type(self).logits is CausalLMAdapter.logits

    def logits(self, model: Any, hidden: Tensor) -> Tensor:
        """The logits `[n, vocab]` of what the decoder returns, `[n, features]`."""
        return self.head_of(model)(hidden)

    def embedded(self, model: Any, ids: Tensor, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        """The flat embedded tokens that this rank keeps, with rows in place of their placeholders."""
        tokens = tokens_of(model)
        flat = tokens.split(self.embed(model, ids).flatten(0, 1))
        for source, at in self.sources.items():
            rows, positions = inputs[source], tokens.locate(batch, f"positions.{at}")
            flat = flat.index_copy(0, positions, rows.to(flat.dtype))
        return flat

    def added_features(
        self, model: Any, hidden: Tensor, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Further arguments of the decoder, by which it adds the side outputs among `inputs` after some of its layers.
        `hidden`: the embedded tokens, `[B, S, features]`; of packed or shared tokens `[1, kept, features]`."""
        return {}


@contextmanager
def outputs_of(module: nn.Module, layers: Collection[str]) -> Iterator[dict[str | None, Tensor]]:
    """While it lasts, the hidden states that those of the layers return that are here, by FQN."""
    found: dict[str | None, Tensor] = {}

    def keep(layer: str) -> Callable[[nn.Module, Any, Any], None]:
        def kept(_: nn.Module, __: Any, output: Any) -> None:
            found[layer] = output if isinstance(output, Tensor) else output[0]

        return kept

    here = {layer: module.get_submodule(layer) for layer in layers}
    handles = [part.register_forward_hook(keep(layer)) for layer, part in here.items() if not is_absent(part)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


Cache = dict[str, Any]
"""What is kept between tokens; empty before the first."""


def keeps_keys(adapter: Adapter, model: Any, packed: bool) -> bool:
    """Whether `next_logits` can replace an LLM's forward: it is a causal decoder with attention from transformers'
    registry. `packed`: whether its attention is hetmesh's own (packing or another mask), which has no cache."""
    if packed or not isinstance(adapter, CausalLMAdapter) or adapter.abilities.use_packed is None:
        return False
    if "attention_mask" in adapter.abilities.reasons:  # layers that remember more than keys and values
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
