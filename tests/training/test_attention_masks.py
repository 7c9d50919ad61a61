"""The LLM's attention mask as a recipe's choice, against transformers' own attention with a dense mask."""

import pytest
import torch
from test_parity_pipeline import recipe, table

from hetmesh.boundary import World
from hetmesh.errors import RecipeError
from hetmesh.testing import parity
from hetmesh.training.job import describe


def sees(kind, meta, i, j):
    """Whether token i sees token j, from the words of the recipe key."""
    item_of = {t: n for n, item in enumerate(meta.media) for t in range(item.position, item.position + item.rows)}
    if i in item_of and item_of[i] == item_of.get(j):
        return True
    return j <= i and (kind == "bidirectional_media" or i not in item_of)


class DenseMask:
    """The LLM's adapter, but its model gets every sample's mask entry by entry."""

    def __init__(self, adapter, kind):
        self.adapter, self.kind = adapter, kind

    def __getattr__(self, name):
        return getattr(self.adapter, name)

    def collate(self, samples, metas, **kwargs):
        self.metas = metas
        return self.adapter.collate(samples, metas, **kwargs)

    def forward(self, module, batch, inputs):
        rows, width = batch["input_ids"].shape
        mask = torch.eye(width, dtype=torch.bool).repeat(rows, 1, 1, 1)
        for row, meta in enumerate(self.metas):
            for i in range(meta.tokens):
                for j in range(meta.tokens):
                    mask[row, 0, i, j] = sees(self.kind, meta, i, j)
        hidden = module.model(
            inputs_embeds=self.adapter._embed(module, batch["input_ids"], batch, inputs).view(rows, width, -1),
            position_ids=batch["position_ids"],
            attention_mask={"full_attention": mask},
        ).last_hidden_state
        return module.lm_head(hidden.flatten(0, 1)[batch["target_positions"]])


def on_this_rank(rank, recipe):
    return parity.run(recipe, World.current(), steps=2)


def masked(kind, *tables):
    return recipe("sequential", *tables, batch=4, llm=f'attention_mask = "{kind}"')


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["isolated_media", "bidirectional_media"])
@pytest.mark.parametrize(
    "llm",
    [
        table("llm", "2-3", tp=2),
        table("llm", "2-3", context_parallel_degree=2),
        table("llm", "0-3", context_parallel_degree=2, tp=2) + "\nenable_sequence_parallel = true",
    ],
    ids=["packed", "context parallel", "and sequence parallel"],
)
def test_every_layout_applies_the_mask(pool4, monkeypatch, kind, llm):
    given = masked(kind, table("vision", "0-1"), llm)

    def with_dense_mask(recipe):
        source, adapters, graph = describe(recipe)
        return source, {**adapters, "llm": DenseMask(adapters["llm"], kind)}, graph

    monkeypatch.setattr(parity, "describe", with_dense_mask)
    expected = parity.reference(given, steps=2)
    parity.compare(expected, pool4.run(on_this_rank, given, timeout=120), 1e-10)


def test_only_the_llm_has_a_mask():
    with pytest.raises(RecipeError, match=r"modules.vision.attention_mask: only 'llm', which reads tokens, has one"):
        recipe("sequential", vision='attention_mask = "isolated_media"')


def test_a_mask_that_is_none_is_refused():
    with pytest.raises(RecipeError, match=r"modules.llm.attention_mask"):
        masked("triangular")
