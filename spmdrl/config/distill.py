"""Tables about the models besides the policy, and about learning from them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from spmdrl.algo.formula import Divergence
from spmdrl.config.base import Count, PathText, Positive, Section, Temperature, is_set, rule
from spmdrl.config.model import FrozenModelConfig
from spmdrl.conversation import NO_TEACHER

ModelName = Annotated[str, Field(min_length=1, max_length=60, pattern=r"^[\w-]+$")]


class OtherModelConfig(FrozenModelConfig):
    path: PathText | None = None
    """Directory of the model, relative to the working directory; or its name on a hub, as `model.path`."""
    adapters: Literal["off"] | None = None
    """In place of `path`: `"off"` is the policy without the adapters of `[lora]`, which takes no memory of its own."""
    weights: Literal["policy", "lagged", "average"] | None = None
    """In place of `path`: `"policy"` is the policy itself before a step's updates, for a teacher that sees hints;
    `"lagged"` the policy as it was some steps ago; `"average"` a moving average of its weights. These two are copies
    that begin as the policy does and are saved with it."""
    every_steps: Count | None = None
    """`lagged` only: the copy is taken after each step whose number is a multiple of this. Unset: 10."""
    decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """`average` only: after each step, the average is this times itself plus the rest times the policy. Unset: 0.99."""

    @property
    def is_own_base(self) -> bool:
        """True for the policy without its adapters."""
        return self.adapters is not None

    @property
    def follows(self) -> bool:
        """True for a copy of the policy that follows it."""
        return self.weights in ("lagged", "average")

    @property
    def is_loaded(self) -> bool:
        """True for a model with weights of its own."""
        return self.path is not None or self.follows


Models = dict[ModelName, OtherModelConfig]  # [models.NAME]

# The name of the model that `kl_coef` compares with; without a table of that name it is where training began.
REFERENCE = "reference"


FEEDBACK = "feedback"  # the hint_column of what an environment returned after the attempt


def _with_hint(template: str) -> str:
    if sorted(re.findall(r"\{[^{}]*\}|[{}]", template)) != ["{hint}", "{question}"]:
        raise ValueError("must hold {hint} and {question} once each, and no other braces")
    return template


class TeacherConfig(Section):
    model: str
    """Name of the teacher's table, `[models.NAME]`."""
    tasks: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    """The data sources whose responses it teaches, by their `task`. Unset: all that no other teacher names."""
    weight: Positive = 1.0
    """Weight of its divergence, which is a mean over the tokens of these sources alone."""
    divergence: Divergence | None = None
    """Divergence from its distributions. Unset: the `divergence` of `[distill]`."""
    hint_column: str | None = None
    """Column of the data whose text it sees besides the prompt: a hint or a demonstration; `answer` is the reference
    answer. With an [environment] only `feedback`: what that showed last in the episode, after the last response. Unset:
    it sees what the policy sees."""


