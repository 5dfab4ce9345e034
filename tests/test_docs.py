"""README and docs: the commands in them exist, with the flags that they give, and the pages that they name are there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import click.testing
import pytest

from shmserve.cli import cli
from shmserve.settings import SETTINGS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def flags_of(command: click.Command) -> set[str]:
    return {
        flag
        for parameter in command.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
        if flag.startswith("-")
    }


def commands_in(page: Path) -> Iterator[list[str]]:
    """The words of each `shmserve COMMAND ...` in the page's blocks of code, whatever precedes it on its line."""
    for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.search(r"(?:^|[\s/(`])shmserve ((?:start|[a-z]+) ?.*)", line)
            if found and found[1].split()[0] in cli.commands:
                words = shlex.split(re.split(r"[;|&`>]", found[1])[0], comments=True)
                yield words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_in_a_block_of_code_takes_the_flags_that_it_is_given(page: Path) -> None:
    for name, *words in commands_in(page):
        known = flags_of(cli.commands[name]) | {"-h", "--help"}
        if name == "unit":
            known |= flags_of(cli.commands["start"])
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= known, (name, given - known)


def test_the_pages_have_commands_to_look_at() -> None:
    """Else the test above looks at nothing."""
    names = [words[0] for page in PAGES for words in commands_in(page)]
    assert len(names) > 20 and {"start", "chat", "bench", "unit", "top", "status"} <= set(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_links_to_is_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        linked = page if not path else page.parent / path
        assert linked.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
            anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
            assert anchor in anchors, target


def test_help_says_the_default_of_every_number_size_and_switch() -> None:
    told = click.testing.CliRunner().invoke(cli, ["start", "--help"]).output
    entries = re.split(r"\n  (?=--)", told)
    for setting in SETTINGS:
        if setting.is_list or setting.type not in (int, float, bool):
            continue
        (entry,) = (each for each in entries if each.startswith((f"{setting.flag} ",)))
        assert "[default:" in entry, setting.flag
