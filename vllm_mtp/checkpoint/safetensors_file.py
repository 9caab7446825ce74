"""Reads and checks the header of a safetensors file; never a tensor's data.

A file is eight bytes of header length (little endian), a JSON header that gives each
tensor's dtype, shape and byte range, and the data. Whatever does not add up is refused
with the file's name, so that a broken download stops before any weight is loaded.

Source: the format's description in the safetensors package, version 0.4 to 0.8.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_mtp.config import SettingsError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The safetensors package's own limit."""

DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

AGAIN = "Download or copy it again."


class CheckpointError(SettingsError):
    """A checkpoint that cannot be used; the message names the file or the tensor."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as its file's header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path

    offset: int
    """Of the first data byte, from the start of the file."""

    nbytes: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file by name, in order of their data.

    Raises:
        CheckpointError: if the file is missing, truncated, or its header is not what
            the format allows; the message starts with the file's path.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            limit = min(MAX_HEADER_BYTES, size - LENGTH_BYTES)
            if size < LENGTH_BYTES or length > limit:
                raise CheckpointError(
                    f"{path} is not a whole safetensors file: its header should take "
                    f"{length:,} bytes, at most {max(limit, 0):,} are possible in a "
                    f"file of {size:,}. {AGAIN}"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}. {AGAIN}"
        ) from error
    header = _parse_header(path, raw)
    start = LENGTH_BYTES + length
    entries = [_parse_entry(path, start, *item) for item in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_coverage(path, entries, start, size)
    return {entry.name: entry for entry in entries}


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    """Return the header's tensors, its ``__metadata__`` left out."""
    try:
        header = json.loads(raw, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} has a broken safetensors header ({error}). {AGAIN}"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(
            f"{path} has a broken safetensors header: it is a "
            f"{type(header).__name__}, not an object. {AGAIN}"
        )
    header.pop("__metadata__", None)
    return header


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key!r} is named twice")
        result[key] = value
    return result


def _parse_entry(path: Path, start: int, name: str, value: Any) -> TensorEntry:
    """Check one tensor's description against itself."""
    try:
        dtype, shape = value["dtype"], tuple(value["shape"])
        begin, end = value["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} describes {name} without a usable dtype, shape or data_offsets. "
            f"{AGAIN}"
        ) from error
    if dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"{path} stores {name} as {dtype!r}; known dtypes: "
            f"{', '.join(sorted(DTYPE_BITS))}. Save the checkpoint with one of these."
        )
    whole = (type(number) is int and number >= 0 for number in (*shape, begin, end))
    if not all(whole):
        raise CheckpointError(
            f"{path} describes {name} with shape {list(shape)} and data_offsets "
            f"{[begin, end]}; whole numbers from 0 are possible. {AGAIN}"
        )
    needed = math.prod(shape) * DTYPE_BITS[dtype]
    if needed % 8 or end - begin != needed // 8:
        raise CheckpointError(
            f"{path} gives {name} {end - begin:,} bytes, but {dtype} of shape "
            f"{list(shape)} takes {needed / 8:,.0f}. {AGAIN}"
        )
    return TensorEntry(name, dtype, shape, path, start + begin, end - begin)


def _check_coverage(
    path: Path, entries: list[TensorEntry], start: int, size: int
) -> None:
    """Check that the tensors cover the data without a hole or an overlap."""
    position, previous = start, "the header"
    for entry in entries:
        if entry.offset != position:
            what = "overlaps" if entry.offset < position else "leaves a hole after"
            raise CheckpointError(
                f"{path} has a broken safetensors header: {entry.name} {what} "
                f"{previous}. {AGAIN}"
            )
        position, previous = entry.offset + entry.nbytes, entry.name
    if position != size:
        what = "truncated" if position > size else "longer than its header says"
        raise CheckpointError(
            f"{path} is {what}: {size:,} bytes, {position:,} are described. {AGAIN}"
        )
