"""Evaluate a model by lm-eval-harness, in its own environment: `python lm_eval_scores.py JOB.json` writes its `out`.

Each of a job's `runs` is one call of `simple_evaluate`; its scores and the responses to each item go into the file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager


def evaluate(job_file: str) -> None:
    """Run a job."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    tasks = TaskManager(include_path=job["tasks"], include_defaults=False)
    found = []
    for settings in job["runs"]:
        done = simple_evaluate(**settings, task_manager=tasks, bootstrap_iters=0, log_samples=True)
        samples = {
            task: [sample["resps"] for sample in sorted(rows, key=lambda row: row["doc_id"])]
            for task, rows in done["samples"].items()
        }
        found.append({"scores": done["results"], "responses": samples})
    Path(job["out"]).write_text(json.dumps(found, default=str), encoding="utf-8")


if __name__ == "__main__":
    evaluate(sys.argv[1])
