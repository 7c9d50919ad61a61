"""The tables of a recipe and their keys, with types and defaults: one frozen class per table, one line per key.

Names and meanings are torchtitan's wherever it has them; `torchtitan_keys.py` says which others are taken.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from hetmesh.recipe.section import FrozenDict, freeze, schedule_name, schedule_spelling, thawed
from hetmesh.recipe.section import NamesCode as NamesCode
from hetmesh.recipe.section import Section as Section
from hetmesh.recipe.values import (
    optimizer_arguments,
    optimizer_name,
    parse_ranks,
    parse_trainable,
    regular_expression,
    within,
)

FrozenTable = Annotated[Mapping[str, Any], AfterValidator(freeze)]
"""A free table: its keys are checked by whoever it configures."""

Ranks = Annotated[tuple[int, ...] | None, BeforeValidator(parse_ranks)]
Trainable = Annotated[bool | tuple[str, ...], BeforeValidator(parse_trainable)]
Pattern = Annotated[str, AfterValidator(regular_expression)]
OptimizerName = Annotated[str, AfterValidator(optimizer_name)]

Size = Annotated[int, Field(ge=1)]
Shares = Annotated[tuple[Size, ...], Field(min_length=1)]
AutomaticSize = Annotated[Size | None, BeforeValidator(lambda v: None if v == -1 else v)]
"""A size that hetmesh works out where it is absent or -1, torchtitan's sign for that."""

Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
TensorParallelStyle = Literal["colwise", "rowwise", "colwise_gather_output", "replicated_with_grad_allreduce"]
CheckpointMode = Literal["none", "selective", "full"]
ComputeDtype = Literal["float32", "bfloat16"]


def name_in(room: str, registry: str, spelling: Callable[[str], str] = str) -> AfterValidator:
    """A validator of values that are names in a registry of another room; imported where such a key is read, for a
    mistyped recipe should not wait for torch. `spelling` is how recipes write a name."""

    def check(value: str) -> str:
        if value not in (known := getattr(importlib.import_module(room), registry)):
            names = sorted(map(spelling, known))
            raise ValueError(f"should be {', '.join(map(repr, names[:-1]))} or {names[-1]!r}")
        return value

    return AfterValidator(check)


TokenAssignment = Annotated[str, name_in("hetmesh.context", "POLICIES")]
AttentionMask = Annotated[str, name_in("hetmesh.context.masks", "MASKS")]
SchedulePolicy = Annotated[
    str, BeforeValidator(schedule_name), name_in("hetmesh.schedule", "POLICIES", schedule_spelling)
]
InnerSchedule = Annotated[Literal["1f1b", "interleaved", "zero_bubble"], BeforeValidator(schedule_name)]
BalancePolicy = Annotated[str, name_in("hetmesh.balance", "POLICIES")]


class JobKeys(Section):
    """`[job]`: what the run is and where its results go."""

    dump_folder: str = "./outputs"
    description: str = ""
    print_config: bool = False  # print the recipe with all defaults before the run


class ModelKeys(Section):
    """`[model]`: a whole model, in place of `[modules]` and `[[boundaries]]`."""

    hf_path: Annotated[str, Field(min_length=1)] | None = None  # a Hugging Face directory (recipe/hf_path.py)


class LoRA(Section):
    """`[modules.<name>.lora]`: low-rank adapters (peft), the only trainable parameters of the module.

    `target_modules` are names of linear layers (the last part of their FQN); absent: every linear layer of every block.
    """

    rank: Size = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0  # the adapter's output is scaled by alpha / rank
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: tuple[str, ...] | None = None


class Loss(NamesCode):
    """`[modules.<name>.loss]`: what the module is trained by, besides what modules after it are.

    The loss of a step is the sum over modules of `weight` times the loss summed over the global batch and divided by
    its count of `unit`: target "tokens" of the LLM; or, of the media items that a module after it makes, "latents"
    (rows of their targets), "frames" (their first dims) or "items".
    """

    kind: str  # "cross_entropy", "mse", "flow_matching" or "package.module:function"
    weight: NotNegative = 1.0  # 0: measured, and not trained; its gradient must be finite all the same
    unit: Literal["tokens", "latents", "frames", "items"] | None = None  # None: tokens or latents, as kind says


