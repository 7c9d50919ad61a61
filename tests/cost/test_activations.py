"""Bytes that layers keep, against what autograd saves."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from hetmesh._torch_compat import fake_process_group
from hetmesh.cost import LayerOptions, LayerShape, WeightShape, Work, activation_bytes
from hetmesh.cost.activations import backward_bytes
from hetmesh.models import AdapterRequest
from hetmesh.models.module_shape import module_shape
from hetmesh.models.named.llama import LlamaAdapter
from hetmesh.models.named.qwen3 import Qwen3Adapter
from hetmesh.models.named.qwen3_moe import Qwen3MoeAdapter
from hetmesh.models.named.qwen3_vl_vision import Qwen3VLVisionAdapter
from hetmesh.models.named.siglip import SiglipAdapter
from hetmesh.parallel import apply_tensor_parallel, sequence_parallel
from hetmesh.parallel.experts.block import make_expert_block
from hetmesh.parallel.experts.routed_tokens import RoutedTokens
from hetmesh.parallel.experts.token_exchange import ExpertRanks
from hetmesh.parallel.gradient_sums import local_part

BATCH, LENGTH = 4, 64
WORK = Work(BATCH * LENGTH, BATCH * LENGTH**2, 40)
FLOAT32 = LayerOptions("float32", upstream=True)


def saved_bytes(module, run, inside=lambda pack: None):
    """Bytes that autograd saves while `run` runs; its own hooks would hide some from ours: `inside` gets `pack`."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # alive, so that no address is used twice
        return tensor

    inside(pack)
    with saved_tensors_hooks(pack, lambda tensor: tensor), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        run()
    return sum(size for size, _ in kept.values())


