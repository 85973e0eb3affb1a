"""The sandbox of a process: resource limits, no sockets, read-only files, no access to other processes.

Limits work everywhere, the filter of system calls and Landlock on Linux, and the rest where Linux lets a process create
namespaces. docs/security.md says what the sandbox stops and what it does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import platform
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from spmdrl.faults.guard import adopt_orphans, kill_children, signal_at_parents_end

# The filter of system calls of a sandbox: what the kernel refuses to a process and to all that it starts.


# Calls of the C library that Python has no name for.


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library and return what it does. Raises OSError where that is negative."""
    result: int = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24  # places in struct seccomp_data; of arguments, the lower halves
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_FIRST_X32_CALL = 0x40000000
_CLONE_PARENT = 0x00008000  # the new process would belong to the caller's parent
_NEW_NAMESPACES = 0x7E020000

# By architecture as `platform` calls it: the kernel's name of it, and the numbers of the system calls.
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED = {
    # Sockets, and io_uring, which opens them without a call. Unix sockets in the file system belong to other processes,
    # and no namespace hides them.
    "socket": {"x86_64": 41, "aarch64": 198},
    "io_uring_setup": {"x86_64": 425, "aarch64": 425},
    # Memory that no limit counts, and that stays when no process has it any more.
    "shmget": {"x86_64": 29, "aarch64": 194},
    "semget": {"x86_64": 64, "aarch64": 190},
    "msgget": {"x86_64": 68, "aarch64": 186},
    "mq_open": {"x86_64": 240, "aarch64": 180},
    "memfd_create": {"x86_64": 319, "aarch64": 279},
    "memfd_secret": {"x86_64": 447, "aarch64": 447},
    "add_key": {"x86_64": 248, "aarch64": 217},
    "request_key": {"x86_64": 249, "aarch64": 218},
    "keyctl": {"x86_64": 250, "aarch64": 219},
    # Namespaces of its own, in which a process has all capabilities.
    "unshare": {"x86_64": 272, "aarch64": 97},
    "setns": {"x86_64": 308, "aarch64": 268},
    # Other processes' memory and descriptors.
    "ptrace": {"x86_64": 101, "aarch64": 117},
    "process_vm_readv": {"x86_64": 310, "aarch64": 270},
    "process_vm_writev": {"x86_64": 311, "aarch64": 271},
    "pidfd_getfd": {"x86_64": 438, "aarch64": 438},
    "kcmp": {"x86_64": 312, "aarch64": 272},
    # Much of the kernel, and nothing that a reward needs.
    "bpf": {"x86_64": 321, "aarch64": 280},
    "perf_event_open": {"x86_64": 298, "aarch64": 241},
    "userfaultfd": {"x86_64": 323, "aarch64": 282},
}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
_IOCTL = {"x86_64": 16, "aarch64": 29}
# Requests of ioctl that programs need of files, pipes and sockets. None of them changes a terminal or a device.
_REQUESTS = {
    **{"TCGETS": 0x5401, "TCGETS2": 0x802C542A, "TIOCGPGRP": 0x540F, "TIOCGWINSZ": 0x5413, "TIOCOUTQ": 0x5411},
    **{"FIONREAD": 0x541B, "FIONBIO": 0x5421, "FIONCLEX": 0x5450, "FIOCLEX": 0x5451, "FIOASYNC": 0x5452},
}
_SIZE_OF_REQUEST, _TYPE_OF_REQUEST = 0x3FFF0000, 0xFF00
_GPU_TYPES = b"FdK"  # NVIDIA's driver, DRM, and AMD's: with a size, because consoles share these types without one
_NUMBERS_OF_UVM = (0x100, 0x30000001, 0x30000002)  # NVIDIA's unified memory: all below the first, and two


def refuse_system_calls() -> list[str]:
    """Install the filter, which cannot be removed; returns a sentence where that is impossible."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _ARCHITECTURES:
        return [f"sockets can be opened (no filter of system calls for {sys.platform} on {machine})"]
    code = assembled(machine)
    program = ctypes.create_string_buffer(code)
    described = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(program)))
    try:
        call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described, 0, 0)
    except OSError as error:
        return [f"sockets can be opened (no filter of system calls: {error.strerror})"]
    return []


@dataclass(frozen=True, slots=True)
class _Instruction:
    """One instruction of the kernel's filter language; the next one follows unless it names another."""

    instruction: int
    operand: int
    yes: str = ""
    no: str = ""
    name: str = ""  # by which others name it


