"""An engine that wakes gets back memory in which anything may stand."""

from __future__ import annotations

from types import SimpleNamespace

from spmdrl.engine.sglang import process as sglang_process
from tests.helpers.ranks import run_ranks

GARBAGE = 0x7F7F7F7F  # as a place in the cache, far beyond its end


def table_after_waking(tags: list[str]) -> list[list[int]]:
    """SGLang's table of places when its memory comes back with garbage in it; a request holds row 2."""
    sglang_process.import_sglang()
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.plugins import load_plugins

    from spmdrl.engine.sglang.scheduler import add_hooks

    add_hooks()
    load_plugins()  # the first thing that a scheduler does
    pool = ReqToTokenPool(2, 4, "cpu", enable_memory_saver=False)
    updater = object.__new__(SchedulerWeightUpdaterManager)
    updater.offload_tags = set(tags)
    updater.memory_saver_adapter = SimpleNamespace(resume=lambda tag: pool.req_to_token.fill_(GARBAGE))
    updater.scheduler = SimpleNamespace(disaggregation_mode=DisaggregationMode.NULL, req_to_token_pool=pool)
    reply = updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))
    assert reply is not None, "SGLang sends this"
    return pool.req_to_token.tolist()


def test_padding_reads_the_spare_slot_again() -> None:
    (rows,) = run_ranks(1, table_after_waking, ["kv_cache"], timeout_s=120.0)
    assert rows == [[0] * 4, [GARBAGE] * 4, [GARBAGE] * 4]
