"""What is true of feature transformers on every kind of data: each test file subclasses `FeatureFacts`.

References are scikit-learn and numpy; those of Spark ML are in tests/spark.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn import preprocessing

from kindler.features import MinMaxScaler, StandardScaler, StringIndexer

Give = Callable[[pd.DataFrame], Any]
Back = Callable[[Any], pd.DataFrame]
CITIES = ["b", "a", "c", None, "c", "ü", "a", "c", ""]
RANDOM = np.random.default_rng(0)
NUMBERS = pd.DataFrame(
    {
        "far": 1e8 + RANDOM.normal(size=12),
        "some": np.where(np.arange(12) % 4 == 1, np.nan, RANDOM.normal(size=12)),
        "same": np.full(12, 0.1),
        "count": np.arange(12),
    }
)
NAMES = ["far", "some", "same", "count"]


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.asarray(found, float), np.asarray(wanted, float), rtol=1e-9, atol=1e-7)


class FeatureFacts:
    """The facts; subclasses have the fixtures `give` (a frame as the kind of data) and `back`."""

    def test_values_are_numbered_by_frequency_and_then_in_their_order(self, give: Give, back: Back) -> None:
        data = give(pd.DataFrame({"city": CITIES, "n": [3, 3, 1, 1, 2, 2, 2, 5, 5]}))
        indexer = StringIndexer(["city", "n"], ["i", "n"], handle_invalid="keep", first_index=1)
        found = back(indexer.fit_transform(data))

        assert indexer.labels_ == {"city": ["c", "a", "", "b", "ü"], "n": [2, 1, 3, 5]}
        assert found["i"].tolist() == [4, 2, 1, 6, 1, 5, 2, 1, 3]
        assert found["n"].tolist() == [3, 3, 2, 2, 1, 1, 1, 4, 4]
        assert (found["i"].dtype, list(found)) == (np.int64, ["city", "n", "i"])

    def test_rows_with_unknown_values_are_left_out_on_request(self, give: Give, back: Back) -> None:
        indexer = StringIndexer("city", handle_invalid="skip").fit(
            give(pd.DataFrame({"city": ["a", "b", "b"]}))
        )
        seen = pd.DataFrame({"city": ["b", "x", None, "a"], "row": [0, 1, 2, 3]})
        found = back(indexer.transform(give(seen)))

        assert found.reset_index(drop=True).to_dict("list") == {"city": [0, 1], "row": [0, 3]}

    def test_a_scaler_of_the_range_is_that_of_scikit_learn(self, give: Give, back: Back) -> None:
        scaler = MinMaxScaler(-1, 3, input_col=NAMES)
        found = back(scaler.fit_transform(give(NUMBERS)))

        theirs = preprocessing.MinMaxScaler((-1, 3)).fit(NUMBERS)
        close(found[NAMES], theirs.transform(NUMBERS))
        close(scaler.scale_, theirs.scale_)
        assert found["same"].unique().tolist() == [-1]

    def test_a_standard_scaler_is_that_of_scikit_learn_but_for_constants(
        self, give: Give, back: Back
    ) -> None:
        scaler = StandardScaler(with_mean=True, input_col=NAMES, output_col="v", ddof=0)
        found = back(scaler.fit_transform(give(NUMBERS)))

        theirs = preprocessing.StandardScaler().fit(NUMBERS)
        wanted = theirs.transform(NUMBERS)
        wanted[:, 2] = 0
        close(np.stack([np.asarray(cell, float) for cell in found["v"]]), wanted)
        close(scaler.mean_, theirs.mean_)
        assert scaler.scale_[2] == 0

    def test_each_place_of_a_vector_is_scaled_by_itself(self, give: Give, back: Back) -> None:
        vectors = [[1.0, 10.0], None, [3.0, None], [2.0, 30.0]]
        data = give(pd.DataFrame({"v": pd.Series(vectors, dtype=object), "k": range(4)}))
        scaler = MinMaxScaler(input_col="v", output_col="w").fit(data)
        found = back(scaler.transform(data))

        assert (scaler.data_min_.tolist(), scaler.data_max_.tolist()) == ([1, 10], [3, 30])
        assert found["w"][1] is None
        close(
            np.stack([np.asarray(found["w"][i], float) for i in (0, 2, 3)]), [[0, 0], [1, np.nan], [0.5, 1]]
        )

    def test_what_was_learned_survives_json(self, give: Give, back: Back) -> None:
        data = give(NUMBERS.assign(city=[str(i % 3) for i in range(12)]))
        for made in (
            StringIndexer("city", "i"),
            MinMaxScaler(input_col="far"),
            StandardScaler(input_col=["far", "count"], output_col="v"),
        ):
            again = type(made).from_dict(json.loads(json.dumps(made.fit(data).to_dict())))
            assert again.to_dict() == made.to_dict()
            assert repr(again) == repr(made)
        pd.testing.assert_frame_equal(back(again.transform(data)), back(made.transform(data)))

    def test_columns_that_are_not_there_or_not_numbers_are_named(self, give: Give) -> None:
        data = give(pd.DataFrame({"city": ["a", "b"]}))
        with pytest.raises(ValueError, match="there is no column 'town'"):
            StringIndexer("town").fit(data)
        with pytest.raises(ValueError, match="column 'city'.*not numbers"):
            MinMaxScaler(input_col="city").fit(data)
