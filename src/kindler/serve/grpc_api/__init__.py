"""gRPC beside HTTP: the Open Inference Protocol V2 with Triton's calls, and gRPC's health checks.

Needs the extra `grpc`. The messages are in `inference.proto` and `health.proto`.
"""
