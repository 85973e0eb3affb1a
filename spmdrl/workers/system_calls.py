"""The filter of system calls of a sandbox: what the kernel refuses to a process and to all that it starts."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Any

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
class _Step:
    """One instruction of the kernel's filter language; the next one follows unless it names another."""

    instruction: int
    operand: int
    yes: str = ""
    no: str = ""
    name: str = ""  # by which others name it


def assembled(machine: str) -> bytes:
    """Return the filter for a machine, 8 bytes for each instruction."""
    steps = [
        _Step(_LOAD, _ARCHITECTURE),
        _Step(_EQUAL, _ARCHITECTURES[machine], no="refuse"),
        _Step(_LOAD, _NUMBER),
        _Step(_AT_LEAST, _FIRST_X32_CALL, yes="refuse"),
        *(_Step(_EQUAL, numbers[machine], yes="refuse") for numbers in _REFUSED.values()),
        _Step(
            _EQUAL, _CLONE3, yes="absent"
        ),  # its flags are in memory, where no filter sees them; libraries then clone
        _Step(_EQUAL, _CLONE[machine], yes="clone"),
        _Step(_EQUAL, _SOCKETPAIR[machine], yes="socketpair"),
        _Step(_EQUAL, _IOCTL[machine], yes="ioctl"),
        _Step(_RETURN, _ALLOW),
        _Step(_LOAD, _FIRST, name="clone"),
        _Step(_ANY_BIT, _CLONE_PARENT | _NEW_NAMESPACES, yes="refuse"),
        _Step(_RETURN, _ALLOW),
        # A pair of datagram sockets can send to any address.
        _Step(_LOAD, _FIRST, name="socketpair"),
        _Step(_EQUAL, socket.AF_UNIX, no="refuse"),
        _Step(_LOAD, _SECOND),
        _Step(_AND, 0xFFFFFFFF & ~(socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)),
        _Step(_EQUAL, socket.SOCK_STREAM, no="refuse"),
        _Step(_RETURN, _ALLOW),
        # Landlock knows ioctl from version 5 on, and only of files that were opened later.
        _Step(_LOAD, _SECOND, name="ioctl"),
        *(_Step(_EQUAL, request, yes="allow") for request in (*_REQUESTS.values(), *_NUMBERS_OF_UVM[1:])),
        _Step(_AT_LEAST, _NUMBERS_OF_UVM[0], no="allow"),
        _Step(_ANY_BIT, _SIZE_OF_REQUEST, no="unknown"),
        _Step(_AND, _TYPE_OF_REQUEST),
        *(_Step(_EQUAL, kind << 8, yes="allow") for kind in _GPU_TYPES),
        _Step(_RETURN, _ERRNO | errno.ENOTTY, name="unknown"),
        _Step(_RETURN, _ALLOW, name="allow"),
        _Step(_RETURN, _ERRNO | errno.EACCES, name="refuse"),
        _Step(_RETURN, _ERRNO | errno.ENOSYS, name="absent"),
    ]
    place_of = {step.name: place for place, step in enumerate(steps)}
    code = b""
    for place, step in enumerate(steps, start=1):
        yes, no = (place_of[name] - place if name else 0 for name in (step.yes, step.no))
        code += struct.pack("=HBBI", step.instruction, yes, no, step.operand)
    return code
