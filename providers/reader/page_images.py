"""Pictures of the pages of a PDF, drawn by PDFium in the reader's program."""

import struct
import zlib
from typing import Any, Final

from providers.reader.errors import ExtractionError

_MAX_PIXELS: Final = 1_500_000
_MAX_HEIGHT: Final = 8000
"""Bounds of one picture in pixels, whichever shape its page has."""
_PASSWORD_ERROR: Final = 4
_PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"


def render_pages(data: bytes, first: int, count: int, width: int) -> tuple[dict[str, Any], bytes]:
    """Return the number of all pages with the sizes of the pictures, and the pictures as PNG files after one another:
    of the pages from `first` on, each at most `width` pixels wide. Raises ExtractionError."""
    # a library of 8 MB, only for pictures of pages
    import pypdfium2  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]  # typed, without the marker file

    try:
        pdf = pypdfium2.PdfDocument(data)
        page_count = len(pdf)
        pictures = [_draw(pdf[index], width) for index in range(first - 1, min(first - 1 + count, page_count))]
    except pypdfium2.PdfiumError as exc:
        error: Any = exc
        if error.err_code == _PASSWORD_ERROR:
            raise ExtractionError("invalid_file", "The PDF is encrypted: its pages cannot be shown.") from None
        raise ExtractionError("invalid_file", "The PDF is damaged: its pages cannot be shown.") from None
    sizes = [[*size, len(png)] for size, png in pictures]
    return {"page_count": page_count, "sizes": sizes}, b"".join(png for _, png in pictures)


def _draw(page: Any, max_width: int) -> tuple[tuple[int, int], bytes]:
    width, height = (max(1.0, side) for side in page.get_size())
    scale = min(max_width / width, (_MAX_PIXELS / (width * height)) ** 0.5, _MAX_HEIGHT / height)
    # each side of a picture has one pixel at least, and is rounded up
    bitmap = page.render(scale=scale, rev_byteorder=True, prefer_bgrx=False, may_draw_forms=False)
    size = (int(bitmap.width), int(bitmap.height))
    return size, _encode_png(memoryview(bitmap.buffer).cast("B"), size, bitmap.stride)


def _encode_png(pixels: memoryview, size: tuple[int, int], stride: int) -> bytes:
    """Return a picture of three bytes for each pixel as a PNG file."""
    width, height = size
    rows = b"".join(b"\0" + bytes(pixels[top : top + 3 * width]) for top in range(0, height * stride, stride))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b""))
    return _PNG_SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
