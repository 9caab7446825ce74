"""Headers of safetensors files: read right, and every kind of damage named."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_mtp.checkpoint.safetensors_file import (
    MAX_HEADER_BYTES,
    CheckpointError,
    read_header,
)


def write(path: Path, header: object, data: bytes = b"", length: int | None = None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(raw) if length is None else length
    path.write_bytes(struct.pack("<Q", size) + raw + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_what_the_safetensors_package_writes(tmp_path):
    tensors = {
        "a": torch.zeros(3, 4, dtype=torch.bfloat16),
        "b": torch.zeros(5, dtype=torch.float32),
        "c": torch.zeros(2, 2, dtype=torch.float8_e4m3fn),
        "scalar": torch.tensor(1.0),
        "empty": torch.zeros(0, 7),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    entries = read_header(path)
    assert entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = entries[name]
        assert found.shape == tuple(tensor.shape)
        assert found.nbytes == tensor.numel() * tensor.element_size()
        assert found.file == path
    assert {name: found.dtype for name, found in entries.items()} == {
        "a": "BF16",
        "b": "F32",
        "c": "F8_E4M3",
        "scalar": "F32",
        "empty": "F32",
    }
    last = max(entries.values(), key=lambda item: item.offset + item.nbytes)
    assert last.offset + last.nbytes == path.stat().st_size


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        pytest.param(b"{", b"", "broken safetensors header", id="not-json"),
        pytest.param(b"\xff\xfe{}", b"", "broken safetensors header", id="not-utf8"),
        pytest.param([1], b"", "it is a list, not an object", id="list"),
        pytest.param(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"1",
            "'a' is named twice",
            id="twice",
        ),
        pytest.param(b"[" * 200_000, b"", "broken safetensors header", id="deep"),
        pytest.param({"a": 1}, b"", "without a usable dtype", id="no-fields"),
        pytest.param(
            {"a": {"dtype": "F32", "shape": [1]}},
            b"",
            "without a usable dtype, shape or data_offsets",
            id="no-offsets",
        ),
        pytest.param({"a": entry("F33")}, b"1" * 8, "as 'F33'; known", id="dtype"),
        pytest.param(
            {"a": entry(shape=(-2,))}, b"1" * 8, "shape [-2]", id="negative-shape"
        ),
        pytest.param(
            {"a": entry(shape=(True, 2))}, b"1" * 8, "[True, 2]", id="boolean-shape"
        ),
        pytest.param(
            {"a": entry(offsets=(0, 8.0))}, b"1" * 8, "[0, 8.0]", id="float-offset"
        ),
        pytest.param(
            {"a": entry(shape=(3,))}, b"1" * 8, "takes 12", id="size-and-shape"
        ),
        pytest.param(
            {"a": entry(offsets=(8, 0))}, b"1" * 8, "gives a -8 bytes", id="backwards"
        ),
        pytest.param(
            {"a": entry(), "b": entry(offsets=(4, 12))},
            b"1" * 12,
            "b overlaps a",
            id="overlap",
        ),
        pytest.param(
            {"a": entry(), "b": entry(offsets=(12, 20))},
            b"1" * 20,
            "b leaves a hole after a",
            id="hole",
        ),
        pytest.param({"a": entry()}, b"1" * 5, "is truncated", id="truncated"),
        pytest.param({"a": entry()}, b"1" * 9, "longer than its", id="longer"),
    ],
)
def test_damage_is_refused_with_the_files_name(tmp_path, header, data, words):
    path = write(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("size", [0, 7])
def test_shorter_than_a_length(tmp_path, size):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"\0" * size)
    with pytest.raises(CheckpointError, match=f"in a file of {size}"):
        read_header(path)


def test_header_longer_than_the_file(tmp_path):
    path = write(tmp_path / "bad.safetensors", {}, length=1000)
    with pytest.raises(CheckpointError, match="header should take 1,000 bytes"):
        read_header(path)


def test_giant_header_is_not_read_into_memory(tmp_path):
    path = write(tmp_path / "bad.safetensors", {}, length=MAX_HEADER_BYTES + 1)
    with path.open("r+b") as file:
        file.truncate(MAX_HEADER_BYTES * 2)
    with pytest.raises(CheckpointError, match="at most 100,000,000 are possible"):
        read_header(path)


def test_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        read_header(tmp_path / "none.safetensors")
