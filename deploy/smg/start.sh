#!/bin/sh
# smg (Shepherd Model Gateway) in front of shmserve: the router that docs/scaling.md recommends. pip install 'shmserve[router]' brings the
# version that is tested; other versions differ in what they do about 429 and breakers.
#
#   deploy/smg/start.sh --worker-urls http://10.0.0.11:8000 http://10.0.0.12:8000
#
# What is given here comes behind these flags and wins. Start the instances with --queue-full-status 429 (a 503 opens smg's breaker), and,
# where smg must reach them by name, --allowed-hosts NAME.
#
# 127.0.0.1: smg asks nobody for a key by itself, and its POST /workers adds workers. Before you open it to others: --api-key.
# Health every 2 s, not 60 s: a host that hangs gets traffic until three probes have failed.
# Breaker 5 s, not 60 s: a fleet that was full for a moment is back when it has room, not a minute later.
# Load every second: workers with 8 waiting requests, or with 0.8 of their KV cache in use, get nothing while another has less.
exec "${SMG:-smg}" launch \
    --host 127.0.0.1 --port 30000 --prometheus-host 127.0.0.1 --prometheus-port 29000 \
    --policy cache_aware \
    --health-check-interval-secs 2 --health-check-timeout-secs 1 \
    --cb-timeout-duration-secs 5 --retry-max-retries 3 \
    --load-monitor-interval 1 \
    "$@"
