"""Boots a real systemd in a container and does to the unit of `shmserve unit` what an operator, and bad luck, would.

    python tools/systemd_boot.py [--tree DIR] [--keep-log]         as root, with debootstrap and systemd-nspawn (systemd-container)

The tree is a small Debian 12, built once with debootstrap under $XDG_CACHE_HOME/shmserve-systemd-boot and never written to: every
boot has a volatile overlay. This source tree, the packages of this interpreter and the default model's file are bound into
it read-only; the server runs the simulated runner, under the Debian interpreter, as the unit's own dynamic user.

Inside, a oneshot service runs systemd_checks.py: it installs the printed units, and checks one promise after the other. One
line a check, exit code 1 if any failed.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from systemd_checks import CHECKS
from systemd_machine import MODEL, REPORT, SITE, SOURCE

ROOT = Path(__file__).resolve().parents[1]
SUITE = "bookworm"
PACKAGES = "systemd,systemd-sysv,python3,libgomp1"
BOOT_TIMEOUT_S = 420


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "shmserve-systemd-boot"


def build_tree(tree: Path) -> None:
    """Debian in a folder; half a one never has the final name."""
    if tree.exists():
        return
    partial = tree.with_name(tree.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    print(f"building {tree} (a few minutes, once)", file=sys.stderr)
    argv = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(partial)]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    partial.rename(tree)


def model_file() -> Path:
    """The default model's file, fetched if need be."""
    from shmserve.model_cache import cache_root
    from shmserve.models import DEFAULT_MODEL, prepare

    prepare(DEFAULT_MODEL)
    return Path(glob.glob(f"{cache_root()}/downloads/*/**/*.gguf", recursive=True)[0])


@contextlib.contextmanager
def boot_files(report: Path) -> Iterator[list[str]]:
    """The files that make the tree run our checks, as arguments of systemd-nspawn."""
    service = report / "shmserve-check.service"
    service.write_text(
        f"""[Unit]
Description=checks of shmserve under systemd
After=basic.target

[Service]
Type=oneshot
Environment=PYTHONPATH={SOURCE}:{SOURCE}/tools PYTHONDONTWRITEBYTECODE=1
ExecStart=/usr/bin/python3 -P {SOURCE}/tools/systemd_checks.py
ExecStopPost=systemctl --force --no-block exit
StandardOutput=file:{REPORT}/output
StandardError=file:{REPORT}/output
TimeoutStartSec=infinity
"""
    )
    path_file = report / "shmserve.pth"
    path_file.write_text(f"{SITE}\n")
    yield [
        f"--bind-ro={ROOT}:{SOURCE}",
        f"--bind-ro={sysconfig.get_paths()['purelib']}:{SITE}",
        f"--bind-ro={model_file()}:{MODEL}",
        f"--bind={report}:{REPORT}",
        f"--bind-ro={path_file}:/usr/local/lib/python3.11/dist-packages/{path_file.name}",
        f"--bind-ro={service}:/etc/systemd/system/{service.name}",
    ]


def boot(tree: Path, report: Path) -> int:
    """Boot the tree with the checks as its only aim; nspawn's exit code."""
    with boot_files(report) as binds, open(report / "console", "wb") as console:
        argv = ["systemd-nspawn", "--quiet", f"--directory={tree}", "--volatile=overlay"]
        argv += ["--boot", "--register=no", "--keep-unit", "--private-network", "--console=pipe"]
        argv += [*binds, "systemd.unit=shmserve-check.service", "systemd.log_target=journal"]
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=console, stderr=console) as it:
            try:
                return it.wait(BOOT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                print(f"not done after {BOOT_TIMEOUT_S} s", file=sys.stderr)
                return 1
            finally:
                if it.poll() is None:
                    it.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        it.wait(20)
                    it.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, default=cache_dir() / SUITE)
    parser.add_argument(
        "--keep-log", action="store_true", help="keep the folder with console and journal"
    )
    options = parser.parse_args()
    if os.getuid() != 0:
        sys.exit("systemd_boot: booting a container needs root")
    for program in ("debootstrap", "systemd-nspawn"):
        if shutil.which(program) is None and not (
            program == "debootstrap" and options.tree.exists()
        ):
            sys.exit(f"systemd_boot: {program} is missing (Debian: debootstrap, systemd-container)")
    if sys.version_info[:2] != (3, 11):
        sys.exit("systemd_boot: Debian 12 has Python 3.11, and takes packages of that one only")
    build_tree(options.tree)
    report = Path(tempfile.mkdtemp(prefix="shmserve-systemd-boot-"))
    boot(options.tree, report)
    checks = report / "checks.jsonl"
    rows = [json.loads(line) for line in checks.read_text().splitlines()] if checks.exists() else []
    for row in rows:
        print(
            f"{'ok    ' if row['ok'] else 'FAILED'} {row['check']} ({row['seconds']} s): {row['detail']}"
        )
        if not row["ok"]:
            print(row.get("journal", ""))
    is_good = len(rows) == len(CHECKS) and all(row["ok"] for row in rows)
    if not is_good:
        print(f"{len(rows)} of {len(CHECKS)} checks ran; see {report}", file=sys.stderr)
    elif not options.keep_log:
        shutil.rmtree(report)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
