"""Mixtures: shares as weighted, every sample at least once an epoch, one vocabulary; phases, and other orders."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetmesh.api import train
from hetmesh.cli import main
from hetmesh.data import DigitsSource, Loader, MixtureSource, SyntheticSource, make_source
from hetmesh.data.recipe_sources import recipe_source
from hetmesh.data.sample_order import EpochOrder, PhasedOrder
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.records.run_view import read_run
from hetmesh.resolve.resolved import resolve

RECIPES = Path(__file__).parents[2] / "recipes"


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


SIZES = {"a": 30, "b": 11, "c": 2000}
PHASES = {0: {"a": 3, "b": 1}, 40: {"b": 1, "c": 1, "a": 0}, 300: {"a": 1, "b": 1, "c": 6}}


def phased(batch=8, phases=PHASES, **options):
    mixture = MixtureSource({name: synthetic(n, i) for i, (name, n) in enumerate(SIZES.items())})
    order = PhasedOrder(mixture, phases, batch, seed=5, **options)
    return Loader(mixture, batch, order=order, seed=5, shuffle=options.get("shuffle", True))


@pytest.mark.parametrize("shuffle", [True, False])
def test_phases_draw_their_shares_and_each_source_goes_on_where_it_was(shuffle):
    loader = phased(shuffle=shuffle)
    places = [[loader.source.place(i) for i in loader.indices(step)] for step in range(900)]
    for first, stop, shares in ((0, 40, (3, 1, 0)), (40, 300, (0, 1, 1)), (300, 900, (1, 1, 6))):
        seen = Counter(name for batch in places[first:stop] for name, _ in batch)
        drawn = sum(seen.values())
        for name, share in zip("abc", shares, strict=True):
            assert abs(seen[name] - drawn * share / sum(shares)) <= (0 if not share else 0.05 * drawn + 1)
        if first:  # whole decks are exact
            begun = Counter(name for batch in places[first : first + 128] for name, _ in batch)
            assert begun == {n: 1024 * share // sum(shares) for n, share in zip("abc", shares, strict=True) if share}
    for name, size in SIZES.items():
        own = [at for batch in places for source, at in batch if source == name]
        for epoch in range(len(own) // size):
            run = own[epoch * size : (epoch + 1) * size]
            assert Counter(run) == Counter(range(size))
            assert shuffle is (run != sorted(run))


def test_neither_decks_nor_sources_of_equal_size_are_in_step():
    mixture, weights = MixtureSource({"a": synthetic(40), "b": synthetic(40, 1)}), {"a": 1, "b": 1}
    order = PhasedOrder(mixture, {0: weights, 2: weights}, 1024)
    drawn = [mixture.place(i) for i in order.indices(0, 3 * 1024)]
    assert len({tuple(name for name, _ in drawn[first : first + 1024]) for first in (0, 1024, 2048)}) == 3
    first, second = ([at for name, at in drawn if name == own][:40] for own in weights)
    assert first != second


def test_a_source_of_a_small_weight_is_in_every_deck():
    mixture = MixtureSource({"a": synthetic(40), "b": synthetic(40, 1)})
    order = PhasedOrder(mixture, {0: {"a": 10_000, "b": 1}}, 8)
    assert [mixture.counts(order.indices(k, 1024)) for k in (0, 1024)] == [{"a": 1023, "b": 1}] * 2


def test_of_equal_keys_the_order_is_that_of_the_source():
    order = EpochOrder(6, key=np.array([2, 1, 2, 1, 2, 1]))
    assert order.indices(0, 12) == [1, 3, 5, 0, 2, 4] * 2


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 60), st.integers(1, 5))
def test_a_phased_order_is_a_function_of_the_place_and_resumes_exactly(step, batch):
    whole = phased(batch)
    first = whole.order.indices(0, 120 * batch)
    assert [i for k in range(120) for i in phased(batch).indices(k)] == first
    other = phased(batch)
    whole.step = step
    other.load_state_dict(whole.state_dict())
    assert other.indices(step) == phased(batch).indices(step)


def test_a_position_of_other_phases_is_refused_and_later_phases_may_change():
    loader = phased()
    loader.step = 50
    later = PHASES | {300: {"a": 1}}
    phased(phases=later).load_state_dict(loader.state_dict())
    begun = PHASES | {40: {"b": 1, "c": 2}}
    with pytest.raises(RecipeError, match=r"data\.order and data\.phases up to there were .*'c': 1.* are .*'c': 2"):
        phased(phases=begun).load_state_dict(loader.state_dict())
    with pytest.raises(RecipeError, match=r"8 samples a step.* and are .*4 samples a step"):
        phased(batch=4).load_state_dict(loader.state_dict())
    loader.step = 40  # the next sample is the first of the second phase
    phased(phases=begun).load_state_dict(loader.state_dict())
    plain = Loader(loader.source, 8, seed=5)
    with pytest.raises(RecipeError, match="and are 'none'"):
        plain.load_state_dict(loader.state_dict())


RECIPE = """
[modules.llm]
model = "qwen3"
[training]
local_batch_size = 8
[[data.mixture]]
source = "digits"
[data.mixture.options]
max_images = 2
[[data.mixture]]
source = "digits"
name = "long"
[data.mixture.options]
max_images = 12
[[data.phases]]
start_step = 0
weights = { digits = 1 }
[[data.phases]]
start_step = 30
weights = { digits = 1, long = 3 }
"""


def test_a_run_draws_the_phases_of_its_recipe():
    loader = resolve(parse_recipe(RECIPE)).loader()
    before, after = ([loader.source.counts(loader.indices(k)) for k in steps] for steps in (range(30), range(30, 158)))
    assert all(counts == {"digits": 8, "long": 0} for counts in before)
    assert sum(counts["long"] for counts in after) == 3 * 1024 // 4


@pytest.mark.parametrize("order", ["tokens", "llm", "given"])
def test_a_curriculum_takes_samples_by_rising_length(order):
    text = RECIPE[: RECIPE.index("[[data")] + f'[data]\norder = "{order}"\n'
    text += 'source = "synthetic"\noptions = { length = 5000, max_images = 0 }'
    resolved = resolve(parse_recipe(text))
    loader = resolved.loader()
    indices = [i for step in range(625) for i in loader.indices(step)]
    assert sorted(indices) == list(range(5000))
    tokens = [loader.drawn([i]).metas.tokens[0] for i in indices[::50]]
    assert (tokens == sorted(tokens)) is (order != "given")
    assert (indices == sorted(indices)) is (order == "given")
    loader.step = 3
    with pytest.raises(RecipeError, match=r"shuffle|data\.order"):
        resolve(parse_recipe(text.replace(order, "shuffled"))).loader().load_state_dict(loader.state_dict())


def test_a_curriculum_goes_on_with_another_seq_len_only_where_the_same_samples_have_come():
    """What is cut to one length is in the source's order, so a longer seq_len changes which samples come late."""
    text = RECIPE[: RECIPE.index("[[data")] + '[data]\norder = "tokens"\nsource = "synthetic"\n'
    text += "options = { length = 100, max_images = 0, text_tokens = [4, 40] }"
    short, long = (resolve(parse_recipe(text, (f"--training.seq_len={n}",))).loader() for n in (20, 30))
    assert long.order.indices(0, 100) != short.order.indices(0, 100)
    short.step = 2
    long.load_state_dict(short.state_dict())
    rest = [i for step in range(2, 13) for i in long.indices(step)][: 100 - 16]
    assert sorted(rest + short.order.indices(0, 16)) == list(range(100))
    short.step = 11
    with pytest.raises(RecipeError, match=r"'tokens, samples \w+' and are 'tokens, samples \w+' .*training\.seq_len"):
        long.load_state_dict(short.state_dict())


