"""Directories with experts in and out of ranks that hold different ones: read in parts, and written as transformers has
them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hetmesh.boundary import World
from hetmesh.checkpoint.saved_run import saved_run
from hetmesh.data.loader import Loader
from hetmesh.errors import RecipeError
from hetmesh.export.export import export, export_last
from hetmesh.models import pretrained_of
from hetmesh.models.split.whole_forward import load_whole, whole_logits
from hetmesh.models.split.whole_model import whole_model
from hetmesh.recipe.recipe import Recipe, parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.parity import compare, reference, run_as
from hetmesh.training.evaluate import evaluate
from hetmesh.training.trainer import Trainer
from support import tiny_vlms
from support.tiny_exports import KEPT, beside_a_tower, equal, logits, save_moe, tensors, transposed
from support.whole_reference import whole_reference

EP_TP = "data_parallel_replicate_degree = 2\ntensor_parallel_degree = 2\nexpert_parallel_degree = 2"
EP_FSDP = "data_parallel_shard_degree = 4\nexpert_parallel_degree = 2"
EP = "data_parallel_replicate_degree = 2\nexpert_parallel_degree = 2"
HELD = {
    EP: [{0, 1, 2}, {3, 4, 5}],
    EP_TP: [{0, 1, 2}, {0, 1, 2}, {3, 4, 5}, {3, 4, 5}],
    EP_FSDP: [{0, 1}, {3, 4}, {2}, {5}],
}
"""By rank, the experts of six of which it holds something; `ep` lies within the axis that it is taken out of."""


def multimodal(path: Path, folder: Path, llm: str, more: str = "", *changes: str, vision: str = "0-1") -> Recipe:
    """A recipe of a Qwen3-VL-MoE whose LLM has the layout `llm`."""
    ranks = "0-1" if llm == EP else "0-3"
    tables = f'[parallelism.vision]\nranks = "{vision}"\n[parallelism.llm]\nranks = "{ranks}"\n{llm}\n{more}'
    text = tiny_vlms.recipe_text(path, KEPT.format(steps=2, folder=folder, more=tables))
    return parse_recipe(text, ("--training.pack_samples", "true", "--checkpoint.enable", "true", *changes))


class CountedReads:
    """Stands for an open file of safetensors: counts the elements that are read of each tensor."""

    def __init__(self, file: Any, counts: Counter[str]) -> None:
        self.file, self.counts = file, counts

    def __enter__(self) -> CountedReads:
        self.file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self.file.__exit__(*error)

    def keys(self) -> Any:
        return self.file.keys()

    def get_slice(self, name: str) -> Any:
        counts, found = self.counts, self.file.get_slice(name)

        class Slice:
            def __getattr__(self, key: str) -> Any:
                return getattr(found, key)

            def __getitem__(self, index: Any) -> Any:
                value = found[index]
                counts[name] += value.numel()
                return value

        return Slice()


def load_and_save(rank: int, given: Recipe, kind: Any) -> tuple[Counter[str], int, list[str]]:
    """Load, and keep that as a checkpoint.

    Returns:
        Elements read by stored tensor; elements of experts that the rank holds; what is not as transformers loads it.
    """
    counts, opened = Counter[str](), safetensors.safe_open
    with patch.object(safetensors, "safe_open", lambda file, *how: CountedReads(opened(file, *how), counts)):
        trainer = Trainer(resolve(given), World.current(), export=export_last)
    trainer.reporter.close()
    theirs = kind.from_pretrained(given.modules["llm"].initial_load_path).state_dict()
    held, wrong = 0, []
    for name, parameter in trainer.job.parallel["llm"].module.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if not torch.equal(full.reshape(theirs[name].shape), theirs[name]):
            wrong.append(name)
        if ".experts." in name:
            assert isinstance(parameter, DTensor)
            held += parameter.to_local().numel()
    trainer.save()
    trainer.upcoming.close()
    return counts, held, wrong


def check_reads(ranks: Any, layout: str) -> None:
    """Each rank has read its own experts, and nothing of any other."""
    for (counts, held, wrong), experts in zip(ranks, HELD[layout], strict=True):
        assert not wrong
        read = {name: count for name, count in counts.items() if ".experts." in name}
        assert sum(read.values()) == held
        numbers = {int(found[1]) for name in read if (found := re.search(r"experts\.(\d+)\.", name))}
        assert numbers in (experts, set())


def trained(rank: int, given: Recipe) -> float:
    """The run and its checkpoint; the loss of an evaluation on the first eight samples behind it."""
    trainer = Trainer(resolve(given), World.current(), export=export_last)
    trainer.reporter.close()
    for _ in range(given.training.steps):
        trainer.train_step()
    trainer.save()
    trainer.upcoming.close()
    return evaluate(trainer.job, trainer.job.loader.source, 8).loss


def first_eight(given: Recipe) -> tuple[Any, Any, Any]:
    """Adapters, samples and their metadata."""
    resolved = resolve(given)
    loader = Loader(resolved.source, 8, resolved.expander, shuffle=False)
    drawn = loader.batch(0)
    return resolved.adapters, loader.load(drawn), [each.meta for each in drawn]


def loss_of(found: torch.Tensor, samples: Any, metas: Any) -> float:
    """Cross-entropy per target of the logits of all targets."""
    targets = torch.cat([s.tokens[a:b] for s, meta in zip(samples, metas, strict=True) for a, b in meta.targets])
    return float(nn.functional.cross_entropy(found, targets))


slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive


@slow
@pytest.mark.parametrize(
    ("how", "layout"),
    [
        ({}, EP_TP),
        pytest.param({"save_original_format": False}, EP_FSDP, marks=exhaustive),
        pytest.param({}, EP, marks=exhaustive),
        pytest.param({}, EP_FSDP, marks=exhaustive),
        pytest.param({"save_original_format": False}, EP_TP, marks=exhaustive),
    ],
    ids=[
        "one by one, EP and TP",
        "fused, EP and FSDP",
        "one by one, EP",
        "one by one, EP and FSDP",
        "fused, EP and TP",
    ],
)
def test_an_llm_is_read_in_parts_and_written_as_transformers_saves_it(pool, tmp_path, how, layout):
    from transformers import Qwen3MoeForCausalLM

    path, world = save_moe(tmp_path / "moe", **how), len(HELD[layout])
    given = beside_a_tower(path, tmp_path / "run", f"0-{world - 1}", layout)
    check_reads(pool(world).run(load_and_save, given, Qwen3MoeForCausalLM, timeout=120), layout)
    export(saved_run(tmp_path / "run"), tmp_path / "out", largest=20_000)
    plain = save_moe(tmp_path / "plain")
    assert len([name for name in tensors(plain) if ".experts." in name]) == 3 * 3 * 6
    assert equal(plain, tmp_path / "out" / "llm")
    exported, told = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out" / "llm", output_loading_info=True)
    assert not any(told.values())
    assert torch.equal(logits(exported), logits(Qwen3MoeForCausalLM.from_pretrained(path)))


@slow
@pytest.mark.parametrize(
    ("form", "layout"),
    [
        ("of the hub", EP_TP),
        pytest.param("of save_pretrained", EP_FSDP, marks=exhaustive),
        pytest.param("of the hub", EP_FSDP, marks=exhaustive),
    ],
)
def test_a_multimodal_directory_is_read_in_parts_and_comes_back(pool4, tmp_path, form, layout):
    path = tiny_vlms.save("qwen3_vl_moe", tmp_path)
    if form == "of the hub":
        transposed(path)
    given = multimodal(path, tmp_path / "run", layout, "", "--training.dtype", "float32")
    kind = type(tiny_vlms.build("qwen3_vl_moe"))
    check_reads(pool4.run(load_and_save, given, kind, timeout=120), layout)
    export(saved_run(tmp_path / "run"), tmp_path / "out", largest=40_000)
    assert equal(path, tmp_path / "out")


@pytest.mark.exhaustive  # test_export.py has it of other LLMs
@slow
def test_an_llm_that_was_trained_evaluates_in_transformers_as_here(pool4, tmp_path):
    from transformers import Qwen3MoeForCausalLM

    path = save_moe(tmp_path / "moe")
    given = beside_a_tower(path, tmp_path / "run", "0-3", EP_TP, "--checkpoint.last_save_in_hf", "true")
    losses = pool4.run(trained, given, timeout=120)
    export(saved_run(tmp_path / "run"), tmp_path / "out")
    model = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out" / "llm")
    _, samples, metas = first_eight(given)
    with torch.no_grad():
        each = [model(input_ids=sample.tokens[None]).logits[0] for sample in samples]
    found = torch.cat([own[a - 1 : b - 1] for own, meta in zip(each, metas, strict=True) for a, b in meta.targets])
    assert losses == pytest.approx([loss_of(found, samples, metas)] * 4, rel=1e-5)
    before, after = tensors(path), tensors(tmp_path / "out" / "llm")
    moved = [name for name in before if ".experts." in name and not torch.equal(before[name], after[name])]
    assert len(moved) > 40


@exhaustive  # test_export_families.py has it, of the other form
def test_a_multimodal_model_that_was_trained_evaluates_in_transformers_as_here(pool4, tmp_path):
    path = transposed(tiny_vlms.save("qwen3_vl_moe", tmp_path))
    given = multimodal(path, tmp_path / "run", EP_FSDP, "", "--training.dtype", "float32")
    losses = pool4.run(trained, given, timeout=120)
    (tmp_path / "out").mkdir()
    export(saved_run(tmp_path / "run"), tmp_path / "out" / path.name)
    there = multimodal(tmp_path / "out" / path.name, tmp_path / "other", EP)
    whole = whole_model(pretrained_of("llm", there.modules["llm"]))
    adapters, samples, metas = first_eight(there)
    with torch.no_grad():
        model, encoders = load_whole(whole), {"image": adapters["vision"]}
        found = torch.cat([whole_logits(whole, model, encoders, *pair) for pair in zip(samples, metas, strict=True)])
    assert losses == pytest.approx([loss_of(found, samples, metas)] * 4, rel=1e-5)
    assert not torch.equal(*(tensors(each)["lm_head.weight"] for each in (path, tmp_path / "out" / path.name)))


PP = """
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "1f1b"
pipeline_parallel_microbatch_size = 2
"""


@slow
@pytest.mark.parametrize(
    ("layout", "vision"),
    [
        (EP_TP, "0-3"),
        pytest.param(EP_FSDP, "0-1", marks=exhaustive),
        pytest.param(EP, "2-3", marks=exhaustive),
        pytest.param(EP_TP + "\nenable_sequence_parallel = true", "0-1", marks=exhaustive),
        pytest.param(EP_TP.replace("tensor", "context"), "0-1", marks=exhaustive),
        pytest.param(EP + PP, "0-1", marks=exhaustive),
    ],
    ids=["EP and TP", "EP and FSDP", "EP, disjoint", "EP and SP", "EP and CP", "EP and PP"],
)
def test_a_multimodal_model_trains_as_transformers_does(pool4, tmp_path, layout, vision):
    path = transposed(tiny_vlms.save("qwen3_vl_moe", tmp_path))
    given = multimodal(path, tmp_path / "run", layout, vision=vision)
    compare(whole_reference(given, 2), pool4.run(run_as, given, 2, None, None, timeout=120), 1e-10)


BALANCED = "[modules.llm.config]\nrouter_aux_loss_coef = 0.5"


@pytest.mark.exhaustive  # test_a_multimodal_model_trains_as_transformers_does
@slow
@pytest.mark.parametrize(
    "more",
    [
        BALANCED,
        pytest.param("[modules.llm.lora]\nrank = 2", marks=exhaustive),
        pytest.param("[modules.llm]\ntrainable = false", marks=exhaustive),
    ],
    ids=["load-balancing loss", "LoRA", "frozen"],
)
def test_a_multimodal_model_trains_as_one_process_does(pool4, tmp_path, more):
    given = multimodal(tiny_vlms.save("qwen3_vl_moe", tmp_path), tmp_path / "run", EP, more, vision="2-3")
    compare(reference(given, 2), pool4.run(run_as, given, 2, None, None, timeout=120), 1e-10)


@exhaustive
@slow
def test_adapters_beside_experts_leave_the_experts_as_they_were(pool4, tmp_path):
    path = transposed(tiny_vlms.save("qwen3_vl_moe", tmp_path))
    given = multimodal(path, tmp_path / "run", EP_TP, "[modules.llm.lora]\nrank = 2", "--training.dtype", "float32")
    pool4.run(trained, given, timeout=120)
    export(saved_run(tmp_path / "run"), tmp_path / "merged")
    export(saved_run(tmp_path / "run"), tmp_path / "apart", merge=False)
    before, merged = tensors(path), tensors(tmp_path / "merged")
    changed = {name for name in before if "visual" not in name and not torch.equal(before[name], merged[name])}
    assert len(changed) == 3 * 4
    assert all("self_attn" in name for name in changed)
    assert all(torch.equal(e, before[n]) for n, e in tensors(tmp_path / "apart").items() if "visual" not in n)
    adapters = tensors(tmp_path / "apart" / "adapter")
    assert len(adapters) == 2 * 3 * 4
    assert not [name for name in adapters if "mlp" in name]


@pytest.mark.parametrize(
    ("more", "changes", "says"),
    [
        ("", ("--training.pack_samples", "false"), r"has no experts \(its samples are padded; .*pack_samples = true"),
        (BALANCED, ("--training.pack_samples", "false"), r"get no padding.* training.pack_samples = true"),
        (BALANCED.replace("0.5", "-1"), (), r"router_aux_loss_coef = -1: must be 0 or more"),
        ("[modules.llm.config]\nnum_experts = 8", (), r"config.num_experts: unknown key"),
        ("[modules.llm.lora]\nrank = 2\ntarget_modules = ['gate_up_proj']", (), r"no linear layer is called"),
        (
            "",
            (
                "--parallelism.llm.data_parallel_replicate_degree",
                "4",
                "--parallelism.llm.ranks",
                "0-3",
                "--parallelism.llm.expert_parallel_degree",
                "4",
            ),
            r"must divide num_experts = 6 .*\[1, 2, 3, 6\] do",
        ),
    ],
)
def test_what_a_multimodal_directory_cannot_do_is_refused(tmp_path, more, changes, says):
    path = tiny_vlms.save("qwen3_vl_moe", tmp_path)
    with pytest.raises(RecipeError, match=says):
        resolve(multimodal(path, tmp_path / "run", EP, more, *changes))


@pytest.mark.parametrize(("key", "value"), [("num_experts", 8), ("head_dim", 4), ("moe_intermediate_size", 24)])
def test_sizes_of_a_directory_cannot_be_others(tmp_path, key, value):
    path = save_moe(tmp_path / "moe")
    with pytest.raises(RecipeError, match=rf"modules\.llm\.config\.{key} = {value}, but .* says .* in its config.json"):
        resolve(beside_a_tower(path, tmp_path / "run", "0", f"[modules.llm.config]\n{key} = {value}"))


def test_the_balance_of_a_directory_is_that_of_transformers(tmp_path):
    path = save_moe(tmp_path / "moe")
    file = path / "config.json"
    more = "[modules.llm.config]\nrouter_aux_loss_coef = 0.25"

    def balance(table):
        return resolve(beside_a_tower(path, tmp_path / "run", "0", table)).adapters["llm"].abilities.experts.balance

    assert (balance(""), balance(more)) == (0.0, 0.25)
    file.write_text(file.read_text().replace('"output_router_logits": false', '"output_router_logits": true'))
    assert (balance(""), balance(more)) == (0.001, 0.25)
