"""Requests to a server: a fixed number at a time, each timed token by token."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_mtp.config import SettingsError


@dataclass(frozen=True)
class Sampling:
    """What every request asks for."""

    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = True


@dataclass
class Answer:
    """One request's times, in seconds, and what came of it."""

    begin: float
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    error: str | None = None

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first token."""
        return None if self.first is None else 1e3 * (self.first - self.begin)

    @property
    def tpot_ms(self) -> float | None:
        """Time per token after the first. A chunk may hold several tokens."""
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return 1e3 * (self.last - self.first) / (self.tokens - 1)


@dataclass
class Round:
    """The answers of one concurrency."""

    concurrency: int
    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)


class Client:
    """An OpenAI-compatible server at ``url``, with or without ``/v1`` at its end."""

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        try:
            import httpx
        except ImportError as error:
            raise SettingsError("bench needs httpx: pip install httpx.") from error
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._errors = (httpx.HTTPError, httpx.InvalidURL, ValueError)
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=timeout,
            limits=httpx.Limits(max_connections=None),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def model(self) -> str:
        """The first model that the server offers.

        Raises:
            SettingsError: nobody answers there, or not like such a server.
        """
        try:
            answer = await self._http.get(f"{self.url}/v1/models")
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (*self._errors, KeyError, IndexError, TypeError) as error:
            raise SettingsError(
                f"{self.url}: no OpenAI-compatible server answers there ({error}). "
                "Give the address as in http://localhost:8000."
            ) from error

    async def metrics(self) -> str:
        """The Prometheus page; empty if there is none."""
        try:
            answer = await self._http.get(f"{self.url}/metrics")
            answer.raise_for_status()
        except self._errors:
            return ""
        return answer.text

    async def complete(self, model: str, prompt: str, sampling: Sampling) -> Answer:
        """Stream one completion; what goes wrong stands in ``Answer.error``."""
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if sampling.ignore_eos:
            body["ignore_eos"] = True
        answer = Answer(time.perf_counter())
        url = f"{self.url}/v1/completions"
        try:
            async with self._http.stream("POST", url, json=body) as stream:
                if stream.status_code != 200:
                    text = (await stream.aread()).decode(errors="replace")
                    answer.error = f"HTTP {stream.status_code}: {text[:200]}"
                    return answer
                async for line in stream.aiter_lines():
                    _take_line(answer, line)
        except self._errors as error:
            answer.error = f"{type(error).__name__}: {error}"
        if answer.error is None and not answer.tokens:
            answer.error = "the stream ended without tokens"
        return answer

    async def run_round(
        self,
        model: str,
        prompts: Sequence[str],
        concurrency: int,
        num_requests: int,
        sampling: Sampling,
        done: Callable[[Answer], None],
    ) -> Round:
        """Keep ``concurrency`` requests running until ``num_requests`` are answered."""
        result = Round(concurrency)
        queue = iter(itertools.islice(itertools.cycle(prompts), num_requests))

        async def work() -> None:
            for prompt in queue:
                answer = await self.complete(model, prompt, sampling)
                result.answers.append(answer)
                done(answer)

        begin = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        result.seconds = time.perf_counter() - begin
        return result


def _take_line(answer: Answer, line: str) -> None:
    """Take in a line of the event stream."""
    if not line.startswith("data:") or line.endswith("[DONE]"):
        return
    event: Any = json.loads(line.removeprefix("data:"))
    if "error" in event:
        answer.error = str(event["error"])[:200]
        return
    if event.get("choices"):
        answer.last = time.perf_counter()
        answer.first = answer.first or answer.last
    if usage := event.get("usage"):
        answer.tokens = int(usage["completion_tokens"])
