"""Loading a trace with every line checked.

Files come from other machines: they are parsed as JSON and nothing else, and a line
that does not hold together is refused with its number.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from vllm_mtp.trace.schema import SCHEMA_VERSION, Header, Prompt, Step, Trace
from vllm_mtp.tree.layout import MAX_ROWS, NO_PARENT

MAX_LINE_BYTES = 8 << 20
"""Longest line accepted; a step of 64 rows with text takes a few KiB."""

_MAX_INT = 2**53 - 1


class TraceError(ValueError):
    """A trace that cannot be read; the message names the file and the line."""


def load_trace(path: Path | str) -> Trace:
    """Read a trace, with the older part of a rotated one (``PATH.1``) in front.

    Raises:
        TraceError: the file is missing, is no trace, comes from a newer version, or a
            line is corrupt. A last line that was cut off (the process was killed while
            writing it) is left out with a note instead.
    """
    path = Path(path)
    trace = _load_file(path)
    older = path.with_name(path.name + ".1")
    if not older.exists():
        return trace
    try:
        first = _load_file(older)
    except TraceError as error:
        return _with_notes(trace, (f"the older part was left out: {error}",))
    if first.header.run != trace.header.run:
        return trace
    joined = Trace(
        header=first.header,
        steps=first.steps + trace.steps,
        prompts={**first.prompts, **trace.prompts},
        dropped=first.dropped + trace.dropped,
    )
    return _with_notes(joined, first.notes + trace.notes)


def _with_notes(trace: Trace, notes: tuple[str, ...]) -> Trace:
    return Trace(trace.header, trace.steps, trace.prompts, trace.dropped, notes)


def _load_file(path: Path) -> Trace:
    try:
        with path.open("rb") as file:
            lines = _read_lines(path, file)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}).") from error
    if not lines:
        raise TraceError(f"{path}: empty; a trace starts with a header line.")
    notes: list[str] = []
    if not lines[-1].endswith(b"\n"):
        notes.append(f"{path}: the last line is cut off and was left out")
        lines.pop()
        if not lines:
            raise TraceError(f"{path}:1: the header line is cut off.")
    header: Header | None = None
    steps: list[Step] = []
    prompts: dict[str, Prompt] = {}
    dropped = 0
    for number, line in enumerate(lines, start=1):
        try:
            record = _parse_line(line)
            kind = record.get("kind")
            if header is None:
                header = _header(record)
            elif kind == "step":
                steps.append(step_from_record(record))
            elif kind == "prompt":
                prompt = _prompt(record)
                prompts[prompt.request] = prompt
            elif kind == "dropped":
                dropped += _integer(record, "count", 0)
            else:
                raise TraceError(
                    f"kind is {_shorten(kind)}; expected step, prompt or dropped"
                )
        except TraceError as error:
            raise TraceError(f"{path}:{number}: {error}.") from error
    assert header is not None, "the first line is the header or an error"
    return Trace(header, tuple(steps), prompts, dropped, tuple(notes))


def _read_lines(path: Path, file: BinaryIO) -> list[bytes]:
    lines: list[bytes] = []
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(
                f"{path}:{len(lines) + 1}: longer than {MAX_LINE_BYTES} bytes; "
                "this is not a trace."
            )
        lines.append(line)
    return lines


def _parse_line(line: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise TraceError(f"{constant} is not allowed in a trace")

    try:
        record = json.loads(line.decode(), parse_constant=refuse)
    except TraceError:
        raise
    # RecursionError: deeply nested brackets. ValueError: also bad UTF-8.
    except (ValueError, RecursionError) as error:
        raise TraceError(f"not JSON ({_shorten(str(error), 80)})") from error
    if not isinstance(record, dict):
        raise TraceError("not a JSON object")
    return record


def _header(record: Mapping[str, Any]) -> Header:
    if record.get("kind") != "header":
        raise TraceError("no header; this is not a trace of vllm_mtp")
    schema = _integer(record, "schema", 1)
    if schema > SCHEMA_VERSION:
        raise TraceError(
            f"schema version {schema}, this vllm_mtp reads up to {SCHEMA_VERSION}; "
            "read it with the version that wrote it, or a newer one"
        )
    versions = _mapping(record, "versions")
    return Header(
        run=_string(record, "run"),
        created=_number(record, "created"),
        model=_string(record, "model"),
        settings=_mapping(record, "settings"),
        versions={str(name): str(value) for name, value in versions.items()},
        schema=schema,
    )


def _prompt(record: Mapping[str, Any]) -> Prompt:
    text = record.get("text")
    if text is not None and not isinstance(text, str):
        raise TraceError("text must be a string")
    return Prompt(_string(record, "request"), _integers(record, "tokens", 0), text)


def step_from_record(record: Mapping[str, Any]) -> Step:
    """A step from its parsed line.

    Raises:
        TraceError: a field is missing, has the wrong type, or the tree does not hold
            together (the message has neither the file nor the line).
    """
    texts: dict[int, str] = {}
    for token, text in _mapping(record, "texts", optional=True).items():
        if not token.isdigit() or not isinstance(text, str):
            raise TraceError(f"texts has a bad entry at {_shorten(token)}")
        texts[int(token)] = text
    step = Step(
        request=_string(record, "request"),
        step=_integer(record, "step", 0),
        time=_number(record, "time"),
        batch=_integer(record, "batch", 1),
        position=_integer(record, "position", 0),
        tokens=_integers(record, "tokens", -1),
        parents=_integers(record, "parents", NO_PARENT),
        depths=_integers(record, "depths", 0),
        scores=_scores(record),
        drawn=_integers(record, "drawn", -1),
        path=_integers(record, "path", 0),
        draft_ms=_optional_number(record, "draft_ms"),
        verify_ms=_optional_number(record, "verify_ms"),
        texts=texts,
    )
    _check_tree(step)
    return step


def _check_tree(step: Step) -> None:
    num_rows = len(step.tokens)
    if not 1 <= num_rows <= MAX_ROWS:
        raise TraceError(f"{num_rows} rows; a tree has 1 to {MAX_ROWS}")
    for name in ("parents", "depths", "scores", "drawn"):
        if len(getattr(step, name)) != num_rows:
            raise TraceError(
                f"{name} has {len(getattr(step, name))} entries, tokens has {num_rows}"
            )
    if step.parents[0] != NO_PARENT or step.depths[0] != 0:
        raise TraceError("row 0 must be the root: parent -1, depth 0")
    for row in range(1, num_rows):
        parent, depth = step.parents[row], step.depths[row]
        if parent >= row:
            raise TraceError(f"row {row} has parent {parent}; parents come first")
        expected = 1 if parent == NO_PARENT else step.depths[parent] + 1
        if depth != expected:
            raise TraceError(f"row {row} has depth {depth}, expected {expected}")
    if not step.path or step.path[0] != 0:
        raise TraceError("path must start at row 0")
    for parent, row in zip(step.path, step.path[1:], strict=False):
        if row >= num_rows or step.parents[row] != parent:
            raise TraceError(f"path goes from row {parent} to {row}, not its child")


def _shorten(value: object, limit: int = 40) -> str:
    text = repr(value) if not isinstance(value, str) else ascii(value)
    return text if len(text) <= limit else text[:limit] + "..."


def _get(record: Mapping[str, Any], name: str) -> Any:
    if name not in record:
        raise TraceError(f"{name} is missing")
    return record[name]


def _string(record: Mapping[str, Any], name: str) -> str:
    value = _get(record, name)
    if not isinstance(value, str):
        raise TraceError(f"{name} must be a string, found {_shorten(value)}")
    return value


def _is_int(value: object, low: int) -> bool:
    return type(value) is int and low <= value <= _MAX_INT


def _integer(record: Mapping[str, Any], name: str, low: int) -> int:
    value = _get(record, name)
    if not _is_int(value, low):
        raise TraceError(f"{name} must be a whole number >= {low}: {_shorten(value)}")
    return int(value)


def _integers(record: Mapping[str, Any], name: str, low: int) -> tuple[int, ...]:
    value = _get(record, name)
    if not isinstance(value, list) or not all(_is_int(v, low) for v in value):
        raise TraceError(f"{name} must be a list of whole numbers >= {low}")
    return tuple(value)


def _is_number(value: object) -> bool:
    # The comparison also refuses infinities, NaN and integers no float can hold.
    return type(value) in (int, float) and -1e15 <= value <= 1e15  # type: ignore[operator]


def _number(record: Mapping[str, Any], name: str) -> float:
    value = _get(record, name)
    if not _is_number(value):
        raise TraceError(f"{name} must be a number, found {_shorten(value)}")
    return float(value)


def _optional_number(record: Mapping[str, Any], name: str) -> float | None:
    return None if record.get(name) is None else _number(record, name)


def _scores(record: Mapping[str, Any]) -> tuple[float | None, ...]:
    value = _get(record, "scores")
    if not isinstance(value, list) or not all(
        v is None or _is_number(v) for v in value
    ):
        raise TraceError("scores must be a list of log-probabilities or null")
    return tuple(None if v is None else float(v) for v in value)


def _mapping(
    record: Mapping[str, Any], name: str, optional: bool = False
) -> dict[str, Any]:
    value = record.get(name, {}) if optional else _get(record, name)
    if not isinstance(value, dict):
        raise TraceError(f"{name} must be an object, found {_shorten(value)}")
    return value
