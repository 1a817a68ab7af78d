"""The URLs that nothing that fetches may ever follow: `{port}` is where a canary listens on all of the machine."""

import socket
from typing import Final

import psutil

LOOPBACK: Final = [
    "http://127.0.0.1:{port}/",
    "http://localhost:{port}/",
    "http://localhost.:{port}/",
    "http://LOCALHOST:{port}/",
    "http://127.8.9.10:{port}/",
    "http://[::1]:{port}/",
]
SPELLINGS: Final = [
    f"http://{host}:{{port}}/"
    for host in (
        *("127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "017700000001", "0", "0.0.0.0", "127.0.0.1."),
        *("0x7F.0.0.0x1", "127.0.1", "00000000177.0.0.1", "4294967297", "127.0.0.1.0", "[::]", "[0:0:0:0:0:0:0:1]"),
        *("[::ffff:127.0.0.1]", "[::FFFF:7f00:1]", "[::127.0.0.1]", "[64:ff9b::7f00:1]", "[64:ff9b:1::7f00:1]"),
        *("[2002:7f00:1::]", "[fec0::1]", "[fe80::1%25lo]", "[fe80::1%lo]", "[::1%25lo]", "[::ffff:0:127.0.0.1]"),
        *("[127.0.0.1]", "[::1", "::1", "[]", "[::1]x"),
    )
]
PRIVATE: Final = [
    f"http://{host}:{{port}}/"
    for host in (
        *("10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.0.1", "100.64.0.1", "169.254.169.254", "192.0.0.192"),
        *("198.18.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.51.100.1", "203.0.113.1", "192.88.99.1"),
        *("[fd00:ec2::254]", "[ff02::1]", "[2001::1]", "[2001:db8::1]", "[3fff::1]", "[100::1]", "[5f00::1]"),
    )
]
USERS: Final = [
    "http://good@127.0.0.1:{port}/",
    "http://127.0.0.1:{port}\\@good/",
    "http://good\\@127.0.0.1:{port}/",
    "http://good.invalid#@127.0.0.1:{port}/",
    "http://good.invalid?@127.0.0.1:{port}/",
    "http://good:80+&@127.0.0.1:{port}/",
    "http://good:80@127.0.0.1:{port}/",
    "http://@127.0.0.1:{port}/",
    "http://a:b@c@127.0.0.1:{port}/",
]
NAMES: Final = [
    f"http://{host}:{{port}}/"
    for host in (
        *("①②⑦.⓪.⓪.①", "１２７.０.０.１", "127。0。0。1", "127．0．0．1", "127｡0｡0｡1", "%31%32%37.0.0.1"),
        *(
            "ⓛⓞⓒⓐⓛⓗⓞⓢⓣ",
            "ｌｏｃａｌｈｏｓｔ",
            "local\u00adhost",
            "local\u200bhost",
            "lоcalhost",
            "localhost\u0000",
            "ⅼocalhost",
        ),
        *("local%68ost", "localhost%00.example.com", "-localhost", "a..localhost", "[localhost]", "xn--"),
    )
]
BROKEN: Final = [
    "http://127.0.0.1:{port}/\t",
    "\thttp://127.0.0.1:{port}/",
    "ht\ntp://127.0.0.1:{port}/",
    "http://127.0.\n0.1:{port}/",
    "http://127.0.0.1:{port}/\r\nHost: good",
    "http://127.0.0.1:{port}/ HTTP/1.1\r\nX: y",
    "http://127.0.0.1:{port}/\0",
    "http://127.0.0.1 :{port}/",
    " http://127.0.0.1:{port}/",
    "http://127.0.0.1:{port}/" + "x" * 65536,
    "http://:{port}/",
    "http:///127.0.0.1:{port}/x",
    "http:////127.0.0.1:{port}/x",
    "http:127.0.0.1:{port}/",
    "http:/127.0.0.1:{port}/",
    "//127.0.0.1:{port}/x",
    "127.0.0.1:{port}",
    "http://127.0.0.1:0{port}/",
    "http://127.0.0.1:+{port}/",
    "http://127.0.0.1:{port}\ud800/",
    "http://127.0.0.1:99999999/",
    "http://",
    "",
]
SCHEMES: Final = [
    f"{scheme}://127.0.0.1:{{port}}/"
    for scheme in (
        "file",
        "ftp",
        "gopher",
        "dict",
        "ws",
        "wss",
        "unix",
        "data",
        "jar",
        "https+unix",
        "http+unix",
        "view-source:http",
    )
] + ["file:///etc/passwd", "data:text/html,x", "javascript:alert(1)", "blob:http://127.0.0.1:{port}/", "about:blank"]

FORBIDDEN: Final = [*LOOPBACK, *SPELLINGS, *PRIVATE, *USERS, *NAMES, *BROKEN, *SCHEMES]


def own_addresses() -> list[str]:
    """Return the addresses of this machine, each as the host of a URL."""
    results: list[str] = []
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET:
                results.append(each.address)
            elif each.family == socket.AF_INET6:
                results.append(f"[{each.address.partition('%')[0]}]")
    return results


def forbidden(port: int) -> list[str]:
    """All of them, with the machine's own addresses."""
    own = [f"http://{host}:{port}/" for host in own_addresses()]
    return [url.replace("{port}", str(port)) for url in FORBIDDEN] + own
