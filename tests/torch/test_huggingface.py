"""Models of Hugging Face: trained on text by their own loss, scored by name, stored with save_pretrained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from kindler import Estimator, Prepare, Store
from kindler.errors import ConfigError, UntrustedError
from kindler.models.loaded import load
from kindler.models.registry import MODEL_KINDS
from tests.exact import assert_close

pytest.importorskip("transformers")

from tiny_text import Tokenize, classifier, sentences, tokenizer

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

TRAIN, TEST = sentences(240), sentences(60, seed=1)


def groups(model: Any, config: Any) -> torch.optim.Optimizer:
    """As is usual: no decay of biases and norms."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": other, "weight_decay": 0.0}], lr=3e-3
    )


def estimator(workers: int, model: Any = None, **options: Any) -> Estimator:
    return Estimator.from_torch(
        model=classifier() if model is None else model,
        optimizer=groups,
        loss="model",
        metrics="accuracy",
        inputs="kwargs",
        prepare=Prepare(collate=Tokenize(tokenizer())),
        workers=workers,
        **options,
    )


def fit(est: Estimator, epochs: int, **options: Any) -> Any:
    columns = {"feature_cols": "text", "label_cols": "label"}
    return est.fit(TRAIN, epochs=epochs, batch_size=24, verbose=0, **columns, **options)


@pytest.fixture(scope="module")
def trained() -> Estimator:
    model = classifier(dropout=0.1)
    model.gradient_checkpointing_enable()
    est = estimator(2, model)
    fit(est, 4, validation_data=TEST)
    return est


def test_text_is_tokenised_padded_and_learned_by_two_workers_with_checkpointed_gradients(
    trained: Estimator,
) -> None:
    assert trained.history["val_accuracy"][-1] > 0.95
    assert trained.get_model().is_gradient_checkpointing

    scored = trained.predict(pa.table({"text": TEST["text"]}), verbose=0)

    assert scored.column_names == ["text", "logits"]
    guess = np.array(scored["logits"].to_pylist()).argmax(1)
    assert (guess == TEST["label"]).mean() > 0.95


def test_two_workers_take_the_steps_of_one_and_of_a_plain_loop() -> None:
    one, two = estimator(1), estimator(2)
    told = [fit(est, 1, shuffle=False) for est in (one, two)]
    model, tokenise = classifier(), Tokenize(tokenizer())
    optimizer = groups(model, {})
    for start in range(0, 240, 24):
        rows = slice(start, start + 24)
        batch = tokenise([{"text": text} for text in TRAIN["text"][rows]])
        inputs = {name: torch.as_tensor(values) for name, values in batch.items()}
        optimizer.zero_grad()
        model.train()(**inputs, labels=torch.as_tensor(TRAIN["label"][rows])).loss.backward()
        optimizer.step()

    expected = [p.detach().numpy() for p in model.parameters()]
    for est in (one, two):
        found = [p.detach().numpy() for p in est.get_model().parameters()]
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    assert told[1]["loss"] == pytest.approx(told[0]["loss"], rel=1e-4)


def test_a_stored_model_is_what_save_pretrained_writes_and_predicts_alike(
    trained: Estimator, tmp_path: Path
) -> None:
    om = Store(tmp_path)
    texts = {"text": np.array(TEST["text"][:5], object)}
    expected = trained.predict({"text": TEST["text"][:5]}, verbose=0)["logits"]

    version = om.models.put(trained.get_model(), "alone")
    assert version.kind == "huggingface"
    names = {file.path for file in version.files}
    assert {"config.json", "model.safetensors"} <= names
    again = om.models.get("alone")
    assert type(again) is type(trained.get_model())
    tokens = tokenizer()(TEST["text"][:5], padding=True, return_tensors="np")
    found = load(om.store, version, trusted=False).predictor(
        {n: tokens[n] for n in ("input_ids", "attention_mask")}
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)

    om.models.put(trained, "whole")
    with pytest.raises(UntrustedError, match="its transform, collate or padding is code"):
        om.models.get("whole")
    est = om.models.get("whole", trusted=True)
    np.testing.assert_allclose(
        est.predict({"text": TEST["text"][:5]}, verbose=0)["logits"], expected, atol=1e-5
    )
    served = load(om.store, om.models.metadata("whole"), trusted=True).predictor
    np.testing.assert_allclose(served(texts), expected, atol=1e-5)
    om.close()


def test_a_configuration_that_names_code_needs_trust(tmp_path: Path) -> None:
    kind, model = MODEL_KINDS.model_kind("huggingface"), classifier()
    meta = kind.write(model, tmp_path, trusted=False)
    told = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**told, "auto_map": {"AutoModel": "evil.py"}}))
    with pytest.raises(UntrustedError, match="auto_map"):
        kind.read(tmp_path, meta, trusted=False)
    with pytest.raises(UntrustedError, match="its class would be imported"):
        kind.read(tmp_path, {**meta, "class": "os:system"}, trusted=False)
    nested = {"text_config": [{"deep": {"auto_map": {"AutoConfig": "evil--x"}}}]}
    for key, more in (
        ("auto_map", nested),
        ("_attn_implementation", {"vision_config": {"_attn_implementation": "somebody/kernel"}}),
        ("quantization_config", {"decoder": {"quantization_config": {"quant_method": "x"}}}),
        ("use_pretrained_backbone", {"backbone_config": {"use_pretrained_backbone": True}}),
        ("backbone", {"backbone": "somebody/net"}),
        ("transformers_weights", {"transformers_weights": "../other.safetensors"}),
        ("index_path", {"retriever": {"index_path": "/etc"}}),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**told, **more}))
        with pytest.raises(UntrustedError, match=key):
            kind.read(tmp_path, meta, trusted=False)
    (tmp_path / "config.json").write_text(json.dumps(told))
    again = kind.read(tmp_path, meta, trusted=False)
    assert_close(
        [p.detach().numpy() for p in again.parameters()], [p.detach().numpy() for p in model.parameters()]
    )

    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/elsewhere"}))
    with pytest.raises(UntrustedError, match="adapter_config"):
        kind.read(tmp_path, meta, trusted=False)


@pytest.mark.parametrize("name", ["../other/{}", "/{}", "link.safetensors", "none.safetensors"])
def test_weights_in_several_files_are_files_of_the_version(tmp_path: Path, name: str) -> None:
    kind, model, folder = MODEL_KINDS.model_kind("huggingface"), classifier(), tmp_path / "version"
    for path in (folder, tmp_path / "other"):
        path.mkdir()
        model.save_pretrained(path, max_shard_size="20KB")
    meta = {"form": "pretrained", "class": f"{type(model).__module__}:{type(model).__qualname__}"}
    kind.read(folder, meta, trusted=False)  # as it was saved
    stranger = next((tmp_path / "other").glob("*.safetensors"))
    (folder / "link.safetensors").symlink_to(stranger)
    index = folder / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    wanted = name.format(stranger.name if name.startswith("..") else stranger)
    told["weight_map"] = dict.fromkeys(told["weight_map"], wanted)
    index.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match="no file|path"):
        kind.read(folder, meta, trusted=False)
