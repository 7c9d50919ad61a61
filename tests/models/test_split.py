"""Models of transformers in two halves: who owns what, and what is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch

from hetmesh.data.source import Sample
from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph import MediaItem, SampleMeta
from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.named.qwen3_vl_text import multimodal_positions
from hetmesh.models.split.encoder_half import HfEncoderAdapter
from hetmesh.models.split.rope_index import PICOSECONDS, rope_positions
from hetmesh.models.split.text_plan import text_plan
from hetmesh.models.split.whole_model import whole_model
from hetmesh.models.weights.lora import is_adapter
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.parallel.key_heads import KeyHeads
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from support import tiny_processors, tiny_vlms
from support.can_do import LLM, YES, can_do


def recipe(path, more="", **media):
    return parse_recipe(tiny_vlms.recipe_text(path, more, **media))


def adapters_of(path, more="", **media):
    return resolve(recipe(path, more, **media)).adapters


def whole_model_of(path):
    return whole_model(Pretrained(path, "model.hf_path"))


@pytest.mark.slow
def test_every_parameter_has_one_owner_and_every_tensor_of_the_checkpoint_a_place(directory):
    whole = whole_model_of(directory("llava_onevision"))

    assert set(whole.owners) == set(whole.checkpoint_names)
    assert whole.owners["model.image_newline"] == "vision"  # beside tower, projector and LLM
    assert whole.owners["lm_head.weight"] == "llm"
    parts = [dict(whole.keep_part(whole.build(), part, whole.owners).named_parameters()) for part in ("vision", "llm")]
    assert not parts[0].keys() & parts[1].keys()
    assert parts[0].keys() | parts[1].keys() == set(whole.owners)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm4v", "qwen2_audio"])
def test_towers_that_read_sizes_or_masks_on_the_host_have_adapters(directory, name):
    """Their layers are found by running them, whatever device the module with adapters is built on."""
    (part,) = tiny_vlms.TOWERS.get(name, ("vision",))
    shape = resolve(recipe(directory(name), f"[modules.{part}.lora]\nrank = 2")).shapes[part]
    assert shape is not None
    trained = [weight.name for weight in shape.weights if weight.trainable]
    assert trained
    assert all(is_adapter(name) for name in trained)


@pytest.mark.slow
def test_u26_a_parameter_without_an_owner_is_an_error(tmp_path, monkeypatch):
    from transformers import LlavaForConditionalGeneration

    path = tiny_vlms.save("llava", tmp_path)

    build = LlavaForConditionalGeneration.__init__

    def with_more(self, config):
        build(self, config)
        self.model.audio_tower = torch.nn.Linear(2, 2)
        self.get_audio_features = self.forward  # now there are two towers, and a part between them that is nobody's

    monkeypatch.setattr(LlavaForConditionalGeneration, "__init__", with_more)
    with pytest.raises(RecipeError, match=r"belong neither to its LLM nor to a tower: model.multi_modal_projector"):
        whole_model(Pretrained(path, "model.hf_path"))


@pytest.mark.slow
def test_left_over_and_missing_tensors_are_named(directory, tmp_path):
    from safetensors.torch import load_file, save_file

    path = tiny_vlms.save("llava_relu", tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["language_model.model.extra.weight"] = tensors.pop("multi_modal_projector.linear_2.bias")
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(RecipeError, match=r"1 tensors are none of Llava.*language_model.model.extra.weight"):
        resolve(recipe(path))


@pytest.mark.slow
def test_a_tensor_under_two_names_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    path = tiny_vlms.save("llava_relu", tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["language_model.lm_head.weight"] + 1
    save_file(tensors, path / "model.safetensors")
    says = (
        r"language_model\.lm_head\.weight and lm_head\.weight are the same tensor of the model, lm_head\.weight; keep"
    )
    with pytest.raises(RecipeError, match=says):
        resolve(recipe(path))


@pytest.mark.slow
def test_what_cannot_be_done_is_refused_with_the_reason(directory):
    pp = "[parallelism]\npipeline_parallel_degree = 2"
    for name, reason in (("llava_onevision", r"its parameters \['model.image_new"), ("qwen3_vl", "it has outputs of")):
        with pytest.raises(RecipeError, match=rf"hf_encoder cannot be split into stages \({reason}"):
            adapters_of(directory(name), pp)
    keys = "tensor_parallel_degree = 2\nenable_sequence_parallel = true"
    with pytest.raises(RecipeError, match=r"hf_encoder cannot split its tokens \(it has outputs of its blocks beside"):
        adapters_of(
            directory("qwen3_vl"), f"[parallelism.vision]\nranks = [0, 1]\n{keys}\n[parallelism.llm]\nranks = [0, 1]"
        )
    with pytest.raises(RecipeError, match=r"cannot take its samples in one row \(its attention caps its logits"):
        adapters_of(directory("paligemma2"))


@pytest.mark.slow
def test_media_that_see_more_than_a_window_are_refused(directory):
    llm = adapters_of(directory("gemma3"))["llm"]  # 4 rows per image, a window of 12
    metas = [SampleMeta("long", 20, tuple(MediaItem("image", (3, 8, 8), 2 + 4 * i, 4) for i in range(4)), ((19, 20),))]
    with pytest.raises(SampleError, match=r"sample 'long': 16 rows of media side by side.*window.*is 12"):
        llm.collate([], metas, placeholders={})


def test_families_that_are_refused_say_why(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mllama", "vision_config": {}}')
    with pytest.raises(RecipeError, match="model_type 'mllama' is not supported: its LLM reads images through cross"):
        recipe(tmp_path)


@pytest.mark.slow
def test_a_projector_is_a_module_of_its_own_where_it_works_row_by_row(directory):
    own = "[modules.projector]"
    found = adapters_of(directory("internvl"), own)
    assert list(found) == ["vision", "projector", "llm"]
    parts = [dict(adapter.build().named_parameters()) for adapter in found.values()]
    assert set.union(*map(set, parts)) == set(dict(whole_model_of(directory("internvl")).model.named_parameters()))
    assert sum(map(len, parts)) == len(set.union(*map(set, parts)))
    assert all(name.startswith("model.multi_modal_projector.") for name in parts[1])
    for name, says in (
        ("gemma3", r"Gemma3ForConditionalGeneration cannot be a module of its own: it does not take rows alone"),
        ("llava_onevision", r"no single projector.*\['model.image_newline', 'model.multi_modal_projector'\]"),
    ):
        with pytest.raises(RecipeError, match=says):
            adapters_of(directory(name), own)


@pytest.mark.slow
def test_u16_layers_whose_state_would_leak_are_not_packed(directory):
    llm = adapters_of(directory("internvl"))["llm"]
    assert llm.abilities.use_packed is not None
    config = copy.deepcopy(llm.config)
    config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    llm = replace(llm, config=config)
    assert llm.abilities.use_packed is None
    assert "kind 'linear_attention': what they remember of earlier tokens is not known" in llm.abilities.because(
        "use_packed"
    )


@pytest.mark.slow
def test_towers_are_split_where_their_code_allows_it(directory):
    internvl = adapters_of(directory("internvl"))["vision"]  # its attention reshapes by full sizes
    assert {name.rpartition(".")[2] for name in internvl.tensor_parallel_plan()} == {"fc1", "fc2"}
    llava = adapters_of(directory("llava"))["vision"]
    assert {"q_proj", "out_proj", "fc2"} <= {name.rpartition(".")[2] for name in llava.tensor_parallel_plan()}
    assert llava.tensor_parallel_sizes() == {"num_attention_heads": 4, "intermediate_size": 32}
    omni = adapters_of(directory("qwen2_5_omni"))["audio"]  # its attention takes half of the features for all heads
    assert {name.rpartition(".")[2] for name in omni.tensor_parallel_plan()} == {"fc1", "fc2"}


@pytest.mark.slow
def test_items_must_lie_between_the_tokens_by_which_a_model_finds_them(directory):
    llm = adapters_of(directory("qwen2_5_omni"))["llm"]
    meta = SampleMeta("bare", 6, (MediaItem("audio", (6, 7), 1, 2),), ((5, 6),))
    sample = Sample("bare", torch.tensor([45, 2, 2, 7, 8, 9]))
    with pytest.raises(
        SampleError, match=r"'bare': the 'audio' at position 1 lies between the tokens 45 and 7, not 45"
    ):
        llm.collate([sample], [meta], placeholders={"audio": 2})


@pytest.mark.slow
def test_audio_towers_that_are_called_in_another_way_are_refused(tmp_path):
    from transformers import AudioFlamingo3Config, AudioFlamingo3ForConditionalGeneration

    audio = {"num_mel_bins": 6, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16}
    audio |= {"intermediate_size": 32, "max_source_positions": 8}
    config = AudioFlamingo3Config(audio_config=audio, text_config=tiny_vlms._text("qwen2"), audio_token_id=1)
    AudioFlamingo3ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"modules.audio: .*its get_audio_features takes .*'input_features_mask'"):
        adapters_of(tmp_path, items="kinds = { audio = [6, 16] }")


@pytest.mark.slow
def test_layers_that_are_left_out_at_random_are_refused(tmp_path):
    path = tiny_vlms.save("qwen2_audio", tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["audio_config"]["encoder_layerdrop"] = 0.1
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=r"modules.audio: .* audio_config.encoder_layerdrop = 0.1; every layer runs"):
        adapters_of(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "ability", "says"),
    [
        ({"kind": "mistral", "sliding_window": 8}, "token_sharded", "has layers with a sliding window"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "use_packed", "'dynamic'"),
    ],
    ids=["a window of all layers", "frequencies by the longest sample"],
)
def test_what_depends_on_other_tokens_at_hand_is_not_shared(tmp_path, monkeypatch, text, ability, says):
    """Both were once computed, and wrong: with a share's own mask, and with each rank's own frequencies."""
    made = {"llava": lambda: tiny_vlms._llava(text=tiny_vlms._text(**text))}
    monkeypatch.setattr(tiny_vlms, "MODELS", made)
    abilities = adapters_of(tiny_vlms.save("llava", tmp_path))["llm"].abilities
    assert not getattr(abilities, ability)
    assert says in abilities.because(ability)


SP = "[parallelism.llm]\ntensor_parallel_degree = 2\nenable_sequence_parallel = true"


@pytest.mark.slow
def test_sequence_parallelism_of_layers_of_which_nothing_is_known_is_refused(directory):
    """It was once computed, and wrong: a linear attention began anew in the middle of samples."""
    found = adapters_of(directory("qwen3_5"), SP)
    assert can_do(found, "llm") | {"SP": YES, "CP": LLM, "packing": LLM} == can_do(found, "llm")
    llm = found["llm"]
    unknown = text_plan(llm.whole, llm._empty)
    assert unknown.token_sharded
    for layer in (0, 2):
        llm._empty.model.language_model.layers[layer].linear_attn = torch.nn.Linear(24, 24)
    assert not text_plan(llm.whole, llm._empty).token_sharded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tables", "says"),
    [
        (
            "[parallelism.llm]\ntensor_parallel_degree = 4",
            r"divide linear_num_key_heads = 2 \(of its linear_attention layers\) of modules.llm; valid",
        ),
        (
            "[modules.llm]\nattention_mask = 'bidirectional_media'",
            r"= 'bidirectional_media': must be 'causal' \(its layers of kind \['linear_attention'\] know",
        ),
    ],
)
def test_what_a_recurrence_cannot_do_is_refused_with_the_kind_of_layer(directory, tables, says):
    with pytest.raises(RecipeError, match=says):
        adapters_of(directory("qwen3_5"), tables)


@pytest.mark.slow
def test_mixers_that_are_only_padded_are_packed_but_not_shared(tmp_path, monkeypatch):
    """Mamba-2, whose state hetmesh does not send: nothing names it."""
    monkeypatch.setattr(tiny_vlms, "MODELS", {"mamba": tiny_vlms.mamba})
    path = tiny_vlms.save("mamba", tmp_path)
    llm = adapters_of(path)["llm"]
    assert llm.abilities.use_packed is not None
    says = r"share the tokens of this hf_llm \(its layers of kind \['linear_attention'\] take samples only whole, and"
    with pytest.raises(RecipeError, match=says):
        adapters_of(path, "[parallelism.llm]\ncontext_parallel_degree = 2")


@pytest.mark.slow
def test_sequence_parallelism_of_eager_attention_is_refused(tmp_path, monkeypatch):
    """It was once computed, and wrong: without a mask, which is left out where all tokens are gathered, not causal."""
    monkeypatch.setattr("transformers.LlavaPreTrainedModel._supports_sdpa", False)
    with pytest.raises(RecipeError, match="its attention is eager, which only a mask of all tokens makes causal"):
        resolve(recipe(tiny_vlms.save("llava", tmp_path), SP))


def placed(name, frames, height, width, position, gap=None, seconds=None):
    """An item of a grid at `position`: in one run, or with `gap` tokens between its frames."""
    rows = height * width
    runs = [(position + i * (rows + gap), rows) for i in range(frames)] if gap else [(position, frames * rows)]
    size = (frames, height, width, *([] if seconds is None else [round(seconds * PICOSECONDS)]))
    return MediaItem(name, (), position, frames * rows, size, tuple(runs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gap", "seconds"),
    [
        ("qwen3_vl", 2, None),
        ("qwen3_5", 2, None),
        ("glm4v", 1, None),
        ("qwen2_5_vl", None, 2 / 24),
        ("qwen2_5_vl", None, 1.7),
    ],
)
def test_positions_of_placed_images_and_videos_are_the_models_own(directory, name, gap, seconds):
    whole = whole_model_of(directory(name))
    media = [placed("image", 1, 2, 3, 2), placed("video", 3, 2, 1, 10, gap, seconds)]
    media += [placed("image", 1, 1, 2, 22), placed("video", 4, 1, 2, 26, gap, seconds)]
    meta = SampleMeta("s", 46, tuple(media))
    types = torch.zeros(1, 46, dtype=torch.int64)
    for item, kind in zip(media, (1, 2, 1, 2), strict=True):
        for start, rows in item.runs:
            types[0, start : start + rows] = kind
    given = {
        "image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 4]]),
        "video_grid_thw": torch.tensor([[3, 4, 2], [4, 2, 4]]),
    }
    if seconds is not None:
        given["second_per_grid_ts"] = torch.tensor([seconds, seconds])
    inner = whole.model.get_submodule(whole.decoder.rpartition(".")[0])
    expected, _ = inner.get_rope_index(torch.zeros_like(types), mm_token_type_ids=types, **given)
    assert torch.equal(torch.tensor(rope_positions(whole, meta, {})), expected[:, 0])
    images = replace(meta, media=(media[0], media[2]))  # which the model is not asked for
    types, grids = types * (types == 1), {"image_grid_thw": given["image_grid_thw"]}
    expected, _ = inner.get_rope_index(torch.zeros_like(types), mm_token_type_ids=types, **grids)
    assert torch.equal(torch.tensor(rope_positions(whole, images, {})), expected[:, 0])
    assert rope_positions(whole, images, {}) == multimodal_positions(images, {})
    if gap:
        with pytest.raises(SampleError, match="'s': the rows of the 'video' at position 10 lie in 3 runs"):
            multimodal_positions(meta, {})


@pytest.mark.slow
def test_positions_of_a_video_begin_anew_with_every_frame_where_timestamps_part_them(directory):
    meta = SampleMeta("s", 7, (placed("video", 2, 1, 2, 1, 1),))  # text, 2 rows, text, 2 rows, text
    found = rope_positions(whole_model_of(directory("qwen3_vl")), meta, {})
    assert found == ((0, 1, 1, 3, 4, 4, 6), (0, 1, 1, 3, 4, 4, 6), (0, 1, 2, 3, 4, 5, 6))
    omni = whole_model_of(directory("qwen2_5_omni"))
    meta = SampleMeta("s", 7, (placed("video", 2, 1, 2, 2, None, 0.12),))  # 25 positions a second
    assert rope_positions(omni, meta, {})[0] == (0, 1, 2, 2, 5, 5, 6)


def test_positions_that_the_model_gives_as_floats_must_be_integers(processors):
    """Qwen3-Omni's are floats, 25 to a second of a video; a batch of integers would drop fractions without a word."""
    whole = whole_model_of(processors("qwen3_omni_moe"))
    meta = SampleMeta("s", 8, (placed("audio", 1, 1, 1, 1), placed("video", 2, 1, 2, 3, None, 1.0)))
    assert rope_positions(whole, meta, {})[0] == (0, 1, 2, 3, 3, 28, 28, 29)
    meta = replace(meta, media=(placed("video", 2, 1, 2, 3, None, 0.9),))
    with pytest.raises(SampleError, match=r"'s': Qwen3OmniMoeThinker.* gives it positions that are no integers"):
        rope_positions(whole, meta, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "items", "says"),
    [
        ("qwen3_vl", [placed("video", 2, 1, 2, 1)], "Qwen3VL.*'s get_rope_index does not take its items: .*"),
        (
            "qwen3_vl",
            [placed("video", 1, 1, 2, 1), placed("video", 1, 1, 2, 3)],
            "two 'video' items, or .* at position 3",
        ),
        (
            "qwen3_vl",
            [replace(placed("image", 1, 1, 2, 1), size=())],
            r"size of the 'image' at position 1 is \(\), from",
        ),
        ("qwen3_vl", [replace(placed("image", 1, 1, 2, 1), size=(1, 2, 4))], "must be .* the grid of its 2 rows"),
        (
            "qwen2_5_vl",
            [placed("video", 2, 1, 2, 1)],
            r"picoseconds of a frame, .*\(second_per_grid_ts\), got \[\(2, 1, 2\)",
        ),
    ],
)
def test_placed_items_whose_positions_cannot_be_told_are_refused(directory, name, items, says):
    with pytest.raises(SampleError, match=f"sample 's': .*{says}"):
        rope_positions(whole_model_of(directory(name)), SampleMeta("s", 9, tuple(items)), {})


