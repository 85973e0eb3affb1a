"""Time episodes with a slow tool beside a loop that waits turn by turn: one process, one engine, the same weights.

    python benchmarks/episodes.py --delays-ms 0 50 500 --repeats 5
    python benchmarks/episodes.py --engine sglang

A tiny random Qwen3 (that of workload W with the alphabet of `tools/tiny_model.py`) takes 2 to 8 turns in each of 16
prompts x 8 episodes. The responses of a turn have workload W's `tail` lengths, the tool's answers 8 to 128 tokens, and
every answer takes the delay. spmdrl's scheduler runs them as in a training step; the other loop samples all responses
of a turn, then runs all tools at once, then begins the next turn. Both have the same episodes, encode turns by the same
code and ask the same environment process, and the limit of both is `--max-running`, the sequences that the engine
decodes together: there are four times as many episodes. The other loop calls the engine once for each turn, as loops
do that know whole turns only: the torch engine, which keeps what it has read for as long as a call lasts, reads its
conversations anew. SGLang's cache serves both. On the torch engine both sample the same tokens, but where
batches of another size round another way; how many episodes that changed is printed, and more than 1 in 20 are an
error. SGLang ignores seeds on a CPU: there only lengths are the same.

How much of the time the engine did not run is measured around its `generate`, the same way for both. The torch engine
runs in the thread that also prepares requests, so preparing counts; SGLang has processes of its own, so there only time
counts in which it had no request. Prints one JSON object; `benchmarks/bench.py` says what is in it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import workload
from clock_engine import ClockEngine
from engine import start_engine
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from spmdrl.config import EnvironmentConfig, ModelConfig, RefitConfig
from spmdrl.config.environment import ClassEnvironment
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.data.turns import TurnEncoder, action_of, parse
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.engine.torch.scheduler import RequestState
from spmdrl.envs.client import EnvironmentClient
from spmdrl.rollout.env_context import EnvContext
from spmdrl.rollout.episode import Episode
from spmdrl.rollout.group import PromptGroup
from spmdrl.rollout.sampling import Sampling
from spmdrl.rollout.scheduler import EpisodeScheduler
from spmdrl.tools.tiny_model import save_tiny_model
from spmdrl.types import FinishReason, Prompt, Request, Response, Rollout

TOOL = f"{Path(__file__).with_name('slow_tool.py')}:SlowTool"
TEMPLATE = (
    "{% for message in messages %}<spare 0>{{ message.role }}\n{{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<spare 0>assistant\n{% endif %}"
)
MAX_TOKENS = 4096  # of an episode: none reaches it
CLOCK_STEP_S = 0.008  # about that of a model of 7e9 parameters in bfloat16 at 2 TB/s
LONGEST_QUESTION = 40  # tokens, with the template
MAX_CHANGED = 1 / 20  # episodes whose tokens differ because batches of other sizes round otherwise

Loop = Callable[[Any, list[Episode]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The outcome of one side."""

    seconds: float
    rollouts: dict[tuple[int, int], Rollout]
    shares: dict[str, float]  # see `Metered`


