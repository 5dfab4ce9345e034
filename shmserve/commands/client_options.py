"""The options by which `chat` and `bench` find their server: a URL, a Unix socket, or an instance that runs here.

Owns: which of them wins. Never: connects. Commands only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from shmserve.commands.instances import instance_options

if TYPE_CHECKING:
    from shmserve.target import Target

KEY_VARIABLES = ("SHMSERVE_API_KEY", "OPENAI_API_KEY")


def target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --url, --uds, --instance, --port, --api-key, --ca-file and --model."""
    for option in (
        click.option("--model", default="", help="The first that the server names, if empty."),
        click.option(
            "--ca-file", default="", help="PEM of the authority that signed its certificate."
        ),
        click.option(
            "--api-key", default="", help=f"Better in a variable: {' or '.join(KEY_VARIABLES)}."
        ),
    ):
        command = option(command)
    command = instance_options(command)
    command = click.option("--uds", default="", help="Path of its Unix socket.")(command)
    return click.option(
        "--url", default="", help="Any OpenAI-compatible server; else the instance that runs here."
    )(command)


def target_of(
    url: str, uds: str, instance: str, port: int | None, api_key: str, ca_file: str
) -> Target:
    """The server that is meant. Raises UsageError, InstanceError."""
    from shmserve.commands.find import find, running
    from shmserve.instance_socket import InstanceError, record_of
    from shmserve.target import Target

    given = [
        flag
        for flag, is_given in (
            ("--url", url),
            ("--uds", uds),
            ("--instance", instance),
            ("--port", port is not None),
        )
        if is_given
    ]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} exclude each other")
    if not url and not uds:
        if not given and not running():
            raise InstanceError("no instance is running here; start one, or say where it is: --url")
        found = find(instance, port)
        url = record_of(found.directory, found.name).url
        if not url and port is not None:
            url = f"http://127.0.0.1:{port}"  # another user's, or no instance of ours at all
        if not url:
            raise InstanceError(f"instance {found.name!r} is not running, or has no address yet")
        if url.startswith("unix:"):
            url, uds = "", url.removeprefix("unix:")
    if uds:
        return Target("http://localhost", os.path.abspath(uds), _key(api_key), ca_file)
    url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        is_one = False
    if not is_one:
        raise click.UsageError(f"--url {url!r} is no http:// or https:// URL")
    return Target(url, "", _key(api_key), ca_file)


def _key(given: str) -> str:
    """The key that was given, or the first of a variable: SHMSERVE_API_KEY may hold several."""
    words = given.split() or [
        word for name in KEY_VARIABLES for word in os.environ.get(name, "").split()
    ]
    return words[0] if words else ""