def assembled(machine: str) -> bytes:
    """Return the filter for a machine, 8 bytes for each instruction."""
    steps = [
        _Instruction(_LOAD, _ARCHITECTURE),
        _Instruction(_EQUAL, _ARCHITECTURES[machine], no="refuse"),
        _Instruction(_LOAD, _NUMBER),
        _Instruction(_AT_LEAST, _FIRST_X32_CALL, yes="refuse"),
        *(_Instruction(_EQUAL, numbers[machine], yes="refuse") for numbers in _REFUSED.values()),
        _Instruction(
            _EQUAL, _CLONE3, yes="absent"
        ),  # its flags are in memory, where no filter sees them; libraries then clone
        _Instruction(_EQUAL, _CLONE[machine], yes="clone"),
        _Instruction(_EQUAL, _SOCKETPAIR[machine], yes="socketpair"),
        _Instruction(_EQUAL, _IOCTL[machine], yes="ioctl"),
        _Instruction(_RETURN, _ALLOW),
        _Instruction(_LOAD, _FIRST, name="clone"),
        _Instruction(_ANY_BIT, _CLONE_PARENT | _NEW_NAMESPACES, yes="refuse"),
        _Instruction(_RETURN, _ALLOW),
        # A pair of datagram sockets can send to any address.
        _Instruction(_LOAD, _FIRST, name="socketpair"),
        _Instruction(_EQUAL, socket.AF_UNIX, no="refuse"),
        _Instruction(_LOAD, _SECOND),
        _Instruction(_AND, 0xFFFFFFFF & ~(socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)),
        _Instruction(_EQUAL, socket.SOCK_STREAM, no="refuse"),
        _Instruction(_RETURN, _ALLOW),
        # Landlock knows ioctl from version 5 on, and only of files that were opened later.
        _Instruction(_LOAD, _SECOND, name="ioctl"),
        *(_Instruction(_EQUAL, request, yes="allow") for request in (*_REQUESTS.values(), *_NUMBERS_OF_UVM[1:])),
        _Instruction(_AT_LEAST, _NUMBERS_OF_UVM[0], no="allow"),
        _Instruction(_ANY_BIT, _SIZE_OF_REQUEST, no="unknown"),
        _Instruction(_AND, _TYPE_OF_REQUEST),
        *(_Instruction(_EQUAL, kind << 8, yes="allow") for kind in _GPU_TYPES),
        _Instruction(_RETURN, _ERRNO | errno.ENOTTY, name="unknown"),
        _Instruction(_RETURN, _ALLOW, name="allow"),
        _Instruction(_RETURN, _ERRNO | errno.EACCES, name="refuse"),
        _Instruction(_RETURN, _ERRNO | errno.ENOSYS, name="absent"),
    ]
    place_of = {step.name: place for place, step in enumerate(steps)}
    code = b""
    for place, step in enumerate(steps, start=1):
        yes, no = (place_of[name] - place if name else 0 for name in (step.yes, step.no))
        code += struct.pack("=HBBI", step.instruction, yes, no, step.operand)
    return code


# Landlock: the kernel's own fence around a process, which needs no namespace and no rights.


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on every architecture
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE, _READ, _LIST = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL_RIGHT = 1 << 13, 1 << 14, 1 << 15
_CHANGES_OF_VERSION_1 = (_REFER - 1) & ~(_EXECUTE | _READ | _LIST)  # writing, removing, and making of all kinds
_ABSTRACT_SOCKETS, _SIGNALS = 1 << 0, 1 << 1


SIGNALS_SINCE = 6  # the version that also keeps signals inside
_DEVICES = ("null", "zero", "full", "random", "urandom", "nvidia*", "nvidia-caps/*", "dri/*", "kfd")


def devices() -> list[str]:
    """List the devices that a sandboxed process may open: those that give numbers or compute.

    No terminal, no kernel log, no disk, no virtual machine.
    """
    found = (device for pattern in _DEVICES for device in Path("/dev").glob(pattern))
    return [str(device) for device in found if device.is_char_device()]


