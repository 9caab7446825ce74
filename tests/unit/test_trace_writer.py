"""The writer never holds up or fails the engine, and keeps within its bounds."""

import logging
import os
import random
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.traces import make_step, plain_step
from vllm_mtp.config import SettingsError
from vllm_mtp.trace.load import load_trace
from vllm_mtp.trace.schema import Step
from vllm_mtp.trace.settings import TraceSettings
from vllm_mtp.trace.writer import TraceWriter, TreeStep, token_decoder

ROWS = 8


def pack(steps: Sequence[Step], number: int = 0) -> TreeStep:
    """The batch a worker would hand over; entries nobody may read are absurd."""

    def grid(name: str, filler: float, dtype: type) -> Any:
        out = np.full((len(steps), ROWS), filler, dtype)
        for r, step in enumerate(steps):
            values = getattr(step, name)
            out[r, : len(values)] = values
        return out

    return TreeStep(
        step=number,
        request_ids=[step.request for step in steps],
        num_rows=np.array([len(step.tokens) for step in steps], np.int32),
        positions=np.array([step.position for step in steps], np.int64),
        tokens=grid("tokens", -7, np.int64),
        parents=grid("parents", 77, np.int32),
        depths=grid("depths", 77, np.int32),
        scores=grid("scores", np.nan, np.float32),
        drawn=grid("drawn", -7, np.int64),
        path=grid("path", 77, np.int32),
        num_emitted=np.array([len(step.path) for step in steps], np.int32),
        draft_ms=1.5,
        verify_ms=20.25,
        time=1_700_000_000.5,
    )


def steps_of(*requests: str, seed: int = 0) -> list[Step]:
    rng = random.Random(seed)
    return [make_step(rng, 0, request) for request in requests]


def start(
    path: Path, decode: Callable[[int], str] | None = None, **settings: Any
) -> TraceWriter:
    return TraceWriter(
        TraceSettings(str(path), **settings),
        model="tiny",
        tree_settings={"num_steps": 3},
        versions={"vllm": "0.32.0"},
        decode=decode,
    )


def test_written_steps_load_as_they_were(tmp_path: Path) -> None:
    first, second = steps_of("a", "b")
    writer = start(tmp_path / "new" / "t.jsonl", decode=lambda token: f"<{token}>")
    writer.write(pack([first, plain_step(second)], number=5))
    writer.close()
    trace = load_trace(tmp_path / "new" / "t.jsonl")
    assert trace.header.model == "tiny"
    assert trace.header.settings["num_steps"] == 3
    one, two = trace.steps
    assert one == replace(
        first,
        step=5,
        time=1_700_000_000.5,
        batch=2,
        scores=one.scores,
        draft_ms=1.5,
        verify_ms=20.25,
        texts={token: f"<{token}>" for token in {*first.tokens, *first.drawn}},
    )
    assert one.scores == pytest.approx(first.scores, abs=1e-4)
    assert (two.tokens, two.path) == (second.tokens[:1], (0,))


def test_root_only_rows_ignore_what_is_left_in_the_buffers(tmp_path: Path) -> None:
    """A request without drafts leaves the tree of an earlier step in its slot."""
    (step,) = steps_of("a")
    batch = pack([plain_step(step)])
    batch.parents[0, 0], batch.depths[0, 0], batch.scores[0, 0] = 3, 2, -5.0
    writer = start(tmp_path / "t.jsonl")
    writer.write(batch)
    writer.close()
    (loaded,) = load_trace(tmp_path / "t.jsonl").steps
    assert (loaded.parents, loaded.depths, loaded.scores) == ((-1,), (0,), (0.0,))


def test_padding_and_prefilling_requests(tmp_path: Path) -> None:
    padded, prefilling = steps_of("a", "b")
    batch = pack([padded, prefilling])
    batch.parents[0, 7], batch.depths[0, 7], batch.scores[0, 7] = -1, 1, -np.inf
    batch.path[0, 1:], batch.num_emitted[0] = 77, 1
    batch.num_emitted[1] = 0
    writer = start(tmp_path / "t.jsonl")
    writer.write(batch)
    writer.close()
    (loaded,) = load_trace(tmp_path / "t.jsonl").steps
    assert loaded.scores[7] is None
    assert loaded.num_nodes == 6


def test_only_every_nth_pass_is_wanted(tmp_path: Path) -> None:
    writer = start(tmp_path / "t.jsonl", every=3)
    assert [n for n in range(8) if writer.wants(n)] == [0, 3, 6]
    writer.close()
    assert not writer.wants(0)


def test_next_request_is_followed_when_one_ends(tmp_path: Path) -> None:
    writer = start(tmp_path / "t.jsonl", max_requests=2)
    for number, present in enumerate(["abc", "abc", "bc", "bcd", "d"]):
        writer.write(pack(steps_of(*present), number))
    writer.close()
    seen = [(s.step, s.request) for s in load_trace(tmp_path / "t.jsonl").steps]
    assert seen == [
        (n, r) for n, rs in enumerate(["ab", "ab", "bc", "bc", "d"]) for r in rs
    ]


