"""Images that environments show: whatever form they have, the rank gets small files of them, and nothing else."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import PIL.Image
import pytest

from spmdrl.config.environment import ClassEnvironment, EnvironmentConfig, GymnasiumEnvironment, ToolsEnvironment
from spmdrl.conversation import Action, EpisodeStart, Observation, ToolCall
from spmdrl.envs.client import EnvironmentClient
from spmdrl.envs.observations import MAX_IMAGES_BYTES, from_json, max_answer_bytes, to_json
from spmdrl.envs.protocol import Answer, EnvironmentFailure
from spmdrl.step.rewards import state_of
from tests.helpers.vision import as_file, photo

PICTURE = photo(6, 4)
FILE = as_file(PICTURE)
AS_TEXT = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"
IMAGE = {"type": "image"}


def sent(*messages: dict[str, Any], max_characters: int = 1000) -> Observation:
    """Messages as the rank reads them."""
    written = json.dumps(to_json(Observation(messages=messages), max_characters))
    return from_json(json.loads(written), max_characters)


def shown(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize(
    "part",
    [
        IMAGE | {"image": PICTURE},
        IMAGE | {"image": numpy.asarray(PICTURE)},
        IMAGE | {"image": FILE},
        IMAGE | {"image": bytearray(FILE)},
        IMAGE | {"image": AS_TEXT},
        IMAGE | {"image": {"bytes": FILE, "path": None}},
        IMAGE | {"image": "a.png"},
        IMAGE | {"path": "a.png"},
        {"type": "image_url", "image_url": {"url": AS_TEXT}},
    ],
    ids=["picture", "array", "bytes", "bytearray", "base64", "dictionary", "file", "path", "url"],
)
def test_every_form_becomes_a_file(part: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(FILE)
    monkeypatch.chdir(tmp_path)
    found = sent(shown({"type": "text", "text": "look: "}, part))
    assert found.messages == (shown({"type": "text", "text": "look: "}, IMAGE),)
    (file,) = found.images
    assert PIL.Image.open(io.BytesIO(file)).convert("RGB").tobytes() == PICTURE.tobytes()


def test_images_stand_in_the_order_of_the_messages() -> None:
    files = [as_file(photo(3, 3, seed=seed)) for seed in range(3)]
    images = [IMAGE | {"image": file} for file in files]
    found = sent(shown(images[0], images[1]), {"role": "user", "content": "between"}, shown(images[2]))
    assert found.images == tuple(files)
    assert [message["content"] for message in found.messages] == [[IMAGE, IMAGE], "between", [IMAGE]]


def test_parts_without_images_are_a_text_and_long_texts_are_cut_around_images() -> None:
    texts = [{"type": "text", "text": "one, "}, {"type": "text", "text": "two"}]
    assert sent(shown(*texts)).messages == ({"role": "user", "content": "one, two"},)
    found = sent(shown(texts[0], IMAGE | {"image": FILE}, texts[1]), max_characters=6)
    first, place, last = found.messages[0]["content"]
    assert first["text"] == "one, " and place == IMAGE
    assert last["text"] == "t\n[2 more characters are left out]"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([IMAGE], "a part of the type image has no image"),
        ([IMAGE | {"image": "https://example.com/a.png"}], "nothing is fetched over a network"),
        ([{"type": "image_url", "image_url": {"url": "http://a/b.png"}}], "nothing is fetched over a network"),
        ([IMAGE | {"image": 7}], "an image must be a path, base64"),
        ([IMAGE | {"image": "missing.png"}], "No such file"),
        (
            [IMAGE | {"image": numpy.zeros((4, 4, 3), numpy.float32)}],
            "an array of float32, [4, 4, 3]; it must be of uint8, [height, width, 3]",
        ),
        ([IMAGE | {"image": numpy.zeros((4, 4), numpy.uint8)}], "an array of uint8, [4, 4]"),
        ([{"type": "video", "video": "a.mp4"}], "of media, only images are read"),
        ([{"type": "input_audio"}], "of media, only images are read"),
        (["text"], "the parts of a message must be"),
        ([IMAGE | {"image": PIL.Image.new("F", (2, 2))}], "cannot write mode F as PNG"),
    ],
)
def test_what_is_no_image_is_named(content: Any, words: str) -> None:
    with pytest.raises((ValueError, OSError)) as caught:
        sent({"role": "user", "content": content})
    assert words in str(caught.value)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path / "pipe.png", tmp_path, "/dev/zero"):
        with pytest.raises(ValueError, match="is a directory, a pipe or a device, and not a file"):
            sent(shown(IMAGE | {"image": str(path)}))


def test_what_is_said_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match="models write text only"):
        sent({"role": "assistant", "content": [IMAGE | {"image": FILE}]})
    with pytest.raises(ValueError, match="the images of an Observation stand in its messages"):
        to_json(Observation(images=(FILE,)), 10)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": []}, "0 images for 1 places"),
        ({"images": ["aGk="] * 2}, "2 images for 1 places"),
        ({"images": [7]}, "not a list of files in base64"),
        ({"images": "aGk="}, "not a list of files in base64"),
        ({"images": ["no base64"]}, "base64|padding"),
        ({"images": ["AAAA" * (MAX_IMAGES_BYTES // 3 + 2)]}, "16.0 MiB as files, and at most 16 MiB are read"),
        ({"messages": [shown(IMAGE | {"image": "/etc/passwd"})]}, "neither a text nor a place"),
        ({"messages": [shown(IMAGE) | {"more": "x" * 2**21}]}, "most of them not in its messages' content"),
        ({"messages": [shown(IMAGE | {"more": 1})]}, "neither a text nor a place"),
        ({"messages": [shown({"type": "video"}, IMAGE)]}, "neither a text nor a place"),
        ({"messages": [shown({"type": "text", "text": 7}, IMAGE)]}, "neither a text nor a place"),
    ],
)
def test_the_rank_reads_nothing_else(changes: dict[str, Any], words: str) -> None:
    honest = to_json(Observation(messages=(shown(IMAGE | {"image": FILE}),)), 10)
    with pytest.raises(ValueError, match=words):
        from_json(honest | changes, 10)


def test_the_largest_observation_fits_into_a_line() -> None:
    half = bytes(MAX_IMAGES_BYTES // 2)
    images = [IMAGE | {"image": half}, IMAGE | {"image": half}]
    written = json.dumps({"observation": to_json(Observation(messages=(shown(*images),)), 10)})
    assert len(written) < max_answer_bytes(10)
    with pytest.raises(ValueError, match="at most 16 MiB are read; make them smaller"):
        sent(shown(*images, IMAGE | {"image": b"1234"}))


def test_other_images_are_another_state() -> None:
    first, same, other = (Observation(messages=(shown(IMAGE),), images=(file,)) for file in (FILE, FILE, b"other"))
    assert state_of(first) == state_of(same) != state_of(other)
    named = Observation(messages=(shown(IMAGE),), images=(FILE,), state="a")
    assert state_of(named) == state_of(Observation(state="a"))


# In processes

CLASSES = '''
import numpy
import PIL.Image


class Painter:
    def reset(self, prompt):
        return [{"type": "text", "text": prompt}, {"type": "image", "image": self.painted(1)}]

    def painted(self, size):
        return PIL.Image.new("RGB", (size, 2), "red")

    def step(self, text: str):
        if text == "large":
            return [{"type": "image", "image": bytes(17 << 20)}], 0.0, False
        if text == "huge":  # as somebody writes who does not keep to the rules
            import os, socket, stat
            line = b'{"number": 1, "observation": "' + b"a" * (40 << 20) + b'"}\\n'
            for fd in map(int, os.listdir("/proc/self/fd")):
                try:
                    if stat.S_ISSOCK(os.fstat(fd).st_mode):
                        socket.socket(fileno=os.dup(fd)).sendall(line)
                except OSError:
                    pass
        number = int(text)
        return [{"type": "image", "image": self.painted(size + 1)} for size in range(number)], 1.0, number == 0


class Frames:
    def reset(self, seed, options):
        return [{"type": "image", "image": numpy.full((2, 3, 3), seed, numpy.uint8)}], {}

    def step(self, action):
        return numpy.zeros((2, 3, 3), numpy.uint8), 0.0, False, False, {}


def camera(width: int):
    """Take a picture.

    Args:
        width: Of the picture.
    """
    return [{"type": "text", "text": "click"}, {"type": "image", "image": PIL.Image.new("RGB", (width, 1))}]


def search() -> list:
    """List what is found."""
    return [{"type": "text", "text": "no picture"}, {"type": "image", "url": "https://a/b.png"}, {"type": "image"}]
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("classes") / "painters.py"
    path.write_text(CLASSES)
    return path


@pytest.fixture(scope="module")
def painter(file: Path) -> Iterator[EnvironmentClient]:
    source = ClassEnvironment(kind="class", name=f"{file}:Painter")
    with EnvironmentClient(EnvironmentConfig(source=source, step_timeout_s=20.0)) as client:
        yield client


def begin(seed: int = 7) -> EpisodeStart:
    return EpisodeStart(prompt="what?", answer=None, task="t", metadata={}, seed=seed)


def widths(answer: Answer) -> list[int]:
    assert isinstance(answer, Observation), answer
    return [PIL.Image.open(io.BytesIO(image)).width for image in answer.images]


def test_images_come_out_of_a_process_and_an_episode_is_played_again_with_them(painter: EnvironmentClient) -> None:
    opened = painter.open(begin())
    greeting = opened.reset().result()
    assert greeting.messages == (shown({"type": "text", "text": "what?"}, IMAGE),) and widths(greeting) == [1]
    history = []
    for text, expected in (("2", [1, 2]), ("1", [1])):
        answer = opened.step(Action(text=text)).result()
        assert widths(answer) == expected
        history.append((Action(text=text), answer))
    opened.close()
    again = painter.open(begin(), history, greeting)
    assert widths(again.step(Action(text="3")).result()) == [1, 2, 3]
    (action, answer), *others = history
    lied = Observation(messages=answer.messages, reward=answer.reward, images=(FILE, FILE))
    other = painter.open(begin(), [(action, lied), *others], greeting)
    failed = other.step(Action(text="0")).result()
    assert isinstance(failed, EnvironmentFailure) and "does not repeat itself" in failed.reason
    again.close(), other.close()


def test_too_many_bytes_fail_an_episode_and_longer_lines_end_their_process(painter: EnvironmentClient) -> None:
    opened, other = painter.open(begin()), painter.open(begin())
    opened.reset().result(), other.reset().result()
    failed = opened.step(Action(text="large")).result()
    assert isinstance(failed, EnvironmentFailure) and "17.0 MiB as files, and at most 16 MiB are read" in failed.reason
    opened.close()
    assert widths(other.step(Action(text="1")).result()) == [1]
    failed = other.step(Action(text="huge")).result()
    assert isinstance(failed, EnvironmentFailure) and "was killed: its answer is invalid" in failed.reason
    other.close()


def test_frames_are_images_where_the_environment_says_so(file: Path) -> None:
    source = GymnasiumEnvironment(kind="gymnasium", name=f"{file}:Frames")
    with EnvironmentClient(EnvironmentConfig(source=source, step_timeout_s=20.0)) as client:
        opened = client.open(begin(seed=9))
        (image,) = opened.reset().result().images
        assert PIL.Image.open(io.BytesIO(image)).getpixel((2, 1)) == (9, 9, 9)
        failed = opened.step(Action(text="go")).result()
        assert isinstance(failed, EnvironmentFailure)
        assert "ndarray and neither text nor a list of parts; wrap the environment" in failed.reason


def test_tools_return_images(file: Path) -> None:
    tools = tuple({"kind": "function", "function": f"{file}:{name}"} for name in ("camera", "search"))
    source = ToolsEnvironment(kind="tools", tools=tools)
    calls = (ToolCall(name="camera", arguments={"width": 5}), ToolCall(name="search", arguments={}))
    with EnvironmentClient(EnvironmentConfig(source=source, step_timeout_s=20.0)) as client:
        opened = client.open(begin())
        opened.reset().result()
        answer = opened.step(Action(text="", tool_calls=calls)).result()
    assert widths(answer) == [5]
    assert answer.messages == (
        {"role": "tool", "name": "camera", "content": [{"type": "text", "text": "click"}, IMAGE]},
        {
            "role": "tool",
            "name": "search",
            "content": '[{"type": "text", "text": "no picture"}, {"type": "image", "url": "https://a/b.png"}, '
            '{"type": "image"}]',
        },
    )