def test_a_curriculum_of_an_encoder_goes_by_the_rows_that_it_computes():
    options = "{vocab_size = 64, image_token = 63, image_shape = [1, 8, 8], text_tokens = [4, 64], length = 100}"
    keys = ("--data.source=synthetic", f"--data.options={options}", "--data.order=vision")
    loader = resolve(load_recipe(RECIPES / "digits.toml", keys)).loader()
    metas = loader.drawn(loader.order.indices(0, 100)).metas
    rows, tokens = metas.rows_of("vision").tolist(), metas.tokens.tolist()
    assert rows == sorted(rows)
    assert tokens != sorted(tokens)


def test_an_order_by_a_module_without_rows_is_refused(tmp_path, capsys):
    """It would be the source's own, in every epoch."""
    recipe = (RECIPES / "digits_single.toml").read_text()
    recipe = re.sub(r"\[validation\]\n[^[]*", "", recipe)
    path = tmp_path / "recipe.toml"
    path.write_text(recipe.replace('source = "digits"', 'source = "synthetic"\norder = "vision"'))
    options = "vocab_size = 64, image_token = 63, image_shape = [1, 8, 8], length = 40"
    assert main(["check", str(path), f"--data.options={{{options}}}"]) == 0
    assert main(["check", str(path), f"--data.options={{{options}, max_images = 0}}"]) == 2
    assert "data.order = 'vision': no sample gives it rows; valid are" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("digits = 1, long = 3", "digits = 1, lnog = 3", r"data\.phases\[1\]\.weights\.lnog: .*did you mean 'long'"),
        ("digits = 1, long = 3", "digits = 0", r"data\.phases\[1\]\.weights = .*must sum to more than 0"),
        (
            "digits = 1, long = 3",
            "digits = -1, long = 3",
            r"data\.phases\[1\]\.weights\.digits = -1: .*greater than or",
        ),
        (
            "start_step = 30",
            "start_step = 0",
            r"data\.phases\[1\]\.start_step = 0: the phase before begins at 0",
        ),
        ("start_step = 0", "start_step = 5", r"data\.phases\[0\]\.start_step = 5: the first phase begins at step 0"),
        (
            'name = "long"',
            'name = "long"\nweight = 2',
            r"data\.mixture\[1\]\.weight = 2\.0: data\.phases say",
        ),
        (
            "[training]",
            '[data]\norder = "tokens"\n[training]',
            r"data\.order = 'tokens': valid beside data",
        ),
    ],
)
def test_bad_phases_are_refused_with_the_key(tmp_path, capsys, old, new, said):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace(old, new))
    assert main(["check", str(path)]) == 2
    assert re.search(said, capsys.readouterr().err)


