"""What hetmesh costs: its trainer against a plain PyTorch loop on the same model and data, step by step side by side.

Cases: digits.toml's own sizes and width 512, each in one process and with FSDP2 over two ranks. The plain loop is what
one would write by hand: the same modules, an ordinary collate function, one forward, one backward, torch's own
clipping, fused AdamW; FSDP2 per block with the same sharding. Both take turns, step by step, in the same processes. The
ratio of a round is that of the medians of its steps, `step_time_ratio` the median of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils.rnn import pad_sequence

from hetmesh.boundary import World
from hetmesh.data.loader import Loader
from hetmesh.models import build_module
from hetmesh.recipe.recipe import Recipe, load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.pool import WorkerPool
from hetmesh.training.trainer import Trainer

JUDGES = (
    "src/hetmesh/layout",
    "src/hetmesh/boundary",
    "src/hetmesh/parallel",
    "src/hetmesh/models",
    "src/hetmesh/runtime",
    "src/hetmesh/training/step.py",
    "src/hetmesh/training/trainer.py",
    "src/hetmesh/training/job.py",
    "src/hetmesh/training/feed.py",
    "src/hetmesh/training/gradients.py",
)
"""What an output of it judges (`kept.py`)."""

WARM_UP = 3  # steps
LOOPS = ("hetmesh", "plain")
CPU = torch.device("cpu")
RECIPE = Path(__file__).parents[2] / "recipes" / "digits_single.toml"
WIDE = {
    "modules.vision.config.hidden_size": 512,
    "modules.vision.config.intermediate_size": 1024,
    "modules.llm.config.hidden_size": 512,
    "modules.llm.config.head_dim": 128,
    "modules.llm.config.intermediate_size": 1024,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--rounds", type=int, default=5, help="of each case, in turns (default %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each loop in a round (default %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="samples per step at digits' sizes (default %(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases."""
    cases = []
    for width, overrides, batch in (("digits", {}, args.batch), ("512", WIDE, max(args.batch // 4, 2))):
        for ranks in (1, 2):
            with WorkerPool(ranks) as pool:
                results = pool.run(_measure, _recipe(overrides, batch, ranks), args.rounds, args.steps, timeout=900)
            # A step is over on all ranks together, up to what each does by itself: the slower one counts.
            ours, plain = ([max(each) for each in zip(*(r[name] for r in results), strict=True)] for name in LOOPS)
            ratios = [a / b for a, b in zip(ours, plain, strict=True)]
            cases.append(
                {
                    "width": width,
                    "ranks": ranks,
                    "batch": batch,
                    "hetmesh_ms": round(1e3 * statistics.median(ours), 2),
                    "plain_ms": round(1e3 * statistics.median(plain), 2),
                    "step_time_ratio": round(statistics.median(ratios), 4),
                    "rounds": [round(ratio, 4) for ratio in ratios],
                    "loss_difference": max(r["loss_difference"] for r in results),
                }
            )
    return {
        "max_step_time_ratio": max(c["step_time_ratio"] for c in cases),
        "wide_step_time_ratio": max(c["step_time_ratio"] for c in cases if c["width"] == "512"),
        "cases": cases,
    }


def _recipe(overrides: dict[str, int], batch: int, ranks: int) -> Recipe:
    extra = [f"--{key}={value}" for key, value in overrides.items()]
    extra += ["--training.steps=100000", f"--training.local_batch_size={batch // ranks}"]
    if ranks > 1:
        for module in ("vision", "projector", "llm"):
            extra += [f"--parallelism.{module}.ranks=0-{ranks - 1}"]
            extra += [f"--parallelism.{module}.data_parallel_shard_degree={ranks}"]
    return load_recipe(RECIPE, extra)


def _measure(rank: int, recipe: Recipe, rounds: int, steps: int) -> dict[str, Any]:
    """One rank: warm up, then let both loops take turns. Per loop the median seconds of each round's steps."""
    torch.set_num_threads(1)
    world = World.current()
    with tempfile.TemporaryDirectory() as folder:
        job = recipe.job.model_copy(update={"dump_folder": folder})
        trainer = Trainer(resolve(recipe.model_copy(update={"job": job})), world)
        plain = PlainLoop(recipe, rank, world.size)
        seconds: dict[str, list[float]] = {name: [] for name in LOOPS}
        difference = 0.0
        for step in range(WARM_UP + rounds * steps):
            losses = {}
            for name in LOOPS if step % 2 else LOOPS[::-1]:
                started = time.perf_counter()
                losses[name] = trainer.train_step().loss if name == "hetmesh" else plain.step()
                if step >= WARM_UP:
                    seconds[name].append(time.perf_counter() - started)
            if step < WARM_UP:  # later, rounding has had time to grow
                difference = max(difference, abs(losses["hetmesh"] - losses["plain"]))
        trainer.reporter.close()
    medians = {
        name: [statistics.median(values[i : i + steps]) for i in range(0, rounds * steps, steps)]
        for name, values in seconds.items()
    }
    return {**medians, "loss_difference": difference}


class PlainVLM(nn.Module):
    """Encoder, projector and LLM called one after the other."""

    def __init__(self, vision: nn.Module, projector: nn.Module, llm: nn.Module) -> None:
        super().__init__()
        self.vision, self.projector, self.llm = vision, projector, llm

    def forward(self, images: Tensor, tokens: Tensor, image_token: int, predicting: Tensor) -> Tensor:
        embeddings = self.llm.get_input_embeddings()(tokens)
        if len(images):
            rows = self.projector(self.vision(images).last_hidden_state.flatten(0, 1)).to(embeddings.dtype)
            embeddings = embeddings.masked_scatter((tokens == image_token).unsqueeze(-1), rows)
        hidden = self.llm.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        return self.llm.lm_head(hidden.flatten(0, 1)[predicting])


class PlainLoop:
    """The loop that one would write without hetmesh: DataLoader-style collation, FSDP2 if there are several ranks."""

    def __init__(self, recipe: Recipe, rank: int, ranks: int, device: torch.device = CPU) -> None:
        resolved = resolve(recipe)
        self.source, adapters = resolved.source, resolved.adapters
        full = {name: build_module(adapters[name], name, recipe.debug.seed) for name in recipe.modules}
        self.model = PlainVLM(full["vision"], full["projector"], full["llm"]).to(device)
        shape = next(m.shape for m in (i for n in range(64) for i in self.source.meta(n).media))
        self.image_shape, self.rows_per_image = shape, adapters["vision"].item_rows(shape)
        self.device, self.bf16 = device, recipe.training.mixed_precision_param == "bfloat16"
        if ranks > 1:
            mesh = init_device_mesh("cpu", (ranks,))
            for block in (*self.model.vision.encoder.layers, *self.model.llm.model.layers):
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
                    module.set_gradient_divide_factor(1.0)
        self.ranks, self.rank, self.max_norm = ranks, rank, recipe.training.max_norm
        optimizer = recipe.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        steps, warm = recipe.training.steps, recipe.lr_scheduler.warmup_steps
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: min(1.0, (s + 1) / max(warm, 1)))
        assert steps > 1000, "the decay must not begin while we measure"
        # The same samples in the same order; which ones is data, not cost.
        self.order = Loader(self.source, recipe.batch.global_batch_size, seed=recipe.debug.seed)
        self.batch = 0

    def collate(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """Images, padded tokens, flat positions that predict, their targets, and the targets of all ranks."""
        indices = self.order.indices(self.batch)
        self.batch += 1
        size = len(indices) // self.ranks
        metas = [self.source.meta(i) for i in indices]
        everyone = sum(meta.num_targets for meta in metas)
        mine = range(self.rank * size, (self.rank + 1) * size)
        samples = [self.source.load(indices[i]) for i in mine]
        placeholder = self.source.placeholders["image"]
        sequences, spans = [], []
        for i, sample in zip(mine, samples, strict=True):
            repeats = torch.where(sample.tokens == placeholder, self.rows_per_image, 1)
            sequences.append(sample.tokens.repeat_interleave(repeats))
            spans.append(metas[i].num_targets)
        tokens = pad_sequence(sequences, batch_first=True, padding_value=self.source.pad_id)
        length = tokens.shape[1]
        last = [
            torch.arange(len(s) - n, len(s)) + b * length for b, (s, n) in enumerate(zip(sequences, spans, strict=True))
        ]
        targets = torch.cat(last)  # an answer is the end of its sample
        images = [image for sample in samples for image in sample.media.get("image", ())]
        pixels = torch.stack(images) if images else torch.empty(0, *self.image_shape)
        return pixels, tokens, targets - 1, tokens.flatten()[targets], everyone

    def step(self) -> float:
        """One optimizer step; returns the loss per target token over all ranks."""
        *tensors, everyone = self.collate()
        pixels, tokens, predicting, targets = (t.to(self.device) for t in tensors)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            logits = self.model(pixels, tokens, self.source.placeholders["image"], predicting)
        loss = nn.functional.cross_entropy(logits.float(), targets, reduction="sum") / everyone
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.scheduler.step()
        total = loss.detach()
        if self.ranks > 1:
            dist.all_reduce(total)
        return total.item()


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{'width':>8} {'ranks':>5} {'batch':>5} {'hetmesh ms':>10} {'plain ms':>9} {'ratio':>6}  rounds"]
    for c in result["cases"]:
        times = f"{c['hetmesh_ms']:>10} {c['plain_ms']:>9} {c['step_time_ratio']:>6}  {c['rounds']}"
        lines.append(f"{c['width']:>8} {c['ranks']:>5} {c['batch']:>5} {times}")
    return "\n".join(
        [*lines, f"worst ratio {result['max_step_time_ratio']}, width 512 {result['wide_step_time_ratio']}"]
    )
