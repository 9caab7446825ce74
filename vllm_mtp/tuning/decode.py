"""Times decoding in a running engine: a steady batch, nothing but decode steps."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

_request_ids = count()


@dataclass
class Window:
    """What happened while every request of a batch was decoding."""

    tokens: int = 0
    passes: int = 0
    """Verify passes, one a request and step."""

    steps: int = 0
    seconds: float = 0.0
    ids: list[list[int]] = field(default_factory=list)
    """All tokens of each request, those outside the window too."""

    @property
    def accept_length(self) -> float:
        """Tokens a request emits in a step."""
        return self.tokens / max(self.passes, 1)

    @property
    def tokens_per_second(self) -> float:
        """Of the whole batch."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def step_ms(self) -> float:
        """Wall time of a step."""
        return 1e3 * self.seconds / max(self.steps, 1)

    def add(self, other: "Window") -> None:
        """Take another batch of the same size into account."""
        self.tokens += other.tokens
        self.passes += other.passes
        self.steps += other.steps
        self.seconds += other.seconds
        self.ids += other.ids


def streamed(temperature: float, seed: int, num_tokens: int) -> SamplingParams:
    """So many tokens whatever they are, each step's as they come."""
    return SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def name_of(output: Any) -> str:
    """The request's id as it was given: vLLM may have made it unique with a suffix."""
    return str(output.request_id).split("-")[0]


def decode(
    llm: Any,
    prompts: Sequence[list[int]],
    temperature: float,
    num_tokens: int,
    observe: Callable[[int], None] | None = None,
) -> Window:
    """Run the prompts as one batch and time its steady part.

    That begins when each request has its first token and ends with the step before the
    first request finishes. Prompts should be in the prefix cache. ``observe`` is told
    the number of each step in the window, from 1.
    """
    engine = llm.llm_engine
    order: dict[str, int] = {}
    for index, prompt in enumerate(prompts):
        request_id = str(next(_request_ids))
        order[request_id] = index
        params = streamed(temperature, index, num_tokens)
        engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
    window = Window(ids=[[] for _ in prompts])
    started: float | None = None
    is_open = True
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        new = 0
        for output in outputs:
            ids = list(output.outputs[0].token_ids)
            window.ids[order[name_of(output)]] += ids
            new += len(ids)
        if not outputs:
            continue
        is_open = is_open and not any(output.finished for output in outputs)
        if started is None:
            if all(window.ids):
                started = now
        elif is_open:
            window.tokens += new
            window.passes += len(outputs)
            window.steps += 1
            window.seconds = now - started
            if observe is not None:
                observe(window.steps)
    return window


def decode_rounds(
    llm: Any,
    prompts: Sequence[list[int]],
    batch: int,
    rounds: int,
    temperature: float,
    num_tokens: int,
    observe: Callable[[int], None] | None = None,
) -> Window:
    """Several batches one after the other, each of other prompts, as one window."""
    total = Window()
    for index in range(rounds):
        part = prompts[index * batch : (index + 1) * batch]
        total.add(decode(llm, part, temperature, num_tokens, observe))
    return total


def same_share(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> float:
    """Share of tokens before the first difference of each pair of sequences."""
    same = total = 0
    for left, right in zip(ours, theirs, strict=True):
        length = min(len(left), len(right))
        pairs = zip(left, right, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), length)
        same += first
        total += length
    return same / max(total, 1)
