"""What a program knows about its node and of the others: the `ctx` of `main_fun(args, ctx)`."""

from __future__ import annotations

import getpass
import importlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kindler.cluster.feed import VALIDATION, DataFeed, InputMapping, KeptFeed
from kindler.cluster.feed_server import FeedServer
from kindler.data.paths import absolute, is_remote
from kindler.engine.job import GangMember, cluster_spec
from kindler.engine.worker import Worker
from kindler.errors import ConfigError, MissingExtraError
from kindler.temporary import beside

FRAMEWORKS = ("tensorflow", "torch", "jax")
TRAINING = ("chief", "worker")  # the roles that train, and are fed
Members = Sequence[GangMember]


class Context:
    """One node of a cluster.

    Attributes:
        rank: Its number among all nodes; training nodes come first.
        role: "chief", "worker", "ps" or "evaluator".
        task_index: Its number among the nodes of its role.
        size: The number of nodes.
        num_workers: The number of nodes that train: the chief and the workers.
        cluster_spec: Role -> "address:port" of each of its nodes.
        host: The name of its machine.
        gpus: The GPUs it may use, by number; empty if there are none.
        tmp: Its own folder, deleted with the cluster.
        run_id: The cluster's name.
        default_fs: The file system of paths without a scheme; "file://" is the machine's own.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        server: FeedServer | None = None,
        gpus: tuple[str, ...] = (),
        default_fs: str = "file://",
    ) -> None:
        self.rank = worker.rank
        self.role = worker.role
        self.task_index = worker.index
        self.size = worker.size
        self.num_workers = sum(member.role in TRAINING for member in worker.members)
        self.cluster_spec: dict[str, list[str]] = worker.cluster_spec
        self.host = worker.host
        self.gpus = gpus
        self.tmp = str(worker.scratch / "program")
        self.run_id = worker.run_id
        self.default_fs = default_fs
        self._worker = worker
        self._server = server
        self._feeds: dict[str, DataFeed] = {}
        Path(self.tmp).mkdir(exist_ok=True)

    def __repr__(self) -> str:
        return (
            f"Context(rank={self.rank}, role={self.role!r}, task_index={self.task_index}, size={self.size})"
        )

    @property
    def is_chief(self) -> bool:
        """Whether this node saves and reports: the chief, or the first worker if there is none."""
        return self.rank == 0

    @property
    def training_ended(self) -> bool:
        """On an evaluator: whether all training nodes have returned. It then has `evaluator_grace_s` left."""
        return self._worker.others_ended.is_set()

    def wait_for_training(self, timeout_s: float) -> bool:
        """On an evaluator, wait for training to end.

        Returns whether it ended within `timeout_s`:

            while not ctx.wait_for_training(60):
                evaluate(newest_checkpoint())
            evaluate(newest_checkpoint())
        """
        return self._worker.others_ended.wait(timeout_s)

    @property
    def jax_distributed(self) -> dict[str, Any]:
        """The arguments of `jax.distributed.initialize`."""
        return {
            "coordinator_address": self._worker.members[0].endpoints[0],
            "num_processes": self.num_workers,
            "process_id": self.rank,
        }

    def data_feed(
        self,
        name: str = "input",
        *,
        input_mapping: InputMapping | None = None,
        in_step: bool = False,
    ) -> DataFeed:
        """Return the feed of rows that `cluster.train` or `cluster.inference` push to this node.

        Args:
            name: Which feed; "validation" is the data of `train(validation=...)`, which the node keeps.
            input_mapping: Column -> name in a batch, or just columns, to get dicts of arrays; None gives
                rows.
            in_step: Whether all nodes stop when the first one runs out of rows, for programs that wait for
                each other at every batch. All nodes of the cluster must train.

        Raises:
            ConfigError: The cluster, or this node, receives no data.
        """
        if self._server is None:
            raise ConfigError(
                f"this node ({self.role}) receives no data.\n"
                'Hint: run(..., input_mode="spark") feeds the chief and the workers.'
            )
        if in_step and self.num_workers != self.size:
            raise ConfigError(
                f"in_step=True needs a cluster in which every node trains; {self.size - self.num_workers} of"
                " this one are parameter servers or evaluators."
            )
        if name not in self._feeds:
            kind = KeptFeed if name == VALIDATION else DataFeed
            self._feeds[name] = kind(self._server, name, input_mapping=input_mapping, in_step=in_step)
        return self._feeds[name]

    def absolute_path(self, path: str) -> str:
        """Return a path that means the same on all nodes, on the default file system if it has no scheme."""
        if is_remote(path) or not is_remote(self.default_fs):
            return absolute(path)
        if path.startswith("/"):
            return self.default_fs.rstrip("/") + path
        return f"{self.default_fs.rstrip('/')}/user/{getpass.getuser()}/{path}"

    def serve(self) -> None:
        """Run a TensorFlow server on this node until the cluster ends.

        For workers and parameter servers of a coordinating chief (`run(..., until="chief")`).
        """
        distribute: Any = importlib.import_module("tensorflow").distribute
        config = json.loads(tf_config(self._worker.members, self.rank))
        distribute.Server(config["cluster"], self.role, self.task_index, protocol="grpc").join()

    def release_ports(self) -> None:
        """Release the port held for this node, for a program that binds it without SO_REUSEADDR."""
        self._worker.release_ports()

    def barrier(self) -> None:
        """Wait for all nodes, parameter servers and evaluators included."""
        self._worker.barrier()

    def export_saved_model(self, model: Any, export_dir: str) -> str:
        """Write a Keras model or a `tf.Module` as a SavedModel, once.

        All training nodes should call it: under a distribution strategy they save together. Nodes other than
        the chief write to a temporary folder.

        Returns:
            The path that this node wrote to.
        """
        target = self.absolute_path(export_dir)
        if not self.is_chief:
            place = str(Path(self.tmp) / "export")
            shutil.rmtree(place, ignore_errors=True)
            _save(model, place)
            return place
        if is_remote(target):
            place = str(Path(self.tmp) / "export")
            _save(model, place)
            _upload(place, target)
            return target
        with beside(target, overwrite=True) as folder:
            _save(model, str(folder))
        return target

    def check_answered(self) -> None:
        """Raise DataError if the program left rows of an inference unanswered."""
        for feed in self._feeds.values():
            feed.check_answered()


def _save(model: Any, folder: str) -> None:
    if hasattr(model, "export") and type(model).__module__.partition(".")[0] not in (
        "tensorflow",
        "tf_keras",
    ):
        model.export(folder)
        return
    saved_model: Any = importlib.import_module("tensorflow").saved_model
    saved_model.save(model, folder)


def _upload(folder: str, target: str) -> None:
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError as exc:
        raise MissingExtraError(what=f"writing to {target}", package="fsspec", extra="remote") from exc
    system, place = url_to_fs(target)
    system.put(f"{folder}/", place, recursive=True)


def variables(members: Members, rank: int, framework: str | None) -> dict[str, str]:
    """Variables by which the nodes of a framework's program find each other."""
    return {} if framework is None else _VARIABLES[framework](members, rank)


