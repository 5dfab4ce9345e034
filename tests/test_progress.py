"""What the operator sees while something loads."""

from __future__ import annotations

import io

from shmserve.progress import Reporter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_plain_lines_come_by_quarters_and_for_every_new_text() -> None:
    stream = io.StringIO()
    report = Reporter(stream)
    for percent in range(101):
        report("downloading", percent / 100)
    report("unpacking", None)
    report("unpacking", None)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "shmserve: downloading 0 %"
    assert lines[-2:] == ["shmserve: downloading 100 %", "shmserve: unpacking"]
    assert len(lines) == 6


def test_terminal_has_one_moving_line_that_ends_before_a_sentence() -> None:
    stream = Terminal()
    report = Reporter(stream)
    report("loading", 0.5)
    report("loading", 0.6)
    report.say("ready")
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert "[============            ]  50 % loading" in text
    assert text.endswith("\r\x1b[Kshmserve: ready\n")


def test_quiet_reporter_says_warnings_only() -> None:
    stream = io.StringIO()
    report = Reporter(stream, is_quiet=True)
    report("loading", 0.5)
    report.say("a word")
    report.say("a warning", is_warning=True)
    assert stream.getvalue() == "shmserve: a warning\n"


def test_reader_that_went_away_does_not_end_the_server() -> None:
    report = Reporter(Broken())
    report("loading", 0.5)
    report.say("ready")
