"""Teachers before a run starts, what they count, and the term that sampled tokens have in the advantage."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from transformers import AutoConfig, Qwen3Config, Qwen3MoeConfig

from spmdrl.config import (
    Config,
    DistillConfig,
    ModelConfig,
    OtherModelConfig,
    ParallelConfig,
    SftConfig,
    TeacherConfig,
)
from spmdrl.config.plan import plan_problems
from spmdrl.conversation import Observation
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.dist.exchange import SequenceInfo
from spmdrl.memory.device import GIB
from spmdrl.memory.phase import PhaseMemory
from spmdrl.model.frozen import Follower, FrozenModel
from spmdrl.preflight.checks import (
    OpenedModel,
    _image_problem,
    first_difference,
    frozen_layout_problems,
    frozen_problems,
    top_token_problems,
)
from spmdrl.preflight.forecast import Model, Prediction, predict
from spmdrl.preflight.inputs import open_inputs
from spmdrl.step.batch import _Weighting, _weights, lay_end_to_end, to_sequences
from spmdrl.step.hints import Lessons, hinted, unhinted
from spmdrl.step.teachers import penalty, sampled_metrics, teacher_lines
from spmdrl.tools.tiny_model import character_tokenizer, save_tiny_model
from spmdrl.types import (
    NO_TEACHER,
    Hint,
    MicroBatch,
    Prompt,
    Response,
    RewardedRollout,
    RewardOutcome,
    Span,
    Trajectory,
    UserError,
)
from tests.helpers.configs import minimal_config, plan_for
from tests.helpers.models import QWEN3, needs_expert_plans, save_qwen3
from tests.helpers.rollouts import one_turn
from tests.helpers.sequences import random_sequences
from tests.helpers.vision import save_processor
from tests.helpers.vision_models import save_qwen3_vl, save_qwen3_vl_moe

PAGE = Path(__file__).parents[2] / "docs" / "distillation.md"
MATHS = {"kind": "jsonl", "path": "a", "task": "maths"}
STYLE = {"kind": "jsonl", "path": "b", "task": "style"}


def config(distill: dict[str, Any], **tables: dict[str, Any]) -> Config:
    models = {"big": {"path": "big"}, "old": {"path": "old"}}
    named = {one["model"] for one in distill.get("teachers", [])} | {distill.get("teacher")}
    data = {"sources": [MATHS, STYLE]}
    used = {name: model for name, model in models.items() if name in named}
    return minimal_config(models=used, distill=distill, data=data, **tables)


def test_sources_have_the_teacher_that_names_them_or_the_one_of_all_others() -> None:
    one = DistillConfig(teacher="big")
    assert [one.teacher_of(task) for task in ("maths", "style")] == [0, 0]
    both = config({"teachers": [{"model": "big", "tasks": ["style"]}, {"model": "old"}]}).distill
    assert [both.teacher_of(task) for task in ("maths", "style")] == [1, 0]
    some = config({"teachers": [{"model": "big", "tasks": ["style"]}]}).distill
    assert both is not None and some is not None
    assert [some.teacher_of(task) for task in ("maths", "style")] == [NO_TEACHER, 0]


def test_teachers_are_described_before_a_run() -> None:
    some = {"model": "big", "tasks": ["style"], "hint_column": "answer"}
    assert [*teacher_lines(config({"teachers": [some, {"model": "old"}]}))] == [
        'teacher big of style: big, which sees the column "answer"',
        "teacher old of all other data sources: old",
    ]
    environment = {"source": {"kind": "class", "name": "a.py:A"}}
    (line,) = teacher_lines(config({"teacher": "big", "hint_column": "feedback"}, environment=environment))
    assert line.endswith("big, which sees what the environment said")
    assert [*teacher_lines(minimal_config())] == []


def test_the_reference_is_one_of_the_models() -> None:
    cfg = config({"teacher": "big", "teacher_temperature": 2.0}, loss={"kl_coef": 0.1})
    assert {name: one.path for name, one in cfg.frozen_models.items()} == {"big": "big", "reference": "m"}
    assert cfg.temperatures == {"big": 2.0, "reference": 1.0}
    own = minimal_config(loss={"kl_coef": 0.1}, models={"reference": {"path": "elsewhere"}})
    assert own.frozen_models["reference"].path == "elsewhere"
    adapted = minimal_config(
        lora={}, loss={"kl_coef": 0.1}, models={"base": {"adapters": "off"}}, distill={"teacher": "base"}
    )
    assert all(one.is_own_base for one in adapted.frozen_models.values()) and len(adapted.frozen_models) == 2


def test_the_policys_own_base_takes_its_own_experts_and_not_those_of_the_policy() -> None:
    state = {"adapters": "on", "temperature": 1.0}
    seen: list[tuple[Any, dict[str, Any]]] = []

    @contextmanager
    def changed(**changes: Any) -> Iterator[None]:
        before = dict(state)
        state.update(changes)
        yield
        state.update(before)

    class Model:
        adapters = SimpleNamespace(off=lambda: changed(adapters="off"))

        def at_temperature(self, value: float) -> AbstractContextManager[None]:
            return changed(temperature=value)

        def __call__(self, micro_batch: MicroBatch, *_: Any, **__: Any) -> None:
            seen.append((micro_batch.routes, dict(state)))

        hidden = top_tokens = __call__

    micro_batch = lay_end_to_end(random_sequences(2), {}, multiple=1)
    micro_batch = replace(micro_batch, routes=torch.zeros(len(micro_batch.token_ids), 1, 2, dtype=torch.int16))
    model: Any = Model()
    base = FrozenModel(model, 0.7, is_own_base=True)
    base(micro_batch)
    base.hidden(micro_batch, 0)
    base.top_tokens(micro_batch, 0, k=1, num_rows=1)
    assert seen == [(None, {"adapters": "off", "temperature": 0.7})] * 3
    assert state == {"adapters": "on", "temperature": 1.0}


def test_every_teacher_has_a_denominator_of_its_own() -> None:
    sequences = [dataclasses.replace(one, teacher=n % 3 - 1) for n, one in enumerate(random_sequences(6))]
    micro_batch = lay_end_to_end(sequences, {}, multiple=64, distill={(0, 0): 0.25, (0, 1): 3.0})
    assert micro_batch.distill_weights is not None
    for place, weight in ((0, 0.25), (1, 3.0)):
        tokens = sum(sum(one.loss_mask) for one in sequences if one.teacher == place)
        taught = micro_batch.taught_by(place)
        assert taught.sum() == tokens and set(micro_batch.distill_weights[taught].tolist()) == {weight}
    assert not micro_batch.taught_by(NO_TEACHER).any()


def test_an_algorithms_weight_counts_once_whatever_the_divergence() -> None:
    infos = [SequenceInfo(index=0, num_tokens=5, num_loss_tokens=4, rank=0, teacher=0, algorithm=1)]
    weightings = [_Weighting("token_mean", 0.0), _Weighting("token_mean", 0.0, weight=0.5)]
    for divergence, expected in (("reverse", 0.5 * 0.7 / 4), ("sampled_kl", 0.7)):  # the second is in the advantage
        distill = DistillConfig(teacher="big", coef=0.7, divergence=divergence)
        loss, more = _weights(infos, plan_for(1, 1), weightings, distill)
        assert loss == {0: pytest.approx(0.5 / 4)} and more["distill"][1, 0] == pytest.approx(expected)


def test_sampled_tokens_lose_what_the_teacher_finds_less_likely() -> None:
    first, second = (dataclasses.replace(one, teacher=n - 1) for n, one in enumerate(random_sequences(2)))
    micro_batch = lay_end_to_end([first, second], {}, distill={(0, 0): 0.5})
    old, teacher = torch.randn(2, len(micro_batch.token_ids))
    assert not penalty(micro_batch).any() and not sampled_metrics(micro_batch)
    asked = micro_batch.with_columns({"old_logprobs": old, "teacher_logprobs": teacher})
    taught = micro_batch.taught_by(0)
    expected = torch.where(taught, 0.5 * (old.double() - teacher.double()), 0.0)
    assert torch.equal(penalty(asked), expected)
    mean = sampled_metrics(asked)["distill/sampled_kl_nats"].value()
    assert mean == pytest.approx(float(2 * expected.sum() / taught.sum()))
    assert not penalty(micro_batch.with_columns({"old_logprobs": old, "teacher_logprobs": old})).any()


def prompt(**changes: Any) -> Prompt:
    settings = {"prompt_id": 0, "token_ids": (5, 6, 7), "text": "1+1=", "answer": "2", "task": "maths"}
    return Prompt(**(settings | {"metadata": {"hint": "count"}} | changes))


def test_a_teacher_sees_the_hint_in_its_prompt_and_the_policy_does_not() -> None:
    tokenizer, data = character_tokenizer(), minimal_config(data={"max_prompt_tokens": 16}).data
    table = {"model": "t", "hint_column": "hint"}
    distill = DistillConfig(teachers=(TeacherConfig(**table),), hint_template="{hint}: {question}", max_hint_tokens=4)
    place, hint = Lessons(distill, data, tokenizer)(prompt())
    assert (place, hint.num_replaced, tokenizer.decode(hint.token_ids)) == (0, 3, "count: 1+1=")
    _, answered = Lessons(DistillConfig(teacher="t", hint_column="answer"), data, tokenizer)(prompt())
    assert tokenizer.decode(answered.token_ids) == "2\n\n1+1="
    for metadata, sentence in ({}, "has no text in the hint_column"), ({"hint": "x" * 99}, "tokens with its hint"):
        with pytest.raises(UserError, match=sentence):
            Lessons(distill, data, tokenizer)(prompt(metadata=metadata))
    chat = character_tokenizer(chat=True)
    messages = ({"role": "system", "content": "s"}, {"role": "user", "content": "1+1="})
    _, told = Lessons(DistillConfig(teacher="t", hint_column="hint"), data, chat)(prompt(messages=messages))
    text = chat.apply_chat_template(
        [messages[0], {"role": "user", "content": "count\n\n1+1="}], add_generation_prompt=True, tokenize=False
    )
    assert tuple(chat.encode(text, add_special_tokens=False)) == told.token_ids


def test_a_teacher_sees_what_the_environment_said_of_the_attempt() -> None:
    data = minimal_config(data={"max_prompt_tokens": 16}).data
    distill = DistillConfig(teacher="t", hint_column="feedback", hint_template="It said: {hint}\n{question}")
    alone: Any = SimpleNamespace(size=lambda: 1)  # the mesh of one rank
    said = Observation(messages=({"role": "user", "content": "no: 3"},), done=True)
    response = Response(token_ids=(8, 9), logprobs=(0.0, 0.0), finish_reason="stop", spans=(Span(0, 2),))
    cut = one_turn(prompt(), response)
    earlier = replace(cut.turns[0], observation=Observation(messages=({"role": "user", "content": "go on"},)))
    last = replace(cut.turns[0], context_ids=(5,), observation=said)
    answered = replace(cut, trajectories=(Trajectory(turns=(earlier, last)),))
    for chat in (False, True):
        tokenizer = character_tokenizer(chat=chat)
        label = Lessons(distill, data, tokenizer)
        outcome = RewardOutcome(reward=0.0, parts={})
        rewarded = [RewardedRollout(index=n, rollout=one, outcome=outcome) for n, one in enumerate((answered, cut))]
        told, cut_short = to_sequences(rewarded, alone, label)
        text = "It said: no: 3"
        shown = [{"role": "user", "content": text}]
        expected = tokenizer.apply_chat_template(shown, tokenize=False) if chat else f"{text}\n"
        assert (told.teacher, cut_short.teacher, cut_short.hint) == (0, NO_TEACHER, Hint())
        assert told.hint == Hint(0, tuple(tokenizer.encode(expected, add_special_tokens=False)))
        seen = hinted(lay_end_to_end([told], {}))
        assert tuple(seen.token_ids.tolist()) == told.hint.token_ids + told.token_ids
        tokenizer.bos_token_id = told.hint.token_ids[0]
        begun = prompt(token_ids=(tokenizer.bos_token_id, 6))
        assert label(begun, "no: 3")[1] == Hint(1, told.hint.token_ids), "a text begins once"
        assert label(prompt(), "x" * 2000) == (NO_TEACHER, Hint()), "more than max_hint_tokens"


def test_values_of_a_hinted_micro_batch_go_back_to_their_tokens() -> None:
    first, second, third = random_sequences(3)
    hints = Hint(2, (7, 8, 9)), Hint(), Hint(1, (4,))
    sequences = [replace(one, hint=hint) for one, hint in zip((first, second, third), hints, strict=True)]
    micro_batch = lay_end_to_end(sequences, {}, multiple=64)
    routed = replace(micro_batch, routes=torch.zeros(len(micro_batch.token_ids), 1, 2, dtype=torch.int16))
    assert hinted(routed).routes is None, "a teacher that sees other tokens takes experts of its own"
    seen = hinted(micro_batch)
    expected = [(7, 8, 9, *first.token_ids[2:]), second.token_ids, (4, *third.token_ids[1:])]
    starts = [0, *itertools.accumulate(map(len, expected))]
    assert [tuple(seen.token_ids[a:b].tolist()) for a, b in itertools.pairwise(starts)] == expected
    assert seen.loss_mask.sum() == micro_batch.loss_mask.sum() and seen.seqlens[:3] == [*map(len, expected)]
    back = unhinted(seen.token_ids, micro_batch)
    replaced = torch.zeros(len(back), dtype=torch.bool)
    replaced[[0, 1, len(first.token_ids) + len(second.token_ids)]] = True
    assert torch.equal(back, torch.where(replaced, 0, micro_batch.token_ids))


def test_the_first_token_that_differs_is_named() -> None:
    assert first_difference({"a": 0, "b": 1}, {"a": 0, "b": 1}) == ""
    assert "token 1 is 'b' of the policy and 'c' of the other" in first_difference({"a": 0, "b": 1}, {"a": 0, "c": 1})
    assert "token 1 is none of the policy and 'b'" in first_difference({"a": 0}, {"a": 0, "b": 1})


LISTINGS = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("listing", LISTINGS)
def test_every_listing_of_the_page_is_a_configuration(listing: str) -> None:
    sources = [MATHS | {"task": task} for task in ("code", "style")]
    tables = {"data": {"sources": sources, "max_prompt_tokens": 8}} | tomllib.loads(listing)
    if "sft" in tables:
        whole = minimal_config().model_dump(include={"run", "model", "data", "optim", "pack"}, exclude_none=True)
        rows = {"sequences_per_step": 4, "max_response_tokens": 8}
        cfg: Config | SftConfig = SftConfig.model_validate(whole | tables | {"sft": rows | tables["sft"]})
    else:
        cfg = minimal_config(**tables)
    assert cfg.distill is not None and cfg.frozen_models.keys() == cfg.models.keys()


def test_recorded_responses_need_a_loss_over_the_vocabulary() -> None:
    whole = minimal_config().model_dump(include={"run", "model", "data", "optim", "pack"}, exclude_none=True)
    whole["sft"] = {"sequences_per_step": 4, "max_response_tokens": 8, "loss_coef": 0.0}
    with pytest.raises(ValueError, match=r"sft\.loss_coef = 0 leaves nothing to learn"):
        SftConfig.model_validate(whole)
    distill = {"models": {"t": {"path": "t"}}, "distill": {"teacher": "t", "divergence": "sampled_kl"}}
    with pytest.raises(ValueError, match="compares tokens that the policy sampled"):
        SftConfig.model_validate(whole | distill)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models: two of the same tokens, one with others, one with more rows than its tokenizer has tokens."""
    path = tmp_path_factory.mktemp("models")
    for name, options in {"m": {}, "big": {"num_layers": 3}, "words": {"words": ["zebra"]}}.items():
        save_tiny_model(path / name, num_layers=options.pop("num_layers", 2), **options)  # type: ignore[arg-type]
    return path


