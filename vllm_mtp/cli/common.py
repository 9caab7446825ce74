"""What several commands share: options, lists of numbers, where results go."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_mtp.config import SettingsError

OutputFile = Annotated[
    Path | None, typer.Option(help="Also write the JSON object to this file.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, no table.")
]


def parse_counts(option: str, text: str) -> list[int]:
    """Whole numbers from 1, separated by commas, as given.

    Raises:
        SettingsError: there is anything else.
    """
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise SettingsError(
            f"{option}={text!r} must be whole numbers from 1, separated by commas; use "
            "1 or more, as in 1,8,64."
        )
    return counts


def deliver(
    record: dict[str, Any],
    output: Path | None,
    as_json: bool,
    show: Callable[[], None],
) -> None:
    """Print a result, as JSON or by ``show``, and then write it where it is wanted.

    Raises:
        SettingsError: the file cannot be written; the result was printed by then.
    """
    text = json.dumps(record)
    if as_json:
        typer.echo(text)
    else:
        show()
    if output is not None:
        try:
            output.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"{output}: cannot be written ({error}).") from error
