"""Causes of failures: tell a cause from its consequences, and find hints about it on this machine."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

# Messages of torch's backends when another process is gone.
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "was closed",
    "NCCL communicator was aborted",
)
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file is too large",
}
# For an OSError of which only the message is left.
_FULL_WORDS = {
    "No space left on device": "the disk is full",
    "Disk quota exceeded": "the disk quota is used up",
    "File too large": "a file is too large",
}


def is_secondary(error: BaseException) -> bool:
    """True when an error only says that another rank is gone."""
    from_torch = isinstance(error, dist.DistError) or "gloo/transport" in str(error)
    return from_torch and any(words in str(error) for words in _LOST)


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then its causes, the newest first."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def hints_of(error: BaseException, oom_before: OomKills) -> list[str]:
    """Return sentences about causes that a traceback hides: a full disk, exhausted device or host memory, OOM kills."""
    hints = [*_disk_hints(error), *OomKills.now().since(oom_before)]
    errors = list(chain(error))
    if any(isinstance(one, torch.OutOfMemoryError) for one in errors):
        hints.append("the device's memory is used up: see docs/memory.md")
    elif any(isinstance(one, MemoryError) or "DefaultCPUAllocator" in str(one) for one in errors):
        hints.append("host memory is used up: this process could not allocate any more")
    return list(dict.fromkeys(hints))


def no_room(error: BaseException) -> str | None:
    """Return a sentence about an error of a disk or a file that takes no more, None for other errors."""
    for one in chain(error):
        if isinstance(one, OSError) and one.errno in _FULL:
            remedy = "raise the limit on the size of files (ulimit -f)" if one.errno == errno.EFBIG else "make room"
            return f"{_FULL[one.errno]}{f', writing {one.filename}' if one.filename else ''}: {remedy} and start again"
    return None


def _disk_hints(error: BaseException) -> Iterator[str]:
    if sentence := no_room(error):
        yield sentence
        return
    for one in chain(error):
        for words, meaning in _FULL_WORDS.items():
            if words in str(one):
                yield f"{meaning}: make room and start again"
                return


@dataclass(frozen=True, slots=True)
class OomKills:
    """Counts of processes that the kernel has killed for lack of memory."""

    of_group: int  # in this process's memory cgroup
    of_host: int  # on this host

    @classmethod
    def now(cls) -> OomKills:
        """Read the current counts; 0 where the kernel reports none."""
        return cls(of_group=_count(_group_file(), "oom_kill"), of_host=_count(Path("/proc/vmstat"), "oom_kill"))

    def since(self, before: OomKills) -> list[str]:
        """Describe the kills since the counts `before`, in at most one sentence."""
        if (count := self.of_group - before.of_group) > 0:
            return [f"host memory is used up: the kernel has killed {_processes(count)} of this job's memory cgroup"]
        if (count := self.of_host - before.of_host) > 0:
            return [f"the kernel has killed {_processes(count)} of this host for lack of memory since the run started"]
        return []


def _processes(count: int) -> str:
    return "a process" if count == 1 else f"{count} processes"


def _group_file() -> Path:
    """Find the file with the kernel's counts for this process's memory cgroup, version 2 or 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    fields = [line.split(":", 2) for line in lines]
    for number, controllers, path in fields:
        if number == "0" and (found := Path(f"/sys/fs/cgroup{path}/memory.events")).exists():
            return found
        if "memory" in controllers.split(","):
            for folder in (f"/sys/fs/cgroup/memory{path}", "/sys/fs/cgroup/memory"):
                if (found := Path(folder, "memory.oom_control")).exists():
                    return found
    return Path("/sys/fs/cgroup/memory.events")


def _count(path: Path, name: str) -> int:
    """Read the number on the line `name number` of a file; 0 without the file or the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name)