def fence(writable: Iterable[str]) -> int:
    """Keep this process, and all that it starts, from changing files outside of these folders.

    That includes pipes. Below /dev it can open `devices()` alone, also for reading, and since version 5 no other
    device takes ioctl, wherever its file is. Nor can processes outside be traced or, since version `SIGNALS_SINCE`,
    be sent signals. The caller must have given up the right to gain new privileges. Returns the kernel's version of
    Landlock; 0 where there is none.
    """
    if sys.platform != "linux":
        return 0
    try:
        version = call("syscall", _CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    except OSError:  # it is not built in, or switched off
        return 0
    changes = _CHANGES_OF_VERSION_1 | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    scope = _ABSTRACT_SOCKETS | _SIGNALS if version >= SIGNALS_SINCE else 0
    ioctl = _IOCTL_RIGHT if version >= 5 else 0
    attributes = struct.pack("=QQQ", changes | _READ | ioctl, 0, scope)[: 24 if scope else 8]
    rules = call("syscall", _CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    try:
        # Rules only allow. So what is readable is all but /dev.
        for name in os.listdir("/"):
            if name != "dev":
                with contextlib.suppress(OSError):  # a link that leads nowhere, a mount that is gone
                    _allow(rules, f"/{name}", _READ)
        for place in writable:
            _allow(rules, place, changes | _READ)
        for device in devices():
            _allow(rules, device, _READ | _WRITE | ioctl)
        call("syscall", _RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)
    return version


def _allow(rules: int, place: str, rights: int) -> None:
    opened = os.open(place, os.O_PATH | os.O_CLOEXEC)
    try:
        call("syscall", _ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, opened), 0)
    finally:
        os.close(opened)


_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
_SYS_MOUNT_SETATTR = 442  # on every architecture
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NODEV = -100, 0x8000, 0x1, 0x4
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The part of a sandbox that this machine could build."""

    missing: list[str]  # sentences about what it cannot protect
    owns_processes: bool  # all processes that it can signal belong to it, but for their first
    own_folders: tuple[str, ...]  # whose files nobody else has
    in_memory: bool = False  # each of them is a file system in memory


def enter(sandbox: Sandbox, pipe: int) -> Isolation:
    """Confine this process, which must have one thread, and its descendants; this cannot be undone.

    It continues as another process, which alone holds `pipe`; apart from the standard streams no other descriptor may
    be open. With `is_strict` it raises a ValueError where the machine cannot protect everything.
    """
    isolation = _separate_as_far_as_possible(sandbox, pipe)
    missing = isolation.missing + refuse_system_calls()
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
    if isolation.owns_processes:
        # Without a namespace, all processes of the user would count, including the trainer's threads.
        limits["RLIMIT_NPROC"] = sandbox.max_processes + _KEEPERS
    missing += [sentence for name, limit in limits.items() for sentence in _limit(name, limit)]
    return replace(isolation, missing=missing)


def limit_cpu(limit_s: float) -> None:
    """Limit the CPU time of this process to `limit_s` from now; a process it starts gets the total as its limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    until_s = math.ceil(min(time.process_time() + limit_s, 2**31)) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (until_s if hard == resource.RLIM_INFINITY else min(until_s, hard), hard))


def _limit(name: str, limit: int) -> list[str]:
    number = getattr(resource, name)
    _, hard = resource.getrlimit(number)
    allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    try:
        resource.setrlimit(number, (allowed, allowed))
    except (OSError, ValueError) as error:  # macOS has limits that it refuses to set
        return [f"{name} cannot be set ({error})"]
    return []


def _separate_as_far_as_possible(sandbox: Sandbox, pipe: int) -> Isolation:
    if sys.platform != "linux":
        missing = ["files and other processes are within reach (only Linux has namespaces)"]
        return Isolation(missing=missing, owns_processes=False, own_folders=(sandbox.folder,))
    if problem := _problem_of(_separate):
        continue_below(pipe)
        _drop_privileges()
        missing = [_without_namespaces(fence(_writable(sandbox)), problem)]
        return Isolation(missing=missing, owns_processes=False, own_folders=(sandbox.folder,))

    def separate_files_too() -> None:
        _separate()
        _protect_files(sandbox)

    files_problem = _problem_of(separate_files_too)
    _separate()
    if not files_problem:
        _protect_files(sandbox)
    _continue_inside(pipe)
    version = fence(_writable(sandbox))
    if not files_problem:
        return Isolation(missing=[], owns_processes=True, own_folders=_writable(sandbox), in_memory=True)
    within_reach = f"files in {_SHARED_MEMORY} are" if version else "files are"
    missing = [f"{within_reach} within reach (they cannot be made read-only: {files_problem})"]
    return Isolation(missing=missing, owns_processes=True, own_folders=(sandbox.folder,))


