"""Parts of the proxy of containers: rules for hosts, the first message of TLS, secrets, and policies of requests."""

import asyncio
import base64
import html
import json
import ssl
import time
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from apis.errors import InvalidRequest, Unsupported
from apis.wire.tools import NetworkAllowlist
from providers.tool_runtime.python.egress.client_hello import MAX_HELLO_BYTES, ClientHello, HelloReader
from providers.tool_runtime.python.egress.redaction import RedactedStream, Redaction
from providers.tool_runtime.python.egress.rules import HostRule, HostRules
from providers.tool_runtime.python.egress.secrets import ContainerSecrets
from providers.tool_runtime.python.egress.settings import SecretValue
from providers.tool_runtime.python.network_policies import check_network_policy, list_secrets

SECRET = 'sk-"/ +&0123456789'
HOST = "api.example.com"

# --- hosts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "hosts", "others"),
    [
        ("example.com", ["example.com"], ["a.example.com", "example.com.evil.net", "badexample.com", "com"]),
        ("*.example.com", ["a.example.com", "a.b.example.com"], ["example.com", "badexample.com", "a.example.com.net"]),
        ("EXAMPLE.com", ["example.com"], ["a.example.com"]),
        ("127.0.0.2", ["127.0.0.2"], ["127.0.0.3", "1.127.0.0.2"]),
        ("[::1]", ["::1"], ["::2"]),
    ],
)
def test_a_rule_is_about_the_hosts_that_it_says(rule: str, hosts: list[str], others: list[str]) -> None:
    parsed = HostRule.parse_with_port(rule)
    assert [host for host in (*hosts, *others) if parsed.permits(host)] == hosts
    assert parsed.ports == (80, 443)


