#!/bin/sh
# vllm-router 0.1.17 in front of shmserve. Works, with these flags; docs/scaling.md says what smg does better.
#
#   deploy/vllm-router/start.sh --worker-urls http://10.0.0.11:8000 http://10.0.0.12:8000
#
# Breaker 5 s, not 60 s: opened by a few 5xx, it would keep a host that is well again out for a minute. Without a breaker, the retries of a
# request go to the host that has just died again and again, since it is the least busy one.
# Not --policy cache_aware: it has every chat tokenised by two hosts before it is sent, and then knows prompts by their number of tokens only, so
# that prompts of one length all go to one host. Where prefixes are shared within a session, --policy consistent_hash and an X-Session-ID.
# Not --policy power_of_two: it reads /get_load in a shape of its own, and takes ours for -1.
# It forwards the client's key and does not check it: give the instances an --api-key.
# A client that stops reading is buffered here without a bound, and shmserve never learns of it.
exec "${VLLM_ROUTER:-vllm-router}" \
    --host 127.0.0.1 --port 30000 --prometheus-host 127.0.0.1 --prometheus-port 29000 \
    --policy round_robin \
    --health-check-interval-secs 2 --health-check-timeout-secs 1 \
    --cb-timeout-duration-secs 5 --retry-max-retries 5 \
    "$@"
