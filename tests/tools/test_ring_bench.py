"""Every transport of bench_ring.py carries what was sent: the consumer process checks the last step itself."""

import pytest
from bench_ring import add_ratios, bars_of, measure_once
from ring_run import Drive
from ring_transports import makers

KINDS = ["rings", "rings columns", "zmq_msgpack", "zmq_pickle", "mp_queue", "mp_pipe"]


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
@pytest.mark.parametrize(
    "drive", [Drive("paced", 10, 3, 1_000_000), Drive("back_to_back", 300, 3, 0)]
)
def test_transport_delivers_and_is_measured(tmp_path, kind, drive):
    transport = makers(str(tmp_path))[kind](64)
    row = measure_once(transport, drive, (0, 0))
    assert row["producer_cpu_us"] > 0
    assert row["consumer_cpu_us"] > 0
    assert row["tokens_per_s"] > 0
    assert (row["latency_p50_us"] is not None) == (drive.mode == "paced")


def test_ratios_are_against_the_baseline_of_the_same_pass():
    keys = ("producer_cpu_us", "consumer_cpu_us", "latency_p50_us", "tokens_per_s")
    figures = {
        ("zmq_msgpack", "values"): dict.fromkeys(keys, 2.0) | {"latency_p50_us": None},
        ("rings", "values"): dict.fromkeys(keys, 1.0) | {"latency_p50_us": None},
    }
    add_ratios(figures)
    assert figures["rings", "values"]["producer_cpu_ratio"] == 0.5
    assert figures["rings", "values"]["latency_p50_ratio"] is None


def test_no_bar_is_judged_without_its_batch():
    assert bars_of([{"batch": 32, "transport": "rings", "form": "values", "mode": "paced"}]) == []
