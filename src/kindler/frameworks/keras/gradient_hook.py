"""Between Keras's own `fit` and `sync/`: optimizers get gradients already averaged over all ranks' rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from kindler.collective import Array, Collective, gathering
from kindler.errors import ConfigError
from kindler.frameworks.row_gather import RowGather, refuse_to_gather

Means = Callable[[Sequence[Array], float], list[Array]]


class Rows:
    """`now` is the step's row count or a graph symbol; `turn` chains its exchanges to keep their order."""

    now: Any = 0
    turn: Any = None


class HostCode:
    """Code called from within a backend, which would re-raise its exceptions without type or fields."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            self._error = exc
            raise

    @contextmanager
    def unwrapped(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            error, self._error = self._error, None  # what fails later has a reason of its own
            if error is None:
                raise
            raise error from None


class Exchange(HostCode):
    def __init__(self, means: Means) -> None:
        super().__init__()
        self._means = means

    def __call__(self, arrays: Sequence[Array], weight: float) -> list[Array]:
        with self.kept():
            return self._means(arrays, weight)


def install(
    model: Any, collective: Collective, backend: str, *, may_idle: bool, gathers: bool = True
) -> Exchange:
    """Make every optimizer of the model apply the mean over the rows of all ranks."""
    _refuse_sums(model)
    _refuse_masks(model)
    on = importlib.import_module(f"kindler.frameworks.keras.on_{backend}")
    rows, exchange = Rows(), Exchange(collective.mean)
    _let_gather(model, on.gather(RowGather(collective), rows, exchange) if gathers else refuse_to_gather)
    _count_rows(model, on, rows, may_idle=may_idle)

    def exchanged(grads: Any) -> Any:
        return on.exchanged(list(grads), exchange, rows)

    for optimizer in optimizers(model):
        name = _applying([optimizer], backend)
        share = {"stateless_apply": _share_stateless, "apply": _share, "apply_gradients": _share_pairs}[name]
        replaced(optimizer, name, partial(share, exchanged))
    return exchange


def install_remote(model: Any, learn: Means, backend: str, *, may_idle: bool) -> Exchange:
    """Let `learn` move the model's weights instead of its optimizer."""
    on = importlib.import_module(f"kindler.frameworks.keras.on_{backend}")
    rows, exchange = Rows(), Exchange(learn)
    _let_gather(model, refuse_to_gather)
    _count_rows(model, on, rows, may_idle=may_idle)
    name = _applying([model.optimizer], backend)
    send = on.send_gradients if name == "stateless_apply" else partial(_sent, on, pairs=name != "apply")
    replaced(model.optimizer, name, lambda _: send(model, exchange, rows))
    return exchange


def _applying(owners: Sequence[Any], backend: str) -> str:
    if backend == "jax":
        return "stateless_apply"
    return "apply" if all(hasattr(owner, "apply") for owner in owners) else "apply_gradients"  # Keras 2


def _share(exchanged: Any, apply: Any) -> Any:
    def shared(grads: Any, trainable_variables: Any = None) -> Any:
        return apply(exchanged(grads), trainable_variables)

    return shared


