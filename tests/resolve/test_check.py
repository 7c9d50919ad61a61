"""What is found wrong with a recipe that parsed, with a small stand-in for adapters; and its summary."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

from hetmesh.cli.check import checked
from hetmesh.cost import LayerShape, ModuleShape, WeightShape
from hetmesh.data.digits import DigitsSource
from hetmesh.errors import RecipeError, SampleError
from hetmesh.formatting import ranks_text
from hetmesh.graph.sample import SampleMeta
from hetmesh.models import Abilities
from hetmesh.models.adapter import NONE
from hetmesh.parallel.key_heads import KeyHeads
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.recipe.torchtitan_keys import differing_defaults
from hetmesh.records.checkpoint_folders import COMPLETE
from hetmesh.resolve.modules import deferred_module
from hetmesh.resolve.refusals import check_recipe, check_run
from hetmesh.resolve.resolved import ResolvedRecipe, resolve
from hetmesh.resolve.samples import held_out_source
from hetmesh.resolve.summary import summary

DIGITS = Path(__file__).parents[2] / "recipes" / "digits.toml"
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
    abilities: Abilities = NONE
    plan: Mapping[str, object] = field(default_factory=dict)

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        return self.sizes

    def tensor_parallel_plan(self) -> Mapping[str, object]:
        return self.plan

    def layers(self) -> tuple[str, ...]:
        return ()

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


def test_a_degree_beyond_the_key_heads_must_cut_each_of_them_evenly():
    keys = {"num_attention_heads": 12, "num_key_value_heads": 4}
    shared = {"layers.*.self_attn": KeyHeads(4, 4)}
    adapters = {"vision": Adapter(), "projector": Adapter(), "llm": Adapter(keys, plan=shared)}

    def on(ranks):
        return parse_recipe(
            TEXT, ("--parallelism.llm", f"{{ranks = '2-{ranks + 1}', tensor_parallel_degree = {ranks}}}")
        )

    valid = "valid degrees are [1, 2, 4]"  # heads of four numbers: not cut in three
    for degree, size in ((6, "num_key_value_heads = 4"), (12, "num_key_value_heads * head_dim = 16")):
        with pytest.raises(RecipeError, match=re.escape(f"= {degree} does not divide {size} of")) as e:
            check_recipe(on(degree), adapters)
        assert valid in str(e.value)
    check_recipe(on(12), adapters | {"llm": Adapter(keys, plan={"layers.*.self_attn": KeyHeads(4, 6)})})
    reason = Abilities(reasons={"key_heads": "which ranks cannot share: no k_proj"})
    says = "num_key_value_heads = 4 of modules.llm (which ranks cannot share: no k_proj); valid degrees are [1, 2, 4]"
    with pytest.raises(RecipeError, match=re.escape(says)):
        check_recipe(on(12), adapters | {"llm": Adapter(keys, reason)})


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


def with_adapters(recipe, adapters):
    """A recipe of which nothing else is resolved; the size of its other modules is not known."""
    unknown = {name: Adapter({"num_attention_heads": 0}) for name in recipe.modules}
    weight = WeightShape("weight", (4, 4), trainable=True)
    shapes = {name: ModuleShape(name, (LayerShape("", (weight,)),)) for name in adapters}
    return ResolvedRecipe(recipe, None, unknown | adapters, None, dict.fromkeys(recipe.modules) | shapes)


def test_the_summary_says_what_the_recipe_does():
    recipe = parse_recipe(
        TEXT.replace("tensor_parallel_degree = 3", "pipeline_parallel_microbatch_size = 4"),
        ("--job.description", "three towers", "--training.steps", "7", "--parallelism.vision.ranks", "[0]"),
    )
    assert list(summary(with_adapters(recipe, {"vision": Adapter()}))) == [
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
        "note: not given, and not torchtitan's default:",
        "  training.mixed_precision_param = 'float32' (torchtitan: 'bfloat16')",
        "  activation_checkpoint.mode = 'none' (torchtitan: 'selective')",
        "  lr_scheduler.warmup_steps = 0 (torchtitan: 200)",
        "  parallelism.llm.data_parallel_shard_degree = 1 (torchtitan: -1)",
    ]


def test_what_a_recipe_gives_or_has_no_use_for_is_no_default_to_mention():
    keys = ("--training.mixed_precision_param", "float32", "--activation_checkpoint.mode", "none")
    shards = ("--parallelism.vision.data_parallel_shard_degree", "1")
    recipe = parse_recipe(TEXT, (*keys, *shards, "--lr_scheduler.warmup_steps", "0"))
    assert [line for line in summary(with_adapters(recipe, {})) if "torchtitan" in line] == [
        "note: not given, and not torchtitan's default:",
        "  parallelism.llm.enable_sequence_parallel = False (torchtitan: True)",
    ]


def test_keys_that_are_taken_without_effect_are_told():
    keys = ("--compile.enable", "true", "--compile.components", "model,loss", "--training.gc_freq", "50")
    keys += ("--parallelism.pipeline_parallel_schedule", "zero_bubble")
    lines = list(summary(with_adapters(parse_recipe(TEXT, keys), {})))
    assert lines[lines.index("note: taken, but without effect:") + 1 :][:3] == [
        "  training.gc_freq = 50: Python collects garbage when it sees fit",
        "  compile.components: the loss is not compiled",
        "  zero_bubble: torch.compile makes one function of a backward, so it stays whole, as under 1f1b",
    ]


def test_all_that_is_wrong_is_said_at_once():
    text = TEXT + "[training]\npack_samples = true\nenable_cpu_offload = true\ndtype = 'float64'\n"
    text += "mixed_precision_reduce = 'bfloat16'\n"
    recipe = parse_recipe(text, ("--modules.vision.mixed_precision_param", "bfloat16"))
    llm = Adapter({"heads": 4}, Abilities(attention_dropout=0.5))
    with pytest.raises(RecipeError) as caught:
        check_recipe(recipe, {"vision": Adapter(), "projector": Adapter(), "llm": llm}, ["picture"])
    said = str(caught.value).splitlines()
    assert [line.split(" ")[0] for line in said] == [
        "modules.vision.mixed_precision_param",
        "training.mixed_precision_reduce",
        "training.enable_cpu_offload:",
        "boundaries[1].at",
        "parallelism.llm.tensor_parallel_degree",
        "training.pack_samples:",
        "modules.llm.config.attention_dropout",
    ]
    assert said[-1] == (
        "modules.llm.config.attention_dropout = 0.5: hetmesh's own attention, which training.pack_samples needs, drops "
        "nothing; set it to 0"
    )


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((0,), "0"), ((0, 1), "0-1"), ((0, 1, 2, 5), "0-2,5"), ((3, 1), "3,1"), ((1, 0, 4, 5), "1,0,4-5")],
)
def test_ranks_text(ranks, text):
    assert ranks_text(ranks) == text


@dataclass
class Normalised(Adapter):
    norm: nn.Module = field(default_factory=nn.Identity)

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), self.norm)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.LazyBatchNorm3d(),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm1d(4, track_running_stats=True),
    ],
)
def test_layers_that_depend_on_the_batch_of_a_lane_are_refused(norm):
    refused = re.escape(f"modules.vision.model = 'siglip': its layers ['1'] are {type(norm).__name__}, whose result")
    adapters = {"vision": Normalised(norm=norm), "projector": Adapter(), "llm": Adapter()}
    with pytest.raises(RecipeError, match=refused):
        check_recipe(parse_recipe(TEXT), adapters)


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4), nn.RMSNorm(4)])
def test_layers_that_treat_every_sample_alone_are_not(norm):
    check_recipe(parse_recipe(TEXT), {"vision": Normalised(norm=norm), "projector": Adapter(), "llm": Adapter()})


class BatchNormEncoder(nn.Module):
    """A user's encoder as a recipe may name it."""

    out_features, rows_per_item = 8, 1

    def __init__(self, media_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(media_shape[-1], 8), nn.BatchNorm1d(8)


def test_they_are_refused_by_every_verb_also_in_a_users_module():
    recipe = load_recipe(
        DIGITS, ("--modules.vision.model", f"{__name__}:BatchNormEncoder", "--modules.vision.config={}")
    )
    with pytest.raises(RecipeError, match=r"modules.vision.model = .*BatchNormEncoder.*\['norm'\] are BatchNorm1d"):
        resolve(recipe)


class Orthogonal(nn.Module):
    """A user's encoder whose constructor computes with a weight."""

    out_features, rows_per_item = 8, 1

    def __init__(self, media_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.project = nn.Linear(media_shape[-1], 8)
        nn.init.orthogonal_(self.project.weight)

    def forward(self, media):
        return self.project(media[:, 0, 0])


class Forgetful(Orthogonal):
    def __init__(self, media_shape: tuple[int, ...]) -> None:
        super().__init__(media_shape)
        self.project = nn.Linear(media_shape[-1], 8)
        self.scale = nn.Parameter(torch.empty(8))


def own_vision(model):
    return load_recipe(DIGITS, ("--modules.vision.model", f"{__name__}:{model}", "--modules.vision.config={}"))


def test_a_module_that_each_rank_builds_whole_is_named_and_one_without_values_refused():
    recipe = own_vision("Orthogonal")
    lines = [line for line in summary(resolve(recipe)) if "whole" in line]
    assert len(lines) == 1
    assert lines[0].startswith("note: each rank of vision builds it whole: its constructor computes with its weights (")
    with pytest.raises(RecipeError, match=r"modules.vision: parameter scale: nothing initialises it"):
        resolve(own_vision("Forgetful"))


class Unbuildable(Adapter):
    """Of a module that cannot be built without memory, where check cannot look."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, int(torch.ones(1).item())), nn.BatchNorm1d(1))


def test_they_are_refused_at_the_latest_when_the_module_is_built():
    check_recipe(parse_recipe(TEXT), {"vision": Unbuildable()})
    with pytest.raises(RecipeError, match=r"modules.vision.model = 'siglip': its layers \['1'\] are BatchNorm1d"):
        deferred_module(parse_recipe(TEXT), Unbuildable(), "vision")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("--training.pack_samples", "true"), "training.pack_samples"),
        (("--parallelism.llm.context_parallel_degree", "2"), "parallelism.llm.context_parallel_degree = 2"),
        (("--modules.llm.attention_mask", "isolated_media"), "modules.llm.attention_mask = 'isolated_media'"),
    ],
)
def test_attention_dropout_is_refused_where_attention_is_hetmeshs_own(overrides, key):
    dropout = ("--modules.llm.config.attention_dropout", "0.1")
    says = f"modules.llm.config.attention_dropout = 0.1: hetmesh's own attention, which {key} needs, drops nothing"
    with pytest.raises(RecipeError, match=re.escape(says)):
        resolve(load_recipe(DIGITS, (*overrides, *dropout, "--parallelism.llm.tensor_parallel_degree", "1")))
    resolve(load_recipe(DIGITS, (*dropout, "--parallelism.llm.tensor_parallel_degree", "1")))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("modules.llm.lora.target_modules=['nope']", "modules.llm.lora.target_modules: no linear layer is called"),
        (
            "modules.llm.lora.target_modules=['lm_head']",
            "modules.llm.lora.target_modules: lm_head has its weight from model.embed_tokens (tie_word_embeddings), to",
        ),
        (
            "modules.llm.plan.nope=colwise",
            "modules.llm.plan: tensor parallel plan of Qwen3ForCausalLM: 'nope' matches no",
        ),
        ("compile.backend=nope", "compile.backend = 'nope': torch knows no such backend; valid are "),
    ],
)
def test_what_only_a_worker_would_find_is_refused_before_one_starts(override, message):
    tied = ("--modules.llm.config.tie_word_embeddings", "true")
    recipe = load_recipe(DIGITS, (f"--{override}", "--compile.enable", "true", *tied))
    with pytest.raises(RecipeError) as caught:
        resolve(recipe)
    assert message in str(caught.value)


def test_what_a_run_needs_beside_its_modules_is_checked_all_at_once(tmp_path):
    wrong = {
        "metrics.machine": "h999",
        "profiling.profile": str(tmp_path / "none.json"),
        "checkpoint.exclude_from_loading": "['vision']",
    }
    recipe = load_recipe(DIGITS, [f"--{key}={value}" for key, value in wrong.items()])
    with pytest.raises(RecipeError) as caught:
        checked(recipe)
    assert sorted(line.partition(" ")[0].rstrip(":") for line in str(caught.value).split("\n")) == sorted(wrong)
    resolve(recipe)  # `hetmesh profile` is what writes the profile


def test_weights_to_start_from_must_be_there(tmp_path):
    """As training refuses it; a run that goes on has its own weights and does not look for them, wherever it went."""
    gone = ("--checkpoint.initial_load_path", str(tmp_path / "gone"), "--job.dump_folder", str(tmp_path / "run"))
    said = r"checkpoint\.initial_load_path = '.*gone': no complete checkpoint there"
    for name in ("run-2", "run"):
        recipe = load_recipe(DIGITS, (*gone, "--checkpoint.enable", "true"))
        with pytest.raises(RecipeError, match=said):
            check_run(recipe)
        step = tmp_path / name / recipe.checkpoint.folder / "step-3"
        step.mkdir(parents=True)
        (step / COMPLETE).touch()
        (tmp_path / name / "recipe.json").write_text(recipe.model_dump_json())
        check_run(recipe)
        with pytest.raises(RecipeError, match=said):  # it would start anew
            check_run(load_recipe(DIGITS, (*gone, "--checkpoint.enable", "false")))
        for near in (step.with_name("step-4"), step.parent, step.parent.parent):
            key = ("--checkpoint.initial_load_path", str(near))
            with pytest.raises(RecipeError, match=rf"no complete checkpoint there; {step.parent} has step-3: train"):
                check_run(load_recipe(DIGITS, key))
        shutil.rmtree(tmp_path / name)


class FirstBroken(DigitsSource):
    """The metadata of the first sample cannot be read."""

    def meta(self, index: int) -> SampleMeta:
        if index == 0:
            raise SampleError("sample 'digits/train/0': its header is broken")
        return super().meta(index)


def test_a_first_sample_that_cannot_be_read_ends_a_run_only_if_the_recipe_says_so():
    keys = ("--data.source", f"{__name__}:FirstBroken")
    with pytest.raises(SampleError, match="digits/train/0': its header is broken"):
        resolve(load_recipe(DIGITS, keys))
    resolve(load_recipe(DIGITS, (*keys, "--data.on_bad_sample", "skip")))


FROZEN = ("--modules.vision.trainable=false", "--modules.projector.trainable=false", "--modules.llm.trainable=false")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            (FROZEN[0], "--modules.vision.lr=1e-3"),
            "modules.vision.lr = 0.001: the module is frozen (modules.vision.trainable = false), so no optimizer",
        ),
        ((FROZEN[1], "--modules.projector.weight_decay=0.5"), "modules.projector.weight_decay = 0.5: the module is fr"),
        ((FROZEN[2], "--modules.llm.lora.rank=2"), "modules.llm.trainable = false, but modules.llm.lora gives it ada"),
        (
            ("--modules.llm.lora.rank=2", '--modules.llm.trainable=["norm"]'),
            "modules.llm.trainable = ['norm'], but with modules.llm.lora only adapters are trained; leave out one",
        ),
        (
            ('--modules.vision.trainable=["nrom"]',),
            "modules.vision.trainable = ['nrom']: 'nrom' matches the name of no parameter; there are ",
        ),
        (
            ('--modules.vision.trainable=["norm", "!norm"]',),
            "modules.vision.trainable = ['norm', '!norm'], but SiglipVisionModel has no parameter with requires_grad = "
            "True: write trainable = false in [modules.vision], or choose something to train",
        ),
        (
            FROZEN,
            "modules.vision.trainable = false, modules.projector.trainable = false, modules.llm.trainable = false:",
        ),
        (
            ("--optimizer.name=SGD", "--optimizer.implementation=fused"),
            "optimizer.implementation = 'fused': torch's fused SGD does not take sharded parameters (DTensors); valid",
        ),
        (
            ("--training.max_consecutive_non_finite=5",),
            "training.max_consecutive_non_finite = 5: the first step that is not finite ends the run; leave it out, or",
        ),
        (
            ('--activation_checkpoint.save_ops=["aten.mm"]',),
            "activation_checkpoint.save_ops = ['aten.mm']: only the mode 'selective' reads it, and no module has that",
        ),
        (
            ("--activation_checkpoint.mode=selective", '--activation_checkpoint.save_ops=["mm"]'),
            "activation_checkpoint.save_ops = ['mm']: torch has no operation 'mm'; valid are aten.linear, aten.mm",
        ),
        (
            ("--activation_checkpoint.mode=selective", '--activation_checkpoint.save_ops=["aten.gelu"]'),
            "activation_checkpoint.save_ops = ['aten.gelu']: how much 'aten.gelu' keeps does not follow from sizes",
        ),
        (
            ("--modules.projector.activation_checkpoint=selective", '--activation_checkpoint.save_ops=["aten.addmm"]'),
            "activation_checkpoint.save_ops = ['aten.addmm']: no block of projector calls 'aten.addmm'; they call none",
        ),
        (
            (
                *(FROZEN[0], "--parallelism.vision.data_parallel_replicate_degree=1"),
                *("--parallelism.vision.data_parallel_shard_degree=2", "--training.mixed_precision_param=bfloat16"),
                "--training.mixed_precision_reduce=bfloat16",
            ),
            "training.mixed_precision_reduce = 'bfloat16': it is for gradients of modules with a "
            "data_parallel_shard_degree above 1 and mixed_precision_param = 'bfloat16', but no module that is trained",
        ),
        (
            ("--optimizer.name=SGD", "--optimizer.beta1=0.5"),
            "optimizer.beta1 = 0.5: optimizer.name = 'SGD' has no beta1",
        ),
        (("--optimizer.name=SGD", "--optimizer.beta2=0.95"), "optimizer.beta2 = 0.95: optimizer.name = 'SGD' has no"),
        (("--optimizer.name=SGD", "--optimizer.eps=1e-8"), "optimizer.eps = 1e-08: optimizer.name = 'SGD' has no eps"),
    ],
)
def test_keys_that_train_nothing_are_refused(overrides, said):
    with pytest.raises(RecipeError) as caught:
        resolve(load_recipe(DIGITS, overrides))
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_keys_of_what_is_trained_are_not():
    check_recipe(load_recipe(DIGITS, (*FROZEN[:2], "--modules.llm.lora.rank=2", "--modules.llm.lr=1e-3")))
    plain = load_recipe(DIGITS, ("--optimizer.name=SGD", "--optimizer.weight_decay=0.5"))
    check_recipe(plain)
    assert "optimizer.implementation = 'foreach' (torchtitan: 'fused')" in differing_defaults(plain)
    check_recipe(load_recipe(DIGITS, ("--optimizer.name=Adam", "--optimizer.beta1=0.5", "--optimizer.eps=1e-6")))


def test_more_held_out_samples_than_there_are_are_refused():
    """As training does, before its first step."""
    for samples, refused in ((384, False), (385, True)):
        recipe = load_recipe(DIGITS, (f"--validation.samples={samples}",))
        if not refused:
            checked(recipe)
            continue
        says = "validation.samples = 385: the validation split has 384; valid are 1 to 384, or leave it out"
        for verb in (checked, held_out_source):  # the second is what a trainer asks
            with pytest.raises(RecipeError, match=says):
                verb(recipe)


def test_dropout_that_depends_on_the_layout_is_told():
    def told(*overrides):
        recipe = load_recipe(DIGITS, overrides)
        return [line for line in summary(resolve(recipe)) if "dropout" in line]

    assert told() == []
    (line,) = told("--modules.vision.config.attention_dropout=0.1", "--modules.llm.lora.dropout=0.1")
    assert line.startswith("note: dropout of vision, llm: lanes, shards and microbatches draw numbers of their own")
