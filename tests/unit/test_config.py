"""Reading settings: what is wrong is said all at once, with its place and with the name that was meant."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomlkit
from pydantic import ValidationError

from spmdrl.config import Config, read_config
from spmdrl.types import UserError

GOOD = """\
[run]
name = "x"
num_steps = 3
[model]
path = "m"
[data]
max_prompt_tokens = 8
[[data.sources]]
kind = "jsonl"
path = "a.jsonl"
[[data.sources]]
kind = "reasoning_gym"
task = "chain_sum"
[rollout]
prompts_per_step = 4
group_size = 2
max_response_tokens = 5
[reward]
terms = [{ kind = "exact" }, { kind = "function", function = "a:b", weight = 0.5 }]
[optim]
lr = 1e-3
[pack]
max_tokens_per_micro_batch = 64
"""


def read(tmp_path: Path, text: str = GOOD, *overrides: str) -> Config:
    (tmp_path / "c.toml").write_text(text)
    return read_config(Config, str(tmp_path / "c.toml"), overrides)


def problems(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        read(tmp_path, text, *overrides)
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


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
            "group_size = 2\npartial = true",
            "partial = true has no meaning with oversample_fraction = 0",
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
        (["loss.kind=pop"], 'loss: kind = "pop" is not known; use one of "ppo", "gspo"'),
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
