"""Tables about rewards and the processes that compute them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

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
    regular_expression,
    rule,
)
from spmdrl.config.model import FrozenModelConfig


class _Term(Section):
    weight: Coefficient = 1.0
    """Factor of this term in the reward."""
    gate: str | None = None
    """Name of another term that this one depends on: where its part is below `floor`, this one counts 0. A term's name
    is its kind, and `KIND_2` for the second of a kind."""
    floor: Coefficient | None = None
    """`gate` only: the part of that term from which this one counts. Unset: 1."""

    def counts_with(self, parts: Mapping[str, float]) -> bool:
        """False where its gate is among the parts of a reward, and below the floor."""
        lowest = 1.0 if self.floor is None else self.floor
        return self.gate is None or self.gate not in parts or parts[self.gate] >= lowest


class ExactReward(_Term):
    kind: Literal["exact"]
    """1 when the response, stripped of white space, is the reference answer."""


class MathReward(_Term):
    kind: Literal["math"]
    """1 when math-verify finds the response's final answer equal to the reference answer."""


class ChoiceReward(_Term):
    kind: Literal["choice"]
    """Multiple choice: 1 when the letter that the response ends with is the reference answer. See `docs/data.md`."""


THINK_AND_ANSWER = r"<think>((?!</?think>).)*</think>\s*<answer>((?!</?answer>).)*</answer>"


class FormatReward(_Term):
    kind: Literal["format"]
    """1 when the whole response, stripped of white space, has the form of `pattern`."""
    pattern: Annotated[str, AfterValidator(regular_expression)] = THINK_AND_ANSWER
    """A regular expression of Python's, whose dot matches line breaks too. The default asks for `<think>...</think>`
    and then `<answer>...</answer>`."""


class LengthReward(_Term):
    kind: Literal["length"]
    """1 up to `full_characters`, and from there linearly down to 0 at `max_characters`."""
    full_characters: NonNegativeInt = 2000
    """Characters of a response that cost nothing."""
    max_characters: Count = 8000
    """Characters from which a response earns nothing; more than `full_characters`."""


class ReasoningGymReward(_Term):
    kind: Literal["reasoning_gym"]
    """The task's own scorer, 0 to 1, of the last `<answer>` tag or else of the stripped response."""


class FunctionReward(_Term):
    kind: Literal["function"]
    """A function of yours, sync or async, called with the keywords prompt, response, answer and metadata, and with
    `turns` of an episode if it has such a parameter."""
    function: str
    """`package.module:function` or `path/to/file.py:function`."""


class EnvironmentReward(_Term):
    kind: Literal["environment"]
    """The sum of the rewards that `[environment]` gives for each turn."""


class CodeReward(_Term):
    kind: Literal["code"]
    """The response's last fenced code block is a Python program that is run with the prompt's tests, in the sandbox.
    See `docs/data.md`."""
    tests: str = "tests"
    """The column that holds a prompt's tests."""
    score: Literal["share", "all"] = "share"
    """The share of tests that pass, or 1 when all of them do."""
    tests_timeout_s: Seconds = 5.0
    """Time limit for all tests of a response; those that it leaves out have failed. Below `reward.timeout_s`."""


class ModelReward(FrozenModelConfig, _Term):
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


_QUESTION = """\
Grade a response to a task.

Task:
{prompt}

Response:
{response}

What counts:
{rubric}

Say briefly what is right and what is wrong. Then end with your score, from {lowest} to {highest}, as JSON: \
{{"score": NUMBER}}"""
_ABOUT_A_GROUP = """\
Compare responses to a task.

Task:
{prompt}

{responses}

What counts:
{rubric}

Say briefly what sets them apart. Then end with """
_GROUP_QUESTIONS = {
    "scores": _ABOUT_A_GROUP
    + """a score from {lowest} to {highest} for each of the {count}, in their order, as JSON: \
{{"scores": [NUMBER, ...]}}""",
    "ranking": _ABOUT_A_GROUP
    + """the numbers of all {count}, from the best response to the worst, as JSON: \
{{"ranking": [NUMBER, ...]}}""",
}
POLICY = "policy"  # the address of the judge that is the policy itself


