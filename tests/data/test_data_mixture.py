"""Mixtures: shares as weighted, every sample at least once an epoch, one vocabulary."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetmesh.data import DigitsSource, Loader, MixtureSource, SyntheticSource, make_source
from hetmesh.data.recipe_sources import recipe_source
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import parse_recipe


def synthetic(length, seed=0, **options):
    return SyntheticSource(vocab_size=50, image_token=9, image_shape=(1, 2, 2), length=length, seed=seed, **options)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 10)), min_size=1, max_size=4))
def test_an_epoch_has_every_sample_of_every_source_and_the_shares_that_are_asked_for(parts):
    mixture = MixtureSource(
        {f"s{i}": synthetic(n, i) for i, (n, _) in enumerate(parts)}, {f"s{i}": w for i, (_, w) in enumerate(parts)}
    )
    total = sum(weight for _, weight in parts)
    seen = Counter(mixture.place(i) for i in range(len(mixture)))
    for i, (length, weight) in enumerate(parts):
        times = [seen[f"s{i}", at] for at in range(length)]
        assert 1 <= min(times) <= max(times) <= min(times) + 1
        assert abs(sum(times) - len(mixture) * weight / total) <= 2 + len(parts)


def test_a_mixture_gives_the_samples_of_its_sources_and_resumes():
    mixture = MixtureSource({"a": synthetic(30), "b": synthetic(10, 1)}, {"a": 1, "b": 3})
    loader = Loader(mixture, 8, seed=3)
    first = [next(loader) for _ in range(4)]
    for drawn in first[0]:
        name, at = mixture.place(drawn.index)
        assert drawn.given.id == f"{name}/{mixture.parts[name].meta(at).id}"
        assert mixture.load(drawn.index, ()).id == drawn.given.id
    counts = mixture.counts([d.index for batch in first for d in batch])
    assert sum(counts.values()) == 32
    assert counts["b"] > counts["a"]
    other = Loader(mixture, 4, seed=3)
    other.load_state_dict(loader.state_dict())
    assert other.indices(4) + other.indices(5) == loader.indices(4)


def test_a_recipe_names_the_parts_of_a_mixture():
    text = """
        [modules.llm]
        model = "qwen3"
        [[data.mixture]]
        source = "digits"
        weight = 3
        [[data.mixture]]
        source = "digits"
        name = "more"
        [data.mixture.options]
        seed = 1
    """
    source = recipe_source(parse_recipe(text).data)
    assert source.names == ("digits", "more")
    assert source.parts["more"].seed == 1
    assert len(source) == 4_000_000
    held_out = recipe_source(parse_recipe(text).data, "validation")
    assert len(held_out) == 2 * len(DigitsSource("validation"))
    with pytest.raises(RecipeError, match=r"two sources are called 'digits'; give each a name"):
        recipe_source(parse_recipe(text.replace('name = "more"', "")).data)
    with pytest.raises(RecipeError, match="weight"):
        parse_recipe(text.replace("weight = 3", "weight = 0"))
    with pytest.raises(RecipeError, match=r"with .*mixture.* write them into its tables"):
        recipe_source(parse_recipe(text + "\n[data.options]\nseed = 1").data)


def test_parts_of_one_vocabulary_only():
    with pytest.raises(RecipeError, match="'a' and 'b' must have one vocabulary: vocab_size is 50 and "):
        MixtureSource({"a": synthetic(3), "b": make_source("digits")})
