"""One connection of a program to its proxy: whom it asks for, whether it may, and what passes."""

import asyncio
import logging
import re
import ssl
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import h11

from apis.certificates import trusted_certificates
from providers.common.fair_turns import CURRENT_TURN, turn_of
from providers.common.net.checked_hosts import AddressRefused, HostUnknown
from providers.common.net.host_names import is_address, text_to_host
from providers.tool_runtime.python.egress.access import ContainerAccess
from providers.tool_runtime.python.egress.client_hello import UNRECOGNIZED_NAME_ALERT, ClientHello, HelloReader
from providers.tool_runtime.python.egress.exchange import CONNECTION_WORK, AnswerFailed, ByteStream, ProgramConnection
from providers.tool_runtime.python.egress.secrets import HostSecrets
from providers.tool_runtime.python.egress.settings import EgressCounts

_log = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S: Final = 5.0
_AUTHORITY: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:/?#\[\]@%\s]+)(?::([0-9]{1,5}))?")
_TARGET: Final = re.compile(rb"[\x21-\x7e]*")
_CONFIG: Final = "of the run config's tool_runtime"


class _Refused(Exception):
    """The proxy does not do what a program asks. The text is a sentence for it, `decision` a word for the log."""

    def __init__(self, decision: str, text: str, *, status: int = 403) -> None:
        super().__init__(text)
        self.decision = decision
        self.status = status


@dataclass(frozen=True, slots=True)
class _Target:
    """Destination of a connection, and for a plain request what is asked for there."""

    host: str
    port: int
    path: bytes | None = None

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.path is None else 80) else f"{host}:{self.port}"


class ProxyConnection:
    """Serves one connection, within the limits of its container."""

    def __init__(self, access: ContainerAccess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._access = access
        self._settings = access.egress.settings
        self._turn = turn_of(access.tenant)
        self._program = ProgramConnection(ByteStream(reader, writer, self._count_sent, self._turn))
        self._upstream: ByteStream | None = None
        self._target: _Target | None = None
        self._sent_bytes = 0
        self._received_bytes = 0
        self._deadline = asyncio.get_running_loop().time() + self._settings.connection_timeout_s
        self._timeout = asyncio.timeout_at(self._deadline)

    async def serve(self) -> None:
        """Serve until the end of the connection."""
        CURRENT_TURN.set(self._turn)
        decision = "connected"
        try:
            async with self._timeout:
                decision = await self._serve_or_refuse()
        except TimeoutError:
            decision = "timed out"
        except (OSError, EOFError, h11.ProtocolError):
            decision = "broken off"
        finally:
            if self._upstream is not None:
                self._upstream.writer.transport.abort()
            self._log(decision)
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                writer = self._program.stream.writer
                writer.close()
                await writer.wait_closed()

    async def _serve_or_refuse(self) -> str:
        """Return the decision, in words for the log."""
        try:
            await self._serve_request()
        except _Refused as refusal:
            self._access.count(EgressCounts(refusals=1))
            await self._program.refuse(refusal.status, str(refusal))
            return refusal.decision
        except AnswerFailed as exc:
            await self._program.refuse(502, str(exc))
            return "failed"
        except h11.RemoteProtocolError as exc:
            await self._program.refuse(exc.error_status_hint, "The request is not one that the proxy reads.")
            return "wrong request"
        return "connected"

    async def _serve_request(self) -> None:
        await self._turn.wait(CONNECTION_WORK)
        async with asyncio.timeout(self._settings.head_timeout_s):
            request = await self._program.read_request()
        if request is None:
            return
        target = self._target = _read_target(request)
        self._check(target)
        secrets = self._access.secrets.of_host(target.host)  # the proxy ends the TLS of a host that has any
        host = self._upstream = await self._connect(target, with_tls=secrets is not None and target.path is None)
        self._access.count(EgressCounts(connections=1))
        self._touch()
        if target.path is not None:
            # no secret leaves in plain, but the host may return one that it got over TLS
            redacting = secrets.without_values() if secrets is not None else None
            await self._program.exchange(request, host, target.authority, target.path, redacting)
        elif secrets is None:
            await self._tunnel(host, target.host)
        else:
            await self._exchange_with_secrets(host, target, secrets)

    def _check(self, target: _Target) -> None:
        """Raise _Refused for a host or a port that the container may not reach."""
        host, port = target.host, target.port
        if not self._access.rules.permit(host):
            raise _Refused(
                "refused host", f"The host {host} is not in network_policy.allowed_domains of this container."
            )
        if port not in self._access.egress.rules.open_ports(host):
            raise _Refused("refused port", f"Port {port} of {host} is not open: see egress.allowed_hosts {_CONFIG}.")
        if not self._access.count(EgressCounts()):
            raise _Refused("used up", f"The container has used up egress.max_container_mib {_CONFIG}.")

    async def _connect(self, target: _Target, *, with_tls: bool) -> ByteStream:
        host = target.host
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                connected = await self._access.egress.hosts.connect(host, target.port)
                context = await asyncio.to_thread(trusted_certificates) if with_tls else None
                reader, writer = await asyncio.open_connection(
                    sock=connected, ssl=context, server_hostname=host if context else None
                )
        except HostUnknown:
            raise _Refused("unknown host", f"The host {host} is not known.", status=502) from None
        except AddressRefused:
            text = f"The host {host} has an address that egress.allowed_private_networks {_CONFIG} does not allow."
            raise _Refused("refused address", text) from None
        except ssl.SSLError:
            raise _Refused("wrong certificate", f"The certificate of {host} is not trusted.", status=502) from None
        except TimeoutError:
            raise _Refused("timed out", f"The host {host} did not answer in time.", status=504) from None
        except OSError:
            raise _Refused("unreachable", f"The host {host} cannot be reached.", status=502) from None
        return ByteStream(reader, writer, self._count_received, self._turn)

    async def _tunnel(self, host: ByteStream, name: str) -> None:
        """Pass the bytes of TLS on, whose first message must ask for the same host."""
        program = self._program.stream
        await self._program.accept()
        async with asyncio.timeout(self._settings.head_timeout_s):
            reader, data = HelloReader(), self._program.early_bytes
            try:
                while (hello := reader.feed(data)) is None:
                    if not (data := await program.read()):
                        return
            except ValueError:
                raise _Refused("no TLS", "Only TLS passes through a tunnel.") from None
        if not _asks_for(hello, name):
            await program.write(UNRECOGNIZED_NAME_ALERT)
            program.writer.close()
            raise _Refused("wrong name", "TLS asks for another host than the tunnel.")
        await host.write(bytes(reader.data))
        ways = [asyncio.ensure_future(_pass_on(program, host)), asyncio.ensure_future(_pass_on(host, program))]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
            for way in done:
                way.result()
        finally:
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)

    async def _exchange_with_secrets(self, host: ByteStream, target: _Target, secrets: HostSecrets) -> None:
        """End the TLS of the program here, and send its request with the secrets in it."""
        context = await self._access.server_context(target.host)
        stream = self._program.stream
        await self._program.accept()
        if self._program.early_bytes:
            raise _Refused("no TLS", "TLS begins after the answer to CONNECT.")
        await stream.writer.start_tls(context, ssl_handshake_timeout=self._settings.head_timeout_s)
        inner = self._program = ProgramConnection(stream)
        async with asyncio.timeout(self._settings.head_timeout_s):
            request = await inner.read_request()
        if request is None:
            return
        if request.method == b"CONNECT" or not request.target.startswith(b"/"):
            raise _Refused("wrong request", "A request within a tunnel names a path.", status=400)
        _check_host_header(request, target, 443)
        await inner.exchange(request, host, target.authority, request.target, secrets)

    def _count_sent(self, size: int) -> None:
        self._sent_bytes += size
        self._count(EgressCounts(sent_bytes=size))

    def _count_received(self, size: int) -> None:
        self._received_bytes += size
        self._count(EgressCounts(received_bytes=size))

    def _count(self, counts: EgressCounts) -> None:
        if not self._access.count(counts) and self._upstream is not None:
            raise ConnectionAbortedError("the container has used up its bytes")
        self._touch()

    def _touch(self) -> None:
        """Let the connection be idle from now on."""
        if self._upstream is not None and not self._timeout.expired():
            idle_at = asyncio.get_running_loop().time() + self._settings.idle_timeout_s
            self._timeout.reschedule(min(self._deadline, idle_at))

    def _log(self, decision: str) -> None:
        host, port = (self._target.host, self._target.port) if self._target is not None else ("", 0)
        _log.info(
            "a container's connection: tenant=%r container=%r host=%s port=%d decision=%r sent=%d received=%d",
            self._access.tenant[:64],
            self._access.container[:64],
            host,
            port,
            decision,
            self._sent_bytes,
            self._received_bytes,
        )


