"""A broker in a simulated world, as far as the runtime uses kombu: queues, leases, broken connections.

"redis" knows of no connection that broke: a task whose lease is not renewed goes back to its queue, and one
that was just handed out when its worker ended is lost. "amqp" gives back what a lost connection has not
acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import kombu.exceptions

from kindler.runtime import broker, broker_worker, transports
from tests.unit.simulation import world as simulated
from tests.unit.simulation.world import Process, Task, world

NOTICES_S = 10.0  # RabbitMQ, that a worker gives no sign of life


class Broker:
    def __init__(self, kind: str, lease_s: float) -> None:
        self.kind = kind
        self.lease_s = lease_s
        self.queues: dict[str, deque[Message]] = {}
        self.unacknowledged: dict[str, tuple[Message, _Connection]] = {}
        self.index: dict[str, float] = {}  # by tag, when a lease was renewed
        self.connections: list[_Connection] = []
        self.nodes: dict[str, Any] = {}
        self.is_down = False
        self.waiters: list[Task] = []
        self.tags = 0

    def put(self, queue: str, message: Message) -> None:
        self.queues.setdefault(queue, deque()).append(message)
        for task in list(self.waiters):
            task.wake()

    def give_back(self, tag: str) -> None:
        message, _ = self.unacknowledged.pop(tag)
        self.index.pop(tag, None)
        world().say(f"the broker gives {message.name} back to its queue")
        self.put(message.queue, message.again())

    def restore(self) -> None:
        for tag, renewed in list(self.index.items()):
            if renewed + self.lease_s < simulated.clock.time() and tag in self.unacknowledged:
                self.give_back(tag)

    def acknowledge(self, tag: str) -> None:
        if tag in self.unacknowledged:
            world().scenario.acknowledged(self.unacknowledged[tag][0].name)
        self.unacknowledged.pop(tag, None)
        self.index.pop(tag, None)

    def lost(self, connection: _Connection) -> None:
        """A connection is over; its process may learn of it later."""
        connection.is_broken = True
        if connection in self.connections:
            self.connections.remove(connection)
        if self.kind == "amqp":
            for tag, (_, owner) in list(self.unacknowledged.items()):
                if owner is connection:
                    self.give_back(tag)
        for task in list(self.waiters):
            task.wake()

    def process_ended(self, process: Process) -> None:
        for connection in [one for one in self.connections if one.process is process]:
            self.lost(connection)

    def check(self, connection: _Connection) -> None:
        if self.is_down or connection.is_broken:
            connection.is_broken = True
            raise ConnectionResetError("the connection to the broker is lost")

    def call(self, connection: _Connection, effect: Callable[[], Any]) -> Any:
        """A request and its answer, either of which may get lost."""
        for number in range(2):
            world().sleep(0.001 + world().random.random() ** 6 * 0.3)
            self.check(connection)
            if number == 0:
                result = effect()
        return result


class Message:
    content_type = "application/x-kindler-frame"

    def __init__(self, queue: str, body: bytes, headers: Any, properties: dict[str, Any]) -> None:
        self.queue = queue
        self.body = body
        self.headers = headers
        self.properties = properties
        self.name = str(properties.get("correlation_id"))
        self.delivery_info = {"routing_key": queue, "redelivered": False}
        self.delivery_tag = ""
        self.channel: Any = None

    def again(self) -> Message:
        copy = Message(self.queue, self.body, self.headers, self.properties)
        copy.delivery_info["redelivered"] = True
        return copy

    def reject(self) -> None:
        self.channel.basic_ack(self.delivery_tag)


class _Connection:
    qos_semantics_matches_spec = True
    connection_errors = (ConnectionError,)
    channel_errors = (KeyError,)

    def __init__(self, url: str, **_: Any) -> None:
        self.broker: Broker = world().scenario.broker
        self.process = world().current.process
        self.is_broken = False
        self.is_open = False
        self.consumers: list[_Consumer] = []

    @property
    def connected(self) -> bool:
        return self.is_open and not self.is_broken

    @property
    def client(self) -> _Connection:
        return self

    def ensure_connection(self, **_: Any) -> None:
        world().sleep(0.01)
        if self.broker.is_down:
            raise ConnectionRefusedError("the broker is not there")
        self.is_open, self.is_broken = True, False
        self.broker.connections.append(self)

    def channel(self) -> _Channel:
        if not self.is_open:
            self.ensure_connection()
        return _Channel(self)

    default_channel = property(channel)

    def drain_events(self, timeout: float) -> None:
        deadline = world().now + timeout
        while True:
            self.broker.check(self)
            for consumer in self.consumers:
                if consumer.take():
                    return
            left = deadline - world().now
            if left <= 0:
                raise TimeoutError
            world().block(self.broker.waiters, left)

    def heartbeat_check(self) -> None:
        self.broker.check(self)

    def release(self) -> None:
        self.is_open = False
        self.broker.lost(self)

    def Pool(self, _: int) -> Any:
        return SimpleNamespace(force_close_all=lambda: None)

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Channel:
    unacked_index_key = "index"

    def __init__(self, connection: _Connection) -> None:
        self.owner = connection
        self.connection = SimpleNamespace(client=connection)
        self.held: set[str] = set()
        self.since = world().now
        self.qos = self

    def __enter__(self) -> _Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        pass

    def restore_visible(self, **_: Any) -> None:
        if world().now - self.since > self.owner.broker.lease_s:  # as `transports._QoS` does
            self.owner.broker.call(self.owner, self.owner.broker.restore)

    def basic_ack(self, tag: str) -> None:
        self.owner.broker.call(self.owner, lambda: self.owner.broker.acknowledge(tag))
        self.held.discard(tag)

    def queue_declare(self, name: str, **_: Any) -> Any:
        counted = self.owner.broker.call(self.owner, lambda: len(self.owner.broker.queues.get(name, ())))
        return SimpleNamespace(message_count=counted)

    @contextmanager
    def conn_or_acquire(self) -> Iterator[_Channel]:
        yield self

    def zadd(self, key: str, leases: dict[str, float], *, xx: bool = False) -> None:
        known = self.owner.broker.index
        self.owner.broker.call(
            self.owner,
            lambda: known.update({tag: at for tag, at in leases.items() if tag in known or not xx}),
        )


class _Consumer:
    def __init__(
        self, channel: _Channel, queues: Sequence[Any], *, on_message: Any, no_ack: bool = False
    ) -> None:
        self.channel = channel
        self.names = [queue.name for queue in queues]
        self.on_message = on_message
        self.no_ack = no_ack
        self.prefetch = 1_000

    def qos(self, *, prefetch_count: int, apply_global: bool) -> None:
        self.prefetch = prefetch_count

    def consume(self) -> None:
        self.channel.owner.consumers.append(self)

    def cancel(self) -> None:
        if self in self.channel.owner.consumers:
            self.channel.owner.consumers.remove(self)

    def take(self) -> bool:
        connection, there = self.channel.owner, self.channel.owner.broker
        queue = next((there.queues[name] for name in self.names if there.queues.get(name)), None)
        if queue is None or len(self.channel.held) >= self.prefetch:
            return False
        message = queue.popleft()
        if there.kind == "redis":  # it has gone out, and nobody has noted to whom
            world().sleep(0.0005 + world().random.random() ** 6 * 0.02)
            there.check(connection)
        there.tags += 1
        message.delivery_tag, message.channel = str(there.tags), self.channel
        if not self.no_ack:
            there.unacknowledged[message.delivery_tag] = message, connection
            there.index[message.delivery_tag] = simulated.clock.time()
            self.channel.held.add(message.delivery_tag)
        self.on_message(message)
        return True


class _Producer:
    def __init__(self, channel: _Channel) -> None:
        self.channel = channel

    def __enter__(self) -> _Producer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def publish(self, body: bytes, *, routing_key: str, headers: Any = None, **properties: Any) -> None:
        connection = self.channel.owner

        def put() -> None:
            message = Message(routing_key, body, headers or {}, properties)
            connection.broker.put(routing_key, message)

        for attempt in range(3 if properties.get("retry") else 1):
            try:
                if not connection.connected:
                    connection.ensure_connection()
                connection.broker.call(connection, put)
                return
            except ConnectionError:
                if attempt == 2 or not properties.get("retry"):
                    raise
                world().sleep(0.5)


class _Producers:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def acquire(self, **_: Any) -> _Producer:
        return _Producer(_Channel(_Connection("")))

    def force_close_all(self) -> None:
        pass


class _Queue:
    def __init__(self, name: str, **_: Any) -> None:
        self.name = name

    def __call__(self, channel: Any) -> Any:
        return SimpleNamespace(delete=lambda: None)


class _Mailbox:
    """Commands to all workers that listen."""

    def __init__(self, connection: _Connection) -> None:
        self._broker = connection.broker

    def abcast(self, command: str, arguments: dict[str, Any]) -> None:
        for name in self._broker.nodes:
            self._broker.put(name, Message(name, b"", {}, {"command": command, "arguments": arguments}))

    def Node(self, name: str, *, channel: _Channel, handlers: dict[str, Any]) -> Any:
        name = f"{name} {channel.owner.process.pid}"
        self._broker.nodes[name] = handlers

        def handle(_: Any, message: Message) -> None:
            handlers[message.properties["command"]](None, **message.properties["arguments"])

        def listen(channel: _Channel, callback: Any) -> _Consumer:
            consumer = _Consumer(
                channel, [_Queue(name)], on_message=lambda message: callback(None, message), no_ack=True
            )
            consumer.consume()
            return consumer

        return SimpleNamespace(handle_message=handle, listen=listen)


class _Future:
    def __init__(self) -> None:
        self.over = simulated.threads.Event()
        self._value: Any = None

    def run(self, call: Callable[[], Any]) -> None:
        self._value = call()
        self.over.set()

    def result(self) -> Any:
        return self._value


class _Pool:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, call: Callable[..., Any], *args: Any) -> _Future:
        future = _Future()
        world().current.process.spawn("a task", lambda: future.run(lambda: call(*args)))
        return future


def _wait(futures: Sequence[_Future], timeout: float) -> Any:
    return SimpleNamespace(done=futures[0].over.wait(timeout))


def substitutes(engine: Any) -> list[tuple[Any, dict[str, Any]]]:
    """What takes the places of names in the runtime's modules; `engine` is that of workers."""
    threads, clock, queues = simulated.threads, simulated.clock, simulated.queues
    ours = SimpleNamespace(
        Connection=_Connection,
        Consumer=_Consumer,
        Producer=_Producer,
        Queue=_Queue,
        Exchange=str,
        exceptions=kombu.exceptions,
        pools=SimpleNamespace(ProducerPool=_Producers),
    )
    shared = {"kombu": ours, "threading": threads, "time": clock, "queue": queues, "MAILBOX": _Mailbox}
    return [
        (broker, shared),
        (
            broker_worker,
            {**shared, "ThreadPoolExecutor": _Pool, "wait": _wait, "LocalEngine": engine},
        ),
        (transports, {"time": clock}),
    ]
