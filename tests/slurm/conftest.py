"""The cluster and the model that the drill's jobs share, and the report of what happened."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.slurm_cluster import Cluster, Missing
from tests.helpers.slurm_drill import Drill
from tests.helpers.slurm_runs import LastingRun
from tests.helpers.small_run import sums_from_files, write_small_run


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes on this machine."""
    path = tmp_path_factory.mktemp("slurm")
    path.parent.chmod(0o755)
    path.parent.parent.chmod(0o755)
    made = Cluster(path / "cluster")
    try:
        made.start()
    except Missing as reason:
        pytest.skip(f"tests/slurm needs SLURM: {reason}")
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def drill(cluster: Cluster) -> Drill:
    """The report."""
    return Drill(cluster)


@pytest.fixture(scope="session")
def folder(cluster: Cluster) -> Path:
    """A folder with a small run's model, data, reward and configuration."""
    path = cluster.folder.parent / "runs-of-jobs"
    path.mkdir()
    tables = sums_from_files(path)
    write_small_run(path, model={"num_layers": 2, "spare_tokens": 1}, report={"tensorboard": False}, **tables)
    return path


@pytest.fixture(scope="session")
def _lasting(cluster: Cluster, folder: Path) -> LastingRun:
    return LastingRun(cluster, folder)


@pytest.fixture
def lasting(_lasting: LastingRun) -> LastingRun:
    """A run that goes on in a job, and has just saved a step."""
    _lasting.be_there()
    return _lasting


@pytest.fixture(autouse=True)
def _at_rest(request: pytest.FixtureRequest, cluster: Cluster) -> None:
    """No drill meets what another one has left, except the run that lasts."""
    if "lasting" not in request.fixturenames:
        cluster.settle()


@pytest.fixture(scope="session")
def interpreter() -> Path:
    """A Python of this version that every user may run."""
    found = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
    if not found.exists():
        pytest.skip(f"there is no {found}, which another user could run")
    return found
