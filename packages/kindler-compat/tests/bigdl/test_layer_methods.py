"""What programs call on layers: initial weights, regularizers, models of models, tensors as inputs."""

from __future__ import annotations

import importlib
import inspect
import pickle
from typing import Any

import numpy as np
import pytest

from kindler.compat.bigdl.nn.initialization_method import ConstInitMethod, Ones, Xavier, Zeros
from kindler.compat.bigdl.nn.layer import *
from kindler.compat.bigdl.optim.optimizer import L1Regularizer, L2Regularizer
from kindler.compat.bigdl.util.common import RNG, JTensor
from kindler.errors import ConfigError


def some(*shape: int) -> Any:
    return np.random.default_rng(3).normal(size=shape).astype("float32")


def test_rows_of_tables_are_classes_like_any_other() -> None:
    assert repr(SoftShrink(the_lambda=1)) == "SoftShrink(the_lambda=1.0)"
    assert list(inspect.signature(Clamp).parameters) == ["min", "max", "bigdl_type"]
    with pytest.raises(TypeError, match="Clamp.*missing a required argument: 'max'"):
        Clamp(1)
    with pytest.raises(TypeError, match="LeakyReLU.*unexpected keyword argument 'slope'"):
        LeakyReLU(slope=1)
    with pytest.warns(UserWarning, match="Linear: init_grad_bias have no effect"):
        Linear(2, 1, init_grad_bias=np.zeros(1))
    layer = pickle.loads(pickle.dumps(HardTanh(-0.5, 2)))
    assert type(layer) is HardTanh
    assert layer.forward(np.array([[-9.0, 9.0]])).tolist() == [[-0.5, 2.0]]


def test_layers_that_earlier_versions_pickled_are_read() -> None:
    assert importlib.import_module("kindler.compat.bigdl.nn.linear").Linear is Linear
    pooling = SpatialMaxPooling(2, 2, to_ceil=True)
    state = vars(pooling).copy()
    state["made_with"] = state.pop("_arguments")
    for name in ("kw", "kh", "dw", "dh", "pad_w", "pad_h", "format"):
        del state[name]
    again = SpatialMaxPooling.__new__(SpatialMaxPooling)
    again.__setstate__(state)
    np.testing.assert_array_equal(again.forward(some(1, 1, 3, 3)), pooling.forward(some(1, 1, 3, 3)))


def test_weights_are_drawn_anew_by_the_methods_that_a_layer_was_given() -> None:
    model = Sequential().add(Linear(3, 2).set_init_method(Ones(), ConstInitMethod(5))).add(Add(2)).add(Tanh())
    model.layers[1].set_init_method(bias_init_method=Ones())
    model.set_weights([part + 1 for part in model.get_weights()])
    for part, number in zip(model.reset().get_weights(), (1, 5, 1), strict=True):
        assert (part == number).all()
    seeded = [Linear(9, 4).set_init_method(Xavier(), Zeros()).set_seed(7).reset() for _ in range(2)]
    np.testing.assert_array_equal(*(layer.get_weights()[0] for layer in seeded))
    bound = np.sqrt(6 / (9 + 4))  # that of Linear itself would be 1 / 3
    assert 1 / 3 < np.abs(seeded[0].get_weights()[0]).max() <= bound
    with pytest.raises(ConfigError, match="Tanh does not have a weight or a bias"):
        Tanh().set_init_method(Ones())
    with pytest.raises(ConfigError, match="the method of the weight must be one of"):
        Linear(2, 2).set_init_method("xavier")


def test_a_seed_gives_the_numbers_and_the_weights_of_bigdl() -> None:
    rng = RNG()
    rng.set_seed(100)  # numbers that BigDL 0.13 drew
    found = rng.uniform(0.1, 0.2, [2, 3])
    expected = [[0.15434049, 0.16711557, 0.12783694], [0.14120464, 0.14245176, 0.15263824]]
    np.testing.assert_allclose(found, expected, atol=1e-7)
    rng.set_seed(100)
    layer = Linear(4, 5)
    output = layer.forward(rng.uniform(0.0, 1.0, [4]))
    expected = [0.41366524, 0.009532653, -0.677581, 0.07945433, -0.5742568]
    np.testing.assert_allclose(output, expected, atol=1e-6)
    features = np.random.RandomState(100).uniform(0, 1, (2, 2))
    drawn = Linear(2, 1).set_init_method(Xavier(), Zeros()).set_seed(1234).reset()
    np.testing.assert_allclose(drawn.predict(features), [[-0.47596836], [-0.37598032]], atol=1e-6)


