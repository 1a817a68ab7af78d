"""Pictures of the pages of PDFs: their sizes and order, and PDFs that are made to break who draws them."""

import struct
import time
import zlib
from collections.abc import Callable
from contextlib import suppress

import pytest

from apis.documents.page_images import PageImagesParams
from apis.documents.reader import Document, PageImages, UnreadableFile
from providers.fetcher.safe import GuardedFetcher
from providers.reader.child import ChildReader
from tests.support.models import documents

BOUND_S = 45
HOSTILE: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    "encrypted": (documents.encrypted_pdf("tiger"), "encrypted"),
    "noise": (b"%PDF-1.7\n" + bytes(range(256)) * 400, "damaged"),
    "no pdf": (b"Hello", "no PDF"),
}
SURVIVED: dict[str, Callable[[], bytes]] = {
    "a loop of pages": documents.pdf_with_a_loop_of_pages,
    "inflates": lambda: documents.pdf_that_inflates(1_500_000_000),
    "cut": lambda: documents.pdf("x" * 5000)[:700],
    "endless patterns": lambda: drawn(b"q " * 200_000 + b"0 0 9 9 re f " * 200_000),
}


def drawn(content: bytes, box: bytes = b"0 0 612 792") -> bytes:
    """A PDF of one page that draws this content."""
    return documents.assembled(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Count 1 /Kids [3 0 R] >>",
            b"<< /Type /Page /Parent 2 0 R /MediaBox [%b] /Contents 4 0 R >>" % box,
            b"<< /Length %d >>\nstream\n%b\nendstream" % (len(content), content),
        ]
    )


async def render(data: bytes, **params: int) -> PageImages:
    reader = ChildReader(ChildReader.Config(), None, GuardedFetcher(GuardedFetcher.Config()))
    return await reader.render_pages(Document("a.pdf", data), PageImagesParams(**params))


def pixels_of(png: bytes) -> tuple[tuple[int, int], bytes]:
    """Return the size in the head of a PNG file, and its rows without the byte before each."""
    size = struct.unpack(">II", png[16:24])
    start = png.index(b"IDAT")
    (length,) = struct.unpack(">I", png[start - 4 : start])
    rows = zlib.decompress(png[start + 4 : start + 4 + length])
    stride = 3 * size[0] + 1
    assert len(rows) == stride * size[1]
    return size, b"".join(rows[top + 1 : top + stride] for top in range(0, len(rows), stride))


async def test_pages_are_drawn_in_their_order_as_wide_as_asked() -> None:
    images = await render(documents.pdf("One.", "", "Three."), first=2, count=4, width=306)
    assert images.page_count == 3
    assert [(page.width, page.height) for page in images.pages] == [(306, 396)] * 2
    (size, empty), (_, third) = (pixels_of(page.png) for page in images.pages)
    assert size == (306, 396)
    assert set(empty) == {255}
    assert min(third) < 128  # the text is dark


async def test_colours_are_those_of_the_page() -> None:
    images = await render(drawn(b"1 0 0 rg 0 0 612 792 re f"), width=16)
    assert set(zip(*[iter(pixels_of(images.pages[0].png)[1])] * 3, strict=True)) == {(255, 0, 0)}


async def test_after_the_last_page_there_is_none() -> None:
    assert await render(documents.pdf("One."), first=9) == PageImages(1, [])


@pytest.mark.parametrize("box", [b"0 0 1e6 1e6", b"0 0 9999999 1", b"0 0 1 9999999", b"0 0 0 0", b"9 9 -9 -9"])
async def test_a_page_of_any_shape_is_a_picture_of_bounded_size(box: bytes) -> None:
    (page,) = (await render(drawn(b"", box), width=1600)).pages
    assert page.width <= 1600
    assert page.height <= 8000
    assert page.width * page.height <= 1_520_000


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_file_that_cannot_be_drawn_is_an_error_that_says_why(name: str) -> None:
    data, words = HOSTILE[name]
    with pytest.raises(UnreadableFile, match=words):
        await render(data() if callable(data) else data)


@pytest.mark.parametrize("name", SURVIVED)
async def test_a_hostile_pdf_ends_in_bounded_time_with_pictures_or_an_error(name: str) -> None:
    start = time.monotonic()
    with suppress(UnreadableFile):
        assert len((await render(SURVIVED[name](), count=4, width=1600)).pages) <= 4
    assert time.monotonic() - start < BOUND_S