def unweighted(name, class_name, path):
    """The model of a directory with a processor and without weights."""
    tiny_processors.change(tiny_processors.save(name, path), "config", architectures=[class_name])
    return whole_model_of(path)


def test_a_tower_may_norm_its_rows_as_the_embedding_does(tmp_path):
    """Muse Spark's audio tower asks its LLM for that norm, which has no weights."""
    whole = unweighted("muse_spark", "MuseSparkForConditionalGeneration", tmp_path)
    request = AdapterRequest(
        "audio", media="audio", consumers=("llm",), model="hf_encoder", pretrained=whole.pretrained
    )
    assert HfEncoderAdapter.make(request).out_features == whole.text_config.hidden_size


def test_a_tower_of_experts_computes_in_fp64(tmp_path):
    whole = unweighted("dots3_note", "Dots3NoteForConditionalGeneration", tmp_path)
    request = AdapterRequest(
        "vision", media="image", consumers=("llm",), model="hf_encoder", pretrained=whole.pretrained
    )
    adapter = HfEncoderAdapter.make(request)
    batch = adapter.collate([], [])
    assert adapter.forward(adapter.build().double(), batch, {}).dtype == torch.float64


def test_frames_that_become_one_have_one_position(tmp_path):
    whole = unweighted("ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration", tmp_path)
    clip = replace(placed("video", 2, 1, 2, 1), size=(4, 1, 2))
    assert rope_positions(whole, SampleMeta("s", 6, (clip,)), {})[0] == (0, 1, 1, 2, 2, 3)


