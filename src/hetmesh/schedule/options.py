"""What a recipe may ask of a policy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PolicyOptions:
    """Parameters of policies; each reads those that concern it.

    Attributes:
        window: three_phase: microbatches whose encoder forwards come together; None: all of the step.
        recompute: three_phase: encoders keep only their inputs and run their forward again before their backward.
        offload: three_phase: waiting activations of encoders are kept in the memory of the host.
        early: interleaved: warm up with twice as many forwards per rank behind, as Megatron-LM does, which hides the
            latency of messages. Otherwise with as few as keep the makespan, which holds fewer activations.
        inner: bubble_fill: the schedule of the LLM whose gaps are filled, `"1f1b"`, `"interleaved"` or `"zero_bubble"`.
        refine: bubble_fill: False: the coarse placement alone, for comparison.
        in_flight: bubble_fill: microbatches that a stage of an encoder may hold at a time; None: twice as many as the
            LLM's order needs.
        raise_in_flight: bubble_fill: what the LLM's order needs is held also where `in_flight` is less, instead of an
            error.
    """

    window: int | None = None
    recompute: bool = False
    offload: bool = False
    early: bool = False
    inner: str = "1f1b"
    refine: bool = True
    in_flight: int | None = None
    raise_in_flight: bool = False


DEFAULT = PolicyOptions()
