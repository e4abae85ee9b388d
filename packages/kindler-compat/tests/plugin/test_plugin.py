"""kindler-compat is a plug-in as anyone may write one: the core finds its parts through entry points."""

from __future__ import annotations

import pickle

import pytest

import kindler
from kindler import Estimator
from kindler.compat import estimators
from kindler.compat.frameworks import loads
from kindler.compat.frameworks.mxnet import create_config
from kindler.compat.frameworks.tf_graph.ends import Port
from kindler.frameworks.loaders import is_loader
from kindler.frameworks.registry import FRAMEWORKS
from kindler.models.registry import MODEL_KINDS


def test_frameworks_and_kinds_of_models_are_rows_of_the_core_s_tables() -> None:
    assert FRAMEWORKS.spec("tf_graph").live
    assert FRAMEWORKS.spec("mxnet").package == "mxnet"
    assert {"tf_graph", "mxnet"}.isdisjoint(spec.name for spec in FRAMEWORKS.built_in)
    assert MODEL_KINDS.row("estimator", {"model_kind": "tf_graph"}).threads
    assert MODEL_KINDS.family("tf_graph", {}) == MODEL_KINDS.family("keras", {})


def test_loaders_are_known_by_the_name_of_their_class() -> None:
    iterator = type("NDArrayIter", (type("DataIter", (), {"__module__": "mxnet.io.io"}),), {})
    assert is_loader(iterator())
    assert not is_loader(type("DataIter", (), {"__module__": "another"})())


def test_estimators_are_class_methods_of_the_core_s() -> None:
    class Own(Estimator):
        """A class of a user's."""

    for name in ("from_graph", "from_model_fn", "from_mxnet"):
        assert getattr(Own, name).__func__ is getattr(estimators, name)
        assert getattr(Own, name).__self__ is Own
    with pytest.raises(AttributeError, match="Estimator has no attribute 'from_grap'"):
        Own.from_grap  # type: ignore[attr-defined]  # noqa: B018


def test_names_of_old_systems_are_not_kindlers_own() -> None:
    for name in ("EstimatorSpec", "InputData", "ModeKeys"):
        assert hasattr(estimators, name)
        assert not hasattr(kindler, name)


def test_what_was_pickled_when_these_frameworks_were_the_core_s_is_read() -> None:
    for value in (Port(name="x", tensor="x:0"), create_config):
        before = pickle.dumps(value, 0).replace(b"kindler.compat.frameworks.", b"kindler.frameworks.")
        assert b"compat" not in before
        assert loads(before) == value