def test_rows_at_the_ends_of_lines_have_positions_where_the_model_knows_them(tmp_path):
    """hy_v4_vl's images have a row more at the end of each line; its processes once died of that."""
    whole = unweighted("hy_v4_vl", "HYV4VLForConditionalGeneration", tmp_path)
    image = replace(placed("image", 1, 2, 4, 1), size=(1, 2, 3))
    assert rope_positions(whole, SampleMeta("s", 10, (image,)), {}) == (
        (0, 1, 1, 1, 1, 1, 1, 1, 1, 5),
        (0, 1, 1, 1, 1, 2, 2, 2, 2, 5),
        (0, 1, 2, 3, 4, 1, 2, 3, 4, 5),
    )
    with pytest.raises(SampleError, match=r"sample 's': HYV4VL.*'s get_rope_index does not take its items"):
        rope_positions(whole, SampleMeta("s", 10, (placed("image", 1, 2, 4, 1),)), {})


@pytest.mark.slow
def test_positions_that_follow_from_something_else_than_grids_are_refused_by_check(tmp_path, monkeypatch):
    def by_slices(self, input_ids, target_sizes, **_):
        raise AssertionError

    monkeypatch.setattr("transformers.Qwen2_5_VLModel.get_rope_index", by_slices)
    with pytest.raises(RecipeError, match=r"its get_rope_index does not take grids of images: .*'target_sizes'"):
        resolve(recipe(tiny_vlms.save("qwen2_5_vl", tmp_path)))