def siglip_block():
    config = {"hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "patch_size": 4, "image_size": 32}
    adapter = SiglipAdapter.make(AdapterRequest("vision", config, media="image", consumers=("llm",)))
    module = adapter.build()
    return module, module_shape("vision", adapter, module).layers[1], module.encoder.layers[0], (None,)


def qwen_block():
    config = {"hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    adapter = Qwen3Adapter.make(AdapterRequest("llm", {**config, "head_dim": 24}, vocab_size=90))
    module = adapter.build()
    shape = next(layer for layer in module_shape("llm", adapter, module).layers if "layers" in layer.name)
    cos = torch.randn(BATCH, LENGTH, 24)
    return module, shape, module.model.layers[0], (None,), {"position_embeddings": (cos, cos)}


def expert_block():
    """Sequences of their own, whose tokens are one row to the experts."""
    config = {"hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "router_aux_loss_coef": 0.1}
    adapter = Qwen3MoeAdapter.make(AdapterRequest("llm", {**config, "head_dim": 24}, vocab_size=90))
    module = adapter.build()
    shape = next(layer for layer in module_shape("llm", adapter, module).layers if "layers" in layer.name)
    lengths, tokens = torch.full((BATCH,), LENGTH), RoutedTokens()
    of_token = torch.repeat_interleave(torch.arange(BATCH), LENGTH)
    tokens.note({"token_samples": of_token, "sample_tokens": lengths, "sample_weights": lengths.double()})
    make_expert_block(
        module.model.layers[0].mlp,
        layers=adapter.abilities.experts,
        number=0,
        peers=ExpertRanks(None, None, 1, 0, "experts"),
        tokens=tokens,
        sharing=None,
        balances=True,
        enter=None,
        leave=None,
    )
    cos = torch.randn(BATCH, LENGTH, 24)
    return module, shape, module.model.layers[0], (None,), {"position_embeddings": (cos, cos)}


def patch_block():
    """Four patches to a row of the module; each sequence is an image of its own."""
    sizes = {"hidden_size": 96, "depth": 1, "num_heads": 4, "patch_size": 2, "deepstack_visual_indexes": []}
    sizes |= {"temporal_patch_size": 1, "num_position_embeddings": 16, "out_hidden_size": 40}
    adapter = Qwen3VLVisionAdapter.make(AdapterRequest("vision", sizes, media="image", consumers=("llm",)))
    module = adapter.build()
    shape = next(layer for layer in module_shape("vision", adapter, module).layers if "blocks" in layer.name)
    places = adapter._places([(1, 4, 4)] * BATCH)  # of rows
    given = {"cu_seqlens": torch.tensor(places["cu_seqlens"]), "position_embeddings": (torch.randn(256, 24),) * 2}
    return module, shape, lambda x, **kwargs: module.blocks[0](x.flatten(0, 1), **kwargs), (), given


@pytest.mark.parametrize("make", [siglip_block, qwen_block, expert_block, patch_block])
@pytest.mark.parametrize("trainable", [True, False])
def test_a_block_keeps_what_autograd_saves(make, trainable):
    module, shape, block, args, *kwargs = make()
    module.requires_grad_(trainable)
    shape = replace(shape, weights=tuple(replace(w, trainable=trainable) for w in shape.weights))
    x = torch.randn(BATCH, LENGTH, 96, requires_grad=True)
    saved = saved_bytes(module, lambda: block(x, *args, **(kwargs[0] if kwargs else {})))
    predicted = activation_bytes(shape, Work(BATCH * LENGTH // shape.tokens_per_row), FLOAT32)
    assert predicted == pytest.approx(saved, rel=0.1)


@pytest.mark.parametrize("adapter_class", [Qwen3Adapter, LlamaAdapter])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_key_heads_that_several_query_heads_read_are_not_copied(adapter_class, dtype):
    config = {"hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 1}
    adapter = adapter_class.make(
        AdapterRequest("llm", {**config, "head_dim": 64, "intermediate_size": 1024}, vocab_size=90)
    )
    module = adapter.build().to(dtype)
    shape = next(layer for layer in module_shape("llm", adapter, module).layers if "layers" in layer.name)
    x = torch.randn(BATCH, LENGTH, 512, dtype=dtype, requires_grad=True)
    cos = torch.randn(BATCH, LENGTH, 64, dtype=dtype)
    held = nn.ParameterList([*module.parameters(), nn.Parameter(cos)])  # the angles are all layers'
    saved = saved_bytes(held, lambda: module.model.layers[0](x, None, position_embeddings=(cos, cos)))
    assert activation_bytes(shape, WORK, LayerOptions(str(dtype).removeprefix("torch."), True)) == pytest.approx(
        saved, rel=0.02
    )


@pytest.mark.parametrize("adapter_class", [Qwen3Adapter, LlamaAdapter])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_that_share_two_key_heads_keep_a_whole_one_each(adapter_class, tp):
    config = {"hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2}
    adapter = adapter_class.make(AdapterRequest("llm", {**config, "head_dim": 24}, vocab_size=90))
    module = adapter.build()
    shape = next(layer for layer in module_shape("llm", adapter, module).layers if "layers" in layer.name)
    x, cos = torch.randn(BATCH, LENGTH, 96, requires_grad=True), torch.randn(BATCH, LENGTH, 24)
    with fake_process_group(tp):
        apply_tensor_parallel(module, init_device_mesh("cpu", (tp,)), adapter.tensor_parallel_plan())
        held = nn.ParameterList(nn.Parameter(local_part(p)) for p in module.parameters())
        saved = saved_bytes(held, lambda: module.model.layers[0](x, None, position_embeddings=(cos, cos)))
    assert activation_bytes(shape, WORK, replace(FLOAT32, group=tuple(range(tp)))) == pytest.approx(saved, rel=0.1)


@pytest.mark.parametrize(
    ("dtype", "trainable", "backend"),
    [
        (torch.float32, True, None),
        (torch.bfloat16, True, None),
        (torch.bfloat16, False, None),
        pytest.param(torch.bfloat16, True, "aot_eager_decomp_partition", marks=pytest.mark.exhaustive),
    ],
)
def test_under_sequence_parallelism_only_shares_are_kept_of_what_was_gathered(monkeypatch, dtype, trainable, backend):
    """The partitioner is that of torch.compile's default backend, which fuses what lies between products."""
    config = {"hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4}
    adapter = Qwen3Adapter.make(
        AdapterRequest("llm", {**config, "head_dim": 64, "intermediate_size": 1024}, vocab_size=90)
    )
    module = adapter.build().to(dtype).requires_grad_(trainable)
    shape = next(layer for layer in module_shape("llm", adapter, module).layers if "layers" in layer.name)
    monkeypatch.setattr(sequence_parallel, "keeps_are_hooked", lambda: False)  # those of `saved_bytes` only look
    ranks, rows = 4, BATCH * LENGTH
    cos = torch.randn(BATCH, LENGTH, 64, dtype=dtype)
    with fake_process_group(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        apply_tensor_parallel(module, mesh, adapter.tensor_parallel_plan())
        sequence_parallel.apply_sequence_parallel(module, mesh, ["model.layers"])
        block = module.model.layers[0]
        if backend:
            torch._dynamo.reset()
            block.forward = torch.compile(block.forward, backend=backend, dynamic=True)
        x = torch.randn(1, rows // ranks, 512, dtype=dtype, requires_grad=True)
        module.hetmesh_tokens.as_input(x.detach()[0], (BATCH, LENGTH))  # which notes the shape, as a forward does
        held = nn.ParameterList([*(nn.Parameter(local_part(p)) for p in module.parameters()), nn.Parameter(cos)])
        own = sequence_parallel._Gathered.pack

        def inside(pack):
            def packed(self, tensor):
                kept, *rest = own(self, tensor)
                return pack(kept), *rest

            monkeypatch.setattr(sequence_parallel._Gathered, "pack", packed)

        saved = saved_bytes(held, lambda: block(x, None, position_embeddings=(cos, cos)), inside)
    how = LayerOptions(str(dtype).removeprefix("torch."), True, group=tuple(range(ranks)), sequence_parallel=True)
    how = replace(how, compiled=backend is not None)
    assert activation_bytes(shape, Work(rows), how) == pytest.approx(saved, rel=0.03)


def test_a_frozen_layer_with_nothing_trainable_before_it_keeps_nothing():
    layer = LayerShape("l", (WeightShape("l.w", (8, 4), 1, False),), 8)
    assert activation_bytes(layer, WORK, replace(FLOAT32, upstream=False)) == 0
    assert activation_bytes(layer, WORK, FLOAT32) > 0


def test_full_recomputation_keeps_the_input_alone():
    layer = LayerShape("l", (WeightShape("l.up.w", (32, 4), 1), WeightShape("l.down.w", (4, 32), 1)))
    again, cast = (LayerOptions("bfloat16", True, recompute=True, autocast=flag) for flag in (False, True))
    assert activation_bytes(layer, WORK, again) == 2 * WORK.rows * 4
    # autocast leaves what lies between blocks in fp32
    assert activation_bytes(layer, WORK, cast) == 4 * WORK.rows * 4
    # and casts each weight anew
    more = backward_bytes(layer, WORK, cast) - backward_bytes(layer, WORK, again)
    assert more == 2 * 2 * 32 * 4 - 2 * WORK.rows * 4


def test_a_block_with_low_rank_adapters_keeps_what_autograd_saves():
    from hetmesh.models.weights.lora import add_lora
    from hetmesh.recipe.sections import LoRA

    module, _, block, args, kwargs = qwen_block()
    config = {"hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    adapter = Qwen3Adapter.make(AdapterRequest("llm", {**config, "head_dim": 24}, vocab_size=90))
    add_lora(module, LoRA(rank=4, alpha=8), "llm", 0, adapter.layers())
    shape = next(layer for layer in module_shape("llm", adapter, module).layers if "layers" in layer.name)
    x = torch.randn(BATCH, LENGTH, 96, requires_grad=True)
    saved = saved_bytes(module, lambda: block(x, *args, **kwargs))
    assert activation_bytes(shape, WORK, FLOAT32) == pytest.approx(saved, rel=0.1)
