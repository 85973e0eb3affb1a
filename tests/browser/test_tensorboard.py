"""TensorBoard's own page, in a real browser, on the folder of a run: its first chart is the reward's curve.

`make test-browser` names the browser.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl.report.files import read_rows
from spmdrl.report.tensorboard import LAYOUT, TensorBoard
from tests.helpers.browser import Browser
from tests.helpers.recorded import SEEDS

CHROMIUM = os.environ.get("CHROMIUM")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="CHROMIUM names no browser; `make test-browser` does")
# The page is made of elements with trees of their own.
CARDS = """
(() => {
  const inside = (root, selector) => {
    const found = [...root.querySelectorAll(selector)];
    for (const one of root.querySelectorAll('*'))
      if (one.shadowRoot) found.push(...inside(one.shadowRoot, selector));
    return found;
  };
  return inside(document, 'tf-custom-scalar-multi-line-chart-card').map((card) => {
    const chart = inside(card.shadowRoot, 'vz-line-chart2')[0];
    const lines = chart ? inside(chart.shadowRoot || chart, 'path.line') : [];
    return {
      title: card.title,
      matches: inside(card.shadowRoot, '#matches-list-title')[0]?.textContent.trim(),
      names: inside(card.shadowRoot, '.match-list-entry').map((one) => one.textContent.trim().split(/\\s+/)[1]),
      points: Math.max(0, ...lines.map((line) => (line.getAttribute('d') || '').split('L').length)),
    };
  });
})()
"""


def test_the_first_chart_of_the_first_page_is_the_curve_of_the_reward(tmp_path: Path) -> None:
    rows = [row for row in read_rows(SEEDS[0] / "metrics.jsonl") if "reward/mean" in row]
    events = TensorBoard(tmp_path / "demo/tensorboard", start_step=-1)
    for row in rows:
        step = int(row["step"])
        events.write(step, {name: value for name, value in row.items() if name != "step" and value is not None})
        events.write_histograms(step, {"reward/mean": [0.0, 0.5, 1.0]})
    events.close()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path / "demo")]
    server = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        assert CHROMIUM is not None and server.stderr is not None
        address = next(line for line in server.stderr if " at http" in line).split(" at ")[1].split()[0]
        with Browser(CHROMIUM, tmp_path / "profile") as browser:
            browser.open(f"{address}#custom_scalars")
            browser.wait_for(lambda: any(card["points"] > 1 for card in browser.value(CARDS)))
            first = browser.value(CARDS)[0]
    finally:
        server.terminate()
        server.wait()
    assert next(iter(LAYOUT)) == "Outcome" and next(iter(LAYOUT["Outcome"])) == "reward"
    assert (first["title"], first["matches"], first["names"]) == ("reward", "Matches (1)", ["reward/mean"])
    assert first["points"] > len(rows) / 2
