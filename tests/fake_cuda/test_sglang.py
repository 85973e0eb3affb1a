"""SGLang's own CUDA processes on stand-ins for CUDA's libraries, started by this package: arguments, graphs, refits by
handle, answers, sleep, wake, abort and the end. Numbers that kernels compute are garbage; see README.md."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from spmdrl.engine.sglang import adapters as sglang_adapters
from spmdrl.refit.refit import RefitMismatch
from tests.fake_cuda.build import environment, missing
from tests.helpers.models import save_qwen3, save_qwen3_moe
from tests.helpers.sglang_adapters import loaded
from tests.helpers.sglang_engine import Rank, answers, greedy, prompts, rank_with_engine, settings

ROOT = Path(__file__).parents[2]
STARTUP = Path(__file__).parent / "startup"
MIB = 2**20
SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 8, "vocab_size": 1024}
SIZES = [1, 2, 4, 8, 12, 16]  # rows of a graph, up to `rollout.max_running`
NVCC = shutil.which("nvcc")
TRITON: dict[str, Any] = {"attention_backend": "triton", "sglang": {"sampling_backend": "pytorch"}}
# Of a case: the number of ranks that share the engine, and settings that differ.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "by default": (1, {}),
    "host memory": (1, {"refit": {"transport": "shared_memory", "bucket_bytes": MIB}} | TRITON),
    "adapters": (1, {"lora": {"rank": 8}} | TRITON),
    "adapters beside experts": (1, {"lora": {"rank": 8, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}} | TRITON),
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),  # SGLang compiles kernels at its first start
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed"),
    pytest.mark.skipif(NVCC is None, reason="nvcc is not installed, with which SGLang compiles kernels"),
]


@pytest.fixture(scope="module", params=["by default", "host memory"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The `record` of a case, and its name."""
    return record(tmp_path_factory.mktemp("sglang"), request.param) | {"case": request.param}


