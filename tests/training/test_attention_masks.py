"""The LLM's attention mask as a recipe's choice, against transformers' own attention with a dense mask."""

import numpy as np
import pytest

from hetmesh.boundary import World
from hetmesh.context.masks import MASKS
from hetmesh.errors import RecipeError
from hetmesh.graph import MediaItem, SampleMeta
from hetmesh.testing import parity
from hetmesh.testing.dense_masks import dense_mask
from support.dense_oracle import dense
from support.often import combinations
from support.parity_cases import recipe, table


def on_this_rank(rank, recipe):
    return parity.run(recipe, World.current(), steps=2)


def masked(kind, *tables):
    return recipe("sequential", *tables, batch=4, llm=f'attention_mask = "{kind}"')


LAYOUTS = {
    "packed": table("llm", "2-3", tp=2),
    "context parallel": table("llm", "2-3", context_parallel_degree=2),
    "and sequence parallel": table("llm", "0-3", context_parallel_degree=2, tp=2) + "\nenable_sequence_parallel = true",
}
OFTEN = {("bidirectional_media", "and sequence parallel")}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), combinations(OFTEN, ("isolated_media", "bidirectional_media"), LAYOUTS))
def test_every_layout_applies_the_mask(pool4, kind, layout):
    given = masked(kind, table("vision", "0-1"), LAYOUTS[layout])

    expected = parity.reference(given, steps=2)  # with the mask entry by entry, `hetmesh.testing.dense_masks`
    parity.compare(expected, pool4.run(on_this_rank, given, timeout=120), 1e-10)


def test_only_the_llm_has_a_mask():
    with pytest.raises(RecipeError, match=r"modules.vision.attention_mask: only 'llm', which reads tokens, has one"):
        recipe("sequential", vision='attention_mask = "isolated_media"')


def test_a_mask_that_is_none_is_refused():
    with pytest.raises(RecipeError, match=r"modules.llm.attention_mask"):
        masked("triangular")


@pytest.mark.parametrize(
    ("kind", "rows"),
    {
        "causal": ("1...", "11..", "111.", "1111"),
        "isolated_media": ("1...", ".11.", ".11.", "1111"),
        "bidirectional_media": ("1...", "111.", "111.", "1111"),
        "bidirectional_runs": ("1...", "111.", "111.", "1111"),
        "prefix": ("111.", "111.", "111.", "1111"),
    }.items(),
)
def test_the_dense_mask_is_what_the_key_says(kind, rows):
    """Text, an image of two rows, text."""
    meta = SampleMeta("a", 4, (MediaItem("image", (1, 8, 8), 1, rows=2),), ((3, 4),))
    seen = dense_mask(kind, [meta], 5)[0, 0]
    assert ["".join("1" if see else "." for see in row[:4]) for row in seen[:4].tolist()] == list(rows)
    assert seen[4].tolist() == [False] * 4 + [True]  # padding
    assert np.array_equal(dense(MASKS[kind](meta)), seen[:4, :4].numpy())
