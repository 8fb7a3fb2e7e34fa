# All set-up is done here: `make demo` and `make test` work on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# What `make bench-wire` exchanges: "--all" compares with hivemind and torchft, and needs root.
EXCHANGE ?= --all
# Workers of the tests.
JOBS ?= 2

.PHONY: hashes checked audit demo test test-long quick quick-tests test-measured lint simulate fuzz planted chaos golden bench-wire bench-wan bench-quick bench-uml site clean help

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

# $(call timed,WHAT,COMMAND) names a group of packages before it is installed, and tells afterwards how long it took.
timed = printf '  %s ... ' "$(1)"; began=$$(date +%s); { $(2); } && echo "$$(($$(date +%s) - began)) s"

# torch first: without a GPU its CPU build, by local version where an index has it, else from PyTorch's own index.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "p2pdiloco needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python venv is missing: apt install python3-venv"; exit 1; }
	@echo "installing into $(VENV), once: a few minutes, 2 GB of disk (more with a GPU: torch brings CUDA)"
	@$(call timed,torch,$(BIN)/python -c 'import torch' 2>/dev/null || \
	  if command -v nvidia-smi >/dev/null 2>&1; then $(BIN)/pip install -qq torch==2.13.0; \
	  else $(BIN)/pip install -qq torch==2.13.0+cpu 2>/dev/null \
	    || $(BIN)/pip install -qq torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu; fi)
	@$(call timed,p2pdiloco with its C library and what it needs,$(BIN)/pip install -qq -c constraints.txt -e .)
	@$(call timed,tools of the tests; Hugging Face and Lightning; plots,$(BIN)/pip install -qq -c constraints.txt 'p2pdiloco[dev]')
	@touch $(READY)

demo: $(READY) ## a swarm on this machine: found, join, kill, join late, merge, evaluate (a minute or two)
	@$(BIN)/p2pdiloco demo --out out/demo

# Two workers: most tests wait for processes, and two cores are what CI has. Durations are told, and kept in out/.
TESTS := -q -n $(JOBS) --dist loadgroup --no-loadscope-reorder
# Processes on a busy machine miss deadlines. What fails is run again when nothing else runs; both results are told, and
# a test may need that once: tests/second_runs.py.
test: $(READY) ## everything that CI runs but lint (15 to 25 minutes); a test may need a second run once
	@$(BIN)/python -m pytest $(TESTS) -m "not long" --durations=20 --junitxml=out/test.xml || { \
	  status=$$?; [ $$status -eq 1 ] || exit $$status; \
	  echo "a second run of what failed:"; $(BIN)/python -m pytest $(TESTS) -m "not long" --last-failed -p tests.second_runs; }

test-long: $(READY) ## tests that CI leaves out: more processes, or a second setting, of what it runs
	@$(BIN)/python -m pytest $(TESTS) -m long

quick: $(READY) ## lint, types, unit and property tests, a hundred seeds: under 90 seconds on two cores
	@$(MAKE) -s -j2 -O lint quick-tests
	@$(BIN)/python -m tests.machine_sim --seeds 0-99

quick-tests: $(READY)
	@$(BIN)/python -m pytest $(TESTS) -m "not heavy and not long" tests/unit tests/property

test-measured: $(READY) ## tests that measure real links: root, and a machine that does nothing else
	@P2PDILOCO_MEASURE=1 $(BIN)/python -m pytest -q tests/wan

lint: $(READY) ## format, lint, types, layers
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

simulate: $(READY) ## 10,000 seeds of the protocol, 1,000 of whole peers, fresh ones of both, every planted bug (an hour and a quarter)
	@$(BIN)/python -m tests.machine_sim --seeds 0-9999
	@$(BIN)/python -m tests.machine_sim --fresh 2000
	@$(BIN)/python -m tests.peer_sim --seeds 0-999
	@$(BIN)/python -m tests.peer_sim --fresh 200
	@$(BIN)/python -m tests.machine_sim --mutants

fuzz: $(READY) ## every decoder of others' bytes, for SECONDS=600, with what is nearly well-formed
	@$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),600)

planted: $(READY) ## every planted bug against the tests that must find it (minutes): tests/README.md
	@$(BIN)/python -m tests.seeded_bugs --jobs 2

chaos: $(READY) ## three minutes of kills, stops, cut and spoilt links to four peers, judged and drawn (out/chaos)
	@$(BIN)/python -m tests.chaos --plan quick --out out/chaos

