"""Lets SGLang take `rl_on_policy_target = "fsdp"` on a CPU: its own types and casts, with stand-ins for GPU kernels.

Runs in the engine's processes when this folder is on PYTHONPATH; the process that starts them calls `install` itself.
The stand-ins compute each token as if it were alone, as SGLang's CUDA kernels do.
"""

import importlib.abc
import os
import sys
from importlib.machinery import PathFinder


def _choices(choices):
    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")


def _products(batch_invariant_ops):
    def enable(*_):
        """In the place of what replaces operators for CUDA tensors."""
        import torch

        from tests.helpers import kernels_on_cpu

        torch.nn.functional.linear = kernels_on_cpu.product
        torch.nn.functional.silu = kernels_on_cpu.silu
        torch.matmul = lambda x, y: kernels_on_cpu.product(x, y.t())

    batch_invariant_ops.enable_batch_invariant_mode = enable


def _attention(backend):
    from tests.helpers import kernels_on_cpu

    backend.scaled_dot_product_attention = kernels_on_cpu.scaled_dot_product_attention


def _angles(base):
    import torch

    torch.Tensor.cuda = lambda tensor, *_: tensor


def _sampling(sampler):
    sampler.multinomial_with_seed = lambda logprobs, *_: logprobs.float().exp().multinomial(1)


_PATCHES = {
    "sglang.srt.arg_groups.choices": _choices,
    "sglang.srt.batch_invariant_ops": _products,
    "sglang.srt.layers.attention.torch_native_backend": _attention,
    "sglang.srt.layers.rotary_embedding.base": _angles,
    "sglang.srt.layers.sampler": _sampling,
}


class _Patched(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname not in _PATCHES:
            return None
        spec = PathFinder.find_spec(fullname, path)
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        _PATCHES[module.__name__](module)


def install():
    """Patch SGLang's modules as they are imported."""
    sys.meta_path.insert(0, _Patched())


if "SPMDRL_ENGINE_OF" in os.environ:
    os.environ["SGLANG_ROPE_CACHE_FP32"] = "1"  # as it is on CUDA
    install()