def problems(folder: Path, name: str, rows: int = 0, own_rows: int = 0, **tables: dict[str, Any]) -> list[str]:
    cfg = config({"teacher": "big"} | tables.pop("distill", {}), **tables)
    opened = []
    for one, more in (("m", own_rows), (name, rows)):
        settings = ModelConfig(path=str(folder / one))
        model_config = AutoConfig.from_pretrained(folder / one)
        model_config.vocab_size += more
        opened.append(OpenedModel(f'{one}.path = "{one}"', settings, model_config, name="big"))
    return list(frozen_problems(cfg, *opened, load_tokenizer(str(folder / "m"), trust_remote_code=False)))


def test_a_teacher_has_the_tokens_of_the_policy(folder: Path) -> None:
    assert problems(folder, "big") == []
    (other,) = problems(folder, "words")
    assert "token 99 is none of the policy and 'zebra' of the other" in other


def test_a_head_with_more_rows_is_cut_and_one_with_fewer_refused(folder: Path) -> None:
    assert problems(folder, "big", rows=8) == []
    (fewer,) = problems(folder, "big", own_rows=8)
    assert "its head has 99 rows, fewer than the 107" in fewer
    assert problems(folder, "big", own_rows=8, distill={"divergence": "sampled_kl"}) == []
    assert problems(folder, "big", own_rows=8, distill={"top_k": 4}) == []
    (split,) = problems(folder, "big", rows=1, parallel={"tp": 2})
    assert "parallel.tp = 2 would divide unequally" in split


