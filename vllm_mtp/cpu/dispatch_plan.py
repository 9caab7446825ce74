"""Write down the builder calls of one operation of Triton's language, as a function.

See ``vllm_mtp.cpu.dispatch_memo``, which decides when.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from triton.language import core
from triton.runtime import interpreter

Plan = Callable[..., Any]
"""Takes the tensors among an operation's arguments and returns its result."""

MISSED = object()
"""What a plan returns that does not hold for the values given."""

_FOLDED = ("get_", "create_make_range", "create_splat", "create_broadcast")
"""Builder calls whose result is a constant if all their arguments are."""


class Recorder:
    """Stands in for the interpreter's builder while an operation is written down."""

    def __init__(self, builder: Any, inputs: list[Any]) -> None:
        self.builder = builder
        self.lines: list[str] = []
        self.constants: list[Any] = []
        # Handles, so that no id is used twice: inputs first, then results.
        self.alive = [tensor.handle for tensor in inputs]
        # Variable of each handle: h0, h1, ... or the constants c0, c1, ...
        self.names = {id(handle): f"h{i}" for i, handle in enumerate(self.alive)}
        self.has_effect = False
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.builder, name)
        if not callable(member):
            return member

        def call(*args: Any, **kwargs: Any) -> Any:
            texts = [self._text(arg) for arg in args]
            texts += [f"{key}={self._text(arg)}" for key, arg in kwargs.items()]
            result = member(*args, **kwargs)
            self._note(name, member, texts, result)
            return result

        return call

    def reduce(self, plain: Any, value: Any, args: tuple[Any, ...], kw: Any) -> Any:
        """``tl.reduce``, which goes past the builder."""
        tensor = core.tensor
        values = value if isinstance(value, tuple) else (value,)
        kinds = [v.type for v in values]

        def step(*handles: Any) -> tuple[Any, ...]:
            results = plain(tuple(map(tensor, handles, kinds)), *args, **kw)
            return tuple(result.handle for result in results)

        texts = [self._text(v.handle) for v in values]
        with Paused(self):
            results = plain(tuple(values), *args, **kw)
        slots = [self._slot(result.handle) for result in results]
        call = f"{self._constant(step)}({', '.join(texts)})"
        self.lines.append(f"{', '.join(slots)}, = {call}")
        return results if isinstance(value, tuple) else results[0]

    def look(self, handle: Any, is_true: bool) -> None:
        """Someone asked whether a tensor is true: what follows holds for that only."""
        if handle.data.size != 1:
            # Always the same answer.
            return
        name = self.names.get(id(handle), "")
        if name.startswith("h") and not self.has_effect:
            self.lines.append(f"if bool({name}.data) is not {is_true}: return missed")
        elif not name.startswith("c"):
            self.failed = True

    def plan(self, inputs: list[Any], result: Any) -> Plan | None:
        """What was written down, if it can be repeated."""
        lines = [f"h{i} = t{i}.handle" for i in range(len(inputs))] + self.lines
        several = isinstance(result, tuple)
        outputs = []
        for value in result if several else (result,):
            same = [i for i, tensor in enumerate(inputs) if tensor is value]
            if same:
                outputs.append(f"t{same[0]}")
            elif value is None:
                outputs.append("None")
            elif isinstance(value, core.tensor):
                outputs.append(f"r{len(outputs)}")
                lines.append(f"{outputs[-1]} = new(tensor)")
                for field, content in vars(value).items():
                    text = self._text(content)
                    lines.append(f"{outputs[-1]}.{field} = {text}")
            else:
                return None
        if self.failed:
            return None
        lines.append(f"return {', '.join(outputs)}{',' * several}")
        build = _compile(len(inputs), len(self.constants), "\n        ".join(lines))
        plan: Plan = build(object.__new__, core.tensor, MISSED, *self.constants)
        return plan

    def _constant(self, value: Any) -> str:
        self.constants.append(value)
        return f"c{len(self.constants) - 1}"

    def _slot(self, handle: Any) -> str:
        name = self.names[id(handle)] = f"h{len(self.alive)}"
        self.alive.append(handle)
        return name

    def _text(self, arg: Any) -> str:
        """An argument as Python."""
        if isinstance(arg, interpreter.TensorHandle):
            name = self.names.get(id(arg))
            self.failed |= name is None
            return name or ""
        if isinstance(arg, (list, tuple)):
            self.failed |= any(isinstance(a, interpreter.TensorHandle) for a in arg)
            return self._constant(list(arg) if isinstance(arg, list) else arg)
        return self._constant(arg)

    def _note(self, name: str, member: Any, texts: list[str], result: Any) -> None:
        """Write down one builder call."""
        is_constant = not any(t.split("=")[-1].startswith("h") for t in texts)
        call = f"{self._constant(member)}({', '.join(texts)})"
        if isinstance(result, interpreter.TensorHandle):
            if is_constant and name.startswith(_FOLDED):
                result.data.flags.writeable = False
                self.alive.append(result)
                self.names[id(result)] = self._constant(result)
            else:
                self.lines.append(f"{self._slot(result)} = {call}")
        elif result is None or isinstance(result, core.dtype):
            if not name.startswith("get_"):
                self.has_effect = True
                self.lines.append(call)
        else:
            self.failed = True


@lru_cache(maxsize=4096)
def _compile(num_inputs: int, num_constants: int, body: str) -> Callable[..., Any]:
    """Code shared by all plans of one form."""
    constants = "".join(f", c{i}" for i in range(num_constants))
    inputs = ", ".join(f"t{i}" for i in range(num_inputs))
    source = (
        f"def build(new, tensor, missed{constants}):\n"
        f"    def plan({inputs}):\n        {body}\n"
        "    return plan\n"
    )
    space: dict[str, Any] = {}
    exec(source, space)
    build: Callable[..., Any] = space["build"]
    return build


class State:
    """The recorder at work, if any; the operations inside its operation run plainly."""

    recorder: Recorder | None = None


class Paused:
    """Runs what belongs to no operation that is being written down."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __enter__(self) -> None:
        State.recorder = None
        interpreter.interpreter_semantic.builder = self.recorder.builder

    def __exit__(self, *error: object) -> None:
        State.recorder = interpreter.interpreter_semantic.builder = self.recorder


def record(
    plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Plan | None]:
    """Run an operation and write it down; None if it cannot be repeated."""
    inputs: list[Any] = []

    def distinct(arg: Any) -> Any:
        # x + x must not be repeated as if y + z meant y + y.
        if type(arg) is not core.tensor:
            return arg
        if any(tensor.handle is arg.handle for tensor in inputs):
            handle = interpreter.TensorHandle(arg.handle.data, arg.handle.dtype)
            arg = core.tensor(handle, arg.type)
        inputs.append(arg)
        return arg

    args = tuple(distinct(arg) for arg in args)
    kwargs = {name: distinct(arg) for name, arg in kwargs.items()}
    semantic = interpreter.interpreter_semantic
    recorder = Recorder(semantic.builder, inputs)
    State.recorder = semantic.builder = recorder
    try:
        result = plain(*args, **kwargs)
    finally:
        State.recorder, semantic.builder = None, recorder.builder
    return result, recorder.plan(inputs, result)
