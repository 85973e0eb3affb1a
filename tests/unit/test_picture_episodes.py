"""Episodes whose environment shows images: engines see what transformers sees, and whatever happens in between, the
pixels, their places and the tokens are the same."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerBase

from spmdrl.config import DataConfig, FileData
from spmdrl.config.environment import ClassEnvironment, EnvironmentConfig
from spmdrl.conversation import IMAGE_PLACE, Action, EpisodeStart, Observation
from spmdrl.data.image_store import ImageStore, StoreFull
from spmdrl.data.stream import make_training_stream
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.data.turns import TurnEncoder, action_of, parse
from spmdrl.data.vision import ImageReader, expanded
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.envs.protocol import Answer
from spmdrl.families import vision_family
from spmdrl.model.load import weights_of
from spmdrl.refit.refit import load_whole
from spmdrl.report.samples import rollout_row
from spmdrl.rollout.env_context import EnvContext, restore_rollout
from spmdrl.rollout.group import PromptGroup
from spmdrl.rollout.sampling import Sampling
from spmdrl.rollout.scheduler import EpisodeScheduler, sample
from spmdrl.types import Prompt, RewardOutcome, Rollout, Trajectory, Turn, UserError
from spmdrl.types import Sequence as Tokens
from tests.helpers.environments import FakeEnvironments
from tests.helpers.episodes import reloaded
from tests.helpers.vision import TOKENS, as_file, photo, save_vision_files
from tests.helpers.vision_models import (
    IMAGE,
    VOCABULARY,
    Picture,
    inputs_of,
    save_gemma3_vl,
    save_gemma4_vl,
    save_qwen2_5_vl,
    save_qwen3_5_vl,
    save_qwen3_vl,
)

TEMPERATURE = 0.8
# Most tokens end a response, so that a model that knows nothing comes to its later turns; a placeholder ends one too.
STOPS = frozenset({1, IMAGE, *range(10, VOCABULARY, 3)})
CFG = EnvironmentConfig(source=ClassEnvironment(kind="class", name="a:A"), max_turns=6, max_turn_tokens=8)
WROTE = f"{IMAGE_PLACE}<<unk>image<unk>pad<unk>>"  # as the policy reads the texts of places, which are no images


def painted(seed: int) -> bytes:
    return as_file(photo(8 + 8 * (seed % 3), 16, seed=seed))


def observed(*seeds: int, text: str = "see", **others: Any) -> Observation:
    """Images of these numbers behind a text."""
    content: Any = [{"type": "text", "text": text}, *({"type": "image"} for _ in seeds)] if seeds else text
    return Observation(
        messages=({"role": "user", "content": content},), images=tuple(painted(seed) for seed in seeds), **others
    )


def shows(start: EpisodeStart, number: int, action: Action) -> Answer:
    """Show 1, 0 and 2 images; then the episode is over."""
    first = start.seed % 50
    return observed(
        *[[first], [], [first + 1, first]][number % 3], text=IMAGE_PLACE + TOKENS[IMAGE], reward=1.0, done=number == 3
    )


@dataclass(frozen=True)
class Stage:
    """A model, its processor, two prompts with and without an image, and an engine with the model's weights."""

    path: str
    plain: Any
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    prompts: list[Prompt]
    images: ImageReader
    engine: TorchEngine

    def again(self, name: str) -> Stage:
        """A copy of it in another process, whose store is empty."""
        images = reader_of(self.path, self.tokenizer, self.folder / name)
        return replace(self, images=images, engine=engine_of(self.plain, images.store))

    def world(self, step: Callable[..., Answer] = shows, *, cfg: EnvironmentConfig = CFG, **client: Any) -> EnvContext:
        return EnvContext(
            cfg=cfg,
            client=cast(Any, FakeEnvironments(step, **client)),
            encoder=TurnEncoder(
                self.tokenizer, chat_template="auto", tools=(), stop_token_ids=STOPS, images=self.images
            ),
            action_of=functools.partial(action_of, self.tokenizer, parser=parse, stop_token_ids=STOPS),
            run_seed=5,
            images=self.images,
        )

    def rollouts(self, world: EnvContext, **sampling: Any) -> dict[tuple[int, int], Rollout]:
        found = sample(
            self.engine,
            self.prompts,
            replace(SAMPLING, **sampling),
            world,
            lambda rollout: rollout,
            run_seed=5,
            step=1,
            restore_images=lambda _: None,
            in_order=True,
        )
        return {(rollout.prompt.prompt_id, rollout.sample_index): rollout for rollout in found}

    def require_equal(self, trajectories: list[Trajectory]) -> None:
        """Each log-probability that the engine gave is that of transformers' own forward of the whole trajectory.

        Transformers takes a placeholder that was sampled for an image, so it is not asked about these."""
        compared = 0
        for trajectory in trajectories:
            placeholders = [place for image in trajectory.images for place in range(image.start, image.end)]
            places = [place for place, token in enumerate(trajectory.token_ids) if token == IMAGE]
            sampled = {place for place, chosen in enumerate(trajectory.trained) if chosen}
            assert [place for place in places if place not in sampled] == placeholders
            if sampled & set(places):
                continue
            torch.testing.assert_close(
                torch.tensor(trajectory.logprobs)[list(sampled)],
                self.expected(trajectory)[list(sampled)],
                rtol=0,
                atol=1e-5,
            )
            compared += 1
        assert compared > len(trajectories) / 2

    @torch.no_grad()
    def expected(self, trajectory: Trajectory) -> torch.Tensor:
        ids = trajectory.token_ids
        whole = Tokens(
            index=0,
            token_ids=ids,
            loss_mask=(True,) * len(ids),
            rollout_logprobs=(0.0,) * len(ids),
            reward=0.0,
            images=trajectory.images,
        )
        pixels = {image.digest: self.images.store.get(image.digest) for image in trajectory.images}
        pictures = {image.digest: Picture(image.digest, image.grid, pixels[image.digest]) for image in whole.images}
        logits = self.plain(**inputs_of(self.path, whole, pictures)).logits[0] / TEMPERATURE
        chosen = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        return torch.nn.functional.pad(chosen, (1, 0))


