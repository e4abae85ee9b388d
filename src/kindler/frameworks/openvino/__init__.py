"""OpenVINO: models that only predict."""
