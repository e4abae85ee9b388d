"""OpenVINO: models that predict on CPUs, and are trained elsewhere."""
