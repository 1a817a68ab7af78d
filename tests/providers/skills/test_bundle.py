"""Archives of skills, most of them invalid or hostile."""

import stat
import time
import zipfile

import pytest

from providers.skills.bundle import MAX_BUNDLE_BYTES, InvalidBundle, read_bundle
from tests.support.models.skill_archives import FRONT_MATTER, entry, pack

SKILL = ("greeting/SKILL.md", FRONT_MATTER)


def test_a_skill_is_read_from_its_folder_with_the_modes_of_its_files() -> None:
    script = entry("greeting/bin/greet.sh", stat.S_IFREG | 0o755)
    bundle = read_bundle(pack(SKILL, (script, "echo hi"), ("__MACOSX/greeting/._a", "x"), ("greeting/.DS_Store", "x")))
    assert (bundle.name, bundle.description) == ("greeting", "Greets people.")
    assert [(file.path, file.is_executable) for file in bundle.files] == [("SKILL.md", False), ("bin/greet.sh", True)]
    assert bundle.files[1].data == b"echo hi"


def test_a_skill_may_be_without_a_folder_and_its_description_of_several_lines() -> None:
    text = "\ufeff---\r\nname: a-b-1\r\nlicense: MIT\r\ndescription: >\r\n  One\r\n  two.\r\n---\r\n"
    bundle = read_bundle(pack(("SKILL.md", text), ("x/y", "z")))
    assert (bundle.name, bundle.description) == ("a-b-1", "One two.")
    assert [file.path for file in bundle.files] == ["SKILL.md", "x/y"]


@pytest.mark.parametrize(
    ("archive", "reason"),
    [
        (b"", "cannot be read"),
        (b"PK\x03\x04" + b"\x00" * 100, "cannot be read"),
        (pack(SKILL)[:-10], "cannot be read"),
        (pack(), "no files"),
        (pack(("greeting/", "")), "no files"),
        (pack(("greeting/readme.md", FRONT_MATTER)), "no SKILL.md"),
        (pack(SKILL, ("other/a", "")), "no SKILL.md"),
        (pack(SKILL, ("greeting/../../a", "")), "no path within"),
        (pack(SKILL, ("/etc/passwd", "")), "no path within"),
        (pack(SKILL, ("greeting//a", "")), "no path within"),
        (pack(SKILL, ("greeting/./a", "")), "no path within"),
        (pack(SKILL, ("greeting\\..\\a", "")), "no path within"),
        (pack(SKILL, ("greeting/a\nb", "")), "no path within"),
        (pack(SKILL, ("greeting/" + "a" * 300, "")), "no path within"),
        (pack(SKILL, ("greeting/" + "a/" * 20 + "b", "")), "folders deep"),
        (pack(SKILL, (entry("greeting/link", stat.S_IFLNK | 0o777), "/etc/passwd")), "no regular file"),
        (pack(SKILL, (entry("greeting/pipe", stat.S_IFIFO | 0o666), "")), "no regular file"),
        (pack(SKILL, (entry("greeting/device", stat.S_IFCHR | 0o666), "")), "no regular file"),
        (pack(SKILL, ("greeting/a", "1"), ("greeting/a/b", "2")), "a file and a folder"),
        (pack(SKILL, *((f"greeting/{number}", "") for number in range(200))), "more than 200 files"),
        (pack(SKILL, *((f"greeting/{number}/", "") for number in range(1001))), "entries"),
        (pack(SKILL, ("greeting/bomb", b"\x00" * (MAX_BUNDLE_BYTES + 1))), "larger than 8 MiB"),
        (pack(SKILL, ("greeting/a", "x"), method=zipfile.ZIP_LZMA), "another method"),
        (b"\x00" * (MAX_BUNDLE_BYTES + 1), "larger than 8 MiB"),
    ],
    ids=range(24),
)
def test_an_archive_that_is_no_skill_is_refused_with_the_reason(archive: bytes, reason: str) -> None:
    with pytest.raises(InvalidBundle, match=reason):
        read_bundle(archive)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_with_one_name_twice_is_refused() -> None:
    with pytest.raises(InvalidBundle, match="twice"):
        read_bundle(pack(SKILL, ("greeting/a", "1"), ("greeting/a", "2")))