def _read_target(request: h11.Request) -> _Target:
    """Return the destination of a CONNECT, or of a request for a URL. Raises _Refused."""
    text = request.target.decode("ascii", "replace")
    if request.method == b"CONNECT":
        host, port = _read_authority(text, None)
        target = _Target(host, port)
        _check_host_header(request, target, 443)
        return target
    scheme, separator, rest = text.partition("://")
    if not separator or scheme.lower() != "http" or not _TARGET.fullmatch(request.target):
        raise _Refused("wrong request", "The proxy takes CONNECT, and URLs that begin with http://.", status=400)
    end = min((place for mark in "/?#" if (place := rest.find(mark)) >= 0), default=len(rest))
    host, port = _read_authority(rest[:end], 80)
    path = rest[end:].partition("#")[0]
    target = _Target(host, port, (path if path.startswith("/") else f"/{path}").encode("ascii"))
    _check_host_header(request, target, 80)
    return target


def _read_authority(text: str, default_port: int | None) -> tuple[str, int]:
    match = _AUTHORITY.fullmatch(text)
    port = int(match[2]) if match is not None and match[2] else default_port
    try:
        if match is None or port is None or not 0 < port < 65536:
            raise ValueError
        return text_to_host(match[1]), port
    except ValueError:
        text = "The host is not a name or an address in its usual spelling, with a port."
        raise _Refused("wrong request", text, status=400) from None


def _check_host_header(request: h11.Request, target: _Target, default_port: int) -> None:
    """Raise _Refused for a `Host` header that names another destination."""
    values = [value.decode("ascii", "replace") for name, value in request.headers if name == b"host"]
    for value in values:
        host, port = _read_authority(value, default_port)
        if host != target.host or (port != target.port and (":" in value.rpartition("]")[2] or default_port == 80)):
            raise _Refused("wrong request", "The Host header names another host than the request.", status=400)


def _asks_for(hello: ClientHello, name: str) -> bool:
    """Return whether a hello asks for this host alone, in clear. One for an address has no name."""
    if hello.has_encrypted_name:
        return False
    return hello.server_name == name or (hello.server_name is None and is_address(name))


async def _pass_on(source: ByteStream, sink: ByteStream) -> None:
    while data := await source.read():
        await sink.write(data)
    if sink.writer.can_write_eof():
        sink.writer.write_eof()
