"""A trace comes back as written; anything that does not hold together is refused."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.traces import HOSTILE, make_step, make_steps, write_trace
from vllm_mtp.trace.load import TraceError, load_trace
from vllm_mtp.trace.schema import Header, header_to_json, step_to_json

GOOD = make_step(random.Random(0))


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 4, 7), (5, 8, 32), (3, 8, 63)])
def test_steps_come_back_as_written(
    tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    steps = make_steps(20, ("a", "b"), shape, plain_every=4)
    trace = load_trace(write_trace(tmp_path / "t.jsonl", steps))
    assert list(trace.steps) == steps
    assert trace.requests == ("a", "b")
    assert trace.notes == ()
    for step in trace.steps:
        assert len(step.emitted) == step.num_accepted + 1


def test_hostile_text_stays_on_its_line(tmp_path: Path) -> None:
    steps = make_steps(10, ("\n\u2028\ud800",), texts=HOSTILE)
    path = write_trace(tmp_path / "t.jsonl", steps)
    assert path.read_bytes().isascii()
    assert path.read_bytes().count(b"\n") == 11
    assert list(load_trace(path).steps) == steps


def test_padding_rows_are_no_nodes(tmp_path: Path) -> None:
    step = replace(
        GOOD,
        parents=(*GOOD.parents[:-1], -1),
        depths=(*GOOD.depths[:-1], 1),
        scores=(*GOOD.scores[:-1], None),
        path=(0,),
    )
    (loaded,) = load_trace(write_trace(tmp_path / "t.jsonl", [step])).steps
    assert loaded.num_nodes == GOOD.num_nodes - 1


def test_cut_last_line_is_left_out_with_a_note(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", make_steps(3))
    path.write_bytes(path.read_bytes()[:-20])
    trace = load_trace(path)
    assert len(trace.steps) == 2
    assert "cut off" in trace.notes[0]


BAD_FIELDS: dict[str, dict[str, Any]] = {
    "parent after child": {"parents": [-1, 2, 0, 1, 1, 2, 3, 0]},
    "root with parent": {"parents": [0, *GOOD.parents[1:]]},
    "wrong depth": {"depths": [0, *[9] * 7]},
    "lengths differ": {"drawn": [1, 2]},
    "no rows": {k: [] for k in ("tokens", "parents", "depths", "scores", "drawn")},
    "65 rows": {"tokens": [1] * 65},
    "path not from root": {"path": [1]},
    "path leaves the tree": {"path": [0, 99]},
    "path jumps": {"path": [0, max(r for r in range(8) if GOOD.parents[r] != 0)]},
    "empty path": {"path": []},
    "text for a word": {"texts": {"x": "y"}},
    "number for text": {"texts": {"1": 2}},
    "bool for int": {"step": True},
    "negative step": {"step": -1},
    "huge token": {"tokens": [10**400] * 8},
    "huge score": {"scores": [-(10**400)] * 8},
    "string for list": {"scores": "0"},
    "null request": {"request": None},
    "unknown kind": {"kind": "tree"},
    "object for time": {"time": {}},
}


@pytest.mark.parametrize("change", BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_inconsistent_step_is_refused_with_its_line(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path = write_trace(tmp_path / "t.jsonl", [GOOD])
    record = json.loads(step_to_json(GOOD)) | change
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    with pytest.raises(TraceError, match=r"t\.jsonl:3: \w"):
        load_trace(path)


@pytest.mark.parametrize("name", ["request", "tokens", "scores", "path", "batch"])
def test_missing_field_is_named(tmp_path: Path, name: str) -> None:
    path = write_trace(tmp_path / "t.jsonl", [GOOD])
    record = json.loads(step_to_json(GOOD))
    del record[name]
    path.write_text(path.read_text() + json.dumps(record) + "\n")
    with pytest.raises(TraceError, match=f":3: {name} is missing"):
        load_trace(path)


BAD_LINES = {
    "not JSON": b"hello",
    "not an object": b"[1, 2]",
    "NaN": b'{"kind": "step", "time": NaN}',
    "infinity": b'{"kind": "step", "time": -Infinity}',
    "not UTF-8": b'{"kind": "\xff"}',
    "deep": b"[" * 100_000,
    "long number": b'{"kind": "dropped", "count": ' + b"9" * 5000 + b"}",
    "pickle": b"\x80\x04\x95\x00",
    "blank": b"",
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_line_that_is_no_record_is_refused(tmp_path: Path, line: bytes) -> None:
    path = write_trace(tmp_path / "t.jsonl", [GOOD])
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(TraceError, match=":3: "):
        load_trace(path)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(path)
    path.write_text("")
    with pytest.raises(TraceError, match="empty"):
        load_trace(path)
    path.write_text('{"kind":"head')
    with pytest.raises(TraceError, match="header line is cut off"):
        load_trace(path)
    path.write_text(step_to_json(GOOD) + "\n")
    with pytest.raises(TraceError, match="no header"):
        load_trace(path)
    path.write_bytes(b"x" * (9 << 20))
    with pytest.raises(TraceError, match="longer than"):
        load_trace(path)


def test_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    header = Header("r", 0.0, "m", {}, {}, schema=2)
    path.write_text(header_to_json(header) + "\n")
    with pytest.raises(TraceError, match=r"schema version 2, this vllm_mtp reads up"):
        load_trace(path)


def test_older_part_is_joined_only_if_it_is_of_the_same_run(tmp_path: Path) -> None:
    steps = make_steps(10)
    path = write_trace(tmp_path / "t.jsonl", steps[5:])
    older = write_trace(tmp_path / "t.jsonl.1", steps[:5])
    assert list(load_trace(path).steps) == steps
    older.write_text(older.read_text().replace("run-0", "run-1", 1))
    assert list(load_trace(path).steps) == steps[5:]
    older.write_text("broken")
    trace = load_trace(path)
    assert list(trace.steps) == steps[5:]
    assert "older part was left out" in trace.notes[0]