SAMPLING = Sampling(group_size=3, temperature=TEMPERATURE, max_response_tokens=250, stop_token_ids=STOPS)


def reader_of(path: str, tokenizer: PreTrainedTokenizerBase, folder: Path, **changes: Any) -> ImageReader:
    source = FileData(kind="jsonl", path="none.jsonl")
    cfg = DataConfig(**({"sources": (source,), "max_prompt_tokens": 64, "max_image_pixels": 4096} | changes))
    config = AutoModelForImageTextToText.from_pretrained(path).config
    family = vision_family(config)
    assert family is not None
    return ImageReader(family, path, cfg, tokenizer=tokenizer, store=ImageStore(folder, max_bytes=2**24))


def engine_of(plain: Any, store: ImageStore) -> TorchEngine:
    device = torch.device("cpu")
    engine = TorchEngine(
        plain.config, device=device, dtype=torch.float32, kernel="sdpa", max_running=4, images=cast(Any, store)
    )
    load_whole(engine, weights_of(plain), version=0)
    return engine


def stage_of(save: Callable[..., str], folder: Path) -> Stage:
    path = save(folder / "model", eos_token_id=1)
    save_vision_files(path)
    tokenizer = load_tokenizer(path)
    plain = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    images = reader_of(path, tokenizer, folder / "store")
    photo(24, 16, seed=99).save(folder / "a.png")
    rows = [{"prompt": "a<image>?", "images": ["a.png"]}, {"prompt": "b?", "images": []}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row | {"answer": "x"}) + "\n" for row in rows))
    source = FileData(kind="jsonl", path=str(folder / "rows.jsonl"), image_column="images")
    data = DataConfig(sources=(source,), max_prompt_tokens=96)
    prompts = make_training_stream(data, None, seed=0, tokenizer=tokenizer, images=images).take(0, 2)
    return Stage(path, plain, tokenizer, folder, prompts, images, engine_of(plain, images.store))


FAMILIES = [save_qwen2_5_vl, save_qwen3_vl, save_qwen3_5_vl, save_gemma3_vl, save_gemma4_vl]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(save, id=save.__name__.removeprefix("save_"), marks=marks)
        for save in FAMILIES
        for marks in (() if save in (save_qwen3_vl, save_gemma4_vl) else (pytest.mark.slow,),)
    ],
)
def any_stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return stage_of(request.param, tmp_path_factory.mktemp("stage"))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return stage_of(save_qwen3_vl, tmp_path_factory.mktemp("stage"))


def test_every_turn_has_the_logprobs_of_transformers(any_stage: Stage) -> None:
    rollouts = any_stage.rollouts(any_stage.world(initial_observation=observed(7)), max_response_tokens=500).values()
    done = [rollout for rollout in rollouts if rollout.end == "done"]
    assert len(done) >= len(rollouts) / 2
    for rollout in done:
        (trajectory,) = rollout.trajectories
        own = len(rollout.prompt.images)
        assert [len(turn.images) for turn in trajectory.turns] == [own + 1, 1, 0, 2]
        assert trajectory.images[: own or None] == rollout.prompt.images or not own
        assert trajectory.images[own + 1].digest == trajectory.images[own + 3].digest, "one image, shown twice"
    any_stage.require_equal([rollout.trajectories[0] for rollout in done])


