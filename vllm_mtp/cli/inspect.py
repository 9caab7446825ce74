"""``vllm-mtp inspect``."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_mtp.checkpoint.inspect import Inspection, LayerSummary, inspect_folder
from vllm_mtp.checkpoint.layout import summarize_names

EXIT_UNUSABLE = 1


def inspect(
    path: Annotated[Path, typer.Argument(help="Checkpoint or NextN folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a checkpoint or NextN folder holds, and what mtp_tree will do.

    Only headers are read. The exit code is 1 if mtp_tree would refuse the folder.
    """
    report = inspect_folder(path)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    else:
        _print_report(report)
    if not report.usable:
        raise typer.Exit(EXIT_UNUSABLE)


def _print_report(report: Inspection) -> None:
    console = Console(soft_wrap=True, highlight=False)
    table = Table.grid(padding=(0, 2))
    for name, value in _describe_folder(report):
        table.add_row(Text(name, style="bold"), Text(value))
    for layer in report.layers:
        for name, value in _describe_layer(layer):
            table.add_row(Text(name, style="bold"), Text(value))
    console.print(table)
    style = "green" if report.usable else "red"
    console.print(Text(f"mtp_tree {report.verdict}", style=style))


def _describe_folder(report: Inspection) -> list[tuple[str, str]]:
    declared = report.num_nextn_predict_layers
    return [
        (report.kind, report.path),
        ("architecture", ", ".join(report.architectures) or "not declared"),
        ("decoder layers", f"{report.num_hidden_layers} declared"),
        ("MTP layers", f"{declared} declared, {len(report.layers)} stored"),
        ("positions", str(report.max_positions)),
        ("quantization", report.quantization_method or "none declared"),
        (
            "stored",
            f"{_count(report.num_tensors, 'tensor')}, "
            f"{report.nbytes / 2**20:,.1f} MiB, {_count(report.num_files, 'file')}",
        ),
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _describe_layer(layer: LayerSummary) -> list[tuple[str, str]]:
    own = [
        name
        for name, held in (("embedding", layer.own_embedding), ("head", layer.own_head))
        if held
    ]
    rows = [
        (
            f"layer {layer.index}",
            f"{_count(layer.num_tensors, 'tensor')}, {layer.nbytes / 2**20:,.1f} MiB, "
            f"{layer.precision}, own copies: {', '.join(own) or 'none'}",
        )
    ]
    if layer.missing:
        rows.append(("  missing", summarize_names(layer.missing)))
    if layer.faults:
        rows.append(("  wrong", "; ".join(layer.faults[:6])))
    if layer.unexpected:
        rows.append(("  not used", summarize_names(layer.unexpected)))
    return rows
