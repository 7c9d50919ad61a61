"""The modules of a recipe in this process alone, whatever its layout, with weights of a run or of directories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hetmesh.attention.packed_rows import with_tensors
from hetmesh.balance import BalanceOptions, plan_batch
from hetmesh.checkpoint.initial_check import check_initial_weights
from hetmesh.checkpoint.initial_load import KEY
from hetmesh.checkpoint.saved_run import SavedRun
from hetmesh.data.loader import Loader
from hetmesh.data.source import Source
from hetmesh.errors import CheckpointError, RecipeError
from hetmesh.graph import ModuleGraph, Stage, output_key
from hetmesh.models import Adapter, pretrained_of
from hetmesh.models.key_value_cache import Cache, keeps_keys, next_logits
from hetmesh.models.named.causal_lm import CausalLMAdapter
from hetmesh.models.weights.lora import base_name, is_adapter
from hetmesh.recipe import sections as sections
from hetmesh.recipe.recipe import Recipe
from hetmesh.records.checkpoint_folders import check_complete
from hetmesh.resolve.describe import describe, make_prepare
from hetmesh.resolve.modules import empty_module, loaded_module
from hetmesh.training.feed import Feed

LONGEST = 1 << 20
"""Tokens of a sample that nothing is cut off."""


@dataclass(frozen=True, eq=False)
class OneProcess:
    """Modules that are ready to compute. Made by `OneProcess.load`.

    Attributes:
        recipe: with all modules on one rank.
        source: of the recipe's data.
        modules: in evaluation mode, by name.
        device: where they are.
    """

    recipe: Recipe
    source: Source
    adapters: Mapping[str, Adapter]
    graph: ModuleGraph
    modules: Mapping[str, nn.Module]
    device: torch.device

    @classmethod
    def load(cls, recipe: Recipe, run: SavedRun | None = None, device: torch.device | str = "cpu") -> OneProcess:
        """Build the modules and give them their weights.

        Args:
            run: where the weights are; None: `[checkpoint] initial_load_path`, or the directories of the modules.

        Raises:
            RecipeError: a module has no weights but random ones.
            CheckpointError: the checkpoint cannot be read, or has other tensors than the modules.
        """
        alone = on_one_rank(recipe)
        source, adapters, graph = describe(alone)
        if run is None and recipe.checkpoint.initial_load_path:
            if afresh := recipe.checkpoint.exclude_from_loading:
                raise RecipeError(
                    f"checkpoint.exclude_from_loading = {list(afresh)}: these have random weights before they are "
                    "trained; give the folder of a run that kept a checkpoint"
                )
            path = Path(recipe.checkpoint.initial_load_path)
            check_complete(path, KEY)
            check_initial_weights(alone, adapters)
            run = SavedRun(alone, path)
        modules: dict[str, nn.Module] = {}
        for name in graph.order:
            if run is None:
                _check_weights(alone, name)
                module = loaded_module(alone, adapters[name], name)
            else:
                module = _of_run(alone, adapters[name], name, run)
            use = adapters[name].abilities.use_packed
            if graph[name].packed and use is not None:
                use(module)
            modules[name] = module.to(device).eval()
        return cls(alone, source, adapters, graph, modules, torch.device(device))

    def loader(self, source: Source) -> Loader:
        """What expands the samples of another source of the same vocabulary."""
        return Loader(source, len(source), make_prepare(self.recipe, self.graph, self.adapters), shuffle=False)

    def cache(self) -> Cache | None:
        """What `logits` may keep between the tokens of an answer; None where the LLM computes all of them again."""
        sink = self.graph.sink
        return {} if keeps_keys(self.adapters[sink.name], self.modules[sink.name], sink.packed) else None

    def logits(self, source: Source, rows: dict[str, Tensor] | None = None, cache: Cache | None = None) -> Tensor:
        """The logits of the targets of all samples of `source`, `[targets, vocab]`, by the modules' own forward.

        Args:
            rows: what encoders and projectors gave; those that are missing are computed and put there.
            cache: from the call for the token before, of the one sample of `source`: only the last target's logits
                are given.
        """
        rows = {} if rows is None else rows
        loader = self.loader(source)
        drawn = loader.batch(0)
        plan = plan_batch(self.graph, drawn.metas, len(drawn), BalanceOptions(policy="none"))
        feed = Feed(loader, drawn, plan, self.adapters, 0)
        sink = self.graph.sink.name
        with torch.no_grad():
            for name in self.graph.order:
                if name != sink and name in rows:
                    continue
                inputs = {b.key: rows[b.key] for b in self.graph.inputs(name)}
                given = feed(Stage(name, 0), 0)
                batch = with_tensors(
                    given, {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in given.items()}
                )
                adapter, module = self.adapters[name], self.modules[name]
                if name == sink and cache is not None:
                    assert isinstance(adapter, CausalLMAdapter)
                    return next_logits(adapter, module, batch, inputs, cache)
                result = adapter.forward(module, batch, inputs)
                if name == sink:
                    assert isinstance(result, Tensor)
                    return result
                named = {"": result} if isinstance(result, Tensor) else result
                rows |= {output_key(name, output): each for output, each in named.items()}
        raise AssertionError("the sink is the last of the order")


def on_one_rank(recipe: Recipe) -> Recipe:
    """`recipe` with all modules on one rank, one sample at a time, of which nothing is cut."""
    kept = {name: getattr(recipe, name) for name in Recipe.model_fields}
    kept["parallelism"] = sections.Parallelism()
    kept["balance"] = sections.Balance(policy="none")
    kept["activation_checkpoint"] = sections.ActivationCheckpoint()
    kept["compile"] = sections.Compile()
    training = recipe.training
    kept["training"] = sections.Training(  # of as many steps: a schedule of learning rates must not end before them
        local_batch_size=1, seq_len=LONGEST, dtype=training.dtype, steps=training.steps
    )
    return Recipe.model_validate(kept)


def _check_weights(recipe: Recipe, name: str) -> None:
    if pretrained_of(name, recipe.modules[name]) is None:
        raise RecipeError(
            f"modules.{name} has no initial_load_path, so no weights but random ones; give the folder of a run that "
            "kept a checkpoint, or checkpoint.initial_load_path"
        )


def _of_run(recipe: Recipe, adapter: Adapter, name: str, run: SavedRun) -> nn.Module:
    deferred = empty_module(recipe, adapter, name)
    module = deferred.materialized()
    held = set(run.names)
    wanted: dict[str, Tensor] = {}
    for key, tensor in module.state_dict().items():
        own = f"{name}.{key}"
        if own not in held and run.recipe is recipe:  # weights of another run, which may have had no adapters
            if is_adapter(own):
                continue
            own = base_name(own)
        if own not in held or run.shape(own) != tuple(tensor.shape):
            there = f"has the shape {run.shape(own)}, not {tuple(tensor.shape)}" if own in held else "is missing"
            hint = f"; {KEY} names it" if run.recipe is recipe else ""
            raise CheckpointError(f"checkpoint {run.path} does not fit the recipe: {own} {there}{hint}")
        wanted[own] = tensor
    run.read_into(wanted)
    return module
