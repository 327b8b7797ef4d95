PYTHON ?= python3
TORCH ?= torch214
# the older stack has an environment of its own, so that a change of TORCH does not build one anew
VENV := .venv$(if $(filter-out torch214,$(TORCH)),-$(TORCH))
BIN := $(VENV)/bin
WORKERS ?= 2
export OMP_NUM_THREADS = 1
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup
THIRD_PARTY := tests/parity/third_party

.PHONY: setup demo test test-all test-slow test-third-party lint bench bench-quick docs figures tested clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml scripts/setup_environment.py
	$(PYTHON) scripts/setup_environment.py $(VENV) $(TORCH)
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

# the first tier: every contract and every package
test: setup
	$(PYTEST) -m "not slow and not third_party"

# the second tier: random seeds, long matrices, launchers, notebooks, pages, benchmark scripts, the wheel, GPU stand-ins
test-slow: setup
	$(PYTEST) -m "slow and not third_party"

test-all: test test-slow

# other packages' models, data sets and workers, all of them; installs those packages into the environment
test-third-party: $(VENV)/.third-party
	$(BIN)/python -m pytest -m "third_party or not third_party" $(THIRD_PARTY) tests/data/test_third_party.py tests/strategy/test_ray.py
	$(BIN)/python -m pytest tests/callbacks/test_loggers.py tests/profiling/reporting/test_other_tools.py

$(VENV)/.third-party: $(VENV)/.ready $(THIRD_PARTY)/requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps recbole==1.2.1 rectools==0.19.0 replay-rec==0.22.0 \
		litdata==0.2.76 HolisticTraceAnalysis==0.5.0
	$(BIN)/python -m pip install --quiet -r $(THIRD_PARTY)/requirements.txt
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/plain_english.py lightning_freescale docs examples benchmarks README.md CONTRIBUTING.md CHANGELOG.md

DATA ?= data
# run the benchmarks of the techniques on 2, 4 and 8 ranks and of the simulator; DATA is a folder with ml-1m.seqs.npz
bench: setup
	$(BIN)/python benchmarks/suite.py ladder archetypes simulator --data $(DATA)

# check a few thresholds before a release, in less than three minutes
bench-quick: setup
	$(BIN)/python benchmarks/suite.py quick

# the versions in the environment, for which the tests have just passed; without a build's name, as torch's +cpu, which no other machine has
tested: setup
	echo "# the versions that all tests ran on, as constraints for pip; make tested writes them" > .github/tested.txt
	$(BIN)/python -m pip freeze --exclude-editable | sed -E 's/\+[a-z0-9.]+$$//' | LC_ALL=C sort -f >> .github/tested.txt

CONFIG := mkdocs.yml
SITE := site

# build the site of docs/ in site/; a warning is an error
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --config-file $(CONFIG) --site-dir $(abspath $(SITE))

# write the figures of benchmarks/results into README.md and docs/, and draw docs/images
figures: setup
	$(BIN)/python scripts/figures.py
	$(BIN)/python scripts/picture.py

clean:
	rm -rf .venv .venv-torch213 site demo_output .mypy_cache .ruff_cache .pytest_cache .hypothesis
