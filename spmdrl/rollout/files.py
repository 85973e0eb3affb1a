"""The rollouts and rewards of a step as files, from which the step can be repeated: `debug.save_rollouts`.

    RUN/rollouts/step-00000012/rank-0.safetensors    one for each rank that trains, before packing

A folder gets its final name when every rank has written its part. Numbers are tensors; texts are JSON in a tensor of
bytes, because the size of a safetensors header is limited.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.config import Config, EvalConfig
from spmdrl.config.plan import Plan
from spmdrl.config.strict import as_written, parse_own_json
from spmdrl.dist.collectives import raise_on_all_ranks
from spmdrl.model.weight_files import write_tensors
from spmdrl.rewards.client import Rewarded, known_reward
from spmdrl.rollout.codec import ACTIONS, IMAGES, OBSERVATIONS, PROMPTS
from spmdrl.rollout.collect import Collected
from spmdrl.rollout.sampler import Sampler
from spmdrl.types import (
    Candidates,
    Response,
    RewardOutcome,
    Rollout,
    Routes,
    Span,
    TokenRecord,
    Trajectory,
    Turn,
    UserError,
)

_PREFIX = "step-"
_WRITER = "debug.save_rollouts"
_WORDS_OF_PROMPTS = {"text", "answer", "task", "messages", "images"}
_FORM = "4"  # of the files; 1 had one response for each rollout, 2 no images, 3 no routes
_NO_ROUTES, _NO_CANDIDATES = (0, 0, 0, 0), (0, 0, 0)
RecordT = TypeVar("RecordT", bound=TokenRecord)
_NOT_REWRITTEN = (False, True, 0)  # a turn: no summary, trained, and no tokens that it has replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One rank's rollouts of a step, with their rewards. Prompts have no metadata: only rewards read it. Of images
    there is where they are among the tokens; their pixels are read from the data again."""

    step: int
    num_ranks: int  # that train; the step has a recording of each
    config: Mapping[str, Any]  # the run's settings, in JSON's types
    plan: Mapping[str, Any]  # the counts that follow from them
    places: Mapping[int, int]  # of every rank's groups in the step's global order, by prompt_id
    outcomes: tuple[Rewarded, ...]  # whole groups in order, with their baselines


def folder_of(folder: Path, step: int) -> Path:
    """Name the folder with the recordings of a step."""
    return folder / f"{_PREFIX}{step:08d}"


