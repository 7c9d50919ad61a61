"""The modules of a recipe on one rank, whatever its layout: the forward of answers, and of the self-check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetmesh.attention.packed_rows import with_tensors
from hetmesh.balance import BalanceOptions, plan_batch
from hetmesh.checkpoint.initial_load import KEY, check_initial_weights
from hetmesh.checkpoint.saved_run import SavedRun
from hetmesh.data.drawn import DrawnBatch
from hetmesh.data.loader import Loader
from hetmesh.data.source import Source
from hetmesh.errors import CheckpointError, RecipeError
from hetmesh.graph import Stage, output_key
from hetmesh.models import Adapter, pretrained_of
from hetmesh.models.draws import EVALUATION, Draws
from hetmesh.models.named.causal_lm import Cache, CausalLMAdapter, keeps_keys, next_logits
from hetmesh.models.weights.lora import base_name, is_adapter
from hetmesh.recipe import sections as sections
from hetmesh.recipe.recipe import Recipe
from hetmesh.records.checkpoint_folders import check_complete
from hetmesh.resolve.modules import deferred_module, loaded_module
from hetmesh.resolve.resolved import ResolvedRecipe, resolve
from hetmesh.training.feed import Feed

MAX_TOKENS = 1 << 20
"""Longest sample, in tokens."""


@dataclass(frozen=True, eq=False)
class OneProcess:
    """Modules that are ready to compute, in evaluation mode on `device`. Made by `OneProcess.load`. `resolved`: the
    recipe with all modules on one rank."""

    resolved: ResolvedRecipe
    modules: Mapping[str, nn.Module]
    device: torch.device

    def __post_init__(self) -> None:
        for name, module in self.modules.items():
            use = self.resolved.adapters[name].abilities.use_packed
            if self.resolved.graph[name].packed and use is not None:
                use(module)
            module.eval()

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
        resolved = resolve(alone)
        adapters, graph = resolved.adapters, resolved.graph
        if run is None and recipe.checkpoint.initial_load_path:
            if afresh := recipe.checkpoint.exclude_from_loading:
                raise RecipeError(
                    f"checkpoint.exclude_from_loading = {list(afresh)}: these have random weights before they are "
                    "trained; give the folder of a run that kept a checkpoint"
                )
            path = Path(recipe.checkpoint.initial_load_path)
            check_complete(path, KEY)
            check_initial_weights(resolved)
            run = SavedRun(alone, path, resolved)
        modules: dict[str, nn.Module] = {}
        for name in graph.order:
            if run is not None:
                module = _of_run(alone, adapters[name], name, run)
            elif pretrained_of(name, alone.modules[name]) is not None:
                module = loaded_module(alone, adapters[name], name)
            else:
                raise RecipeError(
                    f"modules.{name} has no initial_load_path, so no weights but random ones; give the folder of a run "
                    "that kept a checkpoint, or checkpoint.initial_load_path"
                )
            if graph[name].options.compute_copies:  # frozen parameters are in bf16, others are not
                module = module.to(graph[name].options.parameter_dtype)
            modules[name] = module.to(device)
        return cls(resolved, modules, torch.device(device))

    def loader(self, source: Source) -> Loader:
        """What expands the samples of another source of the same vocabulary."""
        return Loader(source, len(source), self.resolved.expander, shuffle=False)

    def cache(self) -> Cache | None:
        """What `logits` may keep between the tokens of an answer; None where the LLM computes all of them again."""
        llm = self.resolved.graph.llm
        return {} if keeps_keys(self.resolved.adapters[llm.name], self.modules[llm.name], llm.packed) else None

    def feed(self, loader: Loader, batch: DrawnBatch) -> Feed:
        """What the modules read of the samples in `batch`, which `loader` drew, as one microbatch."""
        plan = plan_batch(self.resolved.graph, batch.metas, len(batch), BalanceOptions(policy="none"))
        draws = Draws(self.resolved.recipe.debug.seed, EVALUATION)
        return Feed(loader, batch, plan, self.resolved.adapters, 0, draws)

    def run(self, name: str, feed: Feed, rows: dict[str, Tensor]) -> None:
        """Put what module `name` computes of `feed` and of `rows`, the outputs of earlier modules, into `rows`."""
        result = self.resolved.adapters[name].forward(self.modules[name], *self._inputs(name, feed, rows))
        named = {"": result} if isinstance(result, Tensor) else result
        rows |= {output_key(name, output): tensor for output, tensor in named.items()}

    def _inputs(self, name: str, feed: Feed, rows: Mapping[str, Tensor]) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
        given = feed(Stage(name, 0), 0)
        tensors = {key: value.to(self.device) if isinstance(value, Tensor) else value for key, value in given.items()}
        return with_tensors(given, tensors), {b.key: rows[b.key] for b in self.resolved.graph.inputs(name)}

    @torch.no_grad()
    def logits(self, source: Source, rows: dict[str, Tensor] | None = None, cache: Cache | None = None) -> Tensor:
        """The logits of the targets of all samples of `source`, `[targets, vocab]`, by the modules' own forward.

        Args:
            rows: outputs of encoders and projectors; missing ones are computed and added.
            cache: from the call for the token before, of the one sample of `source`: only the last target's logits
                are returned.
        """
        rows = {} if rows is None else rows
        loader, graph = self.loader(source), self.resolved.graph
        llm = graph.llm.name
        feed = self.feed(loader, loader.batch(0))
        for name in graph.order:
            if name == llm and cache is not None:
                adapter = self.resolved.adapters[name]
                assert isinstance(adapter, CausalLMAdapter)
                return next_logits(adapter, self.modules[name], *self._inputs(name, feed, rows), cache)
            if name == llm or name not in rows:
                self.run(name, feed, rows)
        return rows.pop(llm)


def on_one_rank(recipe: Recipe, **training: Any) -> Recipe:
    """`recipe` with all modules on one rank, one sample per step without a length limit. `training`: keys of
    `[training]` that differ from that."""
    tables = {name: getattr(recipe, name) for name in Recipe.model_fields}
    tables |= {"parallelism": sections.Parallelism(), "balance": sections.Balance(policy="none")}
    tables |= {"activation_checkpoint": sections.ActivationCheckpoint(), "compile": sections.Compile()}
    # As many steps as the recipe: a schedule of learning rates must not end before them.
    given = {"local_batch_size": 1, "seq_len": MAX_TOKENS, "dtype": recipe.training.dtype} | training
    tables["training"] = sections.Training(steps=recipe.training.steps, **given)
    return Recipe.model_validate(tables)


def _of_run(recipe: Recipe, adapter: Adapter, name: str, run: SavedRun) -> nn.Module:
    module = deferred_module(recipe, adapter, name, empty=True).materialized()
    saved, tensors = set(run.names), dict[str, Tensor]()
    of_another_run = run.recipe is recipe  # which may have had no adapters
    for key, tensor in module.state_dict().items():
        own = f"{name}.{key}"
        if own not in saved and of_another_run:
            if is_adapter(own):
                continue
            own = base_name(own)
        if own not in saved or run.shape(own) != tuple(tensor.shape):
            problem = f"has the shape {run.shape(own)}, not {tuple(tensor.shape)}" if own in saved else "is missing"
            hint = f"; {KEY} names it" if of_another_run else ""
            raise CheckpointError(f"checkpoint {run.path} does not fit the recipe: {own} {problem}{hint}")
        tensors[own] = tensor
    run.read_into(tensors)
    return module
