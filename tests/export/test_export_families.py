"""Hugging Face out, for every family in the table of models/split/README.md: no steps give the directory back bit by
bit, and what was trained on a layout computes in transformers what it computed there."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hetmesh.boundary import World
from hetmesh.checkpoint.saved_run import saved_run
from hetmesh.data.loader import Loader
from hetmesh.data.recipe_sources import recipe_source
from hetmesh.export.export import AS_DIRECTORY, DTYPES, export, export_last
from hetmesh.models import pretrained_of
from hetmesh.models.split.encoder_half import HfEncoderAdapter
from hetmesh.models.split.whole_forward import whole_logits
from hetmesh.models.split.whole_model import WholeModel, whole_model
from hetmesh.recipe.recipe import Recipe, parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.pool import WorkerPool
from hetmesh.training.evaluate import evaluate
from hetmesh.training.trainer import Trainer
from hetmesh.verify.self_check import relative
from support import tiny_vlms
from support.split_layouts import CP_PP, DP_TP, FROZEN, FSDP, LAYOUTS, OF_VISION, SP
from support.tiny_exports import tensors

STEPS = 8
SAMPLES = 8
UNEVEN = tiny_vlms.VOCAB + 3
"""Tokens of a vocabulary."""
"""Held-out ones, which make one batch."""

TOLERANCE = 2e-6
"""Of a row of logits, 17 units in the last place of fp32: rounding in another order, of kernels and of sums over ranks,
was measured at 1e-7 to 6e-7. What a wrong section of Qwen3-VL's rotary frequencies changes is 6e-6."""

EP = """
    [parallelism.vision]
    ranks = "0-3"
    data_parallel_shard_degree = 4
    [parallelism.llm]
    ranks = "0-3"
    data_parallel_shard_degree = 4
    expert_parallel_degree = 2
    expert_placement_interval = 3
    [training]
    pack_samples = true"""
ALL = {**LAYOUTS, "EP 2 x FSDP, experts that move": EP}
*_, MOVING = ALL


@dataclass(frozen=True)
class Case:
    """One family: how its directory is stored, and on which layout it is trained.

    Attributes:
        dtype: of the weights in the directory; norms are always in float32.
        tied: whether the head is the token embedding; None: as in `tiny_vlms`.
        hub: names of tensors are those of the hub; else of the model's own parameters.
        vocabulary: number of tokens; two ranks share `UNEVEN` unevenly.
        projector: it is a module of its own.
        largest: file.
    """

    layout: str
    dtype: str = "float32"
    tied: bool | None = None
    hub: bool = True
    vocabulary: int = tiny_vlms.VOCAB
    largest: str = "1GB"
    projector: bool = False


CASES: Mapping[str, Case] = {
    "llava": Case(SP, "bfloat16", tied=True),
    "llava_granite": Case(CP_PP, "float16", tied=True, largest="30KB"),
    "llava_cohere2": Case(FSDP, tied=False, hub=False),
    "llava_onevision": Case(DP_TP, "bfloat16", vocabulary=UNEVEN, largest="20KB"),
    "internvl": Case(FROZEN, tied=False, largest="20KB", projector=True),
    "gemma3": Case(CP_PP, "bfloat16", largest="20KB"),
    "paligemma": Case(DP_TP, hub=False, vocabulary=UNEVEN),
    "idefics3": Case(SP, hub=False),
    "smolvlm": Case(CP_PP, "bfloat16", tied=True, largest="20KB"),
    "mistral3": Case(FSDP, "bfloat16", vocabulary=UNEVEN, largest="20KB"),
    "qwen2_5_vl": Case(CP_PP, tied=True),
    "qwen3_vl": Case(FSDP, "bfloat16", tied=True, hub=False),
    "qwen3_vl_moe": Case(MOVING, "bfloat16", largest="20KB"),
    "qwen3_5": Case(CP_PP, "bfloat16", tied=True, hub=False),
    "qwen3_5_moe": Case(DP_TP, tied=False, largest="20KB"),
    "glm4v": Case(SP, hub=False, vocabulary=UNEVEN, largest="20KB"),
    "qwen2_audio": Case(DP_TP, "float16", hub=False),
    "qwen2_5_omni": Case(FSDP, "bfloat16", tied=True, largest="20KB"),
}
"""By name in `tiny_vlms`: the rows of the table in models/split/README.md."""


