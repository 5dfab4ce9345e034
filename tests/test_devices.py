"""Several workers share the machine: a GPU each, and a part of the cores."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from shmserve.config import Config, ConfigError, WorkerConfig
from shmserve.devices import (
    check_devices,
    environment_of,
    environment_of_rank,
    has_driver,
    share_of_cores,
    visible_devices,
)


@pytest.mark.parametrize(
    ("told", "devices"),
    [
        ("0,1,3", ["0", "1", "3"]),
        (" GPU-a1, GPU-b2 ", ["GPU-a1", "GPU-b2"]),
        ("", []),
        ("-1", []),
        ("0,-1,2", ["0"]),
        ("0,,2", ["0"]),
    ],
)
def test_the_variable_says_which_devices_there_are(
    told: str, devices: list[str], tmp_path: Path
) -> None:
    (tmp_path / "nvidia0").touch()
    assert visible_devices({"CUDA_VISIBLE_DEVICES": told}, tmp_path) == devices


def test_without_the_variable_their_nodes_are_counted(tmp_path: Path) -> None:
    assert visible_devices({}, tmp_path) == []
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_devices({}, tmp_path) == ["0", "1"]


def test_each_worker_sees_a_gpu_of_its_own() -> None:
    config, environ = Config(num_workers=2), {"HOME": "/", "CUDA_VISIBLE_DEVICES": "4,5,6"}
    seen = [environment_of(worker, config, environ, ["4", "5", "6"]) for worker in range(2)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == ["4", "5"]
    assert all(each["HOME"] == "/" for each in seen)
    config = replace(config, worker=WorkerConfig(tensor_parallel=2))
    pairs = [environment_of(w, config, {}, ["0", "1", "2", "3"]) for w in range(2)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in pairs] == ["0,1", "2,3"]


def test_one_worker_or_no_gpu_changes_nothing() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert environment_of(0, Config(), environ, ["0", "1"]) is environ
    assert environment_of(1, Config(num_workers=2), {}, []) == {}


def test_workers_without_a_gpu_each_are_refused_by_name() -> None:
    two = Config(num_workers=2)
    check_devices(two, [])
    check_devices(two, ["0", "1"])
    check_devices(Config(), ["0"])
    check_devices(Config(num_workers=2, worker=WorkerConfig(runner="cpu")), ["0"])
    with pytest.raises(ConfigError, match="--workers 2 needs 2 GPUs, and 1 can be seen"):
        check_devices(two, ["0"])
    both = replace(two, worker=WorkerConfig(tensor_parallel=2))
    check_devices(both, ["0", "1", "2", "3"])
    with pytest.raises(
        ConfigError, match="--workers 2 with --tensor-parallel 2 needs 4 GPUs, and 3"
    ):
        check_devices(both, ["0", "1", "2"])


def test_cores_are_shared_out_and_nobody_goes_without() -> None:
    num_cores = len(os.sched_getaffinity(0))
    assert share_of_cores(1) is None
    assert share_of_cores(2) == max(1, num_cores // 2)
    assert share_of_cores(64 * num_cores) == 1


@pytest.mark.parametrize(
    ("num_cores", "quota", "num_workers", "expected"),
    [
        (64, 4, 1, 3),
        (64, 1, 1, 1),
        (64, 4, 2, 2),
        (64, 4, 8, 1),
        (2, 4, 1, None),
        (64, None, 1, None),
        (64, 64, 1, None),
    ],
)
def test_a_containers_time_is_shared_out_and_not_the_machines_cores(
    monkeypatch, num_cores, quota, num_workers, expected
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(num_cores)))
    monkeypatch.setattr("shmserve.devices.cores_of_quota", lambda: quota)
    assert share_of_cores(num_workers) == expected


def test_each_rank_of_a_worker_sees_a_gpu_of_its_own() -> None:
    environ = {"HOME": "/", "CUDA_VISIBLE_DEVICES": "4,5"}
    seen = [environment_of_rank(rank, environ) for rank in range(2)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == ["4", "5"]
    assert all(each["HOME"] == "/" for each in seen)
    none = {"CUDA_VISIBLE_DEVICES": ""}
    assert environment_of_rank(1, none) == none


def test_ranks_without_a_gpu_each_are_refused_by_name() -> None:
    ranks = Config(worker=WorkerConfig(tensor_parallel=2))
    check_devices(ranks, [])
    check_devices(ranks, ["0", "1"])
    check_devices(replace(ranks, worker=WorkerConfig(tensor_parallel=2, runner="torch")), ["0"])
    with pytest.raises(
        ConfigError, match="--tensor-parallel 2 needs 2 GPUs, and 1 can be seen"
    ) as e:
        check_devices(ranks, ["0"])
    assert "fewer ranks, or on the CPU (--runner torch)" in str(e.value)


@pytest.mark.parametrize("node", ["nvidiactl", "nvhost-gpu", "nvgpu/igpu0", "dxg"])
def test_a_driver_is_known_by_its_node_on_a_server_a_jetson_and_under_wsl(
    node: str, tmp_path: Path
) -> None:
    (tmp_path / "nvram").touch()
    assert not has_driver(tmp_path)
    (tmp_path / node).mkdir(parents=True)
    assert has_driver(tmp_path)
