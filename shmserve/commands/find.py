"""Which instance a command means: by name, by port, or the only one that runs.

Owns: the search through the caller's own runtime directory, and for root through those of system services. Never: asks an
instance anything. Commands only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from shmserve.instance_socket import (
    InstanceError,
    instances,
    record_of,
    runtime_dir,
    system_runtime_dirs,
)


@dataclass(frozen=True, slots=True)
class Instance:
    """A name in a runtime directory."""

    directory: str
    name: str


def running() -> list[Instance]:
    """Every instance that we may ask."""
    own = runtime_dir(os.environ)
    directories = dict.fromkeys((own, *system_runtime_dirs()))
    return [Instance(directory, name) for directory in directories for name in instances(directory)]


def find(instance: str, port: int | None) -> Instance:
    """The instance that is meant. One that is named but does not run is looked for where ours are."""
    found = running()
    if instance:
        found = [each for each in found if each.name == instance]
        return found[0] if found else Instance(runtime_dir(os.environ), instance)
    if port is not None:
        for each in found:
            if record_of(each.directory, each.name).url.endswith(f":{port}"):
                return each
        return Instance(runtime_dir(os.environ), f"{os.getuid()}-{port}")
    if len(found) != 1:
        names = " | ".join(each.name for each in found)
        raise InstanceError(
            f"several instances run, say which: --instance {names}"
            if found
            else "no instance is running"
        )
    return found[0]
