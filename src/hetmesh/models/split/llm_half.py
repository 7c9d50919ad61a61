"""The LLM of any multimodal model of transformers: tokens and rows at placeholders -> logits of the target tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from hetmesh.attention.in_transformers import use_in
from hetmesh.attention.mixers import looks_in_registry, mixers, use_in_mixer
from hetmesh.context import Rule, runs_of_sample
from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph.module_graph import Activation
from hetmesh.graph.sample import SampleMeta
from hetmesh.layout.hashing import memoized
from hetmesh.models.adapter import Abilities, AdapterRequest, SampleLike
from hetmesh.models.config_keys import check_keys
from hetmesh.models.named.causal_lm import CausalLMAdapter
from hetmesh.models.named.deepstack import DEEPSTACK, deepstack_arguments, layer_index
from hetmesh.models.named.qwen3_moe import COEFFICIENT, HALVES, balance_of, fused_layers, two_halves
from hetmesh.models.split.after_head import tried_head, whole_head
from hetmesh.models.split.mixer_probe import padded_mixers
from hetmesh.models.split.processor import processor_at
from hetmesh.models.split.rope_index import check_around, has_plain_positions, rope_positions
from hetmesh.models.split.text_plan import TextPlan, text_plan
from hetmesh.models.split.tower_plan import repeated_blocks
from hetmesh.models.split.whole_model import LLM, PartAdapter, WholeModel, whole_model
from hetmesh.models.weights.build import build_empty
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.models.weights.stored_form import StoredForm
from hetmesh.parallel.experts.block import ExpertLayers
from hetmesh.parallel.key_heads import KeyHeads
from hetmesh.parallel.stage_views import PREVIOUS, prune

ATTENTION_KINDS, TOKENWISE_KINDS = frozenset({"full_attention", "sliding_attention"}), frozenset({"mlp", "moe"})
"""Of a config's `layer_types` those in which tokens meet by attention alone, and those in which they do not meet."""