# Of every file on PyPI of the versions that were tested together. torch is not among them: its CPU builds have an index of their own.
TOOLS := out/tools
$(TOOLS)/bin/python:
	@$(PYTHON) -m venv $(TOOLS) && $(TOOLS)/bin/pip install -q uv==0.13.9 pip-audit

hashes: $(TOOLS)/bin/python ## hashes.txt anew, after constraints.txt has changed
	@head -1 hashes.txt > out/hashes.txt
	@$(TOOLS)/bin/uv pip compile constraints.txt --no-deps --generate-hashes --universal --python-version 3.11 \
	  --no-annotate --no-header -q -o out/hashes.body && cat out/hashes.body >> out/hashes.txt && mv out/hashes.txt hashes.txt

checked: ## install into VENV what hashes.txt names and nothing else, each file by its hash; torch must be there
	@$(BIN)/python -c 'import torch' || { echo "install torch first (its files are not in hashes.txt): see $(READY) in the Makefile"; exit 1; }
	@$(BIN)/pip install -q --require-hashes --no-deps -r hashes.txt
	@$(BIN)/pip install -q --no-deps --no-build-isolation .

audit: $(TOOLS)/bin/python ## known vulnerabilities of the versions in hashes.txt (asks PyPI; what it cannot ask for is a failure)
	@$(TOOLS)/bin/pip-audit -r hashes.txt --no-deps --disable-pip --strict --progress-spinner off

golden: $(READY) ## write anew what is generated: transcripts, states, configuration
	@$(BIN)/python -m pytest -q tests/golden --update

bench-wire: $(READY) ## codec, transport and exchange: tables, JSON and plots in out/bench (root for shaped links; long)
	@$(BIN)/python -m benchmarks.wire.codec --json out/bench/codec.json --plot out/bench/codec.png
	@$(BIN)/python -m benchmarks.wire.transport --json out/bench/transport.json --plot out/bench/transport.png
	@$(BIN)/python -m benchmarks.wire.exchange $(EXCHANGE) --json out/bench/exchange.json --plot out/bench/exchange.png

WAN := $(BIN)/python -m benchmarks.wan
WAN_OUT := out/wan
bench-wan: $(READY) ## the comparisons over throttled links, whole (root; an hour and a half): docs/results.md
	@for one in speed bandwidth fragments utilisation hardware; do \
	  $(WAN).$$one --json $(WAN_OUT)/$$one.jsonl --plot $(WAN_OUT)/$$one.png || exit 1; done
	@$(WAN).utilisation --shipped --json $(WAN_OUT)/shipped.jsonl --plot $(WAN_OUT)/shipped.png

QUICK := out/wan-quick
bench-quick: $(READY) ## the same in five minutes or so: that all of it works, not what it shows (root)
	@$(WAN).speed --steps 32 --cap-s 16 --ddp-s 16 --snapshot-every 8 --json $(QUICK)/speed.jsonl --plot $(QUICK)/speed.png
	@$(WAN).bandwidth --cases 'p2pdiloco 24/24/4' --probes 1 --json $(QUICK)/bandwidth.jsonl --plot $(QUICK)/bandwidth.png
	@$(WAN).fragments --parameters 10e6 --gbps 1 --in-flight 1 --rounds 1 --json $(QUICK)/fragments.jsonl --plot $(QUICK)/fragments.png
	@$(WAN).utilisation --cells 1 --seconds 10 --json $(QUICK)/utilisation.jsonl --plot $(QUICK)/utilisation.png
	@$(WAN).hardware --scenarios churn --seconds 30 --kill-s 12 --json $(QUICK)/hardware.jsonl --plot $(QUICK)/hardware.png

site: ## the documentation as a site, in out/site (brings zensical into an environment of its own)
	@test -x out/site-env/bin/zensical || { $(PYTHON) -m venv out/site-env && out/site-env/bin/pip install -q zensical; }
	@$(PYTHON) -m tests.site before out/docs
	@out/site-env/bin/zensical build --clean
	@$(PYTHON) -m tests.site after out/site

bench-uml: $(READY) ## the testbed's real netem path, in User-Mode Linux (apt install user-mode-linux; a minute)
	@tests/wan/uml.sh $(CURDIR)/$(BIN)/python

clean: ## remove what make and the demo made
	rm -rf $(VENV) out build *.egg-info
