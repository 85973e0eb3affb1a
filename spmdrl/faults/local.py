"""Run on this machine: `python -m spmdrl.faults.local RANKS MODULE CONFIG [section.key=value ...]`, from local.sh."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from spmdrl.faults.supervise import Requests, launch, tell

# Without --local-addr, rendezvous would use this machine's host name, which may not resolve.
STANDALONE = ("-m", "spmdrl.faults.torchrun", "--standalone", "--local-addr", "127.0.0.1")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    parser = argparse.ArgumentParser(description="Check a run, start its ranks on this machine, and say how it ended.")
    parser.add_argument("ranks", type=int)
    parser.add_argument("module", help="spmdrl.train or spmdrl.sft")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args(argv)
    command = [sys.executable, *STANDALONE, "--nproc-per-node", str(given.ranks)]
    with Requests() as requests:
        return tell(launch(given.module, given.arguments, num_ranks=given.ranks, command=command, requests=requests))


if __name__ == "__main__":
    sys.exit(main())