def test_a_teacher_sees_the_images_of_the_policy(tmp_path: Path) -> None:
    for name, save in (("m", save_qwen3_vl), ("big", save_qwen3_vl_moe), ("bare", save_qwen3_vl), ("old", save_qwen3)):
        save(tmp_path / name)
    for name, changes in (("m", {}), ("big", {}), ("dark", {"image_mean": [0.0] * 3})):
        save_processor(tmp_path / name, **changes)
    shutil.copy(tmp_path / "bare/config.json", tmp_path / "dark")

    def problem(name: str) -> str | None:
        settings = [ModelConfig(path=str(tmp_path / one)) for one in ("m", name)]
        policy, model = (
            OpenedModel(f'x.path = "{one.path}"', one, AutoConfig.from_pretrained(one.path), name=name)
            for one in settings
        )
        return _image_problem(config({"teacher": "big"}), policy, model)

    assert problem("big") is None
    assert "and the other model does not, or has others in their places" in str(problem("old"))
    assert "its processor has image_mean = (0.0, 0.0, 0.0)" in str(problem("dark"))
    with pytest.raises(UserError, match=r"models\.bare\.path = .* has no preprocessor_config\.json"):
        problem("bare")


def test_the_most_probable_tokens_are_not_all(folder: Path) -> None:
    policy = OpenedModel('model.path = "m"', ModelConfig(path="m"), AutoConfig.from_pretrained(folder / "m"))
    (too_many,) = top_token_problems(config({"teacher": "big", "top_k": 99}), policy)
    assert too_many == 'distill.top_k = 99 is not below the 99 tokens of model.path = "m"; remove it'
    assert list(top_token_problems(config({"teacher": "big", "top_k": 98}), policy)) == []


