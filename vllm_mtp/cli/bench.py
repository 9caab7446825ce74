"""``vllm-mtp bench``: drive a running server over concurrencies."""

import asyncio
import platform
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from vllm_mtp.bench.client import Answer, Client, Sampling
from vllm_mtp.bench.prompts import load_prompts
from vllm_mtp.bench.report import make_row, read_counters
from vllm_mtp.cli.common import AsJson, OutputFile, deliver, parse_counts


def bench(
    url: Annotated[str, typer.Argument(help="Address, as http://localhost:8000.")],
    concurrency: Annotated[
        str, typer.Option(help="Requests at a time, one round for each.")
    ] = "1,2,4,8,16",
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests of a round; default: 4 per concurrency."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each answer.")
    ] = 128,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    stop_at_eos: Annotated[
        bool,
        typer.Option(
            "--stop-at-eos",
            help="Let answers end by themselves; otherwise all have --max-tokens.",
        ),
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts, one a line, or .jsonl; default: a built-in mix."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name; default: the server's first.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True)
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds without an answer before giving up.")
    ] = 600.0,
    output: OutputFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure latency, throughput and accept length of a running server.

    Each round keeps so many requests running and reports the time to the first token
    (TTFT), the time per token after it (TPOT, a chunk may bring several), tokens per
    second of all requests together, and the accept length from the server's counters,
    which nobody else should be using meanwhile. One request runs before, unmeasured.

    Works with any OpenAI-compatible server; accept length needs vLLM's /metrics. Run it
    with and without speculation to compare. The exit code is 1 if a request failed.

    Examples:

      vllm-mtp bench http://localhost:8000

      vllm-mtp bench http://localhost:8000 --concurrency 1,8,64 --output tree.json
    """
    rounds = parse_counts("--concurrency", concurrency)
    texts = load_prompts(prompts)
    sampling = Sampling(max_tokens, temperature, ignore_eos=not stop_at_eos)
    client = Client(url, api_key, timeout)
    record = asyncio.run(_run(client, texts, rounds, requests, sampling, model))
    deliver(record, output, as_json, lambda: Console().print(_table(record)))
    if any(row["failed"] for row in record["rows"]):
        Console(stderr=True).print(
            f"Some requests failed, first: {record['first_error']}", markup=False
        )
        raise typer.Exit(1)


async def _run(
    client: Client,
    prompts: list[str],
    rounds: list[int],
    num_requests: int | None,
    sampling: Sampling,
    model: str | None,
) -> dict[str, Any]:
    """All rounds, with a progress bar on a terminal."""
    answers: list[Answer] = []
    rows = []
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn())
    try:
        model = model or await client.model()
        await client.complete(model, prompts[0], sampling)
        with Progress(
            *columns, TimeElapsedColumn(), console=Console(stderr=True)
        ) as progress:
            for width in rounds:
                total = num_requests or 4 * width
                task = progress.add_task(f"{width} at a time", total=total)

                def advance(answer: Answer, task: Any = task) -> None:
                    answers.append(answer)
                    progress.advance(task)

                before = read_counters(await client.metrics())
                result = await client.run_round(
                    model, prompts, width, total, sampling, advance
                )
                after = read_counters(await client.metrics())
                rows.append(make_row(result, before, after))
    finally:
        await client.close()
    return {
        "url": client.url,
        "model": model,
        "created": round(time.time(), 3),
        "client": platform.platform(),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "ignore_eos": sampling.ignore_eos,
        "first_error": next((a.error for a in answers if a.error), None),
        "rows": rows,
    }


def _table(record: dict[str, Any]) -> Table:
    table = Table(
        title=f"{record['model']} at {record['url']}",
        caption="TTFT and TPOT: ms, p50 / p99; nodes: verified a step",
        box=None,
        padding=(0, 2, 0, 0),
    )
    names = ("load", "reqs", "failed", "tokens/s", "TTFT", "TPOT", "accept", "nodes")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in record["rows"]:
        table.add_row(
            *(str(row[key]) for key in ("concurrency", "requests", "failed")),
            _number(row["tokens_per_s"], 1),
            *(_pair(row[key]) for key in ("ttft_ms", "tpot_ms")),
            _number(row["accept_length"], 3),
            _number(row["nodes_per_step"], 2),
        )
    return table


def _pair(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    digits = 0 if spread["p99"] >= 100 else 1
    return f"{spread['p50']:.{digits}f} / {spread['p99']:.{digits}f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
