"""`from_huggingface(adapter=...)`: adapters train as one process would; only they travel and are kept."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
import torch

from kindler import Device, Estimator, Optimization, Store
from kindler.errors import ConfigError, DamagedError
from kindler.models.loaded import load
from kindler.types import Lora, Sampling
from tests import caller
from tests.serve.served import serving

pytest.importorskip("peft")
pytest.importorskip("transformers")

from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_text import classifier, continued, ending_tokenizer, generator, moved, sentences, tokenizer
from transformers import BertConfig, BertForSequenceClassification

from tests.whole import whole_only

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

TABLE = pa.table(sentences(90))
ADAM = partial(torch.optim.AdamW, lr=3e-2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier and its tokenizer, as `save_pretrained` writes them."""
    made = tmp_path_factory.mktemp("base")
    classifier().save_pretrained(made)
    tokenizer().save_pretrained(made)
    return made


def lora(model: Any, **options: Any) -> Estimator:
    options = {"adapter": Lora(rank=2), "optimizer": ADAM, "device": "cpu", "workers": 1, **options}
    made = tokenizer() if isinstance(model, torch.nn.Module) else None
    return Estimator.from_huggingface(model, made, task="text-classification", **options)


def fit(estimator: Estimator, epochs: int = 2, batch_size: int = 18, **options: Any) -> Estimator:
    columns = {"feature_cols": "text", "label_cols": "label", "verbose": 0}
    estimator.fit(TABLE, epochs=epochs, batch_size=batch_size, **columns, **options)
    return estimator


def trained(estimator: Estimator) -> dict[str, torch.Tensor]:
    named = estimator.get_model().named_parameters()
    return {name: value.detach().clone() for name, value in named if value.requires_grad}


def assert_close(found: Estimator, expected: Estimator, atol: float = 2e-6) -> None:
    mine, wanted = trained(found), trained(expected)
    assert mine.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=atol, msg=name)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Estimator:
    """One process on all rows."""
    return fit(lora(folder))


def test_one_process_trains_adapters_and_the_head_as_peft_alone_does(folder: Path, alone: Estimator) -> None:
    model = get_peft_model(classifier(), LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4)).train()
    initial = lora(folder).get_model().state_dict()
    model.load_state_dict(initial)
    optimizer = ADAM(model.parameters())
    inputs = dict(tokenizer()(TABLE["text"].to_pylist(), padding=True, return_tensors="pt"))
    labels = torch.tensor(TABLE["label"].to_pylist())
    whole = fit(lora(folder), epochs=3, batch_size=90)
    for _ in range(3):
        optimizer.zero_grad()
        model(**inputs, labels=labels).loss.backward()
        optimizer.step()
    expected = {name: value for name, value in model.named_parameters() if value.requires_grad}
    found = trained(whole)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6, msg=name)
    assert any("lora_B" in name for name in found)
    assert any("classifier.modules_to_save" in name for name in found)
    after = whole.get_model().state_dict()
    assert all(torch.equal(value, initial[name]) for name, value in after.items() if name not in found)


@pytest.mark.parametrize(
    ("strategy", "from_object", "optimization"),
    [
        ("allreduce", False, None),
        ("zero1", True, Optimization(accumulation_steps=3)),
        pytest.param("fsdp", False, None, marks=whole_only),
    ],
)
def test_two_workers_train_what_one_process_does(
    folder: Path, alone: Estimator, strategy: str, from_object: bool, optimization: Any
) -> None:
    model = classifier() if from_object else folder
    before = {name: (value.clone(), value.requires_grad) for name, value in named(model)}
    assert_close(fit(lora(model, workers=2, optimization=optimization), strategy=strategy), alone)
    after = {name: (value, value.requires_grad) for name, value in named(model)}
    assert before.keys() == after.keys()  # the caller's own model stays as it was
    assert all(torch.equal(after[name][0], value) for name, (value, _) in before.items())
    assert all(after[name][1] == flag for name, (_, flag) in before.items())


def named(model: Any) -> Any:
    return model.named_parameters() if isinstance(model, torch.nn.Module) else ()


@whole_only
def test_two_workers_with_half_precision_come_close_to_one(folder: Path) -> None:
    half = {"device": Device("cpu", precision="bf16"), "optimizer": partial(torch.optim.SGD, lr=0.3)}
    one, two = (fit(lora(folder, workers=workers, **half)) for workers in (1, 2))
    assert_close(two, one, atol=5e-3)


def test_a_checkpoint_of_two_workers_continues_with_one(
    folder: Path, alone: Estimator, tmp_path: Path
) -> None:
    fit(lora(folder, workers=2), epochs=1, checkpoint=tmp_path / "saved")
    assert_close(fit(lora(folder, workers=1), resume=True, checkpoint=tmp_path / "saved"), alone)


