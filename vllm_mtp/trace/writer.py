"""Writing a trace from a worker process without ever holding up or failing a step.

The engine's thread only puts an object into a bounded queue. Turning it into JSON and
writing it happen in a thread of their own. Whatever goes wrong there (a full disk, no
permission, a tokenizer that fails) ends the trace with one warning.
"""

import atexit
import contextlib
import logging
import os
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from vllm_mtp.trace.schema import (
    Header,
    Step,
    dump_line,
    header_to_json,
    step_to_json,
)
from vllm_mtp.trace.settings import TraceSettings
from vllm_mtp.tree.layout import NO_PARENT

# Below vLLM's own logger, which is the one that has handlers.
logger = logging.getLogger("vllm." + __name__)

_CLOSE_TIMEOUT_S = 5.0
_TEXT_CACHE = 1 << 16


@dataclass(frozen=True)
class TreeStep:
    """Host copies of one verify pass; the arrays must not change after ``write``."""

    step: int
    request_ids: Sequence[str]
    # [num_reqs], rows verified, root included; 1: no drafts
    num_rows: npt.NDArray[Any]
    # [num_reqs], sequence position of the root
    positions: npt.NDArray[Any]
    # [num_reqs, 1 + N] each; entries past num_rows are ignored
    tokens: npt.NDArray[Any]
    parents: npt.NDArray[Any]
    depths: npt.NDArray[Any]
    # [num_reqs, 1 + N], cumulative log-probability, -inf for padding
    scores: npt.NDArray[Any]
    # [num_reqs, 1 + N], the token the target's sampler drew at each row
    drawn: npt.NDArray[Any]
    # [num_reqs, 1 + N], accepted rows, root first; valid up to num_emitted
    path: npt.NDArray[Any]
    # [num_reqs]
    num_emitted: npt.NDArray[Any]
    # milliseconds of the pass, if known
    draft_ms: float | None = None
    verify_ms: float | None = None
    time: float = field(default_factory=time.time)

    def record(self, r: int, texts: Callable[[Sequence[int]], dict[int, str]]) -> Step:
        """The tree of batch row ``r``."""
        rows, emitted = int(self.num_rows[r]), int(self.num_emitted[r])
        tokens = self.tokens[r, :rows].tolist()
        drawn = self.drawn[r, :rows].tolist()
        parents = self.parents[r, :rows].tolist()
        depths = self.depths[r, :rows].tolist()
        scores = [
            round(s, 5) if np.isfinite(s) else None
            for s in self.scores[r, :rows].tolist()
        ]
        # Without drafts, what the buffers hold for the root is left from other steps.
        parents[0], depths[0], scores[0] = NO_PARENT, 0, 0.0
        return Step(
            request=self.request_ids[r],
            step=self.step,
            time=round(self.time, 6),
            batch=len(self.request_ids),
            position=int(self.positions[r]),
            tokens=tuple(tokens),
            parents=tuple(parents),
            depths=tuple(depths),
            scores=tuple(scores),
            drawn=tuple(drawn),
            path=tuple(self.path[r, :emitted].tolist()),
            draft_ms=self.draft_ms,
            verify_ms=self.verify_ms,
            texts=texts(tokens + drawn),
        )