@dataclass(frozen=True, eq=False)
class HfLlmAdapter(PartAdapter, CausalLMAdapter):  # type: ignore[misc, override]
    """The whole model without its towers and what follows them. hetmesh puts rows into the places of placeholders and
    gives positions; decoder and head are the model's own, the head through the forward of the whole."""

    whole: WholeModel = None  # type: ignore[assignment]
    part: str = LLM
    balance: float = 0.0
    packed: bool = False

    @classmethod
    def make(cls, request: AdapterRequest) -> HfLlmAdapter:
        """The adapter of a recipe's module. Everything is in its directory; of experts the recipe may give the weight
        of the load-balancing loss, `router_aux_loss_coef`."""
        if request.pretrained is None:
            raise RecipeError(f"{request.key}.initial_load_path is missing: {request.model!r} is made from it")
        whole = whole_model(request.pretrained)
        if not whole.has_llm or not (whole.towers or _is_causal(whole.model.get_decoder())):
            raise RecipeError(
                f"{request.pretrained}: {whole.model_class.__name__} has no LLM: a decoder, whose attention is causal, "
                "and a head"
            )
        config, shares = whole.text_config, whole.family.experts
        check_keys(request, (COEFFICIENT,) if shares else ())
        if config.vocab_size < request.vocab_size:
            raise RecipeError(
                f"{request.key}: its vocabulary has {config.vocab_size} tokens, that of the data source "
                f"{request.vocab_size}"
            )
        if whole.positions == "rope_index":
            has_plain_positions(whole)
        balance = balance_of(request, config) if shares else 0.0
        named = request.sources, None, request.hidden
        return cls(config, whole.model_class, *named, whole=whole, balance=balance, packed=request.packed)

    @property
    def abilities(self) -> Abilities:
        config, reasons = self.config, self.reasons
        takes_features = bool(DEEPSTACK & self._forward_names)
        positions = self.whole.positions == "rope_index"
        return Abilities(
            activation=None if "activation" in reasons else Activation(config.hidden_size, padded=True),
            token_sharded=() if "token_sharded" in reasons else self._text_plan.token_sharded,
            token_gathered=self._text_plan.token_gathered,
            splits_tokens=True,
            use_packed=None if "use_packed" in reasons else self.use_packed,
            layer_of_output=self.layer_of_output if takes_features else None,
            position_ids=partial(rope_positions, self.whole) if positions else None,
            attention_dropout=getattr(config, "attention_dropout", None) or 0.0,
            stored_forms=self.stored_forms,
            experts=None if "experts" in reasons else self._experts,
            head=self._head,
            loss_by_chunks=True,
            reasons=reasons,
        )

    @property
    def in_two_dims(self) -> Mapping[str, tuple[int, int]]:  # type: ignore[override]
        return HALVES if self.whole.family.experts else {}

    def read_forms(self, pretrained: Pretrained) -> Mapping[str, StoredForm]:
        return self.whole.stored_forms(pretrained)

    @cached_property
    def _experts(self) -> ExpertLayers | None:
        if not self.whole.family.experts:
            return None
        return fused_layers(self.config, self.balance, f"{self.whole.decoder}.layers")

    @cached_property
    def _forward_names(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.decoder_of(self.whole.model).forward).parameters)

    @cached_property
    def scale(self) -> float | None:
        """By what the decoder multiplies embedded tokens before its first layer; 1.0 if it leaves them as they are,
        None if it does something else. Measured: its layers and norm hand on what they get."""
        module = build_empty(self)
        prune(module, self.layers(), (self.whole.embedding,))
        decoder: Any = self.decoder_of(module)
        tokens = torch.linspace(-1.0, 1.0, 2 * self.config.hidden_size).view(1, 2, -1).double()
        axes = (3,) if self.whole.positions == "rope_index" else ()
        at = torch.arange(2).expand(*axes, 1, 2)
        try:
            with torch.no_grad():
                given = decoder.double()(inputs_embeds=tokens, position_ids=at, use_cache=False).last_hidden_state
        except Exception:  # parameters without memory outside of layers and norm, and whatever else
            return None
        if given.shape != tokens.shape:  # of several streams
            return None
        scale = float((given * tokens).sum() / (tokens * tokens).sum())
        close = torch.allclose(given, scale * tokens, rtol=1e-6, atol=1e-9)  # constants may be rounded to fp32
        return (1.0 if abs(scale - 1) < 1e-12 else scale) if close and scale else None

    @cached_property
    def reasons(self) -> Mapping[str, str]:
        """Why it cannot do what it cannot do, by ability."""
        found: dict[str, str] = {}
        if self.scale is None:
            found["activation"] = (
                "its decoder changes the embedded tokens before its first layer, in a way that stages cannot take back"
            )
        if self._experts is not None and not (self.packed or self.balance):  # which transformers' own blocks compute
            found["experts"] = "its samples are padded; set training.pack_samples = true"
        unfit = {kind: how for kind, how in self._padded.items() if isinstance(how, str)}
        unknown = "; ".join(f"its layers of kind {kind!r}: {why}" for kind, why in unfit.items())
        if unfit:
            found["token_sharded"] = unknown
        elif not self._text_plan.token_sharded:
            found["token_sharded"] = "tensor parallelism does not split the attention of all of its layers"
        elif self.whole.family.mask == "causal":  # masks are built from the shape of a share, unless packed
            if self._windows:
                found["token_sharded"] = "it has layers with a sliding window"
            elif self.decoder_of(self.whole.model).config._attn_implementation == "eager":
                found["token_sharded"] = "its attention is eager, which only a mask of all tokens makes causal"
        if not any(isinstance(style, KeyHeads) for style in self._text_plan.plan.values()):
            found["key_heads"] = "which ranks cannot share: not all of its attentions have a k_proj and v_proj of heads"
        if (cap := getattr(self.config, "attn_logit_softcapping", None)) is not None:
            found["use_packed"] = f"its attention caps its logits, attn_logit_softcapping = {cap}"
        elif unfit:
            found["use_packed"] = unknown
        elif not self._attends_by_registry:
            found["use_packed"] = "its attention does not go through transformers' registry of attention functions"
        elif rope := _by_longest(self.config):
            found["use_packed"] = (
                f"its rotary frequencies follow the longest of the tokens at hand (rope_type = {rope!r}), which differ "
                "between samples and ranks"
            )
        elif self._windows and self.whole.family.mask == "prefix":
            found["use_packed"] = "transformers lifts the sliding window within a prefix, hetmesh does not"
        if kinds := sorted(self._mixed):
            found["attention_mask"] = f"its layers of kind {kinds} know no other order than that of the tokens"
        if padded := sorted(kind for kind, how in self._padded.items() if how is True):
            found["context_parallel"] = f"its layers of kind {padded} take samples only whole, and padded"
        if self._embeds_in_layers or self._types:
            found |= dict.fromkeys(("activation", "token_sharded", "use_packed"), "its layers read all tokens, too")
        return found

    @cached_property
    def _kinds(self) -> Mapping[str, str]:
        """The kind of each layer of the decoder by its FQN, as its config calls it; "" where it does not."""
        count, decoder = getattr(self.config, "num_hidden_layers", 0), self.decoder_of(self._empty)
        lists = {n: len(part) for n, part in decoder.named_children() if isinstance(part, nn.ModuleList)}
        blocks = [
            f"{self.whole.decoder}.{n}.{i}" for n, length in lists.items() if length == count for i in range(count)
        ]
        return dict(zip(blocks, getattr(self.config, "layer_types", None) or [""] * len(blocks), strict=False))

    @cached_property
    def _mixed(self) -> Mapping[str, str]:
        """A layer of each kind whose tokens mix otherwise than by attention alone."""
        known = ATTENTION_KINDS | TOKENWISE_KINDS | {""}
        remember = {n for n in self._kinds if any(mixers(self._empty.get_submodule(n)))}
        found = {kind: n for n, kind in self._kinds.items() if n in remember or kind not in known}
        lost = set(getattr(self.config, "layer_types", None) or ()) - set(self._kinds.values()) - known
        return found | dict.fromkeys(lost, "")

    @cached_property
    def _padded(self) -> Mapping[str, bool | str]:
        """How these kinds take samples in one row: `padded_mixers`."""
        module = build_empty(self) if self._mixed else self._empty
        axes = (3,) if self.whole.positions == "rope_index" else ()
        blocks = {name: module.get_submodule(name) for name in self._kinds}
        return {kind: padded_mixers(self.decoder_of(module), blocks, name, axes) for kind, name in self._mixed.items()}

    @property
    def _attends_by_registry(self) -> bool:
        """Whether its attention goes through transformers' registry of attention functions: its layers are asked where
        transformers does not vouch for it because others are there, too."""
        if not self._mixed:
            return getattr(self.decoder_of(self.whole.model), "_supports_attention_backend", False)
        blocks = [self._empty.get_submodule(name) for name, kind in self._kinds.items() if kind in ATTENTION_KINDS]
        return all(any(map(looks_in_registry, block.modules())) for block in blocks)

    @property
    def _windows(self) -> bool:
        kinds = getattr(self.config, "layer_types", None)
        if kinds:
            return "sliding_attention" in kinds
        return getattr(self.config, "sliding_window", None) is not None  # of all layers: Mistral, Phi-3

    def build(self) -> nn.Module:
        model = super().build()
        if self.whole.family.experts:
            two_halves(model)
            model.config.get_text_config().output_router_logits = False  # their loss is hetmesh's own
        return model

    def decoder_of(self, model: Any) -> Any:
        return model.get_submodule(self.whole.decoder)

    def head_of(self, model: Any) -> Any:
        return model.get_submodule(self.whole.head)

    def embed(self, model: Any, ids: Tensor) -> Tensor:
        return model.get_submodule(self.whole.embedding)(ids)

    def use_packed(self, module: nn.Module) -> None:
        """Let the decoder of `module` take samples in one row: its attention becomes hetmesh's own, and what its
        other layers remember begins anew at each sample."""
        use_in(self.decoder_of(module), self.config)
        for name, kind in self._kinds.items():
            for mixer in mixers(module.get_submodule(name)) if kind in self._mixed else ():
                use_in_mixer(mixer, padded=self._padded[kind] is True)

    @memoized
    def layers(self) -> tuple[str, ...]:
        decoder = self.whole.decoder
        blocks = tuple(name for name in repeated_blocks(self._empty) if name.startswith(f"{decoder}."))
        others = [
            f"{decoder}.{name}"
            for name, child in self.decoder_of(self._empty).named_children()
            if any(True for _ in child.parameters()) and not any(b.startswith(f"{decoder}.{name}.") for b in blocks)
        ]
        before = [name for name in others if name == self.whole.embedding]
        return (*before, *blocks, *(name for name in others if name not in before), self.whole.head)

    @cached_property
    def _text_plan(self) -> TextPlan:
        return text_plan(self.whole, self._empty)

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        return self._text_plan.plan

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        if self.abilities.experts is None:
            return self._text_plan.sizes
        return {**self._text_plan.sizes, "moe_intermediate_size": self.config.moe_intermediate_size}

    def layer_of_output(self, output: str) -> str | None:
        """The layer after which a side output of the encoder is added to its tokens; None: there is none."""
        blocks = [name for name in self.layers() if name.rpartition(".")[2].isdigit()]
        index = layer_index(output, len(blocks))
        return None if index is None else blocks[index]

    def collate(self, samples: Sequence[SampleLike], metas: Sequence[SampleMeta], **how: Any) -> dict[str, Tensor]:
        self._check_windows(metas)
        if self.whole.around:
            for sample, meta in zip(samples, metas, strict=True):
                check_around(self.whole, meta, sample.tokens)
        batch = super().collate(samples, metas, **how)
        if self.whole.positions == "from_1":
            batch["position_ids"] = batch["position_ids"] + 1
        ids = batch["input_ids"] if batch["input_ids"].numel() else torch.zeros(1, 1, dtype=torch.int64)  # as `forward`
        return batch | {name: make(ids) for name, make in self._types.items()}

    def _check_windows(self, metas: Sequence[SampleMeta]) -> None:
        """Raise SampleError for media items that see themselves whole, but not through a window: transformers lifts it
        there, hetmesh does not."""
        if not self._windows or self.whole.family.mask == "causal":
            return
        for meta in metas:
            runs = runs_of_sample(meta).segments
            longest = max((s.stop - s.start for s in runs if s.rule is Rule.BIDIRECTIONAL), default=0)
            if longest > self.config.sliding_window:
                raise SampleError(
                    f"sample {meta.id!r}: {longest} rows of media side by side, of which each sees all; the sliding "
                    f"window of {self.whole.model_class.__name__}'s layers is {self.config.sliding_window}"
                )

    def forward(
        self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> Tensor | Mapping[str, Tensor]:
        if PREVIOUS in inputs and self.scale not in (None, 1.0):  # the decoder multiplies in every stage
            inputs = {**inputs, PREVIOUS: inputs[PREVIOUS] / self.scale}
        use_loop_in_fp64(module)
        return super().forward(module, batch, inputs)

    def added_features(
        self, model: Any, hidden: Tensor, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        found: dict[str, Any] = {name: batch[name] for name in self._types}
        if self._embeds_in_layers:
            ids = batch["input_ids"].clone()
            for at in self.sources.values():
                ids.view(-1)[batch[f"positions.{at}"]] = self.config.pad_token_id  # as transformers has it
            ids = ids if ids.numel() else ids.new_zeros(1, 1)  # as `forward` has it
            found["per_layer_inputs"] = self.decoder_of(model).get_per_layer_inputs(ids)
        if DEEPSTACK & self._forward_names:
            found |= deepstack_arguments(self, model, hidden, batch, inputs)
        return found

    @cached_property
    def _types(self) -> Mapping[str, Any]:
        """Arguments of its decoder that say what tokens are (ERNIE 4.5 VL), and what makes them of ids."""
        names = [name for name in self._forward_names if name.endswith("_type_ids")]
        own = processor_at(self.whole.pretrained.path, str(self.whole.pretrained)).own if names else None
        return {name: make for name in names if (make := getattr(own, f"create_{name}", None))}

    @property
    def _embeds_in_layers(self) -> bool:
        """Whether each layer embeds the tokens once more (Gemma 4)."""
        known = "per_layer_inputs" in self._forward_names
        return known and bool(getattr(self.config, "hidden_size_per_layer_input", 0))

    @cached_property
    def _tried_head(self) -> tuple[bool, bool]:
        sizes = self.config.vocab_size, self.config.hidden_size
        return tried_head(self._empty, self._inner, self.whole.head, *sizes)

    @property
    def plain_head(self) -> bool:
        return self._tried_head[0]

    def logits(self, model: Any, hidden: Tensor) -> Tensor:
        """Through the forward of the whole, whose inner model gives `hidden`: what follows its head is the model's."""
        return whole_head(model, self._inner, hidden)

    @property
    def _inner(self) -> str:
        return self.whole.decoder.partition(".")[0]

    @cached_property
    def _head(self) -> str:
        """Its head, where tensor-parallel ranks may have shares of its logits."""
        split = self.whole.head in self._text_plan.plan  # by tensor parallelism
        return self.whole.head if split and self._tried_head[1] else ""


def use_loop_in_fp64(module: nn.Module) -> None:
    """Let the experts of a model of transformers in fp64 compute one by one: torch's grouped product has no fp64."""
    if next(module.parameters()).dtype is not torch.float64:
        return
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if getattr(config, "_experts_implementation", None) == "grouped_mm":
            config._experts_implementation = "eager"


def _by_longest(config: Any) -> str | None:
    """The rope_type of a config whose frequencies depend on the largest position in a call, None for others."""
    given = getattr(config, "rope_parameters", None) or {}
    tables = [given, *(table for table in given.values() if isinstance(table, Mapping))]  # one, or one by kind of layer
    return next((t["rope_type"] for t in tables if t.get("rope_type") in ("dynamic", "longrope")), None)


def _is_causal(decoder: nn.Module) -> bool:
    return all(getattr(part, "is_causal", True) for part in decoder.modules())
