"""Draw the curves of one run, or of several in one picture: `python -m spmdrl.tools.plot RUN [RUN ...] [--out PNG]`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from spmdrl.config.strict import shown
from spmdrl.faults.text import Parser, one_line, say
from spmdrl.report.curves import draw_curves
from spmdrl.report.run_folder import RunFolder, read_steps
from spmdrl.tools.program import program


@program("cannot draw")
def main(argv: Sequence[str] | None = None) -> None:
    """Draw, and say where the picture is."""
    parser = Parser(prog="python -m spmdrl.tools.plot", description=__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run's folder, such as runs/demo")
    parser.add_argument("--out", metavar="PNG", type=Path, help="default: RUN/curves.png; for several runs curves.png")
    given = parser.parse_args(argv)
    out = given.out or (RunFolder(given.runs[0]).curves if len(given.runs) == 1 else Path("curves.png"))
    if out.suffix != ".png":
        parser.error(f"--out {out}: curves are drawn as PNG; give the file a name that ends in .png")
    draw_curves({label: read_steps(run).rows for label, run in zip(_labels(given.runs), given.runs, strict=True)}, out)
    say(f"wrote {shown(out)}")


def _labels(runs: list[Path]) -> list[str]:
    """Label runs by the names of their folders, or by their paths if the names are not unique."""
    names = [Path(os.path.realpath(run)).name for run in runs]
    return [one_line(name) for name in (names if len(set(names)) == len(names) else map(str, runs))]


if __name__ == "__main__":
    sys.exit(main())
