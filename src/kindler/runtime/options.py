"""The options that an untrusted task may pass to a worker.

Options reach the model's own methods and, through `Estimator`, files, folders and the settings of a Java
process. Without trust a worker accepts only those listed here, which say how to compute. Text is accepted
only where it names a column, a class of the framework or one of a few words; never where it could be a path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kindler.errors import UntrustedError

# Numbers, booleans, arrays and tables.
_NUMBERS = frozenset(
    (
        *("accumulation_steps", "batch_size", "check_input", "class_weight", "clip_norm", "clip_value"),
        *("coef_init", "copy", "epochs", "initial_epoch", "intercept_init", "lr", "max_steps", "return_cov"),
        *("return_std", "sample_weight", "seed", "shapes", "shuffle", "stack_features", "steps"),
        *("steps_per_epoch", "validation_batch_size", "validation_data", "validation_freq"),
        *("validation_split", "validation_steps", "verbose", "workers"),
    )
)
# The same, and names of columns and classes of data, which may be any text: nothing but data has them.
_COLUMNS = frozenset(
    ("allow_nan", "classes", "dtypes", "feature_cols", "label_cols", "output_cols", "sample_weight_col")
)
# The same, and names of devices and of a framework's classes.
_NAMES = frozenset(("device", "keras_backend", "loss", "metrics", "optimizer", "precision"))
_NAME = re.compile(r"[\w.:+ -]{1,200}")
_WORDS: Mapping[str, tuple[Any, ...]] = {"engine": ("auto", "local", "spark")}


def check(call: str, options: Mapping[str, Any]) -> None:
    """Reject options that are not known to be harmless.

    Raises:
        UntrustedError: One of them is not allowed.
    """
    refused = sorted(name for name, value in options.items() if not _is_harmless(name, value))
    if refused:
        shown = ", ".join(f"{name}=..." for name in refused)
        raise UntrustedError(
            what=f"the task {call}",
            reason=f"{shown} could name files or settings, which is allowed only with"
            " runtime.options(trusted=True), on this machine or on workers started with"
            " `kindler worker --trusted`",
        )


def _is_harmless(name: str, value: Any) -> bool:
    if name in _WORDS:
        return value in _WORDS[name]
    if name in _COLUMNS:
        return True
    texts = _texts(value)
    if name in _NAMES:
        return all(isinstance(text, str) and _NAME.fullmatch(text) for text in texts)
    return name in _NUMBERS and not texts


def _texts(value: Any) -> list[str | bytes]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [text for inside in value for text in _texts(inside)]
    return [value] if isinstance(value, str | bytes) else []
