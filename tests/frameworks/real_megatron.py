"""Models and optimizers of megatron-core on one rank without a GPU, and what their values truly are. Where Megatron
asks for CUDA by name it gets the host: the device of new tensors, the names of tensor types, and two calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from distributed import truth

LAYERS, WIDTH, HEADS, VOCABULARY = 4, 16, 4, 130


class Layout(NamedTuple):
    """How many ranks there are along each axis; the rest of the world is data-parallel."""

    tp: int = 1
    pp: int = 1
    num_chunks: int = 1
    is_distributed: bool = True
    is_homogeneous: bool = True
    is_half: bool = True
    """Parameters are bfloat16, and not fp32."""
    overlaps: bool = False
    """Parameters are gathered as the next forward pass meets them, and not at the end of a step."""


class _OnHost(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")
        return found


@contextmanager
def on_host(layout: Layout) -> Iterator[None]:
    """Megatron's process groups for this layout, over those that there are; no CUDA is needed inside."""
    from megatron.core import parallel_state

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")))
        stack.enter_context(mock.patch.object(torch.cuda, "synchronize"))
        stack.enter_context(_OnHost())
        virtual = layout.num_chunks if layout.num_chunks > 1 else None
        parallel_state.initialize_model_parallel(layout.tp, layout.pp, virtual)
        stack.callback(parallel_state.destroy_model_parallel)
        yield


class Built(NamedTuple):
    chunks: list[Any]
    """In Megatron's DistributedDataParallel."""
    optimizer: Any

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.chunks, "optimizer": self.optimizer}


def build(layout: Layout) -> Built:
    """With values of Megatron's own making."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    dtype = torch.bfloat16 if layout.is_half else torch.float32
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bf16=layout.is_half,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.num_chunks if layout.num_chunks > 1 else None,
        hetereogenous_dist_checkpoint=not layout.is_homogeneous,
    )
    rows = 8 * layout.tp
    of_data = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.is_distributed,
        overlap_grad_reduce=layout.overlaps,
        overlap_param_gather=layout.overlaps,
    )
    chunks = []
    for index in range(layout.num_chunks):
        stage = {"ignore_virtual": False, "vp_stage": index if layout.num_chunks > 1 else None}
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=-(-VOCABULARY // rows) * rows,
            max_sequence_length=8,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=False,
            vp_stage=stage["vp_stage"],
        )
        inside = Float16Module(config, model) if layout.is_half else model
        chunks.append(DistributedDataParallel(config, of_data, inside))
    of_optimizer = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        clip_grad=0.0,
        bf16=layout.is_half,
        params_dtype=dtype,
        use_distributed_optimizer=layout.is_distributed,
        overlap_param_gather=layout.overlaps,
    )
    return Built(chunks, get_megatron_optimizer(of_optimizer, chunks))


def sharded_parameters(built: Built) -> Iterator[tuple[nn.Parameter, Any]]:
    """Every parameter, and what Megatron's sharded_state_dict says of it."""
    from megatron.core.utils import unwrap_model

    for chunk in built.chunks:
        for sharded in unwrap_model(chunk).sharded_state_dict().values():
            if isinstance(sharded.data, nn.Parameter):
                yield sharded.data, sharded


def true_part(sharded: Any, name: str) -> Tensor:
    """What this rank's part of a tensor truly is, in fp32: rows beyond the vocabulary are zero."""
    pieces = [sharded] if hasattr(sharded, "global_offset") else sharded.build()
    return torch.cat([_true_piece(piece, name) for piece in pieces])


def _true_piece(piece: Any, name: str) -> Tensor:
    shape = list(piece.global_shape)
    if piece.allow_shape_mismatch:
        shape[0] = VOCABULARY
    full = truth.value(name.format(piece.key), torch.empty(shape, device="cpu"))
    if piece.allow_shape_mismatch:
        full = torch.cat([full, full.new_zeros(piece.global_shape[0] - VOCABULARY, *shape[1:])])
    return full[piece.global_slice()].clone()


def held_by(built: Built) -> Iterator[tuple[nn.Parameter, Any, Tensor, slice, torch.optim.Optimizer]]:
    """What the inner optimizers have of each parameter: flat, and which elements of it those are."""
    sharded_of = {id(parameter): sharded for parameter, sharded in sharded_parameters(built)}
    for owner in built.optimizer.chained_optimizers:
        is_distributed = hasattr(owner, "shard_fp32_groups")
        if is_distributed:
            of_model = owner.model_float16_groups + owner.model_fp32_groups
            of_optimizer = owner.shard_fp32_from_float16_groups + owner.shard_fp32_groups
        else:
            of_model = owner.float16_groups + owner.fp32_from_fp32_groups
            of_optimizer = owner.fp32_from_float16_groups + owner.fp32_from_fp32_groups
        for parameter, held in zip(chain(*of_model), chain(*of_optimizer), strict=True):
            elements = slice(None)
            if is_distributed:
                of_rank = owner._get_model_param_range_map(parameter)["param"]
                elements = slice(of_rank.start, of_rank.end)
            yield parameter, sharded_of[id(parameter)], held, elements, owner.optimizer


def fill(built: Built, prefix: str = "") -> None:
    """Puts true values into parameters, their fp32 copies and the optimizer's state, which had 3 steps."""
    with torch.no_grad():
        for parameter, sharded in sharded_parameters(built):
            parameter.copy_(true_part(sharded, prefix + "{}"))
        for _, sharded, held, elements, inner in held_by(built):
            held.copy_(true_part(sharded, prefix + "{}").reshape(-1)[elements].view(held.shape))
            inner.state[held] = {
                "step": torch.tensor(3.0 if not prefix else 9.0),
                **{
                    key: true_part(sharded, f"{prefix}{{}}.{key}").reshape(-1)[elements].view(held.shape).clone()
                    for key in ("exp_avg", "exp_avg_sq")
                },
            }


def differences(built: Built) -> list[str]:
    """What is not as `fill` would make it."""
    wrong = []
    for parameter, sharded in sharded_parameters(built):
        if not torch.equal(parameter, true_part(sharded, "{}").to(parameter.dtype)):
            wrong.append(sharded.key)
    for _, sharded, held, elements, inner in held_by(built):
        state = inner.state[held]
        found = {"": held, ".exp_avg": state.get("exp_avg"), ".exp_avg_sq": state.get("exp_avg_sq")}
        for suffix, tensor in found.items():
            wanted = true_part(sharded, "{}" + suffix).reshape(-1)[elements]
            if tensor is None or not torch.equal(tensor.reshape(-1), wanted):
                wrong.append(f"{sharded.key}{suffix} {elements}")
        if state.get("step") != 3:
            wrong.append(f"{sharded.key}.step is {state.get('step')}")
    return wrong


def step(built: Built) -> None:
    """One step with gradients that are the same whatever the layout."""
    for parameter, sharded in sharded_parameters(built):
        parameter.main_grad.copy_(true_part(sharded, "{}.grad"))
    assert built.optimizer.step()[0]