def main() -> None:
    """Run both loops for each delay, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, default="torch")
    parser.add_argument("--delays-ms", type=float, nargs="+", default=[0, 50, 500], help="of the tool")
    parser.add_argument("--prompts", type=int, default=workload.PROMPTS_PER_STEP)
    parser.add_argument("--max-running", type=int, default=workload.ROLLOUTS_PER_STEP // 4)
    parser.add_argument("--size", type=int, choices=workload.SIZES, default=1, help="times as many parameters")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs with each delay")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    workload.use_best_environment(threads=args.threads)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as exits:
        hidden_size = workload.SIZES[args.size][0]
        parameters = save_tiny_model(Path(folder), hidden_size=hidden_size, max_tokens=MAX_TOKENS, spare_tokens=1)
        tokenizer = load_tokenizer(folder)
        tokenizer.chat_template = TEMPLATE
        engine = exits.enter_context(ENGINES[args.engine](folder, args.max_running))
        delays = {f"{delay_ms:g}": measure(args, engine, tokenizer, delay_ms) for delay_ms in args.delays_ms}
    result = {
        "engine": args.engine,
        "parameters": parameters,
        "episodes": args.prompts * workload.GROUP_SIZE,
        "max_running": args.max_running,
        "threads": torch.get_num_threads(),
        "delays_ms": delays,
        "load_average": os.getloadavg()[0],
        "versions": workload.versions(["torch", "transformers", *(["sglang"] if args.engine == "sglang" else [])]),
    }
    print(json.dumps(result))


def measure(
    args: argparse.Namespace, engine: Metered, tokenizer: PreTrainedTokenizerBase, delay_ms: float
) -> dict[str, Any]:
    """Run both loops, alternating, with one delay of the tool."""
    source = ClassEnvironment(kind="class", name=TOOL, params={"delay_s": delay_ms / 1e3})
    cfg = EnvironmentConfig(source=source)
    sides: dict[str, Loop] = {"spmdrl": as_they_are_answered, "peer": turn_by_turn}
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    num_changed = []
    with EnvironmentClient(cfg) as client:
        world = world_of(cfg, client, tokenizer)
        timed(as_they_are_answered, engine, episodes(args.prompts, world, step=0))
        for step in range(1, args.repeats + 1):
            for side, loop in sides.items():
                runs[side].append(timed(loop, engine, episodes(args.prompts, world, step=step)))
            num_changed.append(changed(runs["spmdrl"][-1], runs["peer"][-1]))
    if args.engine != "sglang":
        assert sum(num_changed) <= MAX_CHANGED * len(num_changed) * args.prompts * workload.GROUP_SIZE, num_changed
    found = {name: value for side in sides for name, value in side_result(side, runs[side]).items()}
    found |= {"ratios": [ours.seconds / theirs.seconds for ours, theirs in zip(*runs.values(), strict=True)]}
    found |= {"episodes_of_other_tokens": num_changed, "response_tokens": list(map(num_sampled, runs["peer"]))}
    print(f"{delay_ms:g} ms: {summary(found)}", file=sys.stderr, flush=True)
    return found


def side_result(side: str, runs: list[Run]) -> dict[str, Any]:
    """Make the part of the printed object that is about one loop with one delay."""
    medians = {name: statistics.median(run.shares[name] for run in runs) for name in runs[0].shares}
    return {
        f"{side}_s": [run.seconds for run in runs],
        f"{side}_tokens_per_s": statistics.median(num_sampled(run) / run.seconds for run in runs),
        f"{side}_shares": medians,
    }


def summary(found: dict[str, Any]) -> str:
    """One line."""
    sides = ", ".join(
        f"{side} {found[f'{side}_tokens_per_s']:.0f} tokens/s, {found[f'{side}_shares']['idle']:.2f} idle"
        for side in ("spmdrl", "peer")
    )
    return f"{sides}; {statistics.median(found['ratios']):.2f} of its time"


def episodes(num_prompts: int, world: EnvContext, *, step: int) -> list[Episode]:
    """The episodes of one step, of which nothing has been sampled."""
    sampling = Sampling(
        group_size=workload.GROUP_SIZE, temperature=1.0, max_response_tokens=MAX_TOKENS, stop_token_ids=frozenset()
    )
    prompts = [
        prompt_of(world, step * num_prompts + place, question)
        for place, (question, _) in enumerate(workload.prompts(step, count=num_prompts))
    ]
    groups = (PromptGroup.opened(prompt, sampling, world, step=step, run_seed=world.run_seed) for prompt in prompts)
    return [episode for group in groups for episode in group.episodes]


def prompt_of(world: EnvContext, number: int, question: str) -> Prompt:
    """A prompt in the chat template."""
    messages = [{"role": "user", "content": question}]
    token_ids, text = world.encoder.first(messages)
    return Prompt(
        prompt_id=number,
        token_ids=token_ids,
        text=text,
        answer=None,
        task="tool",
        metadata={},
        messages=tuple(messages),
    )


def world_of(cfg: EnvironmentConfig, client: EnvironmentClient, tokenizer: PreTrainedTokenizerBase) -> EnvContext:
    """Open the parts that the episodes share, as a run does."""
    stops = frozenset({int(tokenizer.eos_token_id)})
    return EnvContext(
        cfg=cfg,
        client=client,
        encoder=TurnEncoder(tokenizer, chat_template="auto", tools=client.tools, stop_token_ids=stops),
        action_of=functools.partial(action_of, tokenizer, parser=parse, stop_token_ids=stops),
        run_seed=0,
    )


def as_they_are_answered(engine: Metered, episodes: list[Episode]) -> None:
    """Run the episodes as a training step does."""
    EpisodeScheduler(engine).run(episodes, lambda episode: None)


def turn_by_turn(engine: Metered, episodes: list[Episode]) -> None:
    """Sample a response in every episode, then run all tools, then go on."""
    for episode in episodes:
        episode.begin()
    while open_ones := [episode for episode in episodes if not episode.is_finished]:
        concurrent.futures.wait([episode.env_future for episode in open_ones if episode.env_future is not None])
        for episode in open_ones:
            episode.take_answer()
        open_ones = [episode for episode in open_ones if not episode.is_finished]
        # The engine need keep nothing: nobody would take it up before the call ends.
        requests = (dataclasses.replace(episode.request(), cache_on_finish=frozenset()) for episode in open_ones)
        responses = dict(engine.generate(requests))
        for place, episode in enumerate(open_ones):
            episode.add(responses[place])


def timed(loop: Loop, engine: Metered, episodes: list[Episode]) -> Run:
    """Run episodes to their end."""
    engine.begin()
    start = time.perf_counter()
    loop(engine, episodes)
    seconds = time.perf_counter() - start
    rollouts = {(e.prompt.prompt_id, e.sample_index): e.rollout() for e in episodes}
    assert all(rollout.end == "done" for rollout in rollouts.values()), "an episode did not come to its end"
    return Run(seconds=seconds, rollouts=rollouts, shares=engine.shares(seconds))


def changed(one: Run, other: Run) -> int:
    """Count the episodes whose tokens differ. Their turns and lengths must not."""
    assert one.rollouts.keys() == other.rollouts.keys()
    for key, rollout in one.rollouts.items():
        both = (rollout, other.rollouts[key])
        lengths, others = ([len(response.token_ids) for response in rollout.responses] for rollout in both)
        assert lengths == others, f"episode {key} has turns of {lengths} tokens, and of {others}"
    return sum(tokens_of(rollout) != tokens_of(other.rollouts[key]) for key, rollout in one.rollouts.items())


def tokens_of(rollout: Rollout) -> list[tuple[int, ...]]:
    """All tokens of an episode."""
    return [trajectory.token_ids for trajectory in rollout.trajectories]


def num_sampled(run: Run) -> int:
    """The tokens that the engine sampled."""
    return sum(rollout.num_sampled for rollout in run.rollouts.values())


class Metered:
    """An engine whose responses have the workload's lengths and end as if by themselves, and whose time is measured.

    `shares` are of the time of a run: "idle", in which the engine did not run; of that "waiting", in which it had no
    request; "prefill", in which it read prompts (torch only); and "cached", of the tokens of prompts of later turns,
    what it found in its cache.
    """

    leads = True

    def __init__(self, engine: RolloutEngine | ClockEngine, *, in_process: bool) -> None:
        self._engine, self._in_process = engine, in_process
        self.abort, self.ask_soon = engine.abort, engine.ask_soon
        self.begin()

    def begin(self) -> None:
        """Begin to measure."""
        self._spent = Counter[str]()
        self._since = time.perf_counter()
        self._num_running = 0
        self.prefill_s = 0.0
        self.num_later = self.num_cached = 0  # tokens of prompts of turns after the first

    def count_read(self, num_tokens: int, num_cached: int) -> None:
        """Count a prompt, unless it is a first turn's; those of later turns are longer than any question."""
        if num_tokens > LONGEST_QUESTION:
            self.num_later += num_tokens
            self.num_cached += num_cached

    def shares(self, seconds: float) -> dict[str, float]:
        """Return what was measured."""
        idle = ("waiting", "preparing") if self._in_process else ("waiting",)
        return {
            "idle": sum(self._spent[name] for name in idle) / seconds,
            "waiting": self._spent["waiting"] / seconds,
            "prefill": self.prefill_s / seconds,
            "cached": self.num_cached / max(self.num_later, 1),
        }

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
        """Sample, as the engine does."""
        self._note("preparing")
        for place, response in self._engine.generate(self._taken(requests)):
            self._note("running")
            self._num_running -= 1
            yield place, dataclasses.replace(response, finish_reason="stop")
            self._note("preparing")
        self._note("running")

    def _taken(self, requests: Iterable[Request | None]) -> Iterator[Request | None]:
        self._note("running")
        for request in requests:
            self._note("preparing")
            self._num_running += request is not None
            yield request and forced(request)
            self._note("running")
        self._note("preparing")

    def _note(self, name: str) -> None:
        """Count the time until now under this name."""
        now = time.perf_counter()
        self._spent[name if self._num_running else "waiting"] += now - self._since
        self._since = now