def test_loops_of_forward_and_backward_have_the_gradients_of_regularizers() -> None:
    inner = Linear(2, 1, wRegularizer=L2Regularizer(0.5), bRegularizer=L1Regularizer(0.25))
    model = Sequential().add(inner)
    weight, bias = model.get_weights()
    x, out = np.ones((1, 2), np.float32), np.array([[2.0]], np.float32)
    for times in (1, 2):  # backward adds up
        model.forward(x)
        model.backward(x, out)
        found = model.parameters()[inner.name()]
        np.testing.assert_allclose(found["gradWeight"], times * (2.0 * x + 0.5 * weight), rtol=1e-6)
        np.testing.assert_allclose(found["gradBias"], times * (2.0 + 0.25 * np.sign(bias)), rtol=1e-6)
    model.update_parameters(0.1)
    np.testing.assert_allclose(model.get_weights()[0], weight - 0.2 * (2.0 * x + 0.5 * weight), rtol=1e-5)
    frozen = Linear(2, 1, wRegularizer=L2Regularizer(0.5)).freeze()
    frozen.forward(x)
    frozen.backward(x, out)
    assert (frozen.parameters()[frozen.name()]["gradWeight"] == 0).all()


def test_a_model_prepares_what_another_one_is_trained_on(tmp_path: Any) -> None:
    first, second = Linear(4, 2)(), Linear(4, 2)()
    preparing = Model([first, second], [CAddTable()([first, second])])
    start = ReLU()()
    trained = Model([start], [Linear(2, 1)(start)])
    model = Model(preparing, trained)
    x = [some(3, 4), some(3, 4) * 2]
    np.testing.assert_allclose(model.forward(x), trained.forward(preparing.forward(x)), rtol=1e-6)
    before = model.get_weights()
    model.backward(x, np.ones((3, 1)))
    model.update_parameters(0.1)
    moved = [not np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True)]
    assert moved == [False] * 4 + [True] * 2
    model.saveModel(str(tmp_path / "model"))
    np.testing.assert_allclose(
        Model.loadModel(str(tmp_path / "model")).forward(x), model.forward(x), rtol=1e-6
    )


def test_jtensors_are_inputs_and_weights_as_arrays_are() -> None:
    one, other = Linear(3, 2)(), Linear(3, 3)()
    model = Model([one, other], JoinTable(1, 1)([one, other]))
    arrays = [some(4, 3), some(4, 3)]
    tensors = [JTensor.from_ndarray(part) for part in arrays]
    expected = model.forward(arrays)
    np.testing.assert_array_equal(model.forward(tensors), expected)
    for found in (model.predict_local(tensors, batch_size=3), model.predict(features=tensors)):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_array_equal(model.predict_class(tensors), expected.argmax(1) + 1)
    layer = Linear(3, 2)
    layer.set_weights([JTensor.from_ndarray(np.ones((2, 3))), JTensor.from_ndarray(np.zeros(2))])
    np.testing.assert_allclose(
        layer.predict(tensors[0]), arrays[0].sum(1, keepdims=True) * np.ones(2), rtol=1e-5
    )
    with pytest.raises(ConfigError, match="may not fit float32; received 16777217"):
        JTensor.from_ndarray(np.array([2**24 + 1]))


def test_weights_of_another_shape_are_taken_in_their_order_with_a_warning() -> None:
    layer = Linear(4, 2)
    with pytest.warns(UserWarning, match="must have the shape .2, 4.; received .4, 2.. Its numbers are used"):
        layer.set_weights([np.arange(8).reshape(4, 2), np.zeros(2)])
    np.testing.assert_array_equal(layer.get_weights()[0], np.arange(8).reshape(2, 4))
    with pytest.raises(ConfigError, match="array 0 must have the shape"):
        layer.set_weights([np.ones((4, 3)), np.zeros(2)])


def test_experts_of_a_mixture_are_along_the_axis_that_is_named() -> None:
    gates, experts = some(2, 3), some(2, 5, 3)
    np.testing.assert_allclose(
        MixtureTable(3).forward([gates, experts]), np.einsum("be,bne->bn", gates, experts), rtol=1e-5
    )