@pytest.mark.parametrize("rewrites", [False, True])
def test_conversations_that_are_rendered_anew_show_every_image(stage: Stage, rewrites: bool) -> None:
    """Also where the template rewrites what came before, as one does that leaves out the policy's words."""
    whole = stage.tokenizer.chat_template
    if rewrites:
        part = "{% if m.content is string %}{{ m.content }}"
        assert part in whole
        shortened = part.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' else 'x' }}")
        stage.tokenizer.chat_template = whole.replace(part, shortened)
    try:
        cfg = CFG.model_copy(update={"history": "template"})
        rollouts = stage.rollouts(stage.world(cfg=cfg), max_response_tokens=400).values()
    finally:
        stage.tokenizer.chat_template = whole
    done = [rollout for rollout in rollouts if rollout.end == "done"]
    assert len(done) >= len(rollouts) / 2
    for rollout in done:
        assert len(rollout.trajectories) == 4 if rewrites else len(rollout.trajectories) <= 4
        assert len(rollout.trajectories[-1].images) == len(rollout.prompt.images) + 3
    stage.require_equal([trajectory for rollout in done for trajectory in rollout.trajectories])


def test_texts_of_places_stay_texts_and_pages_name_images(stage: Stage) -> None:
    for rollout in stage.rollouts(stage.world()).values():
        row = rollout_row(rollout, RewardOutcome(reward=0.0, parts={}), stage.tokenizer)
        assert "images" not in json.dumps(row)
        for turn, said in zip(rollout.turns, row["turns"], strict=True):
            names = [image.name for image in turn.images]
            assert sum(said["read"].count(name) for name in set(names)) == len(names)
            if turn is not rollout.turns[0]:
                assert said["read"].count(WROTE) == 1, "the tokenizer has no token for every character"
            assert TOKENS[IMAGE] not in said["read"]


def test_episodes_that_are_interrupted_and_saved_go_on_in_processes_without_their_pixels(stage: Stage) -> None:
    """Aborted again and again, written to JSON and read with an empty store, which environments do not fill."""
    expected = stage.rollouts(stage.world(initial_observation=observed(7)))
    groups = [
        PromptGroup.opened(prompt, SAMPLING, stage.world(initial_observation=observed(7)), step=1, run_seed=5)
        for prompt in stage.prompts
    ]
    finished: dict[tuple[int, int], Rollout] = {}
    rounds = 0
    while any(group.unfinished for group in groups):
        rounds += 1
        now = stage.again(f"store {rounds}")
        world, prompts = now.world(initial_observation=observed(7)), stage.prompts
        for prompt in prompts:  # which are read from the data again
            for image in prompt.images:
                pixels = stage.images.store.get(image.digest)
                assert pixels is not None and now.images.store.put(pixels, image.grid) == image.digest
        groups = [
            PromptGroup.restored(reloaded(group), prompt, SAMPLING, world)
            for group, prompt in zip(groups, prompts, strict=True)
        ]
        episodes = [episode for group in groups for episode in group.unfinished]
        scheduler = EpisodeScheduler(Impatient(now.engine, 3), restore_images=lambda _: None, in_order=True)
        scheduler.run(episodes, lambda one: finished.update({(one.prompt.prompt_id, one.sample_index): one.rollout()}))
    assert rounds > 2
    for key, rollout in expected.items():
        (found,), (before,) = finished[key].trajectories, rollout.trajectories
        assert (found.token_ids, found.images, finished[key].end) == (before.token_ids, before.images, rollout.end)
        torch.testing.assert_close(torch.tensor(found.logprobs), torch.tensor(before.logprobs), rtol=0, atol=1e-5)


