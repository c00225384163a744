"""The `fedadc` command and its subcommands. Each imports what it needs only when it runs, which keeps `--help` fast."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedadc.cli import configs, data, doctor, federation, models, reproduction, results, studies, training
from fedadc.cli.options import in_words_of_the_command_line
from fedadc.cli.supervision import (
    NeedsSupervision,
    accept_signals,
    announce_exit,
    connect_to_supervisor,
    supervise,
)
from fedadc.errors import BUG, FedadcError, WorkersLost, explained

EXIT_CODES = {
    "0": "done",
    "1": "a bug, with its traceback",
    "2": "wrong usage or a mistake in a config",
    "3": "training diverged",
    "4": "disk full, or a file or folder without permission",
    "5": "data or a run's files missing or damaged",
    "6": "worker processes lost; the last checkpoint is kept",
    "129, 130, 143": "ended by SIGHUP, Ctrl-C, SIGTERM; a run is saved first",
}


class _Group(TyperGroup):
    """Shows the exit codes below the help; versions of Typer differ in how they break the lines of an epilog."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        typer.echo(" Exit codes:")
        for code, meaning in EXIT_CODES.items():
            typer.echo(f"   {code:<15}{meaning}")


app = typer.Typer(
    name="fedadc",
    help="Federated learning with FedADC: train models, compare runs, inspect data.",
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
data_app = typer.Typer(help="Download data sets, and show which client holds which labels.", no_args_is_help=True)
app.add_typer(data_app, name="data")
federation_app = typer.Typer(help="Train across real sites, with Flower.", no_args_is_help=True)
app.add_typer(federation_app, name="federation")

app.command()(training.run)
app.command()(training.resume)
app.command()(training.demo)
app.command()(results.compare)
app.command()(training.experiment)
app.command()(studies.sweep)
app.command()(reproduction.reproduce)
app.command()(results.evaluate)
app.command()(results.personalize)
app.command()(models.predict)
app.command()(models.export)
app.command()(doctor.doctor)
app.command("list")(configs.list_table)
app.command()(configs.init)
federation_app.command("init")(federation.federation_init)
federation_app.command("up")(federation.federation_up)
federation_app.command("status")(federation.federation_status)
federation_app.command("doctor")(federation.federation_doctor)
federation_app.command("certificates")(federation.federation_certificates)
federation_app.command("checksum")(federation.federation_checksum)
federation_app.command("site")(federation.federation_site)
federation_app.command("down")(federation.federation_down)
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
    """The entry point."""
    _open_standard_streams()
    connect_to_supervisor()
    run_command()


def run_command() -> None:
    """Run the command of sys.argv and end with its exit code, which EXIT_CODES lists."""
    logging.getLogger("fedadc").handlers[:] = [_Warnings(logging.WARNING)]
    from fedadc.system.processes import SAFE_PATH, environment_set
    from fedadc.system.signals import ignoring_signals, last_signal, stopping_on_signals

    try:
        with environment_set(SAFE_PATH), stopping_on_signals():
            accept_signals()
            code = _command().main(prog_name="fedadc", standalone_mode=False)
            sys.stdout.flush()  # here, so that a full disk is noticed
    except NeedsSupervision:
        sys.exit(_exit_code_of_child())
    except BrokenPipeError as error:  # the reader closed the pipe, e.g. `| head`
        code = _report(error) if getattr(error, "__notes__", None) else 0  # notes: it comes from a user's method
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        code = _report(error)
    if code == 130:  # typer's exit code for every KeyboardInterrupt, which any of our signals raises
        ignoring_signals()
        number = last_signal()
        code = 128 + number
        name = signal.Signals(number).name
        _print_error("interrupted." if number == signal.SIGINT else f"terminated by {name}.")
    _drop_unwritable_output()
    announce_exit(code or 0)
    sys.exit(code or 0)


def _open_standard_streams() -> None:
    """Open those that were closed (`>&-`), so that no file gets their numbers; what is written to them is dropped."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("r" if name == "stdin" else "w"))  # noqa: SIM115


def _exit_code_of_child() -> int:
    try:
        return supervise()
    except (WorkersLost, OSError) as error:
        return _report(error)


def _report(error: Exception) -> int:
    """Print what went wrong; return the exit code."""
    if hasattr(error, "format_message"):  # only typer's usage errors have it
        message = " ".join(error.format_message().split()).rstrip(".")
        if message:  # empty without a command: typer has already shown the help
            context = getattr(error, "ctx", None)  # of the command that was called
            command = "fedadc" if context is None else context.command_path
            _print_error(f"error: {message}; see `{command} --help`.")
        return FedadcError.exit_code
    known = explained(error)
    if known is None:
        _print_error("".join(traceback.format_exception(error)).rstrip("\n"))
        return BUG
    location = getattr(known, "__notes__", [])[:1]  # the round and the client
    if trace := getattr(known, "trace", ""):  # of a bug in one of several runs
        _print_error(trace.rstrip("\n"))
    for sentence in getattr(known, "sentences", [str(known)]):
        _print_error(f"error: {_translated(sentence)}" + "".join(f" ({note})" for note in location))
    return known.exit_code


def _print_error(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        print(text, file=sys.stderr, flush=True)


def _drop_unwritable_output() -> None:
    """Python would end with 120 if it could not flush the output at its exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _command() -> Any:
    """The tree of commands. Typer would show the type `<bool>` beside --help, which takes no value."""
    root: Any = typer.main.get_command(app)
    for command in (root, *_commands(root)):
        command.get_help_option(typer.Context(command)).metavar = ""
    return root


def _commands(root: Any) -> list[Any]:
    """All commands, also those of groups."""
    groups = [command for command in root.commands.values() if hasattr(command, "commands")]
    return [*root.commands.values(), *(command for group in groups for command in group.commands.values())]


def _translated(text: str) -> str:
    """A message of the Python API in the words of the command line."""
    root = _command()
    commands = _commands(root)
    named = {param.name: [opt for opt in param.opts if opt.startswith("--")] for c in commands for param in c.params}
    return in_words_of_the_command_line(text, {name: opts[0] for name, opts in named.items() if opts})


class _Warnings(logging.Handler):
    """Prints each warning on its own line. A progress bar replaces sys.stderr, so they appear above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            print(f"warning: {_translated(record.getMessage())}", file=sys.stderr)


if __name__ == "__main__":
    main()
