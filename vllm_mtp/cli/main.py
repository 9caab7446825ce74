"""``vllm-mtp``: the commands, each imported only when it is called."""

import importlib
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from vllm_mtp.config import SettingsError

COMMANDS = {
    "tune": "Measure tree shapes on a model and recommend a --speculative-config.",
    "export": "Write a checkpoint's MTP layer as a stand-alone NextN folder.",
    "inspect": "Say what a folder of weights holds, and what mtp_tree will do with it.",
    "explain": "Print the sizes and memory of the trees that settings would draft.",
    "bench": "Measure latency, throughput and accept length of a running server.",
    "show": "Draw the trees of a trace, in the terminal or as a page.",
}
"""Command -> its line in ``--help``. The command ``name`` is the function ``name`` of
``vllm_mtp/cli/name.py``; a new one needs a line here and that file."""

EXIT_REFUSED = 1


class LazyCommand(TyperCommand):
    """A command whose module is imported when it is run or asked for help."""

    def load(self) -> Any:
        """Return the real command."""
        assert self.name is not None, "commands are made from COMMANDS, with a name"
        module = importlib.import_module(f"vllm_mtp.cli.{self.name}")
        app = typer.Typer(add_completion=False)
        app.command(self.name)(getattr(module, self.name))
        return typer.main.get_command(app)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Hand over to the real command; whatever follows happens there."""
        return self.load().make_context(*args, **kwargs)


class LazyGroup(TyperGroup):
    """Lists the commands without importing them, and words their refusals."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names, in the order of ``--help``."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name; None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        return LazyCommand(name=cmd_name, help=COMMANDS[cmd_name])

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a refusal becomes a message and the exit code 1."""
        try:
            return super().invoke(ctx)
        except SettingsError as error:
            Console(stderr=True, soft_wrap=True).print(
                f"[bold red]Error:[/] {_escape(str(error))}", highlight=False
            )
            raise typer.Exit(EXIT_REFUSED) from error


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    help="Draft trees for DeepSeek MTP in vLLM: checkpoints and tools.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from vllm_mtp import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False,
        "--version",
        help="Print the version.",
        callback=_print_version,
        is_eager=True,
    ),
) -> None:
    """Options of ``vllm-mtp`` itself."""


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
