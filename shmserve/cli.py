"""The command line. stdout is data, stderr is talk; an error is one line, `shmserve: error: ...`, and a code that is not 0.

Owns: the commands, and the exit codes: 0, 1 for what went wrong, 2 for a wrong command line, 128 + n for a signal that came
while a model was prepared. Never: imports what a command does not need: each imports its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TextIO, cast

import click

from shmserve import __version__
from shmserve.commands.bench import bench
from shmserve.commands.chat import chat
from shmserve.commands.dumping import dump
from shmserve.commands.instances import COMMANDS
from shmserve.commands.unit import unit
from shmserve.commands.watching import top
from shmserve.config import Config, ConfigError
from shmserve.settings import build_config, start_options


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="shmserve %(version)s")
def cli() -> None:
    """Serve a language model on this host, over bounded shared-memory rings."""


@cli.command(context_settings={"auto_envvar_prefix": "SHMSERVE", "show_default": True})
@start_options
@click.option(
    "--external",
    type=click.Choice(("http", "worker")),
    multiple=True,
    help="Do not start this role: wait until one started by hand joins.",
)
@click.option(
    "--daemon",
    is_flag=True,
    allow_from_autoenv=False,  # the server in the background would start another
    help="Serve in the background; return when ready. Logs to <state directory>/<instance>.log.",
)
@click.option(
    "--print-limits",
    is_flag=True,
    allow_from_autoenv=False,
    help="Print the most memory that this would take, and from what it adds up; start nothing.",
)
@click.pass_context
def start(
    ctx: click.Context,
    /,
    external: tuple[str, ...],
    daemon: bool,
    print_limits: bool,
    **values: Any,
) -> int | None:
    """Serve until SIGTERM or Ctrl-C; with --daemon in the background, until `shmserve stop`.

    Every option is also a variable (SHMSERVE_PORT) and a key of --config FILE. One signal drains: no new requests, those in
    flight finish; a second ends at once.
    """
    from shmserve.log_file import redirect_stderr
    from shmserve.log_writer import FLUSH_S, Lines, LogStream, LogWriter
    from shmserve.progress import Reporter
    from shmserve.supervisor import Supervisor

    config = config_of(ctx)
    if print_limits:
        from shmserve.commands.limits import limits_table

        reporter = Reporter(sys.stderr, is_quiet=True)
        click.echo(limits_table(_prepare_model(config, reporter)))
        return None
    if daemon:
        from shmserve.commands.restarting import start_in_background

        click.echo(start_in_background(config, ctx.obj, sys.stderr))
        return None
    if config.log_file:
        redirect_stderr(config.log_file)
    log = LogWriter()
    reporter = Reporter(
        # Whoever reads the log may stall; the supervisor must not. A terminal shows how far the model is, and is for people.
        sys.stderr if sys.stderr.isatty() else cast(TextIO, LogStream(log)),
        is_quiet=config.log_level in ("warning", "error"),
        lines=Lines("supervisor", "json") if config.log_format == "json" else None,
    )
    supervisor = Supervisor(
        config,
        prepare=_prepare_model,
        reporter=reporter,
        environ=os.environ,
        external=frozenset(external),
    )
    try:
        return supervisor.run()
    finally:
        log.flush(FLUSH_S)


def config_of(ctx: click.Context) -> Config:
    """What the options of a `start` say. Raises ConfigError."""

    def is_default(key: str) -> bool:
        return ctx.get_parameter_source(key) is click.core.ParameterSource.DEFAULT

    return build_config(ctx.params, is_default)


def _prepare_model(config: Config, progress: Callable[[str, float | None], None]) -> Config:
    """The config with the prepared folder and the name. Raises ModelError, ConfigError."""
    from shmserve.models import DEFAULT_MODEL, prepare

    spec = config.model.spec or DEFAULT_MODEL
    model = prepare(spec, progress=progress)
    if config.model.max_model_len > model.context_length:
        raise ConfigError(
            f"--max-model-len {config.model.max_model_len} is more than the context of "
            f"{model.name}, {model.context_length} tokens"
        )
    return replace(
        config,
        model=replace(
            config.model,
            spec=spec,
            folder=str(model.folder),
            served_name=config.model.served_name or model.name,
        ),
    )


@cli.command()
@click.option("--model", default="", help="As for `shmserve start`; the default model if empty.")
def prepare(model: str) -> None:
    """Fetch a model and make it ready to be served; print its folder."""
    from shmserve.models import DEFAULT_MODEL
    from shmserve.models import prepare as prepare_model
    from shmserve.progress import Reporter

    reporter = Reporter(sys.stderr)
    try:
        prepared = prepare_model(model or DEFAULT_MODEL, progress=reporter)
    finally:
        reporter.finish()
    click.echo(str(prepared.folder))


@cli.command()
@click.option("--prompt", default="", help="What to ask; a question about the sky if empty.")
@click.option("--max-tokens", type=click.IntRange(1), default=160, show_default=True)
def demo(prompt: str, max_tokens: int) -> int:
    """Start a server, stream one answer, show where its tokens' time went, stop."""
    from shmserve.demo import PROMPT, run

    return run(prompt or PROMPT, max_tokens)


for _command in (*COMMANDS, dump, top, unit, chat, bench):
    cli.add_command(_command)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. The entry point of the package."""
    _open_standard_streams()
    try:
        args = sys.argv[1:] if args is None else list(args)
        result = cli.main(args=args, obj=args, prog_name="shmserve", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "shmserve"
        return _fail(f"{error.format_message()} (see {command} --help)", error.exit_code)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except Exception as error:
        if not _is_for_the_operator(error):
            raise
        return _fail(getattr(error, "strerror", None) or str(error), getattr(error, "code", 1))


def _open_standard_streams() -> None:
    """One that is closed (`>&-`) would be the next socket or file that is opened, and what is printed would go there."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            lowest_free = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(lowest_free, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  # as long as we live


def _is_for_the_operator(error: Exception) -> bool:
    """True for errors whose text is one line that says what to do; another is a fault of ours and wants its traceback.

    By name, its own or that of a kind that it is: importing every module that defines one would cost each command its start.
    """
    for_operators = {
        "ConfigError",
        "DaemonError",
        "DumpError",
        "InstanceError",
        "ListenError",
        "LoadFileError",
        "LogError",
        "ModelError",
        "PlotError",
        "SegmentError",
        "SupervisorError",
        "TargetError",
        "TurnError",
    }
    return any(kind.__name__ in for_operators for kind in type(error).__mro__)


def _fail(text: str, code: int) -> int:
    click.echo(f"shmserve: error: {' '.join(text.split())}", err=True)
    return code
