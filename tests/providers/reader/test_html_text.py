"""How a page becomes lines: tables of markup with the text that it must give, and pages made to do harm."""

import codecs
import time

import pytest

from providers.reader.html_text import MAX_LINK_CHARS, MAX_LINKS, PageText, html_to_page, text_to_page

URL = "https://site.example/dir/page"


def read(html: str | bytes, charset: str | None = None, max_chars: int = 100_000) -> PageText:
    return html_to_page(html if isinstance(html, bytes) else html.encode(), URL, charset, max_chars)


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        ("<p>one <b>two</b>\n  three</p><p>four", "one two three\n\nfour"),
        ("<div>one</div><div>two</div>", "one\ntwo"),
        ("a<br>b<hr>c", "a\nb\n\nc"),
        ("<h1>A</h1><h3>B</h3>c", "# A\n\n### B\n\nc"),
        ("<ul><li>a<li>b</ul>", "* a\n* b"),
        ("<ol><li>a<ul><li>x</ul><li>b</ol>", "1. a\n\n  * x\n\n2. b"),
        ("<table><tr><th>A<th>B<tr><td>1<td>2</table>", "A | B\n1 | 2"),
        ("<pre>  a\n    b\n</pre>c", "  a\n    b\n\nc"),
        ("<img alt='a cat'><img alt=''><img>", "[Image: a cat]"),
        ("a &lt;b&gt; &amp;amp; &nbsp; &#x1f600;", "a <b> &amp; 😀"),
        (
            "<script>x</script><style>y</style><noscript>n</noscript><template>t</template><svg><text>s</text></svg>z",
            "z",
        ),
        ("<p hidden>a</p><p style='display : none'>b</p><p aria-hidden=true>c</p><body style='display:none'>d", "d"),
        ("<head><title>T</title></head><body>x", "x"),
        ("<!-- a comment -->x<![CDATA[y]]>", "x"),
        ("<select><option>a<option>b</select>", "a\nb"),
        ("</p></div></li></a></ul></pre>x", "x"),
        ("a\0b\x07c\x1b[31md", "a\ufffdb c [31md"),
        ("&#0;&#xd800;&#x110000;x", "\ufffd\ufffd\ufffdx"),
    ],
)
def test_markup_becomes_lines(html: str, text: str) -> None:
    assert read(html).text == text


def test_links_are_numbered_references_to_whole_urls() -> None:
    page = read(
        "<a href='/a'>A</a> <a href=b?x=1#part>B</a> <a href='/a'>again</a> <a href='//c.example'>C</a>"
        "<a href='/d'><h2>In blocks</h2></a><a href='/e'></a><a href='#here'>here</a><a href='javascript:x'>js</a>"
        "<a href='data:text/html,x'>data</a><a href='http://[::1'>broken</a><a href='a b'>blank</a><a>none</a>"
        "<a href='/nested'>x<a href='/inner'>y</a>"
    )
    assert page.links == [
        "https://site.example/a",
        "https://site.example/dir/b?x=1",
        "https://c.example",
        "https://site.example/d",
        "https://site.example/dir/a%20b",
        "https://site.example/nested",
        "https://site.example/inner",
    ]
    assert page.text.startswith("A[#1] B[#2] again[#1] C[#3]\n\n## In blocks\n\n[#4]here")


def test_a_base_moves_relative_links() -> None:
    assert read("<base href='https://other.example/x/'><a href=y>z</a>").links == ["https://other.example/x/y"]
    assert read("<base href='javascript:x'><a href=/y>z</a>").links == ["https://site.example/y"]


@pytest.mark.parametrize(
    ("html", "title"),
    [
        ("<title> The\n title </title><h1>Head</h1>", "The title"),
        ("<h1>The <i>head</i></h1>", "The head"),
        ("<title></title><h2>Two</h2>", "Two"),
        ("<title>a</title><svg><title>b</title></svg>", "a"),
        ("<p>none", ""),
        (f"<title>{'t' * 5000}</title>", "t" * 200),
    ],
)
def test_a_page_has_a_title(html: str, title: str) -> None:
    assert read(html).title == title


@pytest.mark.parametrize(
    ("data", "charset"),
    [
        ("<p>café".encode(), None),
        ("<p>café".encode("latin-1"), None),
        ("<p>café".encode("cp1252"), "ISO-8859-1"),
        ("<meta charset=iso-8859-15><p>café".encode("latin-1"), None),
        ("<meta http-equiv=x content='text/html; charset=\"latin1\"'><p>café".encode("latin-1"), None),
        (codecs.BOM_UTF8 + "<p>café".encode(), "latin-1"),
        (codecs.BOM_UTF16_LE + "<p>café".encode("utf-16-le"), "utf-8"),
        ("<meta charset=utf-7><p>café".encode(), "zlib"),
        ("<p>café".encode(), "idna"),
        ("<p>café".encode(), "\x00" * 50),
    ],
)
def test_the_encoding_is_the_marks_or_the_servers_or_the_pages(data: bytes, charset: str | None) -> None:
    assert read(data, charset).text == "café"


def test_a_page_is_cut_where_it_is_too_long() -> None:
    page = read("<p>word</p>" * 100_000, max_chars=1000)
    assert (len(page.text), page.is_truncated) == (1000, True)
    assert not read("<p>word</p>").is_truncated
    many = read("".join(f"<a href=/{number}>x</a> " for number in range(5000)))
    assert len(many.links) == MAX_LINKS
    long = read("".join(f"<a href=/{'x' * 1900}{number}>x</a> " for number in range(500)))
    assert sum(map(len, long.links)) <= MAX_LINK_CHARS


@pytest.mark.parametrize(
    "html",
    [
        "<div>" * 100_000 + "deep",
        "<p><div>" * 50_000,
        "<table><tr><td>" * 30_000,
        "<a href=/x>" * 30_000 + "x",
        "<ul><li>" * 50_000 + "x",
        "<b><i>" * 50_000 + "x" + "</b></i>" * 50_000,
        "<a " + " ".join(f"a{number}=1" for number in range(100_000)) + ">x",
        "<td>x" * 100_000,
        "<pre>\n" * 50_000,
        "<!--" * 300_000,
        "<" * 1_000_000,
        "&" * 1_000_000,
        "<a href='" + "x" * 2_000_000,
        "<p style='" + "display:" * 200_000 + "'>x",
        "<title>" * 100_000,
        "<svg><g>" * 50_000,
        "</div>" * 200_000,
        "<frameset>" * 50_000,
        "<select><option>" * 50_000,
        "\0" * 500_000,
        "x" * 2_000_000,
    ],
    ids=lambda html: html[:12],
)
def test_pages_made_to_do_harm_are_read_in_time_that_grows_no_faster_than_they(html: str) -> None:
    began = time.process_time()
    page = read(html)
    assert time.process_time() - began < 10  # a parser that takes the square of it needs minutes
    assert len(page.text) <= 100_000


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a\r\nb\rc  \n", "a\nb\nc"),
        (b'{"a": [1]}', '{"a": [1]}'),
        (b"# Title\n\n* <b>x</b>\n", "# Title\n\n* <b>x</b>"),
        (b"a\0b\x1b[31mc\td", "a b [31mc\td"),
        (b"caf\xe9 \xff", "café ÿ"),
        (b"", ""),
    ],
)
def test_text_stays_unchanged(data: bytes, text: str) -> None:
    assert text_to_page(data, None, 1000).text == text


def test_long_text_is_cut() -> None:
    page = text_to_page("é".encode() * 10_000, None, 1000)
    assert (page.text, page.is_truncated) == ("é" * 1000, True)
