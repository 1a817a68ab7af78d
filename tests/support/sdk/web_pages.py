"""A stack whose model may search and read pages, the service that it searches with, and the site with the pages."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from apis.inference import Model
from providers.inference.harmony.vocabulary import END, MESSAGE, START, load_vocabulary
from providers.inference.scripted import Scripted
from tests.support.servers.fake_exa import KEY, FakeExa, page
from tests.support.servers.fetcher_hosts import SITE, Site
from tests.support.servers.serving import Served, serving

TOOL: Final[dict[str, Any]] = {"type": "web_search"}
LONG: Final = "<title>Rome</title>" + "".join(
    f"<p>Paragraph {number} tells of <a href='/link/{number}'>number {number}</a>.</p>" for number in range(200)
)
"""Every other line is a paragraph."""


class NativeScripted(Scripted):
    """A scripted model that has a browser of its own."""

    async def models(self) -> Sequence[Model]:
        return [Model(id="scripted", owned_by="stack", native_tools=frozenset({"browser"}))]


@dataclass
class Web:
    exa: FakeExa
    site: Site
    ports: Sequence[int] = ()

    @property
    def sections(self) -> Mapping[str, Any]:
        """The sections of a stack that searches and reads there."""
        search = {"provider": "exa", "api_key": KEY, "base_url": self.exa.url}
        safe = {"allowed_ports": [self.site.port, *self.ports], "allowed_private_networks": [f"{SITE}/32"]}
        return {
            "tool_runtime": {"provider": "toolbox", "providers": {"search": search, "pages": {"provider": "browser"}}},
            "fetcher": {"provider": "safe", **safe},
        }


@asynccontextmanager
async def web(*ports: int) -> AsyncGenerator[Web]:
    """A search that finds two pages of the site: a long one at /rome, and a short one at /oslo that links to it.
    Pages may be fetched from `ports` too."""
    async with FakeExa() as exa, Site() as site:
        site.page("/rome", LONG)
        site.page("/oslo", "<title>Oslo</title><p>Not <a href='/rome'>Rome</a>.</p>")
        exa.results = [page(1, url=f"{site.url}/rome"), page(2, url=f"{site.url}/oslo")]
        yield Web(exa, site, ports)


@asynccontextmanager
async def browsing(*turns: list[dict[str, Any]], native: bool = False) -> AsyncGenerator[tuple[Served, Web]]:
    """A stack whose model plays these turns."""
    async with web() as there, serving(model(*turns, native=native), more=there.sections) as served:
        yield served, there


def model(*turns: list[dict[str, Any]], native: bool = False) -> dict[str, Any]:
    """The inference section of a model that plays these turns."""
    provider = f"{__name__}:NativeScripted" if native else "scripted"
    return {"provider": provider, "model": "scripted", "turns": [*turns]}


HARMONY: Final[Mapping[str, str]] = {
    "Who": "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
    '<|channel|>analysis to=browser.search code<|message|>{"query":"rome"}<|call|>',
    "[0]": '<|channel|>commentary to=functions.browser.open code<|message|>{"id":0,"cursor":0}<|call|>',
    "[1]": '<|channel|>analysis to=browser.find code<|message|>{"pattern":"number 90"}<|call|>',
    "[2]": '<|channel|>analysis to=browser.open code<|message|>{"id":0,"num_lines":6}<|call|>',
    "[3]": "<|channel|>final<|message|>It is told【3†L180】, and found【0†L3】, but not【9†L1】.<|return|>",
    "And": '<|channel|>analysis to=browser.open code<|message|>{"cursor":1,"loc":100,"num_lines":1}<|call|>',
    "[4]": "<|channel|>final<|message|>Again【1†L100】.<|return|>",
}
"""The outputs of the token function, by the beginning of the last message that is not its own."""


def browses(tokens: list[int], temperature: float) -> int:
    """A function for the provider `next_token`: a model that browses as gpt-oss was trained to."""
    encoding = load_vocabulary().encoding
    assistant = encoding.encode("assistant")[0]
    last = max(at for at, token in enumerate(tokens[:-1]) if token == START and tokens[at + 1] != assistant)
    ends = tokens.index(END, last)
    said = encoding.decode(tokens[tokens.index(MESSAGE, last) + 1 : ends])
    return encoding.encode(HARMONY[said[:3]], allowed_special="all")[len(tokens) - (ends + 3)]
