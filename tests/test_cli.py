"""The command line: what becomes of flags, variables and files, and how errors look."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from shmserve import __version__, cli, supervisor
from shmserve.config import Config, ConfigError
from shmserve.control import MAX_MESSAGE_BYTES
from shmserve.models import PreparedModel
from shmserve.settings import SETTINGS, ByteSize

Run = Callable[..., Config]


@pytest.fixture(autouse=True)
def own_runtime_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Run:
    """`shmserve start ARGS` up to the supervisor: the Config that it is given."""
    seen: list[Config] = []

    class Recorder:
        def __init__(self, config: Config, **rest: object) -> None:
            seen.append(config)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(supervisor, "Supervisor", Recorder)

    def run(*args: str) -> Config:
        assert cli.main(["start", *args]) == 0
        return seen[-1]

    return run


def test_no_flag_gives_the_defaults_of_the_config_tree(start: Run) -> None:
    assert start() == Config()


def test_every_setting_names_a_place_that_exists_once() -> None:
    places = [setting.place for setting in SETTINGS]
    assert len(set(places)) == len(places)
    assert len({setting.key for setting in SETTINGS}) == len(places)


def test_flags_reach_their_places(start: Run) -> None:
    config = start(
        *("--port", "9001", "--max-num-seqs", "7", "--kv-cache-bytes", "512M"),
        *("--token-policy", "drop", "--token-ring-slots", "256", "--slow-client", "block"),
        *("--drain-timeout", "2.5", "--served-model-name", "m"),
    )
    assert config.http.port == 9001
    assert config.worker.max_num_seqs == 7
    assert config.worker.kv_cache_bytes == 512 << 20
    assert (config.rings.token_policy, config.rings.token_slots) == ("drop", 256)
    assert config.http.slow_client == "block"
    assert config.drain_timeout_s == 2.5
    assert config.model.served_name == "m"


def test_a_switch_has_a_flag_for_each_way_and_is_a_word_in_a_variable_and_a_file(
    start: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker = start("--no-prefix-cache", "--chunked-prefill").worker
    assert (worker.prefix_cache, worker.chunked_prefill) == (False, True)
    file = tmp_path / "settings.toml"
    file.write_text("chunked-prefill = false\n")
    assert start("--config", str(file)).worker.chunked_prefill is False
    assert start("--config", str(file), "--chunked-prefill").worker.chunked_prefill is True
    monkeypatch.setenv("SHMSERVE_PREFIX_CACHE", "false")
    assert start().worker.prefix_cache is False


def test_the_kv_cache_is_sized_by_bytes_or_by_a_fraction_and_not_by_both(
    start: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("--kv-cache-fraction", "0.5").worker.kv_cache_fraction == 0.5
    for flags in (
        ("--kv-cache-bytes", "1G", "--kv-cache-fraction", "0.5"),
        ("--kv-cache-fraction", "1"),
    ):
        assert cli.main(["start", *flags]) == 1
        assert "--kv-cache-fraction" in capsys.readouterr().err


def test_variable_is_read_and_a_flag_beats_it(start: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMSERVE_PORT", "9002")
    monkeypatch.setenv("SHMSERVE_MAX_BODY_BYTES", "1MiB")
    assert start().http.port == 9002
    assert start().http.max_body_bytes == 1 << 20
    assert start("--port", "9003").http.port == 9003


def test_file_is_read_and_flag_and_variable_beat_it(
    start: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "shmserve.toml"
    file.write_text(
        'port = 9004\nmax-num-seqs = 9\nkv_cache_bytes = "1GiB"\nrunner = "simulated"\n'
    )
    config = start("--config", str(file))
    assert config.http.port == 9004
    assert config.worker.max_num_seqs == 9
    assert config.worker.kv_cache_bytes == 1 << 30
    assert config.worker.runner == "simulated"
    monkeypatch.setenv("SHMSERVE_PORT", "9005")
    assert start("--config", str(file)).http.port == 9005
    assert start("--config", str(file), "--port", "9006").http.port == 9006


def test_simulated_runner_has_room_for_256_unless_told_otherwise(start: Run) -> None:
    assert start("--runner", "simulated").worker.max_num_seqs == 256
    assert start("--runner", "simulated", "--max-num-seqs", "3").worker.max_num_seqs == 3


def test_ring_table_grows_with_what_it_must_hold_unless_it_was_set(
    start: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    # What it must hold, and a few on their way out.
    assert start("--max-queued-requests", "5000").rings.table_size == 5096
    args = ["start", "--max-queued-requests", "5000", "--ring-table-size", "2048"]
    assert cli.main(args) == 1
    assert "--ring-table-size 2048 is less than" in capsys.readouterr().err


def test_front_ends_and_workers_are_as_many_as_told(
    start: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    config = start("--http-processes", "2", "--workers", "3", "--max-num-seqs", "500")
    assert (config.num_http, config.num_workers) == (2, 3)
    assert config.rings.table_size == 3 * 500 + 256 + 64
    assert (config.http.routing, config.affinity_margin) == ("affinity", 125)
    config = start("--routing", "round-robin", "--affinity-margin", "3", "--max-num-seqs", "1")
    assert (config.http.routing, config.affinity_margin) == ("round-robin", 3)
    assert start("--max-num-seqs", "1").affinity_margin == 2
    for flag in ("--http-processes", "--workers"):
        for number in ("0", "65"):
            assert cli.main(["start", flag, number]) == 1
            assert f"{flag} must be 1 to 64, got {number}" in capsys.readouterr().err


def test_limits_are_printed_with_their_sum_and_nothing_is_started(
    default_model: PreparedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["start", "--print-limits", "--runner", "simulated", "--max-model-len", "1000"]
    assert cli.main([*args, "--max-bodies-bytes", "48M"]) == 0
    text = capsys.readouterr().out
    assert f"1 x {16 * 48 << 20:>13,} B  bodies" in text
    assert f"512 x {8_000:>13,} B  their prompts" in text
    (whole,) = re.findall(r"^all of it: ([\d,.]+) MiB$", text, re.M)
    parts = re.findall(r"^\S.*: ([\d,.]+) MiB$", text.partition("all of it")[0], re.M)
    assert len(parts) == 3
    total = sum(float(part.replace(",", "")) for part in parts)
    assert abs(total - float(whole.replace(",", ""))) < 0.2


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("2k", 2048),
        ("512M", 512 << 20),
        ("1GiB", 1 << 30),
        ("3 GB", 3 << 30),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert ByteSize().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "-1", "1.5G", "G", "12Q", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        ByteSize().convert(text, None, None)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["start", "--prot", "1"], 2, ["--prot"]),
        (["start", "--port", "many"], 2, ["--port", "'many'"]),
        (["start", "--queue-full-status", "500"], 1, ["--queue-full-status must be 503 or 429"]),
        (["start", "--waiting-timeout", "-1"], 1, ["--waiting-timeout must be 0.0 to"]),
        (
            ["start", "--token-policy=block", "--block-deadline=30", "--http-processes=2"],
            1,
            ["--block-deadline 30 s, for each of 2 front ends", "--hang-timeout 60 s"],
        ),
        (["start", "--port", "70000"], 1, ["--port must be 0 to 65535", "70000"]),
        (["start", "--token-policy", "hope"], 2, ["--token-policy", "coalesce"]),
        (["start", "--token-ring-slots", "100"], 1, ["--token-ring-slots", "power of two"]),
        (["start", "--chat-template", "/no/such"], 2, ["--chat-template", "/no/such"]),
        (["start", "--config", "/no/such.toml"], 2, ["/no/such.toml"]),
        (["start", "--instance", "a/b"], 1, ["--instance"]),
        (["start", "surplus"], 2, ["surplus"]),
        (["begin"], 2, ["begin"]),
        (["start", "--daemon", "--port", "0"], 1, ["--port 0 needs --instance"]),
        (["start", "--log-file", "/no/such/log"], 1, ["--log-file /no/such/log"]),
        (["start", "--log-max-bytes", "10"], 1, ["--log-max-bytes", "4096"]),
        (["status"], 1, ["no instance is running"]),
        (["bench", "--rate", "1"], 1, ["no instance is running", "--url"]),
        (["restart", "--instance", "nobody"], 1, ["nobody"]),
        (["stop", "--port", "1"], 1, ["-1'", "is running"]),
        (["drain", "--instance", "nobody"], 1, ["nobody"]),
    ],
)
def test_error_is_one_line_on_stderr_and_a_code(
    args: list[str], code: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(args) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("shmserve: error: ")
    for word in words:
        assert word in line


@pytest.mark.parametrize("text", ["port = ", "prot = 1", 'port = "x"'])
def test_bad_file_is_one_line_that_says_where(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    assert cli.main(["start", "--config", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "bad.toml" in line or "--port" in line


def test_operators_errors_lose_their_traceback_and_ours_keep_it() -> None:
    @cli.cli.command("break")
    @click.argument("how")
    def broken(how: str) -> None:
        class CloserError(ConfigError):
            """One of that kind, by another name."""

        errors = {"config": ConfigError("two\nlines"), "closer": CloserError("two\nlines")}
        raise errors.get(how, KeyError(how))

    try:
        assert cli.main(["break", "config"]) == cli.main(["break", "closer"]) == 1
        with pytest.raises(KeyError):
            cli.main(["break", "other"])
    finally:
        del cli.cli.commands["break"]


def test_version_is_data_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"shmserve {__version__}\n"


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["start", "--help"]) == 0
    text = capsys.readouterr().out
    assert [setting.flag for setting in SETTINGS if f"{setting.flag} " not in text] == []


def test_keys_become_digests_and_are_shown_nowhere(
    start: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From flags, a variable, a settings file and a file of keys, which add up."""
    file = tmp_path / "keys"
    file.write_text("# ours\n\n  key-in-file  \nkey-two\n")
    settings = tmp_path / "settings.toml"
    settings.write_text(f'admin-key = ["key-of-admin"]\napi-key-file = "{file}"\n')
    config = start("--api-key", "key-a", "--api-key", "key-b", "--config", str(settings))
    assert config.http.api_keys == tuple(
        hashlib.sha256(key).hexdigest() for key in (b"key-a", b"key-b", b"key-in-file", b"key-two")
    )
    assert config.http.admin_keys == (hashlib.sha256(b"key-of-admin").hexdigest(),)
    monkeypatch.setenv("SHMSERVE_API_KEY", "key-c key-d")
    assert len(start().http.api_keys) == 2
    assert cli.main(["start", "--config", str(settings), "--help"]) == 0
    assert cli.main(["start", "--api-key", "key-\u00e9"]) == 2
    assert cli.main(["start", "--admin-key", "key-with blank"]) == 2
    file.write_text("# nothing\n")
    assert cli.main(["start", "--api-key-file", str(file)]) == 1
    shown = "".join(capsys.readouterr()) + repr(config) + config.to_json().decode()
    assert "--api-key-file" in shown and "holds no key" in shown
    for secret in ("key-a", "key-c", "key-in-file", "key-of-admin", "key-with", "key-\u00e9"):
        assert secret not in shown
    assert not any(digest in repr(config) for digest in config.http.api_keys)