def recorded_steps(folder: Path) -> list[int]:
    """List the steps that every rank has recorded, in order."""
    names = (path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*"))
    return sorted(int(name) for name in names if name.isdecimal())


def write(folder: Path, recording: Recording, mesh: DeviceMesh, *, keep_last: int | None) -> None:
    """Write this rank's part of a step, and remove all but the `keep_last` newest; every rank of the mesh must call
    this. Raises UserError on every rank when one of them cannot write."""
    final = folder_of(folder, recording.step)
    unfinished = final.with_suffix(".unfinished")
    is_first = mesh.get_local_rank() == 0
    with raise_on_all_ranks(mesh), disk_errors_explained(final):
        if is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
    with raise_on_all_ranks(mesh), disk_errors_explained(final):
        write_part(_part_of(unfinished, mesh.get_local_rank()), recording)
    with raise_on_all_ranks(mesh), disk_errors_explained(final):
        if is_first:
            shutil.rmtree(final, ignore_errors=True)
            unfinished.rename(final)
            for step in recorded_steps(folder)[: -keep_last if keep_last else 0]:
                shutil.rmtree(folder_of(folder, step))


@contextmanager
def disk_errors_explained(path: Path) -> Iterator[None]:
    """Turn errors of the disk into a UserError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"debug.save_rollouts: {path} cannot be written ({error}); make room there, or remove the setting"
        ) from error


def read_parts(folder: Path, step: int, *, index: int = 0, count: int = 1) -> list[Recording]:
    """Read the recordings of ranks index, index + count, ... of a step: all of them, or one reader's share.

    Raises UserError, naming the file, when one is missing or damaged.
    """
    place = folder_of(folder, step)
    if not place.is_dir():
        have = ", ".join(map(str, recorded_steps(folder))) or "none"
        raise UserError(f"{folder} holds no rollouts of step {step}; the steps it holds: {have}")
    first = _part_of(place, 0)
    with as_written(first, _WRITER):
        num_ranks = int(read_header(first)["num_ranks"])
    return [read_part(_part_of(place, rank)) for rank in range(index, num_ranks, count)]


def _part_of(place: Path, rank: int) -> Path:
    return place / f"rank-{rank}.safetensors"


def write_part(path: Path, recording: Recording) -> None:
    """Write one rank's file."""
    header = {
        "form": _FORM,
        "step": str(recording.step),
        "num_ranks": str(recording.num_ranks),
        "config": json.dumps(recording.config),
        "plan": json.dumps(recording.plan),
    }
    write_tensors(path, _tensors(recording), header)


def read_part(path: Path) -> Recording:
    """Read one rank's file; prompts have no metadata. Raises UserError when it is missing or damaged."""
    with as_written(path, _WRITER):
        header = read_header(path)
        if header.get("form", _FORM) != _FORM:
            raise UserError(f"{path} has the form of an earlier version; record the rollouts again")
        tensors = read_tensors(path)
        return Recording(
            step=int(header["step"]),
            num_ranks=int(header["num_ranks"]),
            config=parse_own_json(header["config"]),
            plan=parse_own_json(header["plan"]),
            places=dict(tensors["places"].tolist()),
            outcomes=tuple(_outcomes(tensors)),
        )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); it is missing or damaged") from error


def read_header(path: Path) -> dict[str, str]:
    """Read a file's header. Raises UserError when it is missing or damaged."""
    with _opened(path) as file:
        return file.metadata() or {}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file. Raises UserError when it is missing or damaged."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dictionary


def as_bytes(value: Any) -> Tensor:
    """Encode a value as the bytes of its JSON, [n] uint8."""
    return torch.frombuffer(bytearray(json.dumps(value), encoding="utf-8"), dtype=torch.uint8)


def from_bytes(tensor: Tensor) -> Any:
    """Decode a value that `as_bytes` encoded."""
    return parse_own_json(tensor.numpy().tobytes())


