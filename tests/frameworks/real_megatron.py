"""Models and optimizers of megatron-core on one rank without a GPU, and what their values truly are. Where Megatron
asks for CUDA by name it gets the host: the device of new tensors, the names of tensor types, and two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import bytecheckpoint as bcp
from distributed import truth

LAYERS, WIDTH, HEADS, GROUPS, VOCABULARY = 4, 16, 4, 2, 130
NUM_EXPERTS = 4
LEARNING_RATE = 0.125


class Experts(NamedTuple):
    """A mixture of experts, and the ranks that share it."""

    ep: int = 1
    etp: int | None = None
    """Ranks that share the tensors of an expert; as many as those of the other tensors unless it is given."""
    every: int = 1
    """1: every layer has experts, and layers are one tensor; 2: every second one, and each layer has its name."""


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
    experts: Experts | None = None
    is_llama: bool = False
    """RMS norms, rotary embeddings and query groups, as a name map takes them."""


_NAMING_DEVICES = (
    *((torch, f"{name}{suffix}") for name in ("empty", "zeros", "ones", "full") for suffix in ("", "_like")),
    *((torch, name) for name in ("tensor", "as_tensor", "arange", "rand", "randn", "randint", "linspace")),
    *((torch.Tensor, name) for name in ("to", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")),
)
"""Functions to which Megatron gives a CUDA device. Not a TorchFunctionMode: each call of torch would take longer in it,
and benchmarks time calls here.
"""


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return call


def _type_on_device(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Stands for Tensor.type, by which Megatron's optimizer looks for parameters on devices."""
    found = torch._C.TensorBase.type(tensor, *args, **kwargs)
    return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found


@contextmanager
def on_host(layout: Layout) -> Iterator[None]:
    """Megatron's process groups for this layout, over those that there are; no CUDA is needed inside."""
    from megatron.core import parallel_state

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")))
        stack.enter_context(mock.patch.object(torch.cuda, "synchronize"))
        stack.enter_context(mock.patch.object(torch.Tensor, "type", _type_on_device))
        for owner, name in _NAMING_DEVICES:
            stack.enter_context(mock.patch.object(owner, name, _on_host(getattr(owner, name))))
        virtual = layout.num_chunks if layout.num_chunks > 1 else None
        of_experts = layout.experts or Experts()
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            virtual,
            expert_model_parallel_size=of_experts.ep,
            expert_tensor_parallel_size=of_experts.etp,
        )
        stack.callback(parallel_state.destroy_model_parallel)
        yield


class Built(NamedTuple):
    chunks: list[Any]
    """In Megatron's DistributedDataParallel."""
    optimizer: Any

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.chunks, "optimizer": self.optimizer}


def build(layout: Layout, *, num_layers: int = LAYERS, width: int = WIDTH) -> Built:
    """With values of Megatron's own making."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    dtype = torch.bfloat16 if layout.is_half else torch.float32
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=width,
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
        **_moe_settings(layout),
        **({"normalization": "RMSNorm", "num_query_groups": GROUPS} if layout.is_llama else {}),
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
            _layers(config, layout, stage["vp_stage"]),
            vocab_size=-(-VOCABULARY // rows) * rows,
            max_sequence_length=8,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            position_embedding_type="rope" if layout.is_llama else "learned_absolute",
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


def _moe_settings(layout: Layout) -> dict[str, Any]:
    if layout.experts is None:
        return {}
    return {
        "num_moe_experts": NUM_EXPERTS,
        "moe_layer_freq": layout.experts.every,
        "moe_ffn_hidden_size": 8,
        "moe_shared_expert_intermediate_size": 8,
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",  # the only one with a bias
        "expert_model_parallel_size": layout.experts.ep,
        "expert_tensor_parallel_size": layout.experts.etp,
    }


def _layers(config: Any, layout: Layout, vp_stage: int | None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    if layout.experts is None:
        return get_gpt_layer_local_spec(normalization="RMSNorm" if layout.is_llama else None)
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)


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
        is_single = not is_distributed and not hasattr(owner, "float16_groups")
        if is_distributed:
            of_model = owner.model_float16_groups + owner.model_fp32_groups
            of_optimizer = owner.shard_fp32_from_float16_groups + owner.shard_fp32_groups
        elif is_single:
            of_model = of_optimizer = [group["params"] for group in owner.optimizer.param_groups]
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
    for owner in built.optimizer.chained_optimizers:
        for group in owner.optimizer.param_groups:
            group["lr"] = 0.5 if prefix else LEARNING_RATE


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
    return wrong + _wrong_groups(built)


def _wrong_groups(built: Built) -> list[str]:
    """Groups without what was saved of them, or with what another layout has: Megatron finds its groups by the flag."""
    wrong = []
    for parameter, sharded, held, _, inner in held_by(built):
        group = next(group for group in inner.param_groups if any(each is held for each in group["params"]))
        found = group["lr"], group["wd_mult"], group["is_expert_parallel"]
        wanted = LEARNING_RATE, 1.0 if parameter.dim() > 1 else 0.0, not getattr(parameter, "allreduce", True)
        if found != wanted:
            wrong.append(f"the group of {sharded.key} has {found}, not {wanted}")
    return wrong


def step(built: Built) -> None:
    """One step with gradients that are the same whatever the layout."""
    for parameter, sharded in sharded_parameters(built):
        parameter.main_grad.copy_(true_part(sharded, "{}.grad"))
    assert built.optimizer.step()[0]


def save_truth(rank: int, world_size: int, layout: Layout, path: str) -> None:
    with on_host(layout):
        built = build(layout)
        fill(built)
        assert not differences(built)
        bcp.save(path, built.state)


def load_all(rank: int, world_size: int, layout: Layout, paths: dict[str, str]) -> dict[str, list[str]]:
    """What is wrong, by source: of a new optimizer, and of one that had other state."""
    wrong: dict[str, list[str]] = {}
    with on_host(layout):
        for source, path in paths.items():
            built = build(layout)
            if len(source) % 2:
                fill(built, "noise.")
            bcp.load(path, built.state, "megatron")
            wrong[source] = differences(built)
    return wrong


def go_on(rank: int, world_size: int, layout: Layout, path: str, after: str) -> None:
    with on_host(layout):
        built = build(layout)
        bcp.load(path, built.state)
        step(built)
        bcp.save(after, built.state)


def common(fqn: str, tensor: Tensor) -> Tensor:
    """The part of a stored tensor that all layouts have: they pad the vocabulary to other lengths."""
    is_padded = tensor.dim() > 0 and ("word_embeddings" in fqn or "output_layer" in fqn)
    return tensor[:VOCABULARY] if is_padded else tensor
