# What a developer and a newcomer type. `make` alone prints this list.
.DEFAULT_GOAL := help
SHELL := /bin/bash
export PATH := $(PATH):$(HOME)/.cargo/bin

# cargo-nextest where it is installed, else cargo's own runner. Tests that start a daemon run two at a time with the one (.config/nextest.toml), one at a time with the other.
NEXTEST := $(shell command -v cargo-nextest 2>/dev/null)
# Tests run with fail points: places at which they end a process.
POINTS := --features pagedd/failpoints,pagedd-worker/failpoints,pagedd-gateway/failpoints
ARGS ?=
KEEP ?=

.PHONY: help
help: ## This list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## Serve a real model to two tenants, chat with both, compare with the reference, stop (KEEP=1: leave it running)
	@KEEP="$(KEEP)" scripts/demo.sh

.PHONY: test
test: tools fmt-check lint doc deny model build-dev cuda-kernels ## Everything that must hold: format, lints, documentation, licences, every test
	@$(MAKE) --no-print-directory run-tests

.PHONY: model
model: ## Fetch the model of demo and tests (98 MB, once, into .cache)
	@scripts/fetch_model.sh

.PHONY: build
build: tools ## Release build of the four binaries, into target/release
	cargo build --locked --release --workspace --bins

.PHONY: deb
deb: tools ## Debian package of the four programs with units, manual and completions, into target/debian
	@scripts/deb.sh

.PHONY: build-gpu
build-gpu: tools cuda-toolchain ## Release build with GPU support: models with `device: cuda:N`
	cargo build --locked --release --workspace --bins --features pagedd-worker/cuda

.PHONY: test-gpu
test-gpu: tools model cuda-toolchain ## On a host with a GPU: every kernel against the CPU, and the worker with the real model
	cargo run --locked --release --package pagedd-worker --features cuda -- selfcheck --failed
	cargo test --locked --release --package pagedd-worker --features cuda --test worker -- --test-threads=1 gpu::

.PHONY: build-dev
build-dev: tools
	cargo build --locked $(POINTS) --workspace --bins --tests

.PHONY: run-tests
run-tests:
ifneq ($(NEXTEST),)
	cargo nextest run --locked $(POINTS) --workspace --no-fail-fast $(ARGS)
else
	cargo test --locked $(POINTS) --workspace --exclude pagedd-tests --bins --lib --tests $(ARGS)
	cargo test --locked --package pagedd-tests --no-fail-fast $(ARGS) -- --test-threads=1
endif

.PHONY: test-unit
test-unit: tools ## Every test that starts no daemon
ifneq ($(NEXTEST),)
	cargo nextest run --locked $(POINTS) --workspace -E 'not package(pagedd-tests) or binary(/^(tidy|harness)$$/)' $(ARGS)
else
	cargo test --locked $(POINTS) --workspace --exclude pagedd-tests --bins --lib --tests $(ARGS)
	cargo test --locked --package pagedd-tests --lib --test tidy --test harness $(ARGS)
endif

.PHONY: test-e2e
test-e2e: tools model build-dev ## Only the tests that start a daemon (ARGS: arguments of the test runner)
ifneq ($(NEXTEST),)
	cargo nextest run --locked $(POINTS) --no-fail-fast -E 'package(pagedd-tests) & not binary(/^(tidy|harness)$$/)' $(ARGS)
else
	cargo test --locked --package pagedd-tests --no-fail-fast $(ARGS) -- --test-threads=1
endif

.PHONY: test-vm
test-vm: tools ## On a real systemd with cgroup v2, in machines made for it: package, unit, walls (root; ARGS: cases, --list, --verbose)
	@tests/vm/run.py $(ARGS)

.PHONY: test-crash
test-crash: tools model build-dev ## Kills worker, gateways and daemon a thousand times under load (PAGEDD_SEED reproduces; ARGS: of tests/examples/crash.rs)
	cargo run --locked --package pagedd-tests --example crash -- $(ARGS)

.PHONY: bench
bench: bench-cpu ## All benchmarks