def _share_stateless(exchanged: Any, apply: Any) -> Any:
    def shared(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        return apply(optimizer_variables, exchanged(grads), trainable_variables)

    return shared


def _share_pairs(exchanged: Any, apply: Any) -> Any:
    def shared(grads_and_vars: Any, *args: Any, **options: Any) -> Any:
        pairs = list(grads_and_vars)
        grads = exchanged([grad for grad, _ in pairs])
        return apply(list(zip(grads, [v for _, v in pairs], strict=True)), *args, **options)

    return shared


def _sent(on: Any, model: Any, learn: Means, rows: Rows, *, pairs: bool) -> Any:
    """Moves the trained variables instead of the optimizer, which only counts steps."""

    def assign(given: Any, trainable_variables: Any = None, *args: Any, **options: Any) -> None:
        trained = model.trainable_variables
        both = list(given) if pairs else list(zip(given, trainable_variables or trained, strict=True))
        found = {id(variable): grad for grad, variable in both}
        whole = [on.dense(found.get(id(v)), v) for v in trained]
        for variable, value in zip(trained, on.exchanged(whole, learn, rows), strict=True):
            variable.assign(value)
        model.optimizer.iterations.assign_add(1)

    return assign


def noting(
    owners: Sequence[Any], backend: str, note: Callable[[Sequence[Any]], None]
) -> AbstractContextManager[None]:
    name = _applying(owners, backend)

    def stateless(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        note(list(grads))
        return trainable_variables, optimizer_variables

    def noted(given: Any, *args: Any, **options: Any) -> None:
        note([grad for grad, _ in given] if name == "apply_gradients" else list(given))

    return instead(owners, name, stateless if name == "stateless_apply" else noted)


def _let_gather(model: Any, gather: Callable[[Any], Any]) -> None:
    def within(step: Any) -> Any:
        def train_step(*args: Any) -> Any:
            with gathering(gather):
                return step(*args)

        return train_step

    replaced(model, "train_step", within)


def _count_rows(model: Any, on: Any, rows: Rows, *, may_idle: bool) -> None:
    if may_idle:
        replaced(model, "train_step", lambda step: on.idle_step(step, rows, model))
    else:
        replaced(model, "train_step", lambda step: _weighing(step, on, rows))


def _weighing(step: Any, on: Any, rows: Rows) -> Any:
    def train_step(*args: Any) -> Any:
        rows.now, rows.turn = on.row_count(args[-1]), None
        return step(*args)

    return train_step


def refuse_own_step(model: Any, keras: Any) -> None:
    if type(model).train_step is not keras.Model.train_step:
        raise ConfigError(
            f"{type(model).__name__} has a train_step of its own, so only Keras knows its gradients.\n"
            "Hint: use sync='allreduce'."
        )


def alone(step: Any) -> Any:
    """Pass inputs without targets bare rather than in a tuple, as Keras's `fit(x)` does."""

    def unwrapped(*args: Any) -> Any:
        *state, data = args
        parts = [part for part in data if part is not None] if isinstance(data, tuple | list) else [data]
        single = len(parts) == 1 and not isinstance(parts[0], tuple | list)
        return step(*state, parts[0] if single else data)

    return unwrapped


def scaled_loss(model: Any, loss: Any) -> Any:
    """For a mixed-precision optimizer, which will unscale gradients."""
    scale = getattr(model.optimizer, "scale_loss", None)
    return loss if scale is None else scale(loss)


def count(model: Any, loss: Any, rows: int, *judged: Any) -> None:
    """As Keras's own train step does; `judged`: inputs, targets, outputs, weights."""
    tracker = getattr(model, "_loss_tracker", None)  # Keras 2 has counted the loss already
    if tracker is not None:
        tracker.update_state(loss, sample_weight=rows)
    model.compute_metrics(*judged)


def optimizers(model: Any) -> list[Any]:
    """The compiled optimizer, and any others the model holds for its own train_step."""
    own = getattr(model, "optimizer", None)
    held = [value for value in vars(model).values() if _is_optimizer(value)]
    return list({id(o): o for o in [*([own] if own is not None else []), *held]}.values())


def replaced(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    object.__setattr__(owner, name, change(getattr(owner, name)))


@contextmanager
def instead(owners: Sequence[Any], name: str, function: Callable[..., Any]) -> Iterator[None]:
    before = [vars(owner).get(name) for owner in owners]
    for owner in owners:
        object.__setattr__(owner, name, function)
    try:
        yield
    finally:
        for owner, own in zip(owners, before, strict=True):
            object.__delattr__(owner, name) if own is None else object.__setattr__(owner, name, own)


def _is_optimizer(value: Any) -> bool:
    return hasattr(value, "learning_rate") and (hasattr(value, "apply") or hasattr(value, "apply_gradients"))


def _refuse_sums(model: Any) -> None:
    for loss in losses_of(getattr(model, "loss", None)):
        if getattr(loss, "reduction", None) in ("sum", "mean_with_sample_weight"):
            raise ConfigError(
                f"the loss {getattr(loss, 'name', loss)!r} has reduction={loss.reduction!r}; several workers"
                " need a mean over rows.\nHint: use reduction='sum_over_batch_size', or workers=1."
            )


def _refuse_masks(model: Any) -> None:
    """A masked loss is a mean over the steps that count, whose number differs between workers."""
    hint = (
        "Hint: use workers=1, or a loss that is a mean over the steps of each row, on outputs without a mask."
    )
    for number, output in enumerate(getattr(model, "outputs", None) or ()):
        if getattr(output, "_keras_mask", None) is not None:
            raise ConfigError(
                f"output {number} of the model carries a mask, so its loss is a mean over the steps that are"
                f" not masked; several workers take means over rows.\n{hint}"
            )
    for loss in losses_of(getattr(model, "loss", None)):
        if getattr(loss, "ignore_class", None) is not None:
            raise ConfigError(
                f"the loss {getattr(loss, 'name', loss)!r} has ignore_class={loss.ignore_class}, so it is a"
                f" mean over the labels that count; several workers take means over rows.\n{hint}"
            )


def losses_of(given: Any) -> list[Any]:
    if isinstance(given, dict):
        return [loss for part in given.values() for loss in losses_of(part)]
    if isinstance(given, list | tuple):
        return [loss for part in given for loss in losses_of(part)]
    return [given]