def forced(request: Request) -> Request:
    """Give a request the length that the workload has for its seed."""
    length = workload.response_length("tail", 0, request.seed)
    ends: frozenset[FinishReason] = frozenset({"length"}) if request.cache_on_finish else frozenset()
    return dataclasses.replace(request, max_response_tokens=length, stop_token_ids=frozenset(), cache_on_finish=ends)


@contextlib.contextmanager
def torch_engine(folder: str, max_running: int) -> Iterator[Metered]:
    """The torch engine, with the seconds of its prefills and what it had cached of their prompts."""
    engine = start_engine(AutoModelForCausalLM.from_pretrained(folder), max_running=max_running)
    metered = Metered(engine, in_process=True)
    prefill = engine.runner.prefill

    def timed_prefill(admitted: list[RequestState], *args: Any, **options: Any) -> Any:
        for state in admitted:
            num_tokens = len(state.prefix.token_ids)
            metered.count_read(num_tokens, num_tokens - len(state.uncached_ids))
        start = time.perf_counter()
        sampled = prefill(admitted, *args, **options)
        metered.prefill_s += time.perf_counter() - start
        return sampled

    engine.runner.prefill = timed_prefill  # type: ignore[method-assign]
    yield metered


@contextlib.contextmanager
def sglang_engine(folder: str, max_running: int) -> Iterator[Metered]:
    """SGLang, with what it says about its cache, which has the room that a run gives it."""
    import refit

    from spmdrl.dist.mesh import build_meshes
    from spmdrl.dist.session import spmd_session
    from spmdrl.engine.sglang.engine import SGLangEngine
    from spmdrl.model.load import load_model_config, load_policy

    model = ModelConfig(path=folder)
    options = refit.launch(folder)
    room = {
        "context_length": MAX_TOKENS,
        "max_total_tokens": max_running * MAX_TOKENS,
        "max_running_requests": max_running,
    }
    options = dataclasses.replace(options, arguments={**options.arguments, **room}, max_running=max_running)
    with spmd_session(threads_per_rank=torch.get_num_threads(), deterministic=False) as world:
        meshes = build_meshes(world)
        policy = load_policy(model, meshes.model, temperature=1.0)
        engine = SGLangEngine(options, meshes.engine, model_config=load_model_config(model), transport="shared_memory")
        try:
            refit.Refit(policy, engine, meshes, RefitConfig(), dtype=torch.float32)(version=0)
            yield counting_cached(Metered(engine, in_process=False), engine._process)
        finally:
            engine.close()


def counting_cached(metered: Metered, process: Any) -> Metered:
    """Count what SGLang finds in its cache."""
    generate = process.generate

    async def counted(token_ids: Sequence[int], *others: Any) -> Any:
        answer = await generate(token_ids, *others)
        metered.count_read(len(token_ids), answer["meta_info"]["cached_tokens"])
        return answer

    process.generate = counted
    return metered


@contextlib.contextmanager
def clock_engine(folder: str, max_running: int) -> Iterator[Metered]:
    """An engine whose steps take a fixed time."""
    yield Metered(ClockEngine(max_running=max_running, step_s=CLOCK_STEP_S), in_process=False)


ENGINES = {"torch": torch_engine, "clock": clock_engine, "sglang": sglang_engine}


if __name__ == "__main__":
    main()
