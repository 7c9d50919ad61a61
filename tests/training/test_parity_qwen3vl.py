"""Parity of Qwen3-VL: images of different sizes, positions of three axes and DeepStack features, in any layout."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLForConditionalGeneration

from hetmesh.balance import plan_batch
from hetmesh.boundary import World
from hetmesh.data.loader import Loader
from hetmesh.errors import RecipeError
from hetmesh.graph import MediaItem, SampleMeta, stage_graph
from hetmesh.models import MODELS
from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.named.qwen3_vl_text import multimodal_positions
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.modules import loaded_module
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.parity import ParityError, compare, reference, run
from hetmesh.testing.precision import exact_dtypes
from support import faults
from support.often import some
from support.parity_cases import table

RECIPE = """
[modules.vision]
model = "qwen3_vl_vision"
{vision}
[modules.vision.config]
hidden_size = 16
depth = 3
num_heads = 2
intermediate_size = 12
patch_size = 2
temporal_patch_size = 2
num_position_embeddings = 9
deepstack_visual_indexes = [0, 2]
[modules.llm]
model = "qwen3_vl_text"
{llm}
[modules.llm.config]
hidden_size = 12
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
intermediate_size = 14
[[boundaries]]
from = "vision"
to = "llm"
at = "image"
[data]
source = "hetmesh.testing.sources:RandomMedia"
[data.options]
kinds = {{ image = [1, 4, 4] }}
largest = {{ image = [1, 12, 16] }}
text_only = 0.2
seed = 6
[training]
local_batch_size = {batch}
dtype = "float64"
[parallelism]
pipeline_parallel_schedule = "{policy}"
pipeline_parallel_microbatch_size = 1
{tables}
"""
SP = "\nenable_sequence_parallel = true"


def recipe(*tables: str, policy: str = "sequential", batch: int = 4, vision: str = "", llm: str = ""):
    text = RECIPE.format(policy=policy, batch=batch, tables="\n".join(tables), vision=vision, llm=llm)
    return parse_recipe(text)


def cp(ranks: str, size: int, **degrees: int) -> str:
    return table("llm", ranks, context_parallel_degree=size, **degrees)


def on_this_rank(rank, recipe, fault=None):
    return run(recipe, World.current(), steps=2, fault=fault)


def with_experts(given):
    """The same with an LLM of Qwen3-VL-MoE."""
    config = {**given.modules["llm"].config, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 6}
    llm = given.modules["llm"].model_copy(update={"model": "qwen3_vl_moe_text", "frozen_config": config})
    training = given.training.model_copy(update={"pack_samples": True})
    return given.model_copy(update={"modules": {**given.modules, "llm": llm}, "training": training})


def hybrid(given):
    """The same with an LLM of Qwen3.5-MoE, which takes no features."""
    small = {f"linear_{name}": n for name, n in LINEAR.items()}
    given = with_experts(given)
    vision, llm = (given.modules[name] for name in ("vision", "llm"))
    config = {key: value for key, value in llm.config.items() if key != "intermediate_size"} | small
    vision = vision.model_copy(update={"frozen_config": {**vision.config, "deepstack_visual_indexes": []}})
    llm = llm.model_copy(update={"model": "qwen3_5_moe_text", "frozen_config": config})
    return given.model_copy(update={"modules": {"vision": vision, "llm": llm}})


LINEAR = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 4, "value_head_dim": 4}
EP = "\nexpert_parallel_degree = 2"
LOSS = 'loss = { kind = "support.losses:squares", unit = "items", weight = 0.1 }'
CASES = {
    "disjoint": recipe(table("vision", "0-1"), table("llm", "2-3", tp=2)),
    "colocated, context parallel": recipe(table("vision", "0-3"), cp("0-3", 2)),
    "sequence and context parallel": recipe(table("vision", "0-3", tp=2), cp("0-3", 2, tp=2) + SP),
    "sharded": recipe(table("vision", "0-3", fsdp=4), table("llm", "0-3", fsdp=2, tp=2)),
    # the LLM's last layer that takes features is on its second stage
    "pipeline": recipe(
        table("vision", "0-1"),
        table("llm", "2-3", pp=2) + '\nmodule_fqns_per_model_part = [["model.embed_tokens", "model.layers.0"], '
        '["model.layers.1", "model.layers.2", "model.layers.3", "model.norm", "lm_head"]]',
        policy="1f1b",
    ),
    "pipeline, context parallel": recipe(table("vision", "0-3"), cp("0-3", 2, pp=2), policy="three_phase"),
    "encoder context parallel": recipe(table("vision", "0-2", context_parallel_degree=3), table("llm", "3")),
    "encoder sequence and context parallel": recipe(
        table("vision", "0-3", tp=2, context_parallel_degree=2) + SP,
        table("llm", "0-3", pp=2, tp=2),
        '[activation_checkpoint]\nmode = "full"',
        policy="1f1b",
        vision="lora = { rank = 2 }",
    ),
    "both context parallel": recipe(
        table("vision", "0-3", context_parallel_degree=2), cp("0-3", 2, pp=2), policy="three_phase", vision=LOSS
    ),
    "encoder sharded and context parallel": recipe(
        table("vision", "0-3", context_parallel_degree=2, fsdp=2), cp("0-3", 2, tp=2) + SP
    ),
    "zero bubble": recipe(table("vision", "0"), table("llm", "1-2", pp=2), policy="zero_bubble"),
    "frozen encoder": recipe(table("vision", "0-1"), cp("2-3", 2), vision="trainable = false"),
    "experts": with_experts(
        recipe(
            table("vision", "0-3"),
            table("llm", "0-3", pp=2, data_parallel_replicate_degree=2) + EP,
            policy="three_phase",
        )
    ),
    "hybrid experts": hybrid(
        recipe(table("vision", "0-3"), table("llm", "0-3", tp=2, data_parallel_replicate_degree=2) + SP + EP)
    ),
    "lora": recipe(table("vision", "0-1"), cp("2-3", 2), vision="trainable = false", llm="lora = { rank = 2 }"),
}


def test_a_loss_of_ranks_that_share_an_item_cannot_leave_samples_out():
    given = recipe(table("vision", "0-1", context_parallel_degree=2), vision=LOSS)
    given = given.model_copy(update={"data": given.data.model_copy(update={"on_bad_sample": "skip"})})
    says = r"modules.vision.loss: not together with its context parallel ranks and data.on_bad_sample = 'skip'"
    with pytest.raises(RecipeError, match=says):
        resolve(given)


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_several_images_in_a_lane_and_none(case):
    given = CASES[case]
    resolved = resolve(given)
    loader = Loader(resolved.source, given.batch.global_batch_size, resolved.expander, seed=given.debug.seed)
    plan = plan_batch(resolved.graph, [d.meta for d in next(loader)], given.batch.microbatch_size)
    counts = {sum(len(plan.samples[i].media) for i in lane) for lanes in plan.lanes["vision"] for lane in lanes}
    assert 0 in counts
    assert max(counts) > 1


# What of it each says another case says too, together with more.
OFTEN = ("sequence and context parallel",)


@pytest.mark.slow
@pytest.mark.parametrize("case", some(OFTEN, CASES))
def test_qwen3vl_in_any_layout_equals_one_process(pool4, case):
    """U10."""
    compare(reference(CASES[case], steps=2), pool4.run(on_this_rank, CASES[case], timeout=120), 1e-10)


@pytest.mark.slow
def test_features_in_a_wrong_order_are_noticed(pool4):
    given = CASES["colocated, context parallel"]
    results = pool4.run(on_this_rank, given, faults.PermuteRows("llm"), timeout=120)
    with pytest.raises(ParityError):
        compare(reference(given, steps=2), results, 1e-10)


def test_features_are_boundaries_to_the_stage_of_their_layer():
    resolved = resolve(CASES["pipeline"])
    graph = resolved.graph
    assert [b.name for b in graph.boundaries] == [
        "vision->llm",
        "vision.deepstack.0->llm",
        "vision.deepstack.1->llm",
    ]
    found = [str(edge) for edge in stage_graph(graph).edges if not edge.internal]
    assert found == ["vision.0->llm.0", "vision.0->llm.0 (deepstack.0)", "vision.0->llm.1 (deepstack.1)"]


def whole_model(vision, llm, image_token):
    """transformers' own model with the weights of both halves."""
    config = Qwen3VLConfig(
        vision_config=vision.config.to_dict(), text_config=llm.config.to_dict(), image_token_id=image_token
    )
    config._attn_implementation = "sdpa"
    model = Qwen3VLForConditionalGeneration(config).to(torch.float64)
    states = ((vision.state_dict(), "model.visual."), (llm.model.state_dict(), "model.language_model."))
    named = {prefix + name: value for state, prefix in states for name, value in state.items()}
    named["lm_head.weight"] = llm.lm_head.weight.detach()
    missing, unexpected = model.load_state_dict(named, strict=False)
    assert not missing
    assert not unexpected
    return model