def test_a_size_that_an_entry_only_pretends_is_not_believed() -> None:
    archive = pack(SKILL, ("greeting/bomb", b"\x00" * (MAX_BUNDLE_BYTES + 1)))
    size = (MAX_BUNDLE_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(InvalidBundle, match=r"cannot be read|larger than"):
        read_bundle(archive.replace(size, (10).to_bytes(4, "little")))


def test_an_encrypted_entry_is_refused() -> None:
    archive = bytearray(pack(SKILL, method=zipfile.ZIP_STORED))
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        archive[archive.index(signature) + offset] |= 1
    with pytest.raises(InvalidBundle, match="encrypted"):
        read_bundle(bytes(archive))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# Greeting",
        "---\nname: greeting\n",
        "---\n- name\n---\n",
        "---\nname: greeting\n---\n",
        "---\ndescription: Greets.\n---\n",
        "---\nname: ''\ndescription: Greets.\n---\n",
        "---\nname: 5\ndescription: Greets.\n---\n",
        "---\nname: Greeting\ndescription: Greets.\n---\n",
        "---\nname: ../greeting\ndescription: Greets.\n---\n",
        f"---\nname: {'a' * 65}\ndescription: Greets.\n---\n",
        f"---\nname: greeting\ndescription: {'a' * 1025}\n---\n",
        f"---\nname: greeting\ndescription: Greets.\nmore: {'a' * 20_000}\n---\n",
        "---\nname: greeting\ndescription: [Greets]\n---\n",
        "---\nname: greeting\ndescription: &a Greets.\nmore: *a\n---\n",
        "---\nname: !!python/object/apply:os.system [ls]\ndescription: Greets.\n---\n",
        "---\nname: greeting\ndescription: " + "[" * 5000 + "\n---\n",
        '---\nname: greeting\ndescription: "a\\0b"\n---\n',
    ],
    ids=range(18),
)
def test_front_matter_must_have_a_name_and_a_description(text: str) -> None:
    with pytest.raises(InvalidBundle, match=r"SKILL\.md"):
        read_bundle(pack(("greeting/SKILL.md", text)))


def test_a_text_of_front_matter_may_be_written_in_every_way_of_yaml() -> None:
    """And no other field is parsed."""
    ways = ("Greets people.", '"Greets people."', "'Greets people.'", "|\n  Greets\n  people.", "Greets\n  people.")
    for way in ways:
        text = f"---\nmetadata:\n  name: [x\nname: greeting\ndescription: {way}\ntags: [a, *b\n---\n"
        bundle = read_bundle(pack(("greeting/SKILL.md", text)))
        assert (bundle.name, bundle.description) == ("greeting", "Greets people.")


@pytest.mark.parametrize("filler", ["[a" + ",a" * 8000, "a:\n" * 5000, "[" * 15_000, "{a: " * 4000, "- - - -" * 2000])
@pytest.mark.parametrize("field", ["more: ", "description: ", "name: ", ""])
def test_front_matter_costs_no_time(field: str, filler: str) -> None:
    """Whichever field has what the parser of YAML takes long for."""
    text = f"---\nname: greeting\n{field}{filler[:16_000]}\n---\n"
    archive = pack(("greeting/SKILL.md", text))
    began = time.process_time()
    with pytest.raises(InvalidBundle):
        read_bundle(archive)
    assert time.process_time() - began < 0.1


def test_an_archive_of_too_many_entries_is_refused_before_they_are_read() -> None:
    """Also where its end says that there are few."""
    archive = pack(SKILL, *((f"greeting/{number}/", "") for number in range(20_000)))
    end = archive.rindex(b"PK\x05\x06")
    for pretended in (archive, archive[: end + 8] + b"\x01\x00\x01\x00" + archive[end + 12 :]):
        began = time.process_time()
        with pytest.raises(InvalidBundle, match="entries"):
            read_bundle(pretended)
        assert time.process_time() - began < 0.05
