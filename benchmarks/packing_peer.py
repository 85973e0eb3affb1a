"""Split lengths by verl's `get_seqlen_balanced_partitions`; benchmarks/packing.py runs this in verl's own environment.

Reads {"lengths": [...], "num_ranks": R} from stdin and prints {"duration_s": ..., "shares": [[index, ...], ...]}. verl
is installed without its requirements, and the one module is loaded from its file: what it imports (torch, and verl's
protocol, which needs tensordict and ray) serves its other functions only, and empty modules stand in for that.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import sys
import time
from types import ModuleType
from typing import Any

MODULE = "verl.utils.seqlen_balancing"


class Empty(ModuleType):
    """A module in which every name is a class without anything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def load() -> ModuleType:
    """The module alone, without the packages that it is in."""
    for name in ("torch", "torch.distributed", "verl.protocol", "verl.utils.tensordict_utils", "verl.utils.device"):
        sys.modules[name] = Empty(name)
    for package in ("verl", "verl.utils"):
        sys.modules[package] = Empty(package)
        sys.modules[package].__path__ = []
    [path] = [
        file.locate() for file in importlib.metadata.files("verl") or [] if file.match("utils/seqlen_balancing.py")
    ]
    spec = importlib.util.spec_from_file_location(MODULE, str(path))
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """One call."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    balancing = load()
    case = json.load(sys.stdin)
    start = time.perf_counter()
    shares = balancing.get_seqlen_balanced_partitions(case["lengths"], case["num_ranks"], equal_size=False)
    duration_s = time.perf_counter() - start
    print(json.dumps({"duration_s": duration_s, "shares": shares}))


if __name__ == "__main__":
    main()