class DistillConfig(Section):
    teacher: str | None = None
    """Name of the only teacher: the table `[models.NAME]` that says which model it is."""
    teachers: Annotated[tuple[TeacherConfig, ...], Field(strict=False)] = ()
    """In place of `teacher`: several, each for some of the data sources. Sources without one are not distilled."""
    hint_column: str | None = None
    """`hint_column` of the only teacher."""
    hint_template: Annotated[str, AfterValidator(_with_hint)] = "{hint}\n\n{question}"
    """The prompt of a teacher that sees hints; of a chat, its last message. `{question}` is the policy's own. Feedback
    of an environment is a message before the conversation, in which `{question}` is empty."""
    max_hint_tokens: Count = 1024
    """Most tokens by which a prompt with its hint may be longer than `data.max_prompt_tokens`; of feedback, most
    tokens, and an attempt with longer feedback is not distilled."""
    divergence: Literal["sampled_kl", "reverse", "forward", "jsd"] = "reverse"
    """`sampled_kl`: log p(token) - log teacher(token) of each sampled token is taken off its advantage. The others are
    losses over the whole vocabulary: `reverse` is KL(policy || teacher), `forward` KL(teacher || policy), `jsd` the
    generalized Jensen-Shannon divergence. See `docs/distillation.md`."""
    coef: Positive = 1.0
    """Weight of the divergence: of its mean over the distilled tokens in the loss; of `sampled_kl` in the advantage."""
    beta: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """`jsd` only: weight of the teacher in the mixture that both are compared with. Unset: 0.5."""
    top_k: Count | None = None
    """With a loss over the vocabulary: compare the teacher's `top_k` most probable tokens, and all others as if they
    were one. The teacher leaves these tokens instead of its hidden states, and its head is not needed in updates.
    Unset: all tokens are compared."""
    teacher_temperature: Temperature | None = None
    """Temperature of the teacher's distribution. Unset: that of the policy, which is `rollout.temperature`, and 1 in
    fine-tuning."""

    @property
    def divergences(self) -> tuple[str, ...]:
        """The divergence of each of `by_place`."""
        return tuple(one.divergence or self.divergence for one in self.by_place)

    @property
    def over_vocabulary(self) -> bool:
        """True for a loss over the vocabulary; False for a term of the advantage."""
        return self.divergence != "sampled_kl"

    @property
    def needs_heads(self) -> bool:
        """True when updates compute the teachers' distributions, from their heads and hidden states."""
        return self.over_vocabulary and self.top_k is None

    @property
    def jsd_beta(self) -> float:
        """The weight of the teacher in the mixture of `jsd`."""
        return 0.5 if self.beta is None else self.beta

    @property
    def by_place(self) -> tuple[TeacherConfig, ...]:
        """The teachers in order; sequences name theirs by its place here."""
        return self.teachers or (TeacherConfig(model=self.teacher or "", hint_column=self.hint_column),)

    @property
    def hints(self) -> bool:
        """True when a teacher sees more than the policy."""
        return any(one.hint_column is not None for one in self.by_place)

    @property
    def reads_feedback(self) -> bool:
        """True when a teacher sees what an environment returned after the attempt."""
        return any(one.hint_column == FEEDBACK for one in self.by_place)

    def teacher_of(self, task: str) -> int:
        """Return the place of the teacher of a data source; NO_TEACHER for one that is not distilled."""
        others = next((place for place, one in enumerate(self.by_place) if one.tasks is None), NO_TEACHER)
        return next((place for place, one in enumerate(self.by_place) if task in (one.tasks or ())), others)


def frozen_models(
    models: Models, distill: DistillConfig | None, *, reference: OtherModelConfig | None
) -> dict[str, OtherModelConfig]:
    """The models besides the policy that a run uses, by name: teachers, and the reference of a run that has one."""
    used = dict.fromkeys(one.model for one in distill.by_place) if distill else {}
    found = {name: models[name] for name in used if name in models}  # a rule names those that are missing
    return found if reference is None else found | {REFERENCE: models.get(REFERENCE, reference)}


@rule(DistillConfig)
def beta_belongs_to_jsd(distill: DistillConfig) -> Iterator[str]:
    if "jsd" not in distill.divergences and is_set(distill, "beta"):
        yield f'beta has no meaning with divergence = "{distill.divergence}"; remove it, or set divergence = "jsd"'


@rule(DistillConfig)
def top_tokens_belong_to_the_vocabulary(distill: DistillConfig) -> Iterator[str]:
    if distill.top_k is not None and not distill.over_vocabulary:
        yield (
            'top_k has no meaning with divergence = "sampled_kl", which is about the sampled token alone; remove it, '
            'or set divergence = "reverse", "forward" or "jsd"'
        )


@rule(DistillConfig)
def sampled_tokens_are_those_of_all_teachers(distill: DistillConfig) -> Iterator[str]:
    for place, one in enumerate(() if distill.over_vocabulary else distill.teachers):
        if one.divergence is not None:
            yield (
                f'teachers.{place}.divergence = "{one.divergence}" is a loss over the whole vocabulary, and '
                'divergence = "sampled_kl" a term of the advantages of all distilled tokens; remove it, or set '
                'divergence = "reverse"'
            )


@rule(DistillConfig)
def hint_settings_need_a_hint(distill: DistillConfig) -> Iterator[str]:
    if distill.teachers and distill.hint_column is not None:
        yield "hint_column is that of the only teacher; set it in teachers"
    for name in ("hint_template", "max_hint_tokens"):
        if not distill.hints and is_set(distill, name):
            yield f"{name} has no meaning without hint_column; set both or remove it"


@rule(DistillConfig)
def there_is_a_teacher(distill: DistillConfig) -> Iterator[str]:
    if (distill.teacher is None) == (not distill.teachers):
        yield "set one of teacher and teachers, and not both"


@rule(DistillConfig)
def a_task_has_one_teacher(distill: DistillConfig) -> Iterator[str]:
    seen: set[str] = set()
    for place, one in enumerate(distill.teachers):
        tasks = ("all others",) if one.tasks is None else one.tasks
        for task in tasks:
            if task in seen:
                yield f'teachers.{place}.tasks: an earlier one of teachers has "{task}" too; each task has one teacher'
            seen.add(task)
