"""What `check_recipe` finds in a recipe that parsed, with a small stand-in for adapters."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from torch import nn

from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.training.check import check_recipe, count_parameters, ranks_text

TEXT = """
[modules]
vision = { model = "siglip" }
projector = { model = "mlp" }
llm = { model = "qwen3" }
[[boundaries]]
from = "vision"
to = "projector"
[[boundaries]]
from = "projector"
to = "llm"
at = "image"
[parallelism]
vision = { ranks = "0-1" }
llm = { ranks = "2-4", tensor_parallel_degree = 3 }
"""


@dataclass
class Adapter:
    sizes: Mapping[str, int] = field(default_factory=dict)

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        return self.sizes

    def build(self) -> nn.Module:
        if self.sizes.get("num_attention_heads") == 0:
            raise ValueError("cannot be built on the meta device")
        return nn.Linear(3, 4)


def test_degrees_that_do_not_divide_heads_are_refused_with_the_valid_ones():  # U12
    adapters = {"vision": Adapter(), "projector": Adapter(), "llm": Adapter({"heads": 6, "key_value_heads": 2})}
    with pytest.raises(RecipeError) as caught:
        check_recipe(parse_recipe(TEXT), adapters)
    assert str(caught.value) == (
        "parallelism.llm.tensor_parallel_degree = 3 does not divide key_value_heads = 2 of modules.llm; "
        "valid degrees are [1, 2], of which [1] divide its 3 ranks"
    )
    check_recipe(parse_recipe(TEXT), adapters | {"llm": Adapter({"heads": 6, "key_value_heads": 3})})
    four = parse_recipe(TEXT, ("--parallelism.llm", "{ranks = '2-5', tensor_parallel_degree = 4}"))
    with pytest.raises(RecipeError, match=re.escape("= 4 does not divide heads = 6 and key_value_heads = 2 of")):
        check_recipe(four, adapters)


def test_a_module_on_its_consumers_mesh_is_told_whose():
    adapters = {"vision": Adapter(), "projector": Adapter({"hidden_features": 64}), "llm": Adapter()}
    says = "parallelism.llm.tensor_parallel_degree = 3 (module 'projector' takes the mesh of 'llm') does not divide"
    with pytest.raises(RecipeError, match=re.escape(says)):
        check_recipe(parse_recipe(TEXT), adapters)


def test_placeholders_must_be_the_sources():
    recipe = parse_recipe(TEXT)
    check_recipe(recipe, placeholders=["image", "sound"])
    says = "boundaries[1].at = 'image': data source 'digits' has the placeholders ['picture']"
    with pytest.raises(RecipeError, match=re.escape(says)):
        check_recipe(recipe, placeholders=["picture"])
    other = parse_recipe(TEXT, ("--modules.vision.media", "photo"))
    with pytest.raises(RecipeError, match=re.escape("modules.vision.media = 'photo': data source")):
        check_recipe(other, placeholders=["image"])


def test_the_summary_says_what_the_recipe_does():
    recipe = parse_recipe(
        TEXT.replace("tensor_parallel_degree = 3", "pipeline_parallel_microbatch_size = 4"),
        ("--job.description", "three towers", "--training.steps", "7", "--parallelism.vision.ranks", "[0]"),
    )
    assert check_recipe(recipe, {"vision": Adapter(), "llm": Adapter({"num_attention_heads": 0})}) == [
        "three towers",
        "5 ranks, 7 steps of 24 samples",
        "each step: 3 lanes of llm x 2 microbatches x 4 samples, schedule sequential",
        "  module     model   ranks  mesh            parameters",
        "  vision     siglip  0      dp_replicate 1  16",
        "  projector  mlp     2-4    dp_replicate 3",
        "  llm        qwen3   2-4    dp_replicate 3",
        "  vision -> projector",
        "  projector -> llm at 'image'",
        "note: no module uses rank 1",
    ]


def test_parameters_are_counted_without_being_made():
    assert count_parameters(Adapter()) == 16  # type: ignore[arg-type]
    assert count_parameters(Adapter({"num_attention_heads": 0})) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((0,), "0"), ((0, 1), "0-1"), ((0, 1, 2, 5), "0-2,5"), ((3, 1), "3,1"), ((1, 0, 4, 5), "1,0,4-5")],
)
def test_ranks_text(ranks, text):
    assert ranks_text(ranks) == text