class Module(NamesCode):
    """`[modules.<name>]`: one module of the model.

    `initial_load_path` is a local directory with config.json and safetensors: the model's sizes and weights come from
    there. `media` is the kind of media an encoder reads; where absent, the one placeholder of its rows. `plan`
    adds to or replaces entries of the adapter's tensor-parallel plan (parameter name pattern -> style). `lr` and
    `weight_decay` override `[optimizer]`, `activation_checkpoint` the mode of its table, `mixed_precision_param`
    `[training]`. `trainable` may be a list of regular expressions that are searched in the names of the module's
    parameters: those that match are trained, or, with a `!` in front, all others. `attention_mask` is what tokens of
    the LLM see of each other (`hetmesh.context.masks.MASKS`).
    """

    model: str  # an adapter's name, or "package.module:Class"
    frozen_config: FrozenTable = Field(default=FrozenDict(), alias="config")
    lr: NotNegative | None = None
    weight_decay: NotNegative | None = None
    initial_load_path: Annotated[str, Field(min_length=1)] | None = None  # a Hugging Face directory; None: random
    trainable: Trainable = True  # false: no gradient, no optimizer state, no backward
    lora: LoRA | None = None
    loss: Loss | None = None  # None: of the LLM cross_entropy, of others none
    activation_checkpoint: CheckpointMode | None = None
    mixed_precision_param: ComputeDtype | None = None
    media: str | None = None
    attention_mask: AttentionMask = "causal"  # of the LLM
    plan: Annotated[Mapping[str, TensorParallelStyle], AfterValidator(freeze)] = FrozenDict()

    config = thawed("frozen_config")  # the model's own keys


class Boundary(Section):
    """One `[[boundaries]]`: rows of module `from` go to module `to`, `at` being the placeholder that they replace; from
    the LLM they are the hidden states of its tokens, after `layer`, or as its head reads them."""

    source: str = Field(alias="from")
    destination: str = Field(alias="to")
    at: str | None = None
    layer: str | None = None  # of the LLM that they come from


class ScheduleKeys(Section):
    """Keys of the whole run's schedule; written in a flat `[parallelism]` or in the LLM module's own table."""

    pipeline_parallel_schedule: SchedulePolicy | None = None  # None: "sequential"
    pipeline_parallel_microbatch_size: Size | None = None  # samples per LLM lane and microbatch; None: local_batch_size
    context_parallel_assignment: TokenAssignment | None = None  # which tokens each rank keeps; None: "balanced"
    three_phase_window: Size | None = None  # microbatches whose encoder forwards come together; None: all of the step
    three_phase_recompute: bool | None = None  # encoders keep inputs only, and compute again before their backward
    three_phase_offload: bool | None = None  # encoders' waiting activations are kept in the memory of the host
    bubble_fill_schedule: InnerSchedule | None = None  # the LLM's own; None: "1F1B"
    bubble_fill_in_flight: Size | None = None  # microbatches that an encoder may hold; None: twice what it must
    bubble_fill_layers_per_slice: Size | None = None  # blocks of an encoder; None: by what they cost
    bubble_fill_in_collectives: bool | None = None  # encoders also run while the LLM waits in its collectives
    interleaved_early_warmup: bool | None = None  # warm up as Megatron-LM does: more in flight, messages better hidden


EXPERT_KEYS = ("expert_parallel_degree", "expert_placement_interval")
"""Layout keys that mean something to modules with experts alone."""


class ModuleParallelism(ScheduleKeys):
    """`[parallelism.<module>]`: which ranks hold the module, and how. The degrees multiply to the number of ranks."""

    ranks: Ranks = None  # None: all ranks
    pipeline_parallel_degree: Size = 1
    data_parallel_replicate_degree: AutomaticSize = None  # None: what the ranks leave
    data_parallel_shard_degree: AutomaticSize = 1  # above 1: FSDP, with replicas HSDP; -1: what the ranks leave
    context_parallel_degree: Size = 1
    tensor_parallel_degree: Size = 1
    expert_parallel_degree: Size = 1  # of the data parallel ranks, how many hold different experts (shards first)
    expert_placement_interval: Count = 0  # steps between two moves of experts to even out ranks; 0: they never move
    pipeline_parallel_layers_per_stage: Size | None = None  # more stages than pipeline ranks take turns on them
    module_fqns_per_model_part: tuple[tuple[str, ...], ...] | None = None  # layers of each stage; None: equal time
    # "never", the default in a pipeline: gather and sum once per step; else in every microbatch
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    enable_sequence_parallel: bool = False  # split activations between attention and MLP over tensor parallel ranks


class Parallelism(ScheduleKeys):
    """`[parallelism]` once read: flat layout keys have been merged into `modules`, the tables of single modules.

    A module without an entry takes its consumer's mesh.
    """

    modules: Annotated[Mapping[str, ModuleParallelism], AfterValidator(freeze)] = FrozenDict()
    experts_of_all: FrozenTable = FrozenDict()  # what flat keys say of experts, which not all modules have


class Mixed(Section):
    """One `[[data.mixture]]`: a source that gives a share of the samples."""

    source: str
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0  # samples from it, against those from the others
    name: str | None = None  # in ids of samples and in metrics; None: that of the source
    frozen_options: FrozenTable = Field(default=FrozenDict(), alias="options")

    options = thawed("frozen_options")  # the source's keyword arguments


