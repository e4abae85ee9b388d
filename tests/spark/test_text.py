"""Text models on a column of a Spark DataFrame: each row gets what it gets alone, in any partitioning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pyspark.sql import types as T

from kindler import Estimator
from kindler.errors import ConfigError
from kindler.types import Sampling

pytest.importorskip("transformers")

from tests.torch.tiny_text import classifier, continued, ending_tokenizer, generator, sentences, tokenizer

pytestmark = pytest.mark.spark

TEXTS = [*sentences(40)["text"], "the film was great"]


def frame(spark: Any, partitions: int, column: str) -> Any:
    rows = spark.sparkContext.parallelize(list(enumerate(TEXTS)), partitions)
    return spark.createDataFrame(rows, f"number int, {column} string")


def test_prompts_are_answered_as_by_the_model_alone_in_any_partitioning(spark: Any) -> None:
    model = generator("llama")
    expected = [continued(model, text, 12) for text in TEXTS]
    est = Estimator.from_huggingface(model, ending_tokenizer(), task="text-generation")
    for partitions in (1, 3):
        asked = frame(spark, partitions, "prompt")
        found = est.generate(asked, sampling=Sampling(max_new_tokens=12), details=True)
        assert found.schema["generated"].dataType == T.StringType()
        assert found.schema["generated_logprobs"].dataType == T.ArrayType(T.DoubleType())
        rows = found.orderBy("number").collect()
        assert [row.generated for row in rows] == [text for text, _ in expected]
        assert [row.generated_tokens for row in rows] == [tokens for _, tokens in expected]


def test_labels_and_vectors_are_columns_of_the_frame(spark: Any) -> None:
    texts, classes = (
        frame(spark, 3, "text"),
        Estimator.from_huggingface(classifier(), tokenizer(), task="text-classification"),
    )
    expected = classes.predict({"text": TEXTS}, verbose=0)
    rows = classes.predict(texts, feature_cols="text").orderBy("number").collect()
    assert [row.label for row in rows] == expected["label"].tolist()
    np.testing.assert_allclose([row.score for row in rows], expected["score"], atol=1e-6)

    vectors = Estimator.from_huggingface(classifier().bert, tokenizer(), task="embedding")
    rows = vectors.embed(texts, dtype="int8").orderBy("number").collect()
    near = vectors.embed({"text": TEXTS}, dtype="int8", verbose=0)["embedding"]
    assert np.abs(np.array([row.embedding for row in rows], int) - near).max() <= 1
    with pytest.raises(ConfigError, match="already has"):
        vectors.embed(texts, output_col="number")
