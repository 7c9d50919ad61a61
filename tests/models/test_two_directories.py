"""A tower and an LLM of two directories, with an MLP between them: what transformers' own modules compute together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetmesh.checkpoint.saved_run import saved_run
from hetmesh.cli import main
from hetmesh.data.answers import Continued
from hetmesh.errors import RecipeError
from hetmesh.export.export import export
from hetmesh.inference.generate import answer_tokens
from hetmesh.recipe.recipe import Recipe, parse_recipe
from hetmesh.resolve.modules import loaded_module
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.parity import TOLERANCE, Outcome, compare, descend, run_as
from hetmesh.testing.precision import exact_dtypes
from hetmesh.training.one_process import OneProcess
from support.llava_parts import filled, save_llava_parts
from support.split_layouts import CP_PP, FSDP, LAYOUTS, SP, STAGES
from support.tiny_exports import KEPT, save_now, tensors
from support.tiny_vlms import IMAGE, SIZES, TEXT, TOWER, build

PAGE = Path(__file__).parents[2] / "src" / "hetmesh" / "models" / "split" / "README.md"
HEADS = {**TEXT, "head_dim": 6}
AUDIO: Mapping[str, Any] = {"d_model": 16, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 32}
LONG = 6
SHAPES = {"image": (3, 8, 8), "audio": (6, 16)}


def siglip() -> Any:
    import transformers as t

    text = {**SIZES, "vocab_size": 20, "projection_size": 16}
    return t.SiglipModel(t.SiglipConfig(text_config=text, vision_config=dict(TOWER)))


def whisper() -> Any:
    import transformers as t

    decoder = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8, "vocab_size": 20}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    sizes = {"num_mel_bins": 6, "max_source_positions": 8, "max_target_positions": 8}
    return t.WhisperForConditionalGeneration(t.WhisperConfig(**AUDIO, **decoder, **ids, **sizes))


def dinov2() -> Any:
    import transformers as t

    return t.Dinov2Model(t.Dinov2Config(**{**TOWER, "mlp_ratio": 2}))


def gemma3(**more: Any) -> Any:
    import transformers as t

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = t.Gemma3TextConfig(**HEADS, sliding_window=12, query_pre_attn_scalar=6, layer_types=kinds, **more)
    return t.Gemma3ForCausalLM(config)


def clip(name: str = "CLIPModel") -> Any:
    import transformers as t

    if name == "CLIPVisionModel":
        return t.CLIPVisionModel(t.CLIPVisionConfig(**TOWER))
    text = {**SIZES, "vocab_size": 20, "eos_token_id": 2}
    return t.CLIPModel(t.CLIPConfig(text_config=text, vision_config=dict(TOWER)))


def causal(name: str) -> Any:
    import transformers as t

    return getattr(t, f"{name}ForCausalLM")(getattr(t, f"{name}Config")(**HEADS))


@dataclass(frozen=True)
class Pair:
    """A tower and an LLM.

    Attributes:
        inside: FQN of the tower in its model.
        kind: of its media.
        rows: of an item.
        layouts: of `LAYOUTS`, on which the pair is trained.
    """

    tower: Callable[[], Any]
    llm: Callable[[], Any]
    inside: str
    kind: str
    rows: int
    layouts: tuple[str, ...]

    @property
    def input(self) -> str:
        return "pixel_values" if self.kind == "image" else "input_features"


PAIRS = {
    "SigLIP 2, Llama": Pair(siglip, lambda: causal("Llama"), "vision_model", "image", 16, (LAYOUTS[SP],)),
    "Whisper, Qwen3": Pair(whisper, lambda: causal("Qwen3"), "model.encoder", "audio", 8, (LAYOUTS[FSDP], STAGES)),
    "DINOv2, Gemma 3": Pair(dinov2, gemma3, "", "image", 17, (LAYOUTS[CP_PP], LAYOUTS[FSDP])),
    "CLIP, Mistral": Pair(clip, lambda: causal("Mistral"), "vision_model", "image", 17, ()),
}
FIRST = "SigLIP 2, Llama"
"""With sequence parallelism and FSDP; the others run with the exhaustive tests."""
THREE = [name for name, pair in PAIRS.items() if pair.layouts]


def save(model: Any, path: Path) -> Path:
    """The directory of a model, all of whose parameters are random."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> Callable[[str], tuple[Path, Path]]:
    """The two directories of a pair, by its name."""

    @cache
    def of(name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("pair")
        return save(PAIRS[name].tower(), folder / "tower"), save(PAIRS[name].llm(), folder / "llm")

    return of


def recipe(
    tower: Path, llm: Path, kind: str = "image", more: str = "", dtype: str = "float64", items: str = ""
) -> Recipe:
    return parse_recipe(f"""
    [modules.vision]
    model = "hf_encoder"
    initial_load_path = '{tower}'
    [modules.projector]
    model = "mlp"
    [modules.llm]
    model = "hf_llm"
    initial_load_path = '{llm}'
    [[boundaries]]
    from = "vision"
    to = "projector"
    [[boundaries]]
    from = "projector"
    to = "llm"
    at = "{kind}"
    [data]
    source = "hetmesh.testing.sources:RandomMedia"
    options = {{ kinds = {{ {kind} = {items or list(SHAPES[kind])} }}, apart = true, max_text = 12 }}
    [training]
    local_batch_size = 2
    global_batch_size = 8
    dtype = "{dtype}"
    {more.replace("[training]", "")}
    """)


class ByHand(nn.Module):
    """A pair as transformers loads it, with an MLP between."""

    def __init__(self, pair: Pair, tower: Path, llm: Path, projector: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.pair = pair
        self.vision = type(pair.tower()).from_pretrained(tower, dtype=torch.float32).to(dtype)
        self.llm = type(pair.llm()).from_pretrained(llm, dtype=torch.float32).to(dtype)
        self.projector = projector.to(dtype)

    def embedded(self, tokens: Tensor, items: Any) -> Tensor:
        embedded = self.llm.get_input_embeddings()(tokens)
        if len(items):
            media = torch.stack(list(items)).to(embedded.dtype)
            features = self.vision.get_submodule(self.pair.inside)(**{self.pair.input: media}).last_hidden_state
            rows = self.projector(features.flatten(0, 1))
            embedded = embedded.masked_scatter((tokens == IMAGE)[:, None], rows)
        return embedded[None]

    def forward(self, tokens: Tensor, items: Any) -> Tensor:
        return self.llm(inputs_embeds=self.embedded(tokens, items)).logits[0]


def by_hand(given: Recipe, pair: Pair, tower: Path, llm: Path) -> ByHand:
    adapters = resolve(given).adapters
    dtype = {"float64": torch.float64, "float32": torch.float32}[given.training.dtype]
    return ByHand(pair, tower, llm, loaded_module(given, adapters["projector"], "projector"), dtype)


def truth_of(given: Recipe, pair: Pair, tower: Path, llm: Path) -> Outcome:
    """Three steps by hand, one sample at a time."""
    loader, model = resolve(given).loader(), by_hand(given, pair, tower, llm)

    def step() -> float:
        drawn, total = next(loader), 0.0
        count = max(sum(d.meta.num_targets for d in drawn), 1)
        for sample, d in zip(loader.load(drawn), drawn, strict=True):
            logits = model(sample.tokens, sample.media.get(pair.kind, ()))
            for start, stop in d.meta.targets:
                each = nn.functional.cross_entropy(
                    logits[start - 1 : stop - 1], sample.tokens[start:stop], reduction="sum"
                )
                (each / count).backward(retain_graph=True)
                total += each.item() / count
        return total

    owned = {"vision": pair.inside, "projector": "", "llm": ""}
    held = {
        f"{name}.{key}": p
        for name, inside in owned.items()
        for key, p in getattr(model, name).named_parameters()
        if key.startswith(inside)
    }
    for key, declared in pair.tower().named_parameters():  # sinusoids are not trained, which loading forgets
        model.vision.get_parameter(key).requires_grad_(declared.requires_grad)
    with exact_dtypes(model, every_cast=True):
        return descend(held, step, 3, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n == FIRST else pytest.param(n, marks=pytest.mark.exhaustive) for n in THREE])
def test_three_steps_are_those_of_transformers_modules_in_one_process_and_in_layouts(pool, directories, name):
    pair, (tower, llm) = PAIRS[name], directories(name)
    truth = truth_of(recipe(tower, llm, pair.kind), pair, tower, llm)
    for layout in ("", *pair.layouts):
        given = recipe(tower, llm, pair.kind, layout)
        compare(truth, pool(given.world_size).run(run_as, given, 3, timeout=300), TOLERANCE["float64"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n == FIRST else pytest.param(n, marks=pytest.mark.exhaustive) for n in PAIRS])
def test_a_run_answers_as_its_export_does_in_transformers(pool, directories, tmp_path, name):
    pair, (tower, llm) = PAIRS[name], directories(name)
    kept = KEPT.format(steps=1, folder=tmp_path / "run", more="")
    given = recipe(tower, llm, pair.kind, kept, dtype="float32")
    assert resolve(given).adapters["vision"].item_rows(SHAPES[pair.kind]) == pair.rows
    pool(1).run(save_now, given, 1, timeout=120)
    run, out = saved_run(tmp_path / "run"), tmp_path / "out"
    lines = export(run, out)
    for model, folder, source in ((pair.tower(), "vision", tower), (pair.llm(), "llm", llm)):
        assert f"  loads with transformers.{type(model).__name__}.from_pretrained" in lines
        _, told = type(model).from_pretrained(out / folder, output_loading_info=True)
        assert not any(told.values())
        before, after = tensors(source), tensors(out / folder)
        assert before.keys() == after.keys()
        same = {key for key in before if torch.equal(before[key], after[key])}
        assert len(same) < len(before)
        assert {key for key in before if "text_model" in key or "decoder" in key} <= same

    projector = loaded_module(given, resolve(given).adapters["projector"], "projector")
    projector.load_state_dict(tensors(out / "projector"))
    theirs = ByHand(pair, out / "vision", out / "llm", projector, torch.float32).eval()
    model = OneProcess.load(run.recipe, run)
    source = model.resolved.source
    index = next(i for i in range(40) if source.meta(i).num_items(pair.kind) > 1)
    answer = list(answer_tokens(model, source, index, max_tokens=LONG))
    loader = model.loader(Continued(source, [index], [[]]))
    (sample,) = loader.load(loader.batch(0))
    with torch.no_grad():
        embedded = theirs.embedded(sample.tokens[:-1], sample.media[pair.kind])
        found = theirs.llm.generate(
            inputs_embeds=embedded,
            attention_mask=torch.ones(embedded.shape[:2]),
            do_sample=False,
            max_new_tokens=LONG,
            eos_token_id=-1,
            suppress_tokens=[IMAGE],
            output_logits=True,
            return_dict_in_generate=True,
        )
    assert answer == found.sequences[0, -LONG:].tolist()
    ours = [model.logits(Continued(source, [index], [answer[:i]]))[-1] for i in range(LONG)]
    assert torch.allclose(torch.stack(ours), torch.cat(found.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_towers_are_found_in_whatever_their_directory_holds(tmp_path):
    import transformers as t

    llm = save(causal("Llama"), tmp_path / "llm")
    for name, model in (
        ("vision alone", clip("CLIPVisionModel")),
        ("a classifier", t.SiglipForImageClassification(t.SiglipConfig(vision_config=dict(TOWER)))),
        ("a whole model", build("gemma3")),
    ):
        path = save(model, tmp_path / name)
        adapters = resolve(recipe(path, llm)).adapters
        rows = {"vision alone": 17, "a classifier": 16, "a whole model": 4}[name]
        assert adapters["vision"].item_rows((3, 8, 8)) == rows
        assert adapters["vision"].checkpoint_names
        loaded_module(recipe(path, llm), adapters["vision"], "vision")


@pytest.mark.slow
def test_directories_that_have_no_such_part_are_refused(directories, tmp_path):
    import transformers as t

    tower, llm = directories("SigLIP 2, Llama")
    with pytest.raises(RecipeError, match=r"modules\.vision\.media = 'image': LlamaForCausalLM has towers for \[\]"):
        resolve(recipe(llm, llm))
    with pytest.raises(RecipeError, match="SiglipModel has no LLM: a decoder, whose attention is causal, and a head"):
        resolve(recipe(tower, tower))
    with pytest.raises(RecipeError, match=r"modules\.vision\.media = 'audio': SiglipModel has towers for \['image'\]"):
        resolve(recipe(tower, llm, "audio"))
    with pytest.raises(RecipeError, match=r"'image' items .* must be of shape \(3, 8, 8\), got \(3, 16, 16\)"):
        resolve(recipe(tower, llm, items="[3, 16, 16]"))
    sizes = {**SIZES, "vocab_size": 48}
    text = save(t.BertModel(t.BertConfig(**sizes)), tmp_path / "bert")
    with pytest.raises(RecipeError, match="BertModel has neither a tower of images or log-mel features nor a decoder"):
        resolve(recipe(text, llm))
    both_ways = save(gemma3(use_bidirectional_attention=True), tmp_path / "both ways")
    with pytest.raises(RecipeError, match="Gemma3ForCausalLM has no LLM: a decoder, whose attention is causal"):
        resolve(recipe(tower, both_ways))
    path = save(build("qwen2_5_vl"), tmp_path / "patches")
    with pytest.raises(
        RecipeError, match=r"no processor of 'image', and its get_image_features takes \['image_grid_thw'"
    ):
        resolve(recipe(path, llm))
    maps = save(t.ConvNextModel(t.ConvNextConfig(hidden_sizes=[4] * 4, depths=[1] * 4)), tmp_path / "convnext")
    with pytest.raises(RecipeError, match=r"its last hidden state has 4 dims, not 3"):
        resolve(recipe(maps, llm, items="[3, 224, 224]"))


@pytest.mark.slow
def test_the_recipe_of_the_page_trains(pool, tmp_path):
    root = save_llava_parts(tmp_path / "files")
    (shown,) = re.findall(r"^```toml\n(\[modules.vision\]\nmodel.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    folders = {"siglip2-so400m-patch16-384": "clip-vit-large-patch14-336", "Llama-3.1-8B": "vicuna-7b-v1.5"}
    for theirs, ours in folders.items():
        shown = shown.replace(f"/models/{theirs}", f"/path/to/{ours}")
    given = filled(root, "--job.dump_folder", str(tmp_path / "run"), modules=shown)
    pool(2).run(save_now, given, 1, timeout=120)
    asked = ["generate", str(tmp_path / "run"), "what is this", "--image", str(root / "images" / "1.png")]
    assert main([*asked, "--max-new-tokens", "3"]) == 0
