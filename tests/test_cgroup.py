"""The limits of a container, from trees of files as the kernel shows them."""

from pathlib import Path

import pytest

from shmserve.cgroup import cores_of_quota, free_memory_bytes

MIB = 1 << 20


def tree(root: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """(mount, membership) with these files."""
    mount = root / "cgroup"
    mount.mkdir()
    for name, content in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(content)
    (root / "self").write_text(membership)
    return mount, root / "self"


V2_STAT = f"anon 1\nfile 3\ninactive_file {2 * MIB}\nactive_file {MIB}\n"
V1_STAT = f"inactive_file 5\ntotal_inactive_file {2 * MIB}\ntotal_active_file {MIB}\n"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (  # a container of its own namespace
            "0::/\n",
            {"memory.max": f"{100 * MIB}", "memory.current": f"{40 * MIB}", "memory.stat": V2_STAT},
            63 * MIB,
        ),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "7", "memory.stat": V2_STAT}, None),
        ("0::/\n", {}, None),  # the root of a machine has no such files
        (  # the group above allows less
            "0::/a/b\n",
            {
                "a/memory.max": f"{50 * MIB}",
                "a/memory.current": f"{45 * MIB}",
                "a/memory.stat": "",
                "a/b/memory.max": f"{80 * MIB}",
                "a/b/memory.current": f"{10 * MIB}",
                "a/b/memory.stat": "",
            },
            5 * MIB,
        ),
        (  # version 1 in a container, which sees the path of its host
            "4:memory:/docker/0123\n3:cpuset:/\n0::/\n",
            {
                "memory/memory.limit_in_bytes": f"{100 * MIB}",
                "memory/memory.usage_in_bytes": f"{40 * MIB}",
                "memory/memory.stat": V1_STAT,
            },
            63 * MIB,
        ),
        (  # more is taken than the limit allows
            "0::/\n",
            {"memory.max": "1000", "memory.current": "2000", "memory.stat": ""},
            0,
        ),
        ("", {}, None),
        ("rubbish\n::\n", {"memory.max": "no number"}, None),
        (
            "0::/\n",
            {"memory.max": "9", "memory.current": "4", "memory.stat": "\na b c\nactive_file x\n"},
            5,
        ),
    ],
)
def test_the_free_memory_is_what_every_group_leaves(tmp_path, membership, files, expected):
    assert free_memory_bytes(*tree(tmp_path, membership, files)) == expected


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "1000 100000\n"}, 1),
        ("0::/a\n", {"a/cpu.max": "max 100000", "cpu.max": "300000 100000"}, 3),
        (
            "1:cpu:/docker/0123\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            3,
        ),
        (
            "5:cpu,cpuacct:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "1 0"}, None),
    ],
)
def test_the_cores_are_those_that_the_quota_pays_for(tmp_path, membership, files, expected):
    assert cores_of_quota(*tree(tmp_path, membership, files)) == expected


def test_a_tree_that_is_not_there_limits_nothing(tmp_path):
    assert free_memory_bytes(tmp_path / "no", tmp_path / "none") is None
    assert cores_of_quota(tmp_path / "no", tmp_path / "none") is None


def test_this_process_has_some_memory_and_a_core():
    assert free_memory_bytes() != 0
    assert cores_of_quota() != 0
