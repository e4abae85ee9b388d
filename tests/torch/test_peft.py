"""Models of peft: stored with their base, read as what they were, scored and trained on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Estimator, Store
from kindler.errors import ConfigError, UntrustedError
from kindler.models.loaded import load
from kindler.models.registry import MODEL_KINDS

pytest.importorskip("peft")
pytest.importorskip("transformers")

from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from tiny_text import classifier

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

TOKENS = torch.arange(1, 13).reshape(2, 6)
ROWS = torch.linspace(-1, 1, 12).reshape(3, 4)


class Own(nn.Module):
    """A class of the user's."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(rows)))  # type: ignore[no-any-return]


def moved(model: Any) -> Any:
    """Adapters begin with no effect; give them one."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.3)
    return model


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def text(**options: Any) -> Any:
    return moved(get_peft_model(classifier(), LoraConfig(task_type="SEQ_CLS", r=2, **options)))


def two_adapters() -> Any:
    model = get_peft_model(chain(), LoraConfig(target_modules=["0"], r=2), adapter_name="one")
    model.add_adapter("two", LoraConfig(target_modules=["0", "2"], r=3, use_dora=True))
    model.set_adapter("two")
    return moved(model).eval()


def switched_off() -> Any:
    model = moved(get_peft_model(chain(), LoraConfig(target_modules=["0"])))
    model.disable_adapter_layers()
    return model


def merged() -> Any:
    model = moved(get_peft_model(chain(), LoraConfig(target_modules=["0"])))
    model.merge_adapter()
    return model


MODELS = {
    "text": text,
    "text, all linear": lambda: text(target_modules="all-linear", init_lora_weights="gaussian"),
    "layers": lambda: moved(
        get_peft_model(chain(), LoraConfig(target_modules=["0"], modules_to_save=["2"], lora_dropout=0.5))
    ),
    "two adapters": two_adapters,
    "switched off": switched_off,
    "merged": merged,
    "half": lambda: moved(get_peft_model(chain().to(torch.bfloat16), LoraConfig(target_modules=["0"]))),
    "ia3": lambda: moved(
        get_peft_model(chain(), IA3Config(target_modules=["0", "2"], feedforward_modules=["2"]))
    ),
}


def outputs(model: Any) -> Any:
    model = copy.deepcopy(model).eval()
    is_text = hasattr(model.get_base_model(), "config") and hasattr(model.get_base_model(), "main_input_name")
    with torch.inference_mode():
        given = ROWS.to(next(model.parameters()).dtype)
        return model(input_ids=TOKENS).logits if is_text else model(given)


@pytest.fixture
def om(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "store")
    yield opened
    opened.close()


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_model_comes_back_as_it_was_without_trust(om: Store, make: Any) -> None:
    model = make()
    expected, state = outputs(model), {name: value.clone() for name, value in model.state_dict().items()}
    flags = {name: weight.requires_grad for name, weight in model.named_parameters()}
    version = om.models.put(model, "tuned")
    again = om.models.get("tuned")

    assert version.kind == "peft"
    assert type(again) is type(model)
    torch.testing.assert_close(outputs(again), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(outputs(model), expected, rtol=0, atol=0)  # putting changed nothing
    assert {name: weight.requires_grad for name, weight in again.named_parameters()} == flags
    assert again.training == model.training
    assert again.active_adapters == model.active_adapters
    for name, config in model.peft_config.items():
        assert again.peft_config[name].to_dict() == config.to_dict()
    found = again.state_dict()
    assert {name: (value.shape, value.dtype) for name, value in found.items()} == {
        name: (value.shape, value.dtype) for name, value in state.items()
    }
    assert all(file.path.endswith((".json", ".safetensors")) for file in version.files)


def test_a_stored_model_predicts_by_the_inputs_of_its_base(om: Store) -> None:
    tuned, layers = text(), MODELS["layers"]()
    found = load(om.store, om.models.put(tuned, "text"), trusted=False).predictor
    assert found.signature.names == ("input_ids", "attention_mask")
    given = {"input_ids": TOKENS.numpy(), "attention_mask": np.ones(TOKENS.shape, np.int64)}
    np.testing.assert_allclose(found(given), outputs(tuned), atol=1e-6)
    found = load(om.store, om.models.put(layers, "layers"), trusted=False).predictor
    assert [(spec.name, spec.shape) for spec in found.signature.inputs] == [("input", (None, 4))]
    np.testing.assert_allclose(found({"input": ROWS.numpy()}), outputs(layers), atol=1e-6)


def test_a_base_of_a_class_of_the_users_needs_trust_or_the_class(om: Store) -> None:
    model = moved(get_peft_model(Own(6), LoraConfig(target_modules=["first"])))
    om.models.put(model, "own", init={"width": 6})
    with pytest.raises(UntrustedError, match="Own"):
        om.models.get("own")
    for options in ({"trusted": True}, {"classes": [Own]}):
        torch.testing.assert_close(outputs(om.models.get("own", **options)), outputs(model))


def test_only_the_adapters_are_trained_on_by_an_estimator_which_is_stored_too(om: Store) -> None:
    om.models.put(get_peft_model(chain(), LoraConfig(target_modules=["0"], r=2)), "tuned")
    model = om.models.get("tuned")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    estimator = Estimator.from_torch(
        model=model, optimizer=torch.optim.SGD, loss=nn.CrossEntropyLoss(), workers=1, engine="local"
    )
    rows, labels = ROWS.numpy().repeat(4, 0), np.array([0, 1, 1]).repeat(4)
    estimator.fit((rows, labels), epochs=1, batch_size=4, verbose=0)
    after = estimator.get_model().state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    om.models.put(estimator, "whole")
    np.testing.assert_allclose(
        om.models.get("whole").predict(rows, verbose=0), estimator.predict(rows, verbose=0), atol=1e-6
    )


def test_adapters_that_could_load_something_and_those_that_cannot_be_stored_are_refused(om: Store) -> None:
    version = om.models.put(MODELS["layers"](), "layers")
    harmful = {**version.meta["adapters"]["default"], "megatron_config": {"a": 1}, "megatron_core": "evil"}
    with om.store.files(version) as folder, pytest.raises(UntrustedError, match="megatron_core"):
        MODEL_KINDS.model_kind("peft").read(
            folder, {**version.meta, "adapters": {"default": harmful}}, trusted=False
        )
    prompts = get_peft_model(classifier(), PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2))
    with pytest.raises(ConfigError, match="PROMPT_TUNING cannot be stored"):
        om.models.put(prompts, "prompts")
    inside = classifier()
    inside.add_adapter(LoraConfig(target_modules=["query"]))
    with pytest.raises(ConfigError, match="stored without the model"):
        om.models.put(inside, "inside")
