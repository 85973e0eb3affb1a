"""Stands in for triton, which compiles kernels for GPUs.

SGLang's modules define such kernels when they are imported, in hundreds of places, and its CPU backend calls none of
them. So every name exists, decorators can be applied, and only running a kernel is an error. Names are classes where
they are written like classes (SGLang inherits from some), anything else is a `_Placeholder`.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0.0"  # older than anything SGLang asks for, so that it takes no newer interface


class Kernel:
    """What `@triton.jit` makes of a function."""

    def __init__(self, function):
        self.fn = function
        self.__name__ = self.__qualname__ = function.__name__
        self.__module__, self.__doc__ = function.__module__, function.__doc__

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"SGLang ran the triton kernel {self.__name__}, but triton is not installed")

    run = warmup = __call__


def jit(function=None, **options):
    """`@jit` and `@jit(option=...)`."""
    return jit if function is None else Kernel(function)


def cdiv(x, y):
    """x / y, rounded up."""
    return -(-x // y)


def next_power_of_2(n):
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


class _Class:
    def __init__(self, *args, **kwargs):
        pass


class _Placeholder:
    """Any attribute of it is another one; called with a function it is a decorator that changes nothing."""

    def __getattr__(self, name):
        return _named(name)

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else self

    def __getitem__(self, key):
        return self

    def __iter__(self):  # without it, iteration would try `[0]`, `[1]` and so on, and never end
        return iter(())

    def __or__(self, other):  # in annotations
        return self

    __ror__ = __or__


def _named(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Class,), {}) if name[0].isupper() else _Placeholder()


class _Module(types.ModuleType):
    """A submodule, with every name that is asked for."""

    def __getattr__(self, name):
        value = _named(name)
        setattr(self, name, value)  # the same object next time: `is` and `isinstance` are asked about it
        return value


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """`import triton.anything.at.all`."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith("triton."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


class _Driver:
    @property
    def active(self):
        """SGLang and torch ask it which GPU there is, and take an error for "none": triton itself says it so."""
        raise RuntimeError("triton is not installed")


sys.modules[__name__].__class__ = _Module
sys.meta_path.append(_Submodules())
# triton.runtime.driver is a module to `import` and, as in triton, the driver within it to everything else.
_driver = importlib.import_module("triton.runtime.driver").driver = _Driver()
importlib.import_module("triton.runtime").driver = _driver
