"""deploy/: the settings without which streams are ruined in silence are there, and each file is one that its program takes."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from shmserve.config import HttpConfig

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
LONGEST_ANSWER_S = 600  # not streamed, it is silent till it is whole; OpenAI's clients wait so long
ROUTERS = {"smg": "SMG", "vllm-router": "VLLM_ROUTER", "sglang-router": "SGLANG_ROUTER"}


def settings_of(path):
    """The lines of a configuration, without comments."""
    lines = (line.partition("#")[0].strip() for line in (DEPLOY / path).read_text().splitlines())
    return [" ".join(line.split()) for line in lines if line]


def seconds_of(text):
    (number,) = re.findall(r"(\d+)s", text)
    return int(number)


@pytest.fixture
def longest_silence_s():
    """Of a stream that computes, with the settings that shmserve has by itself."""
    config = HttpConfig()
    return config.headers_after_s + config.keep_alive_s


@pytest.mark.parametrize(("router", "variable"), ROUTERS.items())
def test_a_start_file_gives_its_flags_first_and_what_it_was_given_last(router, variable):
    script = DEPLOY / router / "start.sh"
    run = subprocess.run(
        [script, "--port", "1", "--worker-urls", "http://a", "http://b"],
        env={variable: "/bin/echo", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    told = run.stdout.split()
    assert told[-5:] == ["--port", "1", "--worker-urls", "http://a", "http://b"]
    flags = dict(itertools.pairwise(told))
    assert told.index("--host") < told.index("--worker-urls")
    assert flags["--host"] == flags["--prometheus-host"] == "127.0.0.1"
    assert int(flags["--health-check-interval-secs"]) <= 2
    assert int(flags["--cb-timeout-duration-secs"]) <= 5
    assert flags["--policy"] == ("round_robin" if router == "vllm-router" else "cache_aware")


def test_nginx_neither_gathers_frames_nor_cuts_silence(longest_silence_s):
    settings = settings_of("nginx/nginx.conf")
    assert "proxy_buffering off;" in settings and "gzip off;" in settings
    assert "proxy_http_version 1.1;" in settings
    assert "least_conn;" in settings
    (retries,) = (each for each in settings if each.startswith("proxy_next_upstream "))
    assert {"http_503", "non_idempotent"} <= set(retries.strip(";").split())
    assert "http_429" not in retries
    (timeout,) = (each for each in settings if each.startswith("proxy_read_timeout"))
    assert seconds_of(timeout) >= LONGEST_ANSWER_S > longest_silence_s


def test_haproxy_neither_gathers_frames_nor_cuts_silence(longest_silence_s):
    settings = settings_of("haproxy/haproxy.cfg")
    assert "option http-no-delay" in settings
    assert "option httpchk GET /ready" in settings
    assert "balance leastconn" in settings
    (retries,) = (each for each in settings if each.startswith("retry-on"))
    assert "503" in retries and "429" not in retries
    for name in ("timeout client ", "timeout server "):
        (timeout,) = (each for each in settings if each.startswith(name))
        assert seconds_of(timeout) >= LONGEST_ANSWER_S > longest_silence_s


@pytest.mark.parametrize(
    ("program", "argv"),
    [
        ("nginx", ["-t", "-p", "{folder}", "-c", str(DEPLOY / "nginx" / "nginx.conf")]),
        ("haproxy", ["-c", "-f", str(DEPLOY / "haproxy" / "haproxy.cfg")]),
    ],
)
def test_the_program_itself_takes_the_file(program, argv, tmp_path):
    found = shutil.which(program, path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if found is None:
        pytest.skip(f"{program} is not installed")
    run = subprocess.run(
        [found, *(each.format(folder=tmp_path) for each in argv)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_the_scaling_page_names_no_folder_that_is_not_there_and_every_router():
    page = (DEPLOY.parent / "docs" / "scaling.md").read_text()
    named = set(re.findall(r"deploy/([a-z-]+)", page))
    assert all((DEPLOY / each).is_dir() for each in named), named
    assert {*ROUTERS, "nginx", "haproxy", "ray", "kubernetes"} <= named
