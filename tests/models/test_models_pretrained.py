"""Real weights: directories as transformers saves them, through a recipe, on one process and on shards."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetmesh.boundary import World
from hetmesh.cli.check import checked
from hetmesh.data.loader import Loader
from hetmesh.data.source import Sample
from hetmesh.errors import RecipeError
from hetmesh.graph.sample import MediaItem, SampleMeta
from hetmesh.parallel import local_part
from hetmesh.recipe.recipe import Recipe, parse_recipe
from hetmesh.resolve.modules import loaded_module
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.parity import TOLERANCE, compare, reference, run
from hetmesh.training.job import Job
from support.often import combinations

VOCAB, MEDIA = 40, 1
IMAGE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
IMAGE |= {"image_size": 8, "patch_size": 4, "num_channels": 1}
LLM: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 50, "num_hidden_layers": 2, "vocab_size": VOCAB}
LLM |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "pad_token_id": 0}
LLM |= {"bos_token_id": None, "eos_token_id": None}


def whisper_config():
    from transformers import WhisperConfig

    ids = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "decoder_start")}
    sizes = {"d_model": 16, "num_mel_bins": 6, "max_source_positions": 5, "vocab_size": 9, **ids}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 32}
    return WhisperConfig(**sizes, suppress_tokens=None, begin_suppress_tokens=None)


def build(kind: str, **changes: Any):
    """A random model of transformers; biases and norms are random too, or a wrong one would not be seen."""
    import transformers as t

    torch.manual_seed(len(kind))
    models = {
        "clip": lambda: t.CLIPVisionModel(t.CLIPVisionConfig(**{**IMAGE, **changes})),
        "siglip": lambda: t.SiglipVisionModel(t.SiglipVisionConfig(**{**IMAGE, **changes})),
        "whisper": lambda: t.WhisperForConditionalGeneration(whisper_config()),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**{**LLM, **changes})),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**{**LLM, **changes})),
        "llava": lambda: t.LlavaForConditionalGeneration(
            t.LlavaConfig(vision_config=t.CLIPVisionConfig(**IMAGE), text_config=t.LlamaConfig(**LLM))
        ),
    }
    model: Any = models[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def save(model: Any, folder: Path, shards: bool = False) -> Path:
    model.save_pretrained(folder, **({"max_shard_size": "8KB"} if shards else {}))
    assert (folder / "model.safetensors.index.json").exists() == shards
    return folder


class Items:
    """A source of 8 samples with 0 to 2 items of one kind each."""

    vocab_size, pad_id = VOCAB - 3, 0

    def __init__(self, kind: str = "image"):
        self.placeholders = {kind: MEDIA}
        self.kind, self.shape = kind, {"image": (1, 8, 8), "audio": (6, 10)}[kind]

    def __len__(self) -> int:
        return 8

    def meta(self, index: int) -> SampleMeta:
        items = tuple(MediaItem(self.kind, self.shape, 1 + i) for i in range((index + 1) % 3))
        return SampleMeta(f"{index}", 6 + len(items), items, ((3 + len(items), 6 + len(items)),))

    def load(self, index: int, kinds: object = None) -> Sample:
        draw = torch.Generator().manual_seed(index)
        count = (index + 1) % 3
        tokens = torch.tensor([5 + index, *[MEDIA] * count, 20, 3, 7, 8 + index, 9])
        return Sample(f"{index}", tokens, {self.kind: [torch.rand(self.shape, generator=draw) for _ in range(count)]})


def recipe(encoder: tuple[str, Any], llm: tuple[str, Any], more: str = "", projector: Any = None) -> Recipe:
    """A recipe of an encoder, a projector (random unless it has a directory) and an LLM: `(model, directory)`."""
    kind = "audio" if encoder[0] == "whisper" else "image"
    load = "" if projector is None else f"initial_load_path = '{projector}'"
    return parse_recipe(f"""
        [modules.vision]
        model = "{encoder[0]}"
        initial_load_path = "{encoder[1]}"
        [modules.projector]
        model = "mlp"
        {load}
        [modules.llm]
        model = "{llm[0]}"
        initial_load_path = "{llm[1]}"
        [[boundaries]]
        from = "vision"
        to = "projector"
        [[boundaries]]
        from = "projector"
        to = "llm"
        at = "{kind}"
        [data]
        source = "{__name__}:Items"
        options = {{ kind = "{kind}" }}
        [training]
        local_batch_size = 4
        steps = 1
        {more}
    """)


def modules_of(recipe: Recipe) -> tuple[Any, Any]:
    """Adapters and loaded modules, on one process."""
    resolved = resolve(recipe)
    adapters = resolved.adapters
    return adapters, {name: loaded_module(recipe, adapters[name], name) for name in resolved.graph.order}


def logits_of(recipe: Recipe, adapters: Any, modules: Any) -> torch.Tensor:
    """hetmesh's logits of the targets of all samples."""
    resolved = resolve(recipe)
    source, graph = resolved.source, resolved.graph
    loader = Loader(source, len(source), resolved.expander, shuffle=False)
    drawn = loader.batch(0)
    metas, samples = [d.meta for d in drawn], loader.load(drawn)
    rows: dict[str, torch.Tensor] = {}
    for name in graph.order:
        batch = adapters[name].collate(samples, metas, placeholders=source.placeholders, pad_id=source.pad_id)
        inputs = {b.source: rows[b.source] for b in graph.inputs(name)}
        rows[name] = adapters[name].forward(modules[name], batch, inputs)
    return rows["llm"]


