"""torchrun without its own report: `python -m spmdrl.faults.torchrun`, with torchrun's options.

The ranks of a node start through this. A run that fails, or is asked to stop, tells its user why (`verdict.py`);
torchrun would add a warning, a box and the traceback of its own exception, and would hide the exit codes of its ranks
behind 1.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Sequence

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import main as torchrun

from spmdrl.faults.supervise import die_with_parent
from spmdrl.faults.text import say
from spmdrl.faults.verdict import SUPERVISED

HANDLED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
# Between SIGTERM and SIGKILL to the ranks: the 30 seconds of torchrun are too few for a step and a checkpoint.
SHUTDOWN_VARIABLE, SHUTDOWN_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 600
_LOG_OPTIONS = ("--log", "--redirects", "--tee", "--local-ranks-filter", "-r", "-t")
_LOG_VARIABLES = ("PET_LOG", "PET_REDIRECTS", "PET_TEE", "PET_LOCAL_RANKS_FILTER")  # torchrun's, for the same options


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun; returns the exit code of the rank that failed first, or 128 plus the number of a signal."""
    if SUPERVISED in os.environ:
        die_with_parent()
    given = sys.argv[1:] if argv is None else argv
    keeps_logs = any(one.startswith(_LOG_OPTIONS) for one in given) or any(
        name.startswith(_LOG_VARIABLES) for name in os.environ
    )
    # Else torchrun would leave a folder, with nothing in it, behind every launch.
    logs = () if keeps_logs else ("--log-dir", os.devnull)
    arguments = ["--signals-to-handle", HANDLED, *logs, *given]
    return quietly(lambda: torchrun(arguments))


def run_forked(rank: Callable[..., None], *arguments: object, num_ranks: int) -> int:
    """Run a function in ranks that are forked from this process; returns the exit code of `main`."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",  # the host's name may not resolve
        max_restarts=0,
        start_method="fork",
        signals_to_handle=HANDLED,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    return quietly(lambda: elastic_launch(config, rank)(*arguments))


def quietly(run_ranks: Callable[[], object]) -> int:
    """Run ranks by torchrun's agent, which logs nothing; returns the exit code of `main`."""
    logging.disable(logging.ERROR)
    os.environ.setdefault(SHUTDOWN_VARIABLE, str(SHUTDOWN_S))
    try:
        run_ranks()
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                name = signal.Signals(-failure.exitcode).name
                say(f"rank {rank} (pid {failure.pid}) was ended by {name}", sys.stderr)
        code: int = error.get_first_failure()[1].exitcode
        return code if code >= 0 else 128 - code  # as a shell shows it
    return 0


if __name__ == "__main__":
    sys.exit(main())
