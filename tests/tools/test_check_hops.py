"""check_hops.py and its exchange: whose time an event has, what is subtracted from what, and that a bar can be missed."""

import json

import pytest
from check_hops import FIRST, LAST, bars_of, cases, measure, measures_of, rows_of, table_of
from frontend_servers import OurServer
from timed_exchange import Exchange

SENT_NS = 5_000_000_000
STAMPS = {
    **{"arrival": 0, "parsed": 100, "tokenised": 200, "submitted": 210, "admitted": 300},
    **{"first_scheduled": 310, "prefill_end": 900, "sampled": 900, "published": 950},
    **{"popped": 1000, "framed": 1050, "written": 1100},
}
LAST_STAMPS = {"sampled": 1900, "published": 1950, "popped": 2000, "framed": 2050, "written": 2100}


def chunk(event):
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def stream_of(stamps=STAMPS, last=LAST_STAMPS, *, seen_us=(1_400, 2_450)):
    """A stream of two tokens, the second event cut in the middle by the reads."""
    tokens = [{"choices": [{"timing": {"token_us": [at]}}]} for at in (900, 1900)]
    end = {"choices": [{"timing": {"stamps_us": stamps, "last_token_us": last}}]}
    exchange = Exchange(SENT_NS)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    first, second = chunk(tokens[0]), chunk(tokens[1])
    at_ns = [SENT_NS + us * 1000 for us in seen_us]
    exchange.take(head + first + second[:20], at_ns[0])
    assert not exchange.is_whole()
    exchange.take(second[20:], at_ns[1])
    exchange.take(chunk(end) + b"0\r\n\r\n", at_ns[1] + 500_000)
    return exchange


def test_a_stream_is_whole_at_its_last_chunk_and_an_answer_at_its_length():
    assert stream_of().is_whole() and stream_of().status == 200
    exchange = Exchange(SENT_NS)
    assert exchange.status == 0
    for part in (b"HTTP/1.1 503 x\r\nConte", b"nt-Length: 4\r\n\r\n{}", b"\r\n"):
        assert not exchange.is_whole()
        exchange.take(part, SENT_NS)
    assert exchange.is_whole() and exchange.status == 503
    assert list(exchange.objects()) == [(SENT_NS, {})]
    with pytest.raises(ConnectionError):
        exchange.take(b"", SENT_NS)


def test_the_clients_time_of_a_frame_is_that_of_the_read_that_made_it_whole():
    found = measures_of(stream_of(), is_streamed=True)
    assert found[f"{FIRST}: client"] == 1_400 and found[f"{FIRST}: sum"] == 1_100
    assert found[f"{FIRST}: client - sum"] == 300
    assert found[f"{LAST}: client - sum"] == 2_450 - 2_100
    hops = {name: us for name, us in found.items() if ">" in name}
    assert sum(us for name, us in hops.items() if name.startswith(FIRST)) == 1_100
    assert hops[f"{LAST}: framed > written"] == 50


def test_an_answers_sum_ends_with_the_framing_of_its_last_token():
    timing = {"stamps_us": STAMPS | {"written": None}, "last_token_us": LAST_STAMPS | {"written": None}}  # fmt: skip
    body = json.dumps({"meta_info": {"timing": timing}}).encode()
    exchange = Exchange(SENT_NS)
    exchange.take(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), SENT_NS)
    exchange.take(body, SENT_NS + 2_650_000)
    found = measures_of(exchange, is_streamed=False)
    assert found[f"{LAST}: client - sum"] == 2_650 - 2_050
    assert f"{FIRST}: sum" not in found and not any("written" in name for name in found)


@pytest.mark.parametrize(
    ("exchange", "failing"),
    [
        (stream_of(), []),
        (stream_of(seen_us=(2_101, 2_450)), [f"x: {FIRST}: client - sum, median, us"]),
        (stream_of(seen_us=(1_400, 900)), [f"x: {LAST}: client - sum, median, us"]),
        (stream_of(STAMPS | {"parsed": -1}), ["x: the least of its hops, us"]),
    ],
)
def test_a_bar_fails_when_the_sums_differ_by_a_millisecond_or_a_hop_is_negative(exchange, failing):
    rows = rows_of("x", [measures_of(exchange, is_streamed=True)] * 3)
    assert [bar.name for bar in bars_of(rows) if not bar.holds] == failing
    table = table_of(rows)
    assert [line["us, p50 / p99"] for line in table][-1] == f"{LAST}: client - sum"
    assert len(table) == len(rows)


@pytest.mark.slow
def test_the_hops_of_every_api_add_up(tmp_path):
    """Not how well: this machine may be busy. The tool's bars say that."""
    with OurServer(tmp_path, 8, 3, 4.0, 0, False, (), pins=False) as server:
        for case in cases(3):
            rows = {row["measure"]: row for row in rows_of("x", measure(server.port, case, 10, 2))}
            ends = [row for name, row in rows.items() if name.endswith("client - sum")]
            assert len(ends) == 1 + case.is_streamed
            assert all(0 < row["p50_us"] < 50_000 for row in ends), rows
            assert all(row["least_us"] >= 0 for name, row in rows.items() if ">" in name)
            # Four hops in front of the first token's making, and the steps between it and the last.
            sums = rows[f"{LAST}: sum"]["least_us"]
            assert sums > rows[f"{FIRST}: first_scheduled > prefill_end"]["least_us"] > 0
