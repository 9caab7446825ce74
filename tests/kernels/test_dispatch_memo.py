"""Operations with remembered dispatch compute what Triton's interpreter computes.

Every kernel below runs often enough for its operations to be remembered, with other
numbers each time, and is compared with the interpreter left to itself.
"""

from typing import Any

import pytest
import torch
from vllm.triton_utils import tl, triton

if not triton.knobs.runtime.interpret:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from triton.language.semantic import TritonSemantic
from triton.runtime.errors import InterpreterError

from vllm_mtp.cpu import activate, dispatch_memo
from vllm_mtp.cpu.dispatch_plan import State

activate()

ROUNDS = 4
"""Plain, written down, repeated, repeated."""


class _Off:
    """In the recorder's place, so that nothing is remembered or repeated."""

    def reduce(self, plain: Any, value: Any, args: tuple[Any, ...], kw: Any) -> Any:
        return plain(value, *args, **kw)

    def look(self, handle: Any, is_true: bool) -> None:
        return


def run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], **meta: Any) -> Any:
    """Launch on copies of the tensors and return those."""
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    kernel[grid](*copies, **meta)
    return [c for c in copies if isinstance(c, torch.Tensor)]


def run_plain(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], **meta: Any
) -> Any:
    State.recorder = _Off()  # type: ignore[assignment]
    try:
        return run(kernel, grid, args, **meta)
    finally:
        State.recorder = None


