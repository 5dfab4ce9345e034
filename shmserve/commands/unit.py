"""`shmserve unit`: what is to be written to /etc/systemd/system or ~/.config/systemd/user, on stdout.

Owns: what of this machine goes into the unit: the interpreter, the package's place, a GPU; and the warnings about what a
service's own user could not reach. Never: installs anything.
"""

from __future__ import annotations

import os
import re
import site
import stat
import sys

import click

from shmserve.config import Config, ConfigError


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--user", "is_user", is_flag=True, help="For your own service manager: systemctl --user."
)
@click.option(
    "--socket",
    "is_socket",
    is_flag=True,
    help="The .socket unit that goes with it: the port is open from boot on.",
)
@click.option(
    "--name", default="shmserve", show_default=True, help="Name of the unit and of the instance."
)
@click.argument("start_options", nargs=-1, type=click.UNPROCESSED)
def unit(name: str, is_user: bool, is_socket: bool, start_options: tuple[str, ...]) -> None:
    """Print a systemd unit that runs `shmserve start` with START_OPTIONS.

    \b
    shmserve unit --port 8000 > /etc/systemd/system/shmserve.service
    shmserve unit --socket --port 8000 > /etc/systemd/system/shmserve.socket
    """
    from shmserve.systemd_unit import Service, socket_text

    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise ConfigError(f"--name must be 1 to 64 letters, digits, '-' or '_', got {name!r}")
    config, files = _config_of(start_options)
    if config.instance:
        raise ConfigError("--instance of a unit is its --name")
    if is_socket:
        click.echo(socket_text(name, config), nl=False)
        return
    for flag, path in files:
        if not path.startswith(("/", "~") if is_user else "/"):
            raise ConfigError(
                f"{flag} {path}: a service is started in /, and a unit needs the whole path"
            )
    service = Service(
        name=name,
        config=config,
        argv=(sys.executable, "-P", "-m", "shmserve"),
        args=start_options,
        environ=_own_environment(),
        is_user=is_user,
        has_gpu=_wants_gpu(config),
    )
    click.echo(service.text(), nl=False)
    if not is_user:
        own = (sys.executable, os.path.realpath(sys.executable), __file__)
        for path in (
            *own,
            *(path for _, path in files if os.path.isfile(path) or os.path.isdir(path)),
        ):
            if blocked := _unreachable(path):
                click.echo(
                    f"shmserve: warning: the service's own user cannot read {path} ({blocked} is closed to others); "
                    "move it, for example to /opt, or use --user",
                    err=True,
                )


def _config_of(args: tuple[str, ...]) -> tuple[Config, list[tuple[str, str]]]:
    """What `shmserve start ARGS` would serve, without the variables of this shell: the service will not have them. And which
    files it would want, as (flag, path)."""
    from shmserve.cli import config_of, start

    with start.make_context("start", list(args), auto_envvar_prefix=None) as ctx:
        if ctx.params["daemon"]:
            raise ConfigError("--daemon is not for a unit: the service manager keeps it")
        for flag in ("api_key", "admin_key"):
            if ctx.params.get(flag):
                raise ConfigError(
                    f"everybody can read a unit: set SHMSERVE_{flag.upper()} in its EnvironmentFile, "
                    f"not --{flag.replace('_', '-')}"
                )
        return config_of(ctx), _files_of(ctx, args)


def _files_of(ctx: click.Context, args: tuple[str, ...]) -> list[tuple[str, str]]:
    from shmserve.model_source import looks_like_a_path
    from shmserve.settings import SETTINGS

    found = [(s.flag, ctx.params[s.key]) for s in SETTINGS if isinstance(s.type, click.Path)]
    if looks_like_a_path(spec := ctx.params["model"] or ""):
        found.append(("--model", spec))
    for at, arg in enumerate(args):  # it is in no Config
        if arg == "--config":
            found.append((arg, args[at + 1]))
        elif arg.startswith("--config="):
            found.append(("--config", arg.removeprefix("--config=")))
    return [(flag, path) for flag, path in found if path]


def _own_environment() -> dict[str, str]:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if root in (*site.getsitepackages(), site.getusersitepackages()):
        return {}
    return {"PYTHONPATH": root}  # a source tree: what runs is what printed this


def _wants_gpu(config: Config) -> bool:
    runner = config.worker.runner
    return runner == "cuda" or (
        runner in ("auto", "torch", "hf") and os.path.exists("/dev/nvidiactl")
    )


def _unreachable(path: str) -> str:
    """The part of an absolute path that closes it to others, or ""."""
    if not path.startswith("/"):
        return ""
    part = path
    try:
        while part != "/":
            mode = os.stat(part).st_mode
            needed = stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH
            if not mode & needed:
                return part
            part = os.path.dirname(part)
    except OSError:
        return part
    return ""