def test_lists_of_hosts_and_origins_are_repeated_flags(start: Run) -> None:
    http = start("--allowed-hosts", "a.example", "--allowed-hosts", ".b.example").http
    assert http.allowed_hosts == ("a.example", ".b.example")
    assert start("--cors-origin", "https://c.example").http.cors_origins == ("https://c.example",)


def test_every_option_is_a_variable_the_settings_file_too(
    start: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("port = 9007\n")
    monkeypatch.setenv("SHMSERVE_CONFIG", str(file))
    assert start().http.port == 9007


def test_an_address_that_kubernetes_put_into_our_variable_is_no_port(
    start: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It names one for every service, after the service: SHMSERVE_PORT, if that is called shmserve."""
    monkeypatch.setenv("SHMSERVE_PORT", "tcp://10.96.0.17:8000")
    assert start() == Config()
    file = tmp_path / "settings.toml"
    file.write_text("port = 9008\n")
    assert start("--config", str(file)).http.port == 9008
    assert start("--port", "9009").http.port == 9009


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"port = [8000]", "port must be one value"),
        (b"port = 1979-05-27", "port must be one value"),
        (b"port = {a = 1}", "port must be one value"),
        (b"port = true", "port must be one value"),
        (b"max-num-seqs = 32.7", "max-num-seqs must be a whole number"),
        (b"max-queued-requests = inf", "max-queued-requests must be a whole number"),
        (b"max-queued-requests = nan", "max-queued-requests must be a whole number"),
        (b"chat-template = 1", "chat-template must be a path"),
        (b"prefix-cache = [true]", "prefix-cache must be true or false"),
        (b'api-key = [["sesame"]]', "api-key must be a text, or a list of texts"),
        (b"api-key = {sesame = 1}", "api-key must be a text, or a list of texts"),
        (b'host = "caf\xe9"', "utf-8"),
    ],
)
def test_a_value_of_another_kind_in_the_file_is_one_line(
    text: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(text + b"\n")
    assert cli.main(["start", "--config", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "bad.toml" in line and words in line
    assert "sesame" not in line


def test_values_of_the_file_may_be_written_as_they_are_on_the_command_line(
    start: Run, tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        'api-key = "sesame"\nport = "9010"\nmax-num-seqs = 8.0\nallowed-hosts = ["a", "b"]\n'
        'prefix-cache = "false"\ndrain-timeout = 5\nserved-model-name = 7\n'
    )
    config = start("--config", str(file))
    assert config.http.api_keys == (hashlib.sha256(b"sesame").hexdigest(),)
    assert (config.http.port, config.worker.max_num_seqs) == (9010, 8)
    assert config.http.allowed_hosts == ("a", "b")
    assert config.worker.prefix_cache is False
    assert (config.drain_timeout_s, config.model.served_name) == (5.0, "7")


def test_keys_are_bounded_since_a_child_is_told_of_all_of_them(
    start: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_text("\n".join(f"key-{number}" for number in range(1024)))
    flags = ("--api-key-file", str(file), "--admin-key-file", str(file))
    config = start(*flags)
    assert len(config.http.api_keys) == len(config.http.admin_keys) == 1024
    assert len(config.to_json()) < MAX_MESSAGE_BYTES // 1.5
    assert cli.main(["start", *flags, "--api-key", "one-more"]) == 1
    assert "1025 keys, and 1024 are the most" in capsys.readouterr().err


def test_closed_standard_streams_are_opened_before_anything_takes_their_numbers() -> None:
    code = (
        "import os, sys; from shmserve.cli import main; assert main(['--version']) == 0; fd = int(sys.argv[1]);"
        "os.write(fd, ' '.join(os.readlink(f'/proc/self/fd/{n}') for n in range(3)).encode())"
    )
    reader, writer = os.pipe()
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code, str(writer)]
    done = subprocess.run(shell, pass_fds=[writer], check=False)
    os.close(writer)
    with open(reader) as told:
        assert (done.returncode, told.read()) == (0, "/dev/null /dev/null /dev/null")


def test_status_of_all_shows_the_others_where_one_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shmserve.commands import find, instances
    from shmserve.instance_socket import InstanceError, NotListeningError

    def answer(instance: find.Instance) -> dict[str, object]:
        if instance.name in ("stopped", "other"):
            raise InstanceError(f"instance {instance.name!r} did not answer")
        if instance.name == "gone":
            raise NotListeningError("no instance 'gone' is running")
        return {"instance": instance.name}

    names = ("gone", "one", "stopped", "two", "other")
    monkeypatch.setattr(find, "running", lambda: [find.Instance("/x", name) for name in names])
    monkeypatch.setattr(instances, "_status_of", answer)
    assert cli.main(["status", "--all", "--json"]) == 1
    told = capsys.readouterr()
    assert [each["instance"] for each in json.loads(told.out)] == ["one", "two"]
    said = "instance 'stopped' did not answer; instance 'other' did not answer"
    assert told.err == f"shmserve: error: {said}\n"
