"""What the planner's predictor says of a published run.

Constants are those of the machine's file and of `bench.py planner`, and a few more here; none knows a published step.
The layout is the nearest that `hetmesh` has:

- `dp` is FSDP that gathers once per step (`zero1`, Megatron's distributed optimizer) or in every microbatch (`fsdp2`);
- whole experts lie on `ep` consecutive ranks of a stage, whatever these are to the other layers, and each rank routes
  its share of the tokens (`etp` 1, as Megatron-Core folds it), or tensor-parallel ranks have shares of each expert
  (`etp` = `tp`): so for seconds and activations. What ranks hold is that of experts over those of `ep` ranks that are
  along `dp`, with shares by tensor parallelism besides, and copies along `cp`;
- stages are cut by work, run 1F1B, and take turns where `vpp` says so;
- packed samples that context-parallel ranks share are exchanged as Transformer Engine does it (`_Exchange`);
- what lies between products is fused, so memory is that of compiled blocks; but the host launches kernels one by one,
  so seconds are those of blocks that are not compiled.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch

from benchmarks.cards.llm_sizes import frozen, llm_sizes, name_key, with_adapters
from benchmarks.cards.published_runs import PARTS, PublishedRun
from benchmarks.planner.architectures import ENCODERS, Encoder
from benchmarks.planner.row_predictions import IMAGE, OPTIONS, fullest
from hetmesh.cost import LayerOptions, LayerShape, Machine, ModuleShape, WeightShape, load_machine
from hetmesh.errors import HetmeshError
from hetmesh.graph import Activation, BoundarySpec, MediaItem, MetaArrays, ModuleGraph, ModuleSpec, SampleMeta
from hetmesh.layout import MeshSpec
from hetmesh.planner import LayoutPlan, ModuleFacts, ModulePlan, Predictor, Problem
from hetmesh.simulate import LayerCosts, RankMemory

IMAGE_SHARE = 0.5
"""Of the tokens of a VLM's sequence, how many are of images: tables do not say. Half, as nothing favours a side."""
ENCODER = ENCODERS[0]
"""A VLM's: SigLIP-so400m, which most open ones of these years have, or one of its size."""
FEWEST_EXPERTS = 4
"""A generator with fewer times the parameters that a token goes through is a mixture of transformers, with sets of all
weights of the LLM; with more it is one of experts."""
SAMPLE_TOKENS = 2_914_250_826 // 939_343 // 4
"""Tokens of a sample that is packed with others: tables do not say. Of the Tulu 3 SFT mixture, by its bytes and samples
(dataset card of allenai/tulu-3-sft-mixture) and four bytes per token."""
RING_ATTENTION = (name_key("Qwen3-30B-A3B"),)
"""Models whose packed samples ran with ring attention: `cp_comm_type=p2p` in the command of their verification card.
Latent attention has no other way."""
UTILIZATION = 0.4
"""Of the peak, by a predictor that knows nothing else: 38 to 43% are published for Llama 3 on H100 (arXiv 2407.21783,
table 4)."""


@dataclass(frozen=True)
class PredictedRun:
    """One run.

    Attributes:
        step_s: seconds of a step.
        memory: of the rank that holds most, at its fullest.
        trivial_s: 6 FLOPs per active parameter and token over `UTILIZATION` of the peak.
        said: what was assumed of the model, its layout and its data.
    """

    step_s: float
    memory: RankMemory
    trivial_s: float
    said: tuple[str, ...]


def predict_run(run: PublishedRun) -> PredictedRun:
    """Raises HetmeshError: it cannot be laid out or run so."""
    machine, shapes, said = load_machine(run.machine), *_shapes(run)
    experts = ExpertRanks.of(run, shapes["llm"])
    said += experts.said
    exchange = _Exchange.of(run, shapes["llm"], machine)
    said += exchange.said
    layers = RunLayers(machine, experts, exchange)
    fused, eager = (Predictor(_problem(run, machine, shapes, way), layers=layers) for way in ("inductor", None))
    for recompute in ("none", "full") if run.recompute == "unknown" else (run.recompute,):
        plan = _plan(run, recompute, experts.held)
        memory = fullest(fused, plan)
        if memory.total <= machine.memory_bytes:
            break
    if run.recompute == "unknown":
        said.append(f"recompute: {recompute}, as nothing is said and without it " + _fits(recompute))
    peak = machine.peak(run.dtype)
    assert peak is not None
    flops = 6 * run.active * 1e9 * run.tokens * run.global_batch
    trivial = flops / (UTILIZATION * peak * run.gpus)
    return PredictedRun(eager.predict(plan).step_s, memory, trivial, tuple(said))


def _fits(recompute: str) -> str:
    return "it fits" if recompute == "none" else "it does not fit"


