"""``vllm-mtp export``."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from vllm_mtp.checkpoint.export import ExportResult, export_nextn


def export(
    input_dir: Annotated[
        Path, typer.Option(help="Folder of the model whose MTP layer is wanted.")
    ],
    output_dir: Annotated[Path, typer.Option(help="Folder to write; must be new.")],
    dtype: Annotated[
        str,
        typer.Option(help="auto keeps every byte; bfloat16 dequantises FP8 weights."),
    ] = "auto",
    layer: Annotated[
        int | None,
        typer.Option(help="Index of the MTP layer, where a model has several."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a checkpoint's MTP layer as a stand-alone NextN folder."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    hidden = not console.is_terminal
    with Progress(
        *columns, console=console, transient=True, disable=hidden
    ) as progress:
        task = progress.add_task("Writing", total=None)
        result = export_nextn(
            input_dir,
            output_dir,
            dtype,
            layer,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    if as_json:
        typer.echo(json.dumps(asdict(result), indent=2))
    else:
        _print_result(result)


def _print_result(result: ExportResult) -> None:
    console = Console(soft_wrap=True, highlight=False)
    speed = result.nbytes / 2**20 / max(result.seconds, 1e-9)
    console.print(
        f"Layer {result.layer} -> {result.output_dir}: {result.num_tensors} tensors, "
        f"{result.nbytes / 2**20:,.1f} MiB, {result.precision}, in "
        f"{result.seconds:.2f} s ({speed:,.0f} MiB/s)",
        markup=False,
    )
    if result.copied_files:
        console.print(f"Copied: {', '.join(result.copied_files)}", markup=False)
    setting = json.dumps({"method": "mtp_tree", "model": result.output_dir})
    console.print(f"Use it: --speculative-config '{setting}'", markup=False)
