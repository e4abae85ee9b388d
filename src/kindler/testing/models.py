"""The contract of a model kind, as tests that a new kind passes.

class TestMine(ModelKindContract):
    kind = "mine"

    @pytest.fixture
    def model(self):
        return Mine(weights=[1.0, 2.0])

    @pytest.fixture
    def rows(self):
        return np.eye(2, dtype="float32")

    @pytest.fixture
    def expected(self):
        return np.array([1.0, 2.0])
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kindler.errors import ConfigError, DataError, UntrustedError
from kindler.models.loaded import LoadedModel, load
from kindler.models.predictor import is_per_row
from kindler.models.registry import MODEL_KINDS
from kindler.models.signature import Array, fit
from kindler.storage import Store
from kindler.store import Version

_FRESH = """
import sys
import numpy as np
from kindler.models.loaded import load
from kindler.storage import Store
om = Store(sys.argv[1])
loaded = load(om.store, om.models.metadata("contract"), trusted=sys.argv[2] == "trusted")
np.save(sys.argv[4], loaded.predictor(np.load(sys.argv[3])))
"""


class ModelKindContract:
    """What every kind of model promises; see `kindler.models.kind.ModelKind`.

    Attributes:
        kind: The kind's name in the catalog.
        rows_are_independent: Whether the example computes each row's output from that row alone.
        rtol: How much predictions may differ from `expected`.
    """

    kind: ClassVar[str]
    rows_are_independent: ClassVar[bool] = True
    rtol: ClassVar[float] = 1e-5

    @pytest.fixture
    def model(self) -> Any:
        """An example: a model, or the path of one."""
        raise NotImplementedError("define the fixture `model`")

    @pytest.fixture
    def rows(self) -> Array:
        """At least three different rows that the example takes."""
        raise NotImplementedError("define the fixture `rows`")

    @pytest.fixture
    def expected(self) -> Array:
        """What the example predicts for the rows, computed another way."""
        raise NotImplementedError("define the fixture `expected`")

    @pytest.fixture
    def put_options(self) -> dict[str, Any]:
        """Options that `put` needs for the example."""
        return {}

    @pytest.fixture
    def refused(self) -> Any:
        """A model of the kind that could run code, and is therefore not stored without trust."""
        pytest.skip("the kind provides no example of a model that it rejects")

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        """A store in a folder."""
        opened = Store(tmp_path / "contract-store")
        yield opened
        opened.close()

    @pytest.fixture
    def stored(self, store: Store, model: Any, put_options: dict[str, Any]) -> Version:
        """The example, stored under the name "contract"."""
        return store.models.put(model, "contract", trusted=self._trusted, **put_options)

    @pytest.fixture
    def loaded(self, store: Store, stored: Version) -> LoadedModel:
        """The example, read again."""
        return load(store.store, stored, trusted=self._trusted)

    def test_the_kind_is_found_by_looking_at_the_model(self, stored: Version) -> None:
        assert stored.kind == self.kind

    def test_a_stored_model_predicts_as_the_original(
        self, loaded: LoadedModel, rows: Array, expected: Array
    ) -> None:
        self._check_same(loaded.predictor(rows), expected)

    def test_get_returns_what_predicts(
        self, store: Store, stored: Version, rows: Array, expected: Array
    ) -> None:
        model = store.models.get("contract", trusted=self._trusted)
        self._check_same(MODEL_KINDS.model_kind(self.kind).predictor(model)(rows), expected)

    def test_the_runtime_predicts_the_same(self, loaded: LoadedModel, rows: Array, expected: Array) -> None:
        self._check_same(loaded.call("predict", rows), expected)

    def test_the_signature_takes_the_rows_and_nothing_of_another_shape(
        self, loaded: LoadedModel, rows: Array
    ) -> None:
        signature = loaded.predictor.signature
        assert signature.inputs
        fit(signature, {"": rows})
        if signature.inputs[0].shape is not None:
            with pytest.raises(DataError, match="has the shape"):
                fit(signature, {"": rows[..., None, None]})

    def test_rows_share_a_call_only_if_they_are_independent(self, loaded: LoadedModel, rows: Array) -> None:
        predictor = loaded.predictor
        joins = predictor.joins
        if joins is None:
            given = fit(predictor.signature, {"": rows})
            joins = is_per_row(lambda some: predictor.call(some, "predict"), given)
        assert joins is self.rows_are_independent

    def test_only_code_needs_trust_to_be_read(self, store: Store, stored: Version) -> None:
        if not self._trusted:
            store.models.get("contract")
            return
        with pytest.raises(UntrustedError, match="trusted=True"):
            store.models.get("contract")

    def test_a_model_that_could_run_code_is_refused_without_trust(self, store: Store, refused: Any) -> None:
        with pytest.raises(UntrustedError, match="trusted=True"):
            store.models.put(refused, "refused", kind=self.kind)
        store.models.put(refused, "refused", kind=self.kind, trusted=True)
        with pytest.raises(UntrustedError, match="trusted=True"):
            store.models.get("refused")

    def test_an_unknown_option_is_refused(self, store: Store, model: Any) -> None:
        with pytest.raises(ConfigError, match="no_such_option"):
            store.models.put(model, "contract", trusted=self._trusted, no_such_option=1)

    def test_an_archive_holds_the_same_model(
        self, store: Store, stored: Version, tmp_path: Path, rows: Array, expected: Array
    ) -> None:
        store.models.export("contract", tmp_path / "contract.zip")
        again = store.models.import_(tmp_path / "contract.zip", "again")
        loaded = load(store.store, again, trusted=self._trusted)
        self._check_same(loaded.predictor(rows), expected)

    def test_a_fresh_process_predicts_the_same(
        self, stored: Version, tmp_path: Path, rows: Array, expected: Array
    ) -> None:
        np.save(tmp_path / "rows.npy", rows)
        trust = "trusted" if self._trusted else "untrusted"
        places = [tmp_path / "contract-store", trust, tmp_path / "rows.npy", tmp_path / "outputs.npy"]
        done = subprocess.run(
            [sys.executable, "-c", _FRESH, *map(str, places)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        self._check_same(np.load(tmp_path / "outputs.npy"), expected)

    def test_what_it_is_read_with_is_installed(self, loaded: LoadedModel, stored: Version) -> None:
        for package in loaded.kind.requirements(stored.meta):
            assert metadata.version(package)

    @property
    def _trusted(self) -> bool:
        return MODEL_KINDS.model_kind(self.kind).needs_trust

    def _check_same(self, found: Any, expected: Array) -> None:
        np.testing.assert_allclose(np.asarray(found), expected, rtol=self.rtol, atol=self.rtol)
