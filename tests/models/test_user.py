"""Users' models: the example of their page in many layouts, code beside recipes, declarations that do not hold."""

import pickle
import random
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import hetmesh.models.user
from hetmesh._own_code import import_named
from hetmesh.data.recipe_sources import recipe_source
from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph import BoundarySpec
from hetmesh.models import make_adapters
from hetmesh.models.named.mlp import MlpAdapter
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing import parity
from support.often import some

PAGE = (Path(hetmesh.models.user.__file__).parent / "README.md").read_text(encoding="utf-8")


def block(language):
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return text


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The page's recipe, in a folder with its module."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_model.py").write_text(block("python"))
    (folder / "recipe.toml").write_text(block("toml"))
    return folder / "recipe.toml"


LAYOUTS = {
    "as on the page: tower PP 2, LLM CP 2": "",
    "tower TP 2 with SP, LLM PP 2": """
        [parallelism.vision]
        ranks = [0, 1]
        tensor_parallel_degree = 2
        enable_sequence_parallel = true
        [parallelism.llm]
        ranks = [2, 3]
        pipeline_parallel_degree = 2
        pipeline_parallel_schedule = "1f1b"
        pipeline_parallel_microbatch_size = 2""",
    "tower PP 2 x DP 2, LLM CP 2 x TP 2 with SP, recomputed": """
        [activation_checkpoint]
        mode = "full"
        [parallelism]
        pipeline_parallel_microbatch_size = 2
        [parallelism.vision]
        ranks = "0-3"
        pipeline_parallel_degree = 2
        [parallelism.llm]
        ranks = "0-3"
        context_parallel_degree = 2
        tensor_parallel_degree = 2
        enable_sequence_parallel = true""",
    "tower TP 2 with SP and several microbatches recomputed, LLM TP 2 with SP": """
        [activation_checkpoint]
        mode = "full"
        [parallelism]
        pipeline_parallel_schedule = "1f1b"
        pipeline_parallel_microbatch_size = 1
        [parallelism.vision]
        ranks = [0, 1]
        tensor_parallel_degree = 2
        enable_sequence_parallel = true
        [parallelism.llm]
        ranks = [2, 3]
        tensor_parallel_degree = 2
        enable_sequence_parallel = true""",
    "tower FSDP 4, LLM CP 2 x PP 2, media that see all of themselves": """
        [parallelism.vision]
        ranks = "0-3"
        data_parallel_shard_degree = 4
        [parallelism.llm]
        ranks = "0-3"
        context_parallel_degree = 2
        pipeline_parallel_degree = 2""",
}


def laid_out(example, name, *overrides):
    """The page's recipe in fp64 with another layout."""
    text = example.read_text()
    if LAYOUTS[name]:
        before, _, rest = text.partition("[parallelism.vision]")
        text = before + rest[rest.index("[data]") :] + LAYOUTS[name]
    path = example.with_name(f"{list(LAYOUTS).index(name)}.toml")
    path.write_text(text.replace("[training]", '[training]\ndtype = "float64"'))
    return load_recipe(path, overrides)


OFTEN = [name for name in LAYOUTS if "see all" in name]


@pytest.mark.slow
@pytest.mark.parametrize("name", some(OFTEN, LAYOUTS))
def test_the_example_equals_one_process_in_every_layout(pool4, example, name):
    mask = ("--modules.llm.attention_mask", "bidirectional_media") if "see all" in name else ()
    parity.check(pool4, laid_out(example, name, *mask), 2)


