"""The figures of a load whose every time is known, as numbers, as text, as a file and as pictures."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from shmserve import load_file, load_plot
from shmserve.load_report import LoadReport, Objectives, RequestResult, figures
from shmserve.load_table import latency_table, load_text, number, sweep_text, text_table

MS = 1_000_000


def result(index: int, ttft_ms: int = 20, gap_ms: int = 5, **fields) -> RequestResult:
    """Due every 100 ms, sent 1 ms later, four frames of one token, over 1 ms after the last."""
    due_ns = index * 100 * MS
    arrivals = tuple(due_ns + (ttft_ms + i * gap_ms) * MS for i in range(4))
    values = {
        "index": index,
        "due_ns": due_ns,
        "sent_ns": due_ns + MS,
        "end_ns": arrivals[-1] + MS,
        "status": 200,
        "error": None,
        "arrivals_ns": arrivals,
        "num_tokens": 4,
        "num_prompt_tokens": 10,
        "finish_reason": "length",
    }
    return RequestResult(**(values | fields))


def refused(index: int) -> RequestResult:
    fields = {"status": 503, "error": "503", "arrivals_ns": (), "num_tokens": 0}
    return result(index, message="The queue is full.", **fields)


def row_of(report: LoadReport, objectives: Objectives | None = None, name: str = "rate 1/s"):
    rows = [(kind, count, "why") for kind, count in report.errors.items()]
    return {"load": name, **report.summary(objectives), "error_rows": rows}


REPORT = LoadReport.of([result(1, gap_ms=7), result(0), refused(2)])


def test_wall_time_is_from_the_first_due_to_the_last_end():
    assert [each.index for each in REPORT.results] == [0, 1, 2]
    assert REPORT.wall_s == pytest.approx(0.2 + 0.020 + 0.015 + 0.001)
    row = REPORT.summary()
    assert row["tokens_per_s"] == pytest.approx(8 / REPORT.wall_s)
    assert row["prompt_tokens_mean"] == 10
    assert (row["itl_p50_ms"], row["itl_max_ms"]) == (6.0, 7.0)
    assert row["lateness_max_ms"] == 1.0
    assert row["lag_p50_ms"] is None


def test_nothing_is_no_figure():
    assert set(figures("x", []).values()) == {None}
    assert LoadReport.of([]).summary()["tokens_per_s"] == 0.0


def test_a_good_request_is_whole_and_keeps_every_limit():
    row = REPORT.summary(Objectives.parse("ttft=20, itl=6"))
    assert row["good"] == 1  # the second has gaps of 7 ms, the third was refused
    assert row["goodput_per_s"] == pytest.approx(1 / REPORT.wall_s)
    assert REPORT.summary(Objectives())["good"] == 2
    assert REPORT.summary(Objectives.parse("ttft=19.9"))["good"] == 0
    assert "good" not in REPORT.summary()


@pytest.mark.parametrize(
    "text", ["foo=1", "ttft", "ttft=", "ttft=x", "ttft=0", "itl=-1", "e2e=inf"]
)
def test_what_is_no_objective_is_refused(text):
    with pytest.raises(ValueError):
        Objectives.parse(text)


def test_numbers_keep_three_digits():
    values = (None, 7, 0.1234, 9.994, 12.34, 99.96, 123.4, 12345.6)
    assert [number(value) for value in values] == [
        *("-", "7", "0.12", "9.99", "12.3", "100.0", "123", "12,346")
    ]


def test_columns_stand_under_their_titles():
    assert text_table(["a", "bb"], [["x", "1"], ["long", "222"]]) == (
        "a      bb\n----  ---\nx       1\nlong  222"
    )


def test_the_text_of_a_load_has_figures_goodput_and_errors():
    text = load_text(row_of(REPORT, Objectives.parse("itl=6")))
    assert text.splitlines()[0] == "rate 1/s: 2 of 3 requests whole, in 0.24 s"
    assert "10.0 prompt tokens each" in text
    assert "goodput 4.24 requests/s (33 %)" in text
    assert text.splitlines()[-1] == "error: 1 x 503: why"
    (itl,) = [line.split() for line in text.splitlines() if line.startswith("ITL")]
    assert itl == ["ITL", "6.00", "6.00", "7.00", "7.00", "7.00"]
    assert "lag" not in text


def test_a_load_without_a_whole_response_has_no_table():
    text = load_text(row_of(LoadReport.of([refused(0)])))
    assert "TTFT" not in text
    assert text.endswith("error: 1 x 503: why")


def test_lag_is_a_line_where_the_server_told_of_its_tokens():
    report = LoadReport.of([result(0, lags=((20 * MS, 1.5), (25 * MS, 2.5)))])
    (lag,) = [x for x in latency_table(report.summary()).splitlines() if x.startswith("lag")]
    assert lag.split()[1:3] == ["2.00", "2.00"]


def test_a_sweep_is_one_line_a_load():
    first, second = row_of(REPORT), row_of(REPORT, name="rate 20/s")
    lines = sweep_text([first, second]).splitlines()
    assert len(lines) == 4
    assert lines[3].startswith("rate 20/s") and lines[3].endswith(" 1")
    assert "good/s" not in lines[0] and "lag" not in lines[0]
    objectives = Objectives.parse("ttft=1")
    assert "good/s" in sweep_text([row_of(REPORT, objectives)]).splitlines()[0]


def test_the_file_has_every_request_with_times_since_it_was_due(tmp_path):
    path = str(tmp_path / "load.json")
    settings = {"seed": 3, "objectives": Objectives.parse("ttft=5")}
    load_file.write(path, "http://x", "m", settings, [(row_of(REPORT), REPORT)])
    whole = json.loads((tmp_path / "load.json").read_text())
    assert whole["settings"] == {"seed": 3, "objectives": {"limits_ms": {"ttft": 5.0}}}
    (load,) = whole["loads"]
    assert load["ok"] == 2
    detail = load["requests_detail"]
    assert [request["due_s"] for request in detail] == [0.0, 0.1, 0.2]
    assert detail[1]["arrivals_ms"] == [20.0, 27.0, 34.0, 41.0]
    assert detail[2]["message"] == "The queue is full."


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    missing = str(tmp_path / "no" / "x.json")
    with pytest.raises(load_file.LoadFileError, match="no such folder"):
        load_file.check(missing)
    with pytest.raises(load_file.LoadFileError, match="No such file"):
        load_file.write(missing, "", "", {}, [])


def many(num: int) -> LoadReport:
    lags = tuple((i * 100 * MS, 1.0 + i / 100) for i in range(num))
    return LoadReport.of([replace(result(i, 20 + i % 7), lags=(lags[i],)) for i in range(num)])


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 150])
def test_a_load_is_drawn_with_its_panels(tmp_path, num):
    report = many(num)  # 150: more gaps than are drawn as single dots
    load_plot.plot_load(str(tmp_path / "x.png"), "rate 1/s", report, row_of(report))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_an_svg_is_well_formed_and_a_sweep_can_be_one(tmp_path):
    rows = [row_of(many(n), Objectives.parse("ttft=21"), f"rate {n}/s") for n in (2, 5)]
    rows.append(row_of(LoadReport.of([refused(0)]), name="rate 9/s"))  # left out
    load_plot.plot_sweep(str(tmp_path / "x.svg"), rows)
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    assert root.tag.endswith("svg")
    assert sum(1 for _ in root.iter("{http://www.w3.org/2000/svg}path")) > 50


@pytest.mark.slow
def test_a_sweep_of_answers_without_gaps_is_drawn(tmp_path):
    """--max-tokens 1: what is measured is the prefill, and no answer has an ITL; nor has any a text where all are calls of tools."""
    single = LoadReport.of([replace(r, arrivals_ns=r.arrivals_ns[:1]) for r in many(3).results])
    mute = LoadReport.of([replace(r, arrivals_ns=()) for r in many(3).results])
    for name, reports in (("none", [single, single]), ("some", [single, many(4), mute])):
        path = tmp_path / f"{name}.png"
        rows = [row_of(report, name=f"rate {i}/s") for i, report in enumerate(reports)]
        load_plot.plot_sweep(str(path), rows)
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_picture_that_cannot_be_written_is_one_line(tmp_path):
    report = many(2)
    with pytest.raises(load_plot.PlotError, match="Is a directory"):
        (tmp_path / "x.png").mkdir()
        load_plot.plot_load(str(tmp_path / "x.png"), "", report, row_of(report))


def test_what_cannot_be_drawn_is_one_line(tmp_path, monkeypatch):
    nothing = LoadReport.of([refused(0)])
    path = str(tmp_path / "x.png")
    with pytest.raises(load_plot.PlotError, match="no response was whole"):
        load_plot.plot_load(path, "", nothing, row_of(nothing))
    with pytest.raises(load_plot.PlotError, match="no response was whole"):
        load_plot.plot_sweep(path, [row_of(nothing)])
    with pytest.raises(load_plot.PlotError, match=r"\.png, \.svg"):
        load_plot.check(str(tmp_path / "x.bmp"))
    with pytest.raises(load_plot.PlotError, match="no such folder"):
        load_plot.check(str(tmp_path / "no" / "x.png"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(load_plot.PlotError, match=r"shmserve\[plot\]"):
        load_plot.check(path)
