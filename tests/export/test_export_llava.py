"""A SigLIP or CLIP, an MLP and a Llama or Qwen3 are a directory of LLaVA, which computes what the run computes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from hetmesh.api import run_recipe as train
from hetmesh.checkpoint.saved_run import saved_run
from hetmesh.cli import main
from hetmesh.data.answers import Continued
from hetmesh.export.export import export
from hetmesh.export.llava import llava_config, write_processor
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.recipe.sections import Mixed
from hetmesh.training.one_process import OneProcess
from hetmesh.verify.self_check import relative
from support.llava_parts import filled, save_llava_parts
from support.tiny_exports import KEPT, save_now

TOWER = "hidden_size = 16, num_hidden_layers = 3, num_attention_heads = 4, patch_size = 4"
LLM = "hidden_size = 24, num_hidden_layers = 2, num_attention_heads = 4"
CASES = {
    "SigLIP, tied Qwen3": ("siglip", TOWER, "qwen3", f"{LLM}, num_key_value_heads = 2, tie_word_embeddings = true"),
    "CLIP, Llama": ("clip", f"{TOWER}, feature_layer = -2", "llama", LLM),
    "CLIP with its class token, Qwen3": ("clip", f"{TOWER}, class_token = true", "qwen3", LLM),
}


def recipe(case, folder, more="", projector="", image=8, keys=()):
    tower, config, llm, text = CASES[case] if isinstance(case, str) else case
    return parse_recipe(
        f"""
    [modules.vision]
    model = "{tower}"
    config = {{ {config} }}
    [modules.projector]
    model = "mlp"
    {projector}
    [modules.llm]
    model = "{llm}"
    config = {{ {text} }}
    {more}
    [[boundaries]]
    from = "vision"
    to = "projector"
    [[boundaries]]
    from = "projector"
    to = "llm"
    at = "image"
    [data]
    source = "hetmesh.testing.sources:RandomMedia"
    options = {{ kinds = {{ image = [3, {image}, {image}] }}, max_text = 12 }}
    [training]
    local_batch_size = 4
    dtype = "float32"
    {KEPT.format(steps=2, folder=folder, more="")}
    """,
        keys,
    )


def check_logits(run, out, *, missing=()):
    """That LLaVA gives the targets of some samples the logits that the run gives."""
    from transformers import LlavaForConditionalGeneration

    llava, told = LlavaForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert sorted(told.pop("missing_keys")) == sorted(missing)
    assert not any(told.values())
    model = OneProcess.load(run.recipe, run)
    source, seen = model.resolved.source, 0
    for index in range(8):
        loader = model.loader(Continued(source, [index], [[]]))
        drawn = loader.batch(0)
        (sample,), meta = loader.load(drawn), drawn[0].meta
        items = sample.media.get("image", ())
        with torch.no_grad():
            pixels = {"pixel_values": torch.stack(list(items))} if items else {}
            theirs = llava.eval()(input_ids=sample.tokens[None], **pixels).logits[0]
        theirs = torch.cat([theirs[start - 1 : stop - 1] for start, stop in meta.targets])
        assert relative(model.logits(Continued(source, [index], [[]])), theirs) < 1e-5
        seen += len(items)
    assert seen > 3
    return llava


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_of_the_directory_are_those_of_the_run(tmp_path, case):
    train(recipe(case, tmp_path / "run"))
    run = saved_run(tmp_path / "run")
    lines = export(run, tmp_path / "out")
    assert "  loads with transformers.LlavaForConditionalGeneration.from_pretrained" in lines
    none = "the recipe's data name none, and its modules' directories have none"
    assert f"  without tokenizer and processor: {none}" in lines
    older = any(line.startswith("  for transformers from 5.18 on: ") for line in lines)
    assert older == case.startswith("SigLIP")
    norm = ("weight", "bias") if case.startswith("CLIP") else ()  # of CLIP's pooled output, which nothing reads
    llava = check_logits(run, tmp_path / "out", missing=[f"model.vision_tower.post_layernorm.{x}" for x in norm])
    assert llava.config.image_seq_length == 4 + ("class" in case)


@pytest.mark.slow
def test_adapters_are_merged_or_beside_it(tmp_path):
    from peft import PeftModel
    from transformers import LlavaForConditionalGeneration

    case = "SigLIP, tied Qwen3"
    train(recipe(case, tmp_path / "run", "[modules.llm.lora]\nrank = 2\n"))
    run = saved_run(tmp_path / "run")
    export(run, tmp_path / "out")
    merged = check_logits(run, tmp_path / "out")
    export(run, tmp_path / "apart", merge=False)
    base = LlavaForConditionalGeneration.from_pretrained(tmp_path / "apart")
    by_peft = PeftModel.from_pretrained(base, tmp_path / "apart" / "adapter").merge_and_unload()
    for (name, ours), theirs in zip(merged.named_parameters(), by_peft.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("projector", "more", "says"),
    [
        ("config = { hidden_features = 9 }", "", "as the LLM, 24; here hidden_features = 9"),
        ("", 'attention_mask = "prefix"', "its attention is causal; here attention_mask = 'prefix'"),
    ],
)
def test_what_llava_cannot_say_is_a_directory_per_module_and_the_reason(tmp_path, projector, more, says):
    given = recipe("CLIP, Llama", tmp_path / "run", more, projector)
    training = given.training.model_copy(update={"pack_samples": bool(more)})
    train(given.model_copy(update={"training": training}))
    lines = export(saved_run(tmp_path / "run"), tmp_path / "out")
    assert lines[0].startswith("not one directory of LLaVA: ")
    assert says in lines[0]
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == {"vision", "projector", "llm"}


SIGLIP = """
[modules.vision]
model = "siglip"
config = {{ {tower}, image_size = 28 }}
[modules.projector]
model = "mlp"
[modules.llm]
model = "llama"
initial_load_path = "/path/to/vicuna-7b-v1.5"
[[boundaries]]
from = "vision"
to = "projector"
[[boundaries]]
from = "projector"
to = "llm"
at = "image"
""".format(tower=TOWER.replace("patch_size = 4", "patch_size = 14"))


@pytest.mark.slow
@pytest.mark.parametrize("modules", [pytest.param(None, marks=pytest.mark.exhaustive), SIGLIP], ids=["CLIP", "SigLIP"])
def test_the_recipe_of_llava_gives_a_processor_too(pool, tmp_path, capsys, modules):
    from PIL import Image
    from transformers import AutoProcessor

    root = save_llava_parts(tmp_path / "files")
    keys = ("--job.dump_folder", str(tmp_path / "run"))
    pool(2).run(save_now, filled(root, *keys, modules=modules), 1, timeout=120)
    run = saved_run(tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert "with a LlavaProcessor of the run's tokenizer and image processor" in capsys.readouterr().out
    llava = check_logits(run, tmp_path / "out")
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    model = OneProcess.load(run.recipe, run)
    source = model.resolved.source
    loader = model.loader(source)
    drawn = loader.batch(0)
    samples = loader.load(drawn)
    records = [json.loads(line) for line in (root / "pretrain.jsonl").read_text().splitlines()]
    for index in (1, 2, 7):  # one image, two, two questions
        turns = records[index]["messages"]
        for part in turns[0]["content"]:
            part |= {"image": Image.open(root / "images" / part["image"])} if part["type"] == "image" else {}
        made = processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
        assert made["input_ids"][0].tolist() == samples[index].tokens.tolist()
        pixels = torch.stack(list(samples[index].media["image"]))
        assert torch.allclose(made["pixel_values"], pixels, atol=2 / 255 / 0.3)
        with torch.no_grad():
            theirs = llava(**made).logits[0]
        *earlier, (start, stop) = drawn[index].meta.targets
        theirs = torch.cat([theirs[first - 1 : last - 1] for first, last in (*earlier, (start, stop + 1))])
        answer = samples[index].tokens[start:stop].tolist()
        assert relative(model.logits(Continued(source, [drawn[index].index], [answer])), theirs) < 1e-5


def test_of_a_mixture_the_processor_is_that_of_the_first_part_that_names_one(tmp_path):
    from transformers import AutoProcessor, CLIPVisionConfig, LlamaConfig

    root = save_llava_parts(tmp_path / "files")
    tokenizer, images = (str(root / name) for name in ("vicuna-7b-v1.5", "clip-vit-large-patch14-336"))
    parts = [
        {"kinds": {}},
        {"tokenizer": tokenizer},
        {"tokenizer": tokenizer, "image_processor": images, "chat_template": "one"},
        {"tokenizer": tokenizer, "image_processor": images, "chat_template": "two"},
    ]
    given = recipe("CLIP, Llama", tmp_path / "run")
    mixture = tuple(Mixed(source="conversations", name=str(i), options=part) for i, part in enumerate(parts))
    given = given.model_copy(update={"data": given.data.model_copy(update={"mixture": mixture})})
    tower = SimpleNamespace(rows_per_item=4, class_token=False)
    config = llava_config(0, tower, CLIPVisionConfig(patch_size=14), LlamaConfig())
    lines = list(write_processor(given, config, tmp_path / "out"))
    assert lines == ["with a LlavaProcessor of the run's tokenizer and image processor"]
    assert AutoProcessor.from_pretrained(tmp_path / "out").chat_template.endswith("one")


@pytest.mark.slow
def test_where_the_data_name_no_processor_it_is_that_of_the_modules_directories(tmp_path):
    from transformers import AutoProcessor

    root = save_llava_parts(tmp_path / "files")
    tower, llm = root / "clip-vit-large-patch14-336", root / "vicuna-7b-v1.5"
    keys = ("--modules.vision.initial_load_path", str(tower), "--modules.llm.initial_load_path", str(llm))
    train(recipe(("clip", "feature_layer = -2", "llama", ""), tmp_path / "run", image=28, keys=keys))
    named = f"modules.llm.initial_load_path = '{llm}'"
    run = saved_run(tmp_path / "run")
    both = f"{named} and modules.vision.initial_load_path = '{tower}'"
    assert f"  with a LlavaProcessor of {both}; the recipe's data name none" in export(run, tmp_path / "out")
    check_logits(run, tmp_path / "out")
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    made = processor(text="<s> what", images=[torch.zeros(3, 9, 9)], return_tensors="pt")
    assert made["input_ids"][0].tolist().count(1) == 4
    assert made["pixel_values"].shape == (1, 3, 28, 28)

    tokenizer = json.loads((llm / "tokenizer.json").read_text()) | {"added_tokens": []}
    (llm / "tokenizer.json").write_text(json.dumps(tokenizer))
    (llm / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    lines = export(run, tmp_path / "words")
    assert f"  without tokenizer and processor: token 1, which stands for an image, is a word in {named}" in lines
