"""What a program of TensorFlowOnSpark's knows of its node."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from kindler.cluster.context import Context
from kindler.compat.tensorflowonspark.TFNode import DataFeed, NodeManager, hdfs_path
from kindler.errors import ConfigError

__all__ = ["TFNodeContext"]


class TFNodeContext:
    """The `ctx` of `map_fun(args, ctx)`, with TensorFlowOnSpark's names."""

    def __init__(
        self,
        executor_id: int = 0,
        job_name: str = "",
        task_index: int = 0,
        cluster_spec: Mapping[str, list[str]] | None = None,
        defaultFS: str = "file://",
        working_dir: str = ".",
        mgr: Any = None,
        tmp_socket: Any = None,
        *,
        context: Context | None = None,
    ) -> None:
        self.worker_num = executor_id
        self.executor_id = executor_id
        self.job_name = job_name
        self.task_index = task_index
        self.cluster_spec = dict(cluster_spec or {})
        self.num_workers = sum(len(self.cluster_spec.get(role, ())) for role in ("master", "chief", "worker"))
        self.defaultFS = defaultFS
        self.working_dir = working_dir
        self.mgr = mgr
        self.tmp_socket = tmp_socket
        self._context = context

    @classmethod
    def of(cls, context: Context, *, hold_port: bool, master_node: str = "chief") -> TFNodeContext:
        """That of a node of a cluster, whose first node has the role `master_node`."""
        names = {"chief": master_node}
        if master_node != "chief" and "TF_CONFIG" in os.environ:
            os.environ["TF_CONFIG"] = os.environ["TF_CONFIG"].replace('"chief"', json.dumps(master_node))
        return cls(
            executor_id=context.rank,
            job_name=names.get(context.role, context.role),
            task_index=context.task_index,
            cluster_spec={names.get(role, role): nodes for role, nodes in context.cluster_spec.items()},
            defaultFS=context.default_fs,
            working_dir=os.getcwd(),
            mgr=NodeManager(context.data_feed),
            tmp_socket=_HeldPort(context) if hold_port else None,
            context=context,
        )

    def absolute_path(self, path: str) -> str:
        """A path with a scheme; see `TFNode.hdfs_path`."""
        return hdfs_path(self, path)

    def get_data_feed(
        self,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> DataFeed:
        """The rows that `TFCluster.train` and `inference` push to this node."""
        return DataFeed(self.mgr, train_mode, qname_in, qname_out, input_mapping)

    def export_saved_model(self, model: Any, export_dir: str, *_: Any, **__: Any) -> str:
        """Write a SavedModel, once for the whole cluster."""
        return self._running().export_saved_model(model, export_dir)

    def start_cluster_server(self, num_gpus: int = 1, rdma: bool = False) -> Any:
        """As in TensorFlowOnSpark with TensorFlow 2: it is not available."""
        raise ConfigError("start_cluster_server is of TensorFlow 1.\nHint: tf.distribute reads TF_CONFIG.")

    def release_port(self) -> None:
        """Let go of the port that is held for this node."""
        if self.tmp_socket is not None:
            self.tmp_socket.close()
            self.tmp_socket = None

    def _running(self) -> Context:
        if self._context is None:
            raise ConfigError("this context is of no running cluster.")
        return self._context


class _HeldPort:
    """The port that is held for a node, as the socket that TensorFlowOnSpark would have."""

    def __init__(self, context: Context) -> None:
        self._context = context
        address, _, port = context.cluster_spec[context.role][context.task_index].rpartition(":")
        self._name = (address.strip("[]"), int(port))

    def getsockname(self) -> tuple[str, int]:
        return self._name

    def close(self) -> None:
        self._context.release_ports()