def _address(url: str) -> str:
    if url != POLICY and not re.match(r"https?://[^/\s]", url):
        raise ValueError('is no address; it is such as "http://localhost:8000/v1", or "policy"')
    return url


def _one_group(pattern: str) -> str:
    groups = re.compile(regular_expression(pattern)).groups
    if groups != 1:
        raise ValueError(f"has {groups} groups; put the score, and nothing else, into one: (...)")
    return pattern


class JudgeReward(_Term):
    kind: Literal["judge"]
    """The score that a language model gives to a response. See `docs/judges.md`."""
    url: Annotated[str, AfterValidator(_address)]
    """Address of an OpenAI-compatible server, such as `http://localhost:8000/v1`; or `policy`: the policy judges its
    own responses, with the weights that its engine has when they are sampled, before that sleeps."""
    model: str | None = None
    """The judge's name at that server, which every address needs."""
    group: Literal["scores", "ranking"] | None = None
    """Ask once about all responses to a prompt: for a score of each, or for their ranking, of which the best counts as
    `highest` and the worst as `lowest`. Unset: a question for each response."""
    rubric: str | None = None
    """What counts: the template's `{rubric}`. Unset: that is a column of the data."""
    template: str | None = None
    """The question, with `{response}`, or of a `group` `{responses}` and `{count}`; with `{prompt}`, `{answer}` (the
    reference answer), `{rubric}`, `{lowest}`, `{highest}` and columns of the data by their names. Unset: a question of
    ours."""
    system_prompt: str | None = None
    """Message before the question. Unset: there is none."""
    score_field: str | None = None
    """Field of the last outermost JSON object of the answer that has it: a number, true for 1 or false for 0, and of a
    `group` a list of numbers. Unset: `score`, or what `group` says."""
    score_pattern: Annotated[str, AfterValidator(_one_group)] | None = None
    """In place of `score_field`: a regular expression whose one group is the score; its last match counts."""
    lowest: Coefficient = 0.0
    """The worst score, a reward of 0."""
    highest: Coefficient = 10.0
    """The best score, a reward of 1. A score beyond the two fails."""
    max_in_flight: Count = 16
    """Questions of each rank that the server has at once."""
    max_retries: NonNegativeInt = 4
    """Times that a question is asked again where the server is busy, fails or does not answer, after longer and longer
    pauses."""
    timeout_s: Seconds = 60.0
    """Time limit for one try. All tries and pauses together have `1 + max_retries` times as much."""
    max_question_tokens: Count = 4096
    """`url = "policy"` only: most tokens of a question; a longer one fails. The engine has room for it and its
    answer."""
    max_answer_tokens: Count = 1024
    """Most tokens of the judge's answer."""
    temperature: NonNegative = 0.0
    """Temperature at which the judge answers."""
    params: dict[str, Any] = Field(default_factory=dict)
    """More fields of the request, such as `response_format`."""
    api_key_variable: str | None = None
    """Name of the environment variable with the server's key. Unset: it needs none."""

    @property
    def is_policy(self) -> bool:
        """True where the policy judges itself."""
        return self.url == POLICY

    @property
    def waits_for_groups(self) -> bool:
        """True where it is asked when all of a step is sampled."""
        return self.is_policy or self.group is not None

    @property
    def question(self) -> str:
        """The template of its questions."""
        return self.template or (_QUESTION if self.group is None else _GROUP_QUESTIONS[self.group])

    @property
    def field(self) -> str:
        """The field of its answers that has the score."""
        return self.score_field or self.group or "score"

    @property
    def fields(self) -> set[str]:
        """The names of the template's fields. Raises ValueError where it is no format."""
        return _fields(self.question)