def _shapes(run: PublishedRun) -> tuple[dict[str, ModuleShape], list[str]]:
    parts, said = PARTS[run.kind], []
    total, active = run.total, run.active
    encoder = ENCODER
    if "vision" in parts:
        encoder = _encoder(total)
        share = encoder.shape().parameters / 1e9
        total, active = total - share, active - share
        said.append(
            f"an encoder like {encoder.like}, {share:.2g}B; {IMAGE_SHARE:.0%} of the tokens are of images of {IMAGE}"
        )
    copies = round(total / active) if run.kind == "generation" else 1
    if not 1 < copies < FEWEST_EXPERTS:
        copies = 1
    sizes, of_model = llm_sizes(run.model, total / copies, active, max(run.ep, 1))
    said += [of_model] if of_model else []
    if run.kind == "generation":
        sizes = replace(sizes, copies=copies)
        said.append(f"the LLM alone, with {copies} sets of weights: encoders and autoencoders are left out")
    shapes = {"llm": sizes.shape(run.tokens)}
    if "vision" in parts:
        shapes = {"vision": encoder.shape(), "projector": _projector(encoder.width, sizes.width), **shapes}
    for name, shape in shapes.items():
        if name not in run.trained:
            shapes[name] = with_adapters(shape) if name == "llm" and run.lora else frozen(shape)
    return shapes, said


def _encoder(total: float) -> Encoder:
    """With fewer layers where it would be more than a tenth of the model."""
    share = min(0.1 * total / ENCODER.size, 1.0)
    return replace(ENCODER, layers=max(round(ENCODER.layers * share), 1))


def _projector(inputs: int, outputs: int) -> ModuleShape:
    sizes = {"linear_1": (outputs, inputs), "linear_2": (outputs, outputs)}
    layers = (LayerShape(k, (WeightShape(f"{k}.weight", size, 1, tp_dim=0),)) for k, size in sizes.items())
    return ModuleShape("projector", tuple(layers))


@dataclass(frozen=True)
class ExpertRanks:
    """Where the experts of a run lie.

    Attributes:
        held: ranks along `dp` that hold different ones.
        group: those that exchange tokens.
        whole: whether each has whole experts, where tensor-parallel ranks route different tokens.
        said: what was assumed.
    """

    held: int = 1
    group: tuple[int, ...] = ()
    whole: bool = False
    said: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: PublishedRun, llm: ModuleShape) -> ExpertRanks:
        """Raises HetmeshError: the ranks of a stage cannot share the experts so."""
        stacks = [w for layer in llm.layers for w in layer.expert_weights]
        if not stacks:
            return cls(said=("ep: the model has no experts",) if run.ep > 1 else ())
        count, chosen, ranks = stacks[0].shape[0], stacks[0].per_row, run.tp * run.cp * run.dp
        said = []
        ep = run.ep
        if not ep:  # with DeepEP and the like over all replicas that can share them
            ep = math.gcd(run.dp, count)
            said.append(f"ep is empty: experts over {ep} ranks")
        etp = run.etp or (run.tp if ranks % (ep * run.tp) == 0 else 1)  # Megatron-Core's default is tp
        if ranks % (ep * etp) or count % ep:
            raise HetmeshError(f"column ep: {count} experts on EP {ep} x ETP {etp} of the {ranks} ranks of a stage")
        whole = etp == 1 < run.tp and chosen % run.tp == 0
        if etp != run.tp and not whole:
            said.append(f"etp {etp}: tensor-parallel ranks share each expert")
        held = math.gcd(ep, run.dp)
        if ep > held * run.tp:
            said.append("memory: ranks along cp are taken to hold copies of experts")
        return cls(held, tuple(range(0, ep * etp, etp)) if ep > 1 else (), whole, tuple(said))


