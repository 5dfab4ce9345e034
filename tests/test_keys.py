"""Keys as digests: what is one, what is none, and who never sees one."""

from pathlib import Path

import pytest

from shmserve.children import child_environment
from shmserve.config import ConfigError
from shmserve.keys import MOST_KEY_CHARACTERS, digest_of_key, digests_of_file, is_among


def raw(*keys: str) -> list[bytes]:
    return [bytes.fromhex(digest_of_key("--api-key", key)) for key in keys]


def test_each_key_is_found_and_nothing_else() -> None:
    digests = raw("alpha", "beta", "gamma")
    for key in (b"alpha", b"beta", b"gamma"):
        assert is_among(key, digests)
    for other in (b"", b"alph", b"alphaa", b"Alpha", *digests, digests[0].hex().encode()):
        assert not is_among(other, digests)
    assert not is_among(b"alpha", [])


@pytest.mark.parametrize(
    "key", ["", "two words", "tab\tbed", "n\u00e9", "\x7f", "k" * (MOST_KEY_CHARACTERS + 1)]
)
def test_what_no_header_could_carry_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key") as raised:
        digest_of_key("--api-key", key)
    assert not key or key not in str(raised.value)


def test_a_file_holds_one_key_a_line_and_remarks(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the team\n\n alpha \nbeta\r\n")
    assert [bytes.fromhex(d) for d in digests_of_file("--api-key-file", str(file))] == raw(
        "alpha", "beta"
    )


@pytest.mark.parametrize("content", [b"", b"# only a remark\n", b"\xff\xfe\n", b"two words\n"])
def test_a_file_that_holds_no_keys_is_one_line_that_names_it(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=str(file)) as raised:
        digests_of_file("--api-key-file", str(file))
    assert "two words" not in str(raised.value)
    with pytest.raises(ConfigError, match="No such file"):
        digests_of_file("--api-key-file", str(tmp_path / "none"))


@pytest.mark.parametrize("role", ["http", "worker"])
def test_no_child_inherits_a_key(role: str) -> None:
    environ = {"SHMSERVE_API_KEY": "alpha", "SHMSERVE_ADMIN_KEY": "beta", "HOME": "/h"}
    found = child_environment(role, environ)
    assert found["HOME"] == "/h"
    assert not {"alpha", "beta"} & set(found.values())
