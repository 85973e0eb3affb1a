"""Tables about rewards and the processes that compute them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from spmdrl.config.base import Count, NonNegative, Positive, Section


class ExactReward(Section):
    kind: Literal["exact"]
    """1 when the response, stripped of white space, is the reference answer."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of this term in the reward."""


class MathReward(Section):
    kind: Literal["math"]
    """1 when math-verify finds the response's final answer equal to the reference answer."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of this term in the reward."""


class ReasoningGymReward(Section):
    kind: Literal["reasoning_gym"]
    """The task's own scorer, usually between 0 and 1, of the last `<answer>` tag or else of the stripped response."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of this term in the reward."""


class FunctionReward(Section):
    kind: Literal["function"]
    """A function of yours, sync or async, called with the keywords prompt, response, answer and metadata."""
    function: str
    """`package.module:function` or `path/to/file.py:function`."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of this term in the reward."""


class CodeReward(Section):
    kind: Literal["code"]
    """The response's last fenced code block is a Python program that is run with the prompt's tests, in the sandbox.
    See `docs/data.md`."""
    tests: str = "tests"
    """The column that holds a prompt's tests."""
    score: Literal["share", "all"] = "share"
    """The share of tests that pass, or 1 when all of them do."""
    tests_timeout_s: Positive = 5.0
    """Time limit for all tests of a response; those that it leaves out have failed. Below `reward.timeout_s`."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of this term in the reward."""


RewardTerm = Annotated[
    ExactReward | MathReward | ReasoningGymReward | FunctionReward | CodeReward, Field(discriminator="kind")
]


class SandboxConfig(Section):
    mode: Literal["auto", "strict", "off"] = "auto"
    """`auto`: no network, no environment variables, no files to write but in a directory of their own, no other
    processes in reach, nothing printed; what the machine cannot keep from them is told. `strict` refuses to start
    there. `off`: whatever you may do, for functions of yours that need it. See `docs/security.md`."""
    max_memory_gib: Positive = 8.0
    """Address space of each process."""
    max_processes: Count = 64
    """Processes and threads of one reward process, itself included. Linux does not hold root to it."""
    max_file_gib: Positive = 0.125
    """Size of each file, and of the directory of a reward process."""
    max_open_files: Annotated[int, Field(ge=16)] = 256
    """Files that a process has open."""

    @model_validator(mode="after")
    def _off_has_no_limits(self) -> SandboxConfig:
        for setting in ("max_memory_gib", "max_processes", "max_file_gib", "max_open_files"):
            if self.mode == "off" and getattr(self, setting) != type(self).model_fields[setting].default:
                raise ValueError(f'{setting} has no meaning with mode = "off"; remove one of them')
        return self


class RewardConfig(Section):
    terms: Annotated[tuple[RewardTerm, ...], Field(strict=False, min_length=1)]
    """The reward is the weighted sum of these; at least one weight is positive."""
    timeout_s: Positive = 10.0
    """Time limit for one rollout; past it the worker is killed, the reward is 0 and the failure is counted."""
    num_workers: Count = 1
    """Reward processes of each rank."""
    sandbox: SandboxConfig = SandboxConfig()
    """What these processes may do."""
    overlong_tokens: Annotated[int, Field(ge=0)] = 0
    """Training only: over the last so many tokens before `rollout.max_response_tokens` the reward falls linearly, by
    `overlong_penalty` at the limit (DAPO). 0: it does not."""
    overlong_penalty: Positive | None = None
    """`overlong_tokens` only: what a response that reaches the limit loses. Unset: 1."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence to the reference model in the reward, token by token; above 0 the reference model is
    loaded, and old log-probabilities are taken before every step's updates."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of that divergence. In the reward it has no gradient, and k1 is the unbiased one."""
    kl_target_nats: Positive | None = None
    """`kl_coef` only: let it follow this mean divergence per response token. Unset: it is fixed."""
    kl_horizon: Count | None = None
    """`kl_target_nats` only: rollouts over which the coefficient adapts. Unset: 10000."""

    @model_validator(mode="after")
    def _settings_belong_to_each_other(self) -> RewardConfig:
        for setting, other, is_off in (
            ("overlong_penalty", "overlong_tokens", self.overlong_tokens == 0),
            ("kl_estimator", "kl_coef", self.kl_coef == 0),
            ("kl_target_nats", "kl_coef", self.kl_coef == 0),
            ("kl_horizon", "kl_target_nats", self.kl_target_nats is None),
        ):
            if is_off and getattr(self, setting) != type(self).model_fields[setting].default:
                raise ValueError(f"{setting} has no meaning without {other}; set both or remove it")
        return self

    @model_validator(mode="after")
    def _code_is_contained(self) -> RewardConfig:
        for term in self.terms:
            if isinstance(term, CodeReward) and self.sandbox.mode == "off":
                raise ValueError(
                    'the term of kind "code" runs what the model wrote, and sandbox.mode = "off" would let that do '
                    'anything; set it to "auto" or "strict"'
                )
            if isinstance(term, CodeReward) and term.tests_timeout_s >= self.timeout_s:
                raise ValueError(
                    f"tests_timeout_s = {term.tests_timeout_s:g} must be below timeout_s = {self.timeout_s:g}, which "
                    "also covers what is done before and after the tests; raise timeout_s or lower tests_timeout_s"
                )
        return self

    @model_validator(mode="after")
    def _something_is_rewarded(self) -> RewardConfig:
        if not any(term.weight > 0 for term in self.terms):
            raise ValueError("no term has a positive weight, so nothing would be rewarded")
        return self
