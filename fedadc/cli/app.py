"""The `fedadc` command and its subcommands. Each imports what it needs only when it runs, which keeps `--help` fast."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from typing import Annotated, Any

import typer

from fedadc.cli import configs, data, results, training
from fedadc.errors import FedadcError

app = typer.Typer(
    name="fedadc",
    help="Federated learning with FedADC: train models, compare runs, inspect data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
data_app = typer.Typer(help="Download data sets, and show which client holds which labels.", no_args_is_help=True)
app.add_typer(data_app, name="data")

app.command()(training.run)
app.command()(training.resume)
app.command()(training.demo)
app.command()(results.compare)
app.command()(training.experiment)
app.command()(results.evaluate)
app.command()(results.personalize)
app.command("list")(configs.list_table)
app.command()(configs.init)
data_app.command("get")(data.data_get)
data_app.command("show")(data.data_show)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", metavar="", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from fedadc.system.version import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """The entry point. A user error prints one sentence and exits with 2; a signal exits with 128 + its number."""
    logging.getLogger("fedadc").handlers[:] = [_Warnings(logging.WARNING)]
    from fedadc.system.signals import ignoring_signals, last_signal, stopping_on_signals

    try:
        with stopping_on_signals():
            code = _command().main(prog_name="fedadc", standalone_mode=False)
    except BrokenPipeError:  # the reader closed the pipe, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except (FedadcError, OSError) as error:
        location = getattr(error, "__notes__", [])[:1]  # the round and the client
        print(f"error: {error}" + "".join(f" ({note})" for note in location), file=sys.stderr)
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        if isinstance(error, MemoryError) or "not enough memory" in str(error):  # torch raises a RuntimeError
            print("error: out of memory; choose a smaller model or less data.", file=sys.stderr)
            sys.exit(2)
        if not hasattr(error, "format_message"):  # only typer's usage errors have it
            raise
        message = " ".join(error.format_message().split()).rstrip(".")
        if message:  # empty without a command: typer has already shown the help
            context = getattr(error, "ctx", None)  # of the command that was called
            command = "fedadc" if context is None else context.command_path
            print(f"error: {message}; see `{command} --help`.", file=sys.stderr)
        code = 2
    if code == 130:  # typer's exit code for every KeyboardInterrupt, which any of our signals raises
        ignoring_signals()
        number = last_signal()
        code = 128 + number
        name = signal.Signals(number).name
        print("interrupted." if number == signal.SIGINT else f"terminated by {name}.", file=sys.stderr)
    sys.exit(code or 0)


def _command() -> Any:
    """The tree of commands. Typer would show the type `<bool>` beside --help, which takes no value."""
    root: Any = typer.main.get_command(app)
    for command in (root, *root.commands.values(), *root.commands["data"].commands.values()):
        command.get_help_option(typer.Context(command)).metavar = ""
    return root


class _Warnings(logging.Handler):
    """Prints each warning on its own line. A progress bar replaces sys.stderr, so they appear above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            print(f"warning: {record.getMessage()}", file=sys.stderr)


if __name__ == "__main__":
    main()
