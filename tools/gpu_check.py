"""Check hetmesh on one CUDA device: digits, and a model of about 1B parameters in bf16, beside a plain PyTorch loop.

    python tools/gpu_check.py            # torch 2.11 or later; says so and exits cleanly where there is no GPU
    python tools/gpu_check.py --json     # one JSON object

Per case it prints step time and MFU of hetmesh's trainer and of the plain loop (the same modules and samples, one
forward, one backward, fused AdamW, torch.autocast), which take turns in one process. The large one is SigLIP-so400m and
a Qwen3-0.6B on synthetic samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

RECIPES = Path(__file__).parents[1] / "recipes"
LARGE = {
    "parallelism.vision.ranks": 0,
    "parallelism.vision.data_parallel_replicate_degree": 1,
    "parallelism.llm.ranks": 0,
    "parallelism.llm.data_parallel_shard_degree": 1,
    "parallelism.llm.tensor_parallel_degree": 1,
    "modules.llm.config.hidden_size": 1024,
    "modules.llm.config.num_hidden_layers": 28,
    "modules.llm.config.num_attention_heads": 16,
    "modules.llm.config.intermediate_size": 3072,
    "activation_checkpoint.mode": '"none"',
    "training.local_batch_size": 4,
    "training.global_batch_size": 4,
    "training.seq_len": 4096,
    "data.options.max_images": 2,
    "data.options.text_tokens": "[64, 512]",
    "checkpoint.enable": "false",
}
CASES = {
    "digits": ("digits_single.toml", {}),
    "digits in bf16": ("digits_single.toml", {"training.mixed_precision_param": '"bfloat16"'}),
    "SigLIP-so400m + Qwen3-0.6B in bf16": ("siglip_qwen3_8b.toml", LARGE),
}
WARM_UP = 3
LOOPS = ("hetmesh", "plain")


def main() -> int:
    """Run all cases; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each loop (default %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the script (digits only)")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"gpu": None}) if args.json else "no CUDA device here: nothing to check")
        return 0
    on_gpu = args.device == "cuda"
    chosen = CASES if on_gpu else {name: case for name, case in CASES.items() if case[1] is not LARGE}
    cases = [measure(name, recipe, overrides, args.steps, args.device) for name, (recipe, overrides) in chosen.items()]
    gpu = torch.cuda.get_device_name() if on_gpu else None
    result = {"gpu": gpu, "torch": torch.__version__, "cases": cases}
    if args.json:
        print(json.dumps(result, indent=2))
        return 0
    print(f"{gpu or 'CPU'}, torch {result['torch']}")
    for case in cases:
        print(
            f"{case['name']}: hetmesh {case['hetmesh_ms']:.1f} ms/step (MFU {_percent(case['hetmesh_mfu'])}), "
            f"plain loop {case['plain_ms']:.1f} ms/step (MFU {_percent(case['plain_mfu'])}), "
            f"ratio {case['step_time_ratio']:.3f}, losses differ by {case['loss_difference']:.1e} at the first step"
        )
    return 0


def measure(name: str, file: str, overrides: dict[str, Any], steps: int, device: str) -> dict[str, Any]:
    """Step time and MFU of both loops on the same samples."""
    from benchmarks.overhead import PlainLoop
    from hetmesh.boundary import init
    from hetmesh.recipe.recipe import load_recipe
    from hetmesh.training.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        extra = [f"--{key}={value}" for key, value in overrides.items()]
        recipe = load_recipe(RECIPES / file, [*extra, "--training.steps=100000", f"--job.dump_folder={folder}"])
        world = init(device=device)
        trainer = Trainer(recipe, world)
        plain = PlainLoop(recipe, 0, 1, device=world.device)
        seconds: dict[str, list[float]] = {"hetmesh": [], "plain": []}
        measured, difference = [], 0.0
        for step in range(WARM_UP + steps):
            losses = {}
            for which in LOOPS if step % 2 else LOOPS[::-1]:  # who comes first pays for what kernels prepare per shape
                _wait(device)
                started = time.perf_counter()
                if which == "hetmesh":
                    metrics = trainer.train_step()
                    losses[which] = metrics.loss
                else:
                    losses[which] = plain.step()
                _wait(device)
                if step >= WARM_UP:
                    seconds[which].append(time.perf_counter() - started)
            if step == 0:
                difference = abs(losses["hetmesh"] - losses["plain"])
            if step >= WARM_UP:
                measured.append(metrics)
        mfu = [m.cost.mfu for m in measured]
        trainer.reporter.close()
        world.close()
    ours, theirs = (statistics.median(seconds[k]) for k in ("hetmesh", "plain"))
    known = statistics.median(mfu) if all(m is not None for m in mfu) else None
    if device == "cuda":
        torch.cuda.empty_cache()
    return {
        "name": name,
        "hetmesh_ms": 1e3 * ours,
        "plain_ms": 1e3 * theirs,
        "step_time_ratio": ours / theirs,
        "hetmesh_mfu": known,
        "plain_mfu": None if known is None else known * ours / theirs,  # the same FLOPs in another time
        "loss_difference": difference,
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:.1f}%"


if __name__ == "__main__":
    sys.exit(main())
