"""The settings of `shmserve start` as a table: flag, place in the Config tree, kind, help. Defaults come from the tree itself.

Owns: how a flag, an environment variable or a line of a TOML file becomes a field of Config. Never: validates across fields
(`Config.validate` does). Each setting is written once; click's options, SHMSERVE_* and the file's keys follow from it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar, get_args

import click

from shmserve.config import Config, ConfigError, Policy, RunnerName

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MOST_TABLE: Final = 65_536
SIMULATED_MAX_NUM_SEQS: Final = 256

F = TypeVar("F", bound=Callable[..., Any])


class ByteSize(click.ParamType):  # type: ignore[type-arg]  # generic in new clicks only
    """A number of bytes: 4096, 512M, 1GiB. The units are powers of 1,024."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", str(value).strip(), re.IGNORECASE)
        if match is None:
            self.fail(f"{value!r} is no size; write 4096, 512M or 1GiB", param, ctx)
        return int(match[1]) * _UNITS[match[2].upper()]


_BYTES: Final = ByteSize()
_FILE: Final = click.Path(exists=True, dir_okay=False, readable=True)
_POLICY: Final = click.Choice(get_args(Policy))


@dataclass(frozen=True, slots=True)
class Setting:
    """`place` is a path in Config: "rings.token_slots"."""

    flag: str
    place: str
    type: Any
    help: str

    @property
    def key(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def option(self) -> str:
        """As click wants it: a switch has a flag for each of its ways."""
        return f"{self.flag}/--no-{self.flag[2:]}" if self.type is bool else self.flag


SETTINGS: Final = (
    Setting("--model", "model.spec", str, "Local folder, .gguf file, hub id, or pypi:WHEEL==VERSION#FILE; the default model if empty."),
    Setting("--served-model-name", "model.served_name", str, "What clients call it; the model's own name if empty."),
    Setting("--max-model-len", "model.max_model_len", int, "Longest prompt plus answer in tokens; 0: the model's context."),
    Setting("--chat-template", "model.chat_template", _FILE, "A Jinja file that replaces the model's chat template."),
    Setting("--host", "http.host", str, "Address to listen on."),
    Setting("--port", "http.port", int, "Port to listen on; 0 takes a free one."),
    Setting("--uds", "http.uds", click.Path(dir_okay=False), "Listen on this Unix socket, not on a port."),
    Setting("--max-queued-requests", "http.max_queued_requests", int, "Requests that may wait; one more gets 503."),
    Setting("--max-body-bytes", "http.max_body_bytes", _BYTES, "Largest request body."),
    Setting("--tokenizer-threads", "http.tokenizer_threads", int, "Threads that tokenise prompts."),
    Setting("--headers-after", "http.headers_after_s", float, "Seconds after which a stream that computes gets its 200 without a token."),
    Setting("--keep-alive", "http.keep_alive_s", float, "Seconds of silence after which a stream gets a comment line."),
    Setting("--stream-interval", "http.stream_interval", int, "Tokens in an event of a stream, at least; a request may ask for more."),
    Setting("--slow-client", "http.slow_client", _POLICY, "What happens to a stream whose client does not read."),
    Setting("--slow-client-bytes", "http.slow_client_bytes", _BYTES, "Bytes that may wait for one client."),
    Setting("--slow-client-seconds", "http.slow_client_seconds", float, "How long a client may be stuck."),
    Setting("--owned-by", "http.owned_by", str, "The owner that /v1/models names."),
    Setting("--runner", "worker.runner", click.Choice(get_args(RunnerName)), "What computes: the C kernels for the CPU, torch, transformers' classes (hf), or a simulated GPU; auto: the best that works here."),
    Setting("--step-ms", "worker.step_ms", float, "Simulated runner: period of a step in milliseconds."),
    Setting("--script", "worker.script", _FILE, "Simulated runner: JSON file of token ids to emit."),
    Setting("--max-num-seqs", "worker.max_num_seqs", int, "Sequences computed at once (simulated runner: 256)."),
    Setting("--max-num-batched-tokens", "worker.max_num_batched_tokens", int, "Tokens of one step."),
    Setting("--block-size", "worker.block_size", int, "Tokens of one KV block."),
    Setting("--kv-cache-bytes", "worker.kv_cache_bytes", _BYTES, "Memory for the KV cache (512M, 1GiB); 0: by the free memory."),
    Setting("--kv-cache-fraction", "worker.kv_cache_fraction", float, "Memory for the KV cache as a share of the free memory, 0 to 0.95; 0: as --kv-cache-bytes says."),
    Setting("--prefix-cache", "worker.prefix_cache", bool, "Keep the KV cache of earlier prompts and answers for requests that begin with them."),
    Setting("--chunked-prefill", "worker.chunked_prefill", bool, "Spread a long prompt over steps, so that it does not hold up the streams that run."),
    Setting("--threads", "worker.num_threads", int, "Threads of the model on the CPU; 0: by the cores."),
    Setting("--num-speculative-tokens", "worker.num_speculative_tokens", int, "Tokens guessed per step from what the text repeats, where a request does not say it: 0 to 15."),
    Setting("--emission-log", "worker.emission_log", click.Path(dir_okay=False), "Write one JSON line per step to this file."),
    Setting("--token-ring-slots", "rings.token_slots", int, "Slots of the ring from the worker, a power of two."),
    Setting("--submit-ring-slots", "rings.submit_slots", int, "Slots of the ring to the worker, a power of two."),
    Setting("--ring-table-size", "rings.table_size", int, "Requests in flight per front end."),
    Setting("--token-policy", "rings.token_policy", _POLICY, "What happens when the token ring is full."),
    Setting("--submit-policy", "rings.submit_policy", click.Choice(("block", "drop")), "What happens when the submit ring is full."),
    Setting("--coalesce-tokens", "rings.coalesce_tokens", int, "Tokens that may wait beside a full ring before sequences pause."),
    Setting("--block-deadline", "rings.block_deadline_s", float, "Seconds that the worker waits under --token-policy block."),
    Setting("--submit-deadline", "rings.submit_deadline_s", float, "Seconds that a request waits for room in the submit ring."),
    Setting("--drain-timeout", "drain_timeout_s", float, "Seconds that requests in flight get at the end."),
    Setting("--hang-timeout", "hang_timeout_s", float, "Seconds after which a hung process is killed."),
    Setting("--instance", "instance", str, "Name of this instance; <uid>-<port> if empty."),
    Setting("--log-level", "log_level", click.Choice(("debug", "info", "warning", "error")), "How much is said on stderr."),
)  # fmt: skip


def _default(place: str) -> Any:
    value: Any = Config()
    for name in place.split("."):
        value = getattr(value, name)
    return value


def start_options(command: F) -> F:
    """Give a click command every setting as an option, and --config."""
    for setting in reversed(SETTINGS):
        default = _default(setting.place)
        command = click.option(
            setting.option,
            setting.key,
            type=setting.type,
            default=None if default == "" else default,
            show_default=default not in ("", 0),
            help=setting.help,
        )(command)
    return click.option(
        "--config",
        "config_file",
        type=_FILE,
        is_eager=True,
        expose_value=False,
        callback=_read_file,
        help="TOML file of settings: the long flags without dashes are its keys.",
    )(command)


def _read_file(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    """Make the file's values the defaults: a flag or a variable overrides them."""
    if path is None:
        return
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise click.BadParameter(f"{path}: {error}", ctx, param) from None
    known = {setting.key for setting in SETTINGS}
    found = {key.replace("-", "_"): value for key, value in values.items()}
    for key in found:
        if key not in known:
            raise click.BadParameter(f"{path}: unknown setting {key!r}", ctx, param)
    ctx.default_map = {**(ctx.default_map or {}), **found}


def build_config(values: Mapping[str, Any], is_default: Callable[[str], bool]) -> Config:
    """The Config of the options' values; `is_default` tells of a key whether nobody set it. Raises ConfigError."""
    fields: dict[str, dict[str, Any]] = {"": {}}
    for setting in SETTINGS:
        if values[setting.key] is not None:
            group, _, name = setting.place.rpartition(".")
            fields.setdefault(group, {})[name] = values[setting.key]
    config = Config.from_builtins({**fields.pop(""), **fields})
    if config.worker.runner == "simulated" and is_default("max_num_seqs"):
        config = replace(config, worker=replace(config.worker, max_num_seqs=SIMULATED_MAX_NUM_SEQS))
    needed = config.worker.max_num_seqs + config.http.max_queued_requests
    if needed > config.rings.table_size:
        if not is_default("ring_table_size") or needed > _MOST_TABLE:
            raise ConfigError(
                f"--ring-table-size {config.rings.table_size} is less than --max-num-seqs + "
                f"--max-queued-requests = {needed} (at most {_MOST_TABLE})"
            )
        config = replace(config, rings=replace(config.rings, table_size=needed))
    config.validate()
    return config