.PHONY: bench-cpu
bench-cpu: build model ## This server and llama.cpp's on one CPU, in one run (ARGS: of scripts/bench/cpu.py)
	@python3 scripts/bench/cpu.py $(ARGS)

.PHONY: bench-journal
bench-journal: build model ## What the journal costs: per step at 256 rows, and in tokens per second at 64 streams (ARGS: of scripts/bench/cpu.py)
	cargo run --locked --release --package pagedd-journal --example append
	cargo build --locked --release --package pagedd-worker --example null
	cargo build --locked --release --package pagedd-tests --example journal
	@folder=$$(mktemp -d) && trap "rm -r $$folder" EXIT && mkdir $$folder/examples && cd target/release && \
	cp pagedd pagedd-gateway pagedctl $$folder && cp examples/null $$folder/pagedd-worker && cp examples/journal $$folder/examples && \
	$$folder/examples/journal
	CARGO_TARGET_DIR=$(CURDIR)/target/points cargo build --locked --release $(POINTS) --workspace --bins
	@python3 scripts/bench/cpu.py --only journal --no-peer --rounds 12 --points $(CURDIR)/target/points/release $(ARGS)

.PHONY: bench-step
bench-step: tools ## What a step costs the processor beside the computing: engine and a worker that computes nothing, 256 rows (ARGS: of pagedd bench latency)
	cargo build --locked --release --package pagedd --bin pagedd
	cargo build --locked --release --package pagedd-worker --example null
	@folder=$$(mktemp -d) && trap "rm -r $$folder" EXIT && cp target/release/pagedd $$folder && \
	cp target/release/examples/null $$folder/pagedd-worker && touch $$folder/pagedd-gateway && chmod +x $$folder/pagedd-gateway && \
	$$folder/pagedd bench latency --path synthetic:llama-3-8b --device cuda:0 --kv-memory "1000000 tokens" --budget 8192 --batch 256 --output-len 512 $(ARGS)

.PHONY: bench-crash
bench-crash: build model ## How long clients wait when a worker or the daemon dies (ARGS: of tests/examples/gaps.rs)
	cargo run --locked --release --package pagedd-tests --example gaps -- $(ARGS)

.PHONY: bench-tenants
bench-tenants: build ## What 500 idle tenants of a model with 128k tokens cost: memory, wake-ups, time to add one (ARGS: of tests/examples/idle_tenants.rs)
	cargo run --locked --release --package pagedd-tests --example idle_tenants -- $(ARGS)

.PHONY: cuda-toolchain
cuda-toolchain: ## Fetch the compiler for GPU kernels (no root, no GPU; 271 MB, once, into .cache)
	@scripts/cuda_toolchain.sh

.PHONY: gpu-bundle
gpu-bundle: tools cuda-toolchain model ## One folder that checks and measures on a bare GPU host, into target/gpu-bundle (scripts/gpu_bundle.sh says more)
	@scripts/gpu_bundle.sh $(ARGS)

# Of the whole workspace, so that dependencies are those of the other targets and are not built again.
CUDA := --workspace --features pagedd-kernels/cuda,pagedd-worker/cuda
.PHONY: cuda-kernels
cuda-kernels: tools cuda-toolchain ## Compile the GPU kernels; lints and tests of the GPU side that need no GPU
	cargo clippy --locked $(CUDA) --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --locked $(CUDA) --no-deps --document-private-items
	cargo test --locked $(CUDA) $(POINTS) --lib -- cuda gpu

.PHONY: fmt
fmt: tools ## Format the sources
	cargo fmt --all

.PHONY: fmt-check
fmt-check: tools
	cargo fmt --all --check

.PHONY: lint
lint: tools ## Lints as errors
	cargo clippy --locked --workspace --all-targets -- -D warnings

.PHONY: doc
doc: tools ## The crates' documentation, with broken links as errors
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --workspace --no-deps --document-private-items

.PHONY: deny
deny: tools ## Licences, bans and sources of all dependencies
	@scripts/deny.sh

.PHONY: tools
tools:
	@. scripts/lib.sh && need_rust && need_compiler

.PHONY: clean
clean: ## Remove build output (the fetched model stays)
	cargo clean