def test_a_checkpoint_with_its_optimizer_is_a_small_part_of_the_base(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    base = BertForSequenceClassification(BertConfig(vocab_size=18, max_position_embeddings=32, **sizes))
    estimator = fit(lora(base), epochs=1, checkpoint=tmp_path)
    file = Estimator.latest_checkpoint(tmp_path)
    assert file is not None
    whole = sum(value.nbytes for value in base.state_dict().values())
    assert whole > 4 << 20
    assert Path(file).stat().st_size < whole / 50
    estimator.save(tmp_path / "adapters.pt")
    assert (tmp_path / "adapters.pt").stat().st_size < whole / 50
    again = lora(base).load_weights(tmp_path / "adapters.pt")
    assert_close(again, estimator, atol=0)


@whole_only
def test_adapters_do_not_go_into_a_base_that_has_changed(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "base"
    shutil.copytree(folder, copied)
    estimator = fit(lora(copied), epochs=1)
    estimator.save_checkpoint(tmp_path / "saved.ckpt")
    estimator.save(tmp_path / "whole.estimator")
    weights = load_file(copied / "model.safetensors")
    weights["bert.embeddings.word_embeddings.weight"][3, 3] += 1e-3
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ConfigError, match="has changed: adapters were made for weights with the hash"):
        Estimator.load(tmp_path / "whole.estimator", trusted=True).get_model()
    with pytest.raises(ConfigError, match="the base of this model has changed"):
        lora(copied).load_checkpoint(tmp_path / "saved.ckpt")
    with pytest.raises(ConfigError, match="has changed"):
        fit(estimator, epochs=1)


def test_a_base_weight_that_a_callback_unfreezes_is_not_lost_silently(tmp_path: Path) -> None:
    estimator = lora(classifier())
    estimator.get_model().base_model.model.bert.pooler.dense.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"pooler.dense.weight' belongs to the base.*\n.*modules_to_save"):
        estimator.save(tmp_path / "unused.pt")


def test_answers_with_adapters_are_those_of_the_model_alone(tmp_path: Path) -> None:
    base = generator("llama")
    base.save_pretrained(tmp_path)
    estimator = Estimator.from_huggingface(
        tmp_path,
        ending_tokenizer(),
        task="text-generation",
        adapter=LoraConfig(r=2, target_modules="all-linear"),
        optimizer=ADAM,
        workers=2,
        device="cpu",
    )
    estimator.fit(TABLE, epochs=1, batch_size=45, feature_cols="text", verbose=0)
    prompts = sentences(6, seed=1)["text"]
    found = estimator.generate({"prompt": prompts}, sampling=Sampling(max_new_tokens=6), verbose=0)[
        "generated"
    ]
    model = estimator.get_model()
    assert type(model).__name__ == "PeftModelForCausalLM"
    expected = [continued(model, text, 6)[0] for text in prompts]
    assert list(found) == expected
    assert expected != [continued(base, text, 6)[0] for text in prompts]


def logits(model: Any) -> Any:
    inputs = tokenizer()(TABLE["text"].to_pylist(), padding=True, return_tensors="pt")
    with torch.inference_mode():
        return model.eval()(**inputs).logits


def test_adapters_in_a_store_name_their_base_which_is_there_once(tmp_path: Path) -> None:
    def stored_bytes() -> int:
        return sum(blob.stat().st_size for blob in (tmp_path / "blobs").rglob("*") if blob.is_file())

    with Store(tmp_path) as store:
        store.models.put(classifier(), "base")
        base, alone = store.models.get("base"), stored_bytes()
        tuned = [moved(lora(base, seed=n), n) for n in range(3)]
        versions = [store.models.put(one, f"reviews-{n}") for n, one in enumerate(tuned)]
        assert stored_bytes() - alone < alone / 2
        for version in versions:
            named_base = version.meta["model_meta"]["base"]
            assert (named_base["version"], named_base["bucket"]) == ("base@1", "default")
            assert named_base["weights"] == store.models.metadata("base").meta["weights"]

        store.models.drop("base")
        store.sweep(grace_s=0)
        for n, one in enumerate(tuned[:2]):
            found = store.models.get(f"reviews-{n}", trusted=True).get_model()
            torch.testing.assert_close(logits(found), logits(one.get_model()), rtol=0, atol=1e-6)
        weights = next(file for file in versions[0].files if file.path == "model/base/model.safetensors")
        (tmp_path / "blobs" / weights.sha256[:2] / weights.sha256).unlink()
        with pytest.raises(DamagedError, match="missing"):
            store.models.get("reviews-0", trusted=True)

        with torch.no_grad():
            base.bert.embeddings.word_embeddings.weight[3, 3] += 1e-3
        other = store.models.put(lora(base), "other").meta["model_meta"]["base"]
        assert "version" not in other
        assert other["weights"] != named_base["weights"]