def transformers_logits(recipe: Recipe, encoder: Any, projector: Any, llm: Any) -> torch.Tensor:
    """The same from models that transformers loaded itself; one sample at a time."""
    resolved = resolve(recipe)
    source = resolved.source
    out = []
    for index in range(len(source)):
        sample, meta = source.load(index), source.meta(index)
        ids = sample.tokens
        embeddings = llm.get_input_embeddings()(ids)
        media = sample.media[next(iter(source.placeholders))]
        count = len(media)
        if count:
            features = encoder(torch.stack(media))
            features = features[:, 1:] if recipe.modules["vision"].model == "clip" else features
            assert features.shape[1] == resolved.adapters["vision"].rows_per_item
            embeddings = torch.cat([embeddings[:1], projector(features.flatten(0, 1)), embeddings[1 + count :]])
        logits = llm(inputs_embeds=embeddings[None]).logits[0]
        out.append(logits[len(logits) - meta.num_targets - 1 : -1])
    return torch.cat(out)


def own_encoder(kind: str, folder: Path):
    """The encoder as transformers loads it: media -> features."""
    import transformers as t

    if kind == "whisper":
        whisper = t.WhisperForConditionalGeneration.from_pretrained(folder).get_encoder()
        return lambda media: whisper(media).last_hidden_state
    tower: Any = {"clip": t.CLIPVisionModel, "siglip": t.SiglipVisionModel}[kind].from_pretrained(folder)
    return lambda media: tower(media).last_hidden_state


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "sharded files"])
@pytest.mark.parametrize(
    ("encoder", "llm", "changes"),
    [
        ("clip", "llama", {}),
        ("siglip", "qwen3", {"attention_bias": True}),
        ("whisper", "qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_saved_and_loaded_back_forwards_agree_with_transformers(tmp_path, encoder, llm, changes, shards):
    from transformers import AutoModelForCausalLM

    save(build(encoder), tmp_path / "encoder", shards)
    save(build(llm, **changes), tmp_path / "llm", shards)
    given = recipe((encoder, tmp_path / "encoder"), (llm, tmp_path / "llm"))
    adapters, modules = modules_of(given)
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "llm")
    expected = transformers_logits(given, own_encoder(encoder, tmp_path / "encoder"), modules["projector"], own)
    logits = logits_of(given, adapters, modules)
    assert logits.shape == (8 * 3, VOCAB)
    assert float((logits - expected).detach().abs().max()) < 1e-5
    assert float(expected.detach().std()) > 0.1
    if changes.get("tie_word_embeddings"):
        assert modules["llm"].lm_head.weight is modules["llm"].model.embed_tokens.weight


# --- Whose names: parts of multimodal checkpoints, and what a module has no use for. ---


def renamed(folder: Path, name: Any, **added: torch.Tensor) -> Path:
    """Rename every tensor in a saved directory; `added` ones come to them."""
    tensors = {name(key): value for key, value in load_file(folder / "model.safetensors").items()}
    added = {key: value.clone() for key, value in added.items()}
    save_file({**tensors, **added}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_all_parts_of_a_llava_checkpoint(tmp_path):
    model = build("llava")
    folder = save(model, tmp_path / "llava")
    given = recipe(("clip", folder), ("llama", folder), "[modules.vision.config]\nfeature_layer = -2", projector=folder)
    adapters, modules = modules_of(given)
    assert len(modules["vision"].encoder.layers) == 2  # of the 3 in the checkpoint

    def features(media):
        return model.model.vision_tower(media, output_hidden_states=True).hidden_states[-2]

    expected = transformers_logits(given, features, model.model.multi_modal_projector, _language_model(model))
    assert float((logits_of(given, adapters, modules) - expected).detach().abs().max()) < 1e-5


def _language_model(model: Any):
    """The LLM inside of a LlavaForConditionalGeneration, with its head."""

    def logits(inputs_embeds):
        hidden = model.model.language_model(inputs_embeds=inputs_embeds).last_hidden_state
        return type("Output", (), {"logits": model.lm_head(hidden)})

    logits.get_input_embeddings = model.get_input_embeddings  # type: ignore[attr-defined]
    return logits


@pytest.mark.parametrize("prefix", ["vision_model.", "vision_tower.vision_model.", "model.vision_tower."])
def test_prefixes_and_tensors_without_use(tmp_path, prefix):
    plain, other = build("clip"), torch.zeros(3)
    save(plain, tmp_path / "clip")
    more = {f"{prefix}embeddings.position_ids": other, "logit_scale": other, "text_model.final_layer_norm.bias": other}
    renamed(tmp_path / "clip", lambda name: prefix + name, **more)
    save(build("llama"), tmp_path / "llama")
    frequencies = {"model.layers.1.self_attn.rotary_emb.inv_freq": other}  # of old Llama checkpoints
    renamed(tmp_path / "llama", lambda name: name, **frequencies)
    _, modules = modules_of(recipe(("clip", tmp_path / "clip"), ("llama", tmp_path / "llama")))
    own = dict(plain.named_parameters())
    for name, parameter in modules["vision"].named_parameters():
        assert torch.equal(parameter, own[name]), name


def test_a_tied_head_may_be_there_twice_or_alone(tmp_path):
    model = build("llama", tie_word_embeddings=True)
    save(model, tmp_path / "once")
    save(model, tmp_path / "twice")
    save(model, tmp_path / "head")
    save(model, tmp_path / "base")
    save(build("clip"), tmp_path / "clip")
    weight = model.lm_head.weight.detach().clone()
    renamed(tmp_path / "twice", lambda name: name, **{"lm_head.weight": weight})
    renamed(tmp_path / "head", lambda name: name.replace("model.embed_tokens", "lm_head"))
    renamed(tmp_path / "base", lambda name: name.removeprefix("model."))
    for folder in ("once", "twice", "head", "base"):
        _, modules = modules_of(recipe(("clip", tmp_path / "clip"), ("llama", tmp_path / folder)))
        llm = modules["llm"]
        assert llm.lm_head.weight is llm.model.embed_tokens.weight
        assert torch.equal(llm.lm_head.weight, weight)


def test_old_configs_with_rope_theta_are_understood(tmp_path):
    model = build("llama", rope_parameters={"rope_type": "default", "rope_theta": 123.0})
    folder = save(model, tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 123.0, "rope_scaling": None, "torch_dtype": "bfloat16", "head_dim": None}
    (folder / "config.json").write_text(json.dumps(config))
    save(build("clip"), tmp_path / "clip")
    _, modules = modules_of(recipe(("clip", tmp_path / "clip"), ("llama", folder)))
    assert torch.equal(modules["llm"].model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert modules["llm"].lm_head.weight.dtype == torch.float32


class Statistics(torch.nn.Module):
    """Running statistics as a batch norm keeps them, of fixed values: nothing depends on the batch."""

    def __init__(self, features: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, rows):
        return (rows - self.running_mean) * self.weight


class Normed(torch.nn.Module):
    """A user's projector, whose running statistics and constants are no parameters."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.norm = Statistics(in_features)
        self.linear = torch.nn.Linear(in_features, out_features)
        self.register_buffer("constant", torch.full((2,), 3.0), persistent=False)

    def forward(self, rows):
        return self.linear(self.norm(rows))


def test_the_users_own_modules_and_their_buffers(saved, tmp_path):
    own = Normed(16, 24)
    own.norm.running_mean += 5
    own.norm.num_batches_tracked += 7
    save_file(own.state_dict(), tmp_path / "own.safetensors")
    given = recipe(("clip", saved / "clip"), ("llama", saved / "llama"), projector=tmp_path)
    modules = {**given.modules}
    modules["projector"] = modules["projector"].model_copy(update={"model": f"{__name__}:Normed"})
    _, loaded = modules_of(given.model_copy(update={"modules": type(given.modules)(modules)}))
    for name, value in own.state_dict().items():
        assert torch.equal(loaded["projector"].state_dict()[name], value), name
    assert loaded["projector"].constant.tolist() == [3, 3]


# --- Errors. ---


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Directories `clip`, `llama` and `sharded`, a Llama in several files; not to be changed."""
    root = tmp_path_factory.mktemp("saved")
    save(build("clip"), root / "clip")
    save(build("llama"), root / "llama")
    save(build("llama"), root / "sharded", shards=True)
    return root


@pytest.fixture
def llama(saved, tmp_path) -> Path:
    """A copy of `llama` to spoil."""
    return Path(shutil.copytree(saved / "llama", tmp_path / "llama"))


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def edit_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def only_pickle(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def outside(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))


SPOILED: dict[str, tuple[Any, str]] = {
    "missing": (
        lambda f: edit_tensors(f, lambda t: t.pop("model.norm.weight")),
        r"1 missing: model\.norm\.weight \[24\]",
    ),
    "many missing": (
        lambda f: edit_tensors(f, lambda t: [t.pop(n) for n in list(t) if "layers.1" in n]),
        r"9 missing: model\.layers\.1\..* and 1 more",
    ),
    "left over": (
        lambda f: edit_tensors(f, lambda t: t.update({"model.layers.2.odd": torch.zeros(1)})),
        r"1 left over: model\.layers\.2\.odd",
    ),
    "another shape": (
        lambda f: edit_tensors(f, lambda t: t.update({"model.norm.weight": torch.zeros(25)})),
        r"1 of another shape: model\.norm\.weight is \[25\], not \[24\]",
    ),
    "another module's": (
        lambda f: renamed(f, lambda name: f"text_model.{name}"),
        r"none of the module's 21 tensors is in it.*its own are text_model\.",
    ),
    "remote code": (lambda f: edit_config(f, auto_map={"AutoModel": "m.M"}), "hetmesh runs no such code"),
    "adapter": (
        lambda f: (f / "adapter_config.json").write_text("{}"),
        r"there is an adapter in it \(adapter_config\.json\), which transformers loads with the weights",
    ),
    "quantised": (lambda f: edit_config(f, quantization_config={"bits": 4}), "its weights are quantised"),
    "quantised without a word": (
        lambda f: edit_tensors(f, lambda t: t.update({"model.norm.weight": torch.ones(24, dtype=torch.int8)})),
        r"model\.norm\.weight in model\.safetensors is quantised \(dtype I8\)",
    ),
    "another model": (
        lambda f: edit_config(f, model_type="mistral"),
        r"config\.json describes 'mistral'; model = 'llama' reads 'llama'",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), r"there is no config\.json in it"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), r"config\.json cannot be read"),
    "pickle": (only_pickle, r"only pickled weights \(pytorch_model\.bin\), which can run any code"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"there is no \*\.safetensors file"),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
        r"model\.safetensors cannot be read as safetensors",
    ),
    "two files": (
        lambda f: shutil.copy(f / "model.safetensors", f / "b.safetensors"),
        "without a model.safetensors.index",
    ),
    "file outside": (outside, r"names '\.\./a\.safetensors', which is outside of the directory"),
    "no directory": (shutil.rmtree, "it does not exist; give a local directory"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_each_unsuitable_directory_gives_one_clear_error(saved, llama, case):
    spoil, message = SPOILED[case]
    spoil(llama)
    with pytest.raises(RecipeError, match=rf"^modules\.llm\.initial_load_path = '{llama}': .*{message}"):
        modules_of(recipe(("clip", saved / "clip"), ("llama", llama)))


def test_check_finds_wrong_tensors_and_all_missing_directories(saved, llama):
    good = recipe(("clip", saved / "clip"), ("llama", llama))
    assert any("llama" in line for line in checked(good)[1])
    edit_tensors(llama, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(RecipeError, match=r"1 missing: model\.norm\.weight"):
        checked(good)
    with pytest.raises(RecipeError, match=r"(?s)vision\.initial_load_path = '/no/clip': .*\n.*llm\..* = '/no/llama': "):
        checked(recipe(("clip", "/no/clip"), ("llama", "/no/llama")))


def test_a_missing_shard_is_named(saved, tmp_path):
    folder = Path(shutil.copytree(saved / "sharded", tmp_path / "sharded"))
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(RecipeError, match=rf"names {shard.name}, missing in the directory"):
        modules_of(recipe(("clip", saved / "clip"), ("llama", folder)))


def test_the_config_table_agrees_with_the_directory_or_says_how_not(saved):
    def modules(config: str):
        return modules_of(
            recipe(("clip", saved / "clip"), ("llama", saved / "llama"), f"[modules.llm.config]\n{config}")
        )

    with pytest.raises(
        RecipeError, match=r"modules\.llm\.config\.num_attention_heads = 2, but .* says 4 in its config"
    ):
        modules("num_attention_heads = 2")
    with pytest.raises(
        RecipeError, match=r"modules\.llm\.config\.hidden_sise: unknown key; did you mean 'hidden_size'"
    ):
        modules("hidden_sise = 2")
    _, same = modules("hidden_size = 24\nmax_position_embeddings = 99")
    assert same["llm"].config.max_position_embeddings == 99


# --- On shards. ---

LAYOUTS = {
    "tensor parallel 2": (2, "tensor_parallel_degree = 2"),
    "FSDP 2": (2, "data_parallel_shard_degree = 2"),
    "HSDP 2 x 2": (4, "data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 2"),
    "FSDP 2, offloaded and checkpointed": (2, "data_parallel_shard_degree = 2\n[activation_checkpoint]\nmode = 'full'"),
    "FSDP 2 x tensor parallel 2": (4, "data_parallel_shard_degree = 2\ntensor_parallel_degree = 2"),
}


def on_this_rank(rank, recipe):
    return run(recipe, World.current(), steps=2)


PAIRS = {
    "clip-llama": ({}, ""),
    "whisper-qwen3": ({"tie_word_embeddings": True}, ""),
    "siglip-qwen3": ({"vocab_size": 37}, "[modules.llm.lora]\nrank = 2\n"),
}
OFTEN = {
    ("clip-llama", "FSDP 2, offloaded and checkpointed"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "layout"), combinations(OFTEN, PAIRS, LAYOUTS))
def test_h5_training_from_loaded_weights_equals_one_process(pool, tmp_path, pair, layout):
    (encoder, llm), (changes, more) = pair.split("-"), PAIRS[pair]
    save(build(encoder), tmp_path / "encoder")
    save(build(llm, **changes).to(torch.bfloat16), tmp_path / "llm", shards=True)
    size, keys = LAYOUTS[layout]
    offload = "enable_cpu_offload = true\n" if "offloaded" in layout else ""
    more = f'dtype = "float64"\n{offload}{more}[parallelism]\nranks = "0-{size - 1}"\n{keys}'
    given = recipe((encoder, tmp_path / "encoder"), (llm, tmp_path / "llm"), more)
    compare(reference(given, steps=2), pool(size).run(on_this_rank, given), TOLERANCE["float64"])


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made in its context occupied at a time. Views count as what they view: a slice of a
    mapped file as the whole tensor there."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        return out

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if tensor.is_meta or key in self.known:
            return
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.forget, key, size)

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def peak_of_loading(rank: int, recipe: Recipe, whole: bool = False) -> tuple[int, int, int]:
    """Peak bytes while a job is assembled, bytes of what the rank holds then, and of its largest whole tensor.

    `whole` is the way that hetmesh does not go: every rank loads the whole module before it takes its shard.
    """
    with LiveBytes() as bytes:
        kept = modules_of(recipe) if whole else None
        job = Job.assemble(resolve(recipe), World.current())
        del kept
    held = sum(local_part(p).untyped_storage().nbytes() for p in job.root.parameters())
    return bytes.peak, held, max(4 * p.numel() for p in job.root.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(LAYOUTS)[:2])
def test_loading_peaks_at_the_shard_and_one_tensor(pool, tmp_path, layout):
    save(build("clip"), tmp_path / "clip")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "vocab_size": 300, "head_dim": 32}
    save(build("llama", **sizes), tmp_path / "llama")
    _, keys = LAYOUTS[layout]
    given = recipe(("clip", tmp_path / "clip"), ("llama", tmp_path / "llama"), f"[parallelism]\nranks = '0-1'\n{keys}")
    for peak, held, largest in pool(2).run(peak_of_loading, given):
        assert held < 3_500_000  # of 5.1 MB
        assert peak <= 1.2 * held + largest
    for peak, held, largest in pool(2).run(peak_of_loading, given, True):
        assert peak > 1.2 * held + largest


def test_the_peak_is_seen():
    with LiveBytes() as bytes:
        kept = torch.ones(10)
        torch.ones(100) + 1
    assert (bytes.live, bytes.peak) == (40, 840)
    assert kept[:2].sum() == 2
