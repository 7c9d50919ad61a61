"""Every image-text and audio-text class of the installed transformers: does hetmesh take it?

    python tools/survey.py                       # a table; --json prints one JSON object
    python tools/survey.py llava qwen3_vl        # some model types alone
    python tools/survey.py --json --output tools/results/survey.json

Each is built from its default config made tiny, with random weights, and saved with tokenizer and processor; tokens and
tensors of conversations are compared with the processor's own, what hetmesh makes of the directory with transformers'
own forward (the self-check) and, where that passes, with three steps of training by transformers' own forward and
backward in fp64, in one process and with every module on a rank of its own; with clips too, where its processor and
tower read these (`video`). Each class has a limit of time. With --output, rows are kept beside FILE as they come, and a
survey of the same code that was stopped goes on from there.
Exit status 1 where one is silently wrong: passes the self-check, and trains another way.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from kept import stamp

JUDGES = (
    "src/hetmesh/models",
    "src/hetmesh/recipe",
    "src/hetmesh/verify",
    "src/hetmesh/data/preparation.py",
    "src/hetmesh/training/part_checks.py",
    "tests/support/whole_reference.py",
    "tools/surveying",
)
"""What an output of it judges (`kept.py`)."""

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # ranks are forked

TESTS = Path(__file__).parents[1] / "tests"
sys.path.append(str(TESTS))  # for `support`, which hetmesh's own tests share
runpy.run_path(str(TESTS / "support/torchvision_shim/sitecustomize.py"))
RESULTS = ("passed", "refused", "refused_by_self_check", "failed", "silently_wrong", "not_buildable")


def main(argv: Sequence[str] | None = None) -> int:
    """Survey; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MODEL_TYPE", help="some alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON object to FILE")
    parser.add_argument("--processes", type=int, default=2, help="processes at once (2)")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for one class (400)")
    args = parser.parse_args(argv)
    of = stamp(JUDGES)
    judged = hashlib.sha256(json.dumps(of["judges"], sort_keys=True).encode()).hexdigest()[:10]
    rows = args.output and args.output.with_suffix(f".{judged}.rows")
    result = run(args.names, args.processes, args.timeout, rows) | {"kept": of}
    text = json.dumps(result, indent=1)
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")
        rows.unlink(missing_ok=True)
    print(text if args.json else table(result))
    return int(result["silently_wrong"] > 0)


def run(names: Sequence[str], processes: int, timeout: float, kept: Path | None = None) -> dict[str, Any]:
    """The counts by kind of class, and the rows. `kept`: a file of rows, a line each, to go on from."""
    import torch
    import transformers

    from surveying.classes import audio_text_classes, image_text_classes

    kinds = {"image_text": image_text_classes(), "audio_text": audio_text_classes()}
    unknown = set(names) - {name for classes in kinds.values() for name in classes}
    if unknown:
        raise SystemExit(f"survey.py: no model types of image-text or audio-text classes: {sorted(unknown)}")
    wanted = [
        (kind, name, cls)
        for kind, classes in kinds.items()
        for name, cls in classes.items()
        if not names or name in names
    ]
    rows: dict[str, dict[str, Any]] = {}
    if kept and kept.exists():
        rows = {row["model_type"]: row for row in map(json.loads, kept.read_text(encoding="utf-8").splitlines())}
    left = [(name, cls) for _, name, cls in wanted if name not in rows]
    for row in _surveyed(left, processes, timeout):
        rows[row["model_type"]] = row
        said = f"{row['result']} in {row['seconds']} s {row.get('reason', '')}"
        print(f"{len(rows)}/{len(wanted)} {row['model_type']}: {said}", file=sys.stderr)
        if kept:
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    result: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    result |= dict.fromkeys(("classes", "split", *RESULTS, "video"), 0)  # of both kinds
    for kind in kinds:
        held = [rows[name] for each, name, _ in wanted if each == kind]
        result[kind] = {"classes": len(held), "split": sum(row["split"] for row in held)}
        result[kind] |= {key: sum(row["result"] == key for row in held) for key in RESULTS}
        result[kind]["video"] = sum(row.get("video", False) for row in held)
        result |= {key: result[key] + count for key, count in result[kind].items()}
        result[kind]["rows"] = held
    return result


def _surveyed(wanted: Sequence[tuple[str, str]], processes: int, timeout: float) -> Iterator[dict[str, Any]]:
    """The rows as they come; every class in a process that is forked from this one, so that imports are paid once."""
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2_vl.processing_qwen2_vl
    import transformers.models.siglip.modeling_siglip
    import transformers.processing_utils
    import transformers.video_utils  # noqa: F401

    import support.whole_reference  # noqa: F401

    context = multiprocessing.get_context("fork")
    waiting = list(wanted)
    running: dict[Any, tuple[str, str, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            name, cls = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_survey, args=(theirs, name, cls))
            process.start()
            theirs.close()
            running[ours] = (name, cls, process, time.monotonic())
        ready = wait(list(running), timeout=1.0)
        for end, (name, cls, process, began) in list(running.items()):
            row = {"model_type": name, "class": cls, "split": False, "result": "not_buildable"}
            if end in ready:
                try:
                    row = end.recv()
                except EOFError:
                    row["result"] = "failed"
                    row["reason"] = "the process died"
            elif time.monotonic() - began > timeout:
                os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
                row["result"] = "failed"
                row["reason"] = f"took more than {timeout:g} seconds"
            else:
                continue
            process.join()
            del running[end]
            yield row | {"seconds": round(time.monotonic() - began)}


def _survey(end: Any, name: str, cls: str) -> None:
    os.setsid()
    import torch
    import transformers

    from surveying.one_class import survey

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    end.send(survey(name, cls))


def table(result: Mapping[str, Any]) -> str:
    """The counts, and a line per class."""
    lines = []
    for kind in ("image_text", "audio_text"):
        counts = {key: value for key, value in result[kind].items() if key != "rows"}
        lines.append(f"{kind}: " + ", ".join(f"{key} {value}" for key, value in counts.items()))
        for row in result[kind]["rows"]:
            how = " ".join([*row.get("parts", ()), row.get("mask", ""), row.get("positions", "")])
            lines.append(f"  {row['model_type']:24} {row['result']:22} {how:45} {row.get('reason', '')[:160]}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
