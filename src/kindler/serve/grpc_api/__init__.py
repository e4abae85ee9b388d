"""gRPC beside HTTP: the Open Inference Protocol V2 with Triton's calls, health checks and reflection.

Needs the extra `grpc`. The messages are in `inference.proto`.
"""
