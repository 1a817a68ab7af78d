"""Checkpoints in every layout: equal when whole, and refused by tensor and file when not."""

import json
import struct
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] - typed in part
from torch import Tensor

from apis.errors import ConfigError
from providers.inference.gpt_oss.checkpoint.checkpoint import (
    DenseExperts,
    ModelCheckpoint,
    PackedExperts,
    Progress,
    open_checkpoint,
)
from providers.inference.gpt_oss.checkpoint.files import INDEX_FILE
from providers.inference.gpt_oss.checkpoint.layout import Layout
from providers.inference.gpt_oss.checkpoint.mxfp4 import unpack
from tests.support.models.random_checkpoints import (
    TINY,
    SaveFormat,
    tiny_spec_with,
    write_checkpoint,
    write_tensors,
)

SMALL = tiny_spec_with(
    layers=TINY.layers[:2], hidden=32, intermediate=64, experts=3, experts_per_token=2, vocabulary=40
)
LAYOUTS: tuple[Layout, ...] = ("openai", "transformers", "dense")


def written(folder: Path, layout: Layout = "openai", shards: int = 1) -> Path:
    write_checkpoint(folder, SMALL, SaveFormat(layout, shards))
    return folder


def canonical(checkpoint: ModelCheckpoint) -> dict[str, Tensor]:
    """Every tensor by one name, experts unpacked."""
    ends = checkpoint.read_ends()
    tensors = {"embedding": ends.embedding, "norm": ends.norm, "unembedding": ends.unembedding}
    for number, layer in enumerate(checkpoint.read_layers()):
        for field in fields(layer):
            value = getattr(layer, field.name)
            if isinstance(value, PackedExperts):
                value = DenseExperts(unpack(value.blocks, value.scales, torch.bfloat16).mT, value.bias)
            if isinstance(value, DenseExperts):
                tensors |= {f"{number}.{field.name}": value.weight, f"{number}.{field.name}.bias": value.bias}
            else:
                tensors[f"{number}.{field.name}"] = value
    return tensors


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_model(tmp_path: Path, layout: Layout, shards: int) -> None:
    checkpoint = open_checkpoint(written(tmp_path / "found", layout, shards))
    assert (checkpoint.layout, checkpoint.experts_packed, checkpoint.spec) == (layout, layout != "dense", SMALL)
    expected = canonical(open_checkpoint(written(tmp_path / "expected")))
    tensors = canonical(checkpoint)
    assert tensors.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(tensors[name], expected[name])] == []


def test_shards_without_an_index_are_found(tmp_path: Path) -> None:
    (written(tmp_path, shards=3) / INDEX_FILE).unlink()
    assert len(canonical(open_checkpoint(tmp_path))) == 3 + 2 * 13


def test_a_tied_model_has_one_embedding(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_spec_with(tied_embeddings=True, layers=TINY.layers[:1]), SaveFormat("dense"))
    ends = open_checkpoint(tmp_path).read_ends()
    assert ends.unembedding is ends.embedding


def test_progress_is_reported_layer_by_layer(tmp_path: Path) -> None:
    reports: list[Progress] = []
    checkpoint = open_checkpoint(written(tmp_path))
    assert len(list(checkpoint.read_layers(reports.append))) == 2
    assert [(each.layers, each.layers_total) for each in reports] == [(1, 2), (2, 2)]
    assert 0 < reports[0].bytes < reports[1].bytes < reports[1].bytes_total