@dataclass(frozen=True)
class _Exchange:
    """Seconds by layer and microbatch in which the host prepares an exchange of packed samples between context-parallel
    ranks, and its accelerator waits.

    Commands and recipes of Megatron-Bridge let these ranks exchange heads for tokens around attention
    (`cp_comm_type=a2a`), as windows and sinks of attention require. For that Transformer Engine up to 2.17 brings
    tensors into another order by ranges of indices, `2 * cp` per sample, whose ends are computed on the accelerator and
    read back (`reorder_seq_chunks_after_a2a_before_attn_thd` and its inverse in `context_parallel.py`). AutoModel
    replaces both functions for that reason (`te_patches.py`). Each operation and each end takes `operation_overhead`.
    """

    forward: float = 0.0
    backward: float = 0.0
    said: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: PublishedRun, llm: ModuleShape, machine: Machine) -> _Exchange:
        if not run.packed or run.cp == 1:
            return cls()
        if name_key(run.model) in RING_ATTENTION or not any(layer.key_heads for layer in llm.layers):
            return cls(said=("packed samples: ring attention, counted as of one sample",))
        samples = run.micro_batch * max(run.tokens // SAMPLE_TOKENS, 1)
        before, after = (2 * run.cp * samples * machine.operation_overhead * each for each in _REORDERED)
        # queries, keys and values before attention, its output after it; of gradients the other way round
        return cls(3 * before + after, before + 3 * after, (f"{samples} packed samples of {SAMPLE_TOKENS} tokens",))


_REORDERED = (8 + 1 + 2, 4 + 1 + 2)
"""Before and after attention, of a range: operations that compute its ends, that which makes it, ends read back."""


class RunLayers(LayerCosts):
    """Costs of layers with experts, and with packed samples on context-parallel ranks, where a run has them."""

    def __init__(self, machine: Machine, experts: ExpertRanks, exchange: _Exchange) -> None:
        super().__init__(machine)
        self.experts, self.exchange = experts, exchange

    def of(self, layer: LayerShape, how: LayerOptions) -> np.ndarray:
        """As of any layer, and what exchanging packed samples takes, by microbatch."""
        found = self._of(layer, how)
        if layer.key_heads:
            found = found.copy()
            found[0, :4] += self._exchanged(how)
        return found

    def launches(self, layer: LayerShape, how: LayerOptions) -> np.ndarray:
        """Launches wait for what is read back, too."""
        forward, inputs, _, again = self._exchanged(how) * bool(layer.key_heads)
        return super().launches(layer, how) + np.array([forward, inputs + again, 0.0])

    def _exchanged(self, how: LayerOptions) -> np.ndarray:
        """Forward, backward for the input, for the parameters, and what of it is computed again."""
        return np.array([self.exchange.forward, self.exchange.backward, 0.0, self.exchange.forward * how.recompute])

    def _of(self, layer: LayerShape, how: LayerOptions) -> np.ndarray:
        if not layer.expert_weights:
            return super().of(layer, how)
        if self.experts.whole:  # a rank's share of the tokens, as choices: there is a row for each of the lane's
            weights = (replace(w, tp_dim=None, per_row=w.per_row // how.tp) if w.expert else w for w in layer.weights)
            layer = replace(layer, weights=tuple(weights))
        return super().of(layer, replace(how, experts=self.experts.group))


def _problem(
    run: PublishedRun, machine: Machine, shapes: dict[str, ModuleShape], compile_backend: str | None
) -> Problem:
    mesh = MeshSpec((0,), ("dp_replicate",), (1,))
    dtype = getattr(torch, run.dtype)
    dtypes = {"compute_dtype": dtype, "reduce_dtype": dtype, "compute_copies": True}
    options = replace(OPTIONS, compile_backend=compile_backend, **dtypes)
    widths = {name: shape.layers[-1].weights[0].shape[0] for name, shape in shapes.items()} | {"llm": 0}
    specs = tuple(
        ModuleSpec(
            name,
            mesh,
            tuple(layer.name for layer in shape.layers),
            media="image" if name == "vision" else None,
            trainable=shape.trainable_parameters > 0,
            features=widths[name],
            options=options,
        )
        for name, shape in shapes.items()
    )
    boundaries = (BoundarySpec("vision", "projector"), BoundarySpec("projector", "llm", "image"))
    graph = ModuleGraph(specs, boundaries if "vision" in shapes else ())
    width = shapes["llm"].layers[0].weights[0].shape[1]
    facts = {
        name: ModuleFacts(
            shape,
            Activation(width, True) if name == "llm" else None,
            context_parallel=name != "projector",
            tokens_per_row=int(name == "vision"),
            sequence_parallel=name != "projector",
            alone=name != "projector",
            frozen_layers=shape.frozen_layers if shape.trainable_parameters else frozenset(),
        )
        for name, shape in shapes.items()
    }
    samples = MetaArrays.of([_sample(run, i) for i in range(run.global_batch)])
    return Problem(graph, facts, machine, run.gpus, samples, run.global_batch)


def _sample(run: PublishedRun, index: int) -> SampleMeta:
    """A full sequence: how long what is packed into it is, tables do not say."""
    media, rows = [], MappingProxyType({})
    if "vision" in PARTS[run.kind]:
        of_images = round(IMAGE_SHARE * run.tokens)
        count = max(round(of_images / IMAGE), 1)
        edges = [of_images * i // count for i in range(count + 1)]
        media = [MediaItem("image", (3, 14, 14 * (b - a)), a, b - a) for a, b in itertools.pairwise(edges) if b > a]
        rows = MappingProxyType({"vision": of_images, "projector": of_images})
    return SampleMeta(f"sample {index}", run.tokens, tuple(media), ((1, run.tokens),), rows)


def _plan(run: PublishedRun, recompute: str, experts: int) -> LayoutPlan:
    """The layout of all modules; an encoder lies on the ranks of the first stage."""
    replicas, shards = (run.dp, 1) if run.gathers == "replicas" else (1, run.dp)
    reshard = "default" if run.gathers == "default" else "never"
    shared = {"reshard": reshard, "sequence_parallel": run.tp > 1, "activation_checkpoint": recompute}
    degrees = run.pp, replicas, shards, run.cp, run.tp
    turns = run.vpp if run.pp > 1 else 1
    llm = ModulePlan((0, run.gpus), degrees, expert_parallel=experts, stages_per_rank=turns, **shared)
    modules = {"llm": llm}
    if "vision" in PARTS[run.kind]:
        modules = {"vision": ModulePlan((0, run.gpus // run.pp), (1, *degrees[1:]), **shared), "llm": llm}
    schedule = "sequential" if run.pp == 1 else "interleaved" if turns > 1 else "1f1b"
    return LayoutPlan("homogeneous", modules, schedule, run.micro_batch)
