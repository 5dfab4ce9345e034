# Two commands on a fresh machine: `make demo` and `make serve`. Needs Linux, Python >= 3.11, pip, make, cc.
#
# PyPI's torch wheel is a CUDA build; the index that PyTorch names for CPU builds saves several gigabytes:
#   make demo PIP_ARGS="--extra-index-url <that index>"

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python
# --no-compile: what is never imported need not be compiled (a quarter of the set-up).
# Debian's pip comes without venv's ensurepip and refuses to install outside one: the pip on PATH installs into ours.
PIP := pip --python $(PY) --disable-pip-version-check

.PHONY: demo serve test test-all lint format bench clean

demo: $(VENV)/.run
	$(PY) -m shmserve demo

serve: $(VENV)/.run
	exec $(PY) -m shmserve start

# Files go to two processes as these get free, in the order of tests/conftest.py: the longest first.
PYTEST := $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# Many tests run real processes by real clocks, and a shared machine stalls. What failed runs once more, alone, with both
# results in the output: a fault fails twice.
AGAIN := $(PY) -m pytest --last-failed --last-failed-no-failures none --maxfail 1

test: $(VENV)/.dev
	$(PYTEST) -m 'not slow' || $(AGAIN) -m 'not slow'

# And the tests that take long. What later needs more than a venv (browser, clients, systemd) hangs on this target.
test-all: $(VENV)/.clients $(VENV)/.browser
	$(PYTEST) --hypothesis-profile=full || $(AGAIN) --hypothesis-profile=full

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(VENV)/.dev
	$(PY) tools/bench_ring.py
	$(PY) tools/bench_frontend.py

$(PY):
	$(PYTHON) -m venv --without-pip $(VENV)

$(VENV)/.run: setup.cfg pyproject.toml constraints.txt | $(PY)
	$(PIP) install $(PIP_ARGS) --no-compile --progress-bar on -c constraints.txt -e .
	touch $@

$(VENV)/.dev: setup.cfg pyproject.toml constraints.txt | $(PY)
	$(PIP) install $(PIP_ARGS) -q --no-compile -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.run

$(VENV)/.clients: $(VENV)/.dev
	$(PIP) install $(PIP_ARGS) -q --no-compile -c constraints.txt -e '.[clients,kubernetes,parallel,ray,router]'
	touch $@

# A browser for tests/browser: the one that is there, or Playwright's own, or Debian's.
$(VENV)/.browser: $(VENV)/.dev
	$(PIP) install $(PIP_ARGS) -q --no-compile -c constraints.txt -e '.[browser]'
	command -v chromium || command -v google-chrome || $(PY) -m playwright install --with-deps chromium \
		|| apt-get install -y -q --no-install-recommends chromium
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
