"""Files as people upload them, and damaged or hostile ones: made here, byte by byte."""

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


def compressed_repetition(block: bytes, count: int) -> bytes:
    """Return `block * count` as zlib compresses it, of which only one block is compressed."""
    compressor = zlib.compressobj(9)
    head = compressor.compress(b"") + compressor.flush(zlib.Z_FULL_FLUSH)
    body = compressor.compress(block) + compressor.flush(zlib.Z_FULL_FLUSH)
    end = compressor.flush()[:-4]
    prime, checksum = 65521, zlib.adler32(block, 0)
    low, high = 1, 0
    for _ in range(count):
        high = (high + len(block) * low + (checksum >> 16)) % prime
        low = (low + (checksum & 0xFFFF)) % prime
    return head + body * count + end + ((high << 16) | low).to_bytes(4)


def pdf_that_inflates(size: int) -> bytes:
    stream = compressed_repetition(b"(x) Tj " * 2**17, size // (7 * 2**17))
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
        grid = document.add_table(len(table), len(table[0]))
        for row, cells in zip(grid.rows, table, strict=True):
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
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as package:
        for name, data in members.items():
            package.writestr(name, data)
    return out.getvalue()


_S = b'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
_R = b'xmlns:r="http://schemas.openxmlformats.org/officeDocument/2006/relationships"'
_A = b'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"'
_P = b'xmlns:p="http://schemas.openxmlformats.org/presentationml/2006/main"'


def relationships(**targets: str) -> bytes:
    rows = "".join(f'<Relationship Id="{name}" Type="t" Target="{target}"/>' for name, target in targets.items())
    return f'<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">{rows}</Relationships>'.encode()


def workbook(*sheets: bytes, **parts: bytes) -> bytes:
    """An XLSX whose sheets have these rows, with shared texts `one` and `two words`."""
    listed = b"".join(b'<sheet name="S%d" sheetId="%d" r:id="r%d"/>' % (n, n, n) for n in range(1, len(sheets) + 1))
    named = {
        "xl/workbook.xml": b"<workbook %b %b><sheets>%b</sheets></workbook>" % (_S, _R, listed),
        "xl/_rels/workbook.xml.rels": relationships(
            **{f"r{n}": f"worksheets/s{n}.xml" for n in range(1, len(sheets) + 1)}
        ),
        "xl/sharedStrings.xml": b"<sst %b><si><t>one</t></si><si><r><t>two </t></r><r><t>words</t></r>"
        b"<rPh><t>no</t></rPh></si></sst>" % _S,
        "xl/styles.xml": b'<styleSheet %b><numFmts><numFmt numFmtId="164" formatCode="yyyy\\-mm\\-dd"/></numFmts>'
        b'<cellXfs><xf numFmtId="0"/><xf numFmtId="14"/><xf numFmtId="164"/><xf numFmtId="4"/></cellXfs></styleSheet>'
        % _S,
        **{
            f"xl/worksheets/s{n}.xml": b"<worksheet %b><sheetData>%b</sheetData></worksheet>" % (_S, rows)
            for n, rows in enumerate(sheets, start=1)
        },
        **parts,
    }
    return archive(**named)


def presentation(*slides: bytes, notes: bytes = b"", **parts: bytes) -> bytes:
    """A PPTX whose slides have these shapes; `notes` are those of the first one."""
    listed = b"".join(b'<p:sldId id="%d" r:id="r%d"/>' % (255 + n, n) for n in range(1, len(slides) + 1))
    named = {
        "ppt/presentation.xml": b"<p:presentation %b %b><p:sldIdLst>%b</p:sldIdLst></p:presentation>"
        % (_P, _R, listed),
        "ppt/_rels/presentation.xml.rels": relationships(
            **{f"r{n}": f"/ppt/slides/slide{n}.xml" for n in range(1, len(slides) + 1)}
        ),
        "ppt/slides/_rels/slide1.xml.rels": relationships(r1="../notesSlides/notesSlide1.xml"),
        "ppt/notesSlides/notesSlide1.xml": b"<p:notes %b %b>%b</p:notes>" % (_P, _A, notes),
        **{
            f"ppt/slides/slide{n}.xml": b"<p:sld %b %b>%b</p:sld>" % (_P, _A, shapes)
            for n, shapes in enumerate(slides, start=1)
        },
        **parts,
    }
    return archive(**named)


def paragraph(*runs: str) -> bytes:
    return b"<a:p>%b</a:p>" % b"".join(b"<a:r><a:t>%b</a:t></a:r>" % run.encode() for run in runs)