def compare(kernel: Any, grid: tuple[int, ...], make_args: Any, **meta: Any) -> None:
    for seed in range(ROUNDS):
        args = make_args(torch.Generator().manual_seed(seed))
        expected = run_plain(kernel, grid, args, **meta)
        found = run(kernel, grid, args, **meta)
        for a, b in zip(expected, found, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.fixture
def dispatches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often Triton works out the types of two operands."""
    count = [0]
    original = TritonSemantic.binary_op_type_checking_impl

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TritonSemantic, "binary_op_type_checking_impl", counting)
    return count


@triton.jit
def _same_or_other_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lanes)
    y = tl.load(y_ptr + lanes)
    for pair in range(4):
        # One operation whose operands are the same tensor in some rounds only.
        tl.store(out_ptr + pair * BLOCK + lanes, x * (x if pair < 2 else y))


def test_same_operand_twice() -> None:
    def make_args(g: torch.Generator) -> tuple[Any, ...]:
        x, y = torch.randn(2, 8, generator=g)
        return x, y, torch.zeros(32)

    compare(_same_or_other_kernel, (1,), make_args, BLOCK=8)
    x, y = torch.randn(2, 8)
    out = run(_same_or_other_kernel, (1,), (x, y, torch.zeros(32)), BLOCK=8)[2]
    assert torch.equal(out, torch.cat((x * x, x * x, x * y, x * y)))


@triton.jit
def _scalar_mask_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    is_on = tl.load(x_ptr) < tl.load(x_ptr + 1)
    tl.store(out_ptr + lanes, 1.0, mask=is_on & (lanes < 3))


def test_a_comparison_of_scalars_is_a_mask() -> None:
    """Catches: structured output fails, its kernel has such a mask."""

    def make_args(g: torch.Generator) -> tuple[Any, ...]:
        return torch.randint(0, 3, (2,), generator=g), torch.zeros(4)

    compare(_scalar_mask_kernel, (1,), make_args, BLOCK=4)
    out = run(
        _scalar_mask_kernel, (1,), (torch.tensor([1, 2]), torch.zeros(4)), BLOCK=4
    )
    assert out[1].tolist() == [1, 1, 1, 0]


@triton.jit
def _arithmetic_kernel(f_ptr, i_ptr, h_ptr, out_ptr, wide_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    base = tl.program_id(0) * BLOCK
    f = tl.load(f_ptr + base + lanes)
    i = tl.load(i_ptr + base + lanes)
    h = tl.load(h_ptr + base + lanes)
    bits = f.to(tl.int32, bitcast=True)
    hashed = (i.to(tl.uint32) * 0x85EBCA6B) ^ (bits.to(tl.uint32) >> 13)
    mixed = tl.where(i > 0, f / 3, h + f) - tl.maximum(f, 0.5) * i
    mixed += tl.exp2(-tl.abs(f)) + tl.log(tl.abs(f) + 1.0) + (h * 2).to(tl.float32)
    mixed += (i // 3 % 5).to(tl.float32) + (i >> 2) + (i << 1) + (-i) + (~i & 6 | 1)
    ok = (i % 2 == 0) & (mixed != 0.0)
    tl.store(out_ptr + base + lanes, mixed, mask=ok)
    wide = hashed.to(tl.int64) + base.to(tl.int64) * 2**33 + (1 if BLOCK > 4 else 0)
    tl.store(wide_ptr + base + lanes, wide)


def test_arithmetic() -> None:
    def make_args(g: torch.Generator) -> tuple[Any, ...]:
        return (
            torch.randn(32, generator=g),
            torch.randint(-50, 50, (32,), generator=g, dtype=torch.int32),
            torch.randn(32, generator=g).bfloat16(),
            torch.zeros(32),
            torch.zeros(32, dtype=torch.int64),
        )

    compare(_arithmetic_kernel, (4,), make_args, BLOCK=8)
    compare(_arithmetic_kernel, (8,), make_args, BLOCK=4)


@triton.jit
def _matrix_kernel(a_ptr, b_ptr, out_ptr, ids_ptr, M: tl.constexpr, N: tl.constexpr):
    rows = tl.arange(0, M)
    columns = tl.arange(0, N)
    a = tl.load(a_ptr + rows[:, None] * N + columns[None, :])
    b = tl.load(b_ptr + rows[:, None] * N + columns[None, :])
    product = tl.dot(a, tl.trans(b), input_precision="ieee")
    best, where = tl.max(product, axis=1, return_indices=True)
    worst = tl.argmin(product, axis=0)
    flat = tl.reshape(product, (M * M,))
    total = tl.sum(flat, axis=0) + tl.min(tl.max(product, axis=1), axis=0)
    running = tl.cumsum(tl.sum(product, axis=1), axis=0)
    tl.store(out_ptr + rows, best + total + running + tl.zeros([M], tl.float32))
    tl.store(ids_ptr + rows, where + worst + tl.cdiv(where, 3))


def test_matrices_and_reductions() -> None:
    def make_args(g: torch.Generator) -> tuple[Any, ...]:
        a, b = torch.randn(2, 16, 32, generator=g)
        return a, b, torch.zeros(16), torch.zeros(16, dtype=torch.int32)

    compare(_matrix_kernel, (1,), make_args, M=16, N=32)


@triton.jit
def _scalar_load_kernel(x_ptr, n_ptr, out_ptr, OTHER: tl.constexpr):
    i = tl.program_id(0)
    n = tl.load(n_ptr + i)
    # Triton's interpreter treats a mask or default that is false as missing.
    x = tl.load(x_ptr + n, mask=n >= 0, other=OTHER)
    y = tl.load(x_ptr + tl.where(n > 0, n, 0), mask=n > 0, other=tl.load(x_ptr + i))
    tl.store(out_ptr + i, x + 10 * y)


@pytest.mark.parametrize("other", [0.0, 7.0])
def test_scalar_loads_that_look_at_values(other: float) -> None:
    def make_args(g: torch.Generator) -> tuple[Any, ...]:
        x = torch.randint(0, 3, (16,), generator=g).float()
        n = torch.randint(-3, 16, (16,), generator=g, dtype=torch.int32)
        return x, n, torch.zeros(16)

    compare(_scalar_load_kernel, (16,), make_args, OTHER=other)


@triton.jit
def _fill_kernel(out_ptr, VALUE: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(out_ptr + lanes, tl.where(lanes < BLOCK, VALUE, VALUE))


def test_scalars_that_python_takes_for_equal() -> None:
    dtypes = {float: torch.float32, bool: torch.bool, int: torch.int32}
    for value in [0.0, -0.0, 1, True, 1.0, float("nan")] * ROUNDS:
        out = torch.full((4,), 3, dtype=dtypes[type(value)])
        found = run(_fill_kernel, (1,), (out,), VALUE=value, BLOCK=4)[0]
        expected = torch.full_like(out, value)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@triton.jit
def _constants_kernel(out_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    lanes += tl.program_id(0)
    total = tl.full([BLOCK], 5, tl.int32)
    total *= lanes
    tl.store(out_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total)


def test_constants_stay_what_they_are() -> None:
    out = run(_constants_kernel, (6,), (torch.zeros(24, dtype=torch.int32),), BLOCK=4)
    expected = [5 * (lane + i) for i in range(6) for lane in range(4)]
    assert out[0].tolist() == expected


@triton.jit
def _mismatch_kernel(out_ptr):
    tl.store(out_ptr + tl.arange(0, 4), tl.arange(0, 4) + tl.arange(0, 8))


def test_errors_are_raised_every_time() -> None:
    for _ in range(ROUNDS):
        with pytest.raises(InterpreterError, match="incompatible dimensions"):
            run(_mismatch_kernel, (1,), (torch.zeros(8, dtype=torch.int32),))


@triton.jit
def _count_kernel(out_ptr, num_rounds, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for i in range(num_rounds):
        total += lanes * i
    tl.store(out_ptr + lanes, total)


def test_more_combinations_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_memo, "MAX_PLANS", 8)
    for _ in range(ROUNDS):
        out = run(_count_kernel, (1,), (torch.zeros(4, dtype=torch.int32), 50), BLOCK=4)
        assert out[0].tolist() == [1225 * lane for lane in range(4)]


def test_types_are_worked_out_twice_and_no_more(dispatches: list[int]) -> None:
    args = (torch.zeros(128, dtype=torch.int32), 3)
    for _ in range(2):
        run(_count_kernel, (1,), args, BLOCK=128)
    assert dispatches[0] > 0
    dispatches[0] = 0
    run(_count_kernel, (1,), args, BLOCK=128)
    assert dispatches[0] == 0
