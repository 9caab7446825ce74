"""What the interpreter derives from a Triton type, derived once per type.

Every value of an interpreted kernel is a ``tl.tensor`` around a ``TensorHandle`` around
a numpy array, and both classes work out or check things from their type when made.
Source: ``triton.language.core`` and ``triton.runtime.interpreter``, Triton 3.6 to 3.9.
"""

import dataclasses
import math
from typing import Any

from triton.language import core
from triton.runtime import interpreter


class TypeInfo:
    """What ``tl.tensor`` derives from its type; one object per distinct type."""

    __slots__ = ("dtype", "np_dtype", "numel", "shape")

    def __init__(self, kind: Any) -> None:
        shape = kind.shape if kind.is_block() else ()
        self.shape = tuple(core.constexpr(size) for size in shape)
        self.numel = core.constexpr(math.prod(shape))
        self.dtype = kind.scalar
        # The type of numpy's elements, once asked for.
        self.np_dtype: Any = None


_infos: dict[Any, TypeInfo] = {}


def _type_key(kind: Any) -> Any:
    if kind.is_block():
        return kind.shape, _type_key(kind.scalar)
    if kind.is_ptr():
        return kind.address_space, kind.const, _type_key(kind.element_ty)
    return kind.name


def info_of(kind: Any) -> TypeInfo:
    """The one ``TypeInfo`` of all types equal to ``kind``."""
    info: TypeInfo | None = getattr(kind, "_mtp_info", None)
    if info is None:
        key = _type_key(kind)
        info = _infos.get(key)
        if info is None:
            info = _infos[key] = TypeInfo(kind)
        kind._mtp_info = info
    return info


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    info = info_of(type)
    self.handle = handle
    self.shape = info.shape
    self.numel = info.numel
    self.type = type
    self.dtype = info.dtype
    self._mtp_info = info


def _init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data = data
    self.dtype = dtype
    self.attr = {} if attr is None else attr


def simplify_values() -> None:
    """Make tensors and handles without deriving anything anew or checking it."""
    plain_np_dtype = interpreter._get_np_dtype

    def np_dtype(kind: Any) -> Any:
        info = info_of(kind)
        if info.np_dtype is None:
            info.np_dtype = plain_np_dtype(kind)
        return info.np_dtype

    interpreter._get_np_dtype = np_dtype
    core.tensor.__init__ = _init_tensor
    fields = [field.name for field in dataclasses.fields(interpreter.TensorHandle)]
    if fields == ["data", "dtype", "attr"]:
        interpreter.TensorHandle.__init__ = _init_handle
