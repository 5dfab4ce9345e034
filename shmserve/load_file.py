"""A load as a JSON file: settings, figures, and every request with its times, from which all figures can be made again.

Owns: the form of the file. Clients only.

    {"target", "model", "settings": {option: value},
     "loads": [{"load", ...figures..., "requests_detail": [{"due_s", "sent_ms", "end_ms", "arrivals_ms", "lags_ms", ...}]}]}

`due_s` counts from the load's start, what ends in `_ms` from when the request was due; `lags_ms` are durations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from shmserve.load_report import LoadReport, RequestResult


class LoadFileError(RuntimeError):
    """The file cannot be written; the text is one line that names it."""


def check(path: str) -> None:
    """Raises LoadFileError if it could not be written there: before a load of an hour, not behind it."""
    if not Path(path).absolute().parent.is_dir():
        raise LoadFileError(f"--json {path}: there is no such folder")


def write(
    path: str,
    target: str,
    model: str,
    settings: Mapping[str, Any],
    loads: Sequence[tuple[Mapping[str, Any], LoadReport]],
) -> None:
    """Raises LoadFileError."""
    whole = {
        "target": target,
        "model": model,
        "settings": {
            name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
            for name, value in settings.items()
        },
        "loads": [
            dict(row) | {"requests_detail": [_request(result, report) for result in report.results]}
            for row, report in loads
        ],
    }
    try:
        Path(path).write_text(json.dumps(whole, indent=1) + "\n")
    except OSError as error:
        raise LoadFileError(f"--json {path}: {error.strerror or error}") from None


def _request(result: RequestResult, report: LoadReport) -> dict[str, Any]:
    def since_due_ms(at_ns: int) -> float:
        return round((at_ns - result.due_ns) / 1e6, 3)

    return {
        "due_s": round((result.due_ns - report.begin_ns) / 1e9, 6),
        "sent_ms": since_due_ms(result.sent_ns),
        "end_ms": since_due_ms(result.end_ns),
        "status": result.status,
        "error": result.error,
        "message": result.message,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.num_prompt_tokens,
        "output_tokens": result.num_tokens,
        "arrivals_ms": [since_due_ms(at_ns) for at_ns in result.arrivals_ns],
        "lags_ms": [round(lag, 3) for _, lag in result.lags],
    }
