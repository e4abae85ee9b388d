"""Clients of `serve_gpu.py`: one connection each, the next request after the answer.

    python _gpu_load.py http|grpc HOST:PORT MODEL ROWS.npz CLIENTS SECONDS FIRST [ANSWERS]

Each request is one row. Prints JSON: when requests were answered and after how long; or with ANSWERS, so many
requests: how far the worst answer is from that of its row alone, as a share of the largest output, and how
many are nearer to the answer of another row.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

Ask = Callable[[int], Awaitable[Any]]
KINDS = {"uint8": "UINT8", "int64": "INT64"}


def tensors(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": name, "datatype": KINDS[str(array.dtype)], "shape": list(array.shape)}
        for name, array in row.items()
    ]


def http_body(row: dict[str, Any]) -> tuple[bytes, int]:
    inputs = tensors(row)
    for tensor, array in zip(inputs, row.values(), strict=True):
        tensor["parameters"] = {"binary_data_size": array.nbytes}
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return head + b"".join(array.tobytes() for array in row.values()), len(head)


def grpc_body(model: str, row: dict[str, Any]) -> bytes:
    from kindler.serve.grpc_api.messages import message

    made = message("inference.ModelInferRequest")(
        model_name=model, raw_input_contents=[array.tobytes() for array in row.values()]
    )
    for tensor in tensors(row):
        made.inputs.add(**tensor)
    packed: bytes = made.SerializeToString()
    return packed


async def http_client(where: str, model: str, rows: list[dict[str, Any]]) -> Ask:
    host, _, port = where.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 22)
    requests = []
    for row in rows:
        body, length = http_body(row)
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: {where}\r\ncontent-length: {len(body)}\r\n"
        head += f"content-type: application/octet-stream\r\ninference-header-content-length: {length}\r\n\r\n"
        requests.append(head.encode() + body)

    async def ask(number: int) -> Any:
        writer.write(requests[number])
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"\r\ncontent-length:")[2].split(None, 1)[0])
        body = await reader.readexactly(length)
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise RuntimeError(body[:500])
        skip = int(head.partition(b"inference-header-content-length:")[2].split(None, 1)[0])
        return memoryview(body)[skip:]

    return ask


async def grpc_client(channel: Any, model: str, rows: list[dict[str, Any]]) -> Ask:
    from kindler.serve.grpc_api.messages import message

    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    answer = message("inference.ModelInferResponse")
    requests = [grpc_body(model, row) for row in rows]

    async def ask(number: int) -> Any:
        return answer.FromString(await call(requests[number])).raw_output_contents[0]

    return ask


async def main() -> None:
    kind, where, model, path, clients, seconds, first, *check = sys.argv[1:]
    content = dict(np.load(path))
    expected = content.pop("expected")
    count = len(expected)
    rows = [{name: array[i : i + 1] for name, array in content.items()} for i in range(count)]
    channel: Any = None
    if kind == "grpc":
        import grpc

        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.aio.insecure_channel(where, options=unlimited)
        asks = [await grpc_client(channel, model, rows)] * int(clients)
    else:
        asks = [await http_client(where, model, rows) for _ in range(int(clients))]
    answered: list[tuple[float, float]] = []
    worst, mixed, done = 0.0, 0, 0
    end = time.time() + float(seconds)

    async def measure(ask: Ask, number: int) -> None:
        while time.time() < end:
            started = time.perf_counter()
            await ask(number % count)
            answered.append((time.time(), time.perf_counter() - started))
            number += 1

    async def compare(ask: Ask, number: int) -> None:
        nonlocal worst, mixed, done
        scales = np.abs(expected).max()
        while done < int(check[0]):
            done += 1
            own = number * 7 % count
            found = np.frombuffer(await ask(own), np.float32)
            apart = np.abs(expected - found).max(axis=1)
            worst = max(worst, float(apart[own] / scales))
            mixed += int(apart.argmin()) != own
            number += 1

    work = compare if check else measure
    await asyncio.gather(*(work(ask, int(first) + 31 * i) for i, ask in enumerate(asks)))
    if channel is not None:
        await channel.close()
    if check:
        print(json.dumps({"asked": done, "worst": worst, "mixed": mixed}))
    else:
        print(json.dumps({"when": [when for when, _ in answered], "took": [took for _, took in answered]}))


if __name__ == "__main__":
    asyncio.run(main())
