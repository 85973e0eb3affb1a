"""Seconds from the command to the end of the first step, beside the import of torch and transformers alone.

    python benchmarks/start.py [--repeats N] [--out FILE]

The demo's settings with few prompts, on 2 CPU ranks; every start is a new run. The floor is a process that imports
torch and transformers and does nothing, in turns with the runs. Without --out nothing is written.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from results import ROOT, print_result, provenance

SETTINGS = ("run.num_steps=1", "optim.warmup_steps=0", "rollout.prompts_per_step=8", "eval.num_prompts=8")
IMPORTS = {"floor_s": "import torch, transformers", "import_s": "import spmdrl.train"}


def seconds(command: Sequence[str], *, until: str = "") -> float:
    """Run a command; returns the time until it prints a line that begins so, or until its end."""
    started = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        found, printed = 0.0, list[str]()
        for line in process.stdout:
            printed.append(line)
            if until and not found and line.startswith(until):
                found = time.perf_counter() - started
    if process.returncode or (until and not found):
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}: {''.join(printed[-5:])}")
    return found or time.perf_counter() - started


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the result as JSON, and write it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a result file")
    arguments = parser.parse_args(argv)
    about = provenance()
    found: dict[str, list[float]] = {"first_step_s": [], **{name: [] for name in IMPORTS}}
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        seconds([sys.executable, "-m", "spmdrl.tools.tiny_model", model, "--num-layers", "2"])
        for number in range(arguments.repeats):
            here = (f"run.dir={folder}", f"run.name=start-{number}", f"model.path={model}")
            command = [sys.executable, "-m", "spmdrl.tools.local", "spmdrl.train", "configs/demo.toml"]
            found["first_step_s"].append(seconds([*command, *SETTINGS, *here], until="step 1/1"))
            for name, statement in IMPORTS.items():
                found[name].append(seconds([sys.executable, "-c", statement]))
    medians = {f"median_{name}": statistics.median(values) for name, values in found.items()}
    result = {**about, "load_average": os.getloadavg()[0], **found, **medians}
    print_result(result, arguments.out)


if __name__ == "__main__":
    main()
