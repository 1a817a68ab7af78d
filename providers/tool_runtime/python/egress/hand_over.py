"""The way by which a guest hands the socket that it listens on to its proxy, before any program runs in it."""

import socket
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from providers.tool_runtime.python.egress.environment import PROXY_PORT, NetworkAccess
from providers.tool_runtime.python.egress.proxy import ContainerProxy


class HandOver:
    """A pair of sockets, open until `opened` is closed. The guest gets one of them; a program never has it."""

    def __init__(self, opened: ExitStack, proxy: ContainerProxy) -> None:
        self._proxy = proxy
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            opened.enter_context(end)
        self.access = NetworkAccess(self._theirs.fileno(), proxy.access.certificates, proxy.access.environment)

    @property
    def message(self) -> Mapping[str, Any]:
        """The part of the guest's first message that is about its network."""
        environment = dict(self.access.environment)
        return {"descriptor": self.access.descriptor, "port": PROXY_PORT, "environment": environment}

    def serve(self) -> None:
        """Let the proxy accept on the socket of a guest that has answered. Raises OSError where it has sent none."""
        self._ours.setblocking(False)
        _, descriptors, _, _ = socket.recv_fds(self._ours, 1, 1)
        if not descriptors:
            raise OSError("the sandbox has handed no socket over")
        self._proxy.serve(socket.socket(fileno=descriptors[0]))