def drawn(seed: int) -> tuple[str, Case]:
    """A family, and what it has not among `CASES`."""
    draw = Random(seed)
    name = draw.choice(list(CASES))
    layouts = [*LAYOUTS, *([MOVING] * 3 if name == "qwen3_vl_moe" else [])]
    layout = draw.choice([each for each in layouts if (name, each) != ("llava_cohere2", SP)])  # which is refused
    dtype, vocabulary = draw.choice(["float32", "bfloat16", "float16"]), draw.choice([tiny_vlms.VOCAB, UNEVEN])
    tied = draw.choice([True, False]) and name != "qwen2_audio"  # whose head transformers cannot tie
    return name, Case(layout, dtype, tied, draw.random() < 0.5, vocabulary, draw.choice(["1GB", "20KB"]))


def build(name: str, case: Case) -> Any:
    """The model `name` with random weights."""
    model = tiny_vlms.build(name)
    if case.tied is not None:
        model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = case.tied
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        head.weight = embedding.weight if case.tied else nn.Parameter(torch.randn_like(embedding.weight) * 0.2)
    if case.vocabulary != tiny_vlms.VOCAB:
        model.resize_token_embeddings(case.vocabulary, mean_resizing=False)
    for fqn, parameter in model.to(DTYPES[case.dtype]).named_parameters():
        parameter.data = parameter.data.float() if "norm" in fqn else parameter.data
    return model


def save(name: str, case: Case, folder: Path) -> Path:
    """The directory `folder/name`, with what lies beside weights."""
    path = folder / name
    model = build(name, case)
    model.save_pretrained(path, max_shard_size=case.largest, save_original_format=case.hub)
    tiny_vlms.save_processor(name, model.config, path)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "generation_config.json").write_text('{"eos_token_id": [42, 7], "do_sample": true}')
    if name not in tiny_vlms.PREPARED:
        (path / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.25, 0.125]}')
    return path


def recipe(path: Path, folder: Path, layout: str, more: str = "") -> Recipe:
    """A run of `STEPS` steps, on a layout."""
    tables = ALL[layout].replace("[training]\n", "").replace("pack_samples = true", "")
    towers = tiny_vlms.TOWERS.get(path.name, ("vision",))
    tables = re.sub(OF_VISION, lambda table: "".join(table[0].replace("vision", each) for each in towers), tables)
    frozen = "reference" if layout == FROZEN else "once"
    keys = f"[job]\ndump_folder = '{folder}'\n[checkpoint]\nenable = true\nfrozen = '{frozen}'\n"
    keys += f"last_save_in_hf = {str('lora' not in more).lower()}\n[optimizer]\nlr = 3e-3\n"
    changes = ["--training.steps", str(STEPS), "--training.dtype", "float32"]
    changes += ["--training.pack_samples", str("pack_samples" in ALL[layout]).lower()]
    return parse_recipe(tiny_vlms.recipe_text(path, keys + tables + more), changes)


def held_out(given: Recipe) -> Any:
    """Samples that no step has seen."""
    options = {**given.data.options, "seed": 1, "text_only": 0.2}
    return recipe_source(given.data.model_copy(update={"options": options}))


Logits = dict[tuple[int, int], Tensor]
"""By sample and target."""


