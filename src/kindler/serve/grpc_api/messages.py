"""The classes of the messages, made of the descriptors that the .proto file was compiled to.

In a pool of their own: a client of another package that has the same messages may be in the same process.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

INFERENCE = "inference.GRPCInferenceService"


@lru_cache(None)
def descriptors() -> descriptor_pool.DescriptorPool:
    files = descriptor_pb2.FileDescriptorSet.FromString(
        Path(__file__).with_name("descriptors.binpb").read_bytes()
    )
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return pool


@lru_cache(None)
def message(name: str) -> Any:
    """The class of a message, by its full name."""
    return message_factory.GetMessageClass(descriptors().FindMessageTypeByName(name))


def methods(service: str) -> dict[str, Any]:
    """The methods of a service, by name."""
    return dict(descriptors().FindServiceByName(service).methods_by_name)
