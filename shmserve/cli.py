"""The command line. stdout is data, stderr is talk; an error is one line, `shmserve: error: ...`, and a code that is not 0.

Owns: the commands, and the exit codes: 0, 1 for what went wrong, 2 for a wrong command line, 128 + n for a signal that came
while a model was prepared. Never: imports what a command does not need: each imports its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import click

from shmserve import __version__
from shmserve.config import Config, ConfigError
from shmserve.settings import build_config, start_options

ANSWER_TIMEOUT_S = 5.0


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
@click.pass_context
def start(ctx: click.Context, /, external: tuple[str, ...], **values: Any) -> int:
    """Serve in the foreground until SIGTERM or Ctrl-C.

    Every option is also a variable (SHMSERVE_PORT) and a key of --config FILE. One signal drains: no new requests, those in
    flight finish; a second ends at once.
    """
    from shmserve.progress import Reporter
    from shmserve.supervisor import Supervisor

    def is_default(key: str) -> bool:
        return ctx.get_parameter_source(key) is click.core.ParameterSource.DEFAULT

    config = build_config(values, is_default)
    reporter = Reporter(sys.stderr, is_quiet=config.log_level in ("warning", "error"))
    supervisor = Supervisor(
        config,
        prepare=_prepare_model,
        reporter=reporter,
        environ=os.environ,
        external=frozenset(external),
    )
    return supervisor.run()


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


def _instance_options(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--port", type=int, help="The instance that serves this port.")(command)
    return click.option("--instance", default="", help="The instance of this name.")(command)


def _find_instance(instance: str, port: int | None) -> tuple[str, str]:
    """(runtime directory, name) of the one that is meant: by name, by port, or the only one that runs."""
    from shmserve.instance_socket import InstanceError, instances, runtime_dir

    directory = runtime_dir(os.environ)
    if instance or port is not None:
        return directory, instance or f"{os.getuid()}-{port}"
    running = instances(directory)
    if len(running) != 1:
        raise InstanceError(
            f"several instances run, say which: --instance {' | '.join(running)}"
            if running
            else "no instance is running"
        )
    return directory, running[0]


@cli.command()
@click.option("--prompt", default="", help="What to ask; a question about the sky if empty.")
@click.option("--max-tokens", type=click.IntRange(1), default=160, show_default=True)
def demo(prompt: str, max_tokens: int) -> int:
    """Start a server, stream one answer, show where its tokens' time went, stop."""
    from shmserve.demo import PROMPT, run

    return run(prompt or PROMPT, max_tokens)


@cli.command()
@_instance_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def status(instance: str, port: int | None, as_json: bool) -> None:
    """Show processes, phases and rings of a running instance."""
    from shmserve.instance_socket import ask

    directory, name = _find_instance(instance, port)
    answer = ask(directory, name, {"type": "status"}, ANSWER_TIMEOUT_S)
    answer["rings"] = _ring_rows(name)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(answer["since"]))
    click.echo(f"instance {name}: {answer['state']} since {since}, pid {answer['pid']}")
    click.echo(f"serving {answer['model']} on {answer['url']}, {answer['in_flight']} in flight")
    for child in answer["children"]:
        details = [f"pid {child['pid'] or '-'}", child["state"]]
        details += [child["phase"]] if child.get("phase") else []
        details += [child["reason"]] if child["reason"] else []
        details += [f"{child['deaths']} died before"] if child["deaths"] else []
        click.echo(f"{child['role']} {child['index']}: {', '.join(details)}")
    for row in answer["rings"]:
        ends = [] if row["has_producer"] else ["no producer"]
        ends += [] if row["has_consumer"] else ["no consumer"]
        depth = f"depth {row['depth']} of {row['capacity']}, high water {row['high_water']}"
        click.echo(f"ring {row['name']}: {', '.join([depth, *ends])}")


def _ring_rows(instance: str) -> list[dict[str, Any]]:
    from shmserve.rings.observe import RingView, rings_of
    from shmserve.rings.segment import SegmentError

    rows = []
    for name in rings_of(instance):
        try:
            view = RingView(name)
        except SegmentError:
            continue  # its channel was closed since we listed it
        stats = view.stats()
        view.close()
        rows.append(
            {
                "name": name,
                "depth": stats.depth,
                "capacity": stats.capacity,
                "high_water": stats.producer["high_water"],
                "has_producer": stats.has_producer,
                "has_consumer": stats.has_consumer,
            }
        )
    return rows


def _end(instance: str, port: int | None, how: str) -> None:
    from shmserve.instance_socket import ask

    directory, name = _find_instance(instance, port)
    answer = ask(directory, name, {"type": how}, ANSWER_TIMEOUT_S, until_gone=True)
    click.echo(f"shmserve: instance {name} (pid {answer['pid']}) has ended", err=True)


@cli.command()
@_instance_options
def stop(instance: str, port: int | None) -> None:
    """End an instance now; requests in flight get an error. Returns when it has ended."""
    _end(instance, port, "stop")


@cli.command()
@_instance_options
def drain(instance: str, port: int | None) -> None:
    """End an instance when its requests in flight have finished. Returns when it has ended."""
    _end(instance, port, "drain")


@cli.command()
def sweep() -> None:
    """Remove what killed instances left behind; print its names."""
    from shmserve.instance_socket import runtime_dir, sweep_stale
    from shmserve.rings.segment import sweep as sweep_segments

    for name in sweep_segments("shmserve."):
        click.echo(f"/dev/shm{name}")
    for name in sweep_stale(runtime_dir(os.environ)):
        click.echo(f"instance {name}")


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. The entry point of the package."""
    try:
        result = cli.main(args=args, prog_name="shmserve", standalone_mode=False)
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
        return _fail(getattr(error, "strerror", None) or str(error), 1)


def _is_for_the_operator(error: Exception) -> bool:
    """True for errors whose text is one line that says what to do; another is a fault of ours and wants its traceback.

    By name: importing every module that defines one would cost each command its start.
    """
    return type(error).__name__ in (
        "ConfigError",
        "InstanceError",
        "ListenError",
        "ModelError",
        "SegmentError",
        "SupervisorError",
    )


def _fail(text: str, code: int) -> int:
    click.echo(f"shmserve: error: {' '.join(text.split())}", err=True)
    return code
