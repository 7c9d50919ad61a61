"""A rewritten recipe says what it is told to, whatever TOML it is written in, and keeps the rest."""

import pytest
import tomli

from hetmesh.errors import RecipeError
from hetmesh.recipe.overrides import apply_override
from hetmesh.recipe.rewrite import HEADER, rewritten

TABLES = """# first
[modules.vision]
model = "a"
[modules.llm]
model = "b" # the LLM
[parallelism.llm]
ranks = [1]
[[data.mixture]]
source = "a"
[training]
local_batch_size = 1
[[data.mixture]]
source = "b"
[modules.llm.config]
x = 1
"""
INLINE = """modules = { vision = { model = "a" }, llm = { model = "b" } }
parallelism = { llm = { ranks = [0, 1] } }
data = { mixture = [{ source = "a" }, { source = "b" }] }
"""
DOTTED = """modules.vision.model = "a"
modules.llm.model = "b"
data.mixture = [{ source = "a" }, { source = "b" }]
training.local_batch_size = 2
job.description = "x"
"""
VALUES = {
    ("debug", "seed"): 3,
    ("data", "mixture", "1", "weight"): 9.0,
    ("modules", "vision", "config", "x"): 7,
    ("training", "local_batch_size"): 4,
    ("parallelism",): {"schedule": "1f1b", "llm": {"ranks": "2-3", "parts": [["a"], ["b"]]}},
}


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("text", [TABLES, INLINE, DOTTED], ids=["tables", "inline", "dotted"])
def test_every_way_to_write_toml(text, ends):
    text = text.replace("\n", ends)
    expected = tomli.loads(text)
    for path, value in VALUES.items():
        expected = apply_override(expected, path, value)
    found = rewritten(text, VALUES)
    assert tomli.loads(found) == expected
    assert found.count("\n") == found.count(ends)
    kept = "# first" in found and "# the LLM" in found
    assert kept if "# first" in text else found.startswith(HEADER.strip())


def test_what_is_no_recipe_is_an_error():
    with pytest.raises(RecipeError, match="cannot be rewritten"):
        rewritten("a = ", {})
    with pytest.raises(RecipeError, match="lies inside 3"):
        rewritten("a = 3", {("a", "b"): 1})
