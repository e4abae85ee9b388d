"""Models of other frameworks as OpenVINO's: converted, named, free in their rows, and written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kindler.collective import Array
from kindler.errors import ConfigError
from kindler.frameworks.openvino.graph import cause, openvino


def convert(
    model: Any,
    path: str,
    *,
    features: Sequence[Array],
    names: Sequence[str] = (),
    outputs: Sequence[str] = (),
    example: Any = None,
) -> None:
    """Convert a model and write its .xml and .bin files.

    Args:
        model: What `openvino.convert_model` takes.
        path: The .xml file.
        features: A few rows of each input, for their shapes; the number of rows stays free.
        names: The names of the inputs; empty leaves them as they are.
        outputs: The same of the outputs.
        example: Arguments that the model is traced with, where that is how it is converted.

    Raises:
        ConfigError: OpenVINO cannot convert it.
    """
    try:
        converted = openvino.convert_model(model, **({} if example is None else {"example_input": example}))
        if len(converted.inputs) != len(features):
            raise ConfigError(
                f"OpenVINO finds {len(converted.inputs)} inputs in the model, which takes {len(features)}.\n"
                "Hint: every input must have a part in the outputs."
            )
        shapes = [[-1, *array.shape[1:]] for array in features]
        converted.reshape({i: openvino.PartialShape(shape) for i, shape in enumerate(shapes)})
    except ConfigError:
        raise
    except Exception as exc:  # its errors, and those of the framework that it traces
        raise ConfigError(f"OpenVINO cannot convert this model: {cause(exc)}") from exc
    for ports, wanted in ((converted.inputs, names), (converted.outputs, outputs)):
        if len(ports) == len(wanted):
            for port, name in zip(ports, wanted, strict=True):
                port.get_tensor().set_names({name})
    openvino.save_model(converted, path, compress_to_fp16=False)
