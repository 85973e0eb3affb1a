"""launch/kubernetes.yaml: what Kubernetes accepts, and whose parts agree with each other."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from spmdrl.faults.verdict import EXIT_DIVERGED, EXIT_USER_ERROR

FILE = Path(__file__).parents[2] / "launch" / "kubernetes.yaml"


@pytest.fixture
def parts() -> dict[str, Any]:
    return {part["kind"]: part for part in yaml.safe_load_all(FILE.read_text(encoding="utf-8"))}


def test_kubernetes_accepts_the_manifest(parts: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate (108 MB of schemas)")
    for part in parts.values():
        validate.validate(part, "1.31", strict=True)


def test_ranks_meet_where_the_service_leads(parts: dict[str, Any]) -> None:
    service, job = parts["Service"], parts["Job"]["spec"]
    pod = job["template"]["spec"]
    (ranks,) = pod["containers"]
    options = dict(re.findall(r"--([a-z-]+) (\S+)", ranks["command"][2]))
    name = parts["Job"]["metadata"]["name"]
    # A pod of an indexed job has the job's name and its index for a host name.
    assert options["master-addr"] == f"{name}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert int(options["nnodes"]) == job["completions"] == job["parallelism"]
    assert int(options["nproc-per-node"]) == ranks["resources"]["limits"]["nvidia.com/gpu"]
    assert job["completionMode"] == "Indexed" and options["node-rank"] == '"$JOB_COMPLETION_INDEX"'


def test_what_would_not_help_is_not_repeated(parts: dict[str, Any]) -> None:
    pod_rules = parts["Job"]["spec"]["podFailurePolicy"]["rules"]
    (failing,) = [rule["onExitCodes"] for rule in pod_rules if rule["action"] == "FailJob"]
    assert failing["values"] == [EXIT_USER_ERROR, EXIT_DIVERGED]
    assert failing["containerName"] == parts["Job"]["spec"]["template"]["spec"]["containers"][0]["name"]


@pytest.mark.parametrize(("code", "requeue", "found"), [(0, False, 0), (0, True, 1), (2, False, 2), (3, True, 3)])
def test_a_pod_is_complete_only_when_the_run_is(
    parts: dict[str, Any], tmp_path: Path, code: int, requeue: bool, found: int
) -> None:
    (ranks,) = parts["Job"]["spec"]["template"]["spec"]["containers"]
    (tmp_path / "runs/mine").mkdir(parents=True)
    if requeue:
        (tmp_path / "runs/mine/requeue").touch()
    (tmp_path / "python").write_text(f'#!/bin/sh\necho "$*"\nexit {code}\n')
    (tmp_path / "python").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NAME": "mine", "JOB_COMPLETION_INDEX": "3"}
    command = [*ranks["command"], "c.toml", "run.name=mine"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == found
    assert "--node-rank 3 " in done.stdout and done.stdout.endswith("-m spmdrl.train c.toml run.name=mine\n")
    stop = ranks["lifecycle"]["preStop"]["exec"]["command"]
    subprocess.run(stop, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "runs/mine/stop").read_text() == "a pod has to go\n"