TEXTS = """
[modules.llm]
model = "qwen3"
config = { hidden_size = 16, num_hidden_layers = 2, num_attention_heads = 2, num_key_value_heads = 1, head_dim = 8 }
[training]
global_batch_size = 8
[checkpoint]
enable = true
[profiling]
timeline = false
[[data.mixture]]
source = "synthetic"
name = "short"
options = { vocab_size = 64, image_token = 63, max_images = 0, text_tokens = [4, 8], length = 50 }
[[data.mixture]]
source = "synthetic"
name = "long"
options = { vocab_size = 64, image_token = 63, max_images = 0, text_tokens = [8, 30], length = 90, seed = 1 }
[[data.phases]]
start_step = 0
weights = { short = 1 }
[[data.phases]]
start_step = 3
weights = { short = 1, long = 3 }
[[data.phases]]
start_step = 6
weights = { long = 1 }
"""


def trained(rank, recipe):
    train(recipe)


@pytest.mark.slow
def test_e2_a_run_goes_on_in_another_layout_within_a_phase(pool, tmp_path):
    """What each step draws is what one uninterrupted stream has, wherever the run is stopped and its layout changes."""
    folder = f"--job.dump_folder={tmp_path / 'run'}"
    layouts = {
        2: ("local_batch_size=8", "llm.ranks=0"),
        5: ("local_batch_size=2", "llm.ranks=0-1"),
        8: ("local_batch_size=4", "llm.ranks=0-1"),
    }
    for steps, (size, ranks) in layouts.items():
        keys = (f"--training.{size}", f"--parallelism.{ranks}", f"--training.steps={steps}", folder)
        recipe = parse_recipe(TEXTS, keys)
        pool(recipe.world_size).run(trained, recipe, timeout=120)
    loader = resolve(parse_recipe(TEXTS)).loader()
    records = read_run(tmp_path / "run").records
    assert [record["step"] for record in records] == list(range(1, 9))
    for step, record in enumerate(records):
        assert record["samples_by_source"] == loader.source.counts(loader.indices(step))
    assert records[0]["samples_by_source"] == {"short": 8, "long": 0}
    assert records[7]["samples_by_source"] == {"short": 0, "long": 8}


def test_the_phases_that_the_page_shows():
    page = (Path(__file__).parents[2] / "src" / "hetmesh" / "data" / "README.md").read_text()
    (block,) = re.findall(r"```toml\n(\[\[data\.phases\]\].*?)```", page, re.DOTALL)
    mixture = "".join(f'[[data.mixture]]\nsource = "digits"\nname = "{name}"\n' for name in ("captions", "chat"))
    loader = resolve(parse_recipe(RECIPE[: RECIPE.index("[[data")] + mixture + block)).loader()
    counts = [loader.source.counts(loader.order.indices(8 * step, 1024)) for step in (0, 20000)]
    assert counts == [{"captions": 768, "chat": 256}, {"captions": 205, "chat": 819}]


def test_a_phase_that_never_begins_is_noted(tmp_path, capsys):
    tower = (
        'model = "siglip"\nconfig = { hidden_size = 8, num_hidden_layers = 1, num_attention_heads = 1, patch_size = 4 }'
    )
    text = RECIPE.replace('"qwen3"', '"qwen3"\nconfig = { hidden_size = 8, num_attention_heads = 1 }')
    path = tmp_path / "recipe.toml"
    path.write_text(f'[modules.vision]\n{tower}\n{text}[[boundaries]]\nfrom = "vision"\nto = "llm"\nat = "image"\n')
    for steps, noted in ((31, False), (30, True)):
        assert main(["check", str(path), f"--training.steps={steps}"]) == 0
        assert ("the phase from step 30 on never begins" in capsys.readouterr().out) is noted


def test_phases_need_a_mixture_and_an_order_is_known():
    text = RECIPE[: RECIPE.index("[[data.m")] + RECIPE[RECIPE.index("[[data.phases") :]
    with pytest.raises(RecipeError, match=r"data\.phases: they are shares of the sources of \[\[data\.mixture\]\]"):
        parse_recipe(text)
    with pytest.raises(RecipeError, match=r"data\.order = 'longest': valid are shuffled, given, tokens, llm"):
        parse_recipe(RECIPE[: RECIPE.index("[[data")] + '[data]\norder = "longest"')