def test_both_halves_equal_transformers_own_model():
    """Loss and every gradient, fp64: its own merging of rows, positions and DeepStack against ours."""
    given = recipe()
    resolved = resolve(given)
    source, adapters = resolved.source, resolved.adapters
    vision, llm = (loaded_module(given, adapters[name], name) for name in ("vision", "llm"))
    loader = Loader(source, 40, resolved.expander, seed=0)
    drawn = [d for d in next(loader) if apart(d.meta)]
    metas, samples = [d.meta for d in drawn], loader.load(drawn)
    assert len({item.shape for meta in metas for item in meta.media}) > 4
    image = source.placeholders["image"]
    model = whole_model(vision, llm, image)

    with exact_dtypes(vision, llm):
        images = adapters["vision"].collate(samples, metas)
        batch = adapters["llm"].collate(samples, metas, placeholders=source.placeholders, pad_id=source.pad_id)
        outputs = adapters["vision"].forward(vision, images, {})
        rows = {"vision" + (name and f".{name}"): each for name, each in outputs.items()}
        nn.functional.cross_entropy(adapters["llm"].forward(llm, batch, rows), batch["targets"]).backward()

    ids = batch["input_ids"]
    with exact_dtypes(model):
        logits = model(
            input_ids=ids,
            attention_mask=torch.stack([torch.arange(ids.shape[1]) < meta.tokens for meta in metas]).long(),
            pixel_values=images["patches"].double(),
            image_grid_thw=images["grid_thw"],
            mm_token_type_ids=(ids == image).int(),
        ).logits.flatten(0, 1)
        nn.functional.cross_entropy(logits[batch["target_positions"]], batch["targets"]).backward()

    theirs = dict(model.named_parameters())
    pairs = [(p.grad, theirs[f"model.visual.{name}"].grad) for name, p in vision.named_parameters()]
    names = {name: name.replace("model.", "model.language_model.", 1) for name, _ in llm.named_parameters()}
    pairs += [(p.grad, theirs[names[name]].grad) for name, p in llm.named_parameters()]
    whole = torch.stack([expected.norm() for _, expected in pairs]).norm()
    for ours, expected in pairs:
        assert (ours - expected).norm() <= 1e-10 * max(expected.norm(), 1e-3 * whole)


