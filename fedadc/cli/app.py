"""The command line. Commands import what they need when they run, so that `--help` stays quick."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from typing import Annotated

import typer

from fedadc.cli import configs, data, results, training
from fedadc.errors import FedadcError

app = typer.Typer(
    name="fedadc",
    help="Federated learning with FedADC: train, compare and inspect.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
data_app = typer.Typer(help="Get data sets, and look at who holds what.", no_args_is_help=True)
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
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from fedadc.system.version import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """The entry point: a user's mistake is one sentence and exit code 2, an interruption exit code 130."""
    logging.getLogger("fedadc").handlers[:] = [_Warnings(logging.WARNING)]
    from fedadc.system.signals import ignoring_signals, last_signal, stopping_on_signals

    try:
        with stopping_on_signals():
            code = typer.main.get_command(app).main(prog_name="fedadc", standalone_mode=False)
    except BrokenPipeError:  # `| head` has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except (FedadcError, OSError) as error:
        where = getattr(error, "__notes__", [])[:1]  # in which round, by which client
        print(f"error: {error}" + "".join(f" ({note})" for note in where), file=sys.stderr)
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        if isinstance(error, MemoryError) or "not enough memory" in str(error):  # torch's way to say so
            print("error: memory is not enough for this; choose a smaller model or less data.", file=sys.stderr)
            sys.exit(2)
        if not hasattr(error, "format_message"):  # a usage error of typer's has it
            raise
        message = " ".join(error.format_message().split()).rstrip(".")
        if message:  # without a command the help has been shown
            print(f"error: {message}; see `fedadc --help`.", file=sys.stderr)
        code = 2
    if code == 130:  # typer's code for any KeyboardInterrupt
        ignoring_signals()
        number = last_signal()
        code = 128 + number
        print(
            "interrupted." if number == signal.SIGINT else f"ended by {signal.Signals(number).name}.", file=sys.stderr
        )
    sys.exit(code or 0)


class _Warnings(logging.Handler):
    """Warnings as lines of their own, above a progress bar if there is one: it stands in for sys.stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            print(f"warning: {record.getMessage()}", file=sys.stderr)


if __name__ == "__main__":
    main()
