"""Rollouts for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spmdrl.conversation import Action, Observation, ToolCall
from spmdrl.replay.recorder import write_trainer_logprobs
from spmdrl.report import RunFolder
from spmdrl.rewards.client import Rewarded
from spmdrl.rollout.files import Recording, folder_of, write_part
from spmdrl.types import Prompt, Response, RewardOutcome, Rollout, Span, Trajectory, Turn
from tests.helpers.small_run import write_config

BEGIN, END, STOP = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
MISMATCH_NATS = 0.0005  # between trainer and engine, in `write_recording`
HOSTILE = "<script>document.title = 'broken'</script><img src=x onerror=\"document.title = 'broken'\">"
HOSTILE_ENDS = "</script><script>document.title = 'broken'</script><!--<b>"
# Of a step without rollouts.
RECORDING = Recording(step=7, num_ranks=1, config={"run": {"seed": 3}}, plan={"num_steps": 9}, places={}, outcomes=())


def one_turn(prompt: Prompt, response: Response, **others: Any) -> Rollout:
    """A rollout without an environment: one response."""
    turn = Turn(context_ids=prompt.token_ids, response=response)
    defaults = {"sample_index": 0, "seed": 0, "end": response.finish_reason}
    return Rollout(prompt=prompt, trajectories=(Trajectory(turns=(turn,)),), **(defaults | others))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each byte, and the special tokens of a chat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: place for place, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=STOP,
        extra_special_tokens=[BEGIN, END],
        clean_up_tokenization_spaces=False,
    )


def chat_prompt(tokenizer: PreTrainedTokenizerFast, question: str, *, prompt_id: int = 0, **others: Any) -> Prompt:
    """A prompt in the chat's format."""
    text = f"{BEGIN}user\n{question}{END}\n{BEGIN}assistant\n"
    defaults = {"answer": None, "task": "lookup", "metadata": {}}
    return Prompt(
        prompt_id=prompt_id,
        token_ids=encoded(tokenizer, text),
        text=text,
        messages=({"role": "user", "content": question},),
        **(defaults | others),
    )


def encoded(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, ...]:
    """The text's tokens, special ones among them."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def response_of(tokenizer: PreTrainedTokenizerFast, text: str, *, version: int = 3) -> Response:
    """A response that ends the policy's turn; the last half of it was sampled by the next version."""
    token_ids = encoded(tokenizer, text + END)
    half = len(token_ids) // 2
    return Response(
        token_ids=token_ids,
        logprobs=tuple(-0.001 - 0.4 * (place % 9) ** 2 / 16 for place in range(len(token_ids))),
        finish_reason="stop",
        spans=(Span(version, len(token_ids) - half), Span(version + 1, half)),
    )


def episode(
    tokenizer: PreTrainedTokenizerFast,
    prompt: Prompt,
    turns: Sequence[tuple[str, Action, Observation | None]],
    *,
    forks_before: int | None = None,
    **others: Any,
) -> Rollout:
    """A rollout in an environment: of each turn what the policy wrote, how the environment read that, and its answer.

    A second trajectory begins before the turn `forks_before`; it repeats what the environment said last.
    """
    trajectories: list[list[Turn]] = [[]]
    context_ids = prompt.token_ids
    for number, (written, action, observation) in enumerate(turns):
        if number == forks_before:
            trajectories.append([])
            context_ids = prompt.token_ids + context_ids
        response = response_of(tokenizer, written)
        trajectories[-1].append(
            Turn(context_ids=context_ids, response=response, action=action, observation=observation)
        )
        said = [message["content"] for message in (observation.messages if observation else ())]
        replies = "".join(f"\n{BEGIN}tool\n{content}{END}" for content in said)
        context_ids = encoded(tokenizer, f"{replies}\n{BEGIN}assistant\n")
    defaults = {"sample_index": 0, "seed": 2**62 + 1, "end": "done", "initial_observation": Observation()}
    whole = tuple(Trajectory(turns=tuple(some)) for some in trajectories)
    return Rollout(prompt=prompt, trajectories=whole, **(defaults | others))