def apart(meta):
    """Whether text lies between the images: transformers takes images side by side for one."""
    return all(b.position > a.position + a.rows for a, b in zip(meta.media, meta.media[1:], strict=False))


def test_positions_are_those_of_transformers():
    given = recipe()
    resolved = resolve(given)
    source, adapters = resolved.source, resolved.adapters
    loader = Loader(source, 40, resolved.expander, seed=1)
    drawn = [d for d in next(loader) if apart(d.meta)]
    model = whole_model(*(loaded_module(given, adapters[name], name) for name in ("vision", "llm")), 1).model
    for d, sample in zip(drawn, loader.load(drawn), strict=True):
        grids = [adapters["vision"].item_grid(item.shape) for item in d.meta.media]
        expected, _ = model.get_rope_index(
            sample.tokens[None],
            (sample.tokens == source.placeholders["image"]).int()[None],
            torch.tensor(grids) * torch.tensor([1, 2, 2]) if grids else None,
        )
        assert torch.equal(torch.tensor(d.meta.position_ids), expected[:, 0])
    plain = multimodal_positions(drawn[0].meta, {})
    assert plain == (tuple(range(drawn[0].meta.tokens)),) * 3


def test_patches_are_those_of_transformers():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    adapter = request("qwen3_vl_vision", {"hidden_size": 16, "num_heads": 2, "patch_size": 4, "in_channels": 3})
    image = torch.rand(3, 16, 24)
    processor = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, do_resize=False, do_rescale=False, do_normalize=False
    )
    expected = processor(images=[image], return_tensors="pt", input_data_format="channels_first")
    meta = SampleMeta("a", 9, (MediaItem("image", (3, 16, 24), 0, adapter.item_rows((3, 16, 24))),))
    given = adapter.collate([SimpleNamespace(id="a", media={"image": [image]})], [meta])
    torch.testing.assert_close(given["patches"], expected["pixel_values"])
    assert given["grid_thw"].tolist() == expected["image_grid_thw"].tolist()


