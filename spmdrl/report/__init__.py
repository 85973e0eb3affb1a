"""Output of a run: console, metrics.jsonl, samples.jsonl, TensorBoard, curves."""

from spmdrl.report.report import Report
from spmdrl.report.run_folder import RunFolder

__all__ = ["Report", "RunFolder"]
