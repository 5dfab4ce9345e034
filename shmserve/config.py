"""What an operator can set: one frozen tree, built once, validated once, handed to every process as JSON.

Owns: names, units, bounds and defaults. Never: reads the environment, a file or the command line (`cli.py` does), or is read
by a module as a global: it is passed in.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from shmserve.request import MOST_SPECULATIVE_TOKENS

Policy = Literal["coalesce", "block", "drop"]
LogFormat = Literal["text", "json"]
Routing = Literal["affinity", "least-busy", "round-robin"]
RunnerName = Literal["auto", "cpu", "cuda", "torch", "hf", "simulated"]
CpuPrecision = Literal["auto", "fp32", "bf16", "int8"]
AttentionBackend = Literal["auto", "triton", "flashinfer"]
PRECISIONS_OF: dict[str, tuple[str, ...]] = {
    "auto": ("fp32", "bf16", "int8"),
    "cpu": ("int8",),
    "torch": ("fp32", "bf16"),
    "hf": ("fp32",),
    "cuda": (),
    "simulated": (),
}
"""Values of --cpu-precision that each runner can be told, beside auto."""
RUNNERS_OF_RANKS = ("auto", "torch", "cuda", "hf")
"""What computes a model of which each rank has a part (--tensor-parallel)."""


MOST_KEYS = 1_024
"""Of clients, and of operators: each request is compared with all of them, and all must fit the message that welcomes a child."""

MOST_ROUTING_BLOCKS = 65_536
"""Blocks of prompts of which a front end remembers who was sent them, where there are several workers."""


class ConfigError(ValueError):
    """A setting is out of bounds; the text is one line that names the flag and the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and under which name it is served. `folder` is the prepared folder (see models.py), set by the supervisor."""

    spec: str = ""
    folder: str = ""
    served_name: str = ""
    max_model_len: int = 0  # 0: the model's own context
    chat_template: str = ""  # path of a file that replaces the model's template


@dataclass(frozen=True, slots=True, kw_only=True)
class RingConfig:
    """Shapes and policies of the two rings of every channel."""

    token_slots: int = 16_384
    submit_slots: int = 1_024
    table_size: int = 1_024  # requests in flight per front end; fits 16 bits of a req_id
    token_policy: Policy = "coalesce"
    submit_policy: Policy = "block"
    coalesce_tokens: int = 65_536  # pending tokens per channel beyond which sequences are paused
    block_deadline_s: float = 0.1
    submit_deadline_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """The engine. Zero means "choose": threads by the cores, KV memory by the free memory."""

    runner: RunnerName = "auto"
    cpu_precision: CpuPrecision = "auto"  # of matrices; auto: what the runner is fastest in
    amx: bool = True  # where the CPU has it and it gives the same bits (worker/cpu/amx.py)
    attention_backend: AttentionBackend = "auto"  # on a GPU; auto: flashinfer where it can
    step_ms: float = 4.48  # simulated runner: period of a step
    script: str = ""  # simulated runner: JSON file of scripted token ids per request
    max_num_seqs: int = 32
    max_running_requests: int = 0  # of max_num_seqs, at most; 0: all of them
    waiting_timeout_s: float = 0.0  # 0: none
    running_timeout_s: float = 0.0
    max_num_batched_tokens: int = 512
    block_size: int = 16
    kv_cache_bytes: int = 0
    kv_cache_fraction: float = 0.0  # of the free memory; 0: by kv_cache_bytes
    prefix_cache: bool = True
    chunked_prefill: bool = True
    num_threads: int = 0
    tensor_parallel: int = 1  # ranks of one worker, each with a part of every layer
    num_speculative_tokens: int = 0  # of a request that does not say it
    emission_log: str = ""

    @property
    def run_slots(self) -> int:
        """Sequences that a worker computes at once."""
        return min(self.max_running_requests or self.max_num_seqs, self.max_num_seqs)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """The front end and its listening socket."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str = ""
    backlog: int = 1_024
    max_body_bytes: int = 32 * 1024 * 1024
    max_bodies_bytes: int = 64 * 1024 * 1024  # of all requests together
    max_queued_requests: int = 256
    max_queued_tokens: int = 0  # prompt tokens; 0: as many as the requests have
    queue_full_status: int = 503
    max_concurrent_connections: int = 4_096
    tokenizer_threads: int = 2
    headers_after_s: float = 15.0
    keep_alive_s: float = 15.0
    stream_interval: int = 1
    io_uring: bool = True  # where the kernel lets us (http/uring.py)
    slow_client: Policy = "coalesce"
    slow_client_bytes: int = 65_536
    slow_client_seconds: float = 60.0
    owned_by: str = "sglang"
    # Who may ask (http/security.py). The keys are SHA-256 digests in hex; a key itself is in no Config.
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str = ""
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key_file: str = ""
    metrics_without_key: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    ssl_keyfile_password_file: str = ""
    ssl_ca_certs: str = ""
    request_timeout_s: float = 60.0  # for a request's head, and again for its body
    idle_timeout_s: float = 75.0  # between requests of one connection
    log_prompts: bool = False
    ui: bool = True
    trust_request_chat_template: bool = False
    routing: Routing = "affinity"  # which worker computes a request (http/routing.py)
    affinity_margin: int = 0  # sequences; 0: a quarter of the run slots

    @property
    def bodies_bytes(self) -> int:
        """What the bodies of all requests may take together: room for the largest one, at least."""
        return max(self.max_bodies_bytes, self.max_body_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything. `validate()` is called once, by the supervisor, before anything is made."""

    instance: str = ""  # empty: "<uid>-<port>"
    num_http: int = 1
    num_workers: int = 1
    drain_timeout_s: float = 30.0
    hang_timeout_s: float = 60.0
    log_level: str = "info"
    log_format: LogFormat = "text"
    log_requests: bool = True
    otlp_traces_endpoint: str = ""  # empty: no traces
    log_file: str = ""  # instead of stderr
    log_max_bytes: int = 16 * 1024 * 1024
    crash_dump: bool = True  # what the rings held when a child died, to the state directory
    model: ModelConfig = field(default_factory=ModelConfig)
    rings: RingConfig = field(default_factory=RingConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    http: HttpConfig = field(default_factory=HttpConfig)

    @property
    def affinity_margin(self) -> int:
        """Sequences by which a worker may be busier that holds the whole prompt of a request."""
        return self.http.affinity_margin or max(2, self.worker.run_slots // 4)

    @property
    def instance_name(self) -> str:
        """The name that segments and the instance socket carry."""
        return self.instance or f"{os.getuid()}-{self.http.port}"

    def validate(self) -> None:
        """Raise ConfigError for the first setting out of bounds."""
        for flag, value, low, high in (
            ("--port", self.http.port, 0, 65_535),
            ("--http-processes", self.num_http, 1, 64),
            ("--workers", self.num_workers, 1, 64),
            ("--tensor-parallel", self.worker.tensor_parallel, 1, 64),
            ("--max-num-seqs", self.worker.max_num_seqs, 1, 16_384),
            ("--max-num-batched-tokens", self.worker.max_num_batched_tokens, 1, 1 << 20),
            ("--max-running-requests", self.worker.max_running_requests, 0, 16_384),
            ("--max-queued-requests", self.http.max_queued_requests, 0, 1 << 20),
            ("--max-queued-tokens", self.http.max_queued_tokens, 0, 1 << 40),
            ("--max-concurrent-connections", self.http.max_concurrent_connections, 1, 1 << 20),
            ("--ring-table-size", self.rings.table_size, 1, 65_536),
            ("--token-ring-slots", self.rings.token_slots, 2, 1 << 24),
            ("--submit-ring-slots", self.rings.submit_slots, 2, 1 << 20),
            ("--coalesce-tokens", self.rings.coalesce_tokens, 1, 1 << 40),
            ("--max-body-bytes", self.http.max_body_bytes, 1_024, 1 << 34),
            ("--log-max-bytes", self.log_max_bytes, 4_096, 1 << 40),
            ("--max-bodies-bytes", self.http.max_bodies_bytes, 1_024, 1 << 40),
            ("--slow-client-bytes", self.http.slow_client_bytes, 1_024, 1 << 34),
            ("--kv-cache-bytes", self.worker.kv_cache_bytes, 0, 1 << 50),
            ("--max-model-len", self.model.max_model_len, 0, 1 << 30),
            ("--tokenizer-threads", self.http.tokenizer_threads, 1, 64),
            ("--affinity-margin", self.http.affinity_margin, 0, 16_384),
            ("--stream-interval", self.http.stream_interval, 1, 1 << 20),
            ("--threads", self.worker.num_threads, 0, 1_024),
            (
                "--num-speculative-tokens",
                self.worker.num_speculative_tokens,
                0,
                MOST_SPECULATIVE_TOKENS,
            ),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{flag} must be {low} to {high}, got {value}")
        for flag, seconds, least in (
            ("--step-ms", self.worker.step_ms, 0.01),
            ("--block-deadline", self.rings.block_deadline_s, 0.0),
            ("--submit-deadline", self.rings.submit_deadline_s, 0.0),
            ("--drain-timeout", self.drain_timeout_s, 0.0),
            ("--hang-timeout", self.hang_timeout_s, 1.0),
            ("--waiting-timeout", self.worker.waiting_timeout_s, 0.0),
            ("--running-timeout", self.worker.running_timeout_s, 0.0),
            ("--headers-after", self.http.headers_after_s, 0.01),
            ("--keep-alive", self.http.keep_alive_s, 0.01),
            ("--slow-client-seconds", self.http.slow_client_seconds, 0.01),
            ("--request-timeout", self.http.request_timeout_s, 0.01),
            ("--idle-timeout", self.http.idle_timeout_s, 0.01),
        ):
            if not least <= seconds <= 86_400.0:
                raise ConfigError(f"{flag} must be {least} to 86400, got {seconds}")
        wait_s = self.rings.block_deadline_s * self.num_http
        if self.rings.token_policy == "block" and wait_s >= self.hang_timeout_s:
            raise ConfigError(
                f"--block-deadline {self.rings.block_deadline_s:g} s, for each of {self.num_http} front ends, must be below "
                f"--hang-timeout {self.hang_timeout_s:g} s: a worker that waits for room would be killed as one that hangs"
            )
        for flag, keys in (
            ("--api-key", self.http.api_keys),
            ("--admin-key", self.http.admin_keys),
        ):
            if len(keys) > MOST_KEYS:
                raise ConfigError(
                    f"{flag} and {flag}-file give {len(keys)} keys, and {MOST_KEYS} are the most"
                )
        precision, possible = self.worker.cpu_precision, PRECISIONS_OF[self.worker.runner]
        if precision not in ("auto", *possible):
            raise ConfigError(
                f"--cpu-precision {precision} cannot be had with --runner {self.worker.runner} "
                f"(possible: {', '.join(('auto', *possible))})"
            )
        attention, runner = self.worker.attention_backend, self.worker.runner
        if attention != "auto" and runner not in ("auto", "cuda"):
            raise ConfigError(
                f"--attention-backend {attention} cannot be had with --runner {runner} (possible: auto)"
            )
        ranks = self.worker.tensor_parallel
        if ranks > 1 and runner not in RUNNERS_OF_RANKS:
            raise ConfigError(
                f"--tensor-parallel {ranks} cannot be had with --runner {runner} "
                f"(possible: {', '.join(RUNNERS_OF_RANKS)})"
            )
        if ranks > 1 and precision == "int8":
            raise ConfigError(
                f"--tensor-parallel {ranks} cannot be had with --cpu-precision int8, which is the C kernels' alone "
                "(possible: auto, fp32, bf16)"
            )
        if self.http.queue_full_status not in (503, 429):
            raise ConfigError(
                f"--queue-full-status must be 503 or 429, got {self.http.queue_full_status}"
            )
        for flag, slots in (
            ("--token-ring-slots", self.rings.token_slots),
            ("--submit-ring-slots", self.rings.submit_slots),
        ):
            if slots & (slots - 1):
                raise ConfigError(f"{flag} must be a power of two, got {slots}")
        if not 0 <= self.worker.kv_cache_fraction <= 0.95:
            raise ConfigError(
                f"--kv-cache-fraction must be 0 to 0.95, got {self.worker.kv_cache_fraction}"
            )
        if self.worker.kv_cache_fraction and self.worker.kv_cache_bytes:
            raise ConfigError("--kv-cache-fraction and --kv-cache-bytes exclude each other")
        if self.otlp_traces_endpoint and not re.fullmatch(
            r"https?://[^/\s]+(/\S*)?", self.otlp_traces_endpoint
        ):
            raise ConfigError(
                "--otlp-traces-endpoint must be the http:// or https:// URL of a collector that takes OTLP over HTTP "
                f"(http://127.0.0.1:4318), got {self.otlp_traces_endpoint!r}"
            )
        if self.worker.block_size not in (8, 16, 32, 64, 128):
            raise ConfigError(
                f"--block-size must be 8, 16, 32, 64 or 128, got {self.worker.block_size}"
            )
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.instance_name):
            raise ConfigError(
                f"--instance must be 1 to 64 letters, digits, '-' or '_', got {self.instance_name!r}"
            )

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> Config:
        return msgspec.json.decode(data, type=cls)

    @classmethod
    def from_builtins(cls, value: Any) -> Config:
        """The tree from dicts, as a control message carries it."""
        return msgspec.convert(value, type=cls)
