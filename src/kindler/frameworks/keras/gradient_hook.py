"""Between Keras's own `fit` and `sync/`: optimizers get gradients already averaged over all ranks' rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from kindler.collective import Array, Collective, gathering
from kindler.errors import ConfigError
from kindler.frameworks.keras import backends
from kindler.frameworks.row_gather import RowGather, refuse_to_gather

Means = Callable[[Sequence[Array], float], list[Array]]


class Rows:
    """`now` is the step's row count or a graph symbol; `turn` chains its exchanges to keep their order."""

    now: Any = 0
    turn: Any = None


class HostCode:
    """A function called from within a backend, which would re-raise its exceptions without type or fields."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._error: Exception | None = None

    def __call__(self, *args: Any) -> Any:
        with self.kept():
            return self._function(*args)

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


class Current:
    """The collective in use. Compiled steps keep this one when a worker was replaced."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collective, name)


def share_steps(
    model: Any, collective: Any, exchange: HostCode, backend: str, *, may_idle: bool, gathers: bool
) -> None:
    """Make every optimizer of the model apply what `exchange` returns, the mean over all ranks' rows."""
    _refuse_other_means(model)
    on, rows = backends.on(backend), Rows()
    gather = on.gather(RowGather(collective), rows, exchange) if gathers else refuse_to_gather
    _hook_step(model, on, rows, gather, may_idle=may_idle)

    def share(grads: list[Any], variables: Any, apply: Any, *state: Any) -> Any:
        shared = _exchanged(on, grads, exchange, rows)
        with on.after(shared):  # also what needs no gradient, such as counting steps
            return apply(shared)

    for optimizer in optimizers(model):
        object.__setattr__(optimizer, *_rerouted(optimizer, backend, share))


def send_steps(model: Any, learn: Means, backend: str, *, may_idle: bool) -> HostCode:
    """Let `learn` move the model's weights instead of its optimizer, which only counts steps."""
    on, rows, exchange = backends.on(backend), Rows(), HostCode(learn)
    _hook_step(model, on, rows, refuse_to_gather, may_idle=may_idle)
    steps = model.optimizer.iterations

    def send(grads: list[Any], variables: Any, apply: Any, *state: Any) -> Any:
        if state:
            values, counted = _exchanged(on, grads, exchange, rows), list(state[0])
            counted[[variable is steps for variable in model.optimizer.variables].index(True)] += 1
            return values, counted
        trained = model.trainable_variables
        known = {id(v): grad for grad, v in zip(grads, variables or trained, strict=True)}
        whole = [on.dense(known.get(id(v)), v) for v in trained]
        for variable, value in zip(trained, _exchanged(on, whole, exchange, rows), strict=True):
            variable.assign(value)
        steps.assign_add(1)
        return None

    object.__setattr__(model.optimizer, *_rerouted(model.optimizer, backend, send))
    return exchange


@contextmanager
def noting(model: Any, backend: str, note: Callable[[list[Any]], None]) -> Iterator[None]:
    """Note the gradients that a step gives its optimizers, which apply none."""

    def noted(grads: list[Any], variables: Any, apply: Any, *state: Any) -> Any:
        note(grads)
        return (variables, *state) if state else None

    with ExitStack() as stack:
        for optimizer in optimizers(model):
            stack.enter_context(instead(optimizer, *_rerouted(optimizer, backend, noted)))
        yield


def _rerouted(optimizer: Any, backend: str, handle: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    """The method that applies gradients, and one that calls `handle(grads, variables, apply)` instead.

    On JAX, whose steps are pure functions, `handle` also gets the optimizer's state, and returns new values.
    """
    if backend == "jax":
        apply = optimizer.stateless_apply

        def from_state(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
            def own(new: Any) -> Any:
                return apply(optimizer_variables, new, trainable_variables)

            return handle(list(grads), trainable_variables, own, optimizer_variables)

        return "stateless_apply", from_state
    if hasattr(optimizer, "apply"):
        apply = optimizer.apply

        def from_lists(grads: Any, trainable_variables: Any = None) -> Any:
            return handle(list(grads), trainable_variables, lambda new: apply(new, trainable_variables))

        return "apply", from_lists
    apply = optimizer.apply_gradients  # Keras 2

    def from_pairs(grads_and_vars: Any, *args: Any, **options: Any) -> Any:
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]

        def own(new: Any) -> Any:
            return apply(list(zip(new, variables, strict=True)), *args, **options)

        return handle([grad for grad, _ in pairs], variables, own)

    return "apply_gradients", from_pairs


def _exchanged(on: Any, grads: list[Any], means: Means, rows: Rows) -> list[Any]:
    present = [i for i, grad in enumerate(grads) if grad is not None]
    shared = on.exchange([grads[i] for i in present], means, rows) if present else []
    for i, mean in zip(present, shared, strict=True):
        grads[i] = mean
    return grads


def _hook_step(model: Any, on: Any, rows: Rows, gather: Callable[[Any], Any], *, may_idle: bool) -> None:
    step = model.train_step

    def train_step(*args: Any) -> Any:
        rows.now, rows.turn = on.row_count(args[-1]), None
        with gathering(gather):
            return on.idle_step(step, rows, model, *args) if may_idle else step(*args)

    object.__setattr__(model, "train_step", train_step)


def refuse_own_step(model: Any, keras: Any) -> None:
    if type(model).train_step is not keras.Model.train_step:
        raise ConfigError(
            f"{type(model).__name__} has its own train_step, so only Keras knows its gradients.\n"
            "Hint: use strategy='allreduce'."
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
    others = [value for value in vars(model).values() if _is_optimizer(value)]
    return list({id(o): o for o in [*([own] if own is not None else []), *others]}.values())


@contextmanager
def instead(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    before = vars(owner).get(name)
    object.__setattr__(owner, name, function)
    try:
        yield
    finally:
        object.__delattr__(owner, name) if before is None else object.__setattr__(owner, name, before)


def _is_optimizer(value: Any) -> bool:
    return hasattr(value, "learning_rate") and (hasattr(value, "apply") or hasattr(value, "apply_gradients"))


def _refuse_other_means(model: Any) -> None:
    """A masked loss is a mean over the steps that count, whose number differs between workers."""
    hint = (
        "Hint: use workers=1, or a loss that is a mean over the steps of each row, on outputs without a mask."
    )
    for number, output in enumerate(getattr(model, "outputs", None) or ()):
        if getattr(output, "_keras_mask", None) is not None:
            raise ConfigError(
                f"output {number} of the model carries a mask, so its loss is a mean over the steps that are"
                f" not masked; several workers average over rows.\n{hint}"
            )
    for loss in leaves(getattr(model, "loss", None)):
        name = getattr(loss, "name", loss)
        if getattr(loss, "reduction", None) in ("sum", "mean_with_sample_weight"):
            raise ConfigError(
                f"the loss {name!r} has reduction={loss.reduction!r}; several workers need a mean over"
                " rows.\nHint: use reduction='sum_over_batch_size', or workers=1."
            )
        if getattr(loss, "ignore_class", None) is not None:
            raise ConfigError(
                f"the loss {name!r} has ignore_class={loss.ignore_class}, so it is a mean over the labels"
                f" that count; several workers average over rows.\n{hint}"
            )


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, Mapping):
        return {name: mapped(part, change) for name, part in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(part, change) for part in tree)
    return None if tree is None else change(tree)


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for part in tree:
            yield from leaves(part)
    elif tree is not None:
        yield tree