class TraceWriter:
    """Writes sampled verify passes to a trace file. Thread-safe; never raises."""

    def __init__(
        self,
        settings: TraceSettings,
        model: str,
        tree_settings: Mapping[str, Any],
        versions: Mapping[str, str],
        decode: Callable[[int], str] | None = None,
    ) -> None:
        """Start the writing thread; the file is opened there.

        Args:
            settings: where and how much to write.
            model: name for the header.
            tree_settings: the settings of the trees, for the header.
            versions: name to version, for the header.
            decode: text of one token id, called in the writing thread; None writes ids
                only.
        """
        self.settings = settings
        self._header = Header(
            run=secrets.token_hex(8),
            created=round(time.time(), 3),
            model=model,
            settings={
                **tree_settings,
                "trace": {
                    "every": settings.every,
                    "max_requests": settings.max_requests,
                },
            },
            versions=dict(versions),
        )
        self._decode = decode if settings.text else None
        self._queue: queue.Queue[_Item | None] = queue.Queue(settings.queue_size)
        self._alive = True
        self._dropped = 0
        self._thread = threading.Thread(
            target=self._run, name="vllm-mtp-trace", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    def wants(self, step: int) -> bool:
        """Whether this pass is to be recorded; ask before copying anything."""
        return self._alive and step % self.settings.every == 0

    def write(self, step: "TreeStep | Callable[[], TreeStep]") -> None:
        """Queue a pass, or a function that waits for its copies and returns it.

        Returns at once. A function runs in the writing thread.
        """
        self._put(step)

    def prompt(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Offer a prompt; it is ignored unless ``prompt_text`` was asked for."""
        if self.settings.prompt_text:
            self._put((request_id, tuple(token_ids)))

    def close(self, timeout: float = _CLOSE_TIMEOUT_S) -> None:
        """Write what is queued and close the file; further calls do nothing."""
        atexit.unregister(self.close)
        self._alive = False
        if not self._thread.is_alive():
            return
        # A full queue means that the thread is stuck or slow: wait for a place.
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout)
            self._thread.join(timeout)

    def _put(self, item: "_Item") -> None:
        if not self._alive:
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._dropped += 1

    def _run(self) -> None:
        lines = _Lines(self.settings, self._header, self._decode)
        try:
            lines.open()
            while (item := self._queue.get()) is not None:
                lines.add_dropped(self._dropped)
                if isinstance(item, tuple):
                    lines.offer_prompt(*item)
                else:
                    lines.add_step(item if isinstance(item, TreeStep) else item())
                if self._queue.empty():
                    lines.flush()
            lines.add_dropped(self._dropped)
        # Anything at all: the engine goes on without its trace.
        except Exception as error:
            logger.warning(
                "The trace to %s ends here, the engine goes on without it: %s: %s",
                self.settings.path,
                type(error).__name__,
                error,
            )
        finally:
            self._alive = False
            lines.close()
            with contextlib.suppress(queue.Empty):
                while True:
                    self._queue.get_nowait()


_Item = TreeStep | Callable[[], TreeStep] | tuple[str, tuple[int, ...]]


class _Lines:
    """The file side of the writer; lives in the writing thread and may raise."""

    def __init__(
        self,
        settings: TraceSettings,
        header: Header,
        decode: Callable[[int], str] | None,
    ) -> None:
        self._settings = settings
        self._header = header
        self._decode = decode
        self._texts: dict[int, str] = {}
        self._file: BinaryIO | None = None
        self._size = 0
        self._rotated = False
        self._dropped = 0
        self._followed: list[str] = []
        self._prompts: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def open(self) -> None:
        """Start a file; one that is there, from an earlier run or full, becomes .1."""
        path = Path(self._settings.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            os.replace(path, path.with_name(path.name + ".1"))
        # Readable by the owner only: it holds what the model wrote.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._file = os.fdopen(fd, "wb")
        self._size = 0
        self.add(header_to_json(self._header))
        self.flush()

    def add(self, line: str) -> None:
        """Write a line, in a new file when it would not fit into this one."""
        assert self._file is not None, "opened before the first line"
        data = line.encode() + b"\n"
        if self._size and self._size + len(data) > self._settings.max_bytes // 2:
            self._rotate()
        self._file.write(data)
        self._size += len(data)

    def _rotate(self) -> None:
        if not self._rotated:
            logger.info(
                "The trace %s reached half of max_bytes=%d: older steps are kept in "
                "%s.1 and from now on overwritten.",
                self._settings.path,
                self._settings.max_bytes,
                self._settings.path,
            )
        self._rotated = True
        self.close()
        self.open()

    def add_step(self, step: TreeStep) -> None:
        """Write the trees of the requests that are followed."""
        present = set(step.request_ids)
        self._followed = [r for r in self._followed if r in present]
        for request in step.request_ids:
            if len(self._followed) == self._settings.max_requests:
                break
            if request not in self._followed:
                self._followed.append(request)
                self._add_prompt(request)
        followed = set(self._followed)
        for r, request in enumerate(step.request_ids):
            if request in followed and step.num_emitted[r] > 0:
                self.add(step_to_json(step.record(r, self._text_of)))

    def add_dropped(self, total: int) -> None:
        """Write how many passes were dropped since the last time; none: nothing."""
        new, self._dropped = total - self._dropped, total
        if new:
            self.add(dump_line({"kind": "dropped", "count": new}))

    def offer_prompt(self, request: str, tokens: tuple[int, ...]) -> None:
        """Keep a prompt until its request is followed; bounded, oldest out first."""
        self._prompts[request] = tokens
        while len(self._prompts) > 4 * self._settings.max_requests:
            self._prompts.popitem(last=False)

    def _add_prompt(self, request: str) -> None:
        tokens = self._prompts.pop(request, None)
        if tokens is None:
            return
        record = {"kind": "prompt", "request": request, "tokens": tokens}
        texts = self._text_of(tokens)
        if texts:
            record["text"] = "".join(texts[token] for token in tokens)
        self.add(dump_line(record))

    def _text_of(self, tokens: Sequence[int]) -> dict[int, str]:
        if self._decode is None:
            return {}
        if len(self._texts) > _TEXT_CACHE:
            self._texts.clear()
        for token in tokens:
            if token >= 0 and token not in self._texts:
                self._texts[token] = self._decode(token)
        return {token: self._texts[token] for token in tokens if token >= 0}

    def flush(self) -> None:
        """Hand the lines to the system, so that a killed process loses none."""
        assert self._file is not None, "opened before the first line"
        self._file.flush()

    def close(self) -> None:
        """Close the file, if one is open; a failing disk was reported before."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def token_decoder(tokenizer: str | Path) -> Callable[[int], str]:
    """Text of single token ids from a tokenizer folder, loaded at the first call.

    Reads ``tokenizer.json`` where there is one, else asks transformers.
    """
    loaded: list[Callable[[int], str]] = []

    def decode(token: int) -> str:
        if not loaded:
            loaded.append(_load_decoder(str(tokenizer)))
        return loaded[0](token)

    return decode


def _load_decoder(tokenizer: str) -> Callable[[int], str]:
    file = Path(tokenizer) / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(file))
        return lambda token: str(fast.decode([token], skip_special_tokens=False))
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(tokenizer)
    return lambda token: str(slow.decode([token]))
