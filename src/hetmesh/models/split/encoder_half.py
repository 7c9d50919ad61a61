"""The tower of any multimodal model of transformers, with what lies between it and the LLM: media -> rows."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph.sample import MediaItem, SampleMeta, kinds_of
from hetmesh.models.adapter import Abilities, AdapterRequest, SampleLike
from hetmesh.models.collate import media_items, stacked
from hetmesh.models.config_keys import check_keys
from hetmesh.models.named.deepstack import FEATURE
from hetmesh.models.named.encoder import check_encoder
from hetmesh.models.split.llm_half import use_loop_in_fp64
from hetmesh.models.split.tower_alone import INPUTS
from hetmesh.models.split.tower_plan import (
    hand_on,
    largest_parts,
    repeated_blocks,
    token_gathered,
    tower_blocks,
    tower_plan,
)
from hetmesh.models.split.tower_stages import TowerStage, stages_of
from hetmesh.models.split.units import MADE, UnitCalls, joined_rows, taken, unit_calls
from hetmesh.models.split.whole_model import TOWERS, PartAdapter, WholeModel, features_of, whole_model
from hetmesh.models.weights.build import build_empty
from hetmesh.parallel.stage_views import PREVIOUS, is_absent


@dataclass(frozen=True, eq=False)
class HfEncoderAdapter(PartAdapter):
    """The whole model without its LLM, called through its own `get_image_features` or `get_audio_features`.

    Attributes:
        item: the shape of an item that is a tensor, of a tower that takes nothing beside; None: it takes units alone.
        units: how what the directory's processor makes is given to it; None: it has none.
        projects: its rows are those for the LLM; else what the projector takes, which is a separate module.
    """

    whole: WholeModel
    part: str
    media: str
    item: tuple[int, ...] | None
    units: UnitCalls | None = None
    projects: bool = True
    in_features: None = None

    @classmethod
    def make(cls, request: AdapterRequest) -> HfEncoderAdapter:
        """The adapter of a recipe's module. Its one config key is `projector` (true): whether that is part of it."""
        if request.pretrained is None:
            raise RecipeError(f"{request.key}.initial_load_path is missing: {request.model!r} is made from it")
        check_keys(request, ("projector",))
        projects = request.config.get("projector", True)
        if not isinstance(projects, bool):
            raise RecipeError(f"{request.key}.config.projector: must be true or false, got {projects!r}")
        media, whole = check_encoder(request, "a tower"), whole_model(request.pretrained)
        kinds = kinds_of(media)
        part = TOWERS.get(kinds[0])
        if part is None or part not in whole.towers:
            read = [kind for kind, tower in TOWERS.items() if tower in whole.towers]
            raise RecipeError(f"{request.key}.media = {media!r}: {whole.model_class.__name__} has towers for {read}")
        units, reason = unit_calls(whole, kinds)
        try:
            item = _item_shape(whole, media)
        except LookupError as error:
            if units is None:
                reason = reason or f"{whole.pretrained} has no processor of {media!r}, and {error.args[0]}"
                raise RecipeError(f"{request.key}: {reason}") from error
            item = None
        if not projects:
            _ = whole.owners_apart
        if share := getattr(whole.config_of(part), "encoder_layerdrop", 0):
            raise RecipeError(
                f"{request.key}: its config.json says {part}_config.encoder_layerdrop = {share}; every layer runs in "
                "every microbatch, on every rank, so it must be 0"
            )
        adapter = cls(whole, part, media, item, units, projects)
        try:
            try:
                _ = adapter._rows_of_item
            except SampleError:
                if units is None:
                    raise
                adapter = replace(adapter, item=None)
            _ = adapter._blank_rows
            if not projects:
                adapter.check_nothing_follows()
        except SampleError as error:
            apart = "" if projects else "; leave [modules.projector] out, and the projector is part of this module"
            raise RecipeError(f"{request.key}: {error}{apart}") from error
        return adapter

    @property
    def out_features(self) -> int:
        return self._blank_rows[""].shape[-1]

    @cached_property
    def placed_rows(self) -> int:
        """Rows for each row of the LLM's: several where a projector that is a separate module joins them."""
        if self.projects or self.units is None:
            return 1
        rows = sum(batching.blank_rows for batching in self.units.batchings.values())
        return len(self._rows(self._flat, self._blank)[""]) // rows

    @property
    def owners(self) -> Mapping[str, str]:
        return self.whole.owners if self.projects else self.whole.owners_apart

    @property
    def abilities(self) -> Abilities:
        config = self.whole.config_of(self.part)
        return Abilities(
            find_stages=lambda: self._stages,
            stage_batch=self.stage_batch,
            placed_rows=self.placed_rows,
            unit_kinds=() if self.units is None else tuple(self.units.batchings),
            side_outputs=tuple(name for name in self._blank_rows if name),
            attention_dropout=getattr(config, "attention_dropout", None) or 0.0,
            stored_forms=self.whole.stored_forms,
        )

    def build(self) -> nn.Module:
        module: Any = self.whole.build()
        children = module.get_submodule(self.whole.embedding).named_children() if self.whole.has_llm else ()
        bare = {name: part for name, part in children if not any(True for _ in part.parameters())}
        module = self.whole.keep_part(module, self.part, self.owners)
        if bare:  # an embedding's own norm, which some towers apply to their rows, too (Muse Spark)
            holder = module
            for name in self.whole.embedding.split("."):
                holder = holder._modules.setdefault(name, _OfLlm())
            holder._modules |= bare
        if not self.projects:
            parent, _, child = self.whole.projector.rpartition(".")
            setattr(module.get_submodule(parent), child, nn.Identity())
        return module

    def check_nothing_follows(self) -> None:
        """Raise SampleError unless what the projector gives are the rows, as they are."""
        given: list[Tensor] = []

        def other(rows: Tensor, *_: Any, **__: Any) -> Tensor:
            given.append(torch.linspace(0, 1, rows.numel()).view(rows.shape))
            return given[0]

        module = self._hollow(0)
        module.get_submodule(self.whole.projector).forward = other
        with torch.no_grad():
            rows = self.encode(module, self._blank)[""]
        if not given or not torch.equal(rows, joined_rows(given[0])):
            raise SampleError(f"{self.whole.model_class.__name__} changes what its projector gives, before its LLM")

    def layers(self) -> tuple[str, ...]:
        with torch.device("cpu"):  # they are found by running it, also for a caller that builds on the meta device
            return self._layers

    @cached_property
    def _layers(self) -> tuple[str, ...]:
        """In the order in which the smallest item enters them; one that it does not enter follows the one before."""
        named = tuple(largest_parts(self._empty, repeated_blocks(self._empty)))
        module, called = self._hollow(0), list[str]()
        for name in named:
            module.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.append(name))
        self._rows(module, self._blank)
        place, last = dict[str, int](), -1
        for name in named:
            place[name] = last = called.index(name) if name in called else last
        return tuple(sorted(named, key=place.__getitem__))

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        return self._plan[0]

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        return self._plan[1]

    @cached_property
    def _plan(self) -> tuple[Mapping[str, str], Mapping[str, int]]:
        return tower_plan(self._hollow(1).eval(), self._works)

    def _works(self, module: nn.Module) -> bool:
        try:
            self._rows(module, self._blank)
        except Exception:  # whatever reshaping by full sizes leads to
            return False
        return True

    @cached_property
    def _stages(self) -> Mapping[str, Any]:
        """Where it can be cut, and tokens shared between: in blocks whose outputs the next one alone reads."""
        if len(kinds_of(self.media)) > 1:
            return {"reasons": dict.fromkeys(("activation", "token_sharded"), "it is called for each kind of media")}
        found = stages_of(self, self._empty, self._flat)
        blocks = [name for name in tower_blocks(self._empty) if name not in found.get("last_layers", ())]
        reasons = dict(found.get("reasons", ()))
        try:
            if reasons or not (plan := self._plan[0]):
                raise ValueError(reasons.get("activation", "tensor parallelism splits nothing of it"))
            gathered = token_gathered(self._hollow(1).eval(), blocks[0], plan, self._works)
            return {**found, "token_sharded": tuple(blocks), "token_gathered": gathered}
        except ValueError as error:
            return {**found, "reasons": {**reasons, "token_sharded": str(error)}}

    @cached_property
    def _flat(self) -> nn.Module:
        return self._hollow(0)

    def _hollow(self, blocks: int) -> nn.Module:
        """The module with zeros that take no memory for weights, of whose blocks only the first `blocks` compute."""
        module = build_empty(self)
        lengths: dict[type, int] = {}
        for name in tower_blocks(module)[blocks:]:
            hand_on(module.get_submodule(name), lengths)
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                    part._parameters[name] = nn.Parameter(zeros, requires_grad=False)
        return module

    def _rows(self, module: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        with torch.no_grad():
            outputs = self.encode(module, batch)
        return {name: rows.to("meta") for name, rows in outputs.items()}

    @property
    def _blank(self) -> dict[str, Any]:
        """The smallest item, which a batch without items computes and drops: all parameters take part in every one."""
        return self._ones(1) if self.units is None else self.units.blank()

    @cached_property
    def _blank_rows(self) -> dict[str, Tensor]:
        return self._rows_of(self._blank, f"what its processor makes of {self.media!r}" if self.units else None)

    @cached_property
    def _rows_of_item(self) -> int:
        return 0 if self.item is None else len(self._rows_of(self._ones(1))[""])

    def _rows_of(self, batch: Mapping[str, Any], what: str | None = None) -> dict[str, Tensor]:
        try:
            return self._rows(self._flat, batch)
        except Exception as error:  # whatever the model makes of it
            raise SampleError(
                f"{self.whole.model_class.__name__} cannot read {what or f'{self.media!r} of shape {self.item}'}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _ones(self, items: int) -> dict[str, Any]:
        assert self.item is not None
        return {"media": torch.ones(items, *self.item)}

    def examples(self) -> list[tuple[dict[str, Any], int]]:
        """Batches of items of several sizes, each alone, and of all together; with how many there are."""
        if self.units is None:
            return [(self._ones(items), items) for items in (1, 3)]
        ((kind, batching),) = self.units.batchings.items()
        chosen = [*([unit] for unit in batching.examples), batching.examples]
        return [(self.units.collated({kind: units}), len(units)) for units in chosen]

    def encode(self, module: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The rows of all items of a `batch` of `collate`, as `""`, and side outputs by name."""
        dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
        if "media" in batch:
            given = {INPUTS[self.media]: batch["media"].to(dtype)}
            return _by_name(features_of(module, self.media)(**given, return_dict=True))
        assert self.units is not None
        outputs = [_by_name(out) for out in self.units.rows(module, batch, dtype)]
        return {name: torch.cat([each[name] for each in outputs]) for name in outputs[0]}

    def item_rows(self, shape: tuple[int, ...]) -> int:
        if self.item is None:
            raise SampleError(
                f"{self.whole.model_class.__name__} reads {self.media!r} as its own processor prepares them, and the "
                "data source hands over tensors; let it hand over what that makes of a sample, as Sample.units (see "
                "hetmesh.data.preparation.Preparation)"
            )
        if tuple(shape) != self.item:
            raise SampleError(
                f"{self.media!r} items that are tensors must be of shape {self.item}, got {tuple(shape)}; others are "
                "what the directory's own processor makes"
            )
        return self._rows_of_item

    def collate(self, samples: Sequence[SampleLike], metas: Sequence[SampleMeta], **_: Any) -> dict[str, Any]:
        if self.units is not None and all(item.runs for item in self._items(metas)):
            return self.units.batch(samples, metas, self.placed_rows)
        items = media_items(samples, metas, self.media)
        return {"media": stacked(items)} | self._counted(items) if items else self.stage_batch(metas)

    def _items(self, metas: Sequence[SampleMeta]) -> list[MediaItem]:
        return [item for meta in metas for item in meta.media if item.name in kinds_of(self.media)]

    def stage_batch(self, metas: Sequence[SampleMeta]) -> dict[str, Tensor]:
        """What later stages read: of the same shapes. (Of units they are the units themselves.)"""
        items = self._items(metas)
        if self.units is not None and not items:  # as in `collate`
            return self.units.batch((), (), self.placed_rows)
        return self._ones(max(len(items), 1)) | self._counted(items)

    def _counted(self, items: Sequence[Any]) -> dict[str, Tensor]:
        """As many rows as items make, without features."""
        return {"rows": torch.zeros(len(items) * self._rows_of_item, 0)}

    def forward(
        self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> Tensor | Mapping[str, Tensor]:
        use_loop_in_fp64(module)
        rows, known, given = len(batch["rows"]), vars(module), inputs.get(PREVIOUS)
        if "hetmesh_stage" not in known:  # of a view of a tower; of a whole one None
            parts = map(module.get_submodule, self.layers())
            stage = TowerStage(module, self.layers(), self._flat, given) if any(map(is_absent, parts)) else None
            known["hetmesh_stage"] = stage
        if (stage := known["hetmesh_stage"]) is None:
            outputs = self.encode(module, batch)
        else:
            outputs = stage.run(module, partial(self.encode, batch=batch), given, empty=not rows)
            if not stage.is_last:
                return outputs[""]
        if MADE in batch:
            outputs = {name: taken(output, batch) for name, output in outputs.items()}
        if rows and len(outputs[""]) != rows:
            raise SampleError(f"{self.whole.model_class.__name__} made {len(outputs[''])} rows, {rows} were planned")
        outputs = {name: output[:rows] for name, output in outputs.items()}  # none of a blank item
        return outputs if len(outputs) > 1 else outputs[""]


class _OfLlm(nn.Module):
    """In the place of an LLM, or of its embedding, what that has beside weights."""

    def get_input_embeddings(self) -> nn.Module:
        return next(self.children())


def _item_shape(whole: WholeModel, media: str) -> tuple[int, ...]:
    """The shape of a media item that is a tensor, by the config: of images of one size, or recordings padded to one
    length, that a model takes without further arguments. Raises LookupError: it takes others."""
    name, method = INPUTS.get(media), features_of(whole.model, media)
    parameters = {} if method is None else inspect.signature(method).parameters
    required = {n for n, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    if name is None or name not in parameters:
        raise LookupError(f"its get_{media}_features does not take {name or media}")
    if more := sorted(required - {name} | parameters.keys() & {"image_grid_thw", "pixel_attention_mask"}):
        raise LookupError(f"its get_{media}_features takes {more} too, which only that makes")
    tower = getattr(whole.config, "vision_config" if media == "image" else "audio_config", whole.config)
    try:
        if media == "audio":
            return tower.num_mel_bins, 2 * tower.max_source_positions  # the first convolutions halve them
        height, width = _pair(tower.image_size)
    except (AttributeError, TypeError) as error:
        raise LookupError(f"the config of its tower does not say what its items are like: {error}") from error
    return getattr(tower, "num_channels", None) or getattr(tower, "in_channels", None) or 3, height, width


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, Mapping):
        value = (value["height"], value["width"])
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _by_name(out: Any) -> dict[str, Tensor]:
    """The rows that a model's method gave, as `""`, and its side outputs by name."""
    if isinstance(out, Tensor):
        return {"": out}
    features = getattr(out, "deepstack_features", None) or ()
    of_layers = [each if isinstance(each[0], int) else (i, each) for i, each in enumerate(features)]
    named = {f"{FEATURE}{layer}": joined_rows(feature) for layer, feature in of_layers}
    rows = out.pooler_output
    if rows is None and named:  # it is these alone that its LLM adds, to zeros
        rows = 0 * next(iter(named.values()))
    if (inside := getattr(out, "attention_mask", None)) is not None and getattr(rows, "ndim", 0) == inside.ndim + 1:
        rows = rows[inside.bool()]  # the others are of padding, which its forward leaves out
    return {"": joined_rows(rows)} | named
