"""What `shmserve unit` prints, and what systemd's own tools say of it."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from shmserve import cli

Print = Callable[..., str]

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


@pytest.fixture
def unit(capsys: pytest.CaptureFixture[str]) -> Print:
    """The text that `shmserve unit ARGS` prints."""

    def printed(*args: str) -> str:
        assert cli.main(["unit", *args]) == 0
        return capsys.readouterr().out

    return printed


def fields(text: str, section: str) -> dict[str, str]:
    """The directives of a section; of one that is repeated, the last."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[method-assign, assignment]
    parser.read_string(text)
    return dict(parser[section])


def test_service_starts_what_the_options_say_under_the_units_name(unit: Print) -> None:
    text = unit("--name", "big", "--port", "8123", "--runner", "simulated")
    service = fields(text, "Service")
    assert service["Type"] == "notify"
    assert service["KillMode"] == "mixed"
    assert service["Restart"] == "on-failure"
    assert service["ExecStart"].endswith(
        " -P -m shmserve start --instance=big --port 8123 --runner simulated"
    )
    assert service["ExecStopPost"].startswith("-")
    assert service["ExecStopPost"].endswith(" -m shmserve sweep")
    for directory in ("CacheDirectory", "StateDirectory"):
        assert service[directory] == "big"
    assert service["RuntimeDirectory"] == "shmserve/big"
    assert fields(text, "Install")["WantedBy"] == "multi-user.target"


def test_time_limits_follow_from_the_options(unit: Print) -> None:
    service = fields(unit("--drain-timeout", "300", "--hang-timeout", "50"), "Service")
    assert int(service["TimeoutStopSec"]) > 300 + 10
    # A hung child withholds the watchdog for --hang-timeout, and then the supervisor ends it itself.
    assert int(service["WatchdogSec"]) >= 2 * 50


def test_arguments_reach_the_program_as_they_were_given(unit: Print) -> None:
    text = unit("--served-model-name", 'a "b" 100% $HOME \\n', "--owned-by", "it's")
    start = fields(text, "Service")["ExecStart"]
    assert r'"a \"b\" 100%% $$HOME \\n"' in start
    assert '"it\'s"' in start


@pytest.mark.parametrize(
    ("runner", "is_denied"), [("cpu", True), ("simulated", True), ("torch", False), ("hf", False)]
)
def test_writable_code_is_denied_where_nothing_is_compiled_into_memory(
    unit: Print, runner: str, is_denied: bool
) -> None:
    assert ("MemoryDenyWriteExecute=yes" in unit("--runner", runner)) is is_denied


def test_gpu_gets_its_devices_and_nothing_else_does(unit: Print) -> None:
    assert "PrivateDevices=yes" in unit("--runner", "cpu")
    text = unit("--runner", "cuda")
    assert "PrivateDevices" not in text
    assert "DevicePolicy=closed" in text
    assert "DeviceAllow=char-nvidia-uvm rw" in text


def test_low_port_gets_the_one_capability_that_it_needs(unit: Print) -> None:
    assert "AmbientCapabilities=CAP_NET_BIND_SERVICE" in unit("--port", "80")
    assert "AmbientCapabilities" not in unit("--port", "8080")


def test_user_unit_asks_for_nothing_that_only_root_can_give(unit: Print) -> None:
    text = unit("--user")
    assert fields(text, "Install")["WantedBy"] == "default.target"
    for word in ("DynamicUser", "RuntimeDirectory", "CapabilityBoundingSet", "ProtectSystem"):
        assert word not in text


@pytest.mark.parametrize(
    ("args", "address"),
    [
        ([], "127.0.0.1:8000"),
        (["--host", "::1", "--port", "9000"], "[::1]:9000"),
        (["--host", "localhost"], "127.0.0.1:8000"),
        (["--host", ""], "8000"),
        (["--uds", "/run/x%y.sock"], "/run/x%%y.sock"),
    ],
)
def test_socket_listens_where_the_service_would(unit: Print, args: list[str], address: str) -> None:
    text = unit("--socket", *args)
    found = re.search("^ListenStream=(.*)$", text, re.MULTILINE)
    assert found is not None
    assert found[1] == address
    assert ("SocketMode=0600" in text) is ("--uds" in args)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--name", "a/b"], ["--name", "a/b"]),
        (["--instance", "x"], ["--name"]),
        (["--daemon"], ["--daemon"]),
        (["--api-key", "sesame"], ["SHMSERVE_API_KEY", "EnvironmentFile"]),
        (["--port", "70000"], ["--port", "70000"]),
        (["--socket", "--port", "0"], ["--port"]),
        (["--socket", "--host", "example.org"], ["--host", "example.org"]),
        (["--no-such-option"], ["--no-such-option"]),
        (["--model", "./m.gguf"], ["--model ./m.gguf", "whole path"]),
        (["--model=m.gguf"], ["--model m.gguf", "whole path"]),
        (["--uds", "x.sock"], ["--uds x.sock", "whole path"]),
    ],
)
def test_what_cannot_be_a_unit_is_one_line(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["unit", *args]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("shmserve: error: ")
    for word in words:
        assert word in line
    assert "sesame" not in line


def test_variables_of_this_shell_do_not_leak_into_the_unit(
    unit: Print, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMSERVE_DRAIN_TIMEOUT", "4000")
    assert int(fields(unit(), "Service")["TimeoutStopSec"]) < 100


@needs_systemd
def test_systemd_takes_every_line(unit: Print, tmp_path: Path) -> None:
    files = {
        "one.service": unit("--name", "one", "--runner", "cpu"),
        "one.socket": unit("--name", "one", "--socket"),
        "two.service": unit("--name", "two", "--user", "--served-model-name", 'a "b" 100% $x'),
        "three.service": unit("--name", "three", "--runner", "cuda", "--port", "80"),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", *(str(tmp_path / name) for name in files)],
        capture_output=True,
        text=True,
        check=False,
    )
    # It also complains of units of the machine that ours need.
    ours = [line for line in done.stderr.splitlines() if str(tmp_path) in line]
    assert (done.returncode, ours) == (0, [])


@needs_systemd
def test_systemd_calls_the_exposure_ok(unit: Print, tmp_path: Path) -> None:
    path = tmp_path / "shmserve.service"
    path.write_text(unit("--runner", "cpu"))
    argv = ["systemd-analyze", "security", "--offline=yes", "--threshold=20", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze cannot look at a file")
    assert done.returncode == 0, done.stdout[-500:]


def test_files_that_a_service_could_not_find_or_read_are_named(
    unit: Print, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    keys, settings = tmp_path / "keys", tmp_path / "settings.toml"
    keys.write_text("sesame\n")
    settings.write_text("port = 9000\n")
    for config in (["--config", "settings.toml"], ["--config=settings.toml"]):
        assert cli.main(["unit", *config]) == 1
        assert "--config settings.toml: a service is started in /" in capsys.readouterr().err
    keys.chmod(0o600)
    args = ["unit", "--config", str(settings), "--api-key-file", str(keys), "--model", "org/name"]
    assert cli.main(args) == 0
    told = capsys.readouterr()
    assert f"--config {settings}" in told.out
    assert f"the service's own user cannot read {keys} ({keys} is closed to others)" in told.err
