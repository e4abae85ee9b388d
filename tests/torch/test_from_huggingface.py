"""`Estimator.from_huggingface`: texts are classified, embedded and continued as the model does it alone."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from kindler import Estimator, Prepare
from kindler.errors import ConfigError, DataError
from kindler.types import Sampling
from tests import caller

pytest.importorskip("transformers")

from tiny_text import classifier, continued, ending_tokenizer, generator, sentences, tokenizer
from transformers import BertConfig, BertModel

from tests.whole import whole_only

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

TEXTS = sentences(60)["text"]


def made(model: Any, task: Any, **options: Any) -> Estimator:
    options = {"workers": 2, "device": "cpu", **options}
    return Estimator.from_huggingface(model, ending_tokenizer(), task=task, **options)


def parquet(folder: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=7)
    return str(folder / "rows.parquet")


# Embeddings


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a BERT and its tokenizer."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=18, max_position_embeddings=32, **sizes)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("pooling", "parts"),
    [
        ("mean", ["Dense", "Normalize"]),
        ("cls", []),
        ("max", ["Normalize"]),
        ("lasttoken", ["Normalize"]),
        ("weightedmean", []),
        ("mean_sqrt_len_tokens", []),
    ],
)
def test_embeddings_are_those_of_sentence_transformers(
    encoder: Path, pooling: str, parts: list[str], tmp_path: Path
) -> None:
    library = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")
    more = [models.Dense(32, 24) if part == "Dense" else models.Normalize() for part in parts]
    modules = [models.Transformer(str(encoder), max_seq_length=12), models.Pooling(32, pooling_mode=pooling)]
    model = library.SentenceTransformer(modules=[*modules, *more], device="cpu")
    model.save(str(tmp_path))
    texts = [*TEXTS, TEXTS[0], " ".join(["film"] * 25)]
    expected = model.encode(texts)

    est = Estimator.from_huggingface(tmp_path, task="embedding", workers=1)
    found = est.embed(pa.table({"text": texts}), batch_size=8, verbose=0)
    assert found.column_names == ["text", "embedding"]
    np.testing.assert_allclose(np.array(found["embedding"].to_pylist()), expected, rtol=0, atol=1e-5)

    same = Estimator.from_huggingface(model, task="embedding", workers=1)
    np.testing.assert_allclose(
        same.embed({"text": texts}, verbose=0)["embedding"], expected, rtol=0, atol=1e-5
    )


def test_a_default_prompt_and_lower_case_of_a_sentence_transformer_are_used(
    encoder: Path, tmp_path: Path
) -> None:
    library = pytest.importorskip("sentence_transformers")
    prompts = {"prompts": {"query": "the film "}, "default_prompt_name": "query"}
    library.SentenceTransformer(str(encoder), device="cpu", **prompts).save(str(tmp_path))
    model = library.SentenceTransformer(str(tmp_path), device="cpu")
    est = Estimator.from_huggingface(tmp_path, task="embedding", workers=1)
    np.testing.assert_allclose(
        est.embed({"text": TEXTS}, verbose=0)["embedding"], model.encode(TEXTS), rtol=0, atol=1e-5
    )


def test_files_are_embedded_by_two_workers_in_the_order_of_their_rows(encoder: Path, tmp_path: Path) -> None:
    est = Estimator.from_huggingface(encoder, task="embedding", workers=2)
    expected = est.embed({"text": TEXTS}, verbose=0)["embedding"]
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, atol=1e-6)

    path = est.embed(parquet(tmp_path, text=TEXTS), output_path=tmp_path / "out", batch_size=4, verbose=0)
    found = pq.read_table(path)
    assert found["text"].to_pylist() == TEXTS
    np.testing.assert_allclose(np.array(found["embedding"].to_pylist()), expected, rtol=0, atol=1e-6)


def test_vectors_of_an_arrow_table_are_written_to_a_delta_table(encoder: Path, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    est = Estimator.from_huggingface(encoder, task="embedding", workers=1)
    embedded = est.embed(pa.table({"text": TEXTS}), verbose=0)
    deltalake.write_deltalake(str(tmp_path / "vectors"), embedded)
    found = deltalake.DeltaTable(str(tmp_path / "vectors")).to_pyarrow_table()
    assert found.to_pydict() == embedded.to_pydict()


class _Counting(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        rows, width = input_ids.shape
        return {"rows": torch.full((rows,), rows), "width": torch.full((rows,), width)}


def test_equal_texts_are_computed_once_and_with_others_of_their_length() -> None:
    collate = made(classifier(), "regression")._prepare.collate
    est = Estimator.from_torch(_Counting(), inputs="kwargs", prepare=Prepare(collate=collate), workers=1)
    texts = ["a"] * 10 + ["a story"] * 10 + ["a film", "the film was great"] * 6
    scored = est.predict(pa.table({"text": texts}), 2, "text", verbose=0)
    assert set(scored["rows"].to_pylist()) == {2}
    widths = dict(zip(texts, scored["width"].to_pylist(), strict=True))
    assert widths == {"a": 2, "a story": 4, "a film": 2, "the film was great": 4}


@pytest.mark.parametrize(("dtype", "within"), [("float16", 1e-3), ("int8", 5e-3)])
def test_small_types_are_close_to_the_vectors_of_length_one(encoder: Path, dtype: Any, within: float) -> None:
    est = Estimator.from_huggingface(encoder, task="embedding", workers=1)
    full = est.embed({"text": TEXTS}, verbose=0)["embedding"]
    small = est.embed({"text": TEXTS}, dtype=dtype, verbose=0)["embedding"]
    assert small.dtype == dtype
    scale = 127 if dtype == "int8" else 1
    np.testing.assert_allclose(small.astype(np.float32) / scale, full, rtol=0, atol=within)


# Classification and regression


def test_a_label_and_its_score_are_what_the_model_says(tmp_path: Path) -> None:
    model = classifier()
    model.config.id2label = {0: "bad", 1: "good"}
    est = Estimator.from_huggingface(model, tokenizer(), task="text-classification", workers=2)
    tokens = tokenizer()(TEXTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        chances = model.eval()(tokens["input_ids"], tokens["attention_mask"]).logits.softmax(1)

    found = pq.read_table(
        est.predict(
            parquet(tmp_path, text=TEXTS), feature_cols="text", output_path=tmp_path / "out", verbose=0
        )
    )
    best = chances.max(1)
    assert found["label"].to_pylist() == [("bad", "good")[i] for i in best.indices.tolist()]
    np.testing.assert_allclose(found["score"].to_numpy(), best.values.numpy(), atol=1e-6)


def test_two_workers_learn_what_one_learns_from_a_folder_with_changed_labels(tmp_path: Path) -> None:
    classifier().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    data, trained = sentences(240), []
    for workers in (1, 2):
        est = Estimator.from_huggingface(
            tmp_path,
            task="text-classification",
            config={"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}},
            optimizer=partial(torch.optim.AdamW, lr=3e-3),
            metrics="accuracy",
            workers=workers,
        )
        est.fit(data, epochs=4, batch_size=24, feature_cols="text", label_cols="label", verbose=0)
        trained.append(est)
    assert trained[0].history["accuracy"][-1] > 0.9
    np.testing.assert_allclose(trained[0].history["loss"], trained[1].history["loss"], rtol=1e-3)
    one, two = (est.predict({"text": TEXTS}, verbose=0) for est in trained)
    assert set(two["label"]) == {"bad", "good"}
    np.testing.assert_allclose(one["score"], two["score"], rtol=0, atol=1e-2)


def test_regression_predicts_a_number_and_several_labels_those_above_one_half() -> None:
    torch.manual_seed(0)
    model = classifier()
    several = type(model)(
        BertConfig(**{**model.config.to_dict(), "problem_type": "multi_label_classification"})
    )
    est = Estimator.from_huggingface(several, tokenizer(), task="text-classification", workers=1)
    found = est.predict({"text": TEXTS}, verbose=0)
    for labels, scores in zip(found["labels"], found["scores"], strict=True):
        assert labels == [f"LABEL_{i}" for i in (0, 1) if scores[i] > 0.5]

    single = type(model)(
        BertConfig(**{**model.config.to_dict(), "problem_type": "regression", "num_labels": 1})
    )
    est = Estimator.from_huggingface(single, tokenizer(), task="regression", workers=2)
    lengths = np.array([len(text.split()) / 10 for text in TEXTS], np.float32)
    est.fit(
        {"text": TEXTS, "length": lengths},
        epochs=2,
        batch_size=20,
        feature_cols="text",
        label_cols="length",
        verbose=0,
    )
    assert est.history["loss"][-1] < est.history["loss"][0]
    assert est.predict({"text": TEXTS}, output_cols="length", verbose=0)["length"].shape[0] == len(TEXTS)


# Generation


@pytest.mark.parametrize("kind", [pytest.param("gpt2", marks=whole_only), "llama", "t5"])
def test_greedy_answers_are_those_of_generate_one_by_one_in_any_partitioning(
    kind: str, tmp_path: Path
) -> None:
    model = generator(kind)
    expected = [continued(model, text, 20) for text in TEXTS]
    assert len({text for text, _ in expected}) > 10  # or else nothing is shown
    est = made(model, "text2text-generation" if kind == "t5" else "text-generation")
    sampling = Sampling(max_new_tokens=20)

    rows = est.generate({"prompt": TEXTS}, sampling=sampling, details=True, batch_size=9, verbose=0)
    assert rows["generated"].tolist() == [text for text, _ in expected]
    assert rows["generated_tokens"].tolist() == [tokens for _, tokens in expected]
    ends = ["stop" if tokens[-1] == 18 else "length" for _, tokens in expected]
    assert rows["generated_reason"].tolist() == ends
    assert len(set(ends)) == (1 if kind == "t5" else 2)

    given = parquet(tmp_path, prompt=TEXTS)
    path = est.generate(given, output_path=tmp_path / "out", sampling=sampling, verbose=0)
    assert pq.read_table(path)["generated"].to_pylist() == [text for text, _ in expected]


def test_more_prompts_than_are_answered_at_once_join_as_others_leave() -> None:
    model, texts = generator("llama"), sentences(300, seed=3)["text"]
    expected = {text: continued(model, text, 30)[0] for text in set(texts)}
    found = made(model, "text-generation").generate(
        {"prompt": texts}, sampling=Sampling(max_new_tokens=30), batch_size=50, verbose=0
    )
    assert found["generated"].tolist() == [expected[text] for text in texts]


def test_rules_of_the_models_own_generation_config_are_kept() -> None:
    model = generator("llama", repetition_penalty=1.5)
    expected = [continued(model, text, 20)[0] for text in TEXTS]
    assert expected != [continued(generator("llama"), text, 20)[0] for text in TEXTS]
    found = made(model, "text-generation").generate(
        {"prompt": TEXTS}, sampling=Sampling(max_new_tokens=20), verbose=0
    )
    assert found["generated"].tolist() == expected


@pytest.mark.parametrize("rules", [{}, {"repetition_penalty": 1.2}])
def test_an_answer_ends_where_the_model_has_no_more_positions(rules: dict[str, Any]) -> None:
    model, prompts = generator("gpt2", **rules), [*TEXTS[:12], " ".join(["film"] * 70)]
    lengths = [min(64, len(ending_tokenizer()(text)["input_ids"])) for text in prompts]
    expected = [continued(model, text, 64 - n)[1] for text, n in zip(prompts[:12], lengths, strict=False)]
    found = made(model, "text-generation", workers=1).generate(
        {"prompt": prompts}, sampling=Sampling(max_new_tokens=100), details=True, verbose=0
    )
    assert found["generated_tokens"].tolist() == [*expected, []]
    assert found["generated_reason"][-1] == "length"


def test_columns_of_answers_have_their_types_where_every_answer_is_empty(tmp_path: Path) -> None:
    est = made(generator("gpt2"), "text-generation", workers=1)
    prompts = {"prompt": [" ".join(["film"] * 70)] * 2}
    found = est.generate(pa.table(prompts), details=True, verbose=0)
    path = est.generate(parquet(tmp_path, **prompts), details=True, output_path=tmp_path / "out", verbose=0)
    for table in (found, pq.read_table(path)):
        assert table["generated_tokens"].to_pylist() == [[], []]
        assert table.schema.field("generated_tokens").type.value_type == pa.int64()
        assert table.schema.field("generated_logprobs").type.value_type == pa.float64()


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_drawn_answers_depend_on_the_prompt_and_the_seed_alone(kind: str) -> None:
    est = made(generator(kind), "text2text-generation" if kind == "t5" else "text-generation")
    drawn = partial(est.generate, verbose=0)
    sampling = Sampling(max_new_tokens=12, temperature=0.9, seed=1)
    first = drawn({"prompt": TEXTS}, sampling=sampling)["generated"]
    second = drawn({"prompt": TEXTS[::-1]}, sampling=sampling, batch_size=5)["generated"][::-1]
    other = drawn({"prompt": TEXTS}, sampling=Sampling(max_new_tokens=12, temperature=0.9, seed=2))
    assert first.tolist() == second.tolist()
    assert first.tolist() != other["generated"].tolist()


def test_an_answer_ends_before_a_stop_text_and_tells_each_tokens_probability() -> None:
    model = generator("llama")
    est = made(model, "text-generation", workers=1)
    whole = est.generate({"prompt": TEXTS}, sampling=Sampling(max_new_tokens=20), details=True, verbose=0)
    cut = est.generate(
        {"prompt": TEXTS}, sampling=Sampling(max_new_tokens=20, stop=["film"]), details=True, verbose=0
    )
    rows = zip(whole["generated"], cut["generated"], cut["generated_reason"], strict=True)
    held = 0
    for text, before, reason in rows:
        assert before == text.partition("film")[0]
        held += "film" in text
        assert "film" not in text or reason == "stop"
    assert held

    prompt = ending_tokenizer()([TEXTS[0]])["input_ids"][0]
    answer = whole["generated_tokens"][0]
    with torch.inference_mode():
        chances = model(torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1)
    expected = [float(chances[len(prompt) - 1 + i, token]) for i, token in enumerate(answer)]
    np.testing.assert_allclose(whole["generated_logprobs"][0], expected, atol=1e-4)


def test_two_workers_learn_to_continue_texts_as_one_does_and_prompts_are_not_learned() -> None:
    trained = []
    for workers in (1, 2):
        est = made(generator("llama"), "text-generation", workers=workers)
        data = {"text": TEXTS, "label": np.zeros(len(TEXTS))}  # which is not taken for a label
        est.fit(data, epochs=2, batch_size=20, feature_cols="text", verbose=0)
        trained.append(est)
    for one, two in zip(*(est.get_model().parameters() for est in trained), strict=True):
        np.testing.assert_allclose(one.detach(), two.detach(), rtol=0, atol=1e-5)

    collate = made(generator("llama"), "text-generation")._prepare.collate
    batch = collate([{"q": "the film", "a": "was great"}, {"q": "a", "a": "dull"}])
    words = ending_tokenizer()
    assert batch["labels"].tolist() == [
        [-100, -100, *words("was great")["input_ids"], 18],
        [-100, *words("dull")["input_ids"], 18, -100, -100],
    ]
    assert batch["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]


def test_a_saved_estimator_generates_the_same(tmp_path: Path) -> None:
    est = made(generator("gpt2"), "text-generation", workers=1)
    expected = est.generate({"prompt": TEXTS}, sampling=Sampling(max_new_tokens=8), verbose=0)["generated"]
    est.save(tmp_path / "saved.estimator")
    again = Estimator.load(tmp_path / "saved.estimator", trusted=True)
    found = again.generate({"prompt": TEXTS}, sampling=Sampling(max_new_tokens=8), verbose=0)["generated"]
    assert found.tolist() == expected.tolist()


def test_no_call_changes_the_callers_randomness_threads_or_settings(encoder: Path) -> None:
    answers, vectors = made(generator("llama"), "text-generation", workers=1), {}
    calls = {
        "from_huggingface": lambda: vectors.update(
            made=Estimator.from_huggingface(encoder, task="embedding", workers=1)
        ),
        "embed": lambda: vectors["made"].embed({"text": TEXTS}, verbose=0),
        "generate": lambda: answers.generate(
            {"prompt": TEXTS}, sampling=Sampling(max_new_tokens=3, temperature=1.0), verbose=0
        ),
    }
    assert caller.changed_by(calls) == {}


# Mistakes


def test_a_prompt_without_tokens_is_named_by_its_row() -> None:
    with pytest.raises(DataError, match="row 3: has no tokens"):
        made(generator("gpt2"), "text-generation").generate({"prompt": [*TEXTS[:3], ""]}, verbose=0)


def test_what_a_task_cannot_do_is_said() -> None:
    words, embed = made(generator("gpt2"), "text-generation"), made(classifier(), "text-classification")
    with pytest.raises(ConfigError, match="Hint: use generate"):
        words.predict({"text": TEXTS}, verbose=0)
    with pytest.raises(
        ConfigError, match=r"task='embedding'\); this estimator has task='text-classification'"
    ):
        embed.embed({"text": TEXTS})
    plain = Estimator.from_torch(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="this estimator has another kind of model"):
        plain.generate({"prompt": TEXTS})
    with pytest.raises(ConfigError, match="task must be one of"):
        made(classifier(), "translation")
    with pytest.raises(ConfigError, match="needs its tokenizer"):
        Estimator.from_huggingface(classifier(), task="text-classification")
    with pytest.raises(ConfigError, match="two columns, the label and its score"):
        embed.predict({"text": TEXTS}, output_cols="x", verbose=0)
    with pytest.raises(ConfigError, match=r"feature_cols=\['question', 'answer'\]"):
        words.fit({"q": TEXTS, "a": TEXTS}, feature_cols="q", label_cols="a", verbose=0)
    with pytest.raises(DataError, match="number the classes, as the model does"):
        embed.fit({"text": TEXTS, "label": TEXTS}, feature_cols="text", label_cols="label", verbose=0)


@pytest.mark.parametrize(
    "options",
    [
        *({"max_new_tokens": 0}, {"temperature": -1}, {"temperature": math.inf}, {"top_p": 0}, {"top_k": 0}),
        *({"stop": "end"}, {"stop": [""]}, {"max_new_tokens": 2.5}, {"seed": 1.5}),
    ],
)
def test_a_sampling_that_makes_no_sense_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"Sampling\({next(iter(options))}="):
        Sampling(**options)