def drawn(rng):
    """Tables of a layout on four ranks, and what else a recipe says."""
    colocated = rng.random() < 0.6
    tables = {"vision": {"ranks": "0-3" if colocated else "0-1"}, "llm": {"ranks": "0-3" if colocated else "2-3"}}
    for name, table in tables.items():
        left, axes = (4 if colocated else 2), ["pipeline", "tensor", "data_parallel_shard", "context"]
        rng.shuffle(axes)
        for axis in axes[: None if name == "llm" else 3]:
            degree = rng.choice([1, 2, left]) if axis != "tensor" else min(rng.choice([1, 2]), left)
            if degree > 1 and left % degree == 0 and (axis, name) != ("context", "vision"):
                table[axis if axis.endswith("shard") else f"{axis}_parallel"] = degree
                left //= degree
        if "tensor_parallel" in table and rng.random() < 0.6:
            table["enable_sequence_parallel"] = "true"
    return tables, {
        "parallelism.pipeline_parallel_schedule": rng.choice(SCHEDULES),
        "parallelism.pipeline_parallel_microbatch_size": rng.choice([1, 2]),
        "training.pack_samples": str(rng.random() < 0.3).lower(),
        "activation_checkpoint.mode": rng.choice(["none", "full", "selective"]),
        "modules.vision.trainable": str(rng.random() < 0.8).lower(),
        "modules.llm.model": f"my_model:{rng.choice(['Decoder', 'Tied', 'HalfFrozen'])}",
    }


SCHEDULES = ["sequential", "1f1b", "interleaved", "zero_bubble", "three_phase", "bubble_fill"]
MORE = """

class Tied(Decoder):
    def __init__(self, vocab_size, **more):
        super().__init__(vocab_size, **more)
        self.head.weight = self.tokens.weight


class HalfFrozen(Decoder):
    def __init__(self, vocab_size, **more):
        super().__init__(vocab_size, **more)
        self.tokens.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
"""


@pytest.mark.exhaustive
def test_drawn_layouts_equal_one_process(pool4, example, tmp_path):
    (tmp_path / "my_model.py").write_text(block("python") + MORE)
    modules, _, _ = example.read_text().partition("[parallelism.vision]")
    equal = 0
    for seed in range(60):
        tables, keys = drawn(random.Random(seed))
        text = modules
        for name, table in tables.items():
            degrees = {k if k in ("ranks", "enable_sequence_parallel") else f"{k}_degree": v for k, v in table.items()}
            text += f"[parallelism.{name}]\n" + "".join(
                f"{k} = {v!r}\n" if k == "ranks" else f"{k} = {v}\n" for k, v in degrees.items()
            )
        (tmp_path / "recipe.toml").write_text(text + SMALL)
        overrides = [part for key, value in keys.items() for part in (f"--{key}", str(value))]
        try:
            given = load_recipe(tmp_path / "recipe.toml", overrides)
            resolve(given)
        except RecipeError:
            continue
        try:
            parity.check(pool4, given)
        except Exception as error:
            error.add_note(f"seed {seed}: {text}{keys}")
            raise
        equal += 1
    assert equal > 30


SMALL = """
[data]
source = "hetmesh.testing.sources:RandomMedia"
options = { kinds = { image = [1, 8, 8] }, text_only = 0.4 }
[training]
local_batch_size = 4
dtype = "float64"
"""


def test_shares_of_the_tokens_of_a_stage_are_refused(example):
    keys = {"ranks": "0-3", "context_parallel_degree": "1", "tensor_parallel_degree": "2"}
    keys |= {"pipeline_parallel_degree": "2", "enable_sequence_parallel": "true"}
    overrides = [part for key, value in keys.items() for part in (f"--parallelism.llm.{key}", value)]
    with pytest.raises(RecipeError, match=r"parallelism\.llm\.enable_sequence_parallel: not together with the pipel"):
        resolve(load_recipe(example, overrides))


@pytest.mark.exhaustive  # the example in layouts is above
@pytest.mark.slow
def test_the_command_of_the_page_trains_from_any_folder(example, tmp_path, monkeypatch, start_training):
    monkeypatch.chdir(tmp_path)
    process = start_training(example, "--job.dump_folder", str(tmp_path / "run"))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("grad_norm") == 3


class Chain(nn.Module):
    """A row-wise module of three layers, the first of them frozen by itself."""

    def __init__(self, in_features, out_features, width=6):
        super().__init__()
        self.activation, self.out_features = width, out_features
        self.into, self.on, self.out = nn.Linear(in_features, width), nn.Linear(width, width), nn.Linear(width, 7)
        self.last = nn.Linear(7, out_features)
        self.layers = ("into", "on", "end")
        self.end = nn.Sequential(self.out, self.last)
        del self.out, self.last
        self.into.requires_grad_(False)

    def forward(self, rows, hidden=None):
        hidden = self.into(rows) if hidden is None else hidden
        return self.end(self.on(hidden))