class DataPhase(Section):
    """One `[[data.phases]]`: the shares of a mixture's sources from a step on, until the next phase begins."""

    start_step: Count
    weights: Annotated[Mapping[str, NotNegative], AfterValidator(freeze)]  # by source; one that is left out gives none


class Data(NamesCode):
    """`[data]`: where samples come from (one source with its `options`, or `[[data.mixture]]`), and who loads them."""

    source: str = "digits"  # a source's name, or "package.module:Class"
    frozen_options: FrozenTable = Field(default=FrozenDict(), alias="options")
    mixture: tuple[Mixed, ...] = ()
    phases: tuple[DataPhase, ...] = ()  # in place of the weights of a mixture
    # "shuffled", "given" (as the source has them), or in every epoch a curriculum, by rising "tokens" of the LLM or
    # rows of the module that is named: the metadata of all samples are read for it before the run
    order: str = "shuffled"
    num_workers: Count = 0  # processes per rank that load samples ahead of need; 0: the rank itself, when it needs them
    prefetch_factor: Size = 2  # microbatches that each of them has loaded or is loading
    on_bad_sample: Literal["stop", "skip"] = "stop"  # one that cannot be read: end the run, or leave it out, counted
    on_no_target: Literal["count", "stop"] = "count"  # a sample that adds nothing to the loss: name the first, or end

    options = thawed("frozen_options")  # the source's keyword arguments


class Training(Section):
    """`[training]`: batch sizes in samples, lengths in tokens."""

    local_batch_size: Size = 8  # samples per LLM lane and accumulation round
    global_batch_size: AutomaticSize = None  # per optimizer step; None: local x LLM lanes
    seq_len: Size = 2048  # the longest sample allowed, placeholders expanded
    pack_samples: bool = False  # the samples of a lane in one row, without padding; always so with context parallelism
    max_norm: NotNegative = 1.0  # of the gradient over all modules; 0 does not clip
    on_non_finite: Literal["stop", "skip"] = "stop"  # a step whose loss or gradient is not finite: end, or leave it out
    max_consecutive_non_finite: Size = 10  # such steps in a row that "skip" leaves out; one more ends the run
    steps: Size = 10_000
    # of parameters, gradients and optimizer state; bfloat16: parameters, of which the optimizer has fp32 copies
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    mixed_precision_param: ComputeDtype = "float32"  # bfloat16: compute in it, and send rows in it
    mixed_precision_reduce: ComputeDtype = "float32"  # in what FSDP sums gradients; all else is summed in float32
    enable_cpu_offload: bool = False  # the shards of FSDP modules, their gradients and optimizer state


class ActivationCheckpoint(Section):
    """`[activation_checkpoint]`: what the backward of each block computes again instead of keeping it."""

    mode: CheckpointMode = "none"  # computed again: full, the whole block; selective, all but save_ops
    save_ops: Annotated[tuple[str, ...], Field(min_length=1)] | None = None  # names of torch; None: products, attention


class Compile(Section):
    """`[compile]`: torch.compile of every block; without a compiler the run goes on uncompiled, with a warning."""

    enable: bool = False
    components: tuple[Literal["model", "loss"], ...] = ("model",)  # the loss is never compiled
    backend: str = "inductor"


class ParamGroup(Section):
    """One `[[optimizer.param_groups]]`: another optimizer for some parameters; the first table that matches counts."""

    pattern: Pattern  # a regular expression that is searched in names with their module's: "llm.model.norm.weight"
    optimizer_name: OptimizerName  # as `[optimizer] name`
    frozen_kwargs: Annotated[FrozenTable, AfterValidator(optimizer_arguments)] = Field(
        default=FrozenDict(), alias="optimizer_kwargs"
    )

    optimizer_kwargs = thawed("frozen_kwargs")  # these take precedence over `[optimizer]` and its module


class Optimizer(NamesCode):
    """`[optimizer]`: a class of torch.optim, or any other subclass of torch.optim.Optimizer, and its arguments.

    `options` are its further keyword arguments. A class that is named by its module gets `lr`, and `weight_decay` if it
    takes that; beta1, beta2, eps and implementation are of AdamW, Adam and SGD.
    """

    name: OptimizerName = "AdamW"  # "AdamW", "Adam", "SGD" or "package.module:Class"
    lr: NotNegative = 8e-4
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.1
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    frozen_options: FrozenTable = Field(default=FrozenDict(), alias="options")
    param_groups: tuple[ParamGroup, ...] = ()

    options = thawed("frozen_options")  # keyword arguments of the class that it names

    @property
    def names(self) -> tuple[str, ...]:
        """The optimizers of all tables, its own first."""
        return tuple(dict.fromkeys((self.name, *(group.optimizer_name for group in self.param_groups))))


