"""`python -m spmdrl.tools.compare RUN RUN [RUN ...]`: write curves, final values and differing settings as one page.

Runs that differ by their seed alone are one line, with a band from the lowest to the highest of them. With `--output`
ending in .png it is a picture of the curves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from spmdrl.config.strict import shown
from spmdrl.faults.text import Parser, say
from spmdrl.report.comparison import compare, comparison_page
from spmdrl.report.curves import draw_comparison
from spmdrl.report.run_folder import read_steps
from spmdrl.tools.program import program, writing


def write_comparison(paths: Sequence[Path], output: Path) -> None:
    """Write a page, or a picture where the output's name ends in .png. Raises UserError for a run without a step."""
    compared = compare([read_steps(path) for path in paths])
    with writing(output):
        if output.suffix == ".png":
            draw_comparison(compared, output)
        else:
            output.write_text(comparison_page(compared), encoding="utf-8")


@program("cannot compare")
def main(argv: Sequence[str] | None = None) -> None:
    """Compare, and say where the page is."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run's folder, such as runs/demo")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, default=Path("compare.html"), help="default: %(default)s"
    )
    arguments = parser.parse_args(argv)
    write_comparison(arguments.runs, arguments.output)
    say(f"wrote {shown(arguments.output)}")


if __name__ == "__main__":
    sys.exit(main())