def test_a_teacher_that_is_not_there_is_named_with_its_setting(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    cfg = minimal_config(
        model={"path": str(folder / "m")},
        data={"sources": [{"kind": "jsonl", "path": f"{tmp_path}/a.jsonl"}]},
        models={"big": {"path": "nowhere"}},
        distill={"teacher": "big"},
        run={"dir": str(tmp_path)},
    )
    with pytest.raises(UserError, match=r'^models\.big\.path = "nowhere" does not exist'):
        open_inputs(cfg, num_ranks=1)


def predicted(cfg: Config, gib: float = 80) -> Prediction:
    teacher = Model.read(QWEN3, ModelConfig(path="big"))
    model = Model.read(QWEN3, ModelConfig(path="m"), frozen_models={"big": teacher} if cfg.models else {})
    return predict(cfg, model, num_ranks=2, device_bytes=int(gib * GIB), on_gpu=True)


def phases(cfg: Config) -> dict[str, PhaseMemory]:
    return {phase.name: phase for phase in predicted(cfg).phases}


def test_teachers_are_counted_where_they_rest_and_where_their_heads_are() -> None:
    shard = sum(shape.numel() for shape in map(torch.Size, Model.read(QWEN3, ModelConfig(path="m")).shapes.values()))
    alone, host = phases(minimal_config()), phases(config({"teacher": "big"}))
    assert host["forward-backward"].host["frozen models"] == 4 * shard // 2
    assert host["forward-backward"].device["heads of teachers"] == 2 * 1000 * 64
    assert host["forward-backward"].host["hidden states of teachers"] == 8 * 8 * 64 * 2  # 16 rollouts on 2 ranks
    top = phases(config({"teacher": "big", "top_k": 16}))["forward-backward"]
    assert "heads of teachers" not in top.device and top.host["hidden states of teachers"] == 8 * 8 * 16 * 12
    assert "logprobs" in host and "logprobs" not in alone
    on_device = config({"teacher": "big", "divergence": "sampled_kl"})
    big = on_device.models["big"].model_copy(update={"rests_on": "device"})
    resident = phases(on_device.model_copy(update={"models": {"big": big}}))
    more = resident["rollout"].device["trainer"] - alone["rollout"].device.get("trainer", 0)
    assert more == 4 * shard // 2 and "frozen models" not in resident["forward-backward"].host
    assert "heads of teachers" not in resident["forward-backward"].device


def changed(cfg: Config, **settings: Any) -> Config:
    """The settings with others of the table of the teacher."""
    big = OtherModelConfig.model_validate({"path": "big"} | settings)
    return cfg.model_copy(update={"models": {"big": big}})


def test_a_model_that_is_gathered_once_is_counted_whole_and_refused_where_it_does_not_fit() -> None:
    whole = sum(shape.numel() for shape in map(torch.Size, Model.read(QWEN3, ModelConfig(path="m")).shapes.values()))
    usual = config({"teacher": "big", "divergence": "sampled_kl"})
    once = changed(usual, reshard_after_forward=False)
    of_policy = phases(usual)["logprobs"].device["gathered"] // 2  # and as much of the teacher
    assert phases(once)["logprobs"].device["gathered"] == of_policy + 2 * whole
    assert not predicted(once).problems
    named = "models.big.reshard_after_forward = false has the whole model on the device"
    assert [named in one for one in predicted(once, gib=0.5).problems].count(True) == 1
    assert not any(named in one for one in predicted(usual, gib=0.5).problems)


def test_a_reward_model_that_is_gathered_once_has_a_sleeping_trainer_beside_it() -> None:
    term = {"kind": "model", "path": "r", "reshard_after_forward": False}
    wide = Qwen3Config(**QWEN3.to_dict() | {"vocab_size": 2**21})
    scorer = Model.read_critic(wide, ModelConfig(path="r"))
    model = Model.read(wide, ModelConfig(path="m"), frozen_models={"reward.terms.0": scorer})

    def beside(trainer: str) -> str:
        cfg = minimal_config(reward={"terms": [term]}, offload={"trainer": trainer})
        problems = predict(cfg, model, num_ranks=2, device_bytes=GIB // 8, on_gpu=True).problems
        return next(one for one in problems if one.startswith("reward.terms.0.reshard_after_forward = false"))

    awake, asleep = (re.search(r"beside ([0-9.]+) GiB", beside(trainer)) for trainer in ("none", "all"))
    assert awake and asleep
    size = model.size(ParallelConfig(), num_training=2)
    moved = 12 * size.shard / GIB
    assert moved > 0.7 and float(awake[1]) - float(asleep[1]) == pytest.approx(moved, abs=0.1)


def test_a_teacher_has_a_layout_of_its_own() -> None:
    usual = config({"teacher": "big"}, parallel={"dp_replicate": 2})
    two, shared = (phases(changed(usual, parallel={"dp_replicate": n}))["load"].host["frozen models"] for n in (2, 1))
    assert two == 2 * shared == phases(usual)["load"].host["frozen models"]
    (copies,) = plan_problems(changed(usual, parallel={"dp_replicate": 3}), 4)
    assert copies.startswith("models.big.parallel.dp_replicate = 3 does not divide the 4 shares of a step")
    (own,) = plan_problems(changed(usual, parallel={"ep": 3}), 4)
    assert own.startswith("models.big.parallel.ep = 3 does not divide the 2 ranks that hold one copy of the model")
    of_policy = changed(config({"teacher": "big"}, parallel={"ep": 2}), parallel={"dp_replicate": 4})
    (inherited,) = plan_problems(of_policy, 4)
    assert inherited.startswith("parallel.ep = 2 does not divide the 1 ranks that hold one copy of the model (4 that")
    instead = "set models.big.parallel.ep to 1 for a model without experts, else to a divisor of 1"
    assert inherited.endswith(instead)
    assert [*plan_problems(changed(of_policy, parallel={"dp_replicate": 4, "ep": 1}), 4)] == []


@needs_expert_plans
def test_the_experts_of_a_teacher_are_divided_by_its_own_setting() -> None:
    dense = OpenedModel('models.big.path = "big"', ModelConfig(path="big"), QWEN3, name="big")
    experts = dataclasses.replace(dense, config=Qwen3MoeConfig(num_experts=6, architectures=["Qwen3MoeForCausalLM"]))

    def problems(model: OpenedModel, ep: int, own_ep: int | None = None, tp: int = 1) -> list[str]:
        cfg = changed(config({"teacher": "big"}, parallel={"ep": ep, "tp": tp}), parallel={"ep": own_ep})
        return list(frozen_layout_problems(cfg, dense, [model]))

    assert not problems(dense, 2) and not problems(experts, 2) and not problems(experts, 4, own_ep=3)
    assert problems(dense, 1, own_ep=2)[0].startswith("models.big.parallel.ep = 2, but there is no ep plan for Qwen3")
    assert not problems(dense, 2, own_ep=1)
    (inherited,) = problems(experts, 4)
    assert inherited.startswith("models.big: parallel.ep = 4 does not divide the 6 experts of ")
    assert inherited.endswith("; for this model alone set models.big.parallel.ep")
    assert problems(dense, 1, tp=3)[0].startswith("models.big: parallel.tp = 3 does not divide ")


def test_a_lagged_copy_is_the_policy_of_some_steps_ago() -> None:
    assert followed({"weights": "lagged", "every_steps": 2}) == [1.0, 1.0, 3.0, 3.0]


def test_an_average_is_that_of_all_steps() -> None:
    average, slow = followed({"weights": "average", "decay": 0.75}), [1.0]
    for value in (2.0, 3.0, 4.0):
        slow.append(0.75 * slow[-1] + 0.25 * value)
    assert average == slow
    assert Follower.of(OtherModelConfig(weights="average"), ANY).decay == 0.99
    assert Follower.of(OtherModelConfig(weights="lagged"), ANY).every_steps == 10


def followed(settings: dict[str, Any]) -> list[float]:
    """The weight of a copy before each of four steps, where the policy's is 1 and grows by 1 with each step."""
    policy, copy = (_OneWeight() for _ in range(2))
    follower, seen = Follower.of(OtherModelConfig(**settings), copy), []
    for step in range(1, 5):
        seen.append(copy.weight.item())
        policy.weight.data += 1.0
        follower.follow(policy, step)
    return seen


class _OneWeight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))


def test_a_teachers_right_answers_become_rows_to_imitate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    item = {"prompt": "2 + 2 =", "responses": [" 4", " 5"], "right": [True, False]}
    (tmp_path / "answers.jsonl").write_text(json.dumps(item) + "\n")
    (listing,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    exec(listing, {})
    assert [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()] == [
        {"prompt": "2 + 2 =", "response": " 4"}
    ]
