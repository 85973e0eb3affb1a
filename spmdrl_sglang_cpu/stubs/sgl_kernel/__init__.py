"""Stands in for SGLang's kernels: there is no build for CPUs among the published ones.

SGLang's CPU modules import some `*_cpu` kernels by name and call them only for models and settings that spmdrl does not
use on a CPU. Some modules take operators from `torch.ops.sgl_kernel` while they are imported, so these names are there
too. No other operator is: a `torch.ops.sgl_kernel.convert_weight_packed` would tell SGLang that the AMX kernels are
there, and it would take them for every layer.
"""

import torch


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(f"the stub of sgl_kernel has no {name}")

    def kernel(*args, **kwargs):
        raise NotImplementedError(f"SGLang called {name} of sgl_kernel, which is not installed")

    return kernel


for _name in (
    "fused_gdn_gating_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
):
    setattr(torch.ops.sgl_kernel, _name, __getattr__(_name))
