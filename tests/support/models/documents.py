"""Files as people upload them, and as nobody should: made here, byte by byte."""

import io
import zipfile
import zlib
from collections.abc import Sequence

import docx
import pypdf


def pdf(*pages: str, extra: bytes = b"") -> bytes:
    """A PDF with a line of text on each page."""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R " + extra + b" >>",
        b"<< /Type /Pages /Count %d /Kids [%b] >>"
        % (len(pages), b" ".join(b"%d 0 R" % (4 + 2 * i) for i in range(len(pages)))),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        stream = b"BT /F1 12 Tf 72 700 Td (" + text.encode("latin-1") + b") Tj ET"
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >>"
            b" /Contents %d 0 R >>" % (5 + 2 * number)
        )
        objects.append(b"<< /Length %d >>\nstream\n%b\nendstream" % (len(stream), stream))
    return assembled(objects)


def assembled(objects: Sequence[bytes]) -> bytes:
    """A PDF file of these objects, numbered from 1; the first is its catalogue."""
    out = bytearray(b"%PDF-1.4\n")
    places: list[int] = []
    for number, each in enumerate(objects, start=1):
        places.append(len(out))
        out += b"%d 0 obj\n%b\nendobj\n" % (number, each)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    out += b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)
    return bytes(out)


def encrypted_pdf(password: str) -> bytes:
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(pdf("A secret.")))
    writer.encrypt(password, algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def pdf_with_a_loop_of_pages() -> bytes:
    return assembled([b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Count 1 /Kids [2 0 R 2 0 R] >>"])


def pdf_that_inflates(size: int) -> bytes:
    stream = zlib.compress(b"(x) Tj " * (size // 7), 9)
    page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R >>"
    content = b"<< /Length %d /Filter /FlateDecode >>\nstream\n%b\nendstream" % (len(stream), stream)
    return assembled(
        [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Count 1 /Kids [3 0 R] >>", page, content]
    )


def word(*paragraphs: str, table: Sequence[Sequence[str]] = ()) -> bytes:
    document = docx.Document()
    for paragraph in paragraphs:
        document.add_paragraph(paragraph)
    if table:
        made = document.add_table(len(table), len(table[0]))
        for row, cells in zip(made.rows, table, strict=True):
            for cell, text in zip(row.cells, cells, strict=True):
                cell.text = text
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


def word_with(document_xml: bytes) -> bytes:
    """A DOCX whose document is this XML."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(word("x"))) as good,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as bad,
    ):
        for name in good.namelist():
            bad.writestr(name, document_xml if name == "word/document.xml" else good.read(name))
    return out.getvalue()


def archive(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in members.items():
            made.writestr(name, data)
    return out.getvalue()
