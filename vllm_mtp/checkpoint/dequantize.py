"""Turns FP8 weights into bfloat16 bytes, a few rows at a time, with numpy alone."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_mtp.checkpoint.safetensors_file import CheckpointError, TensorEntry

CHUNK_ELEMENTS = 2**20
"""Elements converted at once: 4 MiB of float32."""

SOURCE_DTYPES = ("F8_E4M3", "F16", "F32")


def _build_e4m3_values() -> npt.NDArray[np.float32]:
    """Return the value of each float8_e4m3fn byte: no infinities, NaN is all ones."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = np.ldexp(1.0 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    values = np.where(codes & 127 == 127, np.nan, values)
    return np.where(codes & 128, -values, values).astype(np.float32)


E4M3_VALUES = _build_e4m3_values()


def iter_bfloat16(
    weight: TensorEntry, scale: TensorEntry | None, block: tuple[int, int]
) -> Iterator[bytes]:
    """Yield a weight as bfloat16 bytes, in order, rounded to nearest even.

    Args:
        weight: float8_e4m3, float16 or float32.
        scale: what an FP8 weight is multiplied by: one value, one for each row, or one
            for each block; None for other weights.
        block: rows and columns of a block.

    Raises:
        CheckpointError: if the scale's shape is none of these.
    """
    columns = weight.shape[-1] if len(weight.shape) > 1 else math.prod(weight.shape)
    rows = math.prod(weight.shape) // max(columns, 1)
    scales = None if scale is None else _read_scales(weight, scale, block)
    step = max(CHUNK_ELEMENTS // max(columns, 1), 1)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        values = _read_rows(weight, start, count, columns)
        if scales is not None:
            scales.apply(values, start)
        yield round_to_bfloat16(values).tobytes()


def _read_rows(
    entry: TensorEntry, start: int, count: int, columns: int
) -> npt.NDArray[np.float32]:
    """Read rows as float32."""
    numpy_dtype = {"F8_E4M3": "u1", "F16": "<f2", "F32": "<f4"}[entry.dtype]
    size = np.dtype(numpy_dtype).itemsize
    raw = np.fromfile(
        entry.file,
        dtype=numpy_dtype,
        count=count * columns,
        offset=entry.offset + start * columns * size,
    )
    is_fp8 = entry.dtype == "F8_E4M3"
    values = E4M3_VALUES.take(raw) if is_fp8 else raw.astype(np.float32)
    return values.reshape(count, columns)


@dataclass(frozen=True)
class _Scales:
    """Scales of a weight, each for ``tile`` rows and columns."""

    values: npt.NDArray[np.float32]
    tile: tuple[int, int]

    def apply(self, rows: npt.NDArray[np.float32], start: int) -> None:
        """Multiply some rows of the weight, the first of index ``start``, in place."""
        count, columns = rows.shape
        scales = self.values[np.arange(start, start + count) // self.tile[0]]
        for index in range(scales.shape[1]):
            first = index * self.tile[1]
            part = rows[:, first : min(first + self.tile[1], columns)]
            np.multiply(part, scales[:, index : index + 1], out=part)


def _read_scales(
    weight: TensorEntry, scale: TensorEntry, block: tuple[int, int]
) -> _Scales:
    if scale.dtype not in ("F32", "BF16"):
        raise CheckpointError(
            f"{scale.name} is stored as {scale.dtype}; scales of F32 or BF16 can be "
            "applied. Export without --dtype."
        )
    rows, columns = weight.shape
    blocks = (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    tiles = {
        (): (rows, columns),
        (1,): (rows, columns),
        (rows,): (1, columns),
        (rows, 1): (1, columns),
        blocks: block,
    }
    tile = tiles.get(scale.shape)
    if tile is None:
        raise CheckpointError(
            f"{scale.name} is {list(scale.shape)}; for {weight.name} of "
            f"{list(weight.shape)} it should be one value, [{rows}, 1] or "
            f"{list(blocks)} (blocks of {block[0]}x{block[1]}). Correct "
            "weight_block_size in config.json."
        )
    dtype = "<f4" if scale.dtype == "F32" else "<u2"
    count = math.prod(scale.shape)
    raw = np.fromfile(scale.file, dtype=dtype, count=count, offset=scale.offset)
    if scale.dtype == "BF16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    shape = (math.ceil(rows / tile[0]), math.ceil(columns / tile[1]))
    return _Scales(raw.reshape(shape).astype(np.float32), tile)


def round_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16; ties go to even, NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    odd = rounded & np.uint32(1)
    odd += np.uint32(0x7FFF)
    odd += bits
    np.right_shift(odd, np.uint32(16), out=rounded)
    rounded[np.isnan(values)] = 0x7FC0
    return rounded.astype("<u2")
