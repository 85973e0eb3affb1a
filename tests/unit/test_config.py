"""Reading settings: the user reads every mistake at once, each with its place and with the name that was meant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tomlkit
from pydantic import ValidationError

from spmdrl.config import Config, LossConfig, MissingSetting, Section, SftConfig, read_config, read_draft
from spmdrl.config.base import rules_of
from spmdrl.config.errors import all_keys, settings_in
from spmdrl.types import UserError
from tests.helpers.config_file import GOOD, problems, read


def test_overrides_replace_what_the_file_says(tmp_path: Path) -> None:
    cfg = read(tmp_path, GOOD, "optim.lr=3e-6", "run.name=other-name", 'model.attention="sdpa"', "eval.num_prompts=3",
               'eval.sources=[{kind="jsonl",path="e.jsonl"}]')  # fmt: skip
    assert (cfg.optim.lr, cfg.run.name, cfg.model.attention) == (3e-6, "other-name", "sdpa")
    assert cfg.eval is not None and cfg.eval.num_prompts == 3
    assert cfg.rollout == read(tmp_path).rollout


def test_nothing_can_be_changed_afterwards(tmp_path: Path) -> None:
    with pytest.raises(ValidationError):
        read(tmp_path).optim.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wrong", "right", "sentence"),
    [
        ("group_size = 2", "grup_size = 2", "rollout.grup_size: no such setting; did you mean rollout.group_size?"),
        ("group_size = 2", "lr = 2", "rollout.lr: no such setting; did you mean optim.lr?"),
        ("group_size = 2", "group_size = 0", "rollout.group_size = 0: input should be greater than or equal to 1"),
        ("group_size = 2", "group_size = 1", 'group_size = 1 leaves advantage.estimator = "grpo" no other rollout'),
        ("group_size = 2", 'group_size = "2"', 'rollout.group_size = "2": input should be a valid integer'),
        ("lr = 1e-3", "lr = -1.0", "optim.lr = -1.0: input should be greater than 0"),
        ("lr = 1e-3", "", "optim.lr: required, not set"),
        ('kind = "exact"', 'kind = "exat"', 'reward.terms.0.kind: must be one of "exact", "math", "reasoning_gym"'),
        ('kind = "exact"', 'kind = "exact", wieght = 1', "reward.terms.0.wieght: no such setting; did you mean"),
        ('task = "chain_sum"', 'taks = "chain_sum"', "data.sources.1.taks: no such setting; did you mean"),
        (
            "max_tokens_per_micro_batch = 64",
            "",
            "pack: set one of max_tokens_per_micro_batch and sequences_per_micro_batch",
        ),
        ("[optim]", '[loss]\nkl_coef = 0.1\nkl_estimator = "k1"\n[optim]', "zero expected gradient on-policy"),
        ("[optim]", "[loss]\ndual_clip = 1.1\n[optim]", "would undo"),
        ("lr = 1e-3", 'lr = 1e-3\nschedule = "wsd"', "set both or neither"),
        (
            "group_size = 2",
            "group_size = 2\npartial = true\ndynamic_sampling = true",
            "partial = true with oversample_fraction = 0 trains on all prompts in their order",
        ),
        ("group_size = 2", "group_size = 2\nmax_draw_ratio = 2.0", "max_draw_ratio has no meaning"),
        ("group_size = 2", "group_size = 2\nmax_staleness = 2", "max_staleness has no meaning"),
        (
            "group_size = 2",
            "group_size = 2\ndynamic_sampling = true\nmax_draw_ratio = 1.25\noversample_fraction = 0.5",
            "does not allow the 1.5 times",
        ),
        (
            "max_response_tokens = 5",
            'max_response_tokens = 5\noversample_fraction = 0.5\npartial = true\n[correction]\nold = "rollout"',
            'correction.old = "rollout" needs tokens that the weights before the update sampled',
        ),
        ("[optim]", '[correction]\nkind = "mis"\n[optim]', 'correction: kind = "mis" needs a mode'),
        ("[optim]", '[advantage]\nestimator = "rloo"\ndivide_by_std = true\n[optim]', "has no meaning"),
        (
            "[optim]",
            '[[distill.teachers]]\nmodel = "t"\nwieght = 0.5\n[optim]',
            "distill.teachers.0.wieght: no such setting; did you mean distill.teachers.0.weight?",
        ),
        (
            "[optim]",
            '[[distill.teachers]]\nmodel = "t"\nrewarded = false\n[optim]',
            'distill.teachers.0.rewarded: no such setting; for rewarded = false, set advantage.estimator = "none" in',
        ),
    ],
)
def test_a_problem_is_one_sentence_with_its_place(tmp_path: Path, wrong: str, right: str, sentence: str) -> None:
    assert wrong in GOOD
    found = problems(tmp_path, GOOD.replace(wrong, right))
    assert any(sentence in line and line.startswith("c.toml:") for line in found), found


def test_the_line_is_that_of_the_key(tmp_path: Path) -> None:
    text = GOOD.replace("group_size = 2", "group_size = 0")
    line = text.splitlines().index("group_size = 0") + 1
    assert problems(tmp_path, text)[0].startswith(f"c.toml:{line}: rollout.group_size = 0")


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("group_size = 2", "grup_size = 2").replace("lr = 1e-3", "")
    found = problems(tmp_path, text, "runn.name=y", "nonsense", "run.num_steps=abc")
    for part in ("grup_size", "optim.lr: required", "runn: no such setting", "'nonsense'", "run.num_steps"):
        assert any(part in line for line in found), (part, found)
    assert any(line.startswith("on the command line: run.num_steps") for line in found)
    assert not any("traceback" in line.lower() for line in found)


def test_files_that_are_not_configurations(tmp_path: Path) -> None:
    assert "not valid TOML" in problems(tmp_path, "[run\n")[0]
    with pytest.raises(UserError, match="cannot read the configuration"):
        read_config(Config, str(tmp_path / "absent.toml"), [])
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        read_config(Config, str(tmp_path / "binary.toml"), [])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["loss.kind=pop"], 'loss.kind = "pop" is not known; use one of "ppo", "gspo"'),
        (["loss.kind=cispo", "loss.dual_clip=3.0"], 'dual_clip has no meaning for kind = "cispo"'),
        (["loss.tau_positive=1.0"], 'tau_positive has no meaning for kind = "ppo"'),
        (["loss.kind=a:b", "loss.clip_low=0.1"], 'clip_low has no meaning for kind = "a:b"'),
        (["loss.params={ x = 1 }"], 'params has no meaning for kind = "ppo"'),
        (["loss.kind=clip_cov", "loss.cov_low=6.0"], "cov_low = 6 leaves no covariance below cov_high = 5"),
        (["loss.kind=kl_cov"], "nothing to hold back with updates_per_step = 1"),
        (["loss.stop_kl_nats=0.1"], "stop_kl_nats has no meaning with updates_per_step = 1"),
        (["loss.entropy_coef_change=0.1"], "entropy_coef_change has no meaning without entropy_target_nats"),
        (["loss.entropy_coef=-0.1", "loss.entropy_target_nats=0.5"], "lowers the entropy"),
        (["advantage.k=2"], 'k has no meaning for estimator = "grpo"'),
        (["advantage.estimator=pass_at_k"], "advantage.k = 4 of rollout.group_size = 2"),
        (["critic.lr=1e-3"], 'advantage.estimator = "grpo" asks no critic, so that [critic] has no meaning'),
        (["advantage.estimator=gae", "critic.warmup_steps=9"], "critic.warmup_steps = 9 leaves no step of run."),
        (["advantage.estimator=gae", "loss.kind=gspo"], "knows one advantage for all tokens"),
        (["advantage.gae_lambda=0.9"], 'gae_lambda has no meaning for estimator = "grpo"'),
        (["advantage.estimator=reinforce_plus_plus", "loss.kind=gspo"], "knows one advantage for all tokens"),
        (["advantage.estimator=remax", "reward.kl_coef=0.1"], "compares with a greedy response, which policy and"),
        (["advantage.estimator=reinforce_plus_plus", "rollout.dynamic_sampling=true"], "do teach something"),
        (["reward.kl_coef=0.1", "loss.kl_coef=0.1"], "would count the divergence to the reference twice"),
        (["reward.kl_target_nats=0.1"], "kl_target_nats has no meaning without kl_coef"),
        (["reward.kl_coef=0.1", "reward.kl_horizon=5"], "kl_horizon has no meaning without kl_target_nats"),
        (["reward.overlong_penalty=2.0"], "overlong_penalty has no meaning without overlong_tokens"),
        (["reward.overlong_tokens=5"], "not below rollout.max_response_tokens = 5"),
    ],
)
def test_an_algorithm_that_cannot_be_is_refused(tmp_path: Path, overrides: list[str], expected: str) -> None:
    (problem,) = problems(tmp_path, GOOD, *overrides)
    assert expected in problem


@pytest.mark.parametrize("kind", ["gspo", "gmpo"])
def test_a_loss_of_sequences_takes_no_correction_of_tokens(tmp_path: Path, kind: str) -> None:
    def found(*correction: str) -> list[str]:
        return problems(tmp_path, GOOD, f"loss.kind={kind}", *(f"correction.{setting}" for setting in correction))

    (problem,) = found("kind=tis")
    assert problem.startswith(
        'on the command line: correction.kind = "tis" at level = "token" weighs tokens one by one'
    )
    assert problem.endswith('; set level = "geometric" or "sequence"')
    (problem,) = found("kind=icepop")
    assert problem.endswith('; set kind = "mis", mode = "mask" and level = "geometric" or "sequence"')
    (problem,) = found("reject=token")
    assert f'but loss.kind = "{kind}" takes its ratio from all tokens' in problem
    assert len(found("kind=mis", "mode=mask", "reject=token")) == 2
    for level in ("sequence", "geometric"):
        correction = (f"correction.reject={level}", "correction.kind=tis", f"correction.level={level}")
        read(tmp_path, GOOD, f"loss.kind={kind}", *correction, "correction.veto_below=1e-4")
    for other in ("ppo", "cispo", "package.module:function"):
        read(tmp_path, GOOD, f"loss.kind={other}", "correction.kind=tis", "correction.reject=token")


def test_a_prompt_may_have_one_rollout_where_no_other_is_compared_with(tmp_path: Path) -> None:
    for estimator in ("gae", "remax", "reinforce_plus_plus"):
        assert read(tmp_path, GOOD, "rollout.group_size=1", f"advantage.estimator={estimator}").rollout.group_size == 1


@pytest.mark.parametrize(
    "estimator", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "remax"]
)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "torch.optim:RMSprop"])
def test_the_resolved_configuration_can_be_read_again(tmp_path: Path, estimator: str, optimizer: str) -> None:
    cfg = read(tmp_path, GOOD, f"advantage.estimator={estimator}", f"optim.name={optimizer}")
    (tmp_path / "resolved.toml").write_text(tomlkit.dumps(cfg.model_dump(exclude_none=True)))
    assert read_config(Config, str(tmp_path / "resolved.toml"), []) == cfg


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.cpu_offload=true", "offload.trainer=all"], 'nothing for offload.trainer = "all" to move'),
        (['offload.engine=["cuda_graph"]'], 'rollout.engine = "torch" has no CUDA graphs'),
        (['offload.engine=["graphs"]'], "offload.engine.0"),
        (["rollout.memory_fraction=0.5"], 'memory_fraction has no meaning for rollout.engine = "torch"'),
        (["rollout.tp_size=2"], 'tp_size has no meaning for rollout.engine = "torch"'),
    ],
)
def test_offload_that_cannot_be_is_refused(tmp_path: Path, overrides: list[str], expected: str) -> None:
    (problem,) = problems(tmp_path, GOOD, *overrides)
    assert expected in problem


APART = 'rollout.placement="disaggregated"'
SGLANG = 'rollout.engine="sglang"'


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([APART], "set both or neither"),
        (["rollout.num_ranks=2"], "set both or neither"),
        ([APART, SGLANG, "rollout.num_ranks=3", "rollout.tp_size=2"], "set num_ranks to 4"),
        ([APART, "rollout.num_ranks=1", "offload.trainer=all"], "offload.trainer has no meaning"),
        ([APART, "rollout.num_ranks=1", 'offload.engine=["weights"]'], "offload.engine has no meaning"),
        ([APART, SGLANG, "rollout.num_ranks=1", "refit.transport=cuda_ipc"], "refit.transport has no meaning"),
        ([APART, SGLANG, "rollout.num_ranks=1", "rollout.restart_engine=true"], "restart_engine = true needs"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(tmp_path: Path, overrides: list[str], expected: str) -> None:
    (problem,) = problems(tmp_path, GOOD, *overrides)
    assert expected in problem


def test_what_resume_may_find_changed_is_a_setting(tmp_path: Path) -> None:
    names = '["optim", "optim.lr", "data.sources", "rollout.sglang.log_level"]'
    assert len(read(tmp_path, GOOD, f"resume.changed={names}").resume.changed) == 4
    for name, hint in (
        ("optim.learningrate", "the settings there are name, lr"),
        ("optm", "did you mean optim?"),
    ):
        (problem,) = problems(tmp_path, GOOD, f'resume.changed=["{name}"]')
        assert f"resume.changed names {name}, which is no setting" in problem and hint in problem


FOUR = """\
[run]
name = "x"
num_steps = 3
[model]
path = "m"
cpu_offload = true
[data]
max_prompt_tokens = 8
sources = [{ kind = "jsonl", path = "a.jsonl" }]
[rollout]
prompts_per_step = 4
group_size = 1
max_response_tokens = 5
[offload]
trainer = "all"
[loss]
kl_coef = 0.1
[reward]
terms = [{ kind = "exact" }]
kl_coef = 0.2
[optim]
lr = 1e-3
[pack]
max_tokens_per_micro_batch = 64
[watchdog]
timeout_s = 99999.0
"""
OFFLOADED = "c.toml:6: model.cpu_offload = true keeps the policy in host memory"
ALONE = "c.toml:12: rollout.group_size = 1 leaves"
KL_TWICE = "c.toml:17: loss.kl_coef = 0.1 and reward.kl_coef = 0.2 would count"
IMPATIENT = "c.toml:26: watchdog.timeout_s = 99999 is more than run.patience_minutes = 180"


def begin(found: list[str], *expected: str) -> bool:
    return len(found) == len(expected) and all(map(str.startswith, found, expected))


def test_mistakes_between_tables_come_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    found = problems(tmp_path, FOUR)
    assert begin(found, OFFLOADED, ALONE, KL_TWICE, IMPATIENT), found
    turned = FOUR[FOUR.index("[rollout]") :] + FOUR[: FOUR.index("[rollout]")]
    found = [line.split(": ", 1)[1] for line in problems(tmp_path, turned)]
    assert begin(found, *(line.split(": ", 1)[1] for line in (ALONE, KL_TWICE, IMPATIENT, OFFLOADED))), found


def test_mistakes_on_the_command_line_come_after_those_of_the_file(tmp_path: Path) -> None:
    found = problems(tmp_path, FOUR, "watchdog.timeout_s=88888.0", "rollout.group_size=1", "rollout.max_staleness=2")
    there = "on the command line: "
    expected = (f"{there}watchdog.timeout_s = 88888", f"{there}rollout.group_size", f"{there}rollout: max_staleness")
    assert begin(found, OFFLOADED, KL_TWICE, *expected), found


def test_a_rule_is_about_the_setting_that_was_written(tmp_path: Path) -> None:
    found = problems(tmp_path, GOOD.replace("num_steps = 3", "num_steps = 3\npatience_minutes = 1"))
    assert begin(found, "c.toml:4: watchdog.timeout_s = 1800 is more than run.patience_minutes = 1"), found


def test_one_table_with_two_mistakes_gets_two_sentences(tmp_path: Path) -> None:
    text = GOOD.replace("[optim]", "[loss]\ndual_clip = 1.1\nstop_kl_nats = 0.1\n[optim]")
    assert begin(problems(tmp_path, text), "c.toml:21: loss: dual_clip = 1.1 is", "c.toml:22: loss: stop_kl_nats has")


def test_mistakes_of_all_kinds_come_at_once(tmp_path: Path) -> None:
    text = FOUR.replace("timeout_s", "timeout").replace("lr = 1e-3", 'lr = "fast"').replace("num_steps = 3\n", "")
    text = text.replace("prompts_per_step = 4", "prompts_per_step = 4\nmax_staleness = 2")
    expected = (
        "c.toml:1: run.num_steps: required, not set",
        "c.toml:5: model.cpu_offload",
        "c.toml:11: rollout: max_staleness has no meaning",
        "c.toml:12: rollout.group_size = 1",
        "c.toml:17: loss.kl_coef",
        'c.toml:22: optim.lr = "fast": input should be a valid number',
        "c.toml:26: watchdog.timeout: no such setting; did you mean watchdog.timeout_s?",
        "on the command line: eval.sources: required, not set",
    )
    found = problems(tmp_path, text, "eval.num_prompts=3")
    assert begin(found, *expected), found


@pytest.mark.parametrize(
    ("overrides", "silenced"),
    [
        (("rollout.group_size=many",), ALONE),
        (("loss.kl_coef=-1.0",), KL_TWICE),
        (("reward.kl_coeff=0.0",), None),  # the meant setting is set too, and is what it is
        (("advantage.estimator=grop",), ALONE),
        (("loss=5",), KL_TWICE),
        (("model.cpu_offload=maybe",), OFFLOADED),
        (("run.patience_minutes=0",), IMPATIENT),
        (("run.patience_minuts=2000",), IMPATIENT),
        (("watchdog=[]",), IMPATIENT),
    ],
    ids=str,
)
def test_rules_do_not_speak_of_settings_that_are_wrong(
    tmp_path: Path, overrides: tuple[str, ...], silenced: str | None
) -> None:
    *others, own = problems(tmp_path, FOUR, *overrides)
    expected = [sentence for sentence in (OFFLOADED, ALONE, KL_TWICE, IMPATIENT) if sentence != silenced]
    assert begin(others, *expected), others
    assert own.startswith(f"on the command line: {overrides[0].partition('=')[0]}"), own


ENVIRONMENT = """
[environment]
max_turns = 3
[environment.source]
kind = "tools"
[[environment.source.tools]]
kind = "python"
timeout_s = 2.0
[[environment.source.tools]]
kind = "function"
function = "a:b"
"""


@pytest.mark.parametrize(
    ("wrong", "right", "sentence"),
    [
        ('kind = "tools"', 'kind = "tols"', '27: environment.source.kind: must be one of "tools", "class", "trl"'),
        ('kind = "tools"', "", '27: environment.source.kind: must be one of "tools", "class", "trl"'),
        ('kind = "python"', 'kind = "pyton"', '29: environment.source.tools.0.kind: must be one of "function", "pyt'),
        ("timeout_s", "timeout", "31: environment.source.tools.0.timeout: no such setting; did you mean environment."),
        ("= 2.0", "= -2.0", "31: environment.source.tools.0.timeout_s = -2.0: input should be greater than"),
        ("= 2.0", "= 40.0", "25: environment: the python tool's timeout_s = 40 must be below step_timeout_s = 30"),
        ('function = "a:b"', "", "32: environment.source.tools.1.function: required, not set"),
        ("source.tools", "source.tolls", "29: environment.source.tolls: no such setting; did you mean environment.so"),
        (ENVIRONMENT, "[environment]\nmax_turns = 3", "24: environment.source: required, not set"),
        (ENVIRONMENT, "[environment]\nsource = 5", "25: environment.source = 5: must be a table of settings"),
        (ENVIRONMENT, '[environment.source]\nkind = "trl"', "24: environment.source.name: required, not set"),
    ],
)
def test_a_table_of_one_of_several_kinds_is_read_like_a_list_of_them(
    tmp_path: Path, wrong: str, right: str, sentence: str
) -> None:
    (problem,) = problems(tmp_path, GOOD + ENVIRONMENT.replace(wrong, right))
    assert problem.startswith(f"c.toml:{sentence}"), problem


def test_the_kind_of_a_table_may_be_on_the_command_line(tmp_path: Path) -> None:
    cfg = read(tmp_path, GOOD, "environment.source.kind=trl", "environment.source.name=a:b")
    assert cfg.environment is not None and cfg.environment.source.model_dump() == {"kind": "trl", "name": "a:b"}
    (problem,) = problems(tmp_path, GOOD, "environment.source.kind=trl", "environment.source.nam=a:b")
    assert problem.startswith("on the command line: environment.source.nam: no such setting; did you mean environment")
    (problem,) = problems(tmp_path, GOOD, "environment.source.kind=tlr", "environment.source.name=a:b")
    assert problem.startswith("on the command line: environment.source.kind: must be one of")


def test_a_misspelled_setting_is_not_missing_too(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, GOOD.replace("group_size = 2", "grup_size = 2"))
    assert "did you mean rollout.group_size?" in problem


def test_a_value_that_no_type_takes_gets_one_sentence(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, GOOD, "refit.verify=-1")
    assert problem.startswith("on the command line: refit.verify = -1: input should be 'every' or 'first' or ")
    (problem,) = problems(tmp_path, GOOD, "lora.targets=[]")
    assert problem.startswith("on the command line: lora.targets = []: input should be 'all-linear' or list should")


def test_settings_of_a_draft_that_are_wrong_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(FOUR)
    draft = read_draft(Config, str(tmp_path / "c.toml"), ["optim.lr=x", "pack=3", "data.sources=[]", "eval.every=2"])
    assert draft.config.rollout.group_size == 1 and draft.config.eval is not None and draft.config.eval.every == 2
    for read_it in (
        lambda cfg: cfg.optim.lr,
        lambda cfg: cfg.pack,
        lambda cfg: cfg.data.sources,
        lambda cfg: cfg.eval.sources,
        lambda cfg: cfg.critic_optim.lr,
    ):
        with pytest.raises(MissingSetting):
            read_it(draft.config)


def test_a_draft_puts_the_sentences_of_others_in_their_place(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(GOOD)
    draft = read_draft(Config, str(tmp_path / "c.toml"), ["run.seed=2"])
    draft.refuse()
    with pytest.raises(UserError) as caught:
        draft.refuse(
            ["a.jsonl is empty", "run.seed = 2 is low", 'optim.lr is "run.seed"', 'model.path = "m" is absent']
        )
    lines = [line.removeprefix(f"{tmp_path}/") for line in str(caught.value).splitlines()]
    assert lines == [
        'c.toml:5: model.path = "m" is absent',
        'c.toml:21: optim.lr is "run.seed"',
        "on the command line: run.seed = 2 is low",
        "a.jsonl is empty",
    ]


def test_what_a_program_makes_is_refused_with_all_sentences() -> None:
    values = tomlkit.parse(FOUR).unwrap()
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(values | {"loss": {"kl_coef": 0.1, "dual_clip": 1.1}})
    (problem,) = caught.value.errors()
    said = str(problem["ctx"]["error"]).splitlines()
    assert begin(said, "loss: dual_clip = 1.1", "rollout.group_size", "loss.kl_coef", "model.cpu_offload", "watchdog.")
    with pytest.raises(ValidationError, match=r"(?s)stop_kl_nats has.*\ndual_clip = 1.1 is not above"):
        LossConfig(dual_clip=1.1, stop_kl_nats=0.1)


# For each rule, settings that break it; GOOD keeps all of them.
TOOLS = "environment.source={{kind='tools',tools=[{}]}}"
CLASS = "environment.source={kind='class',name='a.py:A'}"
NONE = "advantage.estimator=none"
JUDGE = 'kind="judge",url="http://localhost/v1",model="m"'
SOURCE = 'data.sources=[{{kind="jsonl",path="a.jsonl",algorithm={{{}}}}}]'
OTHER_SOURCE = 'data.sources=[{kind="jsonl",path="a"},{kind="jsonl",path="b",algorithm={weight=2.0}}]'
DISTILL = ('models={t={path="t"}}', "distill.teacher=t")
BROKEN: dict[str, tuple[str, ...]] = {
    "settings_of_sources_are_in_order": (SOURCE.format('loss={clip_hi=0.3,updates_per_step=2},advantage={k="4"}'),),
    "a_task_has_one_algorithm": (OTHER_SOURCE,),
    "the_others_have_a_name_in_metrics": (
        'data.sources=[{kind="jsonl",path="a.jsonl",task="others",algorithm={weight=2.0}}]',
    ),
    "held_out_sources_have_no_algorithm": (f"eval={{num_prompts=2,{SOURCE.removeprefix('data.').format('')}}}",),
    "what_is_sampled_or_valued_is_for_all": (SOURCE.format('advantage={estimator="gae"}'),),
    "one_coefficient_follows_the_entropy": (
        SOURCE.format("loss={entropy_coef=0.1}"),
        "loss.entropy_target_nats=0.3",
    ),
    "sources_keep_the_rules_of_a_run": (SOURCE.format('loss={kind="gspo"},advantage={estimator="none"}'),),
    "fewer_bits_need_a_correction": ("rollout.quantization=fp8",),
    "quantized_engines_take_whole_weights": ("rollout.quantization=fp8", "correction.kind=tis", "lora.rank=4"),
    "biases_of_experts_can_move": ("optim.expert_bias_rate=0.001", "lora.rank=3"),
    "beta_belongs_to_jsd": (*DISTILL, "distill.beta=0.3"),
    "top_tokens_belong_to_the_vocabulary": (*DISTILL, "distill.top_k=8", "distill.divergence=sampled_kl"),
    "sampled_tokens_are_those_of_all_teachers": (
        'models={t={path="t"}}',
        "distill.divergence=sampled_kl",
        'distill.teachers=[{model="t",divergence="jsd"}]',
    ),
    "there_is_a_teacher": (*DISTILL, 'distill.teachers=[{model="t"}]'),
    "a_task_has_one_teacher": ('models={t={path="t"}}', 'distill.teachers=[{model="t"},{model="t"}]'),
    "models_are_used": ('models={t={path="t"}}',),
    "settings_belong_to_followers": ('models={t={path="t",decay=0.5}}', "distill.teacher=t"),
    "followers_have_the_layout_of_the_policy": (
        'models={t={weights="average",parallel={ep=2}}}',
        "distill.teacher=t",
    ),
    "adapters_are_not_followed": ('models={t={weights="average"}}', "distill.teacher=t", "lora.rank=3"),
    "models_have_one_origin": ('models={t={adapters="off"}}', "distill.teacher=t"),
    "hint_settings_need_a_hint": (*DISTILL, "distill.max_hint_tokens=7"),
    "the_policy_learns_nothing_from_itself": ('models={t={weights="policy"}}', "distill.teacher=t"),
    "hints_take_the_place_of_prompts": (*DISTILL, "distill.hint_column=hint", "parallel.cp=2"),
    "teachers_have_tasks_of_the_data": ('models={t={path="t"}}', 'distill.teachers=[{model="t",tasks=["x"]}]'),
    "sequence_losses_need_whole_divergences": (*DISTILL, "loss.kind=gspo", "distill.divergence=sampled_kl"),
    "distilled_groups_are_not_dropped": (*DISTILL, "rollout.dynamic_sampling=true"),
    "something_is_trained": ("advantage.estimator=none",),
    "nothing_is_compared_without_rewards": (*DISTILL, "reward.terms=[]"),
    "curricula_have_a_signal": ("data.curriculum.kind=band", "reward.terms=[]"),
    "gates_name_sources": ('data.curriculum.gates=[{opens="x",after="default",success=0.5}]',),
    "checkpoint_every_layers_needs_checkpointing": ("model.checkpoint_every_layers=2",),
    "adapters_have_no_dropout": ("lora.dropout=0.1",),
    "adapters_have_no_magnitudes": ("lora.use_dora=true",),
    "a_directory_says_what_adapters_are": ("lora.path=a", "lora.rank=3"),
    "a_quantized_base_is_not_divided": ('lora.base="nf4"', "parallel.tp=2"),
    "a_quantized_base_does_not_sleep": ('lora.base="nf4"', 'offload.trainer="all"'),
    "merged_belongs_to_adapters": ("export.merged=false",),
    "export_dtype_is_that_of_a_whole_model": ("lora.rank=3", "export.merged=false", 'export.dtype="source"'),
    "adapters_freeze_the_whole_model": ("lora.rank=3", "model.freeze=[]"),
    "adapters_learn_at_one_rate": ("lora.rank=3", 'optim.rates={"layers.0.*"=0}'),
    "cp_style_needs_cp": ("parallel.cp_style=ulysses",),
    "one_size_of_micro_batches": ("pack.sequences_per_micro_batch=2",),
    "prefix_trees_need_a_budget": ('pack={ sequences_per_micro_batch = 2, prefix_tree = "auto" }',),
    "loaded_rollouts_are_not_saved_again": ("debug.load_rollouts=a", "debug.save_rollouts=1"),
    "max_draw_ratio_needs_dynamic_sampling": ("rollout.max_draw_ratio=2.0",),
    "max_draw_ratio_allows_oversampling": (
        "rollout.dynamic_sampling=true",
        "rollout.max_draw_ratio=1.1",
        "rollout.oversample_fraction=0.5",
    ),
    "prompts_in_order_are_not_replaced": ("rollout.partial=true", "rollout.dynamic_sampling=true"),
    "max_staleness_needs_stale_rollouts": ("rollout.max_staleness=2",),
    "cache_after_refit_needs_partial": ("rollout.cache_after_refit=keep",),
    "cache_survives_the_update": (
        "rollout.partial=true",
        "rollout.cache_after_refit=keep",
        "run.deterministic=true",
    ),
    "refits_in_flight_need_engines_apart": ("rollout.refit_in_flight=true",),
    "tokens_decide_about_refits_in_deterministic_runs": ("rollout.refit_after_tokens=16",),
    "num_ranks_belongs_to_disaggregated": ("rollout.num_ranks=2",),
    "restart_engine_needs_colocated": ("rollout.restart_engine=true", "rollout.placement=disaggregated"),
    "num_ranks_is_a_multiple_of_tp_size": ("rollout.num_ranks=3", "rollout.tp_size=2"),
    "limits_need_a_sandbox": ("reward.sandbox.mode=off", "reward.sandbox.max_processes=2"),
    "overlong_penalty_needs_overlong_tokens": ("reward.overlong_penalty=2.0",),
    "kl_settings_need_kl_coef": ("reward.kl_target_nats=0.1",),
    "kl_horizon_needs_kl_target": ("reward.kl_horizon=3",),
    "code_needs_a_sandbox": ('reward.terms=[{kind="code"}]', "reward.sandbox.mode=off"),
    "tests_end_before_the_reward": ('reward.terms=[{kind="code"}]', "reward.timeout_s=1.0"),
    "lengths_fall_to_their_end": ('reward.terms=[{kind="length",max_characters=2000}]',),
    "templates_have_their_fields": ('reward.terms=[{kind="model",path="a",template="{prompt}"}]',),
    "some_terms_score_finished_groups": ('reward.terms=[{kind="model",path="a"}]', "rollout.dynamic_sampling=true"),
    "gates_are_other_terms": ('reward.terms=[{kind="exact",gate="math"}]',),
    "terms_are_compared_one_by_one": ("advantage.estimator=gdpo", 'reward.terms=[{kind="exact"}]'),
    "judges_see_the_response": (f"reward.terms=[{{{JUDGE},template='{{answer}}'}}]",),
    "scores_of_judges_can_be_read": (f"reward.terms=[{{{JUDGE},lowest=11.0}}]",),
    "judges_are_asked_somewhere": ('reward.terms=[{kind="judge",url="http://localhost/v1",rubric="r"}]',),
    "some_term_has_a_positive_weight": ('reward.terms=[{kind="exact",weight=0.0}]',),
    "settings_belong_to_the_optimizer": ("optim.momentum=0.5",),
    "state_on_host_needs_state": ("optim.name=sgd", "optim.state_on_host=true"),
    "decay_steps_belong_to_wsd": ("optim.decay_steps=1",),
    "settings_belong_to_the_estimator": ("advantage.k=2",),
    "settings_belong_to_the_loss": ("loss.tau_positive=1.0",),
    "stop_kl_needs_several_updates": ("loss.stop_kl_nats=0.1",),
    "off_policy_losses_need_several_updates": ("loss.kind=kl_cov",),
    "entropy_coef_change_needs_a_target": ("loss.entropy_coef_change=0.1",),
    "entropy_target_needs_a_bonus": ("loss.entropy_target_nats=0.1", "loss.entropy_coef=-1.0"),
    "cov_low_is_below_cov_high": ("loss.kind=clip_cov", "loss.cov_low=9.0"),
    "k1_loss_is_allowed_by_name": ("loss.kl_coef=0.1", "loss.kl_estimator=k1"),
    "dual_clip_is_beyond_the_clip": ("loss.dual_clip=1.1",),
    "weights_need_a_kind": ("correction.low=0.5",),
    "mode_belongs_to_mis": ("correction.kind=mis",),
    "icepop_weighs_tokens": ("correction.kind=icepop", "correction.level=sequence"),
    "truncation_has_no_lower_bound": ("correction.kind=tis", "correction.low=0.5"),
    "reject_bounds_need_reject": ("correction.reject_low=0.5",),
    "bounds_enclose_one": ("correction.kind=tis", "correction.high=0.5"),
    "corrections_need_a_mismatch": ("correction.old=rollout", "correction.veto_below=0.1"),
    "critic_needs_gae": ("critic.lr=1.0",),
    "critic_warmup_ends_before_the_run": ("critic.warmup_steps=3",),
    "group_size_allows_the_estimator": ("rollout.group_size=1",),
    "turns_need_an_environment": ("advantage.estimator=gigpo", "loss.environment_coef=0.1"),
    "k_is_below_group_size": ("advantage.estimator=pass_at_k",),
    "kl_in_reward_needs_scored_baselines": ("advantage.estimator=remax", "reward.kl_coef=0.1"),
    "max_rl_needs_rewards_of_zero_or_more": ("advantage.estimator=max_rl", "reward.kl_coef=0.1"),
    "the_engine_is_compared_with_once": ("loss.kind=dppo_tv", "correction.kind=tis"),
    "importance_ratio_needs_an_unbiased_divergence": ("loss.kl_importance_ratio=true",),
    "routes_of_the_first_pass_need_several_updates": ("correction.router_replay=R2",),
    "teachers_know_no_candidates": (*DISTILL, "rollout.top_k=8"),
    "top_p_needs_top_k": ("rollout.top_p=0.9",),
    "kl_counts_once": ("loss.kl_coef=0.1", "reward.kl_coef=0.1"),
    "sequence_losses_need_sequence_advantages": ("loss.kind=gspo", "advantage.estimator=gae"),
    "sequence_losses_need_sequence_weights": ("loss.kind=gspo", "correction.kind=tis"),
    "sequence_losses_reject_sequences": ("loss.kind=gmpo", "correction.reject=token"),
    "dynamic_sampling_needs_group_comparison": ("rollout.dynamic_sampling=true", "advantage.estimator=gae"),
    "overlong_tokens_are_below_the_limit": ("reward.overlong_tokens=5",),
    "engine_logprobs_need_fresh_tokens": ("correction.old=rollout", "rollout.partial=true"),
    "older_tokens_need_a_correction": ("rollout.partial=true", "rollout.max_staleness=2"),
    "offloaded_policy_is_not_moved": ("model.cpu_offload=true", "offload.trainer=all"),
    "state_on_host_is_not_moved": ("optim.state_on_host=true", "offload.trainer=optimizer"),
    "state_on_host_needs_the_device": ("optim.state_on_host=true", "model.cpu_offload=true"),
    "offload_needs_colocated": ("rollout.placement=disaggregated", "offload.trainer=all"),
    "transport_needs_colocated": ("rollout.placement=disaggregated", "refit.transport=cuda_ipc"),
    "engine_has_a_name": ("rollout.engine=vlm",),
    "settings_belong_to_the_engine": ("refit.transport=cuda_ipc",),
    "released_graphs_need_graphs": (
        "rollout.engine=sglang",
        "rollout.cuda_graphs=false",
        'offload.engine=["cuda_graph"]',
    ),
    "loaded_rollouts_allow_no_evaluation": (
        "debug.load_rollouts=a",
        'eval={num_prompts=1,sources=[{kind="jsonl",path="a"}]}',
    ),
    "loaded_rollouts_need_colocated": ("debug.load_rollouts=a", "rollout.placement=disaggregated"),
    "answers_need_evaluations": ("checkpoint.keep_best=eval/accuracy", "report.eval_samples=2"),
    "watchdog_is_faster_than_patience": ("run.patience_minutes=1",),
    "resume_names_settings": ('resume.changed=["bogus"]',),
    "deterministic_runs_sample_one_version": (
        "run.deterministic=true",
        "rollout.placement=disaggregated",
        "rollout.max_staleness=2",
    ),
    "schedules_are_of_free_runs": ("debug.follow_schedule=a",),
    "deterministic_runs_do_not_oversample": ("run.deterministic=true", "rollout.oversample_fraction=0.5"),
    "schedule_ends_with_the_run": ("optim.warmup_steps=99",),
    "budget_holds_a_sequence": ("pack.max_tokens_per_micro_batch=3",),
    "true_on_policy_needs_equal_bits": ("true_on_policy=true", "parallel.tp=2"),
    "programs_end_before_the_step": (TOOLS.format('{kind="python"}'), "environment.step_timeout_s=1.0"),
    "programs_need_a_sandbox": (TOOLS.format('{kind="python"}'), "environment.sandbox.mode=off"),
    "connections_need_no_sandbox": ('environment.source={kind="openenv",url="u"}',),
    "environment_reward_needs_an_environment": ('reward.terms=[{kind="environment"}]',),
    "turns_need_messages": (CLASS, "data.chat_template=rendered"),
    "turns_fit_into_the_response": (CLASS, "environment.max_turn_tokens=3", "environment.max_turns=3"),
    "parsers_belong_to_sglang": (CLASS, "environment.tool_parser=qwen25"),
    "agents_keep_their_own_history": (
        'environment.source={kind="agent",command=["a"]}',
        "environment.history=template",
    ),
    "contexts_are_rendered": (CLASS, 'environment.context={kind="truncate"}'),
    "summaries_are_shorter": (CLASS, 'environment.context={kind="summary",max_tokens=8,max_summary_tokens=8}'),
    "summaries_have_room": (CLASS, 'environment.context={kind="summary",max_tokens=8,max_summary_tokens=4}'),
    "roles_share_no_reward": (CLASS, "advantage.estimator=grpo_by_role", "rollout.dynamic_sampling=true"),
    "attempts_need_items": ('environment.source={kind="reasoning_gym"}',),
}


def tables_in(config: Section) -> Iterator[Section]:
    yield config
    for name in type(config).model_fields:
        if isinstance(inner := vars(config)[name], Section):
            yield from tables_in(inner)


def test_every_rule_is_in_the_table_above(tmp_path: Path) -> None:
    known = {
        rule.__name__
        for table in tables_in(read(tmp_path, GOOD, CLASS, "lora.rank=8", *DISTILL))
        for rule in rules_of(type(table))
    }
    assert known == BROKEN.keys()


@pytest.mark.parametrize("name", BROKEN)
def test_every_rule_names_the_settings_it_is_about(tmp_path: Path, name: str) -> None:
    (tmp_path / "c.toml").write_text(GOOD)
    draft = read_draft(Config, str(tmp_path / "c.toml"), BROKEN[name])
    ((table, rule),) = [
        (table, rule) for table in tables_in(draft.config) for rule in rules_of(type(table)) if rule.__name__ == name
    ]
    sentences = list(rule(table))
    assert sentences
    names = {id(getattr(draft.config, key)): key for key in Config.model_fields}
    names[id(draft.config.reward.sandbox)] = "reward.sandbox"
    if draft.config.environment is not None:
        names[id(draft.config.environment.sandbox)] = "environment.sandbox"
    own = names.get(id(table), "")
    for sentence in sentences:
        named = settings_in(Config, f"{own}: {sentence}" if own else sentence)
        ours = {name for name in named if not name.startswith("models.")}  # under names of the user's
        assert set(named) - {own} and ours <= set(all_keys(Config)), (sentence, named)


def test_a_source_changes_settings_of_the_run_by_name(tmp_path: Path) -> None:
    own = '[data.sources.algorithm]\nweight = 2.0\nloss.{}\nadvantage.estimator = "rloo"\n[rollout]'
    run = ("loss.dual_clip=3.0", "loss.aggregation=constant", "advantage.divide_by_std=false")
    cfg = read(tmp_path, GOOD.replace("[rollout]", own.format("clip_high = 0.5")), *run)
    assert [one.name for one in cfg.algorithms] == ["others", "chain_sum"] and cfg.algorithm_places == {"chain_sum": 1}
    _, one = cfg.algorithms
    assert one.loss == cfg.loss.model_copy(update={"clip_high": 0.5}) and one.weight == 2.0
    assert one.advantage.divide_by_std is None, "it belonged to the run's estimator"
    _, other = read(tmp_path, GOOD.replace("[rollout]", own.format('kind = "cispo"')), *run).algorithms
    assert other.loss.settings == {"clip_low": 1.0, "clip_high": 4.0} and other.loss.aggregation == "constant"
    wrong = problems(tmp_path, GOOD.replace("[rollout]", own.format("clip_hi = 0.5\nloss.updates_per_step = 2")))
    assert begin(
        wrong,
        "c.toml:16: data.sources.1.algorithm.loss.clip_hi: no such setting; did you mean clip_high?",
        "c.toml:17: data.sources.1.algorithm.loss.updates_per_step cannot differ between sources",
    ), wrong
    lonely = problems(
        tmp_path,
        GOOD.replace("[rollout]", own.format("clip_high = 0.5")),
        "rollout.group_size=1",
        "advantage.estimator=reinforce_plus_plus",
    )
    assert begin(lonely, "c.toml:14: data.sources.1.algorithm: rollout.group_size = 1 leaves"), lonely


def test_fine_tuning_has_the_rules_that_it_shares(tmp_path: Path) -> None:
    text = GOOD[: GOOD.index("[rollout]")] + GOOD[GOOD.index("[optim]") :]
    (tmp_path / "c.toml").write_text(
        text + "[sft]\nsequences_per_step = 2\nmax_response_tokens = 3\n[report]\nmemory = true\n"
    )
    with pytest.raises(UserError) as caught:
        read_config(SftConfig, str(tmp_path / "c.toml"), ["run.patience_minutes=1", "checkpoint.keep_best=eval/a"])
    found = [line.removeprefix(f"{tmp_path}/") for line in str(caught.value).splitlines()]
    there = "on the command line: "
    expected = ("c.toml:22: report.memory = true", f"{there}watchdog.timeout_s = 1800", f"{there}checkpoint.keep_best")
    assert begin(found, *expected), found


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ((), "samples with other numbers than the trainer's, and nothing corrects for it; set correction.kind"),
        (("correction.old=rollout",), 'it says something else; set correction.old = "trainer"'),
        (("correction.kind=tis", "lora.rank=4"), "adds adapters that were not tried with it; remove one of them"),
    ],
)
def test_fewer_bits_need_a_correction(tmp_path: Path, overrides: tuple[str, ...], sentence: str) -> None:
    (found,) = problems(tmp_path, GOOD, "rollout.quantization=fp8", *overrides)
    assert sentence in found
    for corrects in ("correction.kind=tis", "loss.kind=dppo_tv"):
        assert read(tmp_path, GOOD, "rollout.quantization=fp8", corrects).rollout.fewer_bits


def test_fewer_bits_are_not_true_on_policy(tmp_path: Path) -> None:
    found = problems(tmp_path, GOOD, "rollout.engine=sglang", "rollout.kv_cache_dtype=fp8_e4m3", "true_on_policy=true")
    assert any('kv_cache_dtype = "fp8_e4m3" computes with other numbers' in problem for problem in found), found
