"""Stands in for SGLang's kernels: there is no build for CPUs among the published ones.

SGLang's CPU modules import some `*_cpu` kernels by name and call them only for models and settings that spmdrl does not
use on a CPU. No operator is registered with torch: a `torch.ops.sgl_kernel.convert_weight_packed` would tell SGLang
that the AMX kernels are there, and it would take them for every layer.
"""


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(f"the stub of sgl_kernel has no {name}")

    def kernel(*args, **kwargs):
        raise NotImplementedError(f"SGLang called {name} of sgl_kernel, which is not installed")

    return kernel
