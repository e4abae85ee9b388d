"""BigDL's optimizers: what they are called with, and how they change a parameter.

A method is a description. `rules_tf.py` turns it into an optimizer of TensorFlow for graphs, and
`keras_optimizer` into one of Keras. Its counters are BigDL's: they go on from one run to the next, and
triggers such as `MaxEpoch` compare with them.
"""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from kindler.compat.bigdl.arguments import DOUBLEMAX, Configured, arguments, classes
from kindler.compat.bigdl.optim import schedules
from kindler.compat.bigdl.optim.schedules import Default, Schedule
from kindler.errors import ConfigError
from kindler.files import folder_at, split

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...  # the classes of the table


_FORMAT = "kindler.bigdl.optim.1"


class OptimMethod(Configured, takes=arguments("learningrate, learningrate_decay=0.0, schedule=None")):
    """Base class of BigDL's optimizers.

    Attributes:
        learningrate: The learning rate before any schedule.
        learningrate_decay: The decay of `Default`.
        schedule: The schedule.
        state: `epoch`, counted from 1, and `neval`, the number of the next step, counted from 1.
        slots: The names of what is kept beside each parameter, and their initial values.
        kept: What was kept beside each trained parameter when `Optimizer` used it last, by name.
    """

    slots: dict[str, float] = {}  # noqa: RUF012 - each class has its own

    def setup(self) -> None:
        options = vars(self)
        schedule = options.get("schedule")
        if schedule is not None and not isinstance(schedule, Schedule):
            raise ConfigError(
                f"{type(self).__name__}: the schedule must be one of bigdl.optim.optimizer, such as"
                f" Step(100, 0.1); received {schedule!r}."
            )
        self.learningrate = float(options.get("learningrate", 1.0))
        self.learningrate_decay = float(options.get("learningrate_decay", 0.0))
        if not self.learningrate >= 0:
            raise ConfigError(
                f"{type(self).__name__}: learningrate must be 0 or more; received {self.learningrate!r}."
            )
        self.schedule: Schedule = schedule or Default()
        self.state: dict[str, int] = {"epoch": 1, "neval": 1}
        self.kept: list[dict[str, np.ndarray[Any, Any]]] = []

    @property
    def value(self) -> OptimMethod:
        """The method itself: there is no other object behind it."""
        return self

    def learningRate(self) -> float:
        return self.learningrate

    def save(self, path: str | PathLike[str], overWrite: bool = False) -> None:
        """Write the method to a file: its arguments, its counters, and what it keeps beside parameters."""
        folder, name = split(path)
        if not overWrite and name in folder_at(folder).names():
            raise ConfigError(f"{path} exists.\nHint: pass overWrite=True to replace it.")
        arrays: dict[str, Any] = {
            f"{place}/{slot}": value for place, own in enumerate(self.kept) for slot, value in own.items()
        }
        facts = {"format": _FORMAT, "parameters": len(self.kept), "method": _described(self)}
        buffer = io.BytesIO()
        np.savez(buffer, facts=np.array(json.dumps(facts)), **arrays)
        folder_at(folder).write(name, [buffer.getbuffer()])

    @staticmethod
    def load(path: str | PathLike[str], bigdl_type: str = "float") -> Any:
        """Read what `save` wrote, without running code of the file."""
        folder, name = split(path)
        try:
            with np.load(io.BytesIO(folder_at(folder).read(name)), allow_pickle=False) as arrays:
                facts = json.loads(str(arrays["facts"]))
                method = _built(facts["method"])
                method.kept = [{} for _ in range(facts["parameters"])]
                for key in set(arrays.files) - {"facts"}:
                    place, _, slot = key.partition("/")
                    method.kept[int(place)][slot] = arrays[key]
        except (ValueError, KeyError, IndexError, TypeError, zipfile.BadZipFile, EOFError) as exc:
            raise ConfigError(
                f"{path} is not an optimizer that `save` of kindler.compat.bigdl wrote.\n"
                "Hint: files of BigDL itself cannot be read."
            ) from exc
        return method

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return float(self.schedule.rate(np, self.learningrate, self.learningrate_decay, np.float64(step)))

    def refuse_used(self) -> None:
        """Complain about what it keeps beside parameters of layers, which other models do not have."""
        if self.kept:
            raise ConfigError(
                f"{self!r} was used by Optimizer for a model of layers, and would start over here.\n"
                "Hint: create a new one."
            )

    def new_value(self, tf: Any, value: Any, gradient: Any, slots: dict[str, Any], lr: Any, step: Any) -> Any:
        """A parameter's new value, and those of its slots by name, in operations that `tf` has.

        `slots` is what is kept beside it, by name; `lr` is the rate of this step, `step` its number, counted
        from 1, as a float.
        """
        raise NotImplementedError

    # The name of the Keras optimizer that makes the same steps, and its arguments; None where there is none.
    keras_options: Any = None

    def keras_optimizer(self, keras: Any) -> Any:
        """An optimizer of this Keras that makes the same steps."""
        self.refuse_used()
        if type(self.schedule) is not Default or self.learningrate_decay:
            raise ConfigError(
                f"{self!r} has a learning-rate schedule, which is applied in TensorFlow 1 graphs only.\n"
                "Hint: compile the model with a Keras schedule, or build it after"
                " tf.disable_v2_behavior()."
            )
        found = None if self.keras_options is None else self.keras_options()
        if found is None:
            raise ConfigError(
                f"{self!r} has no equivalent among Keras's optimizers.\n"
                "Hint: compile the model with a Keras optimizer, or build it in a TensorFlow 1 graph."
            )
        return getattr(keras.optimizers, found[0])(**found[1])


