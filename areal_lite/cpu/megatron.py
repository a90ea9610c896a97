"""Substitutions for a machine without CUDA: device names, gloo collectives, oneDNN.

With CUDA none of them is active.
"""

from areal_lite.megatron.patches import Substitution

CPU_SUBSTITUTIONS = (
    Substitution(
        name="device literal",
        pattern=r"device\s*=\s*(['\"])cuda\1",
        replacement="device='cpu'",
        counts={
            "distributed.param_and_grad_buffer": 1,
            "dist_checkpointing.strategies.state_dict_saver": 1,
            "optimizer.clip_grads": 5,
            "optimizer.optimizer": 4,
            "pipeline_parallel.schedules": 3,
            "utils": 6,
        },
    ),
    Substitution(
        name="current device",
        pattern=r"torch\.cuda\.(current_device|synchronize)\(\)",
        replacement=r"torch.cpu.\1()",
        counts={
            "distributed.distributed_data_parallel": 5,
            "distributed.param_and_grad_buffer": 3,
            "dist_checkpointing.strategies.async_utils": 3,
            "dist_checkpointing.strategies.filesystem_async": 1,
            "dist_checkpointing.strategies.state_dict_saver": 1,
            "optimizer.distrib_optimizer": 2,
            "optimizer.optimizer": 1,
            "pipeline_parallel.p2p_communication": 8,
            "tensor_parallel.layers": 8,
            "tensor_parallel.mappings": 5,
            "utils": 3,
        },
    ),
    Substitution(
        name="move to the device",
        pattern=r"\.cuda\(\)",
        replacement=".cpu()",
        counts={
            "models.common.language_module.language_module": 1,
            "optimizer.distrib_optimizer": 1,
        },
    ),
    Substitution(
        name="tensor type name",
        pattern=r"'torch\.cuda\.(Float|Half|BFloat16)Tensor'",
        replacement=r"'torch.\1Tensor'",
        counts={
            "optimizer.clip_grads": 1,
            "optimizer.distrib_optimizer": 5,
            "optimizer.optimizer": 3,
        },
    ),
    # A CPU has one random generator.
    Substitution(
        name="random numbers",
        pattern=r"torch\.cuda\.(get_rng_state|manual_seed)\(",
        replacement=r"torch.\1(",
        counts={"tensor_parallel.random": 4},
    ),
    Substitution(
        name="random state",
        pattern=r"return torch\.cuda\.random\.get_rng_state\(device=device\)",
        replacement="return torch.get_rng_state()",
        counts={"tensor_parallel.random": 1},
    ),
    Substitution(
        name="set random state",
        pattern=r"_lazy_call\(cb\)",
        replacement="torch.set_rng_state(new_state)",
        counts={"tensor_parallel.random": 1},
    ),
    # For a group of one rank, gloo copies all gradients and weights, only to put them back.
    Substitution(
        name="group of one rank",
        pattern=r"(?m)^( +)(dist_all_gather_func|grad_reduce_handle = dist_reduce_scatter_func)\(",
        replacement=r"\1if self.intra_distributed_optimizer_instance_size > 1: \2(",
        counts={"distributed.param_and_grad_buffer": 2},
    ),
    # On a CPU torch.compile costs more at the start than the few fused operations save later.
    Substitution(
        name="jit fuser",
        pattern=r"(?m)^enable_jit_fuser\(\)",
        replacement="disable_jit_fuser()",
        counts={"jit": 1},
    ),
)

# oneDNN multiplies float32 matrices more than twice as fast on AMD as MKL, which is behind
# torch.matmul; on Intel both are equally fast. It refuses bfloat16 on a processor without AVX-512,
# where torch.matmul converts it.
_ONEDNN = (
    r'(torch.ops.mkldnn._linear_pointwise({0}, {1}, None, "none", [], "")'
    " if {0}.dtype == torch.float32 else torch.matmul({0}, ({1}).t()))"
)
ONEDNN_SUBSTITUTIONS = (
    Substitution(
        name="linear layer",
        pattern=r"output = torch\.matmul\((total_input|input), weight\.t\(\)\)",
        replacement="output = " + _ONEDNN.format(r"\1", "weight"),
        counts={"tensor_parallel.layers": 2},
    ),
    Substitution(
        name="gradient of its input",
        pattern=r"grad_input = grad_output\.matmul\(weight\)",
        replacement="grad_input = " + _ONEDNN.format("grad_output", "weight.t()"),
        counts={"tensor_parallel.layers": 2},
    ),
    Substitution(
        name="gradient of its weight",
        pattern=r"grad_weight = grad_output\.t\(\)\.matmul\(total_input\)",
        replacement="grad_weight = "
        + _ONEDNN.format("total_input.t()", "grad_output.t()")
        + ".t()",
        counts={"tensor_parallel.layers": 1},
    ),
)
