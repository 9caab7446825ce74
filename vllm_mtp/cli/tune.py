"""``vllm-mtp tune``: measure shapes over batch sizes and recommend a setting."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vllm_mtp.bench.prompts import load_prompts
from vllm_mtp.cli.common import AsJson, OutputFile, deliver, parse_counts
from vllm_mtp.config import SettingsError, parse_settings
from vllm_mtp.tuning.report import config_text, plot, recommend
from vllm_mtp.tuning.run import Job, measure_all
from vllm_mtp.tuning.shapes import Shape

SHAPES = "off,chain:1,chain:2,chain:3,tree:2-2-3,tree:3-2-5,tree:3-4-7,tree:5-2-7,auto"


def tune(
    model: Annotated[str, typer.Argument(help="Model, as for vllm serve.")],
    shapes: Annotated[
        str,
        typer.Option(
            help="By comma: off, auto, auto:shared (with share_nodes), chain:N "
            "(vLLM's own mtp) and tree:S-k-N[-F], where S is num_steps, k topk, N "
            "num_speculative_tokens and F frontier."
        ),
    ] = SHAPES,
    batches: Annotated[str, typer.Option(help="Batch sizes, by comma.")] = "1,4,16,64",
    input_len: Annotated[int, typer.Option(min=8, help="Tokens of each prompt.")] = 512,
    output_len: Annotated[
        int, typer.Option(min=16, help="Tokens of each answer.")
    ] = 96,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Your prompts, one a line, or .jsonl; drafts depend on the text."
        ),
    ] = None,
    engine_args: Annotated[
        str,
        typer.Option(help="More arguments of LLM(), a JSON object."),
    ] = "{}",
    output: OutputFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure shapes side by side and print a --speculative-config.

    Starts one engine for each shape, so it needs the GPUs for itself, and takes a few
    minutes a shape for a large model. What is measured is decoding in a steady batch;
    prompts are in the prefix cache.
    """
    chosen = [_shape(name) for name in shapes.split(",")]
    job = Job(
        model=model,
        prompts=tuple(load_prompts(prompts)),
        batches=tuple(sorted({*parse_counts("--batches", batches)})),
        input_len=input_len,
        output_len=output_len,
        temperature=temperature,
        engine_args=_engine_args(engine_args),
    )
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}

    def report(name: str, found: list[dict[str, Any]], error: str) -> None:
        rows.extend(found)
        done = len({row["shape"] for row in rows}) + len(failed) + bool(error)
        if error:
            failed[name] = error
            console.print(f"[red]{name} failed:[/] {error}", highlight=False)
        console.print(f"{done} of {len(chosen)} shapes: {name}", highlight=False)

    console.print(f"Measuring {len(chosen)} shapes, one engine each.")
    measure_all(job, chosen, report)
    if not rows:
        raise SettingsError(
            "tune: no shape could be measured; the first failure was: "
            f"{next(iter(failed.values()))}"
        )
    configs = {shape.name: shape.speculative for shape in chosen}
    result = {
        "model": model,
        "input_len": input_len,
        "output_len": output_len,
        "temperature": temperature,
        "rows": rows,
        "failed": failed,
        "recommended": recommend(rows, configs),
    }
    deliver(result, output, as_json, lambda: _print_result(Console(), result))


def _print_result(console: Console, result: dict[str, Any]) -> None:
    rows = result["rows"]
    batches = sorted({row["batch"] for row in rows})
    table = Table("shape", *(f"batch {b}" for b in batches), title="tokens/s (accept)")
    for shape in dict.fromkeys(row["shape"] for row in rows):
        cells = []
        for batch in batches:
            row = next(r for r in rows if (r["shape"], r["batch"]) == (shape, batch))
            cell = f"{row['tok_s']:,.0f} ({row['accept_length']:.2f})"
            if "chose" in row:
                cell += f" N={row['chose'][0]}"
            cells.append(cell)
        table.add_row(shape, *cells)
    console.print(table)
    console.print(plot(rows), highlight=False, markup=False)
    best = result["recommended"]
    console.print(f"\nRecommended: {best['shape']}, {best['why']}.", highlight=False)
    console.print(
        config_text(best["speculative_config"]),
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _shape(name: str) -> Shape:
    text = name.strip()
    family, _, sizes = text.partition(":")
    if family == "tree":
        text = f"tree:{sizes.replace('-', ',')}"
    try:
        shape = Shape.parse(text)
        if shape.family == "tree":
            parse_settings(shape.speculative or {})
        return shape
    except SettingsError:
        raise
    except ValueError as error:
        raise SettingsError(
            f"tune: --shapes has {name!r}; use off, auto, auto:shared, chain:N or "
            "tree:S-k-N[-F], separated by commas."
        ) from error


def _engine_args(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"tune: --engine-args is no JSON ({error}).") from error
    if not isinstance(found, dict):
        raise SettingsError(
            f"tune: --engine-args must be a JSON object, found {text!r}."
        )
    if "speculative_config" in found:
        raise SettingsError(
            "tune: --engine-args must not hold speculative_config; use --shapes."
        )
    return found
