"""Tables about rewards and the processes that compute them."""

from __future__ import annotations

from collections.abc import Iterator
from string import Formatter
from typing import Annotated, Literal

from pydantic import Field

from spmdrl.config.base import (
    Coefficient,
    Count,
    Fraction,
    NonNegative,
    NonNegativeInt,
    PathText,
    Positive,
    SandboxConfig,
    Seconds,
    Section,
    is_set,
    rule,
)


class ExactReward(Section):
    kind: Literal["exact"]
    """1 when the response, stripped of white space, is the reference answer."""
    weight: Coefficient = 1.0
    """Factor of this term in the reward."""


class MathReward(Section):
    kind: Literal["math"]
    """1 when math-verify finds the response's final answer equal to the reference answer."""
    weight: Coefficient = 1.0
    """Factor of this term in the reward."""


class ReasoningGymReward(Section):
    kind: Literal["reasoning_gym"]
    """The task's own scorer, 0 to 1, of the last `<answer>` tag or else of the stripped response."""
    weight: Coefficient = 1.0
    """Factor of this term in the reward."""


class FunctionReward(Section):
    kind: Literal["function"]
    """A function of yours, sync or async, called with the keywords prompt, response, answer and metadata, and with
    `turns` of an episode if it has such a parameter."""
    function: str
    """`package.module:function` or `path/to/file.py:function`."""
    weight: Coefficient = 1.0
    """Factor of this term in the reward."""


class EnvironmentReward(Section):
    kind: Literal["environment"]
    """The sum of the rewards that `[environment]` gives for each turn."""
    weight: Coefficient = 1.0
    """Factor of this term in the reward."""


class CodeReward(Section):
    kind: Literal["code"]
    """The response's last fenced code block is a Python program that is run with the prompt's tests, in the sandbox.
    See `docs/data.md`."""
    tests: str = "tests"
    """The column that holds a prompt's tests."""
    score: Literal["share", "all"] = "share"
    """The share of tests that pass, or 1 when all of them do."""
    tests_timeout_s: Seconds = 5.0
    """Time limit for all tests of a response; those that it leaves out have failed. Below `reward.timeout_s`."""
    weight: Coefficient = 1.0
    """Factor of this term in the reward."""


class ModelReward(Section):
    kind: Literal["model"]
    """The score that a reward model gives to prompt and response: a classifier of sequences with one label. See
    `docs/preferences.md`."""
    path: PathText
    """Directory of the reward model with its tokenizer, relative to the working directory; or its name on a hub."""
    template: str = "chat"
    """The text that it scores, at its last token: `chat`, the conversation as its tokenizer's chat template writes it;
    `pairs`, prompt, response and end-of-sequence token, as `spmdrl.pairs` trains; or a text with `{prompt}` and
    `{response}`, in which control tokens may be spelt."""
    label: NonNegativeInt | None = None
    """The label whose score counts, from 0, of a model with several."""
    weight: Coefficient = 1.0
    """Factor of this term in the reward."""


RewardTerm = Annotated[
    ExactReward | MathReward | ReasoningGymReward | FunctionReward | EnvironmentReward | CodeReward | ModelReward,
    Field(discriminator="kind"),
]


