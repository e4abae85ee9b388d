"""The model in LitServe, in an environment of its own: FILE PORT BATCH."""

from __future__ import annotations

import sys

import litserve
import numpy as np
import peer_model


class Api(litserve.LitAPI):
    """Rows in, rows out."""

    def setup(self, device):
        """Load the model."""
        self.call = peer_model.load(sys.argv[1])

    def decode_request(self, request):
        """A row of JSON."""
        dtype = np.float32 if sys.argv[1].endswith(".keras") else np.float64
        return np.asarray(request["input"], dtype=dtype).reshape(request["shape"])

    def predict(self, x):
        """One row, or a batch of rows."""
        return self.call(x) if int(sys.argv[3]) > 1 else self.call(x[None])[0]

    def encode_response(self, output):
        """JSON."""
        return {"output": np.asarray(output).ravel().tolist()}


if __name__ == "__main__":
    batch = int(sys.argv[3])
    told = {"max_batch_size": batch, "batch_timeout": 0.002} if batch > 1 else {}
    server = litserve.LitServer(Api(**told), accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False, log_level="warning")