def tool_episode(
    tokenizer: PreTrainedTokenizerFast, prompt: Prompt, *, query: str, result: str, answer: str, **others: Any
) -> Rollout:
    """An episode of a call of a tool, and an answer."""
    call = f'<tool_call>\n{{"name": "lookup", "arguments": {{"key": "{query}"}}}}\n</tool_call>'
    return episode(
        tokenizer,
        prompt,
        [
            (
                f"I must look that up.\n{call}",
                Action(text="I must look that up.", tool_calls=(ToolCall(name="lookup", arguments={"key": query}),)),
                Observation(
                    messages=({"role": "tool", "content": result},),
                    metrics={"lookups": 1.0},
                    tool_errors=int(not result),
                ),
            ),
            (answer, Action(text=answer), Observation(reward=1.0, done=True)),
        ],
        **others,
    )


def summarized(trajectory: Trajectory) -> Trajectory:
    """The trajectory with a summary in the place of its first turn."""
    first, *others = trajectory.turns
    return Trajectory(turns=(dataclasses.replace(first, is_summary=True, replaced_tokens=9), *others))


def write_recording(folder: Path, outcomes: Sequence[Rewarded], tokenizer: PreTrainedTokenizerFast) -> RunFolder:
    """Write step 7 of a run as the run would: its rollouts, and what the trainer says about the trained tokens."""
    tokenizer.save_pretrained(folder / "model")
    (folder / "model/config.json").write_text("{}")
    run = RunFolder(folder / "runs/run").create()
    write_config(folder).rename(run.config)
    group_size = 1 + max(rollout.sample_index for rollout, _ in outcomes)
    places = {
        prompt_id: place
        for place, prompt_id in enumerate(dict.fromkeys(rollout.prompt.prompt_id for rollout, _ in outcomes))
    }
    recording = Recording(
        step=7,
        num_ranks=1,
        config={"rollout": {"group_size": group_size}},
        plan={},
        places=places,
        outcomes=tuple(outcomes),
    )
    place = folder_of(run.rollouts, 7)
    place.mkdir(parents=True)
    write_part(place / "rank-0.safetensors", recording)
    trainers = {
        (places[rollout.prompt.prompt_id] * group_size + rollout.sample_index, trajectory.token_ids): torch.tensor(
            [logprob + MISMATCH_NATS if sampled else torch.nan for logprob, sampled in tokens]
        )
        for rollout, _ in outcomes
        if not (rollout.is_masked or rollout.is_baseline)
        for trajectory in rollout.trajectories
        for tokens in [list(zip(trajectory.logprobs, trajectory.trained, strict=True))]
    }
    write_trainer_logprobs(run.rollouts, 7, 0, trainers)
    return run


def recorded_episodes(tokenizer: PreTrainedTokenizerFast) -> list[Rewarded]:
    """Episodes of two prompts: with a tool, not trained on, with a rewritten history, and of an environment that
    failed; some policies write HTML."""
    capital = chat_prompt(tokenizer, "Which city lies on the Zürichsee? 🏔", answer="Zürich")
    hostile = chat_prompt(tokenizer, f"Repeat: {HOSTILE}", prompt_id=5)
    good = tool_episode(
        tokenizer, capital, query="Zürichsee", result="A lake.\tCity:  Zürich\n", answer="It is Zürich 🏔."
    )
    bad = tool_episode(
        tokenizer, capital, query=HOSTILE, result="", answer=f"{HOSTILE_ENDS}\u202eabc", sample_index=1, is_masked=True
    )
    forked = tool_episode(
        tokenizer, hostile, query="x", result=HOSTILE, answer="no\u200bthing", forks_before=1, end="max_turns"
    )
    forked = dataclasses.replace(forked, trajectories=tuple(map(summarized, forked.trajectories)))
    broken = episode(
        tokenizer,
        hostile,
        [(HOSTILE, Action(text=HOSTILE, malformed=f"no JSON: {HOSTILE}"), None)],
        sample_index=1,
        end="environment_error",
        failure=f"RuntimeError: {HOSTILE}",
    )
    outcome = RewardOutcome(reward=1.0, parts={"environment": 1.0})
    nothing = dataclasses.replace(outcome, reward=0.0, parts={}, failure=f"ValueError: {HOSTILE_ENDS}")
    return [(good, outcome), (bad, outcome), (forked, outcome), (broken, nothing)]
