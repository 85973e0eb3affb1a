"""Additions of ours to SGLang's scheduler: what it forgets when it begins to serve and when its weights have changed,
what it clears as it wakes, and what it checks once."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from spmdrl.engine.sglang import process as sglang_process
from tests.helpers.engine_ranks import run_engine_ranks

GARBAGE = 0x7F7F7F7F  # as a place in the cache, far beyond its end


class Serving(Exception):
    """The scheduler has begun to serve."""


class Starting:
    """A scheduler of which SGLang's event loop learns nothing: it ends with the first thing that it asks."""

    @property
    def device(self) -> NoReturn:
        raise Serving


def additions() -> tuple[int, list[list[int]], int, list[int]]:
    """How many objects the collector of garbage leaves out once a scheduler begins to serve; SGLang's table of places
    when its memory comes back with garbage in it, where a request holds row 2; how many images' features are left of
    one after a refit; and how often a model's modules were looked through after each of two buckets."""
    sglang_process.import_sglang()
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins import load_plugins

    from spmdrl.engine.sglang.scheduler import add_hooks

    add_hooks()
    load_plugins()  # the first thing that a scheduler does
    gc.unfreeze()  # what the process that forked this one has frozen
    with pytest.raises(Serving):
        Scheduler.run_event_loop(Starting())
    return gc.get_freeze_count(), table_after_waking(["kv_cache"]), features_after_a_refit(), searches_of_two_buckets()


def searches_of_two_buckets() -> list[int]:
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    searches: list[None] = []
    model = SimpleNamespace(modules=lambda: searches.append(None) or [], load_weights=lambda weights: None)
    updater = SimpleNamespace(get_model=lambda: model, _assert_weight_cache_inactive=lambda _: None)
    counts = []
    for _ in range(2):
        assert WeightUpdater.load_weights_from_distributed(updater, [])[0]
        counts.append(len(searches))
    return counts


def table_after_waking(tags: list[str]) -> list[list[int]]:
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    pool = ReqToTokenPool(2, 4, "cpu", enable_memory_saver=False)
    updater = object.__new__(SchedulerWeightUpdaterManager)
    updater.offload_tags = set(tags)
    updater.memory_saver_adapter = SimpleNamespace(resume=lambda tag: pool.req_to_token.fill_(GARBAGE))
    updater.scheduler = SimpleNamespace(disaggregation_mode=DisaggregationMode.NULL, req_to_token_pool=pool)
    reply = updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))
    assert reply is not None, "SGLang sends this"
    return pool.req_to_token.tolist()


def features_after_a_refit() -> int:
    from sglang.srt.managers import mm_schedule
    from sglang.srt.managers.io_struct import EndWeightUpdateReqInput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

    mm_schedule.init_mm_embedding_cache(2**20)
    assert mm_schedule.embedding_cache.set(1, EmbeddingResult(embedding=torch.ones(2, 3)))
    updater = object.__new__(SchedulerWeightUpdaterManager)
    updater._session = None
    assert updater.end_weight_update(EndWeightUpdateReqInput()) is not None, "SGLang sends this"
    return len(mm_schedule.embedding_cache)


def test_what_is_loaded_is_not_collected_again_and_padding_reads_the_spare_slot() -> None:
    ((frozen, table, num_features, searches),) = run_engine_ranks(1, additions)
    assert frozen > 100_000, "SGLang and torch have made more objects than that"
    assert table == [[0] * 4, [GARBAGE] * 4, [GARBAGE] * 4]
    assert num_features == 0
    assert searches[0] == searches[1] > 0