def _without_namespaces(landlock: int, problem: str) -> str:
    """Say what is missing without namespaces, by the kernel's version of Landlock."""
    within_reach = "files and other processes"
    if landlock:
        within_reach = f"files in {_SHARED_MEMORY}" + (" and other processes" if landlock < SIGNALS_SINCE else "")
    return f"{within_reach} are within reach, and processes are not counted (no user namespace: {problem})"


def _writable(sandbox: Sandbox) -> tuple[str, ...]:
    return tuple(place for place in (sandbox.folder, _SHARED_MEMORY) if os.path.isdir(place))


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
    call("unshare", _CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWNS | _CLONE_NEWIPC)
    for file, content in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{file}", "w") as opened:
            opened.write(content)


def _protect_files(sandbox: Sandbox) -> None:
    """Make all files read-only, except in the sandbox's folder and in shared memory, and close all but a few devices.

    Those two become new file systems of limited size in memory, which vanish with the last process.
    """
    with contextlib.suppress(OSError), open("/proc/sys/user/max_user_namespaces", "w") as opened:
        opened.write("0")  # in a container it may be read-only, and the filter refuses them too
    call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    _set_mount("/", _AT_RECURSIVE, on=_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NODEV)
    for device in devices():
        call("mount", os.fsencode(device), os.fsencode(device), None, _MS_BIND, None)
        with contextlib.suppress(PermissionError):  # it could not be opened outside either
            _set_mount(device, 0, off=_MOUNT_ATTR_NODEV)
    options = f"mode=700,size={sandbox.max_file_bytes},nr_inodes={_MAX_FILES}".encode()
    for place in _writable(sandbox):
        call("mount", b"tmpfs", os.fsencode(place), b"tmpfs", _MS_NOSUID | _MS_NODEV, options)


def _set_mount(place: str, flags: int, *, on: int = 0, off: int = 0) -> None:
    attributes = (ctypes.c_uint64 * 4)(on, off)  # struct mount_attr: set, clear, propagation, namespace
    size = ctypes.sizeof(attributes)
    call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(place), flags, attributes, size)


def continue_below(pipe: int) -> Isolation:
    """Continue in a child of this process, which alone holds `pipe`; nothing is isolated.

    This process stays as the parent of all that the child leaves behind, and kills it when the child ends or the rank
    does.
    """
    if sys.platform == "linux":
        adopt_orphans()
        child = os.fork()
        if child:
            os.close(pipe)
            _guard(child)
        signal_at_parents_end(signal.SIGKILL)
    return Isolation(missing=[], owns_processes=False, own_folders=())


def _continue_inside(pipe: int) -> None:
    """Continue in a process inside the new process namespace; this process waits outside and ends with its exit code.

    The namespace's first process is between the two: it collects orphans and cannot be killed from inside. When it
    ends, the kernel kills all others in the namespace.
    """
    first = os.fork()
    if first:
        os.close(pipe)
        _guard(first)
    signal_at_parents_end(signal.SIGKILL)
    _drop_privileges()
    inside = os.fork()
    if inside:
        os.close(pipe)
        os._exit(_wait(inside))


def _guard(child: int) -> NoReturn:
    """Wait for a child, and end as it did; kill all children then, when the rank ends, or by SIGTERM."""

    def end(*_: object) -> NoReturn:
        kill_children()
        os._exit(128 + signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    signal_at_parents_end(signal.SIGTERM)  # again: entering a user namespace resets it
    code = _wait(child)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kill_children()
    os._exit(code)


def _wait(child: int) -> int:
    """Collect orphans until a child ends; returns its exit code, or 128 plus the number of a signal."""
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _drop_privileges() -> None:
    """Give up all capabilities, also for programs started later, and forbid other processes to trace this one."""
    for capability in range(_MAX_CAPABILITIES):
        if ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            break  # there are no more, or this process has none
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    call("capset", header, (ctypes.c_uint32 * 6)())
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
