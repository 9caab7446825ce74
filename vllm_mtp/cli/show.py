"""``vllm-mtp show``: look at the draft trees of a trace."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from vllm_mtp.trace.draw import draw_step, printable
from vllm_mtp.trace.load import TraceError, load_trace
from vllm_mtp.trace.page import write_page
from vllm_mtp.trace.schema import Step, Trace
from vllm_mtp.trace.stats import Summary, summarize


def show(
    trace: Annotated[Path, typer.Argument(help="Trace file (JSON lines).")],
    request: Annotated[
        str | None,
        typer.Option(help="Only this request: its id, or a part that only it has."),
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Only the verify pass of this number.")
    ] = None,
    last: Annotated[
        bool, typer.Option("--last", help="Only the last step of each request.")
    ] = False,
    limit: Annotated[
        int, typer.Option(min=1, help="Draw at most this many trees.")
    ] = 5,
    summary: Annotated[
        bool, typer.Option("--summary", help="Figures only, no trees.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="OUT", help="Write one self-contained page instead."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Tokenizer folder, for a trace that was written without text."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of drawings.")
    ] = False,
) -> None:
    """Draw the draft trees of a trace, with what the target accepted.

    Each node shows its token, the drafter's estimate that it is accepted once its
    parent is, and after the slash the same for the whole path from the root. The root
    is the last token that was already certain; it is never counted as a draft. The
    accept length is the number of tokens a step emits: the accepted nodes and one more,
    which the target draws after them.

    Examples:

      vllm-mtp show trace.jsonl --last

      vllm-mtp show trace.jsonl --request cmpl-7 --step 120

      vllm-mtp show trace.jsonl --html trees.html
    """
    try:
        loaded = load_trace(trace)
        steps = _select(loaded, request, step, last)
    except TraceError as error:
        raise _fail(str(error)) from error
    if tokenizer is not None:
        steps = _add_texts(steps, tokenizer)
    if html is not None:
        try:
            size = write_page(loaded, steps, html)
        except OSError as error:
            raise _fail(f"{html}: cannot be written ({error.strerror}).") from error
        typer.echo(f"{html}: {len(steps)} steps, {size / 1e6:.1f} MB")
    elif as_json:
        typer.echo(json.dumps(_to_json(loaded, [] if summary else steps, steps)))
    else:
        _draw(loaded, steps, 0 if summary else limit)


def _select(
    trace: Trace, request: str | None, step: int | None, last: bool
) -> tuple[Step, ...]:
    steps = trace.steps
    if request is not None:
        found = _find_request(trace.requests, request)
        steps = tuple(s for s in steps if s.request == found)
    if step is not None:
        numbers = [s.step for s in steps]
        steps = tuple(s for s in steps if s.step == step)
        if not steps:
            where = f"{min(numbers)} to {max(numbers)}" if numbers else "none"
            raise TraceError(f"No step {step} in the trace; recorded: {where}.")
    if last:
        steps = tuple({s.request: s for s in steps}.values())
    return steps


def _find_request(requests: Sequence[str], wanted: str) -> str:
    if wanted in requests:
        return wanted
    found = [request for request in requests if wanted in request]
    if len(found) == 1:
        return found[0]
    names = [printable(name) for name in (found or requests)[:5]]
    more = ", ..." if len(found or requests) > 5 else ""
    what = "Several requests match" if found else "No request matches"
    raise TraceError(
        f"{what} {printable(wanted)!r}; choose one of: {', '.join(names)}{more}"
    )


def _add_texts(steps: Sequence[Step], tokenizer: Path) -> tuple[Step, ...]:
    from vllm_mtp.trace.writer import token_decoder

    if not tokenizer.exists():
        raise _fail(f"{tokenizer}: no such tokenizer folder.")
    decode = token_decoder(tokenizer)
    return tuple(
        replace(
            step, texts={t: decode(t) for t in {*step.tokens, *step.drawn} if t >= 0}
        )
        for step in steps
    )


def _to_json(trace: Trace, steps: Sequence[Step], counted: Sequence[Step]) -> Any:
    return {
        "header": asdict(trace.header),
        "summary": summarize(counted).to_dict(),
        "requests": list(dict.fromkeys(step.request for step in counted)),
        "dropped": trace.dropped,
        "notes": list(trace.notes),
        "steps": [{**asdict(step), "emitted": step.emitted} for step in steps],
    }


def _draw(trace: Trace, steps: Sequence[Step], limit: int) -> None:
    console = Console(highlight=False)
    for note in trace.notes:
        console.print(Text(f"note: {note}", "yellow"))
    shown = steps[-limit:] if limit else ()
    for step in shown:
        console.print(Group(_title(step), draw_step(step), Text()))
    console.print(_summary_table(trace, summarize(steps), len(steps)))
    if len(shown) < len(steps) and limit:
        console.print(
            Text(
                f"The last {len(shown)} of {len(steps)} steps; choose others with "
                "--request and --step, more with --limit, all in a page with --html.",
                "dim",
            )
        )


def _title(step: Step) -> Text:
    title = Text(f"step {step.step}", "bold")
    title.append(
        f"  request {printable(step.request)}, position {step.position}, "
        f"batch {step.batch}, {step.num_nodes} nodes, accept length {len(step.path)}",
        "default",
    )
    for name, value in (("draft", step.draft_ms), ("verify", step.verify_ms)):
        if value is not None:
            title.append(f", {name} {value:.1f} ms")
    return title


def _summary_table(trace: Trace, summary: Summary, num_steps: int) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("model", Text(printable(trace.header.model)))
    table.add_row(
        "steps", f"{num_steps} ({summary.steps_without_drafts} without drafts)"
    )
    table.add_row("tokens emitted", str(summary.emitted))
    if (length := summary.mean_accept_length) is not None:
        predicted = summary.predicted_accept_length
        table.add_row(
            "accept length", f"{length:.3f} (the scores foresaw {predicted:.3f})"
        )
        table.add_row("nodes per step", f"{summary.nodes_per_step:.2f}")
        rates = enumerate(summary.acceptance_per_depth, start=1)
        table.add_row("accepted by depth", "  ".join(f"{d}: {r:.1%}" for d, r in rates))
    if trace.dropped:
        table.add_row("passes dropped", f"{trace.dropped} (the disk was too slow)")
    return table


def _fail(message: str) -> typer.Exit:
    Console(stderr=True, highlight=False).print(Text(f"Error: {message}", "red"))
    return typer.Exit(1)