class AnySize(nn.Module):
    """An encoder of images of any size: a row per column of 4 x 4 patches."""

    def __init__(self, out_features=10):
        super().__init__()
        self.out_features = out_features
        self.linear = nn.Linear(16, out_features)

    def item_rows(self, shape):
        if shape[1] % 4 or shape[2] % 4:
            raise ValueError("sides must be multiples of 4")
        return shape[2] // 4

    def forward(self, images):
        rows = [image.unfold(1, 4, 4).unfold(2, 4, 4)[0].flatten(2).sum(0) for image in images]
        return self.linear(torch.cat(rows))


SIZES = """
[modules.vision]
model = "test_user:AnySize"
[modules.projector]
model = "test_user:Chain"
[modules.llm]
model = "qwen3"
config = { hidden_size = 12, num_hidden_layers = 1, num_attention_heads = 2, head_dim = 4 }
[[boundaries]]
from = "vision"
to = "projector"
[[boundaries]]
from = "projector"
to = "llm"
at = "image"
[parallelism.vision]
ranks = [0, 1]
[parallelism.projector]
ranks = "0-3"
pipeline_parallel_degree = 2
[parallelism.llm]
ranks = [2, 3]
[data]
source = "hetmesh.testing.sources:RandomMedia"
options = { kinds = { image = [1, 4, 4] }, largest = { image = [1, 8, 12] }, text_only = 0.4 }
[training]
local_batch_size = 4
dtype = "float64"
"""


@pytest.mark.slow
def test_items_of_any_size_and_a_row_wise_pipeline_whose_first_layer_froze_itself(pool4):
    parity.check(pool4, parse_recipe(SIZES))


def test_what_froze_itself_is_refused_or_seen():
    given = parse_recipe(SIZES, ("--modules.vision.model", "test_user:Frozen"))
    with pytest.raises(RecipeError, match=r"modules\.vision\.trainable = true, but Frozen has no parameter with"):
        resolve(given)
    resolve(parse_recipe(SIZES, ("--modules.vision.model", "test_user:Frozen", "--modules.vision.trainable", "false")))
    graph = resolve(parse_recipe(SIZES)).graph
    assert graph["projector"].frozen_layers == {"into"}


class Frozen(AnySize):
    def __init__(self, out_features=10):
        super().__init__(out_features)
        self.requires_grad_(False)


class OddSizes(AnySize):
    def item_rows(self, shape):
        return 0.5


def test_an_item_that_a_class_cannot_read_is_named():
    encoder = resolve(parse_recipe(SIZES)).adapters["vision"]
    assert encoder.item_rows((1, 8, 12)) == 3
    with pytest.raises(SampleError, match=r"'vision' cannot read 'image' of shape \(1, 8, 10\): sides must be"):
        encoder.item_rows((1, 8, 10))


# --- code beside the recipe ---


def test_the_recipes_folder_is_importable_for_the_recipe_alone(example):
    given = pickle.loads(pickle.dumps(load_recipe(example)))
    path = list(sys.path)
    tower = resolve(given).adapters["vision"]
    assert sys.path == path
    assert Path(sys.modules[tower.model_class.__module__].__file__).parent == example.parent
    assert given.model_dump() == load_recipe(example).model_dump()
    sys.modules.pop("my_model")
    with pytest.raises(RecipeError, match=r"cannot import 'my_model:Tower': No module named 'my_model'"):
        resolve(parse_recipe(example.read_text()))