def test_prompts_are_written_only_if_asked_for(tmp_path: Path) -> None:
    for asked in (False, True):
        path = tmp_path / f"{asked}.jsonl"
        writer = start(path, decode=lambda token: f"secret{token}", prompt_text=asked)
        for n in range(100):
            writer.prompt(f"other-{n}", [1] * 10)
        writer.prompt("a", [90001, 90002])
        writer.write(pack(steps_of("a")))
        writer.close()
        trace = load_trace(path)
        assert ("90001" in path.read_text()) is asked
        assert [p.text for p in trace.prompts.values()] == (
            ["secret90001secret90002"] if asked else []
        )


def test_text_off_writes_ids_only(tmp_path: Path) -> None:
    writer = start(tmp_path / "t.jsonl", decode=lambda token: "secret", text=False)
    writer.write(pack(steps_of("a")))
    writer.close()
    assert "secret" not in (tmp_path / "t.jsonl").read_text()


def test_size_stays_bounded_and_the_newest_steps_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, limit = tmp_path / "t.jsonl", 1 << 16
    with caplog.at_level(logging.INFO, "vllm.vllm_mtp.trace"):
        writer = start(path, max_bytes=limit, queue_size=5000)
        for number in range(1000):
            writer.write(pack(steps_of("a", seed=number), number))
        writer.close()
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files == ["t.jsonl", "t.jsonl.1"]
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= limit
    numbers = [step.step for step in load_trace(path).steps]
    assert numbers == list(range(numbers[0], 1000))
    assert len(numbers) > 50
    assert len([r for r in caplog.records if "max_bytes" in r.message]) == 1


def test_trace_of_an_earlier_run_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for request in ("old", "new"):
        writer = start(path)
        writer.write(pack(steps_of(request)))
        writer.close()
    assert load_trace(path).requests == ("new",)
    assert load_trace(tmp_path / "t.jsonl.1").requests == ("old",)


def test_file_is_private_and_flushed_while_running(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    writer = start(path)
    writer.write(pack(steps_of("a")))
    wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") == 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    writer.close()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def test_engine_does_not_wait_for_a_stuck_disk(tmp_path: Path) -> None:
    """Passes beyond the queue are dropped and counted, at once."""
    go = threading.Event()
    batch = pack(steps_of("a"))

    def stuck() -> TreeStep:
        go.wait(10)
        return batch

    writer = start(tmp_path / "t.jsonl", queue_size=4)
    writer.write(stuck)
    wait_for(lambda: writer._queue.empty())
    began = time.monotonic()
    for _ in range(1000):
        writer.write(batch)
    assert time.monotonic() - began < 1.0
    go.set()
    writer.close()
    trace = load_trace(tmp_path / "t.jsonl")
    assert (len(trace.steps), trace.dropped) == (5, 996)


def refuse(*_: object) -> str:
    raise RuntimeError("no such token")


def broken(path: Path, cause: str, monkeypatch: pytest.MonkeyPatch) -> TraceWriter:
    if cause == "no permission":
        monkeypatch.setattr(os, "open", _raise(PermissionError(13, "denied")))
    if cause == "folder in the way":
        path.mkdir()
    if cause == "file for a folder":
        path.write_text("")
        path = path / "t.jsonl"
    if cause == "disk full":
        path = Path("/dev/full")
    return start(path, decode=refuse if cause == "tokenizer" else None)


def _raise(error: Exception) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


@pytest.mark.parametrize(
    "cause",
    [
        "no permission",
        "folder in the way",
        "file for a folder",
        "disk full",
        "tokenizer",
        "copy",
        "arrays",
    ],
)
def test_whatever_breaks_ends_the_trace_with_one_warning(
    tmp_path: Path,
    cause: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.vllm_mtp.trace"):
        writer = broken(tmp_path / "t.jsonl", cause, monkeypatch)
        batch = pack(steps_of("a"))
        if cause == "copy":
            writer.write(_raise(RuntimeError("CUDA error")))
        elif cause == "arrays":
            writer.write(replace(batch, tokens=np.zeros(1)))
        writer.write(batch)
        wait_for(lambda: not writer.wants(0))
        for _ in range(1000):
            writer.write(batch)
            writer.prompt("a", [1])
        writer.close()
        writer.close()
    assert len(caplog.records) == 1, caplog.text
    assert "engine goes on without it" in caplog.text


def test_token_decoder_reads_the_embedded_tokenizer() -> None:
    pytest.importorskip("tokenizers")
    folder = Path(__file__).parents[2] / "examples" / "tiny_deepseek" / "model"
    decode = token_decoder(folder)
    assert [decode(token) for token in (260, 912)] != ["", ""]


def test_settings_take_a_file_name_or_an_object() -> None:
    assert TraceSettings.parse("t.jsonl") == TraceSettings("t.jsonl")
    full = TraceSettings("t.jsonl", every=4, prompt_text=True)
    assert TraceSettings.parse(full.to_dict()) == full


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"path": "t", "evry": 2}, "did you mean every"),
        ({"every": 2}, "needs the key path"),
        ({"path": ""}, "needs a file name"),
        ({"path": "t", "every": 0}, "1 or more"),
        ({"path": "t", "max_bytes": 10}, "65536 or more"),
        ({"path": "t", "text": 1}, "true or false"),
        (7, "file name or an object"),
    ],
)
def test_settings_that_cannot_work_are_refused(value: object, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        TraceSettings.parse(value)