class SGD(
    OptimMethod,
    takes=arguments(
        "learningrate=1e-3, learningrate_decay=0.0, weightdecay=0.0, momentum=0.0, dampening=DOUBLEMAX",
        "nesterov=False, leaningrate_schedule=None, learningrates=None, weightdecays=None",
        "bigdl_type='float', learningrate_schedule=None",
    ),
):
    """Stochastic gradient descent, with momentum, weight decay and a schedule.

    As in BigDL, `dampening` is the momentum unless it is given, so that the velocity is a moving mean.
    """

    def setup(self) -> None:
        schedules = [vars(self).pop(name) for name in ("leaningrate_schedule", "learningrate_schedule")]
        self.schedule = schedules[0] or schedules[1]
        super().setup()
        if self.dampening == DOUBLEMAX:
            vars(self)["dampening"] = self._momentum
        if self._nesterov and (self._momentum <= 0 or self.dampening != 0):
            raise ConfigError("SGD: nesterov=True requires a momentum above 0 and dampening=0.")
        if self.learningrates is not None or self.weightdecays is not None:
            raise ConfigError(
                "SGD: learningrates and weightdecays per parameter are not supported.\n"
                "Hint: pass a dict of optimizers by the prefix of variable names to TFOptimizer.from_loss."
            )

    @property
    def slots(self) -> dict[str, float]:  # type: ignore[override]
        return {"velocity": 0.0} if self._momentum else {}

    def new_value(self, tf: Any, value: Any, gradient: Any, slots: dict[str, Any], lr: Any, step: Any) -> Any:
        if self.weightdecay:
            gradient = gradient + self.weightdecay * value
        if not self._momentum:
            return value - lr * gradient, {}
        one = tf.ones_like(step)
        share = tf.where(step <= 1.0, one, one * (1.0 - self.dampening))
        velocity = self._momentum * slots["velocity"] + tf.cast(share, gradient.dtype) * gradient
        move = gradient + self._momentum * velocity if self._nesterov else velocity
        return value - lr * move, {"velocity": velocity}

    def keras_options(self) -> tuple[str, dict[str, Any]] | None:
        options = {"momentum": self._momentum, "nesterov": self._nesterov}
        if self.weightdecay or (self._momentum and self.dampening):
            return None
        return "SGD", {"learning_rate": self.learningrate, **options}

    def momentum(self) -> float:
        return float(self._momentum)

    def nesterov(self) -> bool:
        return bool(self._nesterov)