@pytest.mark.parametrize(
    "text",
    [
        *("", "*", "*.", "a b", "https://a.example", "a.example/x", "a.*.example", "*.127.0.0.1", "127.1", "0x7f.1"),
        *("a.example:0", "a.example:65536", "a.example:x", "user@a.example", "*a.example", "[::1"),
    ],
)
def test_what_is_no_host_is_no_rule(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - its text is not shown
        HostRule.parse_with_port(text)


def test_a_rule_of_a_request_is_within_those_of_the_run_config() -> None:
    rules = HostRules(map(HostRule.parse_with_port, ["a.example", "*.b.example", "c.example:8443", "c.example:9443"]))
    covered = ["a.example", "x.b.example", "*.b.example", "*.x.b.example", "c.example"]
    others = ["b.example", "*.a.example", "*.example", "x.a.example"]
    assert [each for each in (*covered, *others) if rules.cover(HostRule.parse(each))] == covered
    assert rules.open_ports("a.example") == {80, 443}
    assert rules.open_ports("c.example") == {8443, 9443}
    assert rules.open_ports("b.example") == frozenset()


# --- the first message of TLS ----------------------------------------------------------------------------------------


def parse_client_hello(data: bytes) -> ClientHello | None:
    return HelloReader().feed(data)


def hello_of(name: str | None) -> bytes:
    """The first bytes of OpenSSL's own client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = name is not None
    sent = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


def records(message: bytes, size: int) -> bytes:
    """A message of the handshake in records of this size."""
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + len(piece).to_bytes(2, "big") + piece for piece in pieces)


def with_extensions(*extensions: tuple[int, bytes]) -> bytes:
    """A hello with these extensions."""
    block = b"".join(number.to_bytes(2, "big") + len(data).to_bytes(2, "big") + data for number, data in extensions)
    body = b"\x03\x03" + bytes(32) + b"\0" + b"\0\2\x13\1" + b"\1\0" + len(block).to_bytes(2, "big") + block
    return records(b"\1" + len(body).to_bytes(3, "big") + body, 16384)


def server_name(*names: bytes) -> tuple[int, bytes]:
    entries = b"".join(b"\0" + len(name).to_bytes(2, "big") + name for name in names)
    return 0, len(entries).to_bytes(2, "big") + entries


@pytest.mark.parametrize(("name", "expected"), [("Api.Example.com", "api.example.com"), (None, None)])
def test_the_name_of_a_hello_is_read_however_it_is_cut(name: str | None, expected: str | None) -> None:
    whole = hello_of(name)
    assert parse_client_hello(whole) == ClientHello(expected, has_encrypted_name=False)
    assert parse_client_hello(whole + b"more") == ClientHello(expected, has_encrypted_name=False)
    assert all(parse_client_hello(whole[:size]) is None for size in range(len(whole)))
    assert parse_client_hello(records(whole[5:], 7)) == ClientHello(expected, has_encrypted_name=False)
    reader = HelloReader()
    hellos = [reader.feed(bytes((byte,))) for byte in records(whole[5:], 1)]
    assert hellos[-1] == ClientHello(expected, has_encrypted_name=False)
    assert set(hellos[:-1]) == {None}
    assert reader.data == records(whole[5:], 1)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"\x16\x02\x01\0\1\1",
        b"\x16\x03\x01\0\0",
        b"\x16\x03\x01\0\1\2",
        b"\x16\x03\x01" + (MAX_HELLO_BYTES + 1).to_bytes(2, "big"),
        records(b"\1\xff\xff\xff" + bytes(MAX_HELLO_BYTES), 16000),
        with_extensions(server_name(b"a.example"), server_name(b"b.example")),
        with_extensions(server_name(b"a.example", b"b.example")),
        with_extensions((0, b"\0\4\1\0\1a")),
        with_extensions((0, b"\0\1")),
        with_extensions(server_name(b"\xff")),
        records(b"\1\0\0\x2d\3\3" + bytes(32) + b"\0\0\2\x13\1\1\0\0\0more", 100),
    ],
)
def test_what_is_no_hello_of_one_name_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - its text is not shown
        parse_client_hello(data)


def test_a_name_that_is_encrypted_is_seen() -> None:
    hello = parse_client_hello(with_extensions(server_name(b"a.example"), (0xFE0D, b"\0" * 8)))
    assert hello == ClientHello("a.example", has_encrypted_name=True)


@given(st.binary(max_size=200))
def test_no_bytes_are_misread(data: bytes) -> None:
    for start in (b"", b"\x16\x03\x01", with_extensions(server_name(b"a.example"))[:60]):
        try:
            hello = parse_client_hello(start + data)
        except ValueError:
            continue
        assert hello is None or isinstance(hello, ClientHello)


# --- secrets ---------------------------------------------------------------------------------------------------------


def secrets_of(*values: tuple[str, str], host: str = HOST) -> tuple[Redaction, dict[str, str]]:
    secrets = ContainerSecrets(SecretValue(host, name, value) for name, value in values)
    of_host = secrets.of_host(host)
    assert of_host is not None
    return of_host.redaction, secrets.variables()


def test_placeholders_become_values_in_headers_of_their_host_alone() -> None:
    secrets = ContainerSecrets([SecretValue(HOST, "A", SECRET), SecretValue("b.example", "B", "another-secret")])
    a, b = (secrets.variables()[name] for name in "AB")
    assert SECRET not in a
    assert secrets.of_host("c.example") is None
    of_host = secrets.of_host(HOST)
    assert of_host is not None
    basic = base64.b64encode(f"user:{a}".encode()).decode()
    headers = {"authorization": f"Bearer {a}", "x-other": b, "proxy": f"Basic {basic}", "x": "Basic %%%", "y": "basic"}
    sent = dict(of_host.put_in([(name.encode(), value.encode()) for name, value in headers.items()]))
    assert sent == {
        b"authorization": f"Bearer {SECRET}".encode(),
        b"x-other": b.encode(),
        b"proxy": b"Basic " + base64.b64encode(f"user:{SECRET}".encode()),
        b"x": b"Basic %%%",
        b"y": b"basic",
    }


async def test_new_values_keep_their_placeholders() -> None:
    secrets = ContainerSecrets([SecretValue(HOST, "A", "first-value")])
    before = secrets.variables()
    await secrets.update([SecretValue(HOST, "A", "second-value")])
    assert secrets.variables() == before
    of_host = secrets.of_host(HOST)
    assert of_host is not None
    assert of_host.put_in([(b"x", before["A"].encode())]) == [(b"x", b"second-value")]
    # the host may have kept the former value
    assert of_host.redaction.redact(b"second-value first-value") == b" ".join([before["A"].encode()] * 2)


async def test_former_values_have_a_bound() -> None:
    secrets = ContainerSecrets([SecretValue(HOST, "A", "value-number-0")])
    for number in range(1, 40):
        await secrets.update([SecretValue(HOST, "A", f"value-number-{number}".ljust(4000, "."))])
    of_host = secrets.of_host(HOST)
    assert of_host is not None
    redact = of_host.redaction.redact
    assert all(redact(former) != former for former in (f"value-number-{n}".ljust(4000, ".").encode() for n in (39, 30)))
    assert redact(b"value-number-0") == b"value-number-0"


async def test_many_short_former_values_have_a_bound_too() -> None:
    """A tenant that changes its secrets with every request would otherwise make each answer a search of seconds."""
    secrets = ContainerSecrets([])
    for number in range(20):
        await secrets.update([SecretValue(HOST, f"N{index}", f"&<{number:03d}-{index:03d}>") for index in range(100)])
    of_host = secrets.of_host(HOST)
    assert of_host is not None
    found_values = [
        value
        for value in (f"&<{number:03d}-{index:03d}>" for number in range(20) for index in range(100))
        if of_host.redaction.redact(value.encode()) != value.encode()
    ]
    assert found_values == [f"&<{number:03d}-{index:03d}>" for number in (18, 19) for index in range(100)]


async def test_the_event_loop_goes_on_while_many_values_are_taken() -> None:
    """They have thousands of spellings. Of two updates, the later one counts."""
    secrets = ContainerSecrets([])
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count_turns())
    sets = [
        [SecretValue(HOST, f"N{at}", f'&<"{number}{at:03d}'.ljust(600, "<")) for at in range(100)] for number in "12"
    ]
    await asyncio.gather(*map(secrets.update, sets))
    counting.cancel()
    assert turns > 10
    of_host = secrets.of_host(HOST)
    assert of_host is not None
    placeholder = secrets.variables()["N7"].encode()
    assert of_host.put_in([(b"x", placeholder)]) == [(b"x", sets[1][7].value.encode())]


def test_an_answer_is_searched_for_the_secrets_of_other_hosts_too() -> None:
    secrets = ContainerSecrets([SecretValue(HOST, "A", SECRET), SecretValue("b.example", "B", "another-secret")])
    of_host = secrets.of_host(HOST)
    assert of_host is not None
    assert of_host.redaction.redact(b"another-secret") == secrets.variables()["B"].encode()
    assert of_host.put_in([(b"x", secrets.variables()["B"].encode())]) == [(b"x", secrets.variables()["B"].encode())]


def test_headers_with_values_have_a_bound() -> None:
    secrets = ContainerSecrets([SecretValue(HOST, "A", "x" * 60_000)])
    of_host = secrets.of_host(HOST)
    assert of_host is not None
    placeholder = secrets.variables()["A"].encode()
    assert len(of_host.put_in([(b"x", placeholder), (b"y", placeholder)])[1][1]) == 60_000
    basic = b"Basic " + base64.b64encode(placeholder * 3)
    for headers in ([(b"x", placeholder * 3)], [(b"x", placeholder)] * 3, [(b"x", basic)]):
        with pytest.raises(OverflowError):
            of_host.put_in(headers)


@pytest.mark.parametrize(
    "spelling",
    [
        SECRET,
        json.dumps(SECRET),
        json.dumps(SECRET).replace("/", "\\/"),
        quote(SECRET),
        quote(SECRET, safe=""),
        quote(SECRET, safe="").replace("%2F", "%2f").replace("%2B", "%2b"),
        html.escape(SECRET),
        html.escape(SECRET).replace("&quot;", "&#34;").replace("+", "&#43;"),
        json.dumps(SECRET).replace("&", "\\u0026"),
        json.dumps(SECRET).replace('\\"', "\\u0022").replace("&", "\\u0026").replace("+", "\\u002B"),
        SECRET.upper().lower(),
        *(
            base64.b64encode((before + SECRET + after).encode()).decode()
            for before in ("", "a", "ab")
            for after in ("", "xyz")
        ),
        *(base64.urlsafe_b64encode((before + SECRET).encode()).decode() for before in ("", "a", "ab")),
    ],
)
def test_a_value_that_comes_back_is_a_placeholder(spelling: str) -> None:
    secrets, variables = secrets_of(("A", SECRET))
    whole = f"<{spelling}>".encode()
    redacted = secrets.redact(whole)
    assert variables["A"].encode() in redacted
    assert len(redacted.replace(variables["A"].encode(), b"")) < 12  # what Base64 mixes with the neighbours
    for cut in range(len(whole) + 1):
        stream = RedactedStream(secrets)
        pieces = [stream.feed(whole[:cut]), stream.feed(whole[cut:]), stream.finish()]
        assert b"".join(pieces) == redacted


@pytest.mark.parametrize(
    "spelling",
    [
        "it's(a)%2Fse!cr*t~%20%40x",  # JavaScript's encodeURIComponent
        "it's(a)/se!cr*t~%20@x",  # encodeURI
        "it%27s%28a%29%2Fse%21cr%2At~%20@x",  # Go's PathEscape
        "it%27s%28a%29%2Fse%21cr%2At~+%40x",  # Go's QueryEscape
        "it%27s%28a%29%2Fse%21cr*t%7E+%40x",  # a form, and Java's URLEncoder
        "it%27s%28a%29%2fse%21cr*t%7e+%40x",
    ],
)
def test_a_value_is_found_in_the_urls_of_each_language(spelling: str) -> None:
    secrets, variables = secrets_of(("A", "it's(a)/se!cr*t~ @x"))
    assert secrets.redact(f"?q={spelling}&".encode()) == f"?q={variables['A']}&".encode()


@given(st.lists(st.sampled_from([b"aaaaaaaa", b"aaa", b"ab", b"b", b"aaaaaaab", b"aaaaaaabab", b"c"]), max_size=20))
def test_a_stream_is_redacted_as_its_whole_is(pieces: list[bytes]) -> None:
    """However it is cut, also where a value begins within another one, or is the beginning of one."""
    secrets, placeholders = secrets_of(("A", "aaaaaaab"), ("B", "aaaaaaabab"), ("C", "abcabcab"))
    stream = RedactedStream(secrets)
    passed = b"".join([*map(stream.feed, pieces), stream.finish()])
    assert passed == secrets.redact(b"".join(pieces))
    for each in placeholders.values():  # one may end with an `a`
        passed = passed.replace(each.encode(), b"|")
    assert b"aaaaaaab" not in passed


def test_what_waits_says_nothing_about_a_value() -> None:
    """A program that sees which bytes wait would otherwise guess a value letter by letter."""
    secrets, _ = secrets_of(("A", "the-secret-value"))
    for guess in (b"the-sec", b"the-sex", b"another"):
        stream = RedactedStream(secrets)
        assert stream.feed(b"data: 1\n\n") == b"data: 1\n\n"
        assert stream.feed(b"and " + guess) == b"and "
        assert stream.feed(b" more") == guess + b" "
        assert len(stream.feed(b"x" * 100)) > 50


def test_an_answer_full_of_values_is_searched_once() -> None:
    secrets, _ = secrets_of(*((f"N{number}", f"abcdef{number:02d}") for number in range(100)))
    data = b"".join(b"abcdef%02d" % (number % 100) for number in range(4000))
    began_at = time.process_time()
    assert b"abcdef" not in secrets.redact(data)
    assert time.process_time() - began_at < 2  # 0.02 here; each value by each of the others took minutes


# --- policies of requests --------------------------------------------------------------------------------------------

REACHABLE = HostRules(map(HostRule.parse_with_port, ["api.example.com", "*.b.example"]))


def policy_of(*domains: str, **secret: str) -> NetworkAllowlist:
    fields: dict[str, Any] = {"type": "allowlist", "allowed_domains": [*domains]}
    if secret:
        fields["domain_secrets"] = [{"domain": HOST, "name": "KEY", "value": "0123456789", **secret}]
    return TypeAdapter(NetworkAllowlist).validate_python(fields)


@pytest.mark.parametrize(
    ("policy", "param"),
    [
        (policy_of("evil.example"), "allowed_domains[0]"),
        (policy_of(HOST, "b.example"), "allowed_domains[1]"),
        (policy_of(HOST, "*.example.com"), "allowed_domains[1]"),
        (policy_of("https://api.example.com"), "allowed_domains[0]"),
        (policy_of("api.example.com:443"), "allowed_domains[0]"),
        (policy_of(HOST, domain="x.b.example"), "domain_secrets[0].domain"),
        (policy_of(HOST, "*.b.example", domain="*.b.example"), "domain_secrets[0].domain"),
        (policy_of(HOST, name="PATH"), "domain_secrets[0].name"),
        (policy_of(HOST, name="https_Proxy"), "domain_secrets[0].name"),
        (policy_of(HOST, name="A-B"), "domain_secrets[0].name"),
        (policy_of(HOST, value="short"), "domain_secrets[0].value"),
        (policy_of(HOST, value="line\r\nbreak: x"), "domain_secrets[0].value"),
        (policy_of(HOST, value=" blank at its end "), "domain_secrets[0].value"),
        (policy_of(HOST, value="x" * 65537), "domain_secrets"),
    ],
)
def test_a_policy_that_no_container_may_have_names_its_field(policy: NetworkAllowlist, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_network_policy(policy, REACHABLE)
    assert caught.value.param == f"network_policy.{param}"
    assert all(secret.value not in str(caught.value) for secret in policy.domain_secrets or ())


def test_a_policy_within_the_run_config_is_taken() -> None:
    policy = policy_of("API.example.com", "x.b.example", "*.b.example", domain="API.example.com")
    check_network_policy(policy, REACHABLE)
    assert list_secrets(policy) == [SecretValue(HOST, "KEY", "0123456789")]
    with pytest.raises(Unsupported, match=r"egress\.allowed_hosts"):
        check_network_policy(policy, None)
    twice = policy.model_copy(update={"domain_secrets": (policy.domain_secrets or []) * 2})
    with pytest.raises(InvalidRequest, match="another secret"):
        check_network_policy(twice, REACHABLE)