class Impatient:
    """An engine that is aborted after a few responses."""

    def __init__(self, engine: TorchEngine, responses: int) -> None:
        self._engine, self._left = engine, responses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, requests: Any) -> Any:
        for answer in self._engine.generate(requests):
            yield answer
            self._left -= 1
            if self._left == 0:
                self._engine.abort()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"hello", "the image of 5 bytes is damaged, has no pixels, or is none of PNG"),
        (b"", "the image of 0 bytes is empty"),
        (as_file(photo(90, 90)), "has 90 x 90 pixels, more than data.max_image_pixels = 4096"),
        (as_file(photo(400, 1)), "does not suit the model"),
        (as_file(photo(4, 4), "GIF", save_all=True, append_images=[photo(4, 4, seed=1)]), "is an animation (GIF)"),
    ],
    ids=["text", "empty", "large", "thin", "moving"],
)
def test_a_bad_image_ends_its_episode_alone(stage: Stage, content: bytes, words: str) -> None:
    def spoilt(start: EpisodeStart, number: int, action: Action) -> Answer:
        answer = shows(start, number, action)
        assert isinstance(answer, Observation)
        return replace(answer, images=(content,)) if number == 0 and start.prompt == "b?" else answer

    whole = stage.rollouts(stage.world())
    for key, rollout in stage.rollouts(stage.world(spoilt)).items():
        if key[0] == spoilt_prompt(stage) and whole[key].end != "length":
            assert rollout.end == "environment_error" and rollout.is_masked
            assert rollout.failure is not None and words in rollout.failure
            (trajectory,) = rollout.trajectories
            assert same(trajectory.turns) == same(whole[key].turns[:1])
        else:
            assert same(rollout.turns) == same(whole[key].turns) and rollout.end == whole[key].end
        restore_rollout(rollout, stage.again("unspoilt").images)  # as before it is trained on


def same(turns: Sequence[Turn]) -> list[Any]:
    """The turns without their log-probabilities, whose last bits depend on what ran together."""
    return [(turn.context_ids, turn.response.token_ids, turn.images) for turn in turns]


def spoilt_prompt(stage: Stage) -> int:
    return next(prompt.prompt_id for prompt in stage.prompts if prompt.question == "b?")


def test_a_bad_greeting_ends_every_episode(stage: Stage) -> None:
    initial_observation = replace(observed(1), images=(b"hello",))
    for rollout in stage.rollouts(stage.world(initial_observation=initial_observation)).values():
        assert rollout.end == "environment_error" and "is damaged" in str(rollout.failure)
        assert rollout.num_sampled == 0 and rollout.trajectories[0].images == rollout.prompt.images


def test_a_template_that_shows_no_images_is_named(stage: Stage) -> None:
    whole = stage.tokenizer.chat_template
    stage.tokenizer.chat_template = whole.replace(TOKENS[IMAGE], "")
    try:
        rollouts = stage.rollouts(stage.world(shows))
    finally:
        stage.tokenizer.chat_template = whole
    failures = {rollout.failure for rollout in rollouts.values() if rollout.end == "environment_error"}
    assert failures and all("have 1 images, and the tokenizer's chat template writes" in str(one) for one in failures)


def test_placeholders_that_no_image_has_are_refused(stage: Stage) -> None:
    """A tokenizer need not mark placeholders as special: then the policy's own words may become one."""
    (image,) = (image for prompt in stage.prompts for image in prompt.images)
    with pytest.raises(UserError, match="there are 2 placeholders for 1 images; mark the model's tokens"):
        expanded((IMAGE, 9, IMAGE), [image], stage.images)


def test_no_room_in_memory_is_no_failure_of_the_environment(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise StoreFull("no room")

    monkeypatch.setattr(ImageStore, "_write", full)
    now = stage.again("full")
    with pytest.raises(StoreFull):
        now.rollouts(now.world(initial_observation=observed(40)))


def test_images_with_which_was_trained_are_made_again_or_refused(stage: Stage) -> None:
    rollout = next(one for one in stage.rollouts(stage.world()).values() if one.end == "done")
    shown = rollout.trajectories[0].images[len(rollout.prompt.images) :]
    empty = reader_of(stage.path, stage.tokenizer, stage.folder / "empty")
    restore_rollout(rollout, empty)
    assert len(shown) == 3 and empty.has(shown)
    other = reader_of(stage.path, stage.tokenizer, stage.folder / "other", max_pixels=64)
    with pytest.raises(UserError, match=r"is not what it was before: the model's processor, data\.min_pixels"):
        restore_rollout(rollout, other)


def test_an_image_is_processed_once_for_all_episodes_that_show_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    real = ImageReader._processed

    def counted(self: ImageReader, image: Any) -> Any:
        made.append(image.identity)
        return real(self, image)

    monkeypatch.setattr(ImageReader, "_processed", counted)
    now = stage.again("once")
    for prompt in now.prompts:
        for image in prompt.images:
            pixels = stage.images.store.get(image.digest)
            assert pixels is not None
            now.images.store.put(pixels, image.grid)
    rollouts = now.rollouts(now.world(initial_observation=observed(7)))
    shown = {image.digest for one in rollouts.values() for t in one.trajectories for image in t.images}
    own = {image.digest for prompt in now.prompts for image in prompt.images}
    assert len(made) == len(set(made)) == len(shown - own)
