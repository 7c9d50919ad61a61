"""Sources by name and by import path; everything else is a RecipeError."""

import pytest

from hetmesh.data import DigitsSource, MemorySource, QuestionSource, Source, make_source
from hetmesh.errors import RecipeError, SampleError


def test_digits_by_name():
    source = make_source("digits", split="validation", seed=4)
    assert isinstance(source, DigitsSource)
    assert (source.split, source.seed) == ("validation", 4)
    assert isinstance(source, Source)
    assert isinstance(source, QuestionSource)


def test_a_class_by_import_path():
    assert isinstance(make_source("hetmesh.data.digits:DigitsSource"), DigitsSource)


class Bad:
    """A source but for one attribute at a time."""

    vocab_size, pad_id, placeholders = 4, 0, {"image": 1}

    def __init__(self, length: int = 1, **attributes: object) -> None:
        self.length = length
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return self.length

    def meta(self, index: int) -> None: ...

    def load(self, index: int, kinds: object = None) -> None: ...


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digit", {}, r"source = 'digit': no such source; valid are \[.*'digits'.*\] and 'package.module:Class'"),
        ("no.such.module:Class", {}, "cannot import it: No module named 'no'"),
        ("hetmesh.data:Nothing", {}, "cannot import it: .*Nothing"),
        (":Class", {}, "cannot import it"),
        ("hetmesh.data:", {}, "cannot import it"),
        ("hetmesh.data.digits:PAD", {}, "PAD is a int, not a class or function"),
        ("digits", {"sed": 1}, "options {'sed': 1}: .*'sed'; it takes .*split.*seed"),
        ("digits", {"split": "test"}, r"no split 'test'; valid are \['train', 'validation'\]"),
        ("digits", {"max_images": "x"}, "options {'max_images': 'x'}: TypeError: .*it takes .*max_images"),
        ("synthetic", {"image_token": "x"}, "{\"placeholder 'image'\": 'x'} must be token ids 0..151935"),
        ("hetmesh.testing.sources:RandomMedia", {"kinds": "image"}, "kinds: must give each kind of media the shape"),
        ("hetmesh.testing.sources:RandomMedia", {"kinds": {}, "max_items": 0.5}, "max_items: must be a number of at"),
        ("builtins:dict", {}, r"dict is not a hetmesh.data.Source, it lacks \['meta', 'load', 'vocab_size'"),
        (f"{__name__}:Bad", {"length": 0}, "the source is empty"),
        (f"{__name__}:Bad", {"pad_id": 4}, r"{'pad_id': 4} must be token ids 0..3"),
        ("synthetic", {"image_token": 0}, "placeholder 'image' and padding share the token id 0"),
        (f"{__name__}:Bad", {"placeholders": {"image": -1}}, "placeholder 'image'"),
    ],
)
def test_what_is_not_a_source_is_a_recipe_error(name, options, message):
    with pytest.raises(RecipeError, match=message):
        make_source(name, **options)


def test_random_media_hold_out_other_samples_where_they_are_asked_to():
    name, options = "hetmesh.testing.sources:RandomMedia", {"kinds": {"image": [1, 8, 8]}, "held_out": 3}
    train, held_out = make_source(name, **options), make_source(name, **options, split="validation")
    assert (len(train), len(held_out)) == (1000, 3)
    assert not {train.meta(i).id for i in range(1000)} & {held_out.meta(i).id for i in range(3)}
    with pytest.raises(RecipeError, match="without held_out there is none but 'train'"):
        make_source(name, kinds={}, split="validation")


def test_u21_load_takes_the_kinds_that_are_wanted():
    with pytest.raises(RecipeError, match=r"OldLoad.load must take \(index, kinds\)"):
        make_source(f"{__name__}:OldLoad")


class OldLoad(Bad):
    def load(self, index: int) -> None: ...  # type: ignore[override]


def test_samples_in_memory_are_a_source_once_they_are_well_formed():
    given = DigitsSource()
    pairs = [(given.meta(i), given.load(i)) for i in range(6)]
    source = MemorySource(pairs, given.vocab_size, given.placeholders)
    assert isinstance(source, Source)
    assert [source.meta(i) for i in range(len(source))] == [meta for meta, _ in pairs]
    assert not source.load(0, ()).media
    assert source.load(0).media.keys() == pairs[0][1].media.keys()
    with pytest.raises(SampleError, match="its payload has the id"):
        MemorySource([(pairs[0][0], pairs[1][1])], given.vocab_size, given.placeholders)