def _adam(o: Any, tf: Any, value: Any, gradient: Any, slots: dict[str, Any], lr: Any, step: Any) -> Any:
    m = o.beta1 * slots["m"] + (1 - o.beta1) * gradient
    v = o.beta2 * slots["v"] + (1 - o.beta2) * gradient * gradient
    steps = tf.cast(step, tf.float64)  # 1 - 0.999 has few digits in float32
    unbiased = tf.cast(tf.sqrt(1.0 - o.beta2**steps) / (1.0 - o.beta1**steps), gradient.dtype)
    return value - lr * unbiased * m / (tf.sqrt(v) + o.epsilon), {"m": m, "v": v}


def _adagrad(o: Any, tf: Any, value: Any, gradient: Any, slots: dict[str, Any], lr: Any, step: Any) -> Any:
    if o.weightdecay:
        gradient = gradient + o.weightdecay * value
    squares = slots["sum"] + gradient * gradient
    return value - lr * gradient / (tf.sqrt(squares) + 1e-10), {"sum": squares}


def _adadelta(o: Any, tf: Any, value: Any, gradient: Any, slots: dict[str, Any], lr: Any, step: Any) -> Any:
    rho, epsilon = o.decayrate, o.epsilon
    squares = rho * slots["squares"] + (1 - rho) * gradient * gradient
    move = gradient * tf.sqrt(slots["moves"] + epsilon) / tf.sqrt(squares + epsilon)
    moves = rho * slots["moves"] + (1 - rho) * move * move
    return value - lr * move, {"squares": squares, "moves": moves}


def _adamax(o: Any, tf: Any, value: Any, gradient: Any, slots: dict[str, Any], lr: Any, step: Any) -> Any:
    m = o.beta1 * slots["m"] + (1 - o.beta1) * gradient
    u = tf.maximum(o.beta2 * slots["u"], tf.abs(gradient) + o.epsilon)
    unbiased = tf.cast(1.0 - o.beta1 ** tf.cast(step, tf.float64), gradient.dtype)
    return value - lr / unbiased * tf.math.divide_no_nan(m, u), {"m": m, "u": u}


def _rmsprop(o: Any, tf: Any, value: Any, gradient: Any, slots: dict[str, Any], lr: Any, step: Any) -> Any:
    squares = o.decayrate * slots["squares"] + (1 - o.decayrate) * gradient * gradient
    return value - lr * gradient / (tf.sqrt(squares) + o.epsilon), {"squares": squares}


_ADAM_TAKES = "learningrate=1e-3, learningrate_decay=0.0, beta1=0.9, beta2=0.999, epsilon=1e-8"
_ADAM = (
    _adam,
    {"m": 0.0, "v": 0.0},
    lambda o: (
        "Adam",
        {
            "learning_rate": o.learningrate,
            "beta_1": o.beta1,
            "beta_2": o.beta2,
            "epsilon": o.epsilon,
        },
    ),
)
_TABLE = {
    f"Adam({_ADAM_TAKES})": _ADAM,
    f"ParallelAdam({_ADAM_TAKES}, parallel_num=-1)": _ADAM,  # the number of threads has no effect
    "Adagrad(learningrate=1e-3, learningrate_decay=0.0, weightdecay=0.0)": (_adagrad, {"sum": 0.0}, None),
    # It has no learning rate.
    "Adadelta(decayrate=0.9, epsilon=1e-10)": (
        _adadelta,
        {"squares": 0.0, "moves": 0.0},
        lambda o: ("Adadelta", {"learning_rate": 1.0, "rho": o.decayrate, "epsilon": o.epsilon}),
    ),
    "Adamax(learningrate=0.002, beta1=0.9, beta2=0.999, epsilon=1e-38)": (
        _adamax,
        {"m": 0.0, "u": 0.0},
        None,
    ),
    # Its means start from 0.
    "RMSprop(learningrate=1e-2, learningrate_decay=0.0, decayrate=0.99, epsilon=1e-8)": (
        _rmsprop,
        {"squares": 0.0},
        None,
    ),
}
_ROWS = classes(__name__, OptimMethod, _TABLE, "new_value", "slots", "keras_options")
globals().update(_ROWS)


