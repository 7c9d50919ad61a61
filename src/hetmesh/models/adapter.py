"""The Adapter protocol: what hetmesh asks of a model. One stateless value per module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor, nn

from hetmesh.graph.module_graph import Activation, LossSpec
from hetmesh.graph.sample import SampleMeta
from hetmesh.layout import Intervals
from hetmesh.models.weights.pretrained import Names, Pretrained
from hetmesh.models.weights.stored_form import StoredForm
from hetmesh.parallel.experts.block import ExpertLayers


class SampleLike(Protocol):
    """The payload of one sample: int64 tokens `[T]`, and its media per kind in the order of their positions, or units
    of them and the rows that these make (`hetmesh.data.Sample`)."""

    @property
    def id(self) -> str: ...
    @property
    def tokens(self) -> Tensor: ...
    @property
    def media(self) -> Mapping[str, Sequence[Tensor]]: ...
    @property
    def units(self) -> Mapping[str, Mapping[str, Tensor]]: ...
    @property
    def unit_rows(self) -> Mapping[str, int]: ...


ItemGrid = Callable[[tuple[int, ...]], tuple[int, int, int]]
"""From a media item's raw shape to the grid of its rows: frames, height, width."""


@dataclass(frozen=True)
class SavedAs:
    """How a library other than transformers reads a module from a directory.

    Attributes:
        config: of config.json.
        loads_with: the class that reads it; empty where only hetmesh does.
        file_name: of the weights, without their number and ending.
    """

    config: Mapping[str, Any]
    loads_with: str = ""
    file_name: str = "model"


@dataclass(frozen=True)
class Abilities:
    """What only some models can do. All of it is absent by default, and a recipe that needs it is refused.

    Attributes:
        activation: pipeline stages: what passes between its layers.
        first_layers: FQNs of layers that stay together in the first stage.
        last_layers: FQNs of layers that stay together in the last stage.
        find_stages: where it takes seconds to find out: gives what is said here of stages and of shares of tokens.
        placed_rows: rows that it emits for each of a placed item, where a module after it joins several.
        unit_kinds: kinds of media that it takes as a directory's processor prepares them.
        stage_batch: for an encoder whose later stages read something, too: what, from the metadata of samples.
        token_sharded: sequence parallelism: FQNs of the submodules that work on a share of the tokens.
        token_gathered: patterns of the parts within these that read all tokens, although tensor parallelism leaves them
            whole.
        splits_tokens: its own forward splits tokens and joins them; else the first and last of these layers do.
        use_packed: packing and context parallelism: prepares the module for them (hetmesh's own attention).
        tokens_per_row: for an encoder whose ranks can share the tokens of its media: how many tokens make one row.
        on_rows: for such an encoder: FQNs of the layers that work on rows; all others work on tokens.
        attention_copies: for such an encoder: what its own attention keeps (`hetmesh.cost.LayerShape`).
        share: for such an encoder: the part of a batch of `collate` that belongs to the tokens kept, in their order.
        side_outputs: names of its outputs besides the rows.
        layer_of_output: the layer after which a side output of a producer is added; None: there is none.
        position_ids: for an LLM with multimodal RoPE: the positions of an expanded sample, given the grids by media.
        item_grid: for an encoder: the grid of an item's rows, from its raw shape.
        attention_dropout: the share of attention probabilities that its own attention drops in training.
        stored_forms: for a model that joins several tensors of a checkpoint into one (experts): all tensors of a
            directory as it reads them, by names that `checkpoint_names` knows. None: it reads them unchanged.
        experts: its mixture-of-experts blocks; None: it has none that ranks can share.
        gathered_whole: with FSDP its layers are gathered together, because which of them it calls, and how often,
            depends on its input, so that ranks would gather different layers at a time.
        per_item: patterns of the parts that run once for each media item, not for each row (what is made of a time).
        row_copies: of such a module's blocks: what their backward keeps beside products (`hetmesh.cost.LayerShape`).
        draws: for a module after the LLM: the width of the noise that it needs, a row of it per row of its targets. Its
            batch then has `noise`, standard normal `[latents, draws]`, and `time`, uniform in [0, 1), `[items]`, drawn
            per sample, so alike in every layout.
        sample: for such a module: one item from `(module, hidden states [rows, in_features], raw shape, noise [latents,
            draws], steps)`; where its targets are an encoder's rows, these, for the encoder's `decode`.
        sampling_steps: how many steps `sample` takes unless it is told otherwise.
        decode: for an encoder whose rows a module after the LLM makes: the item from `(module, rows [n, out_features],
            raw shape)`.
        saved_as: how an exported directory of it is written, where transformers has no class for it.
        head: for an LLM: FQN of the layer that makes its logits, if everything after it treats each logit separately,
            so that tensor-parallel ranks may have shares of them.
        loss_by_chunks: for an LLM: its forward ends in `hetmesh.parallel.logits_or_loss`, so that no rank holds the
            logits of all targets. The last of its `layers` is then its head.
        reasons: why an ability is absent, by its name; for refusals. `key_heads`: why the plan has no `KeyHeads`. Of a
            model with `use_packed`, `context_parallel`: why ranks cannot share its tokens; `attention_mask`: why it
            takes no other than "causal".
    """

    activation: Activation | None = None
    first_layers: tuple[str, ...] = ()
    last_layers: tuple[str, ...] = ()
    find_stages: Callable[[], Mapping[str, Any]] | None = None
    stage_batch: Callable[[Sequence[SampleMeta]], dict[str, Tensor]] | None = None
    placed_rows: int = 1
    unit_kinds: tuple[str, ...] = ()
    token_sharded: tuple[str, ...] = ()
    token_gathered: tuple[str, ...] = ()
    splits_tokens: bool = False
    use_packed: Callable[[nn.Module], None] | None = None
    tokens_per_row: int = 0
    on_rows: tuple[str, ...] = ()
    attention_copies: int = 0
    share: Callable[[Mapping[str, Tensor], Intervals], dict[str, Tensor]] | None = None
    side_outputs: tuple[str, ...] = ()
    layer_of_output: Callable[[str], str | None] | None = None
    position_ids: Callable[[SampleMeta, Mapping[str, ItemGrid]], tuple[tuple[int, ...], ...]] | None = None
    item_grid: ItemGrid | None = None
    attention_dropout: float = 0.0
    stored_forms: Callable[[Pretrained], Mapping[str, StoredForm]] | None = None
    experts: ExpertLayers | None = None
    gathered_whole: bool = False
    per_item: tuple[str, ...] = ()
    row_copies: int = 0
    draws: int = 0
    sample: Callable[[nn.Module, Tensor, tuple[int, ...], Tensor, int], Tensor] | None = None
    sampling_steps: int = 0
    decode: Callable[[nn.Module, Tensor, tuple[int, ...]], Tensor] | None = None
    saved_as: SavedAs | None = None
    head: str = ""
    loss_by_chunks: bool = False
    reasons: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def with_stages(self) -> Abilities:
        """The same with all that it says of pipeline stages and sequence parallelism."""
        return self if self.find_stages is None else replace(self, find_stages=None, **self.find_stages())

    def because(self, ability: str) -> str:
        """The reason why `ability` is absent, to be appended to a refusal; empty if none is known."""
        return f" ({self.reasons[ability]})" if ability in self.reasons else ""


