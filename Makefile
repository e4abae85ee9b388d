# `make` sets up its own virtual environment in .venv and prints what it runs.
#
# A stamp in .venv says which set of packages is installed: the quickstart's, or the developer's,
# which adds to it. A changed pyproject.toml makes both stale, and the next target installs again.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled when they are first imported: most of them never are.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile --quiet

# By name and version, before anything that depends on it: a CPU build is found that way.
TORCH ?= torch==2.13.0

PYTEST ?= $(BIN)/python -m pytest

# The other distributions of this repository: faces of old systems with the frameworks that only they need, and
# the TFRecord codec, which the core depends on.
COMPAT := packages/kindler-compat
TFRECORD := packages/kindler-tfrecord

BENCHMARKS ?= $(filter-out benchmarks/_%,$(sort $(wildcard benchmarks/*.py)))

export NO_MKDOCS_2_WARNING := 1
# Some images set it: each of the many processes of the tests would then compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install quickstart test gate test-unit test-torch test-keras test-openvino test-tune test-cluster test-spark test-spark-programs test-spark-cluster test-store test-runtime test-serve test-page test-cli test-faults test-tracking test-examples test-tfrecord test-gpu test-compat test-compat-orca test-compat-tensorflow1 test-compat-graphs test-compat-mxnet test-compat-tensorflowonspark test-compat-docs test-compat-whole costs mutation wheels readme check check-style check-types check-layers check-docs bench docs docs-migration notebooks clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /:/' | awk -F: '{ printf "  make %-14s %s\n", $$1, $$2 }'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(BIN)/python
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.quickstart: pyproject.toml $(TFRECORD)/pyproject.toml $(VENV)/.torch
	$(PIP) -e '.[spark,java,torch,plot]' -e $(TFRECORD) scikit-learn
	@touch $@

# Spark comes as source, and a wheel is made of it first: with several jobs beside torch rather than after it.
# Its files are jars, which are not packed a second time.
SPARK_PIP := $(PIP) --no-deps --use-pep517 --config-settings=--build-option=--compression=stored
$(VENV)/.pyspark: | $(BIN)/python
	$(SPARK_PIP) 'pyspark>=4.0'
	@touch $@

$(VENV)/.dev: pyproject.toml $(COMPAT)/pyproject.toml $(TFRECORD)/pyproject.toml $(VENV)/.torch $(VENV)/.pyspark
	$(PIP) -e '.[spark,java,torch,tensorflow,tf-keras,jax,keras,plot,tensorboard,dev]' -e '$(COMPAT)[tensorflow1]' -e $(TFRECORD)
	@touch $(VENV)/.quickstart $@

# Older Sparks that are supported, beside the newest one: tests put them first on the path.
$(VENV)/.spark-4.0: | $(BIN)/python
	$(SPARK_PIP) --target $(VENV)/spark-4.0 'pyspark==4.0.*' 'py4j==0.10.9.9'
	@touch $@

$(VENV)/.spark-3.5: | $(BIN)/python
	$(SPARK_PIP) --target $(VENV)/spark-3.5 'pyspark==3.5.*' 'py4j==0.10.9.7'
	@touch $@

# Iceberg's own jars for Spark 3.5, which Maven has, and this package; its later ones lack classes.
$(VENV)/.spark-iceberg: | $(BIN)/python
	$(PIP) --no-deps --target $(VENV)/spark-iceberg 'snowpark-connect-deps-iceberg==1.0.2'
	@touch $@

# What MLflow's server needs besides the client: it would have older versions of what others need newer.
$(VENV)/.mlflow-server: | $(BIN)/python
	$(PIP) --no-deps --target $(VENV)/mlflow-server 'alembic<2' Mako 'graphene<4' 'graphql-core<3.3' 'graphql-relay<4' 'huey<4' \
		'gunicorn<27' 'docker<8' 'aiohttp<4' aiosignal aiohappyeyeballs frozenlist multidict propcache yarl attrs
	@touch $@

# Without its dependencies, which it wants older than others can use them.
$(VENV)/.mxnet: | $(BIN)/python
	$(PIP) --no-deps 'mxnet==1.9.1' 'graphviz>=0.8'
	@touch $@

# Spark's classes as Java loads them fastest; for all Sparks of the tests.
build/java/options: tests/java_archive.py $(VENV)/.dev
	$(BIN)/python -m tests.java_archive

install: $(VENV)/.dev $(VENV)/.spark-4.0 $(VENV)/.spark-3.5 $(VENV)/.spark-iceberg $(VENV)/.mlflow-server $(VENV)/.mxnet ## install what the checks and tests need

quickstart: $(VENV)/.quickstart ## train, score and plot a small classifier from a Spark DataFrame
	$(BIN)/python examples/quickstart.py

# One pytest process for each part, three at a time on two cores: while a test waits for a limit or for a server,
# another part computes. The parts that take longest, and those that wait most, begin first, so that there is work to the end. --keep-going
# runs all of them and still fails if one did. Spark's classes are made before: make puts a part whose needs are still being
# made behind all others.
IN_TURN := --no-print-directory --keep-going --jobs=3 --output-sync=target
CORE_PARTS = test-spark-programs test-spark-cluster test-torch test-spark test-keras-tensorflow test-serve test-examples test-cluster $(filter-out test-keras-tensorflow,$(KERAS_FLAVOURS:%=test-keras-%)) \
	test-unit test-runtime test-faults test-page test-store test-cli test-tracking test-tune test-openvino test-tfrecord
COMPAT_PARTS = test-compat-tensorflow1 test-compat-orca test-compat-docs test-compat-graphs test-compat-tensorflowonspark \
	test-compat-mxnet $(COMPAT_KERAS:%=test-compat-keras-%)
PARTS = $(CORE_PARTS) $(COMPAT_PARTS)
CHECKS := check-types check-docs check-layers check-style

test: install build/java/options ## run every test
	$(MAKE) $(IN_TURN) $(PARTS)

gate: install build/java/options ## check, test and do what README.md says: what `.ci/run` does
	$(MAKE) $(IN_TURN) $(CHECKS) $(PARTS) readme

test-unit: $(VENV)/.dev ## tests that need neither a framework nor Spark
	$(PYTEST) tests/unit tests/architecture

test-torch: $(VENV)/.dev ## PyTorch on the local engine
	$(PYTEST) tests/torch tests/unit/with_torch

KERAS_FLAVOURS := tensorflow jax torch tf_keras

test-keras: $(VENV)/.dev ## Keras on the local engine, each backend in a process of its own
	$(MAKE) --no-print-directory --keep-going $(KERAS_FLAVOURS:%=test-keras-%)

# All tests on TensorFlow and PyTorch; on the others those that their own code decides, unless everything runs.
KERAS_ALL := tests/keras tests/unit/with_keras
KERAS_FEW := $(addprefix tests/keras/test_,contract.py exact.py replaced.py resume.py models.py labels.py private_names.py) \
	tests/unit/with_keras/test_compiled_code.py
KERAS_TESTS_jax = $(if $(filter 1,$(KINDLER_TEST_WHOLE)),$(KERAS_ALL),$(KERAS_FEW))
KERAS_TESTS_tf_keras = $(KERAS_TESTS_jax)

test-keras-%: $(VENV)/.dev
	KINDLER_TEST_KERAS=$* $(PYTEST) $(or $(KERAS_TESTS_$*),$(KERAS_ALL))

test-openvino: $(VENV)/.dev ## models of OpenVINO, on the local engine
	$(PYTEST) tests/openvino tests/unit/with_openvino

test-spark: $(VENV)/.dev build/java/options ## everything that can share one Spark session
	$(PYTEST) tests/spark tests/unit/with_spark

test-spark-programs: $(VENV)/.dev build/java/options $(VENV)/.spark-4.0 $(VENV)/.spark-3.5 $(VENV)/.spark-iceberg ## Spark sessions, Connect, older Sparks
	$(PYTEST) tests/spark_programs -m 'not cluster'

test-spark-cluster: $(VENV)/.dev build/java/options ## a master and two workers: executors that are killed, lost and replaced
	$(PYTEST) tests/spark_programs -m cluster

test-tune: $(VENV)/.dev ## hyper-parameter search on the local engine
	$(PYTEST) tests/tune

test-runtime: $(VENV)/.dev ## the runtime: local workers, Redis and RabbitMQ where they are installed
	$(PYTEST) tests/runtime

test-faults: $(VENV)/.dev ## faults at system calls: of the store, of a fit, of a swap in the server
	$(PYTEST) tests/faults

test-store: $(VENV)/.dev ## the store: SQLite, PostgreSQL where it is installed, an S3 server
	$(PYTEST) tests/store

test-serve: $(VENV)/.dev ## the server: protocols, batches, keys, swaps, hostile requests
	$(PYTEST) tests/serve

test-page: $(VENV)/.dev ## the web page, in Chromium where it is installed
	$(PYTEST) tests/page

test-cli: $(VENV)/.dev ## the command line, with its guide
	$(PYTEST) tests/cli

test-tracking: $(VENV)/.dev $(VENV)/.mlflow-server ## MLflow: a tracking server, and models that it serves
	$(PYTEST) tests/tracking

test-cluster: $(VENV)/.dev build/java/options ## programs of users' own on clusters, fed by Spark
	$(PYTEST) tests/cluster

test-examples: $(VENV)/.dev build/java/options ## the examples and the code in the docs
	$(PYTEST) tests/examples $(wildcard tests/docs)

test-tfrecord: $(VENV)/.dev ## everything of packages/kindler-tfrecord
	$(PYTEST) $(TFRECORD)/tests

test-gpu: $(VENV)/.dev ## what needs a GPU; skipped, with the reason, where there is none
	$(PYTEST) tests/gpu -rs

test-compat: $(VENV)/.dev build/java/options ## everything of packages/kindler-compat
	$(MAKE) $(IN_TURN) $(COMPAT_PARTS)

# Folders that need the same framework share a process, its imports and its Spark.
test-compat-orca: $(VENV)/.dev build/java/options $(VENV)/.mxnet ## BigDL, Orca and omega|ml, and programs of the old systems' documentation
	$(PYTEST) $(COMPAT)/tests/bigdl $(COMPAT)/tests/seeds $(COMPAT)/tests/omegaml

test-compat-tensorflow1: $(VENV)/.dev build/java/options ## TFPark, SparkFlow, and programs of their documentation
	$(PYTEST) $(COMPAT)/tests/tfpark $(COMPAT)/tests/sparkflow $(COMPAT)/tests/seeds_graphs

test-compat-graphs: $(VENV)/.dev ## TensorFlow graphs and model functions, on both engines
	$(PYTEST) $(COMPAT)/tests/tf_graph

test-compat-mxnet: $(VENV)/.dev $(VENV)/.mxnet ## Gluon blocks of MXNet, on the local engine
	$(PYTEST) $(COMPAT)/tests/mxnet

test-compat-tensorflowonspark: $(VENV)/.dev build/java/options ## TensorFlowOnSpark and spark-tensorflow-distributor
	$(PYTEST) $(COMPAT)/tests/tensorflowonspark

COMPAT_KERAS := tensorflow $(if $(filter 1,$(KINDLER_TEST_WHOLE)),torch tf_keras)

test-compat-keras-%: $(VENV)/.dev
	KINDLER_TEST_KERAS=$* $(PYTEST) $(COMPAT)/tests/keras_faces

test-compat-docs: $(VENV)/.dev build/java/options ## the code of the pages that need kindler-compat, and the plug-in itself
	$(PYTEST) $(COMPAT)/tests/docs $(COMPAT)/tests/plugin

test-compat-whole: $(VENV)/.dev $(VENV)/.mxnet ## programs of the old systems as large as they are there: MNIST, CIFAR-10, a Spark cluster
	KINDLER_TEST_WHOLE=1 $(PYTEST) $(COMPAT)/tests/seeds
	KINDLER_TEST_WHOLE=1 $(PYTEST) $(COMPAT)/tests/seeds_graphs
	KINDLER_TEST_WHOLE=1 KINDLER_TEST_KERAS=tensorflow $(PYTEST) $(COMPAT)/tests/keras_faces/test_omegaml_programs.py

costs: ## run every test, print the CPU seconds of the parts and of the slowest tests
	rm -rf build/costs
	$(MAKE) --no-print-directory test PYTEST='$(PYTEST) -p tests.costs'; \
		status=$$?; $(BIN)/python -m tests.costs; exit $$status

mutation: $(VENV)/.dev ## make small errors in the code that decides, and list those that no unit test notices
	$(BIN)/python -m tests.mutation.run

check: $(VENV)/.dev ## lint, format, types, layers, docs
	$(MAKE) $(IN_TURN) $(CHECKS)

check-style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-types: $(VENV)/.dev
	$(BIN)/mypy

check-layers: $(VENV)/.dev
	$(BIN)/lint-imports

check-docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict --quiet

wheels: $(BIN)/python ## build the distributions, try them in a fresh environment of each Python from 3.10 to 3.13
	$(BIN)/python tests/wheels/smoke.py

readme: $(BIN)/python ## build the wheels, do all that README.md says in an empty environment, compare what is printed
	$(BIN)/python tests/wheels/smoke.py --readme

bench: $(VENV)/.dev ## run every benchmark (one question a file), print the ratios
	@failed=""; \
	for file in $(BENCHMARKS); do \
		echo "$(BIN)/python $$file"; \
		$(BIN)/python $$file || failed="$$failed $$file"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

docs: $(VENV)/.dev ## build the documentation into site/
	$(BIN)/mkdocs build --strict

notebooks: $(VENV)/.dev build/java/options ## execute the notebooks of examples/ again, in place
	$(BIN)/python -m tests.examples.notebooks

docs-migration: $(VENV)/.dev ## write the pages of docs/migration from the tables of kindler-compat's tests
	PYTHONPATH=.:$(COMPAT) $(BIN)/python -m tests.seeds.page

clean: ## remove what the targets made, except .venv
	rm -rf build dist site benchmarks/results .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf spark-warehouse artifacts metastore_db derby.log
	find src packages tests examples benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +
