"""Feed: from a drawn global batch and its plan to the tensors that this rank's modules read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetmesh.balance import BatchPlan
from hetmesh.data.loader import DrawnSample, Loader
from hetmesh.data.source import Sample
from hetmesh.graph import Stage
from hetmesh.models.adapter import Adapter
from hetmesh.models.packing import pack_tokens
from hetmesh.parallel import ContextAttention


class Feed:
    """Loads the samples of this rank's lanes, once each, and collates them per module and microbatch.

    Calling it is what `Runtime.run` takes as `load_batch`.
    """

    def __init__(
        self, loader: Loader, drawn: Sequence[DrawnSample], plan: BatchPlan, adapters: Mapping[str, Adapter], rank: int
    ) -> None:
        self.loader, self.drawn, self.plan, self.adapters, self.rank = loader, drawn, plan, adapters, rank
        self._samples: dict[int, Sample] = {}

    def __call__(self, stage: Stage, microbatch: int) -> dict[str, Any]:
        """The stage's own inputs on this rank's lane; see `Adapter.collate`. Of packed samples, and of media whose
        tokens ranks share, it is what this rank keeps, and `attention` a `ContextAttention`."""
        module = stage.module
        spec = self.plan.graph[module]
        if module != self.plan.graph.sink.name and (self.plan.graph.inputs(module) or stage.index > 0):
            return {}  # rows or activations only
        lane = spec.lane_of(self.rank)
        assert lane is not None
        indices = self.plan.samples_of(module, microbatch, lane)
        missing = [i for i in indices if i not in self._samples]
        for i, sample in zip(missing, self.loader.load([self.drawn[i] for i in missing]), strict=True):
            self._samples[i] = sample
        source = self.loader.source
        metas = [self.plan.samples[i] for i in indices]
        batch = self.adapters[module].collate(
            [self._samples[i] for i in indices], metas, placeholders=source.placeholders, pad_id=source.pad_id
        )
        share = self.adapters[module].abilities.share if spec.tokens_per_row else None
        if not spec.packed and share is None:
            return batch
        mesh = spec.stage_mesh(stage.index)
        coordinate = mesh.coordinate(self.rank)
        assert coordinate is not None
        own = coordinate[mesh.axes.index("cp")] if "cp" in mesh.axes else 0
        tokens = self.plan.lane_tokens(module, microbatch, lane)
        kept = tokens.shares[own]
        lengths = [meta.tokens for meta in metas]
        packed: dict[str, Any] = share(batch, kept) if share is not None else pack_tokens(batch, lengths, kept)
        ranks = (
            next(group for group in mesh.axis_groups("cp") if self.rank in group) if "cp" in mesh.axes else (self.rank,)
        )
        packed["attention"] = ContextAttention(
            self.plan.lane_mask(module, microbatch, lane),
            tokens.shares,
            ranks,
            name=f"{module} attention",
            microbatch=microbatch,
        )
        return packed
