"""Pipelines need no unwrapping here: `PipelineModel.load` returns working stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.ml.pipeline import Pipeline, PipelineModel

from kindler.ml.persistence import SavedStage

__all__ = ["PysparkObjId", "PysparkPipelineWrapper", "PysparkReaderWriter"]


class PysparkObjId:
    """The mark of stages that SparkFlow itself has saved, which are pickles in disguise."""

    @staticmethod
    def _getPyObjId() -> str:
        return "4c1740b00d3c4ff6806a1402321572cb"


class PysparkPipelineWrapper:
    """For programs that unwrap what they have loaded."""

    @staticmethod
    def unwrap(pipeline: Any) -> Any:
        if not isinstance(pipeline, Pipeline | PipelineModel):
            raise TypeError(f"expected a Pipeline or PipelineModel, received {type(pipeline).__qualname__}.")
        for stage in pipeline.getStages() if isinstance(pipeline, Pipeline) else pipeline.stages:
            if isinstance(stage, Pipeline | PipelineModel):
                PysparkPipelineWrapper.unwrap(stage)
            else:
                _refuse_disguised(stage)
        return pipeline


class PysparkReaderWriter(SavedStage):
    """For stages of your own: saves and loads their params, which must be values of JSON."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "_public" not in vars(cls):
            cls._public = f"{cls.__module__}.{cls.__qualname__}"

    def _write_files(self, folder: Path) -> dict[str, Any]:
        return {}

    @classmethod
    def _from_files(cls, folder: Path, facts: dict[str, Any]) -> Any:
        return cls()


def _refuse_disguised(stage: Any) -> None:
    """SparkFlow kept stages as pickles among the stop words of a StopWordsRemover: loading one runs code."""
    words = stage.getStopWords() if type(stage).__name__ == "StopWordsRemover" else ()
    if PysparkObjId._getPyObjId() in words:
        raise TypeError(
            "this pipeline was saved by SparkFlow, as a pickle that runs code when it is read; train it and"
            " save it again."
        )
