"""Refuse layers whose result or gradient depends on which samples are computed together: what a lane or a microbatch
holds differs between layouts, so they would silently train differently in each."""

from __future__ import annotations

from torch import nn

from hetmesh.errors import RecipeError

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)  # and their lazy forms


def batch_dependent_layers(module: nn.Module) -> list[str]:
    """FQNs of the layers that normalise over samples or keep running statistics of them.

    BatchNorm of any kind (SyncBatchNorm too: microbatches are normalised separately, and lanes without samples run on
    blank ones), and any other layer that tracks running statistics.
    """
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, _BATCH_NORMS) or getattr(part, "track_running_stats", False)
    ]


def embedding_options(module: nn.Module) -> list[str]:
    """What is wrong with the options of embeddings in `module`, one clause per option."""
    reasons = {
        "max_norm": "each lane rescales the rows that it looks up, and replicas drift",
        "scale_grad_by_freq": "gradients depend on what a microbatch of a lane holds",
        "sparse": "sparse gradients are not summed over lanes",
    }
    parts = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    return [f"{name!r} has {key}: {why}" for name, part in parts for key, why in reasons.items() if getattr(part, key)]


def check_batch_statistics(name: str, model: str, module: nn.Module) -> None:
    """Raise RecipeError if layers of the module `name` of a recipe depend on the batch of a lane."""
    if found := batch_dependent_layers(module):
        kinds = sorted({type(module.get_submodule(fqn)).__name__ for fqn in found})
        raise RecipeError(
            f"modules.{name}.model = {model!r}: its layers {found[:4]}{' and more' if len(found) > 4 else ''} are "
            f"{', '.join(kinds)}, whose result depends on the samples that are computed together and would change with "
            "lanes and microbatches; use LayerNorm, GroupNorm or RMSNorm, or, where they are frozen, fold the running "
            "statistics into a layer that keeps none"
        )
    if clauses := embedding_options(module):
        raise RecipeError(
            f"modules.{name}.model = {model!r}: its embedding {'; '.join(clauses[:4])}. Leave the option out"
        )
