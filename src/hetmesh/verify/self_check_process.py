"""The self-check in a process of its own, whose memory and threads are gone afterwards."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

from hetmesh.errors import HetmeshError, SelfCheckError
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import ResolvedRecipe, resolve

TIMEOUT_S = 7200
"""Seconds that comparing the modules with transformers' own forward may take."""

_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables by which a launcher tells a worker its rank: the process is no worker."""


def compare_in_process(recipe: Recipe) -> list[str]:
    """Compare modules and first samples with transformers' own in a new process, and record the result.

    Returns:
        What was found, a line each.

    Raises:
        SelfCheckError: they differ, could not be compared, or the comparison took longer than `TIMEOUT_S`.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    command = [sys.executable, "-m", "hetmesh.verify.self_check_process"]
    try:
        done = subprocess.run(
            command, input=pickle.dumps(recipe), env=environment, capture_output=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise SelfCheckError(f"self-check: it took more than {TIMEOUT_S} s") from error
    output, errors = (stream.decode(errors="replace").strip() for stream in (done.stdout, done.stderr))
    if done.returncode:
        last = (errors or output).splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise SelfCheckError(f"self-check: {last[0].removeprefix('error: ')}")
    return output.splitlines()


def compare(resolved: ResolvedRecipe) -> list[str]:
    """Compare modules and first samples with transformers' own in this process, and record the result.

    Returns:
        What was found, a line each.

    Raises:
        SelfCheckError: they differ, or could not be compared.
    """
    from hetmesh.verify.processor_check import check_processor
    from hetmesh.verify.self_check import NOT_COMPARED, self_check
    from hetmesh.verify.self_check_record import record

    data = check_processor(resolved)
    difference = self_check(resolved.recipe)
    record(resolved.recipe, difference)
    return [f"weights: logits differ from transformers' own by at most {difference:.1e}, {NOT_COMPARED}", *data]


def _main() -> int:
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as findings:
        os.dup2(2, 1)  # tokenizers write about unknown options to stdout, from Rust
        try:
            print(*compare(resolve(pickle.load(sys.stdin.buffer))), sep="\n", file=findings)
        except HetmeshError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
