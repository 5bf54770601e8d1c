# Every target does all its own set-up; nothing is done twice.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
BENCH_READY := .venv/.bench-ready

.PHONY: demo demo-tiny test test-laws test-faults test-attacks bench bench-quick check format browser clean

demo: $(READY)
	$(BIN)/freenergy run demo

# Without weights from elsewhere: a tiny transformer is trained first.
demo-tiny: $(READY)
	$(BIN)/freenergy run demo-tiny

# All tests of a file run in one worker, so that what they share is made once.
test: $(READY)
	$(BIN)/pytest -n 2 --dist loadfile --durations=10

# What you run all the time; fails above LAWS_SECONDS, so that it stays quick.
LAWS_SECONDS ?= 90
test-laws: $(READY)
	FREENERGY_TEST_SECONDS=$(LAWS_SECONDS) $(BIN)/pytest -n 2 --dist loadfile --durations=10 tests/laws

# About forty minutes: kills, full disks, torn files and ten thousand bad inputs. Its short form is in make test.
test-faults: $(READY)
	$(BIN)/pytest -n 2 --dist loadfile -vv -m faults

# All that an adversary has tried, with 64 clients under attack and ten thousand turned bits; its short form is in make test.
test-attacks: $(READY)
	$(BIN)/pytest -n 2 --dist loadfile -vv -m "faults or not faults" tests/faults/attacks

# About forty minutes; stopped, it resumes with BENCH=--continue. The last lines report what has become slower.
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

# The browser that the tests of pages use; without it they are skipped.
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