def test_a_merged_estimator_is_a_plain_model_that_predicts_the_same(tmp_path: Path) -> None:
    estimator = moved(lora(classifier()))
    expected, before = logits(estimator.get_model()), trained(estimator)
    model = classifier()
    calls = {"from_huggingface": lambda: lora(model).get_model(), "merge": estimator.merge}
    assert caller.changed_by(calls) == {}
    merged = estimator.merge()
    plain = merged.get_model()
    assert type(plain) is BertForSequenceClassification
    torch.testing.assert_close(logits(plain), expected, rtol=1e-5, atol=1e-5)
    plain.save_pretrained(tmp_path / "plain")
    again = BertForSequenceClassification.from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(logits(again), logits(plain), rtol=0, atol=0)
    with Store(tmp_path / "store") as store:
        assert store.models.put(merged, "plain").meta["model_kind"] == "huggingface"
    assert all(torch.equal(value, before[name]) for name, value in trained(estimator).items())
    rows = TABLE.drop(["label"])
    assert merged.predict(rows, verbose=0)["label"] == estimator.predict(rows, verbose=0)["label"]
    with pytest.raises(ConfigError, match="this model has no adapters"):
        merged.merge()


@pytest.fixture(scope="module")
def adapted_store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A store with three adapters over one base, and what each of them merged computes."""
    folder, plain = tmp_path_factory.mktemp("adapted"), []
    with Store(folder) as store:
        base = classifier()
        for n in range(3):
            estimator = moved(lora(base), n)
            store.models.put(estimator.get_model().eval(), f"reviews-{n}")
            plain.append(estimator.merge().get_model().eval())
    return folder, plain


def test_adapters_that_a_process_serves_have_the_weights_of_one_base(adapted_store: Any) -> None:
    folder, plain = adapted_store
    with Store(folder) as store:
        versions = [store.models.metadata(f"reviews-{n}") for n in range(3)]
        models = [load(store.store, version, trusted=False).model for version in versions]
        mine = store.models.get("reviews-0")
    places = [{p.data_ptr() for name, p in one.named_parameters() if frozen(name)} for one in models]
    assert len(places[0]) > 30
    assert places[0] == places[1] == places[2]
    assert not places[0] & {p.data_ptr() for p in mine.parameters()}  # which its reader may change
    for found, expected in zip(models, plain, strict=True):
        torch.testing.assert_close(logits(found), logits(expected), rtol=1e-5, atol=1e-5)


def frozen(name: str) -> bool:
    return "lora_" not in name and "modules_to_save" not in name


@pytest.mark.parametrize("isolation", [pytest.param("none", marks=whole_only), "process"])
def test_requests_for_several_adapters_at_once_get_their_own_answers(
    adapted_store: Any, isolation: str
) -> None:
    folder, plain = adapted_store
    random = np.random.default_rng(0)
    asked = [(int(random.integers(3)), random.integers(2, 18, (1, 6))) for _ in range(90)]
    with (
        serving(folder, "--isolation", isolation, "--timeout-s", "600") as served,
        httpx.Client(base_url=served.url, timeout=300) as client,
    ):

        def answer(request: Any) -> Any:
            number, ids = request
            rows = [{"input_ids": ids[0].tolist(), "attention_mask": [1] * 6}]
            reply = client.post(f"/models/reviews-{number}/invocations", json={"instances": rows})
            return reply.raise_for_status().json()["predictions"]

        with ThreadPoolExecutor(12) as threads:
            found = list(threads.map(answer, asked))
    with torch.inference_mode():
        for (number, ids), row in zip(asked, found, strict=True):
            expected = plain[number](input_ids=torch.from_numpy(ids)).logits.numpy()
            np.testing.assert_allclose(np.array(row), expected, rtol=1e-4, atol=1e-5)


def refused(match: str, model: Any = None, **options: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        lora(classifier() if model is None else model, **options)


def test_what_cannot_be_adapted_is_rejected_before_any_worker_starts() -> None:
    for options, match in (
        ({"rank": 0}, r"rank=0.*whole number from 1"),
        ({"rank": True}, r"rank=True"),
        ({"alpha": float("nan")}, r"alpha=nan"),
        ({"dropout": 1.0}, r"dropout=1.0.*below 1"),
        ({"target_modules": []}, r"target_modules=\[\]"),
        ({"modules_to_save": "head"}, r"modules_to_save='head'.*list"),
        ({"base_bits": 5}, r"base_bits=5.*4, 8 or None"),
    ):
        with pytest.raises(ConfigError, match=match):
            Lora(**options)
    refused("linear ones are classifier, dense, key, query, value", adapter=Lora(target_modules=["q_proj"]))
    refused("adapter must be Lora", adapter="lora")
    prompts = PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    refused("must be one of LORA, IA3", adapter=prompts)
    model = classifier()
    own = torch.optim.AdamW(model.parameters())
    refused("optimizer holds the model's own weights", model, optimizer=own)
    refused("has adapters already", lora(classifier()).get_model())
    bits = Lora(base_bits=4)
    refused("a model that was passed is as it is", model, adapter=bits)
    refused(r"base_bits=4\): bitsandbytes computes on GPUs.*\n.*leave base_bits out", "no-such", adapter=bits)
    with pytest.raises(ConfigError, match="embedding is not trained"):
        Estimator.from_huggingface(model, tokenizer(), task="embedding", adapter=Lora())
