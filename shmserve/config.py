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
RunnerName = Literal["auto", "cpu", "cuda", "torch", "hf", "simulated"]


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
    step_ms: float = 4.48  # simulated runner: period of a step
    script: str = ""  # simulated runner: JSON file of scripted token ids per request
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    block_size: int = 16
    kv_cache_bytes: int = 0
    kv_cache_fraction: float = 0.0  # of the free memory; 0: by kv_cache_bytes
    prefix_cache: bool = True
    chunked_prefill: bool = True
    num_threads: int = 0
    num_speculative_tokens: int = 0  # of a request that does not say it
    emission_log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """The front end and its listening socket."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str = ""
    backlog: int = 1_024
    max_body_bytes: int = 32 * 1024 * 1024
    max_queued_requests: int = 256
    tokenizer_threads: int = 2
    headers_after_s: float = 15.0
    keep_alive_s: float = 15.0
    stream_interval: int = 1
    slow_client: Policy = "coalesce"
    slow_client_bytes: int = 65_536
    slow_client_seconds: float = 60.0
    owned_by: str = "sglang"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything. `validate()` is called once, by the supervisor, before anything is made."""

    instance: str = ""  # empty: "<uid>-<port>"
    num_http: int = 1
    num_workers: int = 1
    drain_timeout_s: float = 30.0
    hang_timeout_s: float = 60.0
    log_level: str = "info"
    model: ModelConfig = field(default_factory=ModelConfig)
    rings: RingConfig = field(default_factory=RingConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    http: HttpConfig = field(default_factory=HttpConfig)

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
            ("--max-num-seqs", self.worker.max_num_seqs, 1, 16_384),
            ("--max-num-batched-tokens", self.worker.max_num_batched_tokens, 1, 1 << 20),
            ("--max-queued-requests", self.http.max_queued_requests, 0, 1 << 20),
            ("--ring-table-size", self.rings.table_size, 1, 65_536),
            ("--token-ring-slots", self.rings.token_slots, 2, 1 << 24),
            ("--submit-ring-slots", self.rings.submit_slots, 2, 1 << 20),
            ("--coalesce-tokens", self.rings.coalesce_tokens, 1, 1 << 40),
            ("--max-body-bytes", self.http.max_body_bytes, 1_024, 1 << 34),
            ("--slow-client-bytes", self.http.slow_client_bytes, 1_024, 1 << 34),
            ("--kv-cache-bytes", self.worker.kv_cache_bytes, 0, 1 << 50),
            ("--max-model-len", self.model.max_model_len, 0, 1 << 30),
            ("--tokenizer-threads", self.http.tokenizer_threads, 1, 64),
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
            ("--headers-after", self.http.headers_after_s, 0.01),
            ("--keep-alive", self.http.keep_alive_s, 0.01),
            ("--slow-client-seconds", self.http.slow_client_seconds, 0.01),
        ):
            if not least <= seconds <= 86_400.0:
                raise ConfigError(f"{flag} must be {least} to 86400, got {seconds}")
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
