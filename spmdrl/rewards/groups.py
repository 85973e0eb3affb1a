"""Judges that are asked when a step's rollouts are sampled: about whole groups, or of the policy itself.

    rewarded rollouts -> those that count -> a question for each, or for each group -> answers -> parts of their rewards

A question that cannot be asked, or whose answer does not parse, fails the rollouts that it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmdrl.config.rewards import JudgeReward
from spmdrl.rewards.judge import question_about, scores_in
from spmdrl.rewards.verifiers import RewardItem
from spmdrl.types import RewardOutcome, Rollout

Ask = Callable[[Sequence[str]], Sequence[str | ValueError]]  # an answer to each question, or why there is none


def judgments(
    name: str,
    term: JudgeReward,
    rewarded: Sequence[tuple[Rollout, RewardOutcome]],
    read: Callable[[Rollout], RewardItem],
    ask: Ask,
) -> dict[int, float | str]:
    """Return the part that a judge gives to each rollout, or why there is none, by the rollout's place.

    Rollouts whose reward has failed or has this part already, and those whose gate is closed, are in no question.
    """
    units: dict[tuple[int, int], list[int]] = {}
    for place, (rollout, outcome) in enumerate(rewarded):
        if outcome.failure is None and name not in outcome.parts and term.counts_with(outcome.parts):
            unit = (rollout.prompt.prompt_id, 0 if term.group is not None else place)
            units.setdefault(unit, []).append(place)
    found: dict[int, float | str] = {}
    asked: list[list[int]] = []
    questions: list[str] = []
    for places in units.values():
        try:
            questions.append(question_about([read(rewarded[place][0]) for place in places], term))
            asked.append(places)
        except ValueError as error:
            found |= dict.fromkeys(places, f"{name}: {error}")
    for places, answer in zip(asked, ask(questions), strict=True):
        try:
            if isinstance(answer, ValueError):
                raise answer
            found |= zip(places, scores_in(answer, term, len(places)), strict=True)
        except ValueError as error:
            found |= dict.fromkeys(places, f"{name}: {error}")
    return found