class Ftrl(
    OptimMethod,
    takes=arguments(
        "learningrate=1e-3, learningrate_power=-0.5, initial_accumulator_value=0.1",
        "l1_regularization_strength=0.0, l2_regularization_strength=0.0",
        "l2_shrinkage_regularization_strength=0.0",
    ),
):
    """Follow the regularized leader."""

    def setup(self) -> None:
        super().setup()
        if not self.learningrate:
            raise ConfigError("Ftrl divides by its learningrate, which must be above 0; received 0.")
        self.power, self.initial = self.learningrate_power, self.initial_accumulator_value
        if self.power > 0:
            raise ConfigError(f"Ftrl: learningrate_power must not be above 0; received {self.power!r}.")
        self.l1, self.l2 = self.l1_regularization_strength, self.l2_regularization_strength
        self.shrinkage = self.l2_shrinkage_regularization_strength

    @property
    def slots(self) -> dict[str, float]:  # type: ignore[override]
        return {"accumulator": self.initial, "linear": 0.0}

    def new_value(self, tf: Any, value: Any, gradient: Any, slots: dict[str, Any], lr: Any, step: Any) -> Any:
        before = slots["accumulator"]
        after = before + gradient * gradient
        shrunk = gradient + 2 * self.shrinkage * value
        change = after**-self.power - before**-self.power
        linear = slots["linear"] + shrunk - change / lr * value
        curvature = after**-self.power / lr + 2 * self.l2
        moved = (tf.sign(linear) * self.l1 - linear) / curvature
        new = tf.where(tf.abs(linear) > self.l1, moved, tf.zeros_like(moved))
        return new, {"accumulator": after, "linear": linear}


class LBFGS(
    OptimMethod,
    takes=arguments(
        "max_iter=20, max_eval=DOUBLEMAX, tolfun=1e-5, tolx=1e-9, ncorrection=100, learningrate=1.0",
        "verbose=False, linesearch=None, linesearch_options=None",
    ),
):
    """L-BFGS with steps of fixed size: one gradient per step, over all parameters together.

    `ncorrection` earlier steps are remembered; where the gradient's absolute sum is not above `tolfun`,
    nothing moves. `max_iter`, `max_eval` and `tolx` have no effect, with a warning.
    """

    def setup(self) -> None:
        if self.linesearch or self.linesearch_options:
            raise ConfigError("LBFGS: linesearch and linesearch_options must be None.")
        super().setup()
        vars(self)["ncorrection"] = int(self.ncorrection)
        if (self.max_iter, self.max_eval, self.tolx) != (20, DOUBLEMAX, 1e-9):
            warnings.warn(
                "LBFGS: max_iter, max_eval and tolx have no effect: a step evaluates the model once.",
                stacklevel=3,
            )


def _described(value: Any) -> Any:
    """Names of classes and their attributes, for JSON."""
    if isinstance(value, list | tuple):
        return [_described(part) for part in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str | dict):
        return value
    kind = type(value).__name__
    if _CLASSES.get(kind) is not type(value):
        raise ConfigError(
            f"a {kind} cannot be written: the file can only hold classes of bigdl.optim.optimizer."
        )
    fields = {name: _described(part) for name, part in vars(value).items() if name != "kept"}
    return {"class": kind, "fields": fields}


def _built(value: Any) -> Any:
    """What `_described` described; nothing but `_CLASSES` is ever made of a file."""
    if isinstance(value, list):
        return [_built(part) for part in value]
    if not isinstance(value, dict) or "class" not in value:
        return value
    kind: Any = _CLASSES[value["class"]]
    built = kind.__new__(kind)
    vars(built).update({name: _built(part) for name, part in value["fields"].items()})
    return built


__all__ = ["LBFGS", "SGD", "Ftrl", "OptimMethod", *_ROWS]  # noqa: PLE0604 - names
_CLASSES: dict[str, type[Any]] = {
    **{name: globals()[name] for name in __all__},
    **{name: getattr(schedules, name) for name in schedules.__all__},
}
