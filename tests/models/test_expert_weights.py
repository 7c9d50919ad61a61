"""Experts of checkpoints, one by one or together, transposed or not: a rank reads those that it holds, and no other."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hetmesh._torch_compat import StridedShard, fake_process_group
from hetmesh.errors import RecipeError
from hetmesh.layout import Layout, MeshSpec
from hetmesh.models import check_weights, load_weights
from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.named.causal_lm import CausalLMAdapter
from hetmesh.models.named.qwen3_moe import Qwen3MoeAdapter
from hetmesh.models.split.llm_half import HfLlmAdapter
from hetmesh.models.split.whole_model import whole_model
from hetmesh.models.weights.build import build_empty
from hetmesh.models.weights.model_forms import Taken, converted
from hetmesh.models.weights.pretrained import Pretrained
from support import tiny_vlms

pytestmark = pytest.mark.slow
EXPERTS = 6
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


def qwen3_moe() -> Any:
    import transformers as t

    sizes = {**tiny_vlms.TEXT, **tiny_vlms.EXPERTS, "head_dim": 6, "mlp_only_layers": [1]}
    torch.manual_seed(3)
    model = t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


class Moe(CausalLMAdapter):
    """A Qwen3-MoE as a directory describes it."""

    @classmethod
    def of(cls, path: Path) -> CausalLMAdapter:
        import transformers as t

        return cls(t.Qwen3MoeConfig.from_pretrained(path), t.Qwen3MoeForCausalLM, {})


def halves_of(path: Path) -> Any:
    """The adapter that recipes name, with gate and up as two tensors of one parameter."""
    return Qwen3MoeAdapter.make(AdapterRequest("llm", model="qwen3_moe", pretrained=Pretrained(path, "k")))


def llm_of(path: Path) -> Any:
    request = AdapterRequest("llm", pretrained=Pretrained(path, "k"), placeholders={"vision": "image"})
    return HfLlmAdapter.make(request)


@dataclass(frozen=True)
class Case:
    """A directory, what reads it, and its model as transformers loads it."""

    path: Path
    adapter: Any
    model: Any

    def value(self, name: str) -> torch.Tensor:
        value = self.model.get_parameter(name).detach()
        halves = isinstance(self.adapter, Qwen3MoeAdapter | HfLlmAdapter) and name.endswith(GATE_UP)
        return value.unflatten(1, (2, -1)) if halves else value


def rewritten(source: Path, folder: Path, change: Any) -> Path:
    """The directory with its tensors changed, in a file for each two of them."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    tensors = change({name: each for file in source.glob("*.safetensors") for name, each in load_file(file).items()})
    names, index = sorted(tensors), {}
    for i in range(0, len(names), 2):
        file = f"model-{i:05}.safetensors"
        save_file({name: tensors[name].contiguous() for name in names[i : i + 2]}, folder / file)
        index |= dict.fromkeys(names[i : i + 2], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def transposed(tensors):
    return {name: each.transpose(1, 2) if ".experts." in name else each for name, each in tensors.items()}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    model = qwen3_moe()
    model.save_pretrained(folder / "plain")  # per expert, as hubs have them
    model.save_pretrained(folder / "fused", save_original_format=False)
    saved = tiny_vlms.save("qwen3_vl_moe", folder)
    paths = {
        "one by one": rewritten(folder / "plain", folder / "many", dict),
        "inside a larger model": rewritten(
            folder / "plain", folder / "inside", lambda t: {f"language_model.{name}": each for name, each in t.items()}
        ),
        "fused": folder / "fused",
        "fused, two halves": folder / "fused",
        "one by one, two halves": folder / "many",
    }
    kinds = {True: halves_of, False: Moe.of}
    found = {name: Case(path, kinds["halves" in name](path), model) for name, path in paths.items()}
    vlm = type(tiny_vlms.build("qwen3_vl_moe"))
    for name, path in (
        ("multimodal", saved),
        ("multimodal, transposed", rewritten(saved, folder / "hub", transposed)),
    ):
        found[name] = Case(path, llm_of(path), vlm.from_pretrained(path))
    return found


CASES = (
    "one by one",
    "inside a larger model",
    "fused",
    "fused, two halves",
    "one by one, two halves",
    "multimodal",
    "multimodal, transposed",
)


def test_the_directories_are_in_these_forms(cases):
    def experts_of(case):
        return {n: e.shape for n, e in Pretrained(cases[case].path, "k").tensors.items() if "0.mlp.experts" in n}

    assert len(experts_of("one by one")) == 3 * EXPERTS
    assert set(experts_of("fused").values()) == {(6, 16, 24), (6, 24, 8)}
    assert set(experts_of("multimodal").values()) == {(6, 16, 24), (6, 24, 8)}
    assert set(experts_of("multimodal, transposed").values()) == {(6, 24, 16), (6, 8, 24)}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_that_transformers_loads(cases, name):
    case = cases[name]
    module = build_empty(case.adapter)
    load_weights(case.adapter, module, Pretrained(case.path, "k"))
    for own, parameter in module.named_parameters():
        assert torch.equal(parameter.detach(), case.value(own)), own
    assert any(GATE_UP in own for own, _ in module.named_parameters())


class CountedReads:
    """Stands for `safetensors.safe_open`: counts the elements that are read of each tensor."""

    def __init__(self, monkeypatch):
        self.elements: Counter[str] = Counter()
        self.files: set[str] = set()
        self.open = safetensors.safe_open
        monkeypatch.setattr(safetensors, "safe_open", self)

    def __call__(self, file, *args):
        counted, self.reader = self, self.open(file, *args)
        self.files.add(Path(file).name)

        class Reader:
            def __enter__(reader):
                counted.reader.__enter__()
                return reader

            def __exit__(reader, *error):
                return counted.reader.__exit__(*error)

            def get_slice(reader, name):
                class Slice:
                    def __getitem__(self, index):
                        found = counted.reader.get_slice(name)[index]
                        counted.elements[name] += found.numel()
                        return found

                return Slice()

        return Reader()


def shard(module: nn.Module, mesh: DeviceMesh, placements: Any) -> None:
    """Make DTensors without memory of the experts' parameters."""
    for part in module.modules():
        for name, full in list(part._parameters.items()):
            if full is not None and full.dim() >= 3:
                own = tuple(placements(name, full))
                local = Layout(MeshSpec.of(mesh), own).local_shape(tuple(full.shape), torch.distributed.get_rank())
                shards = DTensor.from_local(
                    torch.empty(local, device="meta"),
                    mesh,
                    own,
                    run_check=False,
                    shape=full.shape,
                    stride=full.stride(),
                )
                part._parameters[name] = nn.Parameter(shards)


def columns(name: str, full: torch.Tensor) -> Any:
    """Along which dim tensor parallelism splits the inner features."""
    return Shard(2 if name == "down_proj" or full.dim() == 4 else 1)


PLACEMENTS: dict[str, tuple[tuple[int, ...], Any]] = {
    "ep": ((2,), lambda name, full: [Shard(0)]),
    "ep, uneven": ((4,), lambda name, full: [Shard(0)]),
    "ep, FSDP of dim 0": ((3, 2), lambda name, full: [StridedShard(0, split_factor=2), Shard(0)]),
    "ep, FSDP of dim 1": ((2, 3), lambda name, full: [Shard(1), Shard(0)]),
    "ep, tensor parallel": ((2, 2), lambda name, full: [Shard(0), columns(name, full)]),
    "FSDP, replicated": ((2, 2), lambda name, full: [Replicate(), Shard(1)]),
    "more ranks than experts": ((8,), lambda name, full: [Shard(0)]),
}


HELD = {"ep": 3, "ep, uneven": 2, "ep, FSDP of dim 0": 1, "ep, FSDP of dim 1": 2, "ep, tensor parallel": 3}
"""Experts of which a rank holds something; the fourth of `ep, uneven` has none."""


def expected_local(value: torch.Tensor, mesh: DeviceMesh, placements: Any) -> torch.Tensor:
    """A rank's part by torch.chunk alone: the later axes first where the first is strided over them."""
    coordinate = mesh.get_coordinate()
    order = sorted(range(len(placements)), key=lambda i: type(placements[i]) is StridedShard)
    for i in order:
        if isinstance(placements[i], Replicate):
            continue
        dim, ranks = placements[i].dim, mesh.size(i)
        chunks = value.chunk(ranks, dim)
        value = chunks[coordinate[i]] if coordinate[i] < len(chunks) else value.narrow(dim, 0, 0)
    return value


TRIED = [(name, placing) for placing in PLACEMENTS for name in ("one by one, two halves", "multimodal, transposed")]
TRIED += [(name, "ep, tensor parallel") for name in CASES if (name, "ep, tensor parallel") not in TRIED]


@pytest.mark.parametrize(("name", "placing"), TRIED)
def test_each_rank_reads_its_own_experts_and_nothing_else(cases, monkeypatch, name, placing):
    case, (sizes, placements) = cases[name], PLACEMENTS[placing]
    adapter = case.adapter
    pretrained = Pretrained(case.path, "k")
    _ = pretrained.tensors, adapter.checkpoint_names  # headers of all files
    for rank in range(torch.Size(sizes).numel()):
        with monkeypatch.context() as patched, fake_process_group(torch.Size(sizes).numel(), rank):
            ranks = torch.arange(torch.Size(sizes).numel()).view(sizes)
            mesh = DeviceMesh("cpu", ranks, mesh_dim_names=tuple("abc"[: len(sizes)]), _init_backend=False)
            module = build_empty(adapter)
            shard(module, mesh, placements)
            counted = CountedReads(patched)
            load_weights(adapter, module, pretrained)
            held = 0
            for own, parameter in module.named_parameters():
                if isinstance(parameter, DTensor):
                    local = parameter.to_local().detach()
                    assert torch.equal(local, expected_local(case.value(own), mesh, placements(own[-9:], local))), own
                    held += local.numel()
            read = {each: count for each, count in counted.elements.items() if ".experts." in each}
            assert sum(read.values()) == held
            if placing.startswith("ep") and "one by one" in name:
                ours = {int(re.search(r"experts\.(\d+)\.", each)[1]) for each in read}
                assert len(ours) == HELD[placing] * (rank < 3 or placing != "ep, uneven")


def test_files_of_other_experts_need_not_be_there(cases, tmp_path):
    case = cases["one by one"]
    folder = rewritten(case.path, tmp_path / "copy", dict)
    pretrained = Pretrained(folder, "k")
    held = {name: entry.file for name, entry in pretrained.tensors.items()}
    needed = {file for name, file in held.items() if not re.search(r"experts\.[345]\.", name)}
    gone = set(held.values()) - needed
    assert len(gone) >= 8
    for file in gone:
        file.unlink()
    with fake_process_group(2, 0):
        mesh = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("ep",), _init_backend=False)
        module = build_empty(case.adapter)
        shard(module, mesh, lambda name, full: [Shard(0)])
        load_weights(case.adapter, module, pretrained)
        weight = module.model.layers[0].mlp.experts.down_proj
        assert torch.equal(weight.to_local().detach(), case.value(f"model.layers.0.mlp.{DOWN}")[:3])


