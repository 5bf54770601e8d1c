# Every target does all its own set-up; nothing is done twice.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
BENCH_READY := .venv/.bench-ready

.PHONY: demo test test-fast test-faults bench bench-quick check format browser clean

demo: $(READY)
	$(BIN)/freenergy run demo

test: $(READY)
	$(BIN)/pytest -n 2

test-fast: $(READY)
	$(BIN)/pytest -n 2 -m "not slow and not faults"

# Some forty minutes: kills, full disks, torn files and ten thousand bad inputs. Its short form is in make test.
test-faults: $(READY)
	$(BIN)/pytest -n 2 -vv -m faults

# About forty minutes; stopped, it goes on with BENCH=--continue. The last lines say what has become slower.
bench: $(BENCH_READY)
	HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/run.py --page docs/performance.md $(BENCH)

# A few minutes; leaves the committed results alone.
bench-quick: $(BENCH_READY)
	HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/run.py --quick --rounds 1 $(BENCH)

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# What the test of the report looks at the page with; without it that test is skipped.
browser:
	command -v chromedriver > /dev/null || { apt-get -qq update && \
	  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium chromium-driver; }

clean:
	rm -rf .venv runs

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,eval]"
	touch $(READY)

$(BENCH_READY): $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	touch $(BENCH_READY)
