"""The cases: a small VLM on two ranks, the LLM's layout given as it would be at scale, and the layouts beside it.

Encoders are narrow and deep, as SigLIP is beside an LLM, and make about a third of the FLOPs. What both sides of a case
share is written once: sizes, samples, optimizer, no recomputation, no sequence parallelism (it saves memory, and on two
cores takes longer in either layout).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetmesh.recipe.recipe import Recipe, parse_recipe

_LLM = """
[modules.llm]
model = "qwen3"
[modules.llm.config]
hidden_size = {width}
num_hidden_layers = {layers}
num_attention_heads = 4
num_key_value_heads = 4
head_dim = {head}
intermediate_size = {inner}
tie_word_embeddings = false

[[boundaries]]
from = "{last}"
to = "llm"
at = "{at}"

[training]
local_batch_size = {local}
global_batch_size = {samples}
pack_samples = true
steps = 1000000
seq_len = 8192

[metrics]
machine = "{machine}"

[profiling]
timeline = false
profile = "{profile}"

[balance]
{balance}

[parallelism]
pipeline_parallel_schedule = "{schedule}"
pipeline_parallel_microbatch_size = {microbatch}
{keys}
"""

_IMAGES = """
[modules.vision]
model = "{vision}"
[modules.vision.config]
hidden_size = {width}
num_hidden_layers = {layers}
num_attention_heads = 4
patch_size = 4
image_size = 64
num_channels = 1

[modules.projector]
model = "mlp"

[[boundaries]]
from = "vision"
to = "projector"

[data]
source = "hetmesh.testing.sources:RandomMedia"
[data.options]
kinds = {{ image = [1, 64, 64] }}
items = {items}
max_text = {text}
"""

_CHARTS = """
[modules.vision]
model = "qwen3_vl_vision"
[modules.vision.config]
hidden_size = {width}
depth = {layers}
num_heads = 4
patch_size = 4
spatial_merge_size = 2
temporal_patch_size = 1
num_position_embeddings = 256
deepstack_visual_indexes = []

[data]
source = "benchmarks.straggler.source:Charts"
[data.options]
law = "chart-16k"
smaller = {smaller}
"""

_CLIPS = """
[modules.vision]
model = "benchmarks.advantage.measure:ClipTower"
config = {{ out_features = {width}, depth = {layers} }}

[modules.projector]
model = "mlp"

[[boundaries]]
from = "vision"
to = "projector"

