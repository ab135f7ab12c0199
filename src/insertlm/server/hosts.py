"""Which names a server answers to.

A page of another site can have its own name point to this machine, and the browser then lets it read what a server
here answers (DNS rebinding). Its requests still carry that name, in the header Host.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

from insertlm.core.checks import shown
from insertlm.core.errors import InsertlmError

__all__ = ["Hosts"]

_LOCAL = ("localhost", "127.0.0.1", "::1")
_HEADER = re.compile(r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[^\s:/@\[\]]+))(?P<port>:\d+)?", re.IGNORECASE)


class Hosts:
    """This machine's own names, the address that the server listens on, and `more`; "*" among these stands for all.

    If the server listens on all addresses (0.0.0.0, ::), any address will do: none can be made to point elsewhere.
    """

    def __init__(self, bound: str, more: Collection[str] = ()) -> None:
        for name in more:  # a name that no request can have would be a mistake that nobody notices
            found = _HEADER.fullmatch(name)
            if name != "*" and not _is_address(name) and (not found or found["port"]):
                raise InsertlmError(f"argument --allowed-host: expected a name without a port, or *, got {shown(name)}")
        self._names = {_plain(name) for name in (*_LOCAL, bound, *more)}
        self._any, self._addresses = "*" in more, _is_address(bound) and ipaddress.ip_address(bound).is_unspecified

    def allows(self, header: str) -> bool:
        """header: a name or an address, perhaps with a port"""
        if self._any:
            return True
        if not (found := _HEADER.fullmatch(header)):
            return False
        name = _plain(found["six"] or found["name"])
        return name in self._names or (self._addresses and _is_address(name))


def _plain(name: str) -> str:
    return name.lower().removeprefix("[").removesuffix("]").removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
