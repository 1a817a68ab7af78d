"""Small whole images, and things that are none."""

import base64
import struct
import zlib


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


PNG = (
    b"\x89PNG\r\n\x1a\n"
    + _png_chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    + _png_chunk(b"IDAT", zlib.compress(b"\0\xff"))
    + _png_chunk(b"IEND", b"")
)
GIF = b"GIF89a\x01\0\x01\0\x80\0\0\xff\xff\xff\0\0\0,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;"
JPEG = b"\xff\xd8\xff\xe0\0\x10JFIF\0\x01\x01\0\0\x01\0\x01\0\0" + b"\xff\xdb\0\x43\0" + b"\1" * 64 + b"\xff\xd9"
WEBP = b"RIFF" + struct.pack("<I", 20) + b"WEBPVP8L" + struct.pack("<I", 8) + b"/\0\0\0\0\x88\x88\x08"


def image_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


PIXEL_URL = image_url(PNG)