[data]
source = "benchmarks.advantage.measure:VideoDigitsSource"
options = {{ max_frames = {frames}, tail = 0.6 }}
"""

_REPLICAS = "data_parallel_replicate_degree = 2"
_SHARDS = "data_parallel_shard_degree = 2"
_TENSOR = "tensor_parallel_degree = 2"
_CONTEXT = "context_parallel_degree = 2"
_PIPELINE = "pipeline_parallel_degree = 2"
_FIRST = "ranks = [0]"
_BY_ONE = "microbatch_sizes = { vision = 1 }"  # lanes of the encoder get a sample each, of several microbatches
_EVERY_RANK = "benchmarks.advantage.every_rank:EveryRank"


@dataclass(frozen=True)
class Layout:
    """One way to run a case.

    Attributes:
        tables: module -> its keys in `[parallelism]`; ranks 0 and 1 unless they say others.
        microbatch: samples of a microbatch, per lane of the LLM.
        keys: of the schedule.
        balance: keys of `[balance]`.
        vision: the encoder's model.
    """

    name: str
    tables: tuple[tuple[str, str], ...]
    microbatch: int
    schedule: str = "sequential"
    keys: str = ""
    balance: str = ""
    vision: str = "siglip"


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        what: is compared.
        before, after: what is compared with what; of each, the layout that is fastest by prediction runs.
        also: layouts that are only predicted.
        items: images of 256 rows in a sample; 0: charts or clips, of which a step has more or less.
        frames: of the longest clip; 0: no clips.
        words: most tokens of text, half of them on average.
        samples: of a step.
    """

    what: str
    before: tuple[Layout, ...]
    after: tuple[Layout, ...]
    samples: int
    width: int
    layers: int
    vision_width: int
    vision_layers: int
    items: int = 0
    frames: int = 0
    words: int = 0
    also: tuple[Layout, ...] = ()

    def smaller(self, times: int) -> Case:
        """With towers so many times as narrow."""
        return replace(self, width=self.width // times, vision_width=self.vision_width // times)

    def recipe(self, layout: Layout, machine: str = "cpu", profile: str = "") -> Recipe:
        """What `layout` trains; arguments as of `text`."""
        return parse_recipe(self.text(layout, machine, profile))

    def text(self, layout: Layout, machine: str = "cpu", profile: str = "") -> str:
        """The recipe of `layout`, predicted and balanced by the files `machine` and `profile`."""
        front = (_CLIPS if self.frames else _IMAGES if self.items else _CHARTS).format(
            vision=layout.vision,
            width=self.vision_width,
            layers=self.vision_layers,
            items=self.items,
            frames=self.frames,
            text=self.words,
            smaller=1152 / self.vision_width,
        )
        tables = dict(layout.tables)
        llm = _LLM.format(
            width=self.width,
            layers=self.layers,
            head=self.width // 4,
            inner=self.width * 11 // 4,
            last="projector" if self.items or self.frames else "vision",
            at="video" if self.frames else "image",
            local=self.samples // (2 if tables["llm"] == _REPLICAS else 1),
            samples=self.samples,
            machine=machine,
            profile=profile,
            microbatch=layout.microbatch,
            schedule=layout.schedule,
            keys=layout.keys,
            balance=layout.balance,
        )
        where = (
            f"[parallelism.{name}]\n{keys}\n" + "ranks = [0, 1]\n" * ("ranks" not in keys)
            for name, keys in tables.items()
        )
        return front + llm + "".join(where)


def _tables(encoder: str, llm: str) -> tuple[tuple[str, str], ...]:
    return ("vision", encoder), ("projector", encoder), ("llm", llm)


def _tensor_parallel() -> Case:
    def layouts(name: str, encoder: str) -> Iterator[Layout]:
        for microbatch in (1, 2, 4):
            yield Layout(f"encoder {name}, {_by(microbatch)}", _tables(encoder, _TENSOR), microbatch)

    return Case(
        "LLM tensor parallel 2: encoder in the same layout, or data parallel 2",
        tuple(layouts("tensor parallel", _TENSOR)),
        (*layouts("replicated", _REPLICAS), *layouts("sharded", _SHARDS)),
        samples=16,
        width=384,
        layers=2,
        vision_width=64,
        vision_layers=24,
        items=1,
        words=40,
    )


def _pipeline() -> Case:
    layers = 4
    chain = {
        schedule: tuple(
            Layout(
                f"chain of encoder and {k} + {layers - k} layers, {schedule}",
                _tables(_FIRST, _cut(k, layers)),
                1,
                schedule,
            )
            for k in range(1, layers)
        )
        for schedule in ("1f1b", "zero_bubble")
    }
    spread = [
        Layout("three_phase", _tables(_REPLICAS, _PIPELINE), 1, "three_phase", balance=_BY_ONE),
        *(
            Layout(
                f"bubble_fill over {inner}",
                _tables(_REPLICAS, _PIPELINE),
                1,
                "bubble_fill",
                f'bubble_fill_schedule = "{inner}"\nbubble_fill_layers_per_slice = 2',
                _BY_ONE,
            )
            for inner in ("1f1b", "interleaved", "zero_bubble")
        ),
    ]
    return Case(
        "LLM pipeline 2, four microbatches: encoder in front of the first stage, best cut, 1F1B; or data parallel 2 on "
        "the ranks of both stages",
        chain["1f1b"],
        tuple(spread[:-1]),
        samples=4,
        width=256,
        layers=layers,
        vision_width=192,
        vision_layers=4,
        items=4,
        words=160,
        also=(*chain["zero_bubble"], spread[-1]),
    )


def _cut(first: int, layers: int) -> str:
    """The keys of an LLM whose first stage has so many of its blocks."""
    names = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(layers)), "model.norm", "lm_head"]
    return f"{_PIPELINE}\nmodule_fqns_per_model_part = {[names[: first + 1], names[first + 1 :]]}"


def _context_parallel() -> Case:
    sizes = {1: _BY_ONE, 2: ""}
    return Case(
        "LLM context parallel 2, long text: encoder computed on every rank, as others do (not the best homogeneous "
        "layout), or dealt out over the ranks",
        tuple(
            Layout(f"encoder on every rank, {_by(n)}", _tables(_TENSOR, _CONTEXT), n, vision=_EVERY_RANK) for n in sizes
        ),
        tuple(
            Layout(f"encoder dealt out, {_by(n)}", _tables(_REPLICAS, _CONTEXT), n, balance=keys)
            for n, keys in sizes.items()
        ),
        samples=8,
        width=256,
        layers=2,
        vision_width=128,
        vision_layers=12,
        items=2,
        words=1600,
    )


def _balanced(sizes: tuple[int, ...], *modules: str) -> Iterator[tuple[Layout, ...]]:
    """Layouts without balancing, and with the default."""
    both = tuple((name, _REPLICAS) for name in modules)
    for name, keys in (("no balancing", 'policy = "none"'), ("balanced", "")):
        yield tuple(Layout(f"{name}, {_by(n)}", both, n, balance=keys) for n in sizes)


def _charts() -> Case:
    none, auto = _balanced((1, 2, 4), "vision", "llm")
    return Case(
        "data parallel 2, lengths of chart-16k: no balancing, or the default",
        none,
        auto,
        samples=16,
        width=384,
        layers=3,
        vision_width=192,
        vision_layers=2,
    )


def _clips() -> Case:
    none, auto = _balanced((6, 12, 24), "vision", "projector", "llm")
    return Case(
        "data parallel 2, clips of 4 to 512 frames, half of them below 7: no balancing, or the default",
        none,
        auto,
        samples=48,
        width=256,
        layers=3,
        vision_width=160,
        vision_layers=4,
        frames=512,
    )


def _by(microbatch: int) -> str:
    return f"microbatches of {microbatch}"


CASES = {"a": _tensor_parallel(), "b": _pipeline(), "c": _context_parallel(), "d": _charts(), "e": _clips()}
