"""The catalogue, references to models, headers of GGUF files, and which models fit a machine."""

import re
import struct
from pathlib import Path

import pytest

from apis.errors import ConfigError
from providers.inference.model_files.catalogue import CATALOGUE, DEFAULT_MODEL
from providers.inference.model_files.choice import ModelNeeds, choose_models
from providers.inference.model_files.fit import (
    ContextMemory,
    catalogue_needed_bytes,
    largest_fitting_model,
    suggestion_lines,
)
from providers.inference.model_files.gguf_header import GgufHeader, read_header
from providers.inference.model_files.machine import Accelerator, LocalMachine, inspect_machine
from providers.inference.model_files.packages import PACKAGED_MODELS, models_dir
from providers.inference.model_files.references import parse_reference, part_paths
from providers.inference.model_files.resolve import describe_file

GB = 10**9
LAPTOP = LocalMachine(8, 15 * GB, 16 * GB)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def number(name: str, value: int) -> bytes:
    return text(name) + struct.pack("<II", 4, value)


def header(*fields: bytes, count: int | None = None) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields) if count is None else count) + b"".join(fields)


def architecture(name: str) -> bytes:
    return text("general.architecture") + struct.pack("<I", 8) + text(name)


ARCHITECTURE = architecture("llama")


def test_the_catalogue_is_complete_and_names_no_file_twice() -> None:
    models = CATALOGUE
    assert DEFAULT_MODEL in models
    assert {"gpt-oss-20b", "gpt-oss-120b"} <= models.keys()
    assert {model.kind for model in models.values()} == {"chat", "embedding"}
    assert any(model.projector for model in models.values())
    files = [(file.repository, file.file) for model in models.values() for file in model.all_files]
    assert len(files) == len(set(files))
    for name, model in models.items():
        assert re.fullmatch(r"[a-z0-9.-]+", name)
        assert model.licence
        assert model.context_tokens >= 2048
        for file in model.all_files:
            assert file.size_bytes > 10**7
            assert re.fullmatch(r"[0-9a-f]{64}|", file.sha256)
            assert file.file.endswith(".gguf")
            assert bool(model.package) != bool(re.fullmatch(r"[\w.-]+/[\w.-]+", file.repository))
            assert model.package or re.fullmatch(r"[0-9a-f]{40}|main", file.revision)
    assert list(models.values()) == sorted(models.values(), key=lambda model: model.files[0].size_bytes)


def test_a_packaged_model_is_described_as_its_package_is() -> None:
    for model in CATALOGUE.values():
        if model.package:
            packaged, (file,) = PACKAGED_MODELS[model.package], model.files
            assert (file.file, file.size_bytes, file.sha256) == (
                packaged.filename,
                packaged.size_bytes,
                packaged.sha256,
            )


def test_a_name_a_file_of_the_hub_and_a_path_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert parse_reference("gpt-oss-20b").files == CATALOGUE["gpt-oss-20b"].files
    assert [file.file for file in parse_reference("qwen3.5-4b").files] == ["Qwen3.5-4B-Q4_K_M.gguf", "mmproj-F16.gguf"]
    hub = parse_reference("hf:owner/a.repo-GGUF/folder/Model-Q4.gguf@v1.0")
    (file,) = hub.files
    assert (hub.id, file.repository, file.file) == ("Model-Q4", "owner/a.repo-GGUF", "folder/Model-Q4.gguf")
    assert (file.revision, file.sha256, file.filename) == ("v1.0", "", "Model-Q4.gguf")
    assert parse_reference("~/m/Own.gguf").path == Path("/home/someone/m/Own.gguf")
    assert parse_reference("./Own.gguf").id == "Own"