RewardTerm = Annotated[
    ExactReward
    | MathReward
    | ReasoningGymReward
    | FunctionReward
    | EnvironmentReward
    | CodeReward
    | ChoiceReward
    | FormatReward
    | LengthReward
    | ModelReward
    | JudgeReward,
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
    def has_any(self) -> bool:
        """True when something is rewarded; else every reward is 0, and teachers say what is better."""
        return bool(self.terms) or self.overlong_tokens > 0

    @property
    def model_terms(self) -> dict[int, ModelReward]:
        """The terms that are scores of reward models, by their places in `terms`."""
        return {place: term for place, term in enumerate(self.terms) if isinstance(term, ModelReward)}

    @property
    def named(self) -> dict[str, RewardTerm]:
        """The terms by the names of their parts of a reward: their kinds, and for the second of a kind `KIND_2`."""
        seen: Counter[str] = Counter()
        found: dict[str, RewardTerm] = {}
        for term in self.terms:
            seen[term.kind] += 1
            found[term.kind if seen[term.kind] == 1 else f"{term.kind}_{seen[term.kind]}"] = term
        return found

    @property
    def in_processes(self) -> dict[str, RewardTerm]:
        """The terms that worker processes compute, by name: neither `model_terms` nor `judges`."""
        return {name: term for name, term in self.named.items() if not isinstance(term, ModelReward | JudgeReward)}

    @property
    def judges(self) -> dict[str, JudgeReward]:
        """The terms that are scores of judges, by name."""
        return {name: term for name, term in self.named.items() if isinstance(term, JudgeReward)}

    @property
    def group_judges(self) -> dict[str, JudgeReward]:
        """The judges that are asked when all of a step is sampled, by name."""
        return {name: term for name, term in self.judges.items() if term.waits_for_groups}

    @property
    def group_terms(self) -> dict[int, RewardTerm]:
        """The terms that are known when a step has its groups, by their places in `terms`: `model_terms`, and judges of
        groups or by the policy."""
        late = (*self.model_terms.values(), *self.group_judges.values())
        return {place: term for place, term in enumerate(self.terms) if any(term is one for one in late)}

    @property
    def max_judged_tokens(self) -> int:
        """Most tokens of a question to the policy about its own responses, with its answer; 0: it is asked nothing."""
        asked = (term for term in self.judges.values() if term.is_policy)
        return max((term.max_question_tokens + term.max_answer_tokens for term in asked), default=0)

    def gated(self, parts: Mapping[str, float]) -> dict[str, float]:
        """The parts of the terms, by name, with 0 for those whose gate is closed."""
        terms = ((name, term) for name, term in self.named.items() if name in parts)
        return {name: parts[name] if term.counts_with(parts) else 0.0 for name, term in terms}

    def total(self, parts: Mapping[str, float]) -> float:
        """The weighted sum of the parts of the terms, by name."""
        return sum(self.named[name].weight * part for name, part in self.gated(parts).items())

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
def lengths_fall_to_their_end(reward: RewardConfig) -> Iterator[str]:
    for term in reward.terms:
        if isinstance(term, LengthReward) and term.max_characters <= term.full_characters:
            yield (
                f"terms has max_characters = {term.max_characters}, which must be above full_characters = "
                f"{term.full_characters}, where the reward begins to fall"
            )


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
def gates_are_other_terms(reward: RewardConfig) -> Iterator[str]:
    named = reward.named
    for name, term in named.items():
        if term.gate is None:
            if term.floor is not None:
                yield f'of terms, "{name}" has a floor and no gate; set both or remove it'
        elif term.gate == name or term.gate not in named:
            others = ", ".join(f'"{other}"' for other in named if other != name) or "none"
            yield f'of terms, "{name}" has gate = "{term.gate}", which is no other term; there are {others}'
        elif isinstance(term, EnvironmentReward):
            yield f'of terms, "{name}" has a gate, but is given turn by turn, before the gate is known; remove it'
        elif named[term.gate].gate is not None:
            yield f'of terms, "{name}" has gate = "{term.gate}", which has a gate itself; name that one'


@rule(RewardConfig)
def templates_have_their_fields(reward: RewardConfig) -> Iterator[str]:
    for place, term in reward.model_terms.items():
        if term.template not in ("chat", "pairs"):
            yield from _template_problems(f"of terms, number {place}: template = {term.template!r}", term.template)


@rule(RewardConfig)
def judges_see_the_response(reward: RewardConfig) -> Iterator[str]:
    for where, term in _judges(reward):
        wanted, other = ("response", "responses") if term.group is None else ("responses", "response")
        try:
            fields = term.fields
        except ValueError as error:
            yield f"{where} template is no format: {error}; spell a brace as two"
            continue
        if wanted not in fields:
            yield f"{where} template has no {{{wanted}}}, which the judge would not see; add it"
        if other in fields:
            asked = "a question is about one response" if term.group is None else "a question is about a group"
            yield f"{where} template has {{{other}}}, and {asked}; write {{{wanted}}}, or change group"
        if term.rubric is not None and "rubric" not in fields:
            yield f"{where} rubric is set, and template has no {{rubric}}; add it, or remove rubric"
        if strange := sorted(name for name in fields if not name.isidentifier()):
            yield f"{where} template has {{{strange[0]}}}, which is no name; spell a brace as two"


@rule(RewardConfig)
def scores_of_judges_can_be_read(reward: RewardConfig) -> Iterator[str]:
    for where, term in _judges(reward):
        if term.lowest >= term.highest:
            yield f"{where} lowest = {term.lowest:g} must be below highest = {term.highest:g}"
        if term.score_pattern is not None and term.score_field is not None:
            yield f"{where} set one of score_field and score_pattern, and not both"
        if term.score_pattern is not None and term.group is not None:
            yield f"{where} score_pattern finds one score, and group needs those of all responses; use score_field"
        for name in ("lowest", "highest"):
            if term.group == "ranking" and is_set(term, name):
                yield f'{where} {name} has no meaning for group = "ranking", which counts places; remove it'


@rule(RewardConfig)
def judges_are_asked_somewhere(reward: RewardConfig) -> Iterator[str]:
    for where, term in _judges(reward):
        if term.is_policy:
            for name in ("model", "max_in_flight", "max_retries", "timeout_s", "params", "api_key_variable"):
                if is_set(term, name):
                    yield f'{where} {name} belongs to a server, and url = "policy" needs none; remove it'
        else:
            if term.model is None:
                yield f"{where} model is not set; set it to the name that the judge has at {term.url}"
            if is_set(term, "max_question_tokens"):
                yield f'{where} max_question_tokens has no meaning without url = "policy"; remove it'


def _judges(reward: RewardConfig) -> Iterator[tuple[str, JudgeReward]]:
    """Yield each judge with the words that begin a sentence about it."""
    for place, term in enumerate(reward.terms):
        if isinstance(term, JudgeReward):
            yield f"of terms, number {place}:", term


def _fields(template: str) -> set[str]:
    """The names of a format's fields. Raises ValueError where it is none."""
    found = set()
    for _, name, form, conversion in Formatter().parse(template):
        if form or conversion:
            raise ValueError(f"{{{name}}} has a form of its own")
        found |= set() if name is None else {name}
    return found


def _template_problems(setting: str, template: str) -> Iterator[str]:
    try:
        fields = _fields(template)
    except ValueError as error:
        yield f"{setting} is no format: {error}; spell a brace as two"
        return
    if missing := [name for name in ("prompt", "response") if name not in fields]:
        yield f"{setting} has no {{{missing[0]}}}, which the reward model would not see; add it"
    if unknown := sorted(fields - {"prompt", "response"}):
        yield f"{setting} has {{{unknown[0]}}}; it can use {{prompt}} and {{response}}"
