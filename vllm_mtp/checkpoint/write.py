"""Writes a safetensors folder as a stream: header first, then each tensor's bytes."""

import contextlib
import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vllm_mtp.checkpoint.dequantize import iter_bfloat16
from vllm_mtp.checkpoint.folder import INDEX_NAME
from vllm_mtp.checkpoint.safetensors_file import (
    DTYPE_BITS,
    LENGTH_BYTES,
    CheckpointError,
    TensorEntry,
)

COPY_BYTES = 32 * 2**20
"""Bytes moved between two calls of the progress callback."""


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to write: a copy of ``source``, or its value as bfloat16."""

    name: str
    source: TensorEntry
    to_bfloat16: bool = False
    scale: TensorEntry | None = None

    @property
    def dtype(self) -> str:
        """Safetensors' name of the dtype written."""
        return "BF16" if self.to_bfloat16 else self.source.dtype

    @property
    def dtype_bits(self) -> int:
        """Bits of an element."""
        return DTYPE_BITS[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return math.prod(self.source.shape) * self.dtype_bits // 8


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a hidden folder beside ``path``, and name it ``path`` at the end.

    What goes wrong removes it. A killed process leaves the hidden folder, without a
    ``config.json``; the next export to the same path clears it. A lock, which the
    system drops with the process, keeps two exports apart.

    Raises:
        CheckpointError: if ``path`` exists and is not an empty folder, or another
            export is writing it.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(
            f"{path} exists already. Remove it, or name another --output-dir."
        )
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    partial = path.absolute().parent / f".{path.absolute().name}.partial"
    partial.mkdir(exist_ok=True)
    lock = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(
                f"another export is writing {path}. Wait for it, or name another "
                "--output-dir."
            ) from error
        _clear(partial)
        try:
            yield partial
            os.fsync(lock)
            partial.rename(path.absolute())
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_safetensors(
    path: Path,
    tensors: list[OutputTensor],
    block: tuple[int, int],
    on_bytes: Callable[[int, int], None] | None = None,
) -> None:
    """Write tensors in the given order; memory stays at a few rows of one of them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.source.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    written, total = 0, position
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(LENGTH_BYTES, "little") + raw)
        file.flush()
        for tensor in tensors:
            for count in _write_tensor(file, tensor, block):
                written += count
                if on_bytes is not None:
                    on_bytes(written, total)
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(
    file: BinaryIO, tensor: OutputTensor, block: tuple[int, int]
) -> Iterator[int]:
    """Append one tensor; yield the bytes written bit by bit."""
    if tensor.to_bfloat16:
        for chunk in iter_bfloat16(tensor.source, tensor.scale, block):
            file.write(chunk)
            yield len(chunk)
        file.flush()
        return
    with tensor.source.file.open("rb") as source:
        yield from _copy_bytes(source, file, tensor.source)


def _copy_bytes(source: BinaryIO, file: BinaryIO, entry: TensorEntry) -> Iterator[int]:
    """Append ``entry``'s bytes, inside the kernel where the file systems allow it."""
    offset, end = entry.offset, entry.offset + entry.nbytes
    in_kernel = hasattr(os, "copy_file_range")
    while offset < end:
        count = min(COPY_BYTES, end - offset)
        if in_kernel:
            try:
                count = os.copy_file_range(
                    source.fileno(), file.fileno(), count, offset
                )
            except OSError:
                in_kernel = False
                continue
        else:
            count = os.write(file.fileno(), os.pread(source.fileno(), count, offset))
        if count == 0:
            raise CheckpointError(
                f"{entry.file} became shorter while {entry.name} was copied. Nothing "
                "was written; export again when the file is complete."
            )
        offset += count
        yield count


def write_index(folder: Path, tensors: list[OutputTensor], file_name: str) -> None:
    """Write the index that names the file of each tensor."""
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
        "weight_map": dict.fromkeys(sorted(out.name for out in tensors), file_name),
    }
    write_json(folder / INDEX_NAME, index)


def write_json(path: Path, value: Any) -> None:
    """Write JSON as configs are written, and wait until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
