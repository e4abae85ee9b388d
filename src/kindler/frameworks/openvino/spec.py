"""An OpenVINO model as a picklable value: the bytes of its files, and how to run it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from kindler.errors import ConfigError
from kindler.files import folder_at, split
from kindler.frameworks.openvino import graph
from kindler.frameworks.state_format import is_packed, pack, unpack


@dataclass(frozen=True, kw_only=True)
class OpenvinoSpec:
    """`threads=None` leaves the number to whoever starts the process; `output_names` label predictions.

    `any_rows` takes any number of rows where the model declares one; None in files written before it.
    """

    name: str
    xml: bytes = field(repr=False)
    weights: bytes = field(repr=False)
    device: str = "CPU"
    threads: int | None = None
    properties: dict[str, Any] = field(default_factory=dict)
    output_names: tuple[str, ...] | None = None
    any_rows: bool | None = None


def make_spec(
    model_path: str | PathLike[str],
    *,
    threads: int | None = None,
    properties: Mapping[str, Any] | None = None,
    device: str = "CPU",
) -> OpenvinoSpec:
    if not isinstance(model_path, str | PathLike):
        raise ConfigError(f"model_path must be the path of a file; received {model_path!r}.")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise ConfigError(f"threads must be a whole number of at least 1, or None; received {threads!r}.")
    path = fspath(model_path)
    xml, weights = _ir_files(path) if path.lower().endswith(".xml") else _converted(path)
    return OpenvinoSpec(
        name=Path(path).name,
        xml=xml,
        weights=weights,
        device=device,
        threads=threads,
        properties=_plain(properties or {}),
    )


def dumps(spec: OpenvinoSpec) -> bytes:
    head = {name: value for name, value in asdict(spec).items() if name not in ("xml", "weights")}
    return b"".join(pack(json.dumps(head).encode(), [spec.xml, spec.weights]))


def loads(data: bytes) -> OpenvinoSpec:
    if not is_packed(data):
        raise ConfigError("these bytes are not an OpenVINO model.")
    head, (xml, weights) = unpack(data)
    fields = json.loads(head)
    names = fields.pop("output_names")
    return OpenvinoSpec(
        **fields,
        xml=bytes(xml),
        weights=bytes(weights),
        output_names=None if names is None else tuple(names),
    )


def _ir_files(path: str) -> tuple[bytes, bytes]:
    folder, name = split(path)
    files, weights = folder_at(folder), f"{name[: -len('.xml')]}.bin"
    read = []
    for each in (name, weights):
        try:
            read.append(files.read(each))
        except (FileNotFoundError, IsADirectoryError) as exc:
            missing = f"there is no file {each!r}" + (f" next to {name!r}" if each == weights else "")
            raise ConfigError(
                f"model_path={path!r}: {missing}.\n"
                "Hint: an OpenVINO model is an .xml file with its weights in a .bin file of the same name."
            ) from exc
    graph.read_ir(read[0], read[1], name)  # a file that is not a model is refused here, and not on workers
    return read[0], read[1]


def _converted(path: str) -> tuple[bytes, bytes]:
    """Other formats are converted once, here: workers get OpenVINO's own."""
    if not Path(path).exists():
        raise ConfigError(f"model_path={path!r}: nothing exists at this path.")
    return graph.written(graph.read_file(Path(path)))


def _plain(properties: Mapping[str, Any]) -> dict[str, Any]:
    wrong = [
        f"{name}={value!r}"
        for name, value in properties.items()
        if not isinstance(name, str) or not isinstance(value, str | int | float | bool)
    ]
    if wrong:
        raise ConfigError(
            f"config: {', '.join(wrong)}: OpenVINO properties are strings, numbers or booleans by name,"
            " such as {'INFERENCE_NUM_THREADS': 2}."
        )
    return dict(properties)