@pytest.mark.slow
def test_tokens_are_not_split_where_a_layer_has_no_attention_that_is_split(directory, monkeypatch):
    whole = whole_model_of(directory("internvl"))
    plan = whole.text_config.base_model_tp_plan
    assert text_plan(whole, whole.model).token_sharded
    some = {name.replace("*", "1"): style for name, style in plan.items()}
    monkeypatch.setattr(whole.text_config, "base_model_tp_plan", some)
    assert text_plan(whole, whole.model).plan
    assert not text_plan(whole, whole.model).token_sharded


@pytest.mark.slow
def test_ranks_share_key_heads_only_where_all_attentions_repeat_keys_by_a_number_of_their_own(directory, monkeypatch):
    for name, features in (("internvl", 6), ("qwen2_5_vl", 12), ("gemma3", 6)):
        whole = whole_model_of(directory(name))
        styles = [style for style in text_plan(whole, whole.model).plan.values() if isinstance(style, KeyHeads)]
        assert styles == [KeyHeads(2, features)]
    second = whole.model.get_submodule(f"{whole.decoder}.layers.1.self_attn")
    for attribute in ("num_key_value_groups", "head_dim"):
        with monkeypatch.context() as patch:
            patch.delattr(second, attribute)
            assert not any(isinstance(style, KeyHeads) for style in text_plan(whole, whole.model).plan.values())


@pytest.mark.slow
def test_tensors_for_a_tower_that_takes_more_are_refused_and_what_to_hand_over_is_said(directory):
    text = tiny_vlms.recipe_text(directory("qwen2_5_vl"), items="kinds = { image = [3, 8, 8] }")
    says = r"reads 'image' as its own processor prepares them, and the data source hands over tensors; .* Sample.units"
    with pytest.raises(RecipeError, match=says):
        resolve(parse_recipe(text, ("--data.source", "hetmesh.testing.sources:RandomMedia")))


@pytest.mark.slow
def test_items_of_a_shape_that_the_tower_does_not_take_are_refused_by_check(directory):
    with pytest.raises(
        RecipeError, match=r"items of kind 'image' do not suit .*shape \(3, 8, 8\).*, got \(3, 16, 16\)"
    ):
        adapters_of(directory("llava"), items="kinds = { image = [3, 16, 16] }")
