"""Landlock: the kernel's own fence around a process, which needs no namespace and no rights."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

from spmdrl.workers.kernel import call

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on every architecture
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE, _READ, _LIST = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
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
    ioctl = _IOCTL if version >= 5 else 0
    attributes = struct.pack("=QQQ", changes | _READ | ioctl, 0, scope)[: 24 if scope else 8]
    rules = call("syscall", _CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    try:
        # Rules only allow. So what is readable is all that is beside /dev.
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