class RewardConfig(Section):
    terms: Annotated[tuple[RewardTerm, ...], Field(strict=False)] = ()
    """The reward is the weighted sum of these; at least one weight is positive. Empty, for runs that learn from
    `[distill]` alone: nothing is rewarded."""
    timeout_s: Seconds = 10.0
    """Time limit for one rollout; past it the worker is killed, the reward is 0 and the failure is counted."""
    num_workers: Count = 1
    """Reward processes of each rank."""
    max_failed_fraction: Fraction = 1.0
    """Share of a step's rewards that may fail; beyond it the run ends before the update. 1: all may, and count as 0."""
    sandbox: SandboxConfig = SandboxConfig()
    """Permissions of the reward processes."""
    overlong_tokens: NonNegativeInt = 0
    """Training only: the number of tokens before `rollout.max_response_tokens` over which the reward falls linearly, by
    `overlong_penalty` at the limit (DAPO). 0: it does not fall."""
    overlong_penalty: Positive | None = None
    """`overlong_tokens` only: the penalty of a response that reaches the limit. Unset: 1."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence to the reference model in the reward, token by token; above 0 the reference model is
    loaded, and old log-probabilities are taken before every step's updates."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the divergence in the reward. It has no gradient there, and k1 is the unbiased one."""
    kl_target_nats: Positive | None = None
    """`kl_coef` only: adapt it to this mean divergence per response token. Unset: it is fixed."""
    kl_horizon: Count | None = None
    """`kl_target_nats` only: rollouts over which the coefficient adapts. Unset: 10000."""

    @property
    def model_terms(self) -> dict[int, ModelReward]:
        """The terms that are scores of reward models, by their places in `terms`."""
        return {place: term for place, term in enumerate(self.terms) if isinstance(term, ModelReward)}

    @property
    def in_processes(self) -> RewardConfig:
        """Rewards without `model_terms`: those that worker processes compute."""
        return self.model_copy(
            update={"terms": tuple(term for term in self.terms if not isinstance(term, ModelReward))}
        )

    @property
    def turn_weight(self) -> float:
        """Factor of the rewards that an environment gives for turns; 0 without a term of them."""
        return sum(term.weight for term in self.terms if isinstance(term, EnvironmentReward))


@rule(RewardConfig)
def overlong_penalty_needs_overlong_tokens(reward: RewardConfig) -> Iterator[str]:
    if reward.overlong_tokens == 0 and is_set(reward, "overlong_penalty"):
        yield "overlong_penalty has no meaning without overlong_tokens; set both or remove it"


@rule(RewardConfig)
def kl_settings_need_kl_coef(reward: RewardConfig) -> Iterator[str]:
    for name in ("kl_estimator", "kl_target_nats"):
        if reward.kl_coef == 0 and is_set(reward, name):
            yield f"{name} has no meaning without kl_coef; set both or remove it"


@rule(RewardConfig)
def kl_horizon_needs_kl_target(reward: RewardConfig) -> Iterator[str]:
    if reward.kl_target_nats is None and is_set(reward, "kl_horizon"):
        yield "kl_horizon has no meaning without kl_target_nats; set both or remove it"


@rule(RewardConfig)
def code_needs_a_sandbox(reward: RewardConfig) -> Iterator[str]:
    if reward.sandbox.mode == "off" and any(isinstance(term, CodeReward) for term in reward.terms):
        yield (
            'the term of kind "code" runs what the model wrote, and sandbox.mode = "off" would let that do '
            'anything; set it to "auto" or "strict"'
        )


@rule(RewardConfig)
def tests_end_before_the_reward(reward: RewardConfig) -> Iterator[str]:
    for term in reward.terms:
        if isinstance(term, CodeReward) and term.tests_timeout_s >= reward.timeout_s:
            yield (
                f"tests_timeout_s = {term.tests_timeout_s:g} must be below timeout_s = {reward.timeout_s:g}, which "
                "also covers what is done before and after the tests; raise timeout_s or lower tests_timeout_s"
            )


@rule(RewardConfig)
def some_term_has_a_positive_weight(reward: RewardConfig) -> Iterator[str]:
    if reward.terms and not any(term.weight > 0 for term in reward.terms):
        yield "no term has a positive weight, so nothing would be rewarded; give one of terms a weight above 0"


@rule(RewardConfig)
def templates_have_their_fields(reward: RewardConfig) -> Iterator[str]:
    for place, term in reward.model_terms.items():
        if term.template not in ("chat", "pairs"):
            yield from _template_problems(f"of terms, number {place}: template = {term.template!r}", term.template)


def _template_problems(setting: str, template: str) -> Iterator[str]:
    try:
        fields = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError as error:
        yield f"{setting} is no format: {error}; spell a brace as two"
        return
    if missing := [name for name in ("prompt", "response") if name not in fields]:
        yield f"{setting} has no {{{missing[0]}}}, which the reward model would not see; add it"
    if unknown := sorted(fields - {"prompt", "response"}):
        yield f"{setting} has {{{unknown[0]}}}; it can use {{prompt}} and {{response}}"