def damage(file: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    write_tensors(file.parent, tensors)


def refused(folder: Path, *named: str) -> None:
    """Before a model is made, or as it is loaded, but always by name."""
    with pytest.raises(ConfigError) as raised:
        canonical(open_checkpoint(folder))
    assert [each for each in named if each not in str(raised.value)] == []


SINKS = "block.1.attn.sinks"
SCALES = "block.0.mlp.mlp2_weight.scales"


Change = Callable[[dict[str, Tensor]], object]
WRONG: list[tuple[Change, str]] = [
    (lambda tensors: tensors.pop(SINKS), f"tensor {SINKS} is missing"),
    (
        lambda tensors: tensors.update({"block.2.attn.sinks": torch.ones(8)}),
        "tensor block.2.attn.sinks does not belong",
    ),
    (lambda tensors: tensors.update({SINKS: torch.ones(9)}), f"tensor {SINKS} has the shape [9]"),
    (lambda tensors: tensors.update({SINKS: torch.ones(8, dtype=torch.int32)}), f"tensor {SINKS} is of type I32"),
    (
        lambda tensors: tensors.update({SCALES: tensors[SCALES].float()}),
        f"tensor {SCALES} is of type F32; it must be U8",
    ),
    (lambda tensors: tensors[SINKS].fill_(torch.nan), f"tensor {SINKS} holds numbers that are not finite"),
    (lambda tensors: tensors["norm.scale"].fill_(torch.inf), "tensor norm.scale holds numbers that are not finite"),
    (lambda tensors: tensors[SCALES].fill_(255), f"tensor {SCALES} holds numbers that are not finite"),
]


@pytest.mark.parametrize(("change", "named"), WRONG)
def test_a_wrong_tensor_is_named(tmp_path: Path, change: Change, named: str) -> None:
    damage(written(tmp_path) / "model.safetensors", change)
    refused(tmp_path, named, str(tmp_path))


def header(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def rewrite(file: Path, entries: dict[str, Any], data: bytes) -> None:
    text = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_file_cut_short_names_the_tensor_it_lacks(tmp_path: Path) -> None:
    file = written(tmp_path) / "model.safetensors"
    entries, _ = header(file)
    last = max((name for name in entries if name != "__metadata__"), key=lambda name: entries[name]["data_offsets"][1])
    file.write_bytes(file.read_bytes()[:-1])
    refused(tmp_path, str(file), f"tensor {last} is cut short: 1 bytes are missing")


@pytest.mark.parametrize("kept_bytes", [0, 7, 8, 100])
def test_a_file_cut_within_its_header_is_named(tmp_path: Path, kept_bytes: int) -> None:
    file = written(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    refused(tmp_path, str(file), "download it again")


def test_a_file_that_goes_on_is_named(tmp_path: Path) -> None:
    file = written(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"tail")
    refused(tmp_path, str(file), "4 bytes longer")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "BF16", "shape": [8], "data_offsets": [0, 15]}, "has 15 bytes"),
        ({"dtype": "BF16", "shape": [-8], "data_offsets": [0, -16]}, "has -16 bytes"),
        ({"dtype": "BF16", "shape": "eight", "data_offsets": [0, 16]}, "makes no sense"),
        ({"dtype": "BF16", "data_offsets": [0, 16]}, "makes no sense"),
        ([], "makes no sense"),
    ],
)
def test_a_header_that_makes_no_sense_names_the_tensor(tmp_path: Path, entry: Any, message: str) -> None:
    file = written(tmp_path) / "model.safetensors"
    entries, data = header(file)
    rewrite(file, entries | {SINKS: entry}, data)
    refused(tmp_path, str(file), f"tensor {SINKS}", message)


def test_files_that_are_no_safetensors_are_named_by_kind(tmp_path: Path) -> None:
    file = written(tmp_path) / "model.safetensors"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(tmp_path, str(file), "git lfs pull")
    rewrite(file, {}, b"")
    refused(tmp_path, "not named as a gpt-oss checkpoint's experts")
    file.unlink()
    refused(tmp_path, "there are no .safetensors files")
    (tmp_path / "model.gguf").touch()
    refused(tmp_path, "llama_cpp")


def test_an_index_that_does_not_fit_its_shards_is_named(tmp_path: Path) -> None:
    index = written(tmp_path, shards=2) / INDEX_FILE
    weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
    swapped = weight_map | {SINKS: next(shard for shard in weight_map.values() if shard != weight_map[SINKS])}
    index.write_text(json.dumps({"weight_map": swapped}))
    refused(tmp_path, f"has no tensor {SINKS}", swapped[SINKS])
    index.write_text(json.dumps({"weight_map": weight_map | {SINKS: "../elsewhere.safetensors"}}))
    refused(tmp_path, str(index), SINKS)
    index.write_text("{}")
    refused(tmp_path, str(index))
    index.write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / weight_map[SINKS]).unlink()
    refused(tmp_path, weight_map[SINKS], "this shard is missing")


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    file = written(tmp_path) / "model.safetensors"
    (tmp_path / "model-copy.safetensors").write_bytes(file.read_bytes())
    refused(tmp_path, "is also in")
