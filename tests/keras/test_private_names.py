"""Names that Keras and its backends do not promise, and that Kindler uses: each is still there."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from flavour import FLAVOUR, KERAS

pytestmark = pytest.mark.keras

OF_MODELS = {
    "keras": "_symbolic_build _flatten_layers _compile_loss _compile_metrics _compile_config _loss_tracker"
    " _seed_generators",
    "tf_keras": "_flatten_layers _is_compiled compiled_loss compiled_metrics",
}
_OF_TENSORFLOW = {
    "tensorflow.python.eager.context": "context",
    "tensorflow.python.data.ops.dataset_ops": "_VariantDataset",
    "tensorflow.python.data.experimental.ops.distribute": "_AutoShardDataset",
}
OF_MODULES = {
    "keras": {"keras.src.backend.common.global_state": "get_global_attribute set_global_attribute"},
    "torch": {"keras.src.backend.torch.core": "DEFAULT_DEVICE convert_to_tensor"},
    "jax": {
        "jax.experimental.buffer_callback": "buffer_callback",
        "jax.experimental": "io_callback",
        "jax._src.compiler": "backend_compile_and_load",
    },
    "tensorflow": _OF_TENSORFLOW,
    "tf_keras": {**_OF_TENSORFLOW, "tf_keras.src.backend": "_SEED_GENERATOR"},
}


def test_models_have_their_private_attributes() -> None:
    keras: Any = KERAS
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    assert [name for name in OF_MODELS[keras.__name__].split() if not hasattr(model, name)] == []


@pytest.mark.parametrize("of", sorted({"tf_keras"} if FLAVOUR == "tf_keras" else {"keras", FLAVOUR}))
def test_modules_have_their_private_names(of: str) -> None:
    for module, names in OF_MODULES[of].items():
        found = importlib.import_module(module)

        assert [name for name in names.split() if not hasattr(found, name)] == []


@pytest.mark.skipif(FLAVOUR not in ("tensorflow", "tf_keras"), reason="a thing of TensorFlow's")
def test_the_context_of_tensorflow_has_a_seed() -> None:
    context = importlib.import_module("tensorflow.python.eager.context").context()

    assert hasattr(context, "_seed")
    assert hasattr(context, "_rng")
