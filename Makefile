# Keepwarm's commands. Needs git, GNU make, a POSIX shell and Python; everything else goes into .venv.
#
#   make run [ARGS="--model FOLDER"]   start the app, installing first what it needs
#   make test                          everything that must hold before a change lands
#   make check | fix                   lint and types only | what ruff can mend by itself
#   make bench [ARGS="turns --json"]   benchmarks
#   make test-cuda                     the tests that need a CUDA device
#   make clean                         remove .venv and all caches (never your chats)

PYTHONS = python3.13 python3.12 python3.11 python3
VENV = .venv
BIN = $(VENV)/bin
APP_STAMP = $(VENV)/.installed-app
DEV_STAMP = $(VENV)/.installed-dev
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check

# An environment whose Python has gone (a system upgrade takes it) is of no use: make it again.
$(shell test ! -e $(VENV)/pyvenv.cfg || $(BIN)/python -c "" 2>/dev/null || rm -rf $(VENV))

.PHONY: run test check fix bench test-cuda clean
.DELETE_ON_ERROR:

run: $(APP_STAMP)
	@exec $(BIN)/python app.py $(ARGS)

test: check
	@echo "== Chromium"
	@sh tests/install_chromium.sh
	@echo "== pytest"
	@$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder $(ARGS)

check: $(DEV_STAMP)
	@echo "== ruff check"
	@$(BIN)/python -m ruff check .
	@echo "== ruff format --check"
	@$(BIN)/python -m ruff format --check .
	@echo "== pyright"
	@$(BIN)/python -m pyright
	@echo "== import-linter"
	@$(BIN)/lint-imports

fix: $(DEV_STAMP)
	@$(BIN)/python -m ruff check --fix .
	@$(BIN)/python -m ruff format .

bench: $(DEV_STAMP)
	@$(BIN)/python -m tests.bench $(ARGS)

test-cuda: $(DEV_STAMP)
	@$(BIN)/python -m pytest -m cuda $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(APP_STAMP): requirements.txt $(VENV)/pyvenv.cfg
	@echo "Installing what Keepwarm needs (once; the first time takes some minutes) ..."
	@$(PIP_INSTALL) -r requirements.txt
	@touch $@

$(DEV_STAMP): requirements-dev.txt requirements.txt $(VENV)/pyvenv.cfg
	@echo "Installing what the tests need ..."
	@$(PIP_INSTALL) -r requirements-dev.txt
	@touch $@ $(APP_STAMP)

# The newest Python that the pinned packages support, and that can make an environment.
$(VENV)/pyvenv.cfg:
	@for name in $(PYTHONS); do \
	    command -v "$$name" >/dev/null 2>&1 || continue; \
	    "$$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || continue; \
	    found="$$name"; \
	    "$$name" -c 'import ensurepip, venv' 2>/dev/null || continue; \
	    echo "Making $(VENV) with $$name ..."; \
	    exec "$$name" -m venv $(VENV); \
	done; \
	if [ -n "$${found:-}" ]; then \
	    echo "$$found cannot make environments: install its venv module (on Debian: apt install python3-venv)." >&2; \
	else \
	    echo "Keepwarm needs Python 3.11, 3.12 or 3.13 and finds none of them: install one and try again." >&2; \
	fi; \
	exit 1
