"""Units for systemd: the text of a service and of its socket, for one instance.

Owns: which directives, and why. Never: writes a file, or looks at the machine: what it must know is passed in. Commands only.

    systemd --fork--> supervisor                 Type=notify: READY=1 after warm-up; EXTEND_TIMEOUT_USEC while it loads
            <--WATCHDOG=1--                      while no child is stopped or hung
            --SIGTERM--> supervisor only         KillMode=mixed: a drain is the supervisor's to lead; what is left then is killed
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shmserve.config import Config, ConfigError
from shmserve.crew import STOP_GRACE_S

_SPARE_S: Final = 15
_GPU_DEVICES: Final = ("char-nvidia", "char-nvidia-frontend", "char-nvidia-uvm", "char-nvidia-caps")
# What runs without code that is written at run time: our own kernels are compiled into a file, which may be mapped. Libraries
# behind the other runners (oneDNN, Triton) write theirs into memory.
_RUNNERS_WITHOUT_JIT: Final = ("cpu", "simulated")


@dataclass(frozen=True, slots=True)
class Service:
    """One instance as a unit. `argv` is the program and what precedes `start`; `args` what follows it."""

    name: str
    config: Config
    argv: Sequence[str]
    args: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)
    is_user: bool = False
    has_gpu: bool = False

    def text(self) -> str:
        """The whole .service file."""
        groups = (self._unit(), self._service(), self._install())
        return "\n\n".join("\n".join(lines) for lines in groups) + "\n"

    def _unit(self) -> list[str]:
        lines = ["[Unit]", f"Description=shmserve, instance {self.name}"]
        if not self.is_user:
            lines += ["Wants=network-online.target", "After=network-online.target"]
        return [
            *lines,
            f"After={self.name}.socket",
            "# One that cannot start at all is not tried for ever.",
            "StartLimitIntervalSec=600",
            "StartLimitBurst=5",
        ]

    def _service(self) -> list[str]:
        config = self.config
        start = [*self.argv, "start", f"--instance={self.name}", *self.args]
        settings = "%h/.config" if self.is_user else "/etc"
        return [
            "[Service]",
            "Type=notify",
            "NotifyAccess=main",
            f"ExecStart={_command(start)}",
            f"ExecStopPost=-{_command([*self.argv, 'sweep'])}",
            "# Settings and secrets, as variables: SHMSERVE_API_KEY=...",
            f"EnvironmentFile=-{settings}/shmserve/{self.name}.env",
            *(f"Environment={_quoted(f'{key}={value}')}" for key, value in self.environ.items()),
            *self._directories(),
            "",
            "# A start asks for more time as long as it gets on; an end takes as long as its drain.",
            "TimeoutStartSec=120",
            f"TimeoutStopSec={round(config.drain_timeout_s + 2 * STOP_GRACE_S) + _SPARE_S}",
            "# The supervisor ends a hung child itself, after --hang-timeout; this is for what it cannot mend.",
            f"WatchdogSec={max(30, round(3 * config.hang_timeout_s))}",
            "Restart=on-failure",
            "RestartSec=2",
            "# A wrong command line does not get right by itself.",
            "RestartPreventExitStatus=2",
            "SuccessExitStatus=130 143",
            "KillMode=mixed",
            "# A worker that runs out of memory is replaced; the others serve on.",
            "OOMPolicy=continue",
            "LimitNOFILE=65536",
            "UMask=0077",
            "",
            *self._hardening(),
        ]

    def _directories(self) -> list[str]:
        if self.is_user:
            return []  # $XDG_RUNTIME_DIR, ~/.cache and ~/.local/state: those of the user's own commands
        return [
            f"RuntimeDirectory=shmserve/{self.name}",
            "RuntimeDirectoryMode=0700",
            f"CacheDirectory={self.name}",
            "CacheDirectoryMode=0700",
            f"StateDirectory={self.name}",
            "StateDirectoryMode=0700",
            f"Environment=XDG_RUNTIME_DIR=%t/shmserve/{self.name}",
            f"Environment=XDG_CACHE_HOME=%C/{self.name} XDG_STATE_HOME=%S/{self.name} HOME=%S/{self.name}",
        ]

    def _hardening(self) -> list[str]:
        """What the user's own manager can do without privileges; a system service can do more."""
        common = [
            "NoNewPrivileges=yes",
            "LockPersonality=yes",
            "RestrictRealtime=yes",
            "RestrictSUIDSGID=yes",
            "RestrictNamespaces=yes",
            "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
            "SystemCallArchitectures=native",
            "SystemCallFilter=@system-service",
            "SystemCallFilter=~@privileged @resources",
            "# More than @system-service less those two: threads are pinned, and the descriptor limit is raised.",
            "SystemCallFilter=sched_setaffinity sched_setscheduler setpriority setrlimit prlimit64 mbind set_mempolicy",
            "SystemCallErrorNumber=EPERM",
        ]
        if self.config.worker.runner in _RUNNERS_WITHOUT_JIT:
            common.append("MemoryDenyWriteExecute=yes")
        if self.is_user:
            return common
        return [
            "DynamicUser=yes",
            "ProtectSystem=strict",
            "ProtectHome=read-only",
            "PrivateTmp=yes",
            *self._devices(),
            "ProtectClock=yes",
            "ProtectControlGroups=yes",
            "ProtectHostname=yes",
            "ProtectKernelLogs=yes",
            "ProtectKernelModules=yes",
            "ProtectKernelTunables=yes",
            "ProtectProc=invisible",
            *self._capabilities(),
            *common,
        ]

    def _devices(self) -> list[str]:
        if not self.has_gpu:
            return ["PrivateDevices=yes"]
        allowed = [f"DeviceAllow={device} rw" for device in _GPU_DEVICES]
        return ["DevicePolicy=closed", *allowed]

    def _capabilities(self) -> list[str]:
        if 0 < self.config.http.port < 1024 and not self.config.http.uds:
            one = "CAP_NET_BIND_SERVICE"
            return [f"CapabilityBoundingSet={one}", f"AmbientCapabilities={one}"]
        return ["CapabilityBoundingSet=", "PrivateUsers=yes"]

    def _install(self) -> list[str]:
        target = "default.target" if self.is_user else "multi-user.target"
        return ["[Install]", f"WantedBy={target}"]