def request(model, config, consumers=("llm",), media="image"):
    return MODELS[model](
        AdapterRequest(
            name="vision", model=model, config=config, media=media, vocab_size=20, consumers=consumers, out_features=12
        )
    )


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"num_heads": 3}, "num_heads: must divide hidden_size = 16 into heads whose width is a multiple of 4"),
        ({"num_position_embeddings": 8}, "num_position_embeddings: must be a square"),
        ({"depth": 2, "deepstack_visual_indexes": [0, 2]}, r"must be ascending blocks of 0..1, got \[0, 2\]"),
        ({"patch": 4}, "config.patch: unknown key; did you mean 'patch_size'"),
    ],
)
def test_vision_configs_that_cannot_be_are_refused(config, says):
    with pytest.raises(RecipeError, match=says):
        request("qwen3_vl_vision", {"hidden_size": 16, "num_heads": 2, **config})


def test_features_need_a_consumer_with_layers_for_them():
    text = RECIPE.replace("num_hidden_layers = 4", "num_hidden_layers = 1")
    with pytest.raises(RecipeError, match=r"'vision' also emits 'deepstack.1', for which 'llm' has no layer"):
        resolve(parse_recipe(text.format(policy="sequential", batch=4, tables="", vision="", llm="")))


def test_sections_of_the_frequencies_must_fit_a_head():
    llm = "rope_parameters = {{ rope_type = 'default', rope_theta = 1e4, mrope_section = [1, 1, 1] }}"
    text = RECIPE.replace("head_dim = 8", f"head_dim = 8\n{llm}")
    with pytest.raises(RecipeError, match=r"must add up to head_dim / 2 = 4, got \[1, 1, 1\]"):
        resolve(parse_recipe(text.format(policy="sequential", batch=4, tables="", vision="", llm="")))


def test_without_features_the_tensor_parallel_plan_names_no_feature_layers():
    plans = [
        request(
            "qwen3_vl_vision", {"hidden_size": 16, "num_heads": 2, "deepstack_visual_indexes": indexes}
        ).tensor_parallel_plan()
        for indexes in ([0], [])
    ]
    assert {name.split(".")[0] for name in plans[0]} - {name.split(".")[0] for name in plans[1]} == {
        "deepstack_merger_list"
    }
