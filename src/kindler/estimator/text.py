"""What estimators of text models do besides `fit`, `evaluate` and `predict`."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, get_args

import pyarrow as pa

from kindler.data.column_options import ColumnOptions, Names
from kindler.errors import ConfigError
from kindler.estimator.inputs.recognise import recognise
from kindler.estimator.saving import Saving
from kindler.frameworks.caller_state import bare_interrupts, leaves_no_trace
from kindler.train.options import OnError, PredictOptions
from kindler.types import GENERATING, Sampling, ScoringData

if TYPE_CHECKING:
    from typing_extensions import Self

    from kindler.estimator.inputs.contract import Input
    from kindler.frameworks.torch.huggingface import Tokens

_Dtype = Literal["float32", "float16", "int8"]
_ENTITIES = pa.list_(
    pa.struct(
        {
            "start": pa.int64(),
            "end": pa.int64(),
            "label": pa.string(),
            "score": pa.float64(),
            "text": pa.string(),
        }
    )
)


class TextScoring(Saving):
    """The text models of `Estimator`."""

    if TYPE_CHECKING:

        def _predict(self, data: Input, options: PredictOptions) -> Any: ...

    @bare_interrupts
    def embed(
        self,
        data: ScoringData,
        text_col: str = "text",
        output_col: str = "embedding",
        output_path: str | PathLike[str] | None = None,
        *,
        normalize: bool = False,
        dtype: _Dtype = "float32",
        batch_size: int = 64,
        verbose: int = 1,
        on_error: OnError = "raise",
        max_errors: int | None = None,
        overwrite: bool = False,
    ) -> Any:
        """Add a column of vectors, one of each text, with a model of `from_huggingface(task="embedding")`.

        The vectors are those of sentence-transformers: pooled, projected and normalised as the model's folder
        says. Texts of similar length are computed together, and equal texts once.

        Args:
            data: The rows, of any kind that `predict` takes; the result is of the same kind.
            text_col: The column of text.
            output_col: The name of the new column.
            output_path: The folder to write the rows of Parquet files to.
            normalize: Whether to bring vectors to length 1 even if the model does not.
            dtype: "float32"; "float16", which Spark and Parquet hold as float32; or "int8": 127 times a
                vector of length 1, rounded.
            batch_size: Texts per call of the model.
            verbose: 0 shows no progress.
            on_error: As for `predict`; a missing text is an error of its row.
            max_errors: As for `predict`.
            overwrite: As for `predict`.
        """
        tokens = self._tokens_for("embed", "embedding")
        if dtype not in get_args(_Dtype):
            raise ConfigError(f"dtype must be one of {', '.join(get_args(_Dtype))}; received {dtype!r}.")
        options = PredictOptions(
            batch_size=batch_size,
            columns=ColumnOptions(feature_cols=text_col, allow_nan=True),
            verbose=verbose,
            output_cols=(output_col,),
            output_path=output_path,
            on_error=on_error,
            max_errors=max_errors,
            overwrite=overwrite,
            finish=tokens.embedded(dtype, normalize=normalize or dtype == "int8"),
        )
        return self._predict(recognise(data), options)

    @bare_interrupts
    def generate(
        self,
        data: ScoringData,
        prompt_col: str = "prompt",
        output_col: str = "generated",
        output_path: str | PathLike[str] | None = None,
        *,
        sampling: Sampling | None = None,
        system: str | None = None,
        details: bool = False,
        batch_size: int = 64,
        verbose: int = 1,
        on_error: OnError = "raise",
        max_errors: int | None = None,
        overwrite: bool = False,
    ) -> Any:
        """Add a column of text that a model of `from_huggingface` generates from a column of prompts.

        Prompts whose answers are done make room for the next ones at once. The answer to a prompt depends on
        the model, the prompt and `sampling` alone, up to rounding: greedy answers are those of
        `model.generate` on one prompt after another.

        Args:
            data: The rows, of any kind that `predict` takes; the result is of the same kind.
            prompt_col: The column of prompts. JSON text of a list of messages, each with "role" and
                "content", becomes a prompt by the tokenizer's chat template.
            output_col: The name of the new column.
            output_path: The folder to write the rows of Parquet files to.
            sampling: How tokens are chosen. None takes the likeliest ones, up to 128.
            system: What to tell a model that was trained on conversations before each prompt, which then is
                the message of a user.
            details: Whether to add three more columns, named after `output_col`: "_tokens"; "_reason", which
                is "stop" or, if the answer was cut, "length"; and "_logprobs", of each token.
            batch_size: Prompts that are tokenised and handed to the model at once.
            verbose: 0 shows no progress.
            on_error: As for `predict`; a missing text is an error of its row.
            max_errors: As for `predict`.
            overwrite: As for `predict`.
        """
        tokens, sampling = self._tokens_for("generate", *GENERATING), sampling or Sampling()
        added = {"": pa.string()}
        if details:
            added |= {"_tokens": pa.list_(pa.int64()), "_reason": pa.string()}
            added |= {"_logprobs": pa.list_(pa.float64())}
        options = PredictOptions(
            batch_size=batch_size,
            columns=ColumnOptions(feature_cols=prompt_col, allow_nan=True),
            verbose=verbose,
            output_cols=tuple(output_col + name for name in added),
            output_path=output_path,
            on_error=on_error,
            max_errors=max_errors,
            overwrite=overwrite,
            finish=partial(tokens.answers, stop=tuple(sampling.stop), details=details),
            types=tuple(added.values()),
        )
        asking = copy(self)
        asking._prepare = replace(
            self._prepare, collate=tokens.asking(sampling, details=details, system=system), text=True
        )
        return asking._predict(recognise(data), options)

    @leaves_no_trace
    def merge(self) -> Self:
        """Return an estimator of the plain model, with its adapters merged into its weights.

        It predicts the same up to rounding, and is saved, stored, exported and trained on like any other;
        this estimator keeps its adapters.

        Raises:
            ConfigError: The model has no adapters.
        """
        merge, spec = getattr(self._live.replica, "merged_model", None), self._model.spec
        if merge is None:
            raise ConfigError(f"merge: models of {self._model.row.name!r} have no adapters.")
        optimizer = None if hasattr(spec.optimizer, "param_groups") else spec.optimizer
        plain = replace(self._model, spec=replace(spec, model=merge(), optimizer=optimizer))
        return self._create(plain, **self._arguments())._restore_record(self._record)

    def _tokens_for(self, method: str, *tasks: str) -> Tokens:
        tokens: Any = self._prepare.collate
        task = getattr(tokens, "task", None)
        if task not in tasks:
            wanted = " or ".join(repr(name) for name in tasks)
            found = "another kind of model" if task is None else f"task={task!r}"
            raise ConfigError(
                f"{method} needs Estimator.from_huggingface(task={wanted}); this estimator has {found}."
            )
        made: Tokens = tokens
        return made

    def _labels_needed(self, label_cols: Names) -> bool | Literal["optional"]:
        if getattr(self._prepare.collate, "task", None) not in GENERATING:
            return self._model.facts.labels
        if label_cols:
            raise ConfigError(
                f"label_cols={label_cols!r}: a model that generates learns text, which is a feature column.\n"
                "Hint: feature_cols='text', or feature_cols=['question', 'answer'] to learn only the answers."
            )
        return False

    def _with_outputs_of_task(self, options: PredictOptions) -> PredictOptions:
        """The columns that a task makes of a model's outputs, instead of logits."""
        collate: Any = self._prepare.collate
        scored = getattr(collate, "scored", None)
        if scored is None or options.finish is not None or options.accelerator is not None:
            return options
        names, finish = scored(options.output_cols)
        if options.columns.features is None and self._columns.features is None:
            options = replace(options, columns=replace(options.columns, feature_cols="text"))
        types = None if collate.task != "token-classification" else (_ENTITIES,)
        return replace(options, output_cols=names, finish=finish, types=types)