def socket_text(name: str, config: Config) -> str:
    """The .socket file that listens in the place of the service's own sockets. Raises ConfigError if it cannot."""
    http = config.http
    if http.uds:
        address = os.path.abspath(http.uds)
    elif not http.port:
        raise ConfigError("--socket needs a --port of its own, not 0")
    else:
        address = f"{_address(http.host)}{http.port}"
    lines = [
        "[Unit]",
        f"Description=shmserve, instance {name}: its socket, open from boot on and over restarts",
        "",
        "[Socket]",
        f"ListenStream={_escaped(address)}",
        f"Backlog={http.backlog}",
        *(["SocketMode=0600"] if http.uds else []),
        "",
        "[Install]",
        "WantedBy=sockets.target",
    ]
    return "\n".join(lines) + "\n"


def _address(host: str) -> str:
    """What stands before the port."""
    if not host:
        return ""  # both families
    try:
        is_6 = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host).version == 6
    except ValueError:
        raise ConfigError(
            f"--socket needs a numeric --host, got {host!r}: systemd resolves no names"
        ) from None
    return f"[{host}]:" if is_6 else f"{'127.0.0.1' if host == 'localhost' else host}:"


def _command(argv: Sequence[str]) -> str:
    return " ".join(_quoted(arg.replace("$", "$$")) for arg in argv)


def _quoted(arg: str) -> str:
    """An argument as systemd reads it: specifiers escaped, quoted if anything in it has a meaning."""
    text = _escaped(arg)
    if text and not set(text) & set(" \t\n'\"\\;"):
        return text
    for raw, shown in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t")):
        text = text.replace(raw, shown)
    return f'"{text}"'


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
