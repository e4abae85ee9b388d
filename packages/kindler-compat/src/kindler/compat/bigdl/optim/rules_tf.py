"""BigDL's optimizers as optimizers of TensorFlow 1, for graphs.

The number of steps, from which the learning rate follows, is a variable of the graph like the optimizer's
slots, so that it is kept in checkpoints with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow.compat.v1 as tf

from kindler.compat.bigdl.optim.methods import LBFGS, OptimMethod

__all__ = ["RuleOptimizer", "graph_optimizer"]


def graph_optimizer(method: OptimMethod) -> Any:
    return _LbfgsOptimizer(method) if isinstance(method, LBFGS) else RuleOptimizer(method)


class RuleOptimizer(tf.train.Optimizer):  # type: ignore[misc]
    """Applies the rule of an `OptimMethod` to every variable."""

    def __init__(self, method: OptimMethod) -> None:
        super().__init__(use_locking=False, name=type(method).__name__)
        self.method = method
        self.iterations: Any = None
        self._lr_t: Any = None

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: str | None = None
    ) -> Any:
        """One step on all variables that have a gradient."""
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars if gradient is not None]
        if not pairs:
            raise ValueError("no gradients: the loss does not depend on any of the variables.")
        with tf.name_scope(name or self._name):
            step = self._begin()
            # All slots are read before any variable changes.
            changes = self._changes([(tf.convert_to_tensor(g), v) for g, v in pairs], step)
            with tf.control_dependencies([value for _, value in changes]):
                assigned = [tf.assign(variable, value).op for variable, value in changes]
            with tf.control_dependencies(assigned):
                counted = [tf.assign_add(self.iterations, 1).op]
                if global_step is not None:
                    counted.append(tf.assign_add(global_step, tf.ones_like(global_step)).op)
            return tf.group(*assigned, *counted)

    def variables(self) -> list[Any]:
        return [*super().variables(), *([] if self.iterations is None else [self.iterations])]

    def _begin(self) -> Any:
        """Create the counter; returns the number of the step, counted from 1, as a float."""
        if self.iterations is None:
            self.iterations = tf.Variable(0, trainable=False, dtype=tf.int64, name="iterations")
        made = tf.cast(self.iterations, tf.float32)
        method = self.method
        rate = method.schedule.rate(tf, method.learningrate, method.learningrate_decay, made)
        self._lr_t = tf.convert_to_tensor(rate, dtype=tf.float32, name="learning_rate")
        return made + 1.0

    def _changes(self, pairs: list[tuple[Any, Any]], step: Any) -> list[tuple[Any, Any]]:
        changes = []
        for gradient, variable in pairs:
            slots = {
                name: self._get_or_make_slot_with_initializer(
                    variable,
                    tf.constant_initializer(initial),
                    variable.shape,
                    variable.dtype.base_dtype,
                    name,
                    self._name,
                )
                for name, initial in self.method.slots.items()
            }
            before = {name: tf.convert_to_tensor(slot) for name, slot in slots.items()}
            lr = tf.cast(self._lr_t, gradient.dtype)
            value = tf.convert_to_tensor(variable)
            new, after = self.method.new_value(tf, value, gradient, before, lr, step)
            changes += [(variable, new), *((slots[name], after[name]) for name in after)]
        return changes


class _LbfgsOptimizer(RuleOptimizer):
    """L-BFGS over all variables as one vector."""

    method: LBFGS

    def __init__(self, method: LBFGS) -> None:
        super().__init__(method)
        self._kept: dict[str, Any] = {}

    def variables(self) -> list[Any]:
        return [*super().variables(), *self._kept.values()]

    def _changes(self, pairs: list[tuple[Any, Any]], step: Any) -> list[tuple[Any, Any]]:
        method = self.method
        flat = tf.concat([tf.reshape(gradient, [-1]) for gradient, _ in pairs], 0)
        size, depth = int(flat.shape[0]), method.ncorrection
        shapes = {"gradient": [size], "move": [size], "moves": [depth, size], "changes": [depth, size]}
        kept = self._kept = self._kept or {
            **{
                name: tf.Variable(tf.zeros(shape), trainable=False, name=name)
                for name, shape in {**shapes, "inverse": [depth]}.items()
            },
            "scale": tf.Variable(1.0, trainable=False, name="scale"),
        }
        y, s = flat - kept["gradient"], tf.convert_to_tensor(kept["move"])
        ys = tf.reduce_sum(y * s)
        useful = tf.logical_and(step > 1.0, ys > 1e-10)
        moves, changes, inverse, scale = (
            tf.convert_to_tensor(kept[n]) for n in ("moves", "changes", "inverse", "scale")
        )
        moves = tf.where(useful, tf.concat([moves[1:], s[None]], 0), moves)
        changes = tf.where(useful, tf.concat([changes[1:], y[None]], 0), changes)
        inverse = tf.where(useful, tf.concat([inverse[1:], 1.0 / ys[None]], 0), inverse)
        scale = tf.where(useful, ys / tf.reduce_sum(y * y), scale)
        direction = -_inverse_hessian(flat, moves, changes, inverse, scale, depth)
        length = tf.reduce_sum(tf.abs(flat))
        first = tf.minimum(1.0, 1.0 / length) * self._lr_t
        taken = tf.where(step <= 1.0, first, self._lr_t) * tf.cast(length > method.tolfun, tf.float32)
        move = taken * direction
        new = tf.split(move, [int(g.shape.num_elements()) for g, _ in pairs])
        values = [
            (variable, tf.convert_to_tensor(variable) + tf.reshape(part, variable.shape))
            for (_, variable), part in zip(pairs, new, strict=True)
        ]
        return [*values, *zip(kept.values(), (flat, move, moves, changes, inverse, scale), strict=True)]


def _inverse_hessian(q: Any, moves: Any, changes: Any, inverse: Any, scale: Any, depth: int) -> Any:
    """The two-loop recursion; steps that are not remembered yet have an inverse of 0 and change nothing."""

    def backward(number: Any, q: Any, factors: Any) -> Any:
        place = depth - 1 - number
        factor = inverse[place] * tf.reduce_sum(moves[place] * q)
        return number + 1, q - factor * changes[place], factors.write(place, factor)

    def forward(place: Any, q: Any) -> Any:
        back = inverse[place] * tf.reduce_sum(changes[place] * q)
        return place + 1, q + moves[place] * (factors[place] - back)

    array = tf.TensorArray(tf.float32, size=depth)
    _, q, array = tf.while_loop(lambda n, *_: n < depth, backward, (0, q, array))
    factors = array.stack()
    _, q = tf.while_loop(lambda n, _: n < depth, forward, (0, q * scale))
    return q
