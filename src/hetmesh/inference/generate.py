"""Answers of a model in one process, token by token.

What encoders and projectors make of the media is computed once. So are the keys and values of an LLM whose attention is
causal and transformers' own. Any other LLM (custom, or with a mask that is not causal) computes all tokens again for
each new one, by the forward of training, at a cost that grows with the square of the length.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from hetmesh.data.answers import Continued
from hetmesh.data.mixture import MixtureSource
from hetmesh.data.source import PromptSource, Source
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import Recipe
from hetmesh.training.one_process import OneProcess


def answer_tokens(
    model: OneProcess,
    source: Source,
    index: int = 0,
    *,
    max_tokens: int = 128,
    ends: Collection[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[int]:
    """The tokens of an answer to sample `index` of `source` in place of its last one, without placeholders of media.

    Args:
        ends: tokens that end an answer; the one that does is the last one returned.
        temperature: 0 takes the most likely token; above, one is drawn from softmax(logits / temperature).
        seed: of what is drawn.
    """
    draw = torch.Generator().manual_seed(seed)
    placeholders = list(source.placeholders.values())
    rows, cache, answer = dict[str, Tensor](), model.cache(), list[int]()
    while len(answer) < max_tokens and not (answer and answer[-1] in ends):
        logits = model.logits(Continued(source, [index], [answer]), rows, cache)[-1].double().cpu()
        logits[placeholders] = -torch.inf
        if temperature > 0:
            chosen = int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=draw))
        else:
            chosen = int(logits.argmax())
        answer.append(chosen)
        yield chosen


def prompt_source(source: Source, recipe: Recipe) -> PromptSource:
    """The source, or the first of a mixture, that makes samples of questions. Raises RecipeError: none does."""
    parts = source.parts.values() if isinstance(source, MixtureSource) else (source,)
    for part in parts:
        if isinstance(part, PromptSource):
            return part
    named = " and ".join(repr(data.source) for data in recipe.data.mixture or (recipe.data,))
    raise RecipeError(
        f"data.source = {named}: it cannot make a sample of a question (it has no `prompt`; "
        "hetmesh.data.source.PromptSource); ask one of its own with --sample"
    )
