#!/bin/sh
# vllm-router 0.1.17 in front of shmserve. Works, with these flags; docs/scaling.md says what smg does better.
#
#   deploy/vllm-router/start.sh --worker-urls http://10.0.0.11:8000 http://10.0.0.12:8000
#
# No circuit breaker: opened by a few 5xx, it keeps a host that is well again out for a minute. Health probes do that work.
# Not --policy power_of_two: it reads /get_load in a shape of its own, and takes ours for -1.
# It forwards the client's key and does not check it: give the instances an --api-key.
# A client that stops reading is buffered here without a bound, and shmserve never learns of it.
exec "${VLLM_ROUTER:-vllm-router}" \
    --host 127.0.0.1 --port 30000 --prometheus-host 127.0.0.1 --prometheus-port 29000 \
    --policy cache_aware \
    --health-check-interval-secs 2 --health-check-timeout-secs 1 \
    --disable-circuit-breaker --retry-max-retries 3 \
    "$@"
