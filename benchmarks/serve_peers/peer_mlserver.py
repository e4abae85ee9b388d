"""A Keras model in MLServer, in an environment of its own; scikit-learn's have a runtime of MLServer's."""

from __future__ import annotations

import peer_model
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class KerasModel(MLModel):
    """Rows in, rows out."""

    async def load(self) -> bool:
        """Load the model."""
        self._call = peer_model.load(self.settings.parameters.uri)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """A batch of rows."""
        rows = self._call(NumpyCodec.decode_input(payload.inputs[0]))
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("predict", rows)])