def record(folder: Path, case: str) -> dict[str, Any]:
    """Run a case; return what the rank that leads the engine saw."""
    num_ranks, _ = CASES[case]
    if "experts" in case:
        save_qwen3_moe(folder / "model", **SHAPE, num_experts=8, moe_intermediate_size=256)
    else:
        save_qwen3(folder / "model", **SHAPE)
    (folder / "log").mkdir()
    variables = environment(folder / "log", devices=num_ranks) | {
        "PYTHONPATH": os.pathsep.join([str(STARTUP), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "FAKE_CUDA_COPY_KIB": "8192",  # all weights, and no KV cache
        "OMP_NUM_THREADS": "1",
        "CUDA_HOME": _cuda_home(),
        "TRITON_INTERPRET": "0",
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [*launcher, "-m", "tests.fake_cuda.test_sglang", str(folder), case]
    done = subprocess.run(command, env=os.environ | variables, cwd=ROOT, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-42000:]
    found: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return found


def test_it_starts_with_the_kernels_of_the_device_and_captures_a_graph_for_each_size(seen: dict[str, Any]) -> None:
    assert seen["at start"]["api: captured graph"] == len(SIZES)
    names = [name for name in seen["at end"] if name.startswith("kernel: ")]
    is_triton = seen["case"] == "host memory"
    assert any("FlashAttnFwdSm90" in name for name in names) != is_triton
    assert seen["at end"]["api: cudaGraphLaunch"] > 0
    assert not [name for name in seen["at end"] if name.startswith("violation: ")]


def test_weights_arrive_by_handles_that_are_opened_once(seen: dict[str, Any]) -> None:
    """Each refit compares the digest of every weight, and each has other weights than the one before."""
    opened = seen["at end"].get("api: cudaIpcOpenMemHandle", 0) - seen["at start"].get("api: cudaIpcOpenMemHandle", 0)
    # Two buffers, which torch may have cut from one block of memory, for three refits.
    assert opened in ((0,) if seen["case"] == "host memory" else (1, 2))
    assert seen["buckets"] > 2
    first, second, third = seen["digests"]
    assert first.keys() == second.keys() == third.keys()
    assert all(first[name] != second[name] != third[name] for name in first)


def test_requests_are_answered_to_their_end(seen: dict[str, Any]) -> None:
    """Tokens are garbage: an id that is none ends a response early."""
    for answered in seen["answers"]:
        for tokens, logprobs, reason, spans in answered["responses"]:
            assert tokens == logprobs and 0 < tokens <= 16
            assert reason == "length" or tokens < 16
            assert spans == [[answered["version"], tokens]]
    assert seen["answers"][0]["responses"][0][2] == "length"


def test_an_abort_ends_what_runs(seen: dict[str, Any]) -> None:
    assert len(seen["aborted"]) == 5
    assert "abort" in (reason for _, reason in seen["aborted"])
    assert all(tokens < 80 for tokens, _ in seen["aborted"])


def test_sleep_gives_the_memory_back_and_wake_takes_it(seen: dict[str, Any]) -> None:
    free, total = seen["free"], seen["total"]
    assert free["asleep"] - free["awake"] > 0.25 * total  # the cache had 0.3 of what was free
    assert free["refitted"] < free["asleep"]  # the memory of the weights is back
    assert abs(free["awake again"] - free["awake"]) < 256 * MIB


def test_an_engine_that_is_started_again_has_the_cache_of_the_first(seen: dict[str, Any]) -> None:
    """The trainer has 16 GiB more on the device by then."""
    first, again = seen["cache"]
    assert 0.98 < again / first <= 1


def test_no_process_and_no_memory_is_left(seen: dict[str, Any]) -> None:
    assert seen["alive"] == []
    assert seen["free"]["closed"] >= seen["free"]["before"] - 64 * MIB


@pytest.mark.parametrize("case", [case for case in CASES if "adapters" in case])
def test_adapters_go_from_host_memory_into_an_engine_that_got_the_base_in_device_memory(
    tmp_path: Path, case: str
) -> None:
    """The engine compares the digest of what it opens, and refuses what was changed on the way."""
    found = record(tmp_path, case)
    assert found["loaded"] == [["policy-0"], ["policy-1"], ["policy-2"]]
    assert found["refused"].startswith("after the refit to version 3 the engine does not hold")
    for version, answered in enumerate(found["answers"]):
        assert answered["version"] == version
        assert all(spans == [[version, tokens]] for tokens, _, _, spans in answered["responses"])
    assert found["alive"] == []


def _cuda_home() -> str:
    """Return the folder of the CUDA toolkit, which SGLang takes to be two above `nvcc`: that may be a script."""
    compiler = Path(NVCC or "").resolve()
    return os.environ.get("CUDA_HOME") or str(
        Path("/usr/local/cuda") if Path("/usr/local/cuda/bin/nvcc").exists() else compiler.parents[1]
    )


# ---- what each rank does ----


def main(folder: Path, case: str) -> None:
    num_ranks, changes = CASES[case]
    given = {"refit": {"bucket_bytes": MIB}, "memory_fraction": 0.3} | changes
    cfg = settings(str(folder / "model"), num_ranks, **given)
    seen: dict[str, Any] = {"answers": [], "digests": [], "free": {"before": _free_bytes()}}
    with rank_with_engine(cfg) as rank:
        for step in _adapters(rank, seen) if cfg.lora else _steps(rank, seen, folder / "log"):
            seen["free"][step] = _free_bytes()
        leads = rank.engine.leads
        processes = rank.engine._process.process_ids if leads else []  # type: ignore[attr-defined]
        del rank
    seen["alive"] = [number for number in processes if Path(f"/proc/{number}").exists()]
    seen["free"]["closed"], seen["total"] = _free_bytes(), torch.cuda.mem_get_info()[1]
    if leads:
        (folder / "seen.json").write_text(json.dumps(seen))


def _steps(rank: Rank, seen: dict[str, Any], log: Path) -> Iterator[str]:
    """Do one thing after the other, and name what memory is to be measured after."""
    engine: Any = rank.engine
    seen["at start"] = _counters(engine, log)
    yield "started"
    _refit(rank, seen, version=0)
    engine.wake()
    _answer(rank, seen, 4)
    seen["aborted"] = [(len(one.token_ids), one.finish_reason) for one in _aborted(engine)]
    yield "awake"  # with what the first requests take for good: modules, workspaces
    engine.sleep()
    yield "asleep"
    _refit(rank, seen, version=1)
    yield "refitted"
    engine.wake()
    yield "awake again"
    _answer(rank, seen, 11)
    _refit(rank, seen, version=2)
    _answer(rank, seen, 3)
    seen["at end"] = _counters(engine, log)
    seen["cache"] = [_cache_tokens(engine)]
    state = torch.empty(16 << 30, dtype=torch.uint8, device="cuda")  # as of an optimizer that stays on the device
    os.kill(engine._process.process_ids[0], signal.SIGKILL)
    while not engine._process.is_dead():
        time.sleep(0.05)
    engine.revive()
    seen["cache"].append(_cache_tokens(engine))
    del state


def _adapters(rank: Rank, seen: dict[str, Any]) -> Iterator[str]:
    """Load three versions of adapters, between which the engine sleeps, and one that is changed on the way."""
    seen["loaded"] = []
    rank.engine.differing = lambda _: []  # type: ignore  # of the base: experts are copied by a kernel, which does nothing
    for version in range(3):
        _refit(rank, seen, version=version)
        rank.engine.wake()
        seen["loaded"].append(sorted(loaded(rank)))
        _answer(rank, seen, 4)
        rank.engine.sleep()
        yield f"asleep after version {version}"
    real = sglang_adapters.digest

    def then_changed(memory: torch.Tensor) -> str:
        found = real(memory)
        memory[3] ^= 1
        return found

    with patch.object(sglang_adapters, "digest", then_changed):
        try:
            _refit(rank, seen, version=3)
        except RefitMismatch as error:
            seen["refused"] = str(error)


def _refit(rank: Rank, seen: dict[str, Any], *, version: int) -> None:
    """Change every weight that is trained, by the host because kernels do nothing, and load them into the engine."""
    on_host = sys.modules["sitecustomize"]._on_host
    for parameter in rank.policy.parameters():
        if parameter.requires_grad:
            with torch.no_grad():
                on_host(parameter.to_local()).mul_(1.5)
    rank.refit(version=version)
    seen["digests"].append(dict(rank.engine._expected))  # type: ignore[attr-defined]
    seen["buckets"] = len(rank.engine._buckets)


def _answer(rank: Rank, seen: dict[str, Any], number: int) -> None:
    responses = [
        (len(one.token_ids), len(one.logprobs), one.finish_reason, [[s.version, s.num_tokens] for s in one.spans])
        for one in answers(rank.engine, [greedy(ids, 16) for ids in prompts(number)])
    ]
    seen["answers"].append({"version": rank.engine.version, "responses": responses})


def _aborted(engine: Any) -> list[Any]:
    """The responses to requests of which all are aborted when the first one has ended."""
    found = []
    for _, response in engine.generate([greedy((5, 6, 7), 10), *(greedy(ids, 80) for ids in prompts(4))]):
        found.append(response)
        engine.abort()
    return found


def _cache_tokens(engine: Any) -> int:
    tokens: int = engine._process._engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"]
    return tokens


def _free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def _counters(engine: Any, log: Path) -> dict[str, int]:
    """Let the first of the engine's processes write its counters, and read them."""
    if not engine.leads:
        return {}
    number = engine._process.process_ids[0]
    path = log / str(number)
    path.unlink(missing_ok=True)
    os.kill(number, signal.SIGRTMIN)
    while not path.exists():
        time.sleep(0.05)
    lines = (line.split(" ", 1) for line in path.read_text().splitlines())
    return {name: int(count) for count, name in lines}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