NONE = Abilities()
"""The abilities of a model that has none."""


class Adapter(Protocol):
    """How one ready-made model takes part in a graph.

    Every member rank of a module calls `forward` in every microbatch, even without samples, items or rows: the result
    then has zero rows and still depends on every parameter, which gets a zero gradient.
    """

    @property
    def in_features(self) -> int | None:
        """Width of the rows it consumes; None for an encoder."""

    @property
    def out_features(self) -> int | None:
        """Width of the rows it emits; None for the LLM."""

    @property
    def checkpoint_names(self) -> tuple[Names, ...]:
        """The ways in which checkpoints name the module's tensors."""

    @property
    def checkpoint_unused(self) -> tuple[str, ...]:
        """Patterns (regular expressions) of the names of tensors in its checkpoints that the module does not use."""

    @property
    def abilities(self) -> Abilities:
        """What it can do besides."""

    def build(self) -> nn.Module:
        """The module with random weights, drawn from the current RNG in the default dtype on the default device."""

    def layers(self) -> tuple[str, ...]:
        """FQNs of its layers in execution order."""

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        """FQN pattern (`*` is one name) -> a style of `hetmesh.parallel`, or a torch `ParallelStyle`."""

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        """The sizes that a tensor parallel degree must divide, by config key: `{"num_attention_heads": 4}`. Of
        `num_key_value_heads` it may be a multiple where the plan has `KeyHeads`."""

    def item_rows(self, shape: tuple[int, ...]) -> int:
        """Encoder: the number of rows of a media item of raw shape `shape`; raises SampleError if it cannot read it."""

    def rows(self, incoming: int) -> int:
        """Row-wise module: rows emitted for `incoming` rows."""

    def item_latents(self, shape: tuple[int, ...]) -> int:
        """Module after the LLM: rows of its targets for a media item of raw shape `shape`, of which `item_rows` says
        how many hidden states of the LLM it reads."""

    def computed_rows(self, shape: tuple[int, ...]) -> int:
        """Module after the LLM: rows that go through its blocks for such an item."""

    def collate(
        self,
        samples: Sequence[SampleLike],
        metas: Sequence[SampleMeta],
        *,
        placeholders: Mapping[str, int],
        pad_id: int = 0,
    ) -> dict[str, Tensor]:
        """The module's own inputs for the samples of one lane and microbatch (CPU tensors); metas are expanded, and
        payloads agree with them (`hetmesh.data.source.check_sample`)."""

    def forward(
        self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> Tensor | Mapping[str, Tensor]:
        """Run `module` on `batch` (from `collate`) and `inputs` (rows `[n, features]` by `BoundarySpec.key`). Returns
        rows `[n, out_features]`, in sample order then position order; from the LLM, logits `[num_targets, vocab]` in
        the order of `batch["targets"]`. With `Abilities.side_outputs`, all outputs by name, the rows as `""`. A module
        with targets returns what it predicts of them, or that as `""` and, as `"target"`, what it is compared with."""


class AdapterDefaults:
    """What most adapters do alike: base of the ready-made ones."""

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        return {}

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        return {}  # uneven shards of hidden features are fine

    def item_rows(self, shape: tuple[int, ...]) -> int:
        raise NotImplementedError(f"{type(self).__name__} reads no media")

    def rows(self, incoming: int) -> int:
        return incoming

    def item_latents(self, shape: tuple[int, ...]) -> int:
        raise NotImplementedError(f"{type(self).__name__} makes no media")

    def computed_rows(self, shape: tuple[int, ...]) -> int:
        return self.item_latents(shape)

    def collate(
        self,
        samples: Sequence[SampleLike],
        metas: Sequence[SampleMeta],
        *,
        placeholders: Mapping[str, int] = MappingProxyType({}),
        pad_id: int = 0,
    ) -> dict[str, Tensor]:
        return {}  # it reads rows only


@dataclass(frozen=True)
class AdapterRequest:
    """From what a registered model makes its adapter.

    Attributes:
        name: the module's name in the recipe; errors name its keys.
        media: the kind of media it reads (encoders), or has its targets from (modules after the LLM).
        media_shape: raw shape of one item of that media, if the data source has a fixed one.
        vocab_size: tokens in the vocabulary of the data source.
        in_features: width of the incoming rows, None until the producer is resolved (or without one).
        out_features: width that its consumers need, None until one is resolved (or without one).
        placeholders: the module's producers -> the placeholder that their rows replace (None: rows as such).
        consumers: names of the modules that read its rows.
        encoders: of a module after the LLM, the modules that feed it directly and do not come after the LLM, so that
            their rows are its targets; None instead of one that is not resolved yet.
        hidden: of an LLM, the hidden states that modules after it read, by output: the placeholder, and the layer.
        loss: what its last stage computes; None: nothing, or, of an LLM, what it does by itself.
        pretrained: the directory that its weights come from, None for random ones.
        folder: of the recipe's file, where code that it names may lie; None if it was not read from a file.
        packed: whether the samples of a lane lie in one row.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    media: str | None = None
    media_shape: tuple[int, ...] | None = None
    vocab_size: int = 0
    in_features: int | None = None
    out_features: int | None = None
    placeholders: Mapping[str, str | None] = field(default_factory=lambda: MappingProxyType({}))
    consumers: tuple[str, ...] = ()
    encoders: Mapping[str, Adapter | None] = field(default_factory=lambda: MappingProxyType({}))
    hidden: Mapping[str, tuple[str, str | None]] = field(default_factory=lambda: MappingProxyType({}))
    loss: LossSpec | None = None
    model: str = ""
    pretrained: Pretrained | None = None
    folder: str | None = None
    packed: bool = False

    @property
    def sources(self) -> dict[str, str]:
        """`placeholders` of an LLM, where each producer has one."""
        return {source: at for source, at in self.placeholders.items() if at is not None}

    @property
    def generates(self) -> bool:
        """Whether it is the last module after the LLM: it reads rows, and media are its targets."""
        return self.media is not None and bool(self.placeholders) and not self.consumers

    @property
    def key(self) -> str:
        """The recipe key of the module."""
        return f"modules.{self.name}"
