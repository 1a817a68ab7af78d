"""Texts in the encodings of the world: read rightly, or refused."""

import os
import struct
import zlib
from pathlib import Path
from typing import Final

import pytest

from apis.documents.reader import UnreadableFile
from providers.reader.encodings import decode_page, decode_text
from tests.providers.reader.test_child import MAX_CHARS, file_to_text

RECORDED: Final = Path(__file__).parents[2] / "support/data/field/texts"
CITIES: Final = "姓名,城市\n王芳,上海\n李伟,北京\n"
TEXTS: Final = [
    ("gbk", CITIES),
    ("gb18030", "产品说明书：请在使用前仔细阅读本手册，并妥善保管以备查阅。"),
    ("big5", "姓名,城市\n王小明,臺北\n陳美玲,高雄\n"),
    ("shift_jis", "名前,都市\n田中,東京\n鈴木,大阪\n"),
    ("euc_jp", "これはテスト用の日本語のテキストです。今日は天気がいいので散歩に行きましょう。"),
    ("iso2022_jp", "これはテスト用の日本語のテキストです。"),
    ("euc_kr", "이름,도시\n김민수,서울\n이영희,부산\n"),
    ("cp1251", "Имя,Город\nАнна,Москва\nИван,Казань\n"),
    ("koi8_r", "Это тестовый файл на русском языке. Сегодня хорошая погода, и мы идём гулять."),
    ("cp866", "Это тестовый файл на русском языке. Сегодня хорошая погода, и мы идём гулять."),
    ("latin_1", "Zürich ist schön und größer als Köln."),
    ("latin_1", "Crème brûlée à la carte"),
    ("latin_1", "naïve"),
    ("cp1252", "“Smart quotes” – 5 € for it’s naïve café"),
    ("cp1252", "a = 1  # 10 °C\n"),
    ("cp1250", "Zażółć gęślą jaźń. W Szczebrzeszynie chrząszcz brzmi w trzcinie."),
    ("cp1253", "Αυτό είναι ένα αρχείο δοκιμής στα ελληνικά. Σήμερα ο καιρός είναι καλός."),
    ("cp1254", "Bu bir Türkçe deneme dosyasıdır. Bugün hava çok güzel, yürüyüşe çıkalım."),
    ("cp1255", "זהו קובץ בדיקה בעברית. היום מזג האוויר נעים."),
    ("cp1256", "هذا ملف اختبار باللغة العربية. الطقس جميل اليوم."),
    ("cp874", "นี่คือไฟล์ทดสอบภาษาไทย วันนี้อากาศดีมาก"),
    *(
        (wide, text)
        for wide in ("utf_16_le", "utf_16_be", "utf_32_le", "utf_32_be")
        for text in ("Hello there.", CITIES)
    ),
    *((marked, CITIES) for marked in ("utf_8_sig", "utf_16", "utf_32")),
]


@pytest.mark.parametrize(("encoding", "text"), TEXTS)
def test_a_text_is_read_in_its_own_encoding(encoding: str, text: str) -> None:
    """A file and a page alike, also where the text comes late."""
    data = text.encode(encoding)
    assert decode_text(data) == text
    assert decode_page(data, None) == text
    if not encoding.startswith("utf"):
        assert decode_text(b"key,value\n" * 20_000 + data) == "key,value\n" * 20_000 + text


@pytest.mark.parametrize("text", ["Zürich ist schön und größer als Köln.", "上海", "Привет"])
@pytest.mark.parametrize("bad", [b"\xff", b"\xe9", b"\x80", b"\xe4\xb8"])
def test_single_bad_bytes_of_utf8_are_replaced(text: str, bad: bytes) -> None:
    """The rest of the text stays what it is."""
    data = text.encode() + b" and " + bad + b" then"
    assert decode_text(data) == f"{text} and \ufffd then"
    assert decode_page(data, None) == f"{text} and \ufffd then"


def test_a_text_that_names_its_encoding_is_read_in_it() -> None:
    """Also where so few bytes show nothing."""
    for head in ('<meta charset="gbk">', '<?xml version="1.0" encoding="GBK"?>'):
        assert decode_text(f"{head}<p>价</p>".encode("gbk")) == f"{head}<p>价</p>"
    assert decode_text('<meta charset="gbk"><p>价格</p>'.encode()) == '<meta charset="gbk"><p>价格</p>'


@pytest.mark.parametrize(
    "data",
    [
        os.urandom(4000),
        zlib.compress(os.urandom(3000)),
        struct.pack("<1000f", *(number * 1.1 for number in range(1000))),
        b"\x7fELF\x02\x01\x01" + bytes(9) + bytes(range(256)) * 4,
        b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4,
        b"ustar\0" + b"text " * 100 + bytes(500),
        bytes(1000),
    ],
    ids=["random", "deflated", "numbers", "program", "image", "archive", "zeros"],
)
def test_bytes_that_are_no_text_are_none(data: bytes) -> None:
    """Garbage does not count as read."""
    assert decode_text(data) is None


async def test_recorded_files_are_read() -> None:
    """A table from a Chinese Windows, and a note with one byte of another encoding."""
    cities = await file_to_text("cities.csv", (RECORDED / "cities.gbk.csv").read_bytes(), MAX_CHARS)
    assert "王芳" in cities
    assert "上海" in cities
    note = await file_to_text("note.md", (RECORDED / "one_bad_byte.txt").read_bytes(), MAX_CHARS)
    assert "Zürich ist schön und größer als Köln." in note
    with pytest.raises(UnreadableFile, match="save it as UTF-8"):
        await file_to_text("a.txt", os.urandom(4000), MAX_CHARS)
