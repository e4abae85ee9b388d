"""Exports a Keras model in a separate process, on a backend that can.

python -m kindler.frameworks.keras._export_main FOLDER FORM PATH
"""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle
import numpy as np

from kindler.errors import KindlerError


def main(folder: str, form: str, path: str) -> None:
    import keras

    from kindler.frameworks.keras.export import export

    # The user's own program sent it: its lambdas are as trustworthy as its functions.
    objects = cloudpickle.loads((Path(folder) / "objects").read_bytes())
    model = keras.saving.load_model(
        Path(folder) / "model.keras", custom_objects=objects, compile=False, safe_mode=False
    )
    with np.load(Path(folder) / "rows.npz", allow_pickle=False) as file:
        rows = [file[name] for name in file.files]
    model.predict_on_batch(rows[0] if len(rows) == 1 else rows)  # Keras exports what was called
    try:
        export(model, form, path, backend=keras.backend.backend(), features=rows)
    except KindlerError as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    main(*sys.argv[1:])
