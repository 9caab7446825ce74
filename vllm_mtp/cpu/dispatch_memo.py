"""Remember what each operation of Triton's language does to given types.

Under the interpreter an operation such as ``a + b`` first works out, in Python, what
the compiler would: promotion, casts, broadcasts. That depends on the types of the
operands and on Python scalars, not on the numbers in a tensor (the compiler does not
know them), and takes ten times longer than the arithmetic. So the calls to the
interpreter's builder are written down once per combination of types and repeated with
new tensors afterwards. The kernel itself still runs line by line, and every operation
still ends in the interpreter's builder.

Anything unexpected (an argument that is no tensor, scalar or type, a handle of unknown
origin, a look at a tensor's value) leaves that operation as Triton has it.
Source: ``triton.runtime.interpreter``, Triton 3.6 to 3.9.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from triton import language
from triton.language import core, standard
from triton.runtime import interpreter

from vllm_mtp.cpu.dispatch_plan import MISSED, Plan, State, record
from vllm_mtp.cpu.type_info import info_of, simplify_values

MAX_PLANS = 2048
"""Combinations of types remembered per operation; beyond, all are forgotten."""


_PRIVATE = (
    "InterpretedFunction",
    "TensorHandle",
    "_get_np_dtype",
    "interpreter_builder",
    "interpreter_semantic",
)


class _UnknownError(Exception):
    """An argument of a kind that is not remembered."""


def _key_of(arg: Any) -> Any:
    """What an argument that is no tensor contributes to the key.

    Distinct for all that Triton tells apart, as 1 and True or 0.0 and -0.0.
    """
    kind = type(arg)
    if kind is int or arg is None:
        return arg
    if kind is bool or kind is str:
        return kind, arg
    if kind is float:
        return kind, arg.hex()
    if kind is core.constexpr:
        return kind, _key_of(arg.value)
    if kind is list or kind is tuple:
        return kind, *map(_key_of, arg)
    if kind is slice:
        return kind, _key_of(arg.start), _key_of(arg.stop), _key_of(arg.step)
    if isinstance(arg, core.dtype):
        return core.dtype, info_of(arg)
    if isinstance(arg, interpreter.InterpretedFunction) or hasattr(kind, "__members__"):
        return arg
    raise _UnknownError


def _analyse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The key of a call and the tensors among its arguments."""
    parts: list[Any] = []
    inputs = []
    tensor = core.tensor
    for arg in args:
        if type(arg) is tensor:
            parts.append(arg._mtp_info)
            inputs.append(arg)
        else:
            parts.append(_key_of(arg))
    for name, arg in kwargs.items():
        if name == "_semantic":
            continue
        parts.append(name)
        if type(arg) is tensor:
            parts.append(arg._mtp_info)
            inputs.append(arg)
        else:
            parts.append(_key_of(arg))
    return tuple(parts), inputs


def memoise(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``plain``, an operation on tensors, with its dispatch remembered by types."""
    plans: dict[Any, Plan | None] = {}
    seen: set[Any] = set()
    tensor, missed, state = core.tensor, MISSED, State

    def call(*args: Any, **kwargs: Any) -> Any:
        if state.recorder is not None:
            return plain(*args, **kwargs)
        key: Any
        inputs: Any
        try:
            if len(args) != 2 or kwargs or type(args[0]) is not tensor:
                key, inputs = _analyse(args, kwargs)
            elif type(args[1]) is tensor:
                # Two tensors, or a tensor and something else: most calls.
                key, inputs = (args[0]._mtp_info, args[1]._mtp_info), args
            else:
                key, inputs = (args[0]._mtp_info, _key_of(args[1])), args[:1]
        except _UnknownError:
            return plain(*args, **kwargs)
        if key in plans:
            plan = plans[key]
            if plan is None:
                return plain(*args, **kwargs)
            result = plan(*inputs)
            return plain(*args, **kwargs) if result is missed else result
        if key in seen:
            result, plans[key] = record(plain, args, kwargs)
            return result
        # Worth its price from the second time on.
        if len(seen) >= MAX_PLANS:
            plans.clear()
            seen.clear()
        seen.add(key)
        return plain(*args, **kwargs)

    return call


def find_builtins() -> list[tuple[Any, str]]:
    """Where the operations of the language are, before the interpreter patches them."""
    return [
        (place, name)
        for place in (language, core, core.tensor, language.math)
        for name in dir(place)
        if core.is_builtin(getattr(place, name))
    ]


def memoise_dispatch(builtins: list[tuple[Any, str]]) -> None:
    """Remember the dispatch of the operations found, now that they are patched.

    Does nothing where the interpreter does not look like the ones known.
    """
    if not all(hasattr(interpreter, name) for name in _PRIVATE):
        return
    simplify_values()
    memoised: dict[Any, Callable[..., Any]] = {}
    for place, name in builtins:
        patched = getattr(place, name)
        member = (getattr(patched, "__kwdefaults__", None) or {}).get("member")
        if member is not None:
            if member not in memoised:
                memoised[member] = memoise(_with_semantic(member))
            setattr(place, name, memoised[member])
    _memoise_standard()
    _watch_reductions()
    _watch_truth()


def _with_semantic(member: Any) -> Callable[..., Any]:
    semantic = interpreter.interpreter_semantic

    def plain(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    return plain


def _memoise_standard() -> None:
    """``tl.max`` and the like: written in Triton, and straight-line for given types."""
    function = interpreter.InterpretedFunction
    plain = function.__call__
    memoised = {
        fn: memoise(partial(plain, fn))
        for fn in vars(standard).values()
        if isinstance(fn, function)
    }

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        fast = memoised.get(self)
        return plain(self, *args, **kwargs) if fast is None else fast(*args, **kwargs)

    function.__call__ = call


def _watch_reductions() -> None:
    plain = language.reduce

    def reduce(input: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = State.recorder
        if recorder is None:
            return plain(input, *args, **kwargs)
        return recorder.reduce(plain, input, args, kwargs)

    language.reduce = core.reduce = reduce


def _watch_truth() -> None:
    """Notice when an operation depends on a tensor's value after all."""
    plain_bool, plain_index = core.tensor.__bool__, core.tensor.__index__

    def is_true(self: Any) -> bool:
        result: bool = plain_bool(self)
        if State.recorder is not None:
            State.recorder.look(self.handle, result)
        return result

    def index(self: Any) -> int:
        if State.recorder is not None:
            State.recorder.failed = True
        result: int = plain_index(self)
        return result

    core.tensor.__bool__, core.tensor.__index__ = is_true, index