def trained(rank: int, given: Recipe) -> tuple[dict[str, Tensor], Logits, float]:
    """The run, with a checkpoint before its first step too.

    Returns:
        What this rank's modules have learned, whole, by FQN in the model; logits and loss of an evaluation.
    """
    trainer = Trainer(resolve(given), World.current(), export=export_last)
    trainer.save()
    trainer.run()
    with trainer.job.expert_placement.in_expert_order(trainer.optimizers):
        held = {name.partition(".")[2]: full(p) for name, p in trainer.job.root.named_parameters()}
    return held, *evaluated(trainer)


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def evaluated(trainer: Trainer) -> tuple[Logits, float]:
    """What `evaluate` sees on this rank: its lane's logits, and the loss of all."""
    job, found = trainer.job, {}
    run = job.runtime.run

    def watched(schedule: Any, plan: Any, feed: Any, observe: Any, **more: Any) -> Any:
        llm = job.graph.llm.name

        def watch(m: int, logits: Tensor, batch: Mapping[str, Tensor]) -> None:
            observe[llm](m, logits, batch)
            if job.vocabulary is not None:
                shares = [None] * len(job.vocabulary.widths)
                dist.all_gather_object(shares, logits, group=job.vocabulary.group)
                logits = torch.cat(shares, -1)
            samples = plan.samples_of(job.graph.llm.name, m, job.llm_lane)
            places = [(i, j) for i in samples for j in range(plan.samples[i].num_targets)]
            index = batch.get("target_index", torch.arange(len(logits))).tolist()
            found.update((places[k], row.clone()) for k, row in zip(index, logits, strict=True))

        return run(schedule, plan, feed, {**observe, llm: watch} if llm in observe else observe, **more)

    with patch.object(job.runtime, "run", watched):
        loss = evaluate(job, held_out(trainer.recipe), SAMPLES).loss
    return found, loss


def by_transformers(model: Any, given: Recipe) -> tuple[Tensor, Tensor]:
    """Logits of all targets of the held-out samples by a model's own forward, and the tokens there."""
    resolved = resolve(given)
    adapters, graph = resolved.adapters, resolved.graph
    encoders = {}
    for b in graph.inputs(graph.llm.name):
        before = [b.source, *(each.source for each in graph.inputs(b.source))]
        if b.at is not None:
            (encoders[b.at],) = (adapters[n] for n in before if isinstance(adapters[n], HfEncoderAdapter))
    loader = Loader(held_out(given), SAMPLES, resolved.expander, shuffle=False)
    drawn = loader.batch(0)
    samples, metas = loader.load(drawn), [each.meta for each in drawn]
    targets = [s.tokens[a:b] for s, meta in zip(samples, metas, strict=True) for a, b in meta.targets]
    whole = whole_of(given)
    logits = [whole_logits(whole, model, encoders, s, m) for s, m in zip(samples, metas, strict=True)]
    return torch.cat(logits), torch.cat(targets)


def whole_of(given: Recipe) -> WholeModel:
    pretrained = pretrained_of(given.llm, given.modules[given.llm])
    assert pretrained is not None
    return whole_model(pretrained)


def loaded(path: Path, **how: Any) -> Any:
    """A directory as transformers loads it by the class that its config.json names; every tensor has a place."""
    import transformers

    (kind,) = json.loads((path / "config.json").read_text())["architectures"]
    model, told = getattr(transformers, kind).from_pretrained(path, output_loading_info=True, **how)
    assert not any(told.values()), told
    return model.eval()


def check_same(before: Path, after: Path) -> None:
    """Tensors bit by bit and of the same types, config.json, and all files beside weights."""
    ours, theirs = tensors(after), tensors(before)
    assert ours.keys() == theirs.keys()
    wrong = [n for n, each in theirs.items() if ours[n].dtype != each.dtype or not torch.equal(ours[n], each)]
    assert not wrong
    beside = [file for file in before.iterdir() if not file.name.startswith("model")]
    assert len(beside) >= 4
    for file in beside:
        same, other = file.read_bytes(), (after / file.name).read_bytes()
        assert json.loads(same) == json.loads(other) if file.name == "config.json" else same == other, file.name


def check_trained(exported: Any, ranks: Any) -> None:
    """What transformers has loaded is what every rank holds, bit by bit, and nothing else."""
    state = exported.state_dict()
    held = {fqn for values, _, _ in ranks for fqn in values}
    assert {fqn for fqn, _ in exported.named_parameters()} <= held <= state.keys()
    for values, _, _ in ranks:
        for fqn, value in values.items():
            assert torch.equal(state[fqn].reshape(value.shape), value), fqn


