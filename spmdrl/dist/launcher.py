"""The variables by which a launcher such as torchrun tells a process its place, checked before any rank waits."""

from __future__ import annotations

import os
import random
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from spmdrl.types import UserError

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_ALWAYS = ("RANK", "WORLD_SIZE")  # set together, by every launcher
_LEAST = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "TORCHELASTIC_RESTART_COUNT": 0}
_MOST = 10**6
_CURE = "start the run with torchrun, or unset it for a run of one rank"


@dataclass(frozen=True, slots=True)
class Network:
    """The names that this machine's network knows, as far as a start needs them."""

    interfaces: Sequence[str]

    @classmethod
    def here(cls) -> Network:
        """Ask the system."""
        return cls([name for _, name in socket.if_nameindex()])

    def resolves(self, address: str) -> bool:
        """True when the name or number of a host has an address."""
        try:
            return bool(socket.getaddrinfo(address, None))
        except (OSError, UnicodeError):
            return False


def free_port() -> int:
    """Find a port below those that Linux gives to connections: one of these may be taken before rank 0 listens."""
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port


def require_launch_environment() -> None:
    """Raise UserError, with a sentence for each, when the variables of the launcher cannot belong to one launch.

    Otherwise ranks would wait for others that never come. Needs no process group.
    """
    if sentences := list(launch_problems(os.environ, Network.here())):
        raise UserError("\n".join(sentences))


def launch_problems(environment: Mapping[str, str], network: Network) -> Iterator[str]:
    """Yield a sentence for each variable of the launcher that is no number in its range, is alone, or names nothing."""
    given: dict[str, int] = {}
    for name, least in _LEAST.items():
        text = environment.get(name)
        if text is None:
            continue
        if re.fullmatch(r"[0-9]{1,7}", text) and least <= int(text) <= _MOST:
            given[name] = int(text)
        else:
            yield f"the environment variable {name}={text!r} is not a whole number of {least} or more; {_CURE}"
    there = [name for name in _PLACE if name in environment]
    missing = [name for name in _ALWAYS if name not in environment]
    if there and missing:
        yield (
            f"the environment variable {there[0]}={environment[there[0]]} is set, but {missing[0]} is not: a launcher "
            f"sets both, so it may be left from another program; {_CURE}"
        )
    yield from _order_problems(given)
    if not missing:
        yield from _meeting_problems(environment, network)
    yield from _interface_problems(environment, network)


def _order_problems(given: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence for each pair of numbers that contradict each other."""
    for low, high, is_wrong in (
        ("RANK", "WORLD_SIZE", lambda a, b: a >= b),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE", lambda a, b: a >= b),
        ("LOCAL_WORLD_SIZE", "WORLD_SIZE", lambda a, b: a > b),
        ("LOCAL_RANK", "RANK", lambda a, b: a > b),
    ):
        if low in given and high in given and is_wrong(given[low], given[high]):
            yield (
                f"the environment variables {low}={given[low]} and {high}={given[high]} contradict each other: "
                f"{low} is {'at most' if low == 'LOCAL_WORLD_SIZE' or high == 'RANK' else 'below'} {high}; start the "
                "run with torchrun, or unset those that another program has left"
            )


def _meeting_problems(environment: Mapping[str, str], network: Network) -> Iterator[str]:
    """Yield a sentence when the place where the ranks meet is missing or cannot be."""
    port, address = environment.get("MASTER_PORT"), environment.get("MASTER_ADDR")
    if port is None:
        yield f"RANK is set, but MASTER_PORT, at which the ranks meet, is not; {_CURE}"
    elif not (re.fullmatch(r"[0-9]{1,5}", port) and 1 <= int(port) <= 65535):
        yield f"the environment variable MASTER_PORT={port!r} is not a port, a number from 1 to 65535; {_CURE}"
    if not address:
        yield f"RANK is set, but MASTER_ADDR, at which the ranks meet, is not; {_CURE}"
    elif not network.resolves(address):
        yield (
            f"the environment variable MASTER_ADDR={address!r} names no host that this machine can find; set it to the "
            "name or address of the first node"
        )


def _interface_problems(environment: Mapping[str, str], network: Network) -> Iterator[str]:
    """Yield a sentence for each variable that names no network interface of this machine."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        names = [name for name in environment.get(variable, "").split(",") if name]
        unknown = [name for name in names if not any(_names(variable, name, here) for here in network.interfaces)]
        # NCCL searches for any of several beginnings of names; "^" lists those that it must not take.
        is_wrong = bool(unknown) if variable == "GLOO_SOCKET_IFNAME" else bool(names) and unknown == names
        if is_wrong and not environment[variable].startswith("^"):
            yield (
                f"the environment variable {variable}={environment[variable]} names no network interface of this "
                f"machine; set it to one of {', '.join(network.interfaces)}, or unset it"
            )


def _names(variable: str, name: str, interface: str) -> bool:
    if variable == "GLOO_SOCKET_IFNAME" or name.startswith("="):
        return name.removeprefix("=").partition(":")[0] == interface
    return interface.startswith(name.partition(":")[0])