def _tensors(recording: Recording) -> dict[str, Tensor]:
    """Lay out N rollouts of P prompts, with J trajectories of K turns in all, as flat columns, with the number of
    entries of each rollout, trajectory, turn or prompt."""
    rollouts = [rollout for rollout, _ in recording.outcomes]
    outcomes = [outcome for _, outcome in recording.outcomes]
    prompts = {rollout.prompt.prompt_id: rollout.prompt for rollout in rollouts}
    trajectories = [trajectory for rollout in rollouts for trajectory in rollout.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    responses = [turn.response for turn in turns]
    spans = [span for response in responses for span in response.spans]
    rewritten = [(turn.is_summary, turn.is_trained, turn.replaced_tokens) for turn in turns]

    def whole(numbers: Iterable[int]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64)

    def real(numbers: Iterable[float]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.float64)  # what Python has, to the last bit

    return {
        "places": whole(number for place in recording.places.items() for number in place).view(-1, 2),
        "prompt_id": whole(prompts),  # [P]
        "prompt_tokens": whole(len(prompt.token_ids) for prompt in prompts.values()),  # [P]
        "prompt_token_ids": whole(token for prompt in prompts.values() for token in prompt.token_ids),
        "prompt_of": whole(rollout.prompt.prompt_id for rollout in rollouts),  # [N], as are the next seven
        "sample_index": whole(rollout.sample_index for rollout in rollouts),
        "seed": whole(rollout.seed for rollout in rollouts),
        "is_masked": whole(rollout.is_masked for rollout in rollouts),
        "is_baseline": whole(rollout.is_baseline for rollout in rollouts),
        "reward": real(outcome.reward for outcome in outcomes),
        "num_trajectories": whole(len(rollout.trajectories) for rollout in rollouts),
        "num_turns": whole(len(trajectory.turns) for trajectory in trajectories),  # [J]
        "context_tokens": whole(len(turn.context_ids) for turn in turns),  # [K]
        "context_ids": whole(token for turn in turns for token in turn.context_ids),
        "response_tokens": whole(len(response.token_ids) for response in responses),  # [K]
        "token_ids": whole(token for response in responses for token in response.token_ids),
        "logprobs": real(logprob for response in responses for logprob in response.logprobs),  # nats
        "num_spans": whole(len(response.spans) for response in responses),  # [K]
        "spans": whole(number for span in spans for number in (span.version, span.num_tokens)).view(-1, 2),
        **_record_columns("routes", [response.routes for response in responses], _NO_ROUTES),
        **_record_columns("candidates", [response.candidates for response in responses], _NO_CANDIDATES),
        # [K, 3], where a conversation has been rewritten
        **({"rewritten": whole(itertools.chain(*rewritten)).view(-1, 3)} if {*rewritten} - {_NOT_REWRITTEN} else {}),
        "texts": as_bytes(
            {
                "prompts": [
                    {name: value for name, value in prompt.items() if name in _WORDS_OF_PROMPTS}
                    for prompt in PROMPTS.dump(list(prompts.values()))
                ],
                "turn_images": [IMAGES.dump(turn.images) for turn in turns],
                "ends": [rollout.end for rollout in rollouts],
                "environment_failures": [rollout.failure for rollout in rollouts],
                "greetings": OBSERVATIONS.dump([rollout.initial_observation for rollout in rollouts]),
                "finish_reasons": [response.finish_reason for response in responses],
                "actions": ACTIONS.dump([turn.action for turn in turns]),
                "observations": OBSERVATIONS.dump([turn.observation for turn in turns]),
                "parts": [outcome.parts for outcome in outcomes],
                "failures": [outcome.failure for outcome in outcomes],
            }
        ),
    }


def _outcomes(tensors: Mapping[str, Tensor]) -> Iterator[Rewarded]:
    texts = from_bytes(tensors["texts"])
    wide = ("texts", "routes", "candidates")
    columns = {name: tensor.tolist() for name, tensor in tensors.items() if name not in wide}
    columns["routes"] = list(_records(Routes, tensors["routes"], columns["routes_of"]))
    nowhere = [_NO_CANDIDATES] * len(columns["routes"])
    flat = tensors.get("candidates", torch.empty(0))
    columns["candidates"] = list(_records(Candidates, flat, columns.get("candidates_of", nowhere)))
    numbers = zip(columns["prompt_id"], _cut(columns["prompt_token_ids"], columns["prompt_tokens"]), strict=True)
    prompts = PROMPTS.load(
        [
            {**words, "prompt_id": prompt_id, "token_ids": token_ids, "metadata": {}}
            for (prompt_id, token_ids), words in zip(numbers, texts["prompts"], strict=True)
        ]
    )
    prompt_by_id = {prompt.prompt_id: prompt for prompt in prompts}
    trajectories = [
        Trajectory(turns=tuple(turns)) for turns in _cut(list(_turns(columns, texts)), columns["num_turns"])
    ]
    rollouts = [
        Rollout(
            prompt=prompt_by_id[prompt_id],
            sample_index=sample_index,
            seed=seed,
            trajectories=tuple(of_rollout),
            end=end,
            initial_observation=observation,
            failure=failure,
            is_masked=bool(is_masked),
            is_baseline=bool(is_baseline),
        )
        for prompt_id, sample_index, seed, is_masked, is_baseline, of_rollout, end, observation, failure in zip(
            *(columns[name] for name in ("prompt_of", "sample_index", "seed", "is_masked", "is_baseline")),
            _cut(trajectories, columns["num_trajectories"]),
            texts["ends"],
            OBSERVATIONS.load(texts["greetings"]),
            texts["environment_failures"],
            strict=True,
        )
    ]
    outcomes = [
        RewardOutcome(reward=reward, parts=parts, failure=failure)
        for reward, parts, failure in zip(columns["reward"], texts["parts"], texts["failures"], strict=True)
    ]
    return zip(rollouts, outcomes, strict=True)


def _record_columns(name: str, records: Sequence[TokenRecord | None], none: tuple[int, ...]) -> dict[str, Tensor]:
    """Lay out what engines reported of turns, with the first token and the shape of each."""
    found = [record.tensor.flatten() for record in records if record is not None]
    places = [none if record is None else (record.start, *record.shape) for record in records]
    flat = torch.cat(found) if found else torch.empty(0, dtype=torch.int16)
    return {name: flat, f"{name}_of": torch.tensor(places, dtype=torch.int64).view(-1, len(none))}  # [K, 3 or 4]


def _records(kind: type[RecordT], flat: Tensor, places: Sequence[Sequence[int]]) -> Iterator[RecordT | None]:
    """Yield what was reported of each turn."""
    sizes = [math.prod(shape) for _, *shape in places]
    for (start, *shape), content in zip(places, flat.split(sizes), strict=True):
        yield kind.of(start, content.view(*shape)) if any(shape) else None


def _turns(columns: Mapping[str, Any], texts: Mapping[str, Any]) -> Iterator[Turn]:
    not_rewritten = [_NOT_REWRITTEN] * len(texts["finish_reasons"])
    for (
        context_ids,
        token_ids,
        logprobs,
        spans,
        routes,
        candidates,
        finish_reason,
        action,
        observation,
        images,
        rewritten,
    ) in zip(
        _cut(columns["context_ids"], columns["context_tokens"]),
        _cut(columns["token_ids"], columns["response_tokens"]),
        _cut(columns["logprobs"], columns["response_tokens"]),
        _cut(columns["spans"], columns["num_spans"]),
        columns["routes"],
        columns["candidates"],
        texts["finish_reasons"],
        ACTIONS.load(texts["actions"]),
        OBSERVATIONS.load(texts["observations"]),
        map(IMAGES.load, texts["turn_images"]),
        columns.get("rewritten", not_rewritten),
        strict=True,
    ):
        response = Response(
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            finish_reason=finish_reason,
            spans=tuple(Span(*span) for span in spans),
            routes=routes,
            candidates=candidates,
        )
        is_summary, is_trained, replaced_tokens = rewritten
        yield Turn(
            context_ids=tuple(context_ids),
            response=response,
            action=action,
            observation=observation,
            images=images,
            is_summary=bool(is_summary),
            is_trained=bool(is_trained),
            replaced_tokens=replaced_tokens,
        )


def _cut(flat: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    """Split the entries: the first counts[0] belong to the first, and so on."""
    edges = itertools.accumulate(counts, initial=0)
    return [flat[start:end] for start, end in itertools.pairwise(edges)]


# Train on recorded rollouts, `debug.load_rollouts`: a sampler that reads files instead of asking an engine.


class RecordedSampler(Sampler):
    """Reads each step from files.

    Rank i of R reads what ranks i, i + R, i + 2R, ... recorded: with as many ranks as before, each has what it had.
    """

    def __init__(self, cfg: Config, plan: Plan, mesh: DeviceMesh) -> None:
        """`mesh` holds the ranks that train."""
        assert cfg.debug.load_rollouts is not None
        self._cfg, self._plan, self._mesh = cfg, plan, mesh
        self._folder = Path(cfg.debug.load_rollouts)

    def collect(self, step: int) -> Collected:
        """Read the step, with the rewards that were recorded. There are no answers to the probe."""
        with raise_on_all_ranks(self._mesh):
            parts = read_parts(self._folder, step, index=self._mesh.get_local_rank(), count=self._mesh.size())
            for part in parts:
                _refuse_other_rollouts(part, self._cfg, self._plan)
        return as_collected(parts, group_size=self._cfg.rollout.group_size)

    def restore(self, saved: Mapping[str, Any] | None, *, step: int) -> None:
        """Raises UserError when a later step was not recorded."""
        with raise_on_all_ranks(self._mesh):
            missing = set(range(step + 1, self._plan.num_steps + 1)) - set(recorded_steps(self._folder))
            if missing:
                shorter = f"set num_steps to {min(missing) - 1}, or " if min(missing) > step + 1 else ""
                raise UserError(
                    f"debug.load_rollouts = {self._folder} has no rollouts of step {min(missing)}, but run.num_steps = "
                    f'{self._plan.num_steps}; {shorter}record every step: debug.save_rollouts = "all"'
                )


def as_collected(parts: Sequence[Recording], *, group_size: int) -> Collected:
    """Join some ranks' parts of a step, with the rewards that were recorded."""
    return Collected(
        pending=[known_reward(*outcome) for part in parts for outcome in part.outcomes],
        metrics={},
        places=parts[0].places if parts else {},
        group_size=group_size,
    )


def held_out_before(cfg: Config) -> EvalConfig | None:
    """Return the table of the held-out prompts of the run that recorded, whose stream of prompts did without them.

    A run that reads recordings holds none out. None where that run did not either, or recorded nothing.
    """
    folder = Path(cfg.debug.load_rollouts or "")
    if not (steps := recorded_steps(folder)):
        return None
    written = read_parts(folder, steps[0])[0].config.get("eval")
    with as_written(folder, "debug.save_rollouts"):
        return None if written is None else EvalConfig.model_validate_json(json.dumps(written))


def recording_problems(cfg: Config) -> Iterator[str]:
    """Yield a sentence when there is nothing to train on, or when it was recorded with other settings."""
    folder = Path(cfg.debug.load_rollouts or "")
    if not (steps := recorded_steps(folder)):
        yield (
            f"debug.load_rollouts = {folder} holds no rollouts; set it to the folder `rollouts` of a run with "
            "debug.save_rollouts"
        )
        return
    try:
        recorded = read_parts(folder, steps[0])[0].config
    except UserError as error:
        yield str(error)
        return
    before, now = recorded["rollout"], cfg.rollout
    if cfg.correction.router_replay == "R3" and recorded["correction"].get("router_replay") != "R3":
        yield (
            f'debug.load_rollouts = {folder} was recorded without routes, which correction.router_replay = "R3" '
            'replays; set it to "none", or record with it'
        )
    for setting, default in (("group_size", None), ("temperature", None), ("top_k", None), ("top_p", 1.0)):
        if (recorded_with := before.get(setting, default)) != getattr(now, setting):
            yield (
                f"debug.load_rollouts = {folder} was recorded with rollout.{setting} = {recorded_with}, but now it is "
                f"{getattr(now, setting)}; set it to {recorded_with}"
            )


def _refuse_other_rollouts(part: Recording, cfg: Config, plan: Plan) -> None:
    """Raise UserError when the rollouts do not fit the settings."""
    longest = max((len(t.token_ids) for rollout, _ in part.outcomes for t in rollout.trajectories), default=0)
    if longest > plan.max_sequence_tokens:
        raise UserError(
            f"debug.load_rollouts: step {part.step} has a sequence of {longest} tokens, but "
            f"data.max_prompt_tokens + rollout.max_response_tokens = {plan.max_sequence_tokens}; raise one of them"
        )
    if cfg.advantage.compares_with_greedy and not all(_groups_with_baseline(part)):
        raise UserError(
            f'advantage.estimator = "{cfg.advantage.estimator}" compares with greedy responses, which step {part.step} '
            "of debug.load_rollouts does not have; set another estimator, or record with this one"
        )


def _groups_with_baseline(part: Recording) -> list[bool]:
    """Check of each prompt group whether it has a greedy response."""
    has_one: dict[int, bool] = {}
    for rollout, _ in part.outcomes:
        prompt_id = rollout.prompt.prompt_id
        has_one[prompt_id] = has_one.get(prompt_id, False) or rollout.is_baseline
    return list(has_one.values())