def check_changed(exported: Any, source: Any, given: Recipe) -> None:
    """Those parameters have changed, and only those, that get a gradient in transformers."""
    nn.functional.cross_entropy(*by_transformers(source, given)).backward()
    whole, state = whole_of(given), exported.state_dict()
    owners = whole.owners_apart if "projector" in given.modules else whole.owners
    declared = dict(whole.model.named_parameters())  # sinusoidal positions are not trained, which loading forgets
    for fqn, p in source.named_parameters():
        learns = declared[fqn].requires_grad and given.modules[owners[fqn]].trainable
        assert torch.equal(state[fqn], p) != (learns and p.grad is not None), fqn


@torch.no_grad()
def check_logits(exported: Any, ranks: Any, given: Recipe) -> None:
    """transformers computes of held-out samples what the layout that trained computes."""
    theirs, targets = by_transformers(exported, given)
    rows = {place: row for _, found, _ in ranks for place, row in found.items()}
    assert relative(torch.stack([rows[place] for place in sorted(rows)]), theirs) < TOLERANCE
    loss = float(nn.functional.cross_entropy(theirs, targets))
    assert [found for _, _, found in ranks] == pytest.approx([loss] * len(ranks), rel=1e-5)


def check(pool4: WorkerPool, folder: Path, name: str, case: Case) -> None:
    path = save(name, case, folder)
    given = recipe(path, folder / "run", case.layout, "[modules.projector]\n" * case.projector)
    ranks = pool4.run(trained, given, timeout=200)

    export(saved_run(folder / "run", 0), folder / "same", dtype=AS_DIRECTORY, largest=30_000)
    check_same(path, folder / "same")
    out = folder / "run" / "checkpoint" / f"step-{STEPS}-hf"
    assert tensors(out).keys() == tensors(path).keys()
    exported = loaded(out)
    check_trained(exported, ranks)
    check_changed(exported, loaded(path, dtype=torch.float32), given)
    check_logits(exported, ranks, given)


QUICK: tuple[str, ...] = ()


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.exhaustive) for n in CASES])
def test_every_family_goes_in_and_out_and_computes_in_transformers_what_it_computed_here(pool4, tmp_path, name):
    check(pool4, tmp_path, name, CASES[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(24))
def test_drawn_families_layouts_and_forms_of_directories(pool4, tmp_path, seed):
    check(pool4, tmp_path, *drawn(seed))


def test_these_are_the_families_of_the_table(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    assert importlib.import_module("family_table").FAMILIES.keys() == CASES.keys()


ADAPTED = """
[modules.llm.lora]
rank = 2
alpha = 3
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_adapters_of_every_family_are_merged_or_loaded_by_peft(pool4, tmp_path, name):
    from peft import PeftModel

    path, layout = save(name, CASES[name], tmp_path), (DP_TP, CP_PP, FSDP)[list(CASES).index(name) % 3]
    more = [f"[modules.{each}.lora]\nrank = 3\nalpha = 5.5\n" for each in tiny_vlms.TOWERS.get(name, ("vision",))]
    given = recipe(path, tmp_path / "run", layout, ADAPTED + "".join(more))
    ranks = pool4.run(trained, given, timeout=200)
    run = saved_run(tmp_path / "run")
    export(run, tmp_path / "merged")
    export(run, tmp_path / "apart", merge=False)
    base, plain = loaded(tmp_path / "apart"), loaded(path, dtype=torch.float32).state_dict()
    assert all(torch.equal(value, plain[fqn]) for fqn, value in base.state_dict().items())
    adapters = tmp_path / "apart" / "adapter"
    adapted = PeftModel.from_pretrained(base, adapters)
    loads = {fqn for fqn in adapted.state_dict() if ".lora_" in fqn}
    assert {fqn.replace(".default.", ".") for fqn in loads} == tensors(adapters).keys()
    check_logits(adapted.base_model.model.eval(), ranks, given)
    check_logits(loaded(tmp_path / "merged"), ranks, given)