def test_two_folders_may_have_files_of_one_name(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own_things.py").write_text("from own_helper import VALUE as Value\n")
        (tmp_path / name / "own_helper.py").write_text(f"VALUE = {name!r}\n")
    found = [import_named("own_things:Value", str(tmp_path / name)) for name in ("a", "b", "a")]
    assert found == ["a", "b", "a"]


def test_where_code_is_missing_or_there_twice_the_folder_is_named(tmp_path, monkeypatch):
    with pytest.raises(ImportError, match=rf"No module named 'nowhere', neither beside the recipe \({tmp_path}\) nor"):
        import_named("nowhere:X", str(tmp_path))
    (tmp_path / "tomli.py").write_text("")
    with pytest.raises(ImportError, match=r"'tomli' is both beside the recipe .* and in .*tomli.*; rename the one"):
        import_named("tomli:X", str(tmp_path))
    (tmp_path / "test_user.py").write_text("")
    with pytest.raises(ImportError, match=r"'test_user' "):  # this very file, which Python knows by that name
        import_named("test_user:X", str(tmp_path))
    (tmp_path / "foreign.py").write_text("")
    monkeypatch.setitem(sys.modules, "foreign", ModuleType("foreign"))
    with pytest.raises(
        ImportError, match=r"'foreign' lies beside the recipe \(.*\), but was imported from elsewhere bef"
    ):
        import_named("foreign:X", str(tmp_path))
    (tmp_path / "broken.py").write_text("import no_such_thing\n")
    with pytest.raises(ImportError, match="No module named 'no_such_thing'"):
        import_named("broken:X", str(tmp_path))


def test_a_data_source_may_lie_beside_the_recipe_too(example):
    code = "from hetmesh.data.digits import DigitsSource as Mine\n"
    (example.parent / "my_data.py").write_text(code)
    path = example.with_name("with_data.toml")
    path.write_text(example.read_text().replace('source = "digits"', 'source = "my_data:Mine"'))
    assert type(recipe_source(load_recipe(path).data)).__name__ == "DigitsSource"


# --- users' adapters, and declarations ---


@dataclass(frozen=True)
class Table:
    model: str
    config: dict[str, Any] = field(default_factory=dict)


class OwnMlp(MlpAdapter):
    pass


class HalfAnAdapter:
    @classmethod
    def make(cls, request):
        return cls()

    def build(self):
        return None


def make(**models):
    given = {"vision": "test_user:AnySize", "projector": "mlp", "llm": "my_llm"} | models
    tables = {name: Table(f"test_user:{model}" if model[0].isupper() else model) for name, model in given.items()}
    tables["llm"] = Table("test_user:Good") if given["llm"] == "my_llm" else tables["llm"]
    boundaries = [BoundarySpec("vision", "projector"), BoundarySpec("projector", "llm", "image")]
    return make_adapters(tables, boundaries, {"vision": "image"}, 23, {"image": (1, 8, 8)})


def test_a_users_adapter():
    made = make(projector="OwnMlp")["projector"]
    assert (type(made), made.in_features, made.out_features) == (OwnMlp, 10, 8)
    with pytest.raises(
        RecipeError, match=r"make\(request\) returned, a HalfAnAdapter, is not .*: it lacks \['abilities'"
    ):
        make(projector="HalfAnAdapter")
    with pytest.raises(RecipeError, match=r"'test_user:Table' is neither a torch\.nn\.Module nor an adapter"):
        make(projector="Table")


class Good(nn.Module):
    """An LLM whose only mixing is attention."""

    packed_attention = True
    activation: Any = 8

    def __init__(self, vocab_size, in_features=8):
        super().__init__()
        self.in_features = in_features
        self.embed = nn.Embedding(vocab_size, in_features)
        self.blocks = nn.ModuleList(nn.Linear(in_features, in_features) for _ in range(2))
        self.head = nn.Linear(in_features, vocab_size)

    def between(self, hidden, batch):
        return hidden

    def behind(self, hidden):
        return hidden

    def forward(self, batch, inputs, hidden=None):
        if hidden is None:
            hidden = self.embed(batch["input_ids"])
            for rows in inputs.values():
                hidden = hidden.flatten(0, 1).index_copy(0, batch["positions.image"], rows).view_as(hidden)
        for block in self.blocks:
            hidden = self.between(block(hidden), batch)
        return self.head(self.behind(hidden).flatten(0, 1)[batch["target_positions"]])


class Scaled(Good):
    def behind(self, hidden):
        return 0.5 * hidden


class Twice(Good):
    def behind(self, hidden):
        return self.blocks[0](hidden)


class Beside(Good):
    def __init__(self, vocab_size, in_features=8):
        super().__init__(vocab_size, in_features)
        self.place = nn.Parameter(torch.zeros(in_features))


class Sharing(Good):
    def __init__(self, vocab_size, in_features=8):
        super().__init__(vocab_size, in_features)
        self.blocks[1].weight = self.blocks[0].weight


class NoHidden(Good):
    def forward(self, batch, inputs):
        return super().forward(batch, inputs)


class Leaking(Good):
    """Tokens see the mean of those before them in their row, whosever they are."""

    activation = None

    def forward(self, batch, inputs, hidden=None):
        tokens = self.embed(batch["input_ids"])
        hidden = tokens.cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        return self.head(hidden.flatten(0, 1)[batch["target_positions"]])


class WrongWidth(Good):
    activation = "gelu", 3


class NoPlan(Good):
    token_sharded = ("blocks",)


class Apart(Good):
    token_sharded = ("embed", "head")


class Mixing(Good):
    """A block that mixes tokens outside of what gets all of them."""

    token_sharded = ("blocks",)
    tensor_parallel_plan = {"blocks.*.inner.linear": "rowwise"}  # noqa: RUF012

    def __init__(self, vocab_size, in_features=8):
        super().__init__(vocab_size, in_features)
        self.blocks = nn.ModuleList(Mixer(in_features) for _ in range(2))


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Module()
        self.inner.linear = nn.Linear(width, width)
        self.inner.forward = self.inner.linear.forward

    def forward(self, x):
        return x + self.inner(x) + x.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("llm", "message"),
    [
        ("Scaled", r"Scaled declares `activation`, but its forward computes something between its layers, or after"),
        (
            "Twice",
            r"as a later pipeline stage it calls the layers \['blocks.0', 'blocks.1', 'blocks.0', 'head'\]; it must",
        ),
        (
            "Beside",
            r"its parameters \['place'\] belong to none of its layers \['embed', 'blocks.0', 'blocks.1', 'head'\]",
        ),
        (
            "Sharing",
            r"its layers \['blocks.0', 'blocks.1'\] share parameters, whose gradients two stages would each have",
        ),
        ("NoHidden", r"activation = 8: then forward must take `hidden=None`"),
        ("Leaking", r"Leaking declares `packed_attention`, but its logits of two samples in one row differ by"),
        ("WrongWidth", r"WrongWidth\.activation = \('gelu', 3\): must be a width, or a hetmesh\.models\.Activation"),
        ("NoPlan", r"NoPlan declares `token_sharded`, but none of \['blocks.0', 'blocks.1'\] has a rowwise linear"),
        ("Apart", r"Apart\.token_sharded = .*: \['embed', 'head'\] do not follow each other"),
        ("Mixing", r"outside of its parts with rowwise linears layer 'blocks.0' mixes tokens"),
    ],
)
def test_declarations_that_do_not_hold_are_refused(llm, message):
    make()
    with pytest.raises(RecipeError, match=message):
        make(llm=llm)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("--parallelism.vision.pipeline_parallel_degree", "2"), r"AnySize declares no `activation`"),
        (
            ("--modules.llm.model", "test_user:Plain", "--training.pack_samples", "true"),
            r"does not declare `packed_att",
        ),
        (
            (
                *("--modules.llm.model", "test_user:Plain", "--parallelism.llm.tensor_parallel_degree", "2"),
                *("--parallelism.llm.enable_sequence_parallel", "true"),
            ),
            r"Plain declares no `token_sharded`",
        ),
    ],
)
def test_what_is_not_declared_is_refused_with_the_attribute(overrides, message):
    text = SIZES.replace(
        "config = { hidden_size = 12, num_hidden_layers = 1, num_attention_heads = 2, head_dim = 4 }", ""
    )
    overrides = (
        overrides if "--modules.llm.model" in overrides else ("--modules.llm.model", "test_user:Good", *overrides)
    )
    with pytest.raises(RecipeError, match=message):
        resolve(parse_recipe(text, overrides))


class Plain(Good):
    packed_attention = False
    activation = None