def _jax(members: Members, rank: int) -> dict[str, str]:
    training = _training(members)
    meeting = {
        "JAX_COORDINATOR_ADDRESS": members[0].endpoints[0],
        "JAX_NUM_PROCESSES": str(len(training)),
    }
    return {**meeting, "JAX_PROCESS_ID": str(rank)} if rank in training else meeting


def _torch(members: Members, rank: int) -> dict[str, str]:
    training = _training(members)
    meeting = {"MASTER_ADDR": members[0].address, "MASTER_PORT": str(members[0].ports[0])}
    if rank not in training:
        return meeting
    neighbours = [other for other in training if members[other].host == members[rank].host]
    return {
        **meeting,
        "RANK": str(rank),
        "WORLD_SIZE": str(len(training)),
        "LOCAL_RANK": str(neighbours.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(neighbours)),
    }


_VARIABLES: dict[str, Callable[[Members, int], dict[str, str]]] = {
    "tensorflow": lambda members, rank: {"TF_CONFIG": tf_config(members, rank)},
    "jax": _jax,
    "torch": _torch,
}


def _training(members: Members) -> list[int]:
    return [member.rank for member in members if member.role in TRAINING]


def tf_config(members: Members, rank: int) -> str:
    """TensorFlow's description of the cluster for one node; it must not list the evaluator.

    >>> members = [GangMember(0, "chief", 0, "a", "10.0.0.1", (4000,))]
    >>> tf_config(members, 0)
    '{"cluster": {"chief": ["10.0.0.1:4000"]}, "task": {"type": "chief", "index": 0}}'
    """
    spec = {role: places for role, places in cluster_spec(members).items() if role != "evaluator"}
    me = members[rank]
    return json.dumps({"cluster": spec, "task": {"type": me.role, "index": me.index}})
