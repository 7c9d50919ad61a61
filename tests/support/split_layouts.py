"""Layouts of models of transformers that hetmesh splits by itself."""

LAYOUTS = {
    "encoder DP 2 beside LLM TP 2": """
        [parallelism.vision]
        ranks = [0, 1]
        [parallelism.llm]
        ranks = [2, 3]
        tensor_parallel_degree = 2""",
    "LLM CP 2 x PP 2 colocated": """
        [parallelism.vision]
        ranks = "0-3"
        [parallelism.llm]
        ranks = "0-3"
        context_parallel_degree = 2
        pipeline_parallel_degree = 2
        pipeline_parallel_schedule = "1f1b"
        pipeline_parallel_microbatch_size = 2""",
    "encoder TP 2 beside LLM TP 2 with SP": """
        [parallelism.vision]
        ranks = [0, 1]
        tensor_parallel_degree = 2
        [parallelism.llm]
        ranks = [2, 3]
        tensor_parallel_degree = 2
        enable_sequence_parallel = true""",
    "both FSDP": """
        [parallelism.vision]
        ranks = "0-3"
        data_parallel_shard_degree = 2
        [parallelism.llm]
        ranks = "0-3"
        data_parallel_shard_degree = 4
        [activation_checkpoint]
        mode = "full" """,
    "LLM PP 2 packed, tower frozen": """
        [modules.vision]
        trainable = false
        [parallelism.vision]
        ranks = [0, 1]
        [parallelism.llm]
        ranks = [2, 3]
        pipeline_parallel_degree = 2
        pipeline_parallel_schedule = "zero_bubble"
        pipeline_parallel_microbatch_size = 1
        [training]
        pack_samples = true""",
}
STAGES = """
        [parallelism.vision]
        ranks = "0-3"
        pipeline_parallel_degree = 2
        data_parallel_shard_degree = 2
        [parallelism.llm]
        ranks = "0-3"
        pipeline_parallel_degree = 2
        data_parallel_replicate_degree = 2
        pipeline_parallel_schedule = "1f1b"
        pipeline_parallel_microbatch_size = 1
        [activation_checkpoint]
        mode = "full" """
SHARES = STAGES.replace(
    "data_parallel_shard_degree = 2", "tensor_parallel_degree = 2\n        enable_sequence_parallel = true", 1
)
"""Of towers that can be cut."""
WHOLE = ("llava_onevision", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_omni")
"""Models with a tower that cannot be."""
DP_TP, CP_PP, SP, FSDP, FROZEN = LAYOUTS
OF_VISION = r"(?m)^ *\[\w+\.vision\]\n(?: *[^ \[].*\n)*"
"""The tables of the module of images, which those of recordings have too."""
