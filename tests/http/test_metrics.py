"""/metrics against the tables it is made of, the page that explains it, and what was served."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import until

from shmserve import boards
from shmserve.http import metric_table as table
from shmserve.http.stock_metrics import all_stock
from shmserve.rings import layout
from tools.dashboard import dashboard
from tools.metrics_page import page

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def told(server):
    """name -> family, of a server that has served a stream, an answer and a refusal."""
    server.stream(prompt="Hello world", max_tokens=8).objects()
    server.complete(prompt="Hello world", max_tokens=2)
    assert server.post("/v1/completions", {"prompt": ""}).status == 400
    server.wait_idle()
    # Times are folded into the histograms on the heartbeat.
    until(lambda: server.metrics()["shmserve_itl_wire_seconds_sum", "http0"] > 0, "folded")
    text = server.get("/metrics").body.decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def ours() -> list[table.Shown]:
    tables = (table.WORDS, table.HISTOGRAMS, table.RING_WORDS)
    return [*table.DERIVED, *(shown for each in tables for shown in each.values())]


def test_every_word_of_every_board_is_explained() -> None:
    specs = (boards.WORKER_BOARD, boards.HTTP_BOARD, boards.SUPERVISOR_BOARD)
    words = {word for spec in specs for word in spec.words}
    assert {w for w in words if not table.is_shown_elsewhere(w)} == set(table.WORDS)
    histograms = {name for spec in specs[:2] for name in spec.histograms}
    assert histograms == set(table.HISTOGRAMS)


def test_gauges_of_the_boards_are_gauges_of_the_metrics() -> None:
    """Else the sums over dead processes would add up what only says how it is."""
    gauges = boards.WORKER_GAUGES | boards.HTTP_GAUGES
    own = set(boards.WORKER_BOARD.words) | set(boards.HTTP_BOARD.words)
    shown = {word for word, shown in table.WORDS.items() if shown.kind == "gauge"}
    assert gauges == shown & own


def test_every_word_of_a_ring_is_explained() -> None:
    words = {*layout.PRODUCER_WORDS, *layout.CONSUMER_WORDS} - set(table.RING_WORDS_LEFT_OUT)
    assert words <= set(table.RING_WORDS)


def test_metrics_hold_every_name_of_the_tables_and_no_other(told) -> None:
    wanted = {shown.name for shown in ours()} | {stock.name for stock, _ in all_stock()}
    assert set(told) == wanted
    assert len({shown.name for shown in ours()}) == len(ours())


def test_kinds_and_help_are_those_of_the_tables(told) -> None:
    for shown in ours():
        assert (told[shown.name].type, told[shown.name].documentation) == (shown.kind, shown.text)
    for stock, kind in all_stock():
        assert (told[stock.name].type, told[stock.name].documentation) == (kind, stock.text)


def test_no_series_comes_twice(told) -> None:
    for family in told.values():
        series = [(s.name, tuple(sorted(s.labels.items()))) for s in family.samples]
        assert len(set(series)) == len(series), family.name


def test_the_page_is_the_tools() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == page(), "make it anew: see its first lines"


def test_the_page_explains_every_name(told) -> None:
    explained = set(re.findall(r"`((?:shmserve_|vllm:|sglang:)\w+)`", page()))
    for family in told.values():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name in explained


def value_of(told, name, **labels):
    base = re.sub("_(total|count|sum|bucket)$", "", name)
    for sample in told[base].samples:
        if sample.name == name and all(sample.labels.get(k) == v for k, v in labels.items()):
            return sample.value
    raise AssertionError(f"{name} {labels} is not there")


def test_times_are_seconds(told) -> None:
    assert 0 <= value_of(told, "shmserve_heartbeat_age_seconds", process="worker0") < 60
    assert 0 < value_of(told, "shmserve_slowest_step_seconds", process="worker0") < 60
    mean = value_of(told, "shmserve_step_seconds_sum", process="worker0") / value_of(
        told, "shmserve_step_seconds_count", process="worker0"
    )
    assert 0.00005 < mean < 1  # --step-ms=1
    first = next(s for s in told["shmserve_hop_write_seconds"].samples if "le" in s.labels)
    assert first.labels["le"] == "5e-05"


def test_stock_names_say_what_ours_say(told) -> None:
    """One worker, one front end: sums over processes are what each shows."""
    model = "SmolLM2-135M-Instruct"
    for theirs, own, process in (
        ("vllm:generation_tokens_total", "shmserve_generation_tokens_total", "worker0"),
        ("vllm:time_to_first_token_seconds_count", "shmserve_ttft_seconds_count", "http0"),
        ("vllm:inter_token_latency_seconds_sum", "shmserve_itl_wire_seconds_sum", "http0"),
        ("sglang:num_requests_total", "shmserve_requests_total", "http0"),
    ):
        value = value_of(told, theirs, model_name=model)
        assert value == value_of(told, own, process=process) > 0, theirs


def test_ended_completions_are_counted_by_reason_once_each(server) -> None:
    def ended():
        found = server.metrics()
        return {r: found["shmserve_completions_total", r] for r in boards.ENDINGS}

    before = ended()
    server.complete(prompt="Hello", max_tokens=2)
    server.complete(prompt="Hello", max_tokens=2, n=3)
    server.complete(prompt="Hello", max_tokens=50, seed=1_000_009)  # dog_then_eos
    stream = server.stream(prompt="Hello", max_tokens=4000)
    stream.take(3)
    stream.leave()
    server.wait_idle()
    moved = {reason: value - before[reason] for reason, value in ended().items()}
    assert moved == {"stop": 1, "length": 4, "abort": 1, "error": 0, "timeout": 0}


def test_an_abort_has_its_latency(server) -> None:
    before = server.metrics()["shmserve_abort_seconds_count", "http0"]
    stream = server.stream(prompt="Hello", max_tokens=4000)
    stream.take(3)
    stream.leave()
    server.wait_idle()
    after = server.metrics()
    assert after["shmserve_abort_seconds_count", "http0"] == before + 1


def test_ready_workers_are_counted(told) -> None:
    assert value_of(told, "shmserve_workers") == value_of(told, "shmserve_workers_ready") == 1
    assert value_of(told, "shmserve_ready", process="http0") == 1


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\b((?:shmserve_|vllm:|sglang:)\w+)", text))


@pytest.mark.parametrize("file", ["prometheus-rules.yml", "grafana/shmserve.json"])
def test_dashboard_and_rules_ask_for_what_is_there(told, file) -> None:
    text = (ROOT / "deploy" / file).read_text()
    there = {sample.name for family in told.values() for sample in family.samples}
    asked = names_in(text)
    assert len(asked) > 10
    assert asked <= there, asked - there


def test_the_dashboard_is_json_that_places_every_panel() -> None:
    board = json.loads((ROOT / "deploy" / "grafana" / "shmserve.json").read_text())
    places = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & places, f"{panel['title']} lies over another"
        assert max(x for x, _ in cells) < 24
        places |= cells
        if panel["type"] != "row":
            assert panel["targets"] and panel["description"], panel["title"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_dashboard_is_the_tools() -> None:
    assert (ROOT / "deploy" / "grafana" / "shmserve.json").read_text() == dashboard()


def test_what_the_dashboard_shows_in_percent_is_a_share() -> None:
    panels = [each for each in json.loads(dashboard())["panels"] if each["type"] != "row"]
    shares = [each for each in panels if each["fieldConfig"]["defaults"]["unit"] == "percentunit"]
    queries = [target["expr"] for panel in shares for target in panel["targets"]]
    assert len(queries) >= 5
    assert not [query for query in queries if " / " not in query]


def test_every_alert_has_a_test_that_it_fires() -> None:
    alerts = re.findall(r"alert: (\w+)", (ROOT / "deploy" / "prometheus-rules.yml").read_text())
    tests = (ROOT / "deploy" / "prometheus-rules.test.yml").read_text()
    assert len(alerts) > 10
    assert not [alert for alert in alerts if alert not in tests]


@pytest.mark.slow
def test_promtool_takes_configuration_rules_and_metrics(server) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here (Debian's package prometheus)")

    def run(*args: str, text: str | None = None) -> str:
        done = subprocess.run(
            [promtool, *args], input=text, capture_output=True, text=True, cwd=ROOT / "deploy"
        )
        lint = "\n".join(
            line
            for line in (done.stdout + done.stderr).splitlines()
            if not re.match(r"(vllm|sglang):\w+ metric names should not contain ':'", line)
        )
        assert done.returncode == 0 or args[0:2] == ("check", "metrics"), lint
        return lint

    run("check", "config", "prometheus.yml")
    run("check", "rules", "prometheus-rules.yml")
    run("test", "rules", "prometheus-rules.test.yml")
    # Their names are what they are; of ours, nothing is to be said.
    assert run("check", "metrics", text=server.get("/metrics").body.decode()) == ""
