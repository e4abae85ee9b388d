"""`Sampling(schema=...)`: answers follow a JSON schema, whichever way they are computed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kindler import Estimator
from kindler.errors import ConfigError, MissingExtraError
from kindler.types import Sampling
from tests.whole import whole_only

pytest.importorskip("transformers")
pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

from pydantic import BaseModel, Field  # noqa: E402
from tiny_text import ending_tokenizer, generator, json_tokenizer, json_writer, sentences  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

TEXTS = sentences(12)["text"]
SHORT = {"type": "string", "maxLength": 8}
RECORD = {
    "type": "object",
    "properties": {
        "name": SHORT,
        "kind": {"enum": ["größer", "日本", 'a "b" \\', None]},
        "count": {"type": "integer", "minimum": -5, "maximum": 120},
        "sizes": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/pair"}},
        "note": SHORT,
    },
    "required": ["name", "kind", "count", "sizes"],
    "additionalProperties": False,
    "$defs": {
        "pair": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
}
SCHEMAS: list[Any] = [
    RECORD,
    {"enum": ["größer", 7, [1, {"a": None}]]},
    {"type": "string", "pattern": "^[a-c]{2,4}-[0-9]+$", "maxLength": 12},
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "number"}, "maxItems": 2}]},
]


def made(kind: str, workers: int = 1, **options: Any) -> Estimator:
    task: Any = "text2text-generation" if kind == "t5" else "text-generation"
    model = json_writer(kind, **options)
    return Estimator.from_huggingface(model, json_tokenizer(), task=task, workers=workers, device="cpu")


def answers(est: Estimator, data: Any = None, most: int = 160, **options: Any) -> list[tuple[str, str]]:
    sampling = Sampling(max_new_tokens=most, **options)
    rows = est.generate(data or {"prompt": TEXTS}, sampling=sampling, details=True, verbose=0)
    return list(zip(rows["generated"].tolist(), rows["generated_reason"].tolist(), strict=True))


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize(
    ("kind", "rules"), [("llama", {}), ("gpt2", {"repetition_penalty": 1.2}), ("t5", {})]
)
def test_every_answer_that_ends_follows_its_schema(
    kind: str, rules: dict[str, Any], temperature: float
) -> None:
    est = made(kind, **rules)
    for schema in SCHEMAS:
        found = answers(est, schema=schema, temperature=temperature, seed=1)
        ended = [text for text, reason in found if reason == "stop"]
        assert len(ended) >= len(TEXTS) // 2 or (schema == SCHEMAS[-1] and not temperature)
        for text in ended:
            jsonschema.validate(json.loads(text), schema)
        assert not temperature or len(set(ended)) > 1


def test_an_answer_that_is_cut_says_so_and_begins_as_the_whole_one() -> None:
    est = made("llama")
    for (cut, reason), (whole, _) in zip(
        answers(est, schema=RECORD, most=10), answers(est, schema=RECORD), strict=True
    ):
        assert reason == "length"
        assert whole.startswith(cut.rstrip("\ufffd"))
        with pytest.raises(json.JSONDecodeError, match="line 1 column"):
            json.loads(cut)


@whole_only
def test_a_model_of_pydantic_text_and_dict_are_the_same_schema_in_any_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Review(BaseModel, extra="forbid"):
        rating: Literal["good", "bad"]
        stars: int = Field(ge=1, le=5)
        words: list[Literal["film", "größer"]] = Field(max_length=2)

    schema = Review.model_json_schema()
    options = {"temperature": 1.0, "seed": 3}
    one, two = made("llama"), made("llama", workers=2)
    expected = answers(one, schema=Review, **options)
    for text, reason in expected:
        assert reason == "stop"
        Review.model_validate_json(text)
    assert answers(one, schema=json.dumps(schema), **options) == expected
    assert Sampling(schema=schema) == Sampling(schema=Review)

    monkeypatch.setenv("KINDLER_HOST_MODEL", "always")
    pq.write_table(pa.table({"prompt": TEXTS}), tmp_path / "rows.parquet", row_group_size=5)
    out = two.generate(
        str(tmp_path / "rows.parquet"),
        output_path=tmp_path / "out",
        sampling=Sampling(max_new_tokens=160, schema=Review, **options),
        verbose=0,
    )
    assert pq.read_table(out)["generated"].to_pylist() == [text for text, _ in expected]


@pytest.mark.parametrize(
    "schema",
    [["a"], "not JSON", "[]", 7, {"a": {1, 2}}, {"maximum": float("nan")}, int],
)
def test_what_is_no_schema_is_refused_by_name(schema: Any) -> None:
    with pytest.raises(ConfigError, match=r"Sampling\(schema=.*must be a JSON schema"):
        Sampling(schema=schema)


def test_stop_texts_and_a_schema_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="without stop texts"):
        Sampling(schema={"type": "object"}, stop=["}"])


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"if": {}, "x-guidance": {"lenient": True}}, "Unimplemented keys"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable schema"),
        ({"$ref": "https://example.invalid/a.json"}, "not present in a registry"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_before_workers_start(schema: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot be followed: .*{said}"):
        answers(made("llama"), {"no_such_column": TEXTS}, schema=schema)


def test_a_tokenizer_that_cannot_write_json_is_refused_before_workers_start() -> None:
    est = Estimator.from_huggingface(generator("gpt2"), ending_tokenizer(), task="text-generation")
    with pytest.raises(ConfigError, match="does not support this tokenizer"):
        answers(est, {"no_such_column": TEXTS}, schema={"type": "object"})


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"'llguidance'.*\n.*kindler\[structured\]"):
        answers(made("llama"), schema={"type": "object"})