def test_every_part_of_a_split_model_is_meant() -> None:
    split = parse_reference("hf:o/r/q/big-00001-of-00003.gguf")
    assert split.id == "big"
    assert [file.file for file in split.files] == [f"q/big-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert part_paths(Path("/m/big-00001-of-00002.gguf"))[1] == Path("/m/big-00002-of-00002.gguf")
    assert len(parse_reference("hf:o/r/big-00001-of-99999.gguf").files) == 1


@pytest.mark.parametrize(
    "name", ["gpt-9", "", "hf:owner", "hf:o/r/file.bin", "hf:o/r/../x.gguf", "hf:o/r//x.gguf", "hf:../r/x.gguf"]
)
def test_a_text_that_names_no_model_is_refused_with_the_forms_that_do(name: str) -> None:
    with pytest.raises(ConfigError, match=r"hf:OWNER/REPOSITORY/FILE\.gguf"):
        parse_reference(name)


def test_the_header_of_a_file_says_what_its_context_costs(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    fields = [
        *(ARCHITECTURE, number("llama.block_count", 30), number("llama.context_length", 8192)),
        *(number("llama.embedding_length", 576), number("llama.attention.head_count", 9)),
        number("llama.attention.head_count_kv", 3),
    ]
    path.write_bytes(header(*fields, text("tokenizer.ggml.tokens") + b"never read"))
    assert read_header(path) == GgufHeader("llama", 8192, 30 * 3 * (64 + 64) * 2, 576)
    per_layer = text("llama.attention.head_count_kv") + struct.pack("<IIQ4I", 9, 4, 4, 8, 8, 2, 0)
    path.write_bytes(header(*fields[:-1], number("llama.attention.key_length", 128), per_layer))
    assert read_header(path) == GgufHeader("llama", 8192, 18 * (128 + 128) * 2, 576)


@pytest.mark.parametrize(
    ("fields", "is_embedding"),
    [
        ([ARCHITECTURE], False),
        ([ARCHITECTURE, number("llama.pooling_type", 0)], False),
        ([ARCHITECTURE, number("llama.pooling_type", 3)], True),
        ([ARCHITECTURE, number("llama.pooling_type", 4)], False),
        ([architecture("bert")], True),
    ],
)
def test_a_file_with_a_pooling_type_or_of_such_an_architecture_makes_embeddings(
    fields: list[bytes], is_embedding: bool, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header(*fields))
    own_header = read_header(path)
    assert own_header is not None
    assert own_header.is_embedding is is_embedding


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"not a model at all, but long enough",
        header(count=2**60),
        header(ARCHITECTURE, text("x") + struct.pack("<IIQ", 9, 4, 2**60)),
        header(text("x") + struct.pack("<IQ", 8, 2**60)),
        header(text("x") + struct.pack("<I", 99)),
        header(text("x") + struct.pack("<IIQIQ", 9, 9, 1, 9, 1)),
    ],
)
def test_a_header_that_lies_is_none_and_takes_no_memory(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert read_header(path) is None
    assert describe_file("m", path).size.kv_bytes_per_token == 0


@pytest.mark.usefixtures("model_is_there")
def test_the_catalogue_agrees_with_the_file_of_the_default_model() -> None:
    model = CATALOGUE[DEFAULT_MODEL]
    header = read_header(models_dir() / model.files[0].file)
    assert header == GgufHeader("llama", model.context_tokens, model.kv_bytes_per_token, 576)


def test_the_largest_model_that_runs_well_is_suggested() -> None:
    assert suggested(LAPTOP) == "gpt-oss-20b"
    assert suggested(LocalMachine(4, 15 * GB // 2, 8 * GB)) == "qwen3.5-4b"
    assert suggested(LocalMachine(64, 200 * GB, 256 * GB)) == "gpt-oss-120b"
    assert suggested(LocalMachine(2, 10**8, GB)) is None


def suggested(machine: LocalMachine) -> str | None:
    model = largest_fitting_model(machine, ContextMemory())
    return None if model is None else model.name


def test_a_cpu_is_not_offered_what_it_would_only_crawl_through() -> None:
    memory = 23 * GB // 2
    slow, fast = LocalMachine(8, memory, memory), LocalMachine(8, memory, memory, (Accelerator("CUDA0", GB, GB),))
    assert suggested(slow) == "qwen3.5-4b"
    assert suggested(fast) == "gemma-4-12b-it"


def test_the_suggestion_names_the_command_unless_that_model_is_served() -> None:
    lines = suggestion_lines(LAPTOP, DEFAULT_MODEL, ContextMemory())
    assert lines[0] == "This machine: 8 cores, 15.0 of 16.0 GB of memory free, CPU only."
    assert "stack run local --model gpt-oss-20b" in lines[1]
    assert len(suggestion_lines(LAPTOP, "gpt-oss-20b", ContextMemory())) == 1


def test_memory_of_a_device_counts_where_it_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = LocalMachine(8, 10 * GB, 16 * GB, (Accelerator("CUDA0", 20 * GB, 24 * GB),))
    assert machine.model_bytes == 27 * GB
    assert str(machine).endswith("CUDA0 with 20.0 of 24.0 GB free")
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert machine.model_bytes == 9 * GB


async def test_this_machine_is_described() -> None:
    machine = await inspect_machine()
    assert machine.cores >= 1
    assert 0 < machine.free_bytes <= machine.total_bytes


async def test_a_model_that_does_not_fit_is_refused_before_anything_is_fetched() -> None:
    needs = ModelNeeds(ContextMemory(), memory_gb=4)
    with pytest.raises(ConfigError, match=r"'gpt-oss-20b' needs about 13\.3 GB .* may take 4\.0 GB .* run_anyway"):
        await choose_models([parse_reference("gpt-oss-20b")], needs, 1)


async def test_two_models_cannot_have_one_name(tmp_path: Path) -> None:
    (tmp_path / "gpt-oss-20b.gguf").write_bytes(b"")
    references = [parse_reference("gpt-oss-20b"), parse_reference(f"{tmp_path}/gpt-oss-20b.gguf")]
    with pytest.raises(ConfigError, match="both be served as 'gpt-oss-20b'"):
        await choose_models(references, ModelNeeds(ContextMemory()), 1)


def test_memory_grows_with_the_contexts_up_to_the_models_own_length() -> None:
    model = CATALOGUE["smollm2-1.7b-instruct"]
    one, two = (catalogue_needed_bytes(model, ContextMemory(8192, parallel)) for parallel in (1, 2))
    assert two - one == 8192 * model.kv_bytes_per_token
    assert catalogue_needed_bytes(model, ContextMemory(100_000, 1)) == one
    assert one - catalogue_needed_bytes(model, ContextMemory(8192, 1, prompt_cache_mib=0)) == 256 * 2**20


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("smollm2", "smollm2-135m-instruct"),
        ("SmolLM2-135m", "smollm2-135m-instruct"),
        ("smolm2-135m-instruct", "smollm2-135m-instruct"),
        ("gpt-oss", "gpt-oss-20b"),
    ],
)
def test_a_name_that_is_nearly_right_is_met_with_the_right_one(text: str, meant: str) -> None:
    """Also its beginning alone."""
    with pytest.raises(ConfigError, match=f"Did you mean [^?]*{meant}"):
        parse_reference(text)
