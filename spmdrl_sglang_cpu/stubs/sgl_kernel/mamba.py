"""Names of sgl_kernel's kernels for layers with a state; tests put torch's arithmetic in their places."""

from sgl_kernel import __getattr__ as __getattr__
