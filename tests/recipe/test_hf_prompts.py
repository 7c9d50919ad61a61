"""Prompts of a directory: token by token those of transformers' own processor, or refused."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from hetmesh.data.chat import Chat
from hetmesh.data.conversations import ConversationsSource
from hetmesh.data.expand import Expander, expand_tokens
from hetmesh.errors import RecipeError
from hetmesh.models.split.item_calls import AnyResolutionTiles
from hetmesh.recipe.hf_families import PROCESSORS, PROMPTS
from hetmesh.recipe.hf_path import prompt_note
from hetmesh.recipe.recipe import parse_recipe

NAMED = {  # unlike the defaults, where a tokenizer may say so
    "InternVLProcessor": {
        "start_image_token": "<im>",
        "end_image_token": "</im>",
        "context_image_token": "<image>",
        "video_token": "<video>",
    },
    "Gemma3Processor": {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"},
    "Qwen2_5OmniProcessor": {
        "image_token": "<image>",
        **{f"{kind}_token": f"<{kind}>" for kind in ("audio", "video")},
        **{f"{kind}_{end}_token": f"<{kind}_{end}>" for kind in ("vision", "audio") for end in ("bos", "eos")},
    },
    "SmolVLMProcessor": {"fake_image_token": "<fake>", "global_image_token": "<whole>", "image_token": "<image>"},
}
MODELS = {name: model for model, name in reversed(PROCESSORS.items()) if name != "Qwen2AudioProcessor"}
COMPARED = [name for name in MODELS if not PROMPTS[name].refused]
SPECIAL = ["<pad>", "<s>", "</s>", "<image>", "<fake_token_around_image>", "<global-img>"]
ITEMS = {  # what image processors say of two images, of three or four rows each
    "num_patches": [1, 1],
    "num_crops": [0, 0],
    "rows": [[0, 0]],
    "cols": [[0, 0]],
    "image_grid_thw": np.array([[1, 2, 6], [1, 2, 6]]),
    "batch_num_images": [2],
    "image_sizes": [(2, 6), (2, 6)],
    "pixel_values": np.zeros((2, 3, 2, 6)),
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:\n{% for p in m.content %}{% if p.type == 'image' %}WRITTEN"
    "{% else %}{{ p.text | trim }}{% endif %}{% endfor %}</s>\n{% endfor %}"
)

IMAGES_FIRST = (  # as in the directories of LLaVA and LLaVA-OneVision
    "{% for m in messages %}{{ m.role | upper }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content | selectattr('type', 'equalto', 'image') %}WRITTEN\n{% endfor %}"
    "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}{% endif %}"
    "{{ '</s>' if m.role == 'assistant' else ' ' }}{% endfor %}"
)


def directory(folder, name, template=TEMPLATE):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    named = NAMED.get(name, {"image_token": "<image>"})
    alphabet = [
        *SPECIAL,
        *(t for t in named.values() if t not in SPECIAL),
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
    ]
    vocabulary = {token: i for i, token in enumerate([*alphabet, "ĊĊ"])}  # two line feeds, as Gemma has them
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
        additional_special_tokens=SPECIAL[3:],
        extra_special_tokens=named,
    )
    fast.add_special_tokens({"additional_special_tokens": [*SPECIAL[3:], *named.values()]})
    if template:
        fast.chat_template = template.replace("WRITTEN", named.get("boi_token", "<image>"))
    fast.save_pretrained(folder)
    config = {"model_type": MODELS[name], "vision_config": {}, "text_config": {}, "image_token_id": 3}
    (folder / "config.json").write_text(json.dumps(config))
    return fast


def options_of(folder, more=""):
    return parse_recipe(f"[model]\nhf_path = '{folder}'\n[data.options]\npath = 'x'\n{more}").data.options


def chat_of(options):
    return Chat(
        Path(options["tokenizer"]),
        options["placeholders"],
        options.get("chat_template"),
        replacements=options.get("replacements"),
        special_tokens=options.get("special_tokens", False),
    )


def processor_of(name, tokenizer, monkeypatch):
    """The real class, with what it needs of an image processor (others need torchvision)."""
    import transformers

    kind = getattr(transformers, name)
    monkeypatch.setattr(kind, "check_argument_for_proper_class", lambda *_: None)
    images = SimpleNamespace(merge_size=2, image_seq_length=3, fetch_images=lambda x: x, image_grid_pinpoints=[[2, 6]])
    given = {"image_seq_length": 3} if name in ("InternVLProcessor", "Gemma3Processor") else {}
    given |= {"image_seq_len": 3} if name in ("Idefics3Processor", "SmolVLMProcessor") else {}
    given |= {"patch_size": 2, "vision_feature_select_strategy": "full"} if name.startswith("Llava") else {}
    given |= {"num_image_tokens": 2} if name == "LlavaOnevisionProcessor" else {}
    if "video_processor" in kind.get_attributes():
        given["video_processor"] = SimpleNamespace(num_frames=1, fps=1)
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)
    return kind(image_processor=images, tokenizer=tokenizer, **given)


@pytest.mark.parametrize(
    ("name", "template"),
    [*((name, TEMPLATE) for name in COMPARED), ("LlavaProcessor", IMAGES_FIRST)],
)
def test_prompts_are_those_of_transformers_own_processor(tmp_path, monkeypatch, name, template):
    own = PROMPTS[name].template
    tokenizer = directory(tmp_path, name, template="" if own else template)
    image, asked = {"type": "image"}, {"type": "text", "text": "what is it?"}
    turns = [
        {"role": "user", "content": [image, image, asked]},
        {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]},
    ]
    chat = chat_of(options_of(tmp_path))
    ours = chat.encode("x", [("user", "<image><image>what is it?"), ("assistant", "a cat")])

    processor = processor_of(name, tokenizer, monkeypatch)
    if own:
        _, text, *_ = processor.prepare_inputs_layout(
            images=[np.zeros((3, 2, 6))] * 2, text=["<image><image>what is it?"]
        )
    else:
        text = [processor.apply_chat_template(turns, chat_template=tokenizer.chat_template, tokenize=False)]
    texts = [processor.replace_image_token(ITEMS, i, num_pages_per_batch=[1, 1]) for i in range(2)]
    rows = texts[0].count("<image>")
    assert rows > 1
    text, _ = processor.get_text_with_replacements(text, images_replacements=texts)
    expected = tokenizer(text[0], add_special_tokens=not own)["input_ids"]
    if own:  # as with the argument `suffix`
        expected += tokenizer("a cat</s>", add_special_tokens=False)["input_ids"]

    assert [token for i in ours.ids for token in [i] * (rows if i == 3 else 1)] == expected
    assert tokenizer.decode([t for a, b in ours.targets for t in ours.ids[a:b]]) == "a cat</s>"
    assert chat.ids("x", [("user", "<image><image>what is it?"), ("assistant", "a cat")]) == ours.ids


RESOLUTIONS = [[8, 8], [8, 16], [16, 8], [16, 16]]
TILED = {
    "LlavaOnevisionProcessor": ("llava_onevision", {"image_grid_pinpoints": RESOLUTIONS}),
    "InternVLProcessor": ("got_ocr2", {"max_patches": 4}),
}


@pytest.mark.parametrize("name", TILED)
def test_prompts_have_as_many_tokens_for_tiles_as_transformers_own_processor(tmp_path, monkeypatch, name):
    family, more = TILED[name]
    tokenizer = directory(tmp_path, name)
    module = importlib.import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    kind = next(each for key, each in vars(module).items() if key.endswith("ImageProcessorPil"))
    images = kind(size={"height": 8, "width": 8}, **more)
    images.save_pretrained(tmp_path)
    processor = processor_of(name, tokenizer, monkeypatch)
    processor.image_processor, processor.vision_aspect_ratio = images, "anyres_max_2"
    processor.num_image_tokens = processor.image_seq_length = 16
    call = AnyResolutionTiles((3, 8, 8), 4, tuple(map(tuple, RESOLUTIONS)), 2)
    rows = {"LlavaOnevisionProcessor": call.units, "InternVLProcessor": lambda extent: 16 * extent[0]}
    draw, lines, texts = np.random.default_rng(0), [], []
    pictures = [Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in ((9, 30), (20, 21))]
    for i, picture in enumerate(pictures):
        picture.save(tmp_path / f"{i}.png")
    for shown in ([0], [1], [0, 1]):
        turns = [
            {"role": "user", "content": [*({"type": "image", "image": f"{i}.png"} for i in shown)]},
            {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]},
        ]
        lines.append(json.dumps({"messages": turns}))
        text = processor.apply_chat_template(turns, chat_template=tokenizer.chat_template, tokenize=False)
        texts.append(processor(text=[text], images=[[pictures[i] for i in shown]])["input_ids"][0])
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    source = ConversationsSource(**{**options_of(tmp_path), "path": str(tmp_path / "talks.jsonl")})
    for i, expected in enumerate(texts):
        meta = source.meta(i)
        expanded = Expander({"image": rows[name]})(meta).meta
        tokens = expand_tokens(source.load(i), meta, expanded, source.placeholders).tokens
        assert tokens.tolist() == list(expected)
        assert all(item.rows > 17 for item in expanded.media) == (name == "InternVLProcessor" or i < 2)


def test_processors_of_families_are_those_of_transformers():
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    assert {model: PROCESSOR_MAPPING_NAMES[model] for model in PROCESSORS} == dict(PROCESSORS)


@pytest.mark.parametrize(
    ("model", "processor", "template", "says"),
    [
        (
            "mistral3",
            None,
            TEMPLATE,
            r"\[IMG_BREAK\] after every line.*write the whole form.*with '<image>' for an item",
        ),
        ("llava", "PixtralProcessor", TEMPLATE, r"PixtralProcessor \(model_type 'llava'\): it writes \[IMG_BREAK\]"),
        ("aya_vision", "AyaVisionProcessor", TEMPLATE, r"does not know what it writes around an item; write"),
        ("new", None, TEMPLATE, r"transformers' processor \(model_type 'new'\): hetmesh does not know"),
        ("llava", None, "", r"there is no chat template in the directory; write the whole form of a conversation"),
        ("paligemma", None, TEMPLATE, r"it has its own form, and there is a chat template in the directory"),
    ],
)
def test_what_cannot_be_followed_is_refused_unless_the_recipe_has_a_form(tmp_path, model, processor, template, says):
    directory(tmp_path, "LlavaProcessor", template)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": model}))
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": processor}))
    with pytest.raises(RecipeError, match=says):
        options_of(tmp_path)
    assert options_of(tmp_path, "chat_template = 'x'")["chat_template"] == "x"
    assert parse_recipe(f"[model]\nhf_path = '{tmp_path}'\n[data]\nsource = 'digits'").data.options == {}


def test_a_template_that_does_not_write_what_is_replaced_is_refused(tmp_path):
    directory(tmp_path, "Gemma3Processor", TEMPLATE.replace("WRITTEN", "<image>"))
    with pytest.raises(RecipeError, match=r"the chat template does not write '<boi>' for an item but '<image>'"):
        chat_of(options_of(tmp_path))


def test_what_a_prompt_does_not_have_is_a_note(tmp_path):
    directory(tmp_path, "InternVLProcessor")
    text = f"[model]\nhf_path = '{tmp_path}'\n[data"
    assert prompt_note(parse_recipe(f"{text}.options]\npath = 'x'")) == ""
    assert "one tile each" in prompt_note(parse_recipe(f"{text}.options]\npath = 'x'\nimage_tiles = false"))
    mixed = f"{text}]\n[[data.mixture]]\nsource = 'conversations'\nweight = 1.0"
    assert "fills in nothing of [[data.mixture]]" in prompt_note(parse_recipe(mixed))


OLD, NEW, NESTED = (TEMPLATE.replace("WRITTEN", "<image>") + name for name in ("json", "jinja", "nested"))


@pytest.mark.parametrize("files", range(1, 8))
def test_the_chat_template_is_the_one_that_transformers_takes(tmp_path, files):
    from transformers.processing_utils import ProcessorMixin

    directory(tmp_path, "LlavaProcessor", template="")
    wanted = [files & bit for bit in (1, 2, 4)]
    if wanted[0]:
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": OLD}))
    if wanted[1]:
        (tmp_path / "chat_template.jinja").write_text(NEW)
    if wanted[2]:
        (tmp_path / "processor_config.json").write_text(json.dumps({"chat_template": NESTED}))
    theirs, _ = ProcessorMixin.get_processor_dict(tmp_path)
    assert chat_of(options_of(tmp_path)).template == theirs["chat_template"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"processor_config": {"processor_class": "LlavaProcessor"}, "tokenizer_config": "Next"}, "LlavaProcessor"),
        (
            {
                "processor_config": {"image_processor": {"processor_class": "LlavaProcessor"}},
                "preprocessor_config": "Next",
            },
            "LlavaProcessor",
        ),
        ({"processor_config": {"image_processor": {}}, "preprocessor_config": "Next"}, "PaliGemmaProcessor"),
        ({"preprocessor_config": "Next"}, "LlavaNextProcessor"),
        ({"tokenizer_config": "Next"}, "LlavaNextProcessor"),
        ({}, "PaliGemmaProcessor"),
    ],
)
def test_the_processor_class_is_the_one_that_transformers_takes(tmp_path, monkeypatch, files, expected):
    from transformers import AutoProcessor, ProcessorMixin

    from hetmesh.recipe import hf_path

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "paligemma"}))
    for name, value in files.items():
        table = {"processor_class": "LlavaNextProcessor"} if value == "Next" else value
        (tmp_path / f"{name}.json").write_text(json.dumps(table))
    monkeypatch.setattr(ProcessorMixin, "from_pretrained", classmethod(lambda cls, *_, **__: cls.__name__))
    assert hf_path.processor_of(str(tmp_path), "paligemma") == AutoProcessor.from_pretrained(tmp_path) == expected
