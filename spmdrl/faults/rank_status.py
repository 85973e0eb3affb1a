"""Where every rank is, as files that all of them can read: they are there when a rank, or the host of a store, is not.

Needs nothing but Python.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from spmdrl.faults.files import FaultFiles, read_json, replace_json


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """What one rank says of itself, some seconds ago at most."""

    launch: str  # the same on all ranks of a launch, and different in another
    rank: int
    num_ranks: int
    host: str
    pid: int
    step: int
    phase: str
    phases_entered: int  # since the launch
    moved_at: float  # unix time: when it entered the phase, or last got on inside it
    beat: int = 0  # grows as long as the rank's watch runs
    ended: bool = False  # it has left the loop, by itself

    @property
    def place(self) -> str:
        """Step and phase, to be read."""
        return f"step {self.step}, {self.phase}" if self.step else self.phase

    @property
    def name(self) -> str:
        """Who it is, to be read."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    def write(self, files: FaultFiles) -> None:
        """Show it to the others."""
        replace_json(files.post_of(self.rank), dataclasses.asdict(self))


def read_posts(files: FaultFiles, *, launch: str | None = None) -> list[RankStatus]:
    """The posts of a launch, or whatever there are, in the order of ranks."""
    found = [read_json(path) for path in files.posts.glob("rank-*.json")]
    names = {field.name for field in dataclasses.fields(RankStatus)}
    posts = [RankStatus(**content) for content in found if content is not None and content.keys() == names]
    return sorted((post for post in posts if launch in (None, post.launch)), key=lambda post: post.rank)


def process_state(pid: int) -> str | None:
    """The letter of a process of this host as in `ps`, such as T when it was stopped; None when it has ended."""
    try:
        # After the name, which is in brackets and may hold anything.
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return None
    return None if state in "ZX" else state


def has_ended(post: RankStatus, host: str) -> bool:
    """Whether a rank of this host is gone without having said so; what is on other hosts cannot be seen."""
    return not post.ended and post.host == host and process_state(post.pid) is None


def stuck(posts: Sequence[RankStatus], *, now: float, timeout_s: float) -> bool:
    """Whether no rank that is in the loop has got on for so long."""
    running = [post for post in posts if not post.ended]
    return bool(running) and all(now - post.moved_at > timeout_s for post in running)


def silent(before: Sequence[RankStatus], after: Sequence[RankStatus]) -> list[RankStatus]:
    """Ranks whose watch did not run between two looks at the posts: stopped, gone, or unable to run Python."""
    beats = {post.rank: post.beat for post in before}
    return [post for post in after if not post.ended and beats.get(post.rank) == post.beat]


def furthest_behind(posts: Sequence[RankStatus]) -> list[RankStatus]:
    """The ranks that have entered the fewest phases of the earliest step; empty when all are equally far."""
    running = [post for post in posts if not post.ended]
    places = {post.rank: (post.step, post.phases_entered) for post in running}
    if len(set(places.values())) < 2:
        return []
    return [post for post in running if places[post.rank] == min(places.values())]


def describe_hang(posts: Sequence[RankStatus], silent_ranks: Collection[int], *, timeout_s: float) -> str:
    """One sentence: who holds up whom, and where."""
    stopped = [post for post in posts if post.rank in silent_ranks]
    behind = furthest_behind(posts)
    start = f"no rank has got on for {timeout_s:g} s: "
    if stopped:
        return start + "; ".join(f"{post.name} does not answer, it is in {post.place}" for post in stopped)
    if behind:
        return start + "; ".join(f"{post.name} is behind the others, in {post.place}" for post in behind)
    places = ", ".join(dict.fromkeys(post.place for post in posts if not post.ended))
    return f"{start}all of them are in {places}"


def own_host() -> str:
    """The name under which the ranks of this host know each other."""
    return os.uname().nodename
