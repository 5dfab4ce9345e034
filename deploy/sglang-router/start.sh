#!/bin/sh
# sglang-router 0.3.2 in front of shmserve. Works, with these flags; its successor is smg (deploy/smg), and both bring a command of the
# name smg: never install them into one environment.
#
#   deploy/sglang-router/start.sh --worker-urls http://10.0.0.11:8000 http://10.0.0.12:8000
#
# Breaker 5 s, not 60 s: four refusals in half a second, 429 or 503, open it, and would turn a full fleet into an outage of a minute. Without a
# breaker, the retries of a request go to the host that has just died again and again, since it is the least busy one.
# It rewrites chat bodies: priority, timeout_ms, cache_salt and every other field that it does not know are gone.
# A client that stops reading is buffered here without a bound, and shmserve never learns of it.
exec "${SGLANG_ROUTER:-sglang-router}" launch \
    --host 127.0.0.1 --port 30000 --prometheus-host 127.0.0.1 --prometheus-port 29000 \
    --policy cache_aware \
    --health-check-interval-secs 2 --health-check-timeout-secs 1 \
    --cb-timeout-duration-secs 5 --retry-max-retries 5 \
    "$@"
