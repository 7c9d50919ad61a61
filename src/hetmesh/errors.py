"""Every error hetmesh raises on purpose. Each message names the thing, what was given and what is valid."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

LOST_PEER = re.compile(
    r"connection (was )?(reset|closed|refused)|broken pipe|socket closed|socket timeout|lost rank \d+", re.I
)
"""In messages that say no more than that another process has gone."""


class HetmeshError(Exception):
    """Base of all errors below; catch it to catch any of them."""


class LayoutError(HetmeshError, ValueError):
    """A MeshSpec, placement or Layout is malformed, or two layouts cannot be joined by a transfer."""


class GraphError(HetmeshError, ValueError):
    """A ModuleGraph or BatchPlan is inconsistent. The message names the module or boundary."""


class ScheduleError(GraphError):
    """A Schedule is inconsistent, or microbatches that feed each other have no order under it. The message names the
    action, stage or boundary; let the stage hold more microbatches, or give them other numbers."""


class RecipeError(HetmeshError, ValueError):
    """A recipe key is unknown, missing or holds an invalid value. The message names the key and the valid choices."""


class UsageError(HetmeshError, ValueError):
    """A command asks for what cannot be done: an option has an invalid value, a file that it names cannot be read or
    written, or an optional package is missing. The message names it and says what is valid or what to install."""


class SampleError(HetmeshError, ValueError):
    """One sample is malformed. The message names its id; fix the sample or the source that made it."""


class LoaderError(HetmeshError, RuntimeError):
    """A worker process that loads samples died, or was at one sample for too long. The message names the sample; look
    at its files, or load in the training process: `[data] num_workers = 0`."""


class BoundaryError(HetmeshError, RuntimeError):
    """A tensor handed to a boundary does not have the shape, dtype, mesh or device that the layouts promise."""


class BoundaryTimeout(HetmeshError, TimeoutError):
    """A wait outlasted its timeout. The message names boundary, microbatch and rank. The process group cannot be
    used afterwards: end the job and resume it from its last checkpoint."""


class NonFiniteError(HetmeshError, ArithmeticError):
    """The loss or a gradient of a step is infinite or not a number. No parameter was changed by that step; the message
    names the step and the modules and ranks where it was seen."""


class LossError(HetmeshError, ValueError):
    """A user's loss is not a sum over targets, or not differentiable. The message says what it returned; return the sum
    over `batch["targets"]`, which hetmesh divides once by the targets of the whole batch."""


class GradientError(HetmeshError, RuntimeError):
    """Gradients of a user's module are not summed over its lanes: something averages them, or nothing sums them. The
    message names the module, and what to write."""


class OutputError(HetmeshError, OSError):
    """A file of a run cannot be written or is not what its name says. The message names the file; free some space or
    give another folder."""


class ReplicaError(HetmeshError, RuntimeError):
    """Replicas of a parameter are no longer equal. The message names the parameter, its module, ranks and the step."""


class LaunchError(HetmeshError, RuntimeError):
    """How this process was started does not make a job: the launcher's variables contradict each other or the machine,
    or other processes did not come. The message names the variables."""


class CheckpointError(HetmeshError, OSError):
    """A checkpoint cannot be written or read, or its bytes have changed. The message names the file and what to do."""


class SelfCheckError(HetmeshError, ValueError):
    """The modules of a recipe compute something else than transformers does from the same directory. The message names
    the first module that differs, the kind of samples, and by how much."""


class Refusals:
    """Collects what is wrong with a recipe, so that all of it is said at once, a line each."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def add(self, message: str) -> None:
        """Note one thing that is wrong."""
        self.said.append(message)

    @contextmanager
    def collect(self, prefix: str = "") -> Iterator[None]:
        """Note the RecipeErrors of a block instead of raising them, each line after `prefix`."""
        try:
            yield
        except RecipeError as error:
            self.said += [f"{prefix}{line}" for line in str(error).split("\n")]

    def finish(self) -> None:
        """Raise RecipeError if anything was noted."""
        if self.said:
            raise RecipeError("\n".join(dict.fromkeys(self.said)))
