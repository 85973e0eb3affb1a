"""The sandbox of a process: resource limits, no sockets, read-only files, no access to other processes.

Limits work everywhere, the system call filter works on Linux, and the rest works where Linux lets a process create
namespaces. docs/security.md says what the sandbox stops and what it does not.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import platform
import resource
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
_SYS_MOUNT_SETATTR = 442  # on every architecture
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = -100, 0x8000, 0x1
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_FILTER_LOAD, _FILTER_EQUAL, _FILTER_AT_LEAST, _FILTER_RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES
_SOCKET_CALL = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}  # audit architecture, number of socket()
_FIRST_X32_CALL, _IO_URING_SETUP = 0x40000000, 425
_CAPABILITY_VERSION_3 = 0x20080522
_MAX_CAPABILITIES = 64
_SHARED_MEMORY = "/dev/shm"
_MAX_FILES = 4096  # in the temporary directory
_NO_ERRNO = 255
_KEEPERS = 2  # processes around the sandboxed one: see _continue_inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """The limits of one process and its descendants."""

    setting: str  # its table in the configuration, for messages
    folder: str  # working and temporary directory
    is_strict: bool
    max_memory_bytes: int  # address space of each process
    max_processes: int  # counts threads
    max_file_bytes: int  # for each file, and for the folder
    max_open_files: int  # for each process


def enter(sandbox: Sandbox, pipe: int) -> list[str]:
    """Confine this process, which must have one thread, and its descendants; this cannot be undone.

    It continues as another process, which alone holds `pipe`; apart from the standard streams no other descriptor may
    be open. Returns sentences about what this machine cannot protect. With `is_strict` it raises a ValueError instead.
    """
    missing = _separate_as_far_as_possible(sandbox, pipe) + _without_sockets()
    if missing and sandbox.is_strict:
        raise ValueError(
            f'{sandbox.setting}.mode = "strict", but {"; ".join(missing)}; set it to "auto" to accept that'
        )
    limits = {
        "RLIMIT_AS": sandbox.max_memory_bytes,
        "RLIMIT_FSIZE": sandbox.max_file_bytes,
        "RLIMIT_NOFILE": sandbox.max_open_files,
        "RLIMIT_CORE": 0,
    }
    if not any("processes" in sentence for sentence in missing):
        # Without a namespace, all processes of the user would count, including the trainer's threads.
        limits["RLIMIT_NPROC"] = sandbox.max_processes + _KEEPERS
    return missing + [sentence for name, limit in limits.items() for sentence in _limit(name, limit)]


def limit_cpu(limit_s: float) -> None:
    """Limit the CPU time of this process to `limit_s` from now; a process it starts gets the total as its limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    until_s = math.ceil(min(time.process_time() + limit_s, 2**31)) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (until_s if hard == resource.RLIM_INFINITY else min(until_s, hard), hard))


def empty(sandbox: Sandbox) -> None:
    """Delete the files that were left in the folder, so that they take no space from the next ones."""
    for entry in list(os.scandir(sandbox.folder)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)


def die_with_parent() -> None:
    """Ask Linux to kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit(name: str, limit: int) -> list[str]:
    number = getattr(resource, name)
    _, hard = resource.getrlimit(number)
    allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    try:
        resource.setrlimit(number, (allowed, allowed))
    except (OSError, ValueError) as error:  # macOS has limits that it refuses to set
        return [f"{name} cannot be set ({error})"]
    return []


def _separate_as_far_as_possible(sandbox: Sandbox, pipe: int) -> list[str]:
    if sys.platform != "linux":
        return ["files and other processes are within reach (only Linux has namespaces)"]
    if problem := _problem_of(_separate):
        _drop_privileges()
        return [f"files and other processes are within reach (no user namespace: {problem})"]

    def separate_files_too() -> None:
        _separate()
        _protect_files(sandbox)

    files_problem = _problem_of(separate_files_too)
    _separate()
    if not files_problem:
        _protect_files(sandbox)
    die_with_parent()  # again: entering a user namespace resets it
    _continue_inside(pipe)
    return [f"files are within reach (they cannot be made read-only: {files_problem})"] if files_problem else []


def _problem_of(step: Callable[[], None]) -> str | None:
    """Try a step in a child process, because a step that fails halfway cannot be undone; returns why it fails."""
    child = os.fork()
    if child == 0:
        code = _NO_ERRNO
        try:
            step()
            code = 0
        except OSError as error:
            code = error.errno or _NO_ERRNO
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return os.strerror(code) if code else None


def _separate() -> None:
    """Enter new namespaces, as the same user, without any rights outside them."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWNS | _CLONE_NEWIPC)
    for file, content in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{file}", "w") as opened:
            opened.write(content)


def _protect_files(sandbox: Sandbox) -> None:
    """Make all files read-only, except in the sandbox's folder and in shared memory.

    Those two become new file systems of limited size in memory, which vanish with the last process.
    """
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    read_only = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY)  # struct mount_attr: set, clear, propagation, namespace
    _call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, read_only, ctypes.sizeof(read_only))
    options = f"mode=700,size={sandbox.max_file_bytes},nr_inodes={_MAX_FILES}".encode()
    for place in (sandbox.folder, _SHARED_MEMORY):
        if os.path.isdir(place):
            _call("mount", b"tmpfs", os.fsencode(place), b"tmpfs", _MS_NOSUID | _MS_NODEV, options)


def _continue_inside(pipe: int) -> None:
    """Continue in a process inside the new process namespace; this process waits outside and ends with its exit code.

    The namespace's first process is between the two: it collects orphans and cannot be killed from inside. When it
    ends, the kernel kills all others in the namespace.
    """
    first = os.fork()
    if first:
        _end_like(first, pipe)
    die_with_parent()
    _drop_privileges()
    inside = os.fork()
    if inside:
        _end_like(inside, pipe)


def _end_like(child: int, pipe: int) -> NoReturn:
    """Wait for a child, which keeps the pipe, and end with its exit code; 128 plus the number after a signal."""
    os.close(pipe)
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _drop_privileges() -> None:
    """Give up all capabilities, also for programs started later, and forbid other processes to trace this one."""
    for capability in range(_MAX_CAPABILITIES):
        if ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            break  # there are no more, or this process has none
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)


def _without_sockets() -> list[str]:
    """Make the kernel refuse `socket()`, for networks and for Unix sockets: those in the file system belong to other
    processes, and no namespace hides them. `socketpair()` still works."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _SOCKET_CALL:
        return [f"sockets can be opened (no filter of system calls for {sys.platform} on {machine})"]
    architecture, number = _SOCKET_CALL[machine]
    steps = [  # (instruction, steps to skip if true, steps to skip if false, operand)
        (_FILTER_LOAD, 0, 0, 4),  # the architecture
        (_FILTER_EQUAL, 0, 5, architecture),
        (_FILTER_LOAD, 0, 0, 0),  # the number of the system call
        (_FILTER_AT_LEAST, 3, 0, _FIRST_X32_CALL),
        (_FILTER_EQUAL, 2, 0, number),
        (_FILTER_EQUAL, 1, 0, _IO_URING_SETUP),  # io_uring can create sockets without a system call
        (_FILTER_RETURN, 0, 0, _ALLOW),
        (_FILTER_RETURN, 0, 0, _REFUSE),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    described = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(program)))
    try:
        _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described, 0, 0)
    except OSError as error:
        return [f"sockets can be opened (no filter of system calls: {error.strerror})"]
    return []


def _call(name: str, *arguments: Any) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