# --- Errors. ---


def without(pattern):
    return lambda tensors: {name: each for name, each in tensors.items() if not re.search(pattern, name)}


def also(name, like):
    return lambda tensors: {**tensors, name: tensors[like].clone()}


def cut(pattern, dim, stop):
    """Those of a name shorter along a dim."""
    return lambda t: {n: e.narrow(dim, 0, stop) if re.search(pattern, n) else e for n, e in t.items()}


OF_0 = "model.layers.0.mlp.experts"
SPOILED = {
    "one missing": (
        "one by one",
        without(r"layers.2.mlp.experts.3.up_proj"),
        r"1 missing: model\.layers\.2\.mlp\.experts\.3\.up_proj\.weight$",
    ),
    "an expert missing": (
        "one by one",
        without(rf"{OF_0}\.2\."),
        rf"3 missing: {OF_0}\.2\.down_proj\.weight, {OF_0}\.2\.gate_proj\.weight, {OF_0}\.2\.up_proj\.weight$",
    ),
    "the last expert missing": (
        "one by one",
        without(rf"{OF_0}\.5\."),
        rf"2 of another shape: {OF_0}\.gate_up_proj \(made of {OF_0}\.0.* to {OF_0}\.4\..* is \[5, 2, 8, 24\]",
    ),
    "all ups missing": (
        "one by one",
        without(rf"{OF_0}\.\d\.up"),
        rf"6 missing: mlp\.experts\.0\.up_proj\.weight of {OF_0}\.gate_up_proj",
    ),
    "all experts missing": ("one by one", without(rf"{OF_0}\."), rf"2 missing: {OF_0}\.gate_up_proj \[6, 2, 8, 24\]"),
    "an expert too much": (
        "one by one",
        lambda t: {**t, **{n.replace("experts.5", "experts.6"): e.clone() for n, e in t.items() if f"{OF_0}.5" in n}},
        rf"2 of another shape: {OF_0}\.gate_up_proj \(made of {OF_0}\.0.* to {OF_0}\.6\..* is \[7, 2, 8, 24\]",
    ),
    "no number": (
        "one by one",
        also(f"{OF_0}.x.up_proj.weight", f"{OF_0}.0.up_proj.weight"),
        rf"{OF_0}\.x\.up_proj\.weight has no number",
    ),
    "one narrower": (
        "one by one",
        cut(rf"{OF_0}\.4\.up", 0, 7),
        rf"1 of another shape: {OF_0}\.4\.up_proj\.weight is \[7, 24\], not \[8, 24\]",
    ),
    "all narrower": (
        "one by one",
        cut(rf"{OF_0}\.\d\.down", 0, 23),
        rf"1 of another shape: {OF_0}\.down_proj \(made of {OF_0}\.0\.down_proj.* to {OF_0}\.5\..* is \[6, 23, 8\]",
    ),
    "other ups than gates": (
        "one by one",
        cut(rf"{OF_0}\.\d\.up", 1, 23),
        rf"The shapes of {OF_0}\.0\.gate_proj\.weight to {OF_0}\.5\.up_proj\.weight, .* do not fit each other",
    ),
    "in both forms": (
        "one by one",
        lambda t: {**t, f"{OF_0}.down_proj": torch.zeros(6, 24, 8)},
        rf"{OF_0}\.down_proj is in it as it is, and as {OF_0}\.0\.down_proj\.weight too",
    ),
    "fused, too few": (
        "fused",
        cut(GATE_UP, 0, 5),
        rf"2 of another shape: {OF_0}\.gate_up_proj .*is \[5, 2, 8, 24\], not \[6, 2, 8, 24\]",
    ),
    "fused, no two halves": (
        "fused",
        cut(GATE_UP, 1, 15),
        rf"2 of another shape: {OF_0}\.gate_up_proj is \[6, 15, 24\], not \[6, 2, 8, 24\]",
    ),
    "multimodal, missing": (
        "multimodal",
        without("layers.1.mlp.experts.down"),
        r"1 missing: model\.language_model\.layers\.1\.mlp\.experts\.down_proj \[6, 24, 8\]",
    ),
    "multimodal, too much": (
        "multimodal",
        also("model.language_model.layers.1.mlp.experts.bias", "model.language_model.layers.1.mlp.gate.weight"),
        r"1 tensors are none of .*: model\.language_model\.layers\.1\.mlp\.experts\.bias$",
    ),
    "multimodal, narrower": (
        "multimodal, transposed",
        cut("layers.1.mlp.experts.down", 1, 7),
        r"down_proj \(made of model\.language_model\.layers\.1\.mlp\.experts\.down_proj\) is \[6, 24, 7\]",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_each_wrong_tensor_is_named(cases, tmp_path, case):
    name, change, message = SPOILED[case]
    path = rewritten(cases[name].path, tmp_path / "spoiled", change)
    adapter = llm_of(path) if "multimodal" in name else halves_of(path)
    with pytest.raises(RecipeError, match=rf"(?s)^k = '{path}': .*{message}"):
        check_weights(adapter, build_empty(adapter), Pretrained(path, "k"))


def test_square_tensors_beside_transposed_ones_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_vlms, "EXPERTS", {**tiny_vlms.EXPERTS, "moe_intermediate_size": 12})  # gate and up: 24
    path = rewritten(tiny_vlms.save("qwen3_vl_moe", tmp_path), tmp_path / "hub", transposed)
    with pytest.raises(RecipeError, match=r"down_proj is transposed, as its shape says; of .*gate_up_proj and 2 more"):
        _ = whole_model(Pretrained(path, "k")).checkpoint_names


def test_what_is_no_rearrangement_is_refused_by_name(tmp_path, monkeypatch):
    from transformers import conversion_mapping
    from transformers.core_model_loading import Interleave

    get_checkpoint_conversion_mapping = conversion_mapping.get_checkpoint_conversion_mapping

    path = tiny_vlms.save("qwen3_vl_moe", tmp_path)
    mapping = get_checkpoint_conversion_mapping("qwen3_vl_moe")
    mapping[0].operations = [Interleave(dim=1)]

    def other(key):
        return mapping if key == "qwen3_vl_moe" else get_checkpoint_conversion_mapping(key)

    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", other)
    with pytest.raises(
        RecipeError, match=r"transformers computes .*experts\.gate_up_proj from .* by Interleave\(dim=1\)"
    ):
        _ = whole_model(Pretrained(path, "k")).checkpoint_names


def test_a_head_that_was_padded_is_taken_as_it_is_only_without_the_padding():
    from transformers.core_model_loading import Inkling2UnpadVocab, WeightConverter

    converter = WeightConverter("lm_head.weight", "lm_head.weight", operations=[Inkling2UnpadVocab()])
    taken = {"lm_head.weight": Taken("lm_head.weight", "lm_head.weight", converter.source_patterns[0])}
    expected = {"lm_head.weight": (8, 4)}
    assert converted(taken, expected, [converter], expected, "k")["lm_head.weight"].is_whole
    with pytest.raises(RecipeError, match=r"k: .* do not fit each other \(Inkling2UnpadVocab of \[\[10, 4\]\]\)"):
        converted(taken, {"lm_head.weight": (10, 4)}, [converter], expected, "k")
