"""docs/metrics.md: every metric and what it means, made of the tables that /metrics itself is made of.

    python -m tools.metrics_page > docs/metrics.md

A test compares the page with this tool's, and both with a live /metrics.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable
from typing import Final

from shmserve import boards
from shmserve.http import metric_table as table
from shmserve.http.stock_metrics import all_stock

HEAD: Final = """\
# What every metric means

Made by `python -m tools.metrics_page`; a test keeps it true. `GET /metrics` is the same from any front end: it looks at the boards
and rings of the whole instance at the moment of the scrape, and costs nothing between two. Times are in seconds, shares 0 to 1.
`deploy/prometheus.yml` and `deploy/prometheus-rules.yml` have a scrape and alerts, `deploy/grafana/shmserve.json` a dashboard.

## Which of the three lags is it?

A stream is slow at one of three places, and each has its own number:

| where | what to look at |
|---|---|
| the worker makes tokens slowly | `shmserve_itl_engine_seconds`, `shmserve_step_seconds`, `shmserve_preempted_total` |
| they wait between worker and front end | `shmserve_ring_depth` of `*.tokens`, `shmserve_hop_publish_seconds` (the ring was full), `shmserve_hop_pop_seconds` (the event loop was busy), `shmserve_loop_lag_seconds` |
| a client does not read | `shmserve_clients_congested`, `shmserve_client_backlog_bytes`, `shmserve_mailbox_bytes` |

`shmserve_itl_wire_seconds` against `shmserve_itl_engine_seconds` says whether the last two matter: as long as they are alike, nothing
between the model and the sockets costs a token time.

## What happens at a restart

- A process that dies takes its series (label `process`) with it. Those of its successor begin at 0, which `rate()` and `increase()` know as
  a reset. What it had counted since the last scrape is lost to these series.
- Sums over processes (`shmserve_refusals_total`, `shmserve_completions_total`, everything named `vllm:` or `sglang:`) lose nothing: the supervisor adds
  what the dead had counted. They begin anew with the instance.
- A channel's rings are made anew when either of its ends dies, and their counters with them.
- A scrape while that happens counts nobody twice: it is repeated until the supervisor's books did not change meanwhile.
- While a front end is restarted, connections (a scrape's, too) wait in the socket's backlog.
"""

PARTS: Final = (
    ("## The instance", table.DERIVED),
    (
        "## Each process\n\nLabel `process`: `worker0`, `http0`, `supervisor0`.",
        table.WORDS.values(),
    ),
    (
        "## Distributions\n\nLabel `process`. Hops, time between tokens and steps have buckets from 50 us.\n\n"
        "While `shmserve_io_uring` is 1, 16 plain tokens or more that come together are sent in one call, and the kernel does not say when each "
        "was sent. They are taken to have gone one after the other and to have taken equally long: a token's write hop is the call's time by "
        "their number, and its frame hop the laying out of all of them and the shares of those before it. The last "
        "token's times are measured, those of the others lie on the line to it.",
        table.HISTOGRAMS.values(),
    ),
    (
        "## Each ring\n\nLabel `ring`: `http0-worker0.tokens` is read by front end 0 and written by worker 0, `http0-worker0.submit` goes the "
        "other way. A slot is one record: of one token, of several that were merged, of a start or an end.",
        table.RING_WORDS.values(),
    ),
)


def reasons_of(name: str) -> list[tuple[str, str]]:
    """What boards.py says of each value of one of its tables of reasons."""
    text = inspect.getsource(boards)
    words = text.split(f"{name}: Final", 1)[1].split('"""', 2)[1]
    found = re.findall(r"^(\w+) {2,}(.+)$|^(\w+) (?=\S)(.+)$", words, re.MULTILINE)
    return [(a or c, b or d) for a, b, c, d in found if (a or c) in getattr(boards, name)]


def lines() -> Iterable[str]:
    yield HEAD
    for title, shown in PARTS:
        yield f"{title}\n"
        yield "| metric | kind | meaning |\n|---|---|---|"
        for each in shown:
            yield f"| `{each.sample_name}` | {each.kind} | {each.text} |"
        yield ""
    for title, name in (
        ("### Reasons of `shmserve_refusals_total`", "REFUSALS"),
        ("### Reasons of `shmserve_completions_total`", "ENDINGS"),
        ("### Causes of `shmserve_restarts_total`", "DEATH_CAUSES"),
    ):
        yield f"{title}\n\n| value | meaning |\n|---|---|"
        for value, meaning in reasons_of(name):
            yield f"| `{value}` | {meaning} |"
        yield ""
    yield (
        "## The names that vLLM and SGLang have\n\nLabel `model_name`; sums over all processes. `vllm:inter_token_latency_seconds` is what was written to "
        "the sockets, not what the engine made (vLLM's own is the engine's).\n"
    )
    yield "| metric | kind | meaning |\n|---|---|---|"
    for stock, kind in all_stock():
        suffix = "_total" if kind == "counter" else ""
        yield f"| `{stock.name}{suffix}` | {kind} | {stock.text} |"


def page() -> str:
    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