class LRScheduler(Section):
    """`[lr_scheduler]`: linear warm-up, then stable, then decay. One-cycle = warm-up and cosine decay."""

    warmup_steps: Count = 0
    total_steps: Size | None = None  # of the schedule, where the run is to end before it; None: training.steps
    decay_ratio: Fraction | None = None  # share of the steps that decays; None: all after the warm-up
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    min_lr_factor: Fraction = 0.0  # the last step's learning rate over the highest


class Checkpoint(Section):
    """`[checkpoint]`: DCP checkpoints under `dump_folder/folder`; a run that finds one there resumes from it."""

    enable: bool = False
    folder: Annotated[str, AfterValidator(within)] = "checkpoint"  # in dump_folder, of which a run has its own
    interval: Size = 500  # steps
    keep_latest_k: Count = 10  # 0 keeps all
    timeout_seconds: Seconds = 3600.0  # that writing or reading one may take, whatever [comm] says of a step
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"  # async: written beside training
    frozen: Literal["once", "each", "reference"] = "once"  # frozen parameters: in a file that all checkpoints share, in
    # each, or (of modules that are frozen whole and come from a directory) not at all: the directory is named
    last_save_in_hf: bool = False  # also export the last one, to folder/step-N-hf, as `hetmesh export` does
    export_dtype: Literal["float32", "bfloat16", "float16"] | None = None  # of that; None: as trained
    initial_load_path: str = ""  # a run's step folder, whose weights a new run starts from; nothing else is taken
    exclude_from_loading: tuple[str, ...] = ()  # modules (or prefixes of parameter names) that start afresh


class Metrics(Section):
    """`[metrics]`: what is logged besides metrics.jsonl."""

    log_freq: Size = 10  # steps between two updates of the console, TensorBoard and Weights & Biases
    verbose: bool = False  # log lines with FLOPs, imbalance, memory, bytes and waits too; they are always in the files
    enable_tensorboard: bool = False
    enable_wandb: bool = False
    machine: str | None = None  # whose peak MFU refers to: "h100", ... or a TOML file; None: what the device says


class Validation(Section):
    """`[validation]`: evaluation on held-out samples."""

    enable: bool = True  # false: none, whatever the keys below say
    freq: Count = 0  # steps between two evaluations; 0: only after the last step
    samples: Size | None = None  # None: every held-out sample
    free_running: Count = 0  # of them, how many are also answered without the right tokens before each guess
    free_running_tokens: Size = 64  # most tokens of such an answer


class Profiling(Section):
    """`[profiling]`: looking closely at a step."""

    timeline: bool = True  # record a step into dump_folder/timeline.json: takes about 0.5 s once, and changes no loss
    timeline_step: Size = 10  # which one; the last one of a shorter run
    profile: str = ""  # of `hetmesh profile`: measured layers, not FLOPs, for predictions, balance and default cuts


class Comm(Section):
    """`[comm]`: seconds that a rank waits for others before the job ends with an error."""

    init_timeout_seconds: Seconds = 300.0  # up to the end of the first step
    train_timeout_seconds: Seconds = 100.0


class Balance(Section):
    """`[balance]`: which lane and microbatch of each module takes which sample of a global batch.

    Results do not depend on it, but for rounding: losses and gradients are sums over the global batch.
    """

    policy: BalancePolicy = "auto"  # "none": in the order in which samples are drawn
    max_tokens: Annotated[Mapping[str, Size], AfterValidator(freeze)] = FrozenDict()  # by module, in one microbatch
    microbatch_sizes: Annotated[Mapping[str, Size], AfterValidator(freeze)] = FrozenDict()  # of encoders, per lane
    microbatch_shares: Annotated[Mapping[str, Shares], AfterValidator(freeze)] = FrozenDict()  # of encoders' lanes
    microbatches: Literal["recipe", "free"] = "recipe"  # "free": more or fewer of them, where that is faster
    # the LLM may take a sample one microbatch later than the encoders (Entrain); "auto": if that is predicted to pay
    deferral: Literal[True, False, "auto"] = "auto"
    split_deferred_backward: bool = False  # of an encoder, for what is deferred by itself; false: whole, one slot late


class Elastic(Section):
    """`[elastic]`: other layouts of the run, for when the number of its ranks changes (torchrun `--nnodes MIN:MAX`): of
    those with as many ranks as there are, the one that is predicted to be the fastest in memory that there is."""

    layouts: tuple[str, ...] = ()  # recipes beside this one's file, which differ from it in their layout alone
    plan: bool = False  # where none has as many ranks, the planner finds a layout

    def __bool__(self) -> bool:
        return self.plan or bool(self.layouts)


class Debug(Section):
    """`[debug]`: reproducibility."""

    seed: int = 0  # of weights, of the order of samples and of everything random
    deterministic: bool = False
    check_replicas: Count = 0  # steps between comparisons of all replicas of parameters; 0: never
